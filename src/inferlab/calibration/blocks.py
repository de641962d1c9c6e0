"""A causal model of which one decoder block at a time has its weights in memory.

The hidden states of all windows go through block 0, then block 1, and so on; gradients come back
the same way. So the need for weights does not grow with depth.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from inferlab.models.adapters import adapter_for
from inferlab.models.wide import linear, widen
from inferlab.store import Checkpoint

LOGIT_ROWS = 256


class _StopForwardError(Exception):
    """Raised by the stand-in for block 0, once it has seen what block 0 would be given."""


@dataclass(frozen=True)
class Batch:
    """Some windows [windows, length], and what every block is called with besides hidden states."""

    windows: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _StandIn(nn.Module):
    """Stands where the blocks were: keeps what block 0 is called with, or answers for them all."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.called: tuple[Tensor, tuple[Any, ...], dict[str, Any]] | None = None
        self.answer: Tensor | tuple[Tensor] | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("block"), name)

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.answer is not None:
            return self.answer
        self.called = hidden, args, kwargs
        raise _StopForwardError


class BlockwiseModel:
    """The model of `checkpoint`, in bf16, with nothing but its embeddings and head in memory."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        with init_empty_weights(include_buffers=False):
            config = AutoConfig.for_model(**checkpoint.config)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        widen(model)
        self.model = model.eval().requires_grad_(False)
        self.checkpoint = checkpoint
        self.path = adapter_for(checkpoint).blocks
        self.blocks = list(model.get_submodule(self.path))
        self._stand_in = _StandIn(self.blocks[0])
        self._load_the_rest()

    @contextlib.contextmanager
    def block(self, number: int) -> Iterator[nn.Module]:
        """Block `number` with its weights, until the body ends."""
        block = self.blocks[number]
        _materialise(block, f"{self.path}.{number}", self.checkpoint)
        yield block
        block.to("meta")

    def layer(self, number: int, name: str) -> nn.Module:
        """The layer of block `number` whose full name is `name`."""
        return self.blocks[number].get_submodule(name.removeprefix(f"{self.path}.{number}."))

    def run(self, block: nn.Module, hidden: Tensor, batch: Batch) -> Tensor:
        """The hidden states [windows, length, hidden] that `block` makes of `hidden`."""
        return _first(block(hidden, *batch.args, **batch.kwargs))

    @torch.no_grad()
    def start(self, windows: Tensor, batch_size: int) -> tuple[list[Batch], list[Tensor]]:
        """The windows in batches, and the hidden states that block 0 is given for each."""
        batches, states = [], []
        for chunk in windows.long().split(batch_size):
            self._stand_in.answer = None
            with contextlib.suppress(_StopForwardError):
                self.model(input_ids=chunk, use_cache=False)
            hidden, args, kwargs = self._stand_in.called
            batches.append(Batch(chunk, args, kwargs))
            states.append(hidden)
        return batches, states

    def loss_gradient(self, hidden: Tensor, batch: Batch) -> Tensor:
        """Gradient of the summed next-token loss (nats) by the last block's output `hidden`."""
        state = hidden.detach().requires_grad_()
        self._stand_in.answer = state
        with torch.enable_grad():
            final = self.model.base_model(input_ids=batch.windows, use_cache=False)[0]
        slope = torch.zeros_like(final)
        for one, into, window in zip(final.detach(), slope, batch.windows, strict=True):
            for rows in torch.arange(len(window) - 1).split(LOGIT_ROWS):
                into[rows] = self._slope_of_rows(one[rows], window[rows + 1])
        final.backward(slope)
        return state.grad

    @torch.no_grad()
    def _slope_of_rows(self, states: Tensor, targets: Tensor) -> Tensor:
        """Gradient of −log p(target) by each of `states` [rows, hidden]: (p − onehot)·W.

        By hand, since autograd would keep several tensors of the size of the logits.
        """
        head = self.model.get_output_embeddings()
        slope = torch.softmax(head(states).float(), dim=1)
        slope[torch.arange(len(targets)), targets] -= 1
        return linear(slope.bfloat16(), head.weight.t())

    def _load_the_rest(self) -> None:
        """Load what is no block, and put the stand-in where the blocks were."""
        parent, _, name = self.path.rpartition(".")
        setattr(self.model.get_submodule(parent), name, nn.ModuleList([self._stand_in]))
        base = self.model.base_model
        prefix = next(name for name, module in self.model.named_modules() if module is base)
        for name, module in base.named_children():
            if f"{prefix}.{name}" != self.path:
                _materialise(module, f"{prefix}.{name}", self.checkpoint)
        head = self.model.get_output_embeddings()
        if "lm_head.weight" in self.checkpoint:
            _materialise(head, "lm_head", self.checkpoint)
        else:
            head.weight = self.model.get_input_embeddings().weight


def _first(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def _materialise(module: nn.Module, prefix: str, checkpoint: Checkpoint) -> None:
    """Give a module of empty weights its tensors from the checkpoint, in bf16."""
    state = {
        name: checkpoint.tensor(f"{prefix}.{name}").bfloat16()
        for name, _ in module.named_parameters()
    }
    module.load_state_dict(state, assign=True, strict=False)
