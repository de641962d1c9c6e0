"""The variant `draft`: some of the model's blocks, taught the whole model's predictions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from inferlab.data.tables import Row
from inferlab.distillation.acceptance import Agreement, target_states
from inferlab.distillation.depth import (
    Trunk,
    evenly_spaced,
    importances,
    most_important,
    removed_in_turn,
)
from inferlab.distillation.shallow import Check, DistillationParams, Exam
from inferlab.errors import InferlabError
from inferlab.models.runtime.config import LlamaConfig
from inferlab.params import section
from inferlab.speculative.closed_form import expected_tokens

MEASURES = ("block_influence", "loss_rise", "kl_rise")
POSITION = "evenly_spaced"
DRAFT_LENGTH = 4
"""Tokens drafted for each call of the target, in the metrics."""


@section
class TextParams:
    """Some windows of a split, each cut to its first `tokens`."""

    windows: Annotated[int, Field(ge=2)]
    tokens: Annotated[int, Field(ge=2)]


@section
class DecodeParams:
    """How the costs of a decoded token are compared: models in turn, the medians of `rounds`."""

    prompt_tokens: Annotated[int, Field(ge=1)]
    new_tokens: Annotated[int, Field(ge=1)]
    rounds: Annotated[int, Field(ge=1)]


@section
class DraftParams:
    """The section `draft`."""

    keep: Annotated[int, Field(ge=1)]
    criterion: Literal["block_influence", "loss_rise", "kl_rise", "in_turn", "evenly_spaced"]
    candidates: Annotated[int, Field(ge=1)]
    importance: TextParams
    heldout: TextParams
    batch: Annotated[int, Field(ge=1)]
    distillation: DistillationParams
    decode: DecodeParams


@dataclass(frozen=True)
class Texts:
    """Tokens [windows, length] to measure importance on, to score on, and to learn from."""

    measured: Tensor
    heldout: Tensor
    training: Tensor


@dataclass(frozen=True)
class Selection:
    """What each way of choosing keeps, and how that does untrained.

    `layers`: a row a block. `before`: by way. `base`: the target scored as its own draft.
    """

    layers: list[Row]
    kept: dict[str, tuple[int, ...]]
    before: dict[str, Agreement]
    base: Agreement


def check(params: DraftParams, config: LlamaConfig) -> None:
    """Raises InferlabError when the draft would be no smaller, or windows exceed the context."""
    if params.keep >= config.layers:
        raise InferlabError(
            f"draft.keep must be below {config.layers}, the layers of models/base; "
            f"got {params.keep} (params.yaml: draft.keep)"
        )
    parts = {"importance": params.importance, "heldout": params.heldout}
    for name, part in (parts | {"distillation": params.distillation}).items():
        if part.tokens > config.context:
            raise InferlabError(
                f"draft.{name}.tokens is {part.tokens}, but the model's context is "
                f"{config.context} tokens (params.yaml: draft.{name}.tokens)"
            )


def cut(prepared: Mapping[str, Tensor], params: DraftParams) -> Texts:
    """The texts of the study, of what was prepared: windows [windows, length] a split, and the
    training text [tokens]. Raises InferlabError when there is too little of any."""
    return Texts(
        first_tokens(prepared["calibration"], params.importance, "importance"),
        first_tokens(prepared["heldout"], params.heldout, "heldout"),
        training_windows(prepared["training"], params.distillation),
    )


def first_tokens(prepared: Tensor, params: TextParams, name: str) -> Tensor:
    """The first tokens [windows, tokens] of what was prepared. `name`: of the section's part.

    Raises InferlabError when there are fewer windows, or shorter ones.
    """
    if len(prepared) < params.windows or prepared.shape[1] < params.tokens:
        raise InferlabError(
            f"draft.{name} wants {params.windows} windows of {params.tokens} tokens, but "
            f"{len(prepared)} of {prepared.shape[1]} were prepared; lower draft.{name}.windows or "
            ".tokens, or raise those of prepare (params.yaml)"
        )
    return prepared[: params.windows, : params.tokens]


def training_windows(stream: Tensor, params: DistillationParams) -> Tensor:
    """Windows [windows, tokens] spread evenly over the training text [tokens], none overlapping.

    Raises InferlabError when the text is too short.
    """
    whole = stream[: len(stream) // params.tokens * params.tokens].view(-1, params.tokens)
    if len(whole) < params.windows:
        raise InferlabError(
            f"draft.distillation wants {params.windows} windows of {params.tokens} tokens, but the "
            f"training text has {len(stream)} tokens; lower draft.distillation.windows, or raise "
            "prepare.training_tokens (params.yaml)"
        )
    places = torch.linspace(0, len(whole) - 1, params.windows).round().long()
    return whole[places]


def choices(
    trunk: Trunk, tokens: Tensor, params: DraftParams
) -> tuple[list[Row], dict[str, tuple[int, ...]]]:
    """How much each block matters on tokens [windows, length], and what each way would keep."""
    rows = importances(trunk, tokens)
    found = {name: most_important(rows, name, params.keep) for name in MEASURES}
    found["in_turn"] = removed_in_turn(trunk, tokens, params.keep, params.candidates)
    found[POSITION] = evenly_spaced(len(rows), params.keep)
    kept = found[params.criterion]
    return [row | {"kept": int(row["layer"] in kept)} for row in rows], found


def make_exam(trunk: Trunk, texts: Texts, params: DraftParams) -> Exam:
    """The held-out text with the target's states on it."""
    return Exam(texts.heldout, target_states(trunk, texts.heldout, params.batch), params.batch)


