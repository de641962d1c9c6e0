"""The study of outliers from end to end: layers, rules, mixtures, before and after smoothing."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel

from inferlab.calibration.statistics import Calibration
from inferlab.models.adapters import adapter_for
from inferlab.quantization.mixtures import mixtures, run_mixtures
from inferlab.quantization.outliers import (
    SMOOTHED,
    OutliersParams,
    Row,
    curve_table,
    effect_columns,
    layer_table,
    units_of,
)
from inferlab.quantization.sensitivity import layer_effects
from inferlab.quantization.smoothing import fixed, smooth
from inferlab.quantization.w8a8 import w8a8_layers
from inferlab.store import Checkpoint


@dataclass(frozen=True)
class Findings:
    """The tables of the study."""

    layers: list[Row]
    curves: list[Row]
    mixtures: list[Row]


def study(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    calibration: Calibration,
    texts: Mapping[str, Tensor],
    params: OutliersParams,
    seed: int,
) -> Findings:
    """`texts`: windows [windows, length] named `calibration` and `heldout`.

    `model` holds the weights of `checkpoint`, in fp32; it is smoothed on the way.
    """
    windows = params.sensitivity.cut(texts["calibration"])
    heldout = params.heldout.cut(texts["heldout"])
    shares = params.shares_16bit

    int8 = w8a8_layers(checkpoint)
    effects = layer_effects(model, int8, windows, seed)
    layers = layer_table(checkpoint, calibration, effects, params.sigmas)
    units = units_of(layers)
    wanted = mixtures(units, ("sensitivity", "outlier_share"), shares)
    tried = run_mixtures(model, int8, wanted, heldout)

    tamed = smoothed(model, checkpoint, calibration, params.smoothing)
    int8 = w8a8_layers(tamed)
    effects = layer_effects(model, int8, windows, seed)
    layers = [row | effect_columns(effects[str(row["layer"])], SMOOTHED) for row in layers]
    tamed_units = units_of(layers, SMOOTHED)
    wanted = mixtures(tamed_units, ("sensitivity",), shares, SMOOTHED)
    tried += run_mixtures(model, int8, wanted, heldout)
    return Findings(layers, curve_table(units, tamed_units), tried)


def smoothed(
    model: PreTrainedModel, checkpoint: Checkpoint, calibration: Calibration, alpha: float
) -> Checkpoint:
    """Smooth the checkpoint, and `model` with it; neither where smoothing is not known for it."""
    if adapter_for(checkpoint).transposed:
        return checkpoint
    tamed, _ = smooth(checkpoint, calibration, fixed(alpha))
    for name, tensor in tamed.changed.items():
        model.get_parameter(name).data.copy_(tensor)
    return tamed
