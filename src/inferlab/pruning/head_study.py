"""33.9: heads removed by importance, at random and the wrong way round, then recovery."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from joblib import Parallel, delayed
from pydantic import Field
from torch import Tensor

from inferlab.distillation.training import device
from inferlab.errors import InferlabError
from inferlab.models.encoder import TextClassifier
from inferlab.params import section
from inferlab.pruning.heads import importance, least_important, remove_heads
from inferlab.pruning.recovery import Material, RecoveryParams, classify, retrain

SCORES = ("gradient", "taylor")
LAYER_SHARE = 0.5
"""Of one layer's heads, removed from it alone to see how much that layer matters."""

Positive = Annotated[int, Field(gt=0)]
Shares = Annotated[tuple[Annotated[float, Field(gt=0, lt=1)], ...], Field(min_length=1)]


@section
class HeadPruningParams:
    """The section `head_pruning`."""

    shares: Shares
    samples: Annotated[int, Field(ge=3)]
    sample_documents: Positive
    draws: Annotated[int, Field(ge=2)]
    test_documents: Annotated[int, Field(ge=0)]
    max_tokens: Annotated[int, Field(ge=3)]
    jobs: Annotated[int, Field(ge=0)]
    backend: Literal["loky", "threading"]
    latency_batches: Annotated[tuple[Positive, ...], Field(min_length=1)]
    latency_rounds: Positive
    recovery: RecoveryParams


@dataclass(frozen=True)
class Arm:
    """What is removed: booleans [layers, heads]; `choice` says by which rule, `draw` which try."""

    choice: str
    share: float
    draw: int
    removed: Tensor


@dataclass(frozen=True)
class Outcome:
    """Logits fp32 [documents, labels] right after the removal and after recovery."""

    arm: Arm
    pruned: Tensor
    recovered: Tensor


def sample_importance(
    model: TextClassifier, material: Material, params: HeadPruningParams
) -> dict[str, Tensor]:
    """Each score over disjoint samples of training documents: [samples, layers, heads].

    Raises InferlabError when the teacher has too few training documents.
    """
    size, available = params.sample_documents, len(material.train_labels)
    if params.samples * size > available:
        raise InferlabError(
            f"head_pruning wants {params.samples} samples of {size} training documents, but the "
            f"teacher has {available}; lower head_pruning.sample_documents"
        )
    found = []
    for number in range(params.samples):
        own = slice(number * size, (number + 1) * size)
        found.append(importance(model, material.train_tokens[own], material.train_labels[own]))
    return {name: torch.stack([one[name] for one in found]) for name in SCORES}


def make_arms(
    scores: Mapping[str, Tensor], shares: Sequence[float], draws: int, seed: int
) -> list[Arm]:
    """Every removal; scores [samples, layers, heads] are averaged over samples.

    `most_important` turns the gradient's order round; `random` draws scores anew each time. Each
    layer keeps at least one head. Raises InferlabError when a share does not allow that.
    """
    means = {name: scores[name].mean(0) for name in SCORES}
    layers, heads = means["gradient"].shape
    arms = [Arm("whole", 0.0, 0, torch.zeros(layers, heads, dtype=torch.bool))]
    generator = torch.Generator().manual_seed(seed)
    for share in shares:
        chosen = [*means.items(), ("most_important", -means["gradient"])]
        arms += [Arm(name, share, 0, least_important(one, share)) for name, one in chosen]
        for draw in range(draws):
            luck = torch.rand(layers, heads, generator=generator)
            arms.append(Arm("random", share, draw, least_important(luck, share)))
    return arms


def try_all(
    teacher: TextClassifier,
    arms: Sequence[Arm],
    material: Material,
    params: HeadPruningParams,
    seed: int,
    threads: int,
) -> list[Outcome]:
    """Every arm, side by side in one thread each; all recover on the same documents."""
    jobs = Parallel(n_jobs=params.jobs or threads, backend=params.backend)
    outcomes = jobs(delayed(try_arm)(arm, teacher, material, params.recovery, seed) for arm in arms)
    torch.set_num_threads(threads)
    return outcomes


def try_arm(
    arm: Arm, teacher: TextClassifier, material: Material, params: RecoveryParams, seed: int
) -> Outcome:
    """Remove the heads, test, retrain for one round, test again."""
    torch.set_num_threads(1)
    model = remove_heads(teacher, arm.removed).to(device())
    pruned = classify(model, material.test_tokens)
    retrain(model, material, params, 1, seed)
    return Outcome(arm, pruned, classify(model, material.test_tokens))


def layer_losses(
    teacher: TextClassifier, scores: Tensor, material: Material, params: HeadPruningParams
) -> list[float]:
    """Rise of the loss, nats a document, when one layer alone loses its less important half.

    scores: [layers, heads]. One figure a layer, over as many test documents as the samples have.
    """
    first = slice(params.samples * params.sample_documents)
    tested = material.test_tokens[first], material.test_labels[first]
    losses = []
    for layer in (None, *range(len(scores))):
        removed = torch.zeros_like(scores, dtype=torch.bool)
        if layer is not None:
            removed[layer] = least_important(scores[layer : layer + 1], LAYER_SHARE)
        losses.append(_loss(remove_heads(teacher, removed).to(device()), *tested))
    return [loss - losses[0] for loss in losses[1:]]


def _loss(model: TextClassifier, tokens: Tensor, labels: Tensor) -> float:
    return float(F.cross_entropy(classify(model, tokens), labels))
