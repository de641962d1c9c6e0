"""Move outliers of the activations into the weights, where a scale a channel can hold them.

Xiao et al. 2022, "SmoothQuant" (arXiv:2211.10438), section 4: column j of a layer's input is
divided by s_j = max|X_j|^α / max|W_j|^(1−α) and column j of its weights multiplied by it. The
division is folded into whatever produces the input (a norm, or a linear layer whose outputs reach
it one to one), so the model computes the same. Scales are powers of two: folding is exact in bf16.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from inferlab.calibration.statistics import Calibration
from inferlab.models.adapters import LinearGroup, linear_groups
from inferlab.store import Checkpoint


@dataclass(frozen=True)
class SmoothedCalibration(Calibration):
    """The statistics of a smoothed model: inputs divided by `scales[group name]` [in]."""

    scales: dict[str, Tensor]

    def load(self, group: LinearGroup) -> dict[str, Tensor]:
        """Only the Hessian is carried over: H_ij / (s_i·s_j)."""
        hessian = super().load(group)["hessian"]
        if group.name in self.scales:
            scale = self.scales[group.name]
            hessian = hessian / scale / scale[:, None]
        return {"hessian": hessian}


def smooth(
    checkpoint: Checkpoint, calibration: Calibration, alpha: float
) -> tuple[Checkpoint, SmoothedCalibration]:
    """An equivalent checkpoint whose layers have tamer inputs, and its statistics.

    `alpha` is the share of the difficulty that moves into the weights: 0 none, 1 all.
    """
    changed: dict[str, Tensor] = {}
    scales: dict[str, Tensor] = {}

    def current(name: str) -> Tensor:
        return changed[name] if name in changed else checkpoint.tensor(name)

    for group in linear_groups(checkpoint):
        if group.producer is None:
            continue
        names = [f"{layer}.weight" for layer in group.layers]
        producers = [f"{group.producer}.{part}" for part in ("weight", "bias")]
        rows = checkpoint.shape(producers[0])[0]
        statistics = calibration.load(group)
        inputs = torch.maximum(statistics["maximum"].abs(), statistics["minimum"].abs())
        weights = torch.cat([current(name) for name in names]).float().abs().amax(0)
        scale = _scale(inputs, weights, alpha)
        if rows < len(scale):
            scale, folded = _shared_by_heads(scale, rows, checkpoint.config)
        else:
            folded = scale
        for name in names:
            changed[name] = current(name) * scale
        for name in producers:
            if name in checkpoint:
                tensor = current(name)
                changed[name] = (tensor.t() / folded).t()
        scales[group.name] = scale
    dtypes = {name: checkpoint.tensor(name).dtype for name in changed}
    exact = {name: tensor.to(dtypes[name]) for name, tensor in changed.items()}
    return replace(checkpoint, changed=exact), SmoothedCalibration(calibration.folder, scales)


def _scale(inputs: Tensor, weights: Tensor, alpha: float) -> Tensor:
    """s [in], rounded to powers of two; 1 where a column is never reached or has no weights."""
    raw = inputs.pow(alpha) / weights.pow(1 - alpha)
    usable = (inputs > 0) & (weights > 0)
    return torch.where(usable, torch.exp2(torch.log2(raw).round()), torch.ones_like(raw))


def _shared_by_heads(scale: Tensor, rows: int, config: dict[str, object]) -> tuple[Tensor, Tensor]:
    """Grouped-query attention: the query heads of a group read the same value head.

    Returns the scale [in] made equal within each group, and the value rows' own [rows].
    """
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    grouped = scale.view(rows // head_dim, -1, head_dim)
    shared = grouped.amax(1)
    return shared.unsqueeze(1).expand_as(grouped).flatten(), shared.flatten()