def select(trunk: Trunk, texts: Texts, exam: Exam, params: DraftParams) -> Selection:
    """Choose the blocks in every way, and score each choice before anything is trained."""
    layers, kept = choices(trunk, texts.measured, params)
    before = {name: exam.score(trunk, trunk.stack.only(own)) for name, own in kept.items()}
    return Selection(layers, kept, before, exam.score(trunk, trunk.stack))


def arm_table(selection: Selection, after: Agreement, name: str) -> list[Row]:
    """The draft, which keeps what `name` chose, and each choice before distillation; a row each."""
    rows = [
        {"arm": f"{choice}, not trained", **_arm(selection.kept[choice], found)}
        for choice, found in selection.before.items()
    ]
    return [{"arm": f"{name}, distilled", **_arm(selection.kept[name], after)}, *rows]


def step_table(before: Agreement, checks: Sequence[Check]) -> list[Row]:
    """Acceptance and perplexity of the draft over its training, from step 0."""
    later = [{"step": one.step, **one.found.row(), "kl": one.loss} for one in checks]
    return [{"step": 0, **before.row(), "kl": ""}, *later]


def summary(selection: Selection, after: Agreement, name: str) -> dict[str, float]:
    """The quality among the metrics; `name`: the way in which the draft's blocks were chosen."""
    start, position = selection.before[name], selection.before[POSITION]
    return {
        "acceptance": after.acceptance,
        "acceptance_half_width": after.half_width,
        "acceptance_before": start.acceptance,
        "acceptance_by_position_before": position.acceptance,
        "greedy_agreement": after.greedy_agreement,
        f"tokens_per_call_{DRAFT_LENGTH}": expected_tokens(after.acceptance, DRAFT_LENGTH),
        "token_perplexity": after.perplexity,
        "token_perplexity_before": start.perplexity,
        "token_perplexity_base": selection.base.perplexity,
    }


def _arm(kept: Sequence[int], found: Agreement) -> Row:
    return {
        "layers": " ".join(map(str, kept)),
        **found.row(),
        f"tokens_per_call_{DRAFT_LENGTH}": expected_tokens(found.acceptance, DRAFT_LENGTH),
    }
