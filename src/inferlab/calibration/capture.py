"""What the linear layers of a model are given over calibration text, and how much it matters.

Without gradients one pass forward does. With them the hidden states before each block are kept,
the loss is differentiated from the last block to the first (each run again, for its own graph),
and a token's input to a layer is weighed by the norm of the loss gradient at the layer's output: a
token on which the loss hardly depends may come out wrong. (Kim et al. 2025, "GuidedQuant",
arXiv:2505.07004, weigh by the squared norm, which a few tokens dominate.)
"""

from collections.abc import Iterator
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from inferlab.calibration.blocks import Batch, BlockwiseModel
from inferlab.calibration.statistics import Accumulator, Calibration, overview
from inferlab.models.adapters import LinearGroup, linear_groups
from inferlab.params import section
from inferlab.run import progress
from inferlab.store import Checkpoint

Observed = dict[str, Accumulator]


@section
class CalibrateParams:
    """The section `calibrate`."""

    windows: Annotated[int, Field(gt=0)]
    batch: Annotated[int, Field(gt=0)]
    gradients: bool


def calibrate(
    checkpoint: Checkpoint, windows: Tensor, params: CalibrateParams, calibration: Calibration
) -> list[dict[str, float | str]]:
    """Write the statistics of `windows` [windows, length], and return their overview by layer."""
    rows: dict[int, list[dict[str, float | str]]] = {}
    blocks = run_blocks(checkpoint, windows, params.batch, params.gradients)
    for number, observed in progress(blocks, "calibrate"):
        statistics = {name: seen.statistics() for name, seen in observed.items()}
        calibration.save(number, statistics)
        rows[number] = overview(statistics)
    return [row for number in sorted(rows) for row in rows[number]]


def run_blocks(
    checkpoint: Checkpoint, windows: Tensor, batch: int, gradients: bool
) -> Iterator[tuple[int, Observed]]:
    """Pass `windows` [windows, length] through the model, `batch` windows at a time.

    Yields for each block its number and what its groups of linear layers were given, by group name;
    the last block first where gradients are asked for.
    """
    model = BlockwiseModel(checkpoint)
    groups = linear_groups(checkpoint)
    batches, states = model.start(windows, batch)
    kept = [states]
    for number in range(len(model.blocks)):
        probes = [] if gradients else _probes(model, groups, number)
        states = _forward(model, number, batches, states, probes)
        if gradients:
            kept.append(states)
        else:
            yield number, _observed(probes)
    if gradients:
        slopes = [model.loss_gradient(*pair) for pair in zip(kept.pop(), batches, strict=True)]
        for number in reversed(range(len(model.blocks))):
            probes = _probes(model, groups, number)
            slopes = _backward(model, number, batches, kept.pop(), slopes, probes)
            yield number, _observed(probes)


class _Probe:
    """Listens to a group of layers: their input, and the gradients at their outputs."""

    def __init__(self, model: BlockwiseModel, group: LinearGroup) -> None:
        self.name = group.name
        self.seen = Accumulator(group.name)
        self._inputs = torch.empty(0)
        self._norms: list[Tensor] = []
        layers = [model.layer(group.block, name) for name in group.layers]
        self._handles = [layers[0].register_forward_pre_hook(self._see_input)]
        self._handles += [layer.register_forward_hook(self._see_output) for layer in layers]

    def flush(self) -> None:
        """Add what the last batch has shown."""
        norms = torch.stack(self._norms).norm(dim=0) if self._norms else None
        self.seen.observe(self._inputs, norms)
        self._norms.clear()

    def remove(self) -> None:
        """Listen no more."""
        for handle in self._handles:
            handle.remove()

    def _see_input(self, _layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._inputs = inputs[0].detach().flatten(0, -2)

    def _see_output(self, _layer: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(self._see_gradient)

    def _see_gradient(self, gradient: Tensor) -> None:
        rows = gradient.flatten(0, -2)
        self._norms.append(torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32))


def _probes(model: BlockwiseModel, groups: list[LinearGroup], number: int) -> list[_Probe]:
    return [_Probe(model, group) for group in groups if group.block == number]


def _observed(probes: list[_Probe]) -> Observed:
    for probe in probes:
        probe.remove()
    return {probe.name: probe.seen for probe in probes}


@torch.no_grad()
def _forward(
    model: BlockwiseModel,
    number: int,
    batches: list[Batch],
    states: list[Tensor],
    probes: list[_Probe],
) -> list[Tensor]:
    """What block `number` makes of the hidden states of each batch."""
    results = []
    with model.block(number) as block:
        for batch, state in zip(batches, states, strict=True):
            results.append(model.run(block, state, batch))
            for probe in probes:
                probe.flush()
    return results


def _backward(
    model: BlockwiseModel,
    number: int,
    batches: list[Batch],
    states: list[Tensor],
    slopes: list[Tensor],
    probes: list[_Probe],
) -> list[Tensor]:
    """From the loss gradients after block `number` to those before it."""
    results = []
    with model.block(number) as block:
        for batch, state, slope in zip(batches, states, slopes, strict=True):
            state = state.detach().requires_grad_()
            with torch.enable_grad():
                model.run(block, state, batch).backward(slope)
            results.append(state.grad)
            for probe in probes:
                probe.flush()
    return results
