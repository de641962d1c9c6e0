"""2:4 against unstructured sparsity, three scores each, on every linear layer of a model."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor
from transformers import PreTrainedModel

from inferlab.calibration.statistics import Calibration
from inferlab.errors import InferlabError, suggestion
from inferlab.evaluation.perplexity import LOGIT_ROWS, check_context
from inferlab.models.adapters import LinearGroup, layer_names, linear_groups
from inferlab.params import section
from inferlab.pruning.checkpoint import Matrix, check_columns, matrices
from inferlab.pruning.patterns import Pattern, TwoFour, Unstructured
from inferlab.pruning.scores import CompensationParams, Score, prune
from inferlab.quantization.gptq import output_error
from inferlab.run import progress
from inferlab.store import Checkpoint

PATTERNS: dict[str, Pattern] = {"2_4": TwoFour(), "unstructured": Unstructured(TwoFour.sparsity)}
SCORES: tuple[Score, ...] = ("magnitude", "activation", "sparsegpt")


@section
class SemiStructuredParams:
    """The section `semi_structured`."""

    layer: str
    windows: Annotated[int, Field(ge=2)]
    tokens: Annotated[int, Field(ge=2)]
    batch: Annotated[int, Field(gt=0)]
    compensation: CompensationParams


@dataclass(frozen=True)
class Quality:
    """`nats`: mean −log p of a window's tokens, fp64 [windows]; `accuracy`: of the next token."""

    nats: Tensor
    accuracy: float

    @property
    def perplexity(self) -> float:
        """exp of the mean nats of a token."""
        return math.exp(float(self.nats.mean()))


@dataclass(frozen=True)
class Arm:
    """One pattern with one score: its quality, and one row a group of layers."""

    pattern: str
    score: Score
    quality: Quality
    layers: list[dict[str, Any]]

    def row(self, dense: Quality) -> dict[str, Any]:
        """The arm in one row; ± is the standard error over windows of the paired difference."""
        over = self.quality.nats - dense.nats
        return {
            "arm": f"{self.pattern} {self.score}",
            "pattern": self.pattern,
            "score": self.score,
            "token_perplexity": self.quality.perplexity,
            "nats_over_dense": float(over.mean()),
            "nats_over_dense_se": float(over.std() / math.sqrt(len(over))),
            "next_token_accuracy": self.quality.accuracy,
            "weight_error": mean(row["weight_error"] for row in self.layers),
            "output_error": mean(row["output_error"] for row in self.layers),
        }


def heldout(windows: Tensor, params: SemiStructuredParams) -> Tensor:
    """The windows [windows, tokens] to score on. Raises InferlabError when there are fewer."""
    if len(windows) < params.windows or windows.shape[1] < params.tokens:
        raise InferlabError(
            f"semi_structured wants {params.windows} windows of {params.tokens} tokens, but "
            f"{len(windows)} of {windows.shape[1]} were prepared; "
            "lower semi_structured.windows or .tokens, or raise prepare.heldout_windows"
        )
    return windows[: params.windows, : params.tokens].long()


def group_of(checkpoint: Checkpoint, layer: str) -> LinearGroup:
    """The group that the layer belongs to.

    Raises InferlabError when the layer is unknown, or when 2:4 does not fit one of the model's.
    """
    groups = linear_groups(checkpoint)
    check_columns(checkpoint, TwoFour())
    for group in groups:
        if layer in group.layers:
            return group
    raise InferlabError(
        f"semi_structured.layer: the model has no linear layer {layer!r}; "
        f"{suggestion(layer, layer_names(groups))}"
    )


def compare(
    checkpoint: Checkpoint,
    calibration: Calibration,
    model: PreTrainedModel,
    windows: Tensor,
    params: SemiStructuredParams,
) -> tuple[Quality, list[Arm]]:
    """The dense model and every pattern with every score; `model` is left pruned."""
    dense = score_windows(model, windows, params.batch)
    arms = []
    for (name, pattern), score in itertools.product(PATTERNS.items(), SCORES):
        rows = []
        for matrix in matrices(checkpoint, calibration):
            pruned = prune(matrix.weight, matrix.statistics, pattern, score, params.compensation)
            for layer, weight in matrix.split(pruned.weight).items():
                model.get_submodule(layer).weight.data.copy_(weight)
            rows.append(_layer_row(matrix, pruned.weight, name, score))
        arms.append(Arm(name, score, score_windows(model, windows, params.batch), rows))
    return dense, arms


@torch.inference_mode()
def score_windows(model: PreTrainedModel, windows: Tensor, batch: int) -> Quality:
    """Perplexity and next-token accuracy on `windows` [windows, tokens], one pass each."""
    check_context(model, windows.shape[1], "held-out windows")
    head = model.get_output_embeddings()
    nats, hits = [], []
    for chunk in progress(windows.split(batch), "perplexity"):
        states = model.base_model(input_ids=chunk, use_cache=False)[0][:, :-1].flatten(0, 1)
        wanted = chunk[:, 1:].flatten()
        for rows, targets in zip(states.split(LOGIT_ROWS), wanted.split(LOGIT_ROWS), strict=True):
            logits = head(rows).float()
            nats.append(torch.nn.functional.cross_entropy(logits, targets, reduction="none"))
            hits.append(logits.argmax(1) == targets)
    by_window = torch.cat(nats).view(len(windows), -1).double().mean(1)
    return Quality(by_window, float(torch.cat(hits).double().mean()))


def two_four_by_chance(weight: Tensor) -> float:
    """Of a matrix [rows, columns] pruned by magnitude anywhere: the share of fours that keep two
    weights or fewer, so that 2:4 would remove nothing more from them."""
    kept = PATTERNS["unstructured"].keep(weight.abs()).unflatten(1, (-1, 4)).sum(2)
    return float((kept <= 2).double().mean())


def summary(dense: Quality, arms: Sequence[Arm], weight: Tensor) -> dict[str, float]:
    """The metrics: perplexity of each arm (magnitude has no suffix), accuracy of the best ones.

    `weight` [rows, columns] is the matrix that `two_four_by_chance_share` is of.
    """
    values = {"token_perplexity_dense": dense.perplexity}
    for arm in arms:
        suffix = "" if arm.score == "magnitude" else f"_{arm.score}"
        values[f"token_perplexity_{arm.pattern}{suffix}"] = arm.quality.perplexity
    values["next_token_accuracy_dense"] = dense.accuracy
    for arm in arms:
        if arm.score == "sparsegpt":
            values[f"next_token_accuracy_{arm.pattern}_sparsegpt"] = arm.quality.accuracy
    return values | {"two_four_by_chance_share": two_four_by_chance(weight)}


def _layer_row(matrix: Matrix, pruned: Tensor, pattern: str, score: Score) -> dict[str, Any]:
    """Errors of one group, relative to the energy of its weights and of its outputs."""
    hessian = matrix.statistics["hessian"]
    energy = output_error(matrix.weight, torch.zeros_like(pruned), hessian)
    lost = (matrix.weight - pruned).square().sum() / matrix.weight.square().sum()
    return {
        "layer": matrix.group.name,
        "block": matrix.group.block,
        "kind": matrix.group.name.rpartition(".")[2],
        "pattern": pattern,
        "score": score,
        "weight_error": float(lost),
        "output_error": output_error(matrix.weight, pruned, hessian) / max(energy, 1e-30),
    }
