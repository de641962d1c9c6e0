"""W8A8 but for the layers whose rounding costs most, which stay in 16 bits."""

from typing import Annotated, Literal

from pydantic import Field

from inferlab.models.adapters import LinearGroup, linear_groups
from inferlab.params import section
from inferlab.quantization.driver import Job, Report, weights_of
from inferlab.quantization.methods.integer import IntegerParams, run_smoothed, smoothed
from inferlab.quantization.mixed_precision import (
    TextParams,
    Unit,
    choose,
    named_groups,
    outlier_share,
)
from inferlab.run import log


@section
class MixedParams:
    """The section `quantize.mixed`."""

    share_16bit: Annotated[float, Field(ge=0, lt=1)]
    rule: Literal["sensitivity", "outlier_share"]
    sigmas: Annotated[float, Field(gt=0)]
    keep: tuple[str, ...]
    text: TextParams
    int8: IntegerParams


def run(job: Job, params: MixedParams) -> Report:
    """Choose the groups to keep on the smoothed model, and quantize the others.

    `keep` names layers that stay in 16 bits whatever the rule says, on top of `share_16bit`.
    """
    groups = linear_groups(job.checkpoint)
    named = named_groups(groups, params.keep)
    job = smoothed(job, params.int8)
    units = [unit for unit in _units(job, groups, params) if unit.name not in named]
    chosen = named | {unit.name for unit in choose(units, params.rule, params.share_16bit)}
    kept = [group for group in groups if group.name in chosen]
    log.info("kept in 16 bits: %s", ", ".join(group.name for group in kept) or "nothing")
    return run_smoothed(job, params.int8, kept)


def _units(job: Job, groups: list[LinearGroup], params: MixedParams) -> list[Unit]:
    nats = _nats(job, params) if params.rule == "sensitivity" else {}
    return [
        Unit(
            group.name,
            group.layers,
            weights_of(job.checkpoint, [group]),
            nats=sum(nats.get(layer, 0.0) for layer in group.layers),
            outlier_share=outlier_share(group.weights(job.checkpoint), params.sigmas),
        )
        for group in groups
    ]


def _nats(job: Job, params: MixedParams) -> dict[str, float]:
    """What each layer of the job's checkpoint costs in W8A8, nats a token."""
    # Here, so that the other methods need not wait for transformers to be imported.
    from inferlab.models.loading import load_model
    from inferlab.quantization.sensitivity import layer_effects
    from inferlab.quantization.w8a8 import w8a8_layers

    model = load_model(job.checkpoint.folder, job.threads).float()
    for name, tensor in job.checkpoint.changed.items():
        model.get_parameter(name).data.copy_(tensor)
    windows = params.text.cut(job.calibration_windows())
    effects = layer_effects(model, w8a8_layers(job.checkpoint), windows, seed=0)
    return {layer: effect.nats for layer, effect in effects.items()}
