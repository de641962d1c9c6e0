"""The decoder blocks of a model, run in part: what each does, and which of them to keep.

Source: Men et al. 2024, "ShortGPT", arXiv:2403.03853, section 3 (block influence); Song et al.
2024, "SLEB", arXiv:2402.09025 (blocks removed one by one, by what the pruned model loses).
"""

import copy
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from inferlab.data.tables import Row
from inferlab.distillation.training import device
from inferlab.models.wide import linear
from inferlab.run import progress


class Stack(nn.Module):
    """Decoder blocks, one after the other, and the norm that follows them."""

    def __init__(self, blocks: Iterable[nn.Module], norm: nn.Module) -> None:
        super().__init__()
        self.blocks, self.norm = nn.ModuleList(blocks), norm

    def only(self, kept: Iterable[int]) -> "Stack":
        """The blocks of these numbers, in this order; weights are shared."""
        return Stack([self.blocks[number] for number in kept], self.norm)

    def copied(self, dtype: torch.dtype) -> "Stack":
        """The same with weights of its own."""
        return copy.deepcopy(self).to(dtype)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.norm.weight.dtype


class Trunk:
    """A causal model of the Llama family with any stack between its embeddings and its head.

    The model itself is left with whatever blocks ran last.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model.requires_grad_(False).eval().to(device())
        self._body = model.base_model
        self.stack = Stack(self._body.layers, self._body.norm)
        self.head: Tensor = model.get_output_embeddings().weight

    def embed(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """Embeddings [windows, length, hidden] of tokens [windows, length]."""
        return self._model.get_input_embeddings()(tokens.long().to(device())).to(dtype)

    def run(self, states: Tensor, blocks: Iterable[nn.Module]) -> Tensor:
        """What `blocks` make of `states` [windows, length, hidden], before the final norm."""
        self._body.layers, self._body.norm = nn.ModuleList(blocks), nn.Identity()
        return self._body(inputs_embeds=states, use_cache=False)[0]

    def states(self, tokens: Tensor, stack: Stack) -> Tensor:
        """What the head is given for tokens [windows, length]: [windows, length, hidden]."""
        return stack.norm(self.run(self.embed(tokens, stack.dtype), stack.blocks))

    def log_probabilities(self, states: Tensor) -> Tensor:
        """Of the next token, from final states [rows, hidden]: fp32 [rows, vocabulary]."""
        return F.log_softmax(linear(states.to(self.head.dtype), self.head).float(), dim=-1)


@torch.inference_mode()
def importances(trunk: Trunk, tokens: Tensor) -> list[Row]:
    """One row a block, measured on tokens [windows, length].

    `block_influence`: 1 − cosine of a token's hidden state before and after the block. `loss_rise`
    and `kl_rise`: what leaving the block out alone adds to the loss, and the divergence from the
    whole model's predictions; both in nats a token.
    """
    blocks = trunk.stack.blocks
    states = _path(trunk, trunk.embed(tokens, trunk.stack.dtype), blocks)
    whole = _predictions(trunk, states[-1])
    targets = tokens[:, 1:].flatten().long().to(whole.device)
    rows = []
    for number in progress(range(len(blocks)), "importance"):
        before, after = states[number].float(), states[number + 1].float()
        found = _predictions(trunk, trunk.run(states[number], blocks[number + 1 :]))
        rows.append(
            {
                "layer": number,
                "block_influence": float((1 - F.cosine_similarity(before, after, dim=-1)).mean()),
                "loss_rise": float(F.nll_loss(found, targets) - F.nll_loss(whole, targets)),
                "kl_rise": divergence(whole, found),
            }
        )
    return rows


@torch.inference_mode()
def removed_in_turn(trunk: Trunk, tokens: Tensor, keep: int, candidates: int) -> tuple[int, ...]:
    """The numbers of the blocks left when the least needed one is removed until `keep` are left.

    Need is the rise of the divergence from the whole model, given what is gone already. In each
    round the `candidates` that mattered least when last looked at are looked at again.
    """
    blocks = trunk.stack.blocks
    left = list(range(len(blocks)))
    states = _path(trunk, trunk.embed(tokens, trunk.stack.dtype), blocks)
    whole = _predictions(trunk, states[-1])
    need, lost = dict.fromkeys(left, 0.0), 0.0
    for turn in progress(range(len(blocks) - keep), "removal"):
        looked_at = sorted(left, key=need.__getitem__)[: candidates if turn else None]
        for number in looked_at:
            place = left.index(number)
            rest = [blocks[other] for other in left[place + 1 :]]
            found = _predictions(trunk, trunk.run(states[place], rest))
            need[number] = divergence(whole, found) - lost
        chosen = min(looked_at, key=need.__getitem__)
        lost += need[chosen]
        place = left.index(chosen)
        left.remove(chosen)
        states[place:] = _path(trunk, states[place], [blocks[other] for other in left[place:]])
    return tuple(left)


def evenly_spaced(layers: int, keep: int) -> tuple[int, ...]:
    """`keep` of `layers` numbers by position alone: the first, the last and even steps between."""
    step = (layers - 1) / max(keep - 1, 1)
    return tuple(round(place * step) for place in range(keep))


def most_important(rows: Sequence[Row], measure: str, keep: int) -> tuple[int, ...]:
    """The numbers of the `keep` blocks of the largest `measure`, in the model's order."""
    ranked = sorted(rows, key=lambda row: -row[measure])
    return tuple(sorted(row["layer"] for row in ranked[:keep]))


def divergence(whole: Tensor, found: Tensor) -> float:
    """KL divergence of `found` from `whole`, nats a row; log-probabilities [rows, vocabulary]."""
    return float(F.kl_div(found, whole, reduction="batchmean", log_target=True))


def _path(trunk: Trunk, states: Tensor, blocks: Iterable[nn.Module]) -> list[Tensor]:
    """`states` and what they become after each of `blocks`."""
    path = [states]
    for block in blocks:
        path.append(trunk.run(path[-1], [block]))
    return path


def _predictions(trunk: Trunk, states: Tensor) -> Tensor:
    """Log-probabilities of tokens 1.. from states before the final norm: [rows, vocabulary]."""
    return trunk.log_probabilities(trunk.stack.norm(states[:, :-1]).flatten(0, 1))
