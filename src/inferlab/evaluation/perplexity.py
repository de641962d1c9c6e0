"""Perplexity of a causal model on windows of held-out text.

Each window is scored in one pass on its own: windows do not overlap (stride = length), nothing of
one is seen by the next, and its first token is context only, so a window of n tokens gives n − 1
scores. Whether a window begins with a BOS token was decided when it was cut.
"""

import math
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from transformers import PreTrainedModel

from inferlab.errors import InferlabError
from inferlab.params import section
from inferlab.run import progress

LOGIT_ROWS = 512


@section
class EvaluateParams:
    """The section `evaluate`."""

    batch: Annotated[int, Field(gt=0)]
    batch_tokens: Annotated[int, Field(gt=0)]


@dataclass(frozen=True)
class Perplexity:
    """Negative log-likelihood of windows, in nats. All tensors: [windows]."""

    nats: Tensor
    tokens: Tensor
    words: Tensor
    bytes: Tensor

    @property
    def token(self) -> float:
        """exp of the mean nats a scored token."""
        return math.exp(float(self.nats.sum() / self.tokens.sum()))

    @property
    def word(self) -> float:
        """exp of the nats a word: comparable between tokenizers."""
        return math.exp(float(self.nats.sum() / self.words.sum()))

    @property
    def bits_per_byte(self) -> float:
        """Bits a UTF-8 byte of the scored text: comparable between tokenizers."""
        return float(self.nats.sum() / self.bytes.sum()) / math.log(2)

    @property
    def scored(self) -> int:
        """How many tokens were scored."""
        return int(self.tokens.sum())

    def by_window(self) -> list[dict[str, float]]:
        """One row a window, for plots and for intervals over windows."""
        means = (self.nats / self.tokens).tolist()
        return [
            {"window": number, "token_perplexity": math.exp(mean)}
            for number, mean in enumerate(means)
        ]


def perplexity(model: PreTrainedModel, windows: dict[str, Tensor], batch: int) -> Perplexity:
    """Score `windows` (input_ids [windows, length], words and bytes [windows]).

    Raises InferlabError when a window is longer than the model's context.
    """
    tokens = windows["input_ids"].long()
    check_context(model, tokens.shape[1], "held-out windows")
    chunks = progress(tokens.split(batch), "perplexity")
    nats = torch.cat([window_nats(model, chunk) for chunk in chunks])
    scored = torch.full((len(tokens),), tokens.shape[1] - 1)
    return Perplexity(nats, scored, windows["words"].long(), windows["bytes"].long())


@torch.inference_mode()
def window_nats(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Nats of each window of `tokens` [batch, length], fp64 [batch]."""
    states = model.base_model(input_ids=tokens, use_cache=False)[0][:, :-1]
    losses = token_nats(model, states.flatten(0, 1), tokens[:, 1:].flatten())
    return losses.view(len(tokens), -1).double().sum(1)


def token_nats(model: PreTrainedModel, states: Tensor, targets: Tensor) -> Tensor:
    """−log p(target) of each hidden state. `states`: [rows, hidden], `targets`: [rows].

    The logits of a whole window would be the largest tensor by far, so they are made and dropped
    some rows at a time, in fp32.
    """
    head = model.get_output_embeddings()
    return torch.cat(
        [
            F.cross_entropy(head(rows).float(), wanted, reduction="none")
            for rows, wanted in zip(
                states.split(LOGIT_ROWS), targets.split(LOGIT_ROWS), strict=True
            )
        ]
    )


def check_context(model: PreTrainedModel, length: int, what: str) -> None:
    """Raises InferlabError when `length` tokens do not fit the model's context."""
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and length > limit:
        raise InferlabError(
            f"{what} of {length} tokens do not fit the model's context of {limit}; "
            f"shorten them (params.yaml: prepare) to {limit} or less"
        )
