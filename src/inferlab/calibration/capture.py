"""Run a model over calibration text one decoder block at a time.

Only one block's weights are in memory at once, so the need does not grow with depth: the hidden
states of all windows go through block 0, then block 1, and so on.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from accelerate import init_empty_weights
from pydantic import Field
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AutoConfig, AutoModelForCausalLM

from inferlab.calibration.statistics import Accumulator
from inferlab.models.adapters import adapter_for, linear_groups
from inferlab.params import section
from inferlab.store import Checkpoint


class _StopForwardError(Exception):
    """Raised by the stand-in for block 0, once it has seen what block 0 would be given."""


@dataclass
class _Call:
    """The arguments of one block for one batch of windows; `hidden` moves on block by block."""

    hidden: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _StandIn(nn.Module):
    """Stands where block 0 was and keeps what it is called with."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.calls: list[_Call] = []

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("block"), name)

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> None:
        self.calls.append(_Call(hidden, args, kwargs))
        raise _StopForwardError


@section
class CalibrateParams:
    """The section `calibrate`."""

    windows: Annotated[int, Field(gt=0)]
    batch: Annotated[int, Field(gt=0)]


@torch.inference_mode()
def run_blocks(
    checkpoint: Checkpoint, windows: Tensor, batch: int
) -> Iterator[dict[str, Accumulator]]:
    """Pass `windows` [windows, length] through the model, `batch` windows at a time.

    Yields after each block what its groups of linear layers were given, by group name.
    """
    with init_empty_weights(include_buffers=False):
        config = AutoConfig.for_model(**checkpoint.config)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    adapter = adapter_for(checkpoint)
    blocks: nn.ModuleList = model.get_submodule(adapter.blocks)
    calls = _calls_of_first_block(model, checkpoint, blocks, windows, batch)
    groups = linear_groups(checkpoint)
    for number, block in enumerate(blocks):
        _materialise(block, f"{adapter.blocks}.{number}", checkpoint)
        observed = {group.name: Accumulator() for group in groups if group.block == number}
        handles = [_attach(model.get_submodule(name), seen) for name, seen in observed.items()]
        for call in calls:
            result = block(call.hidden, *call.args, **call.kwargs)
            call.hidden = result[0] if isinstance(result, tuple) else result
        for handle in handles:
            handle.remove()
        block.to("meta")
        yield observed


def _calls_of_first_block(
    model: nn.Module, checkpoint: Checkpoint, blocks: nn.ModuleList, windows: Tensor, batch: int
) -> list[_Call]:
    """What block 0 is called with, a batch of windows at a time."""
    prefix = next(name for name, module in model.named_modules() if module is model.base_model)
    for name, module in model.base_model.named_children():
        if module is not blocks:
            _materialise(module, f"{prefix}.{name}", checkpoint)
    stand_in = _StandIn(blocks[0])
    blocks[0] = stand_in
    for chunk in windows.split(batch):
        with contextlib.suppress(_StopForwardError):
            model(input_ids=chunk.long(), use_cache=False)
    blocks[0] = stand_in.block
    return stand_in.calls


def _materialise(module: nn.Module, prefix: str, checkpoint: Checkpoint) -> None:
    """Give a module of empty weights its tensors from the checkpoint, in bf16."""
    state = {
        name: checkpoint.tensor(f"{prefix}.{name}").bfloat16()
        for name, _ in module.named_parameters()
    }
    module.load_state_dict(state, assign=True, strict=False)


def _attach(layer: nn.Module, seen: Accumulator) -> RemovableHandle:
    def hook(_layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen.observe(inputs[0].flatten(0, -2))

    return layer.register_forward_pre_hook(hook)
