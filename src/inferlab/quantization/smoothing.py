"""Move outliers of the activations into the weights, where a scale a channel can hold them.

Xiao et al. 2022, "SmoothQuant" (arXiv:2211.10438), section 4: column j of a layer's input is
divided by s_j = max|X_j|^α / max|W_j|^(1−α) and column j of its weights multiplied by it. The
division is folded into whatever produces the input (a norm, or a linear layer whose outputs reach
it one to one), so the model computes the same. Scales are powers of two: folding is exact in bf16.

One α does not suit every layer, and moving a few extreme columns alone often costs the weights
less, so a layer can also choose its scale among several by the output error over sampled inputs.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from inferlab.calibration.statistics import Calibration
from inferlab.models.adapters import LinearGroup, linear_groups
from inferlab.quantization.affine import minmax_grid, quantize
from inferlab.store import Checkpoint

ALPHAS = (0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9)
QUANTILES = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98)
LEVELS = 127


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


Choice = Callable[[Tensor, dict[str, Tensor]], Tensor]
"""From a group's stacked weights [out, in], fp32, and its statistics to its scale [in]."""


def fixed(alpha: float) -> Choice:
    """SmoothQuant's scale. `alpha` is the share that moves into the weights: 0 none, 1 all."""

    def choose(weight: Tensor, statistics: dict[str, Tensor]) -> Tensor:
        inputs = _absmax(statistics)
        columns = weight.abs().amax(0)
        return _usable(inputs.pow(alpha) / columns.pow(1 - alpha), inputs, columns)

    return choose


def searched(weight: Tensor, statistics: dict[str, Tensor]) -> Tensor:
    """The candidate whose W8A8 output differs least over the sampled inputs."""
    sample = statistics["sample"].float()
    exact = sample @ weight.t()
    errors = {
        _w8a8_error(sample / scale, weight * scale, exact): scale
        for scale in _candidates(weight, statistics)
    }
    return errors[min(errors)]


def smooth(
    checkpoint: Checkpoint, calibration: Calibration, choose: Choice
) -> tuple[Checkpoint, SmoothedCalibration]:
    """An equivalent checkpoint whose layers have tamer inputs, and its statistics."""
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
        stacked = torch.cat([current(name) for name in names]).float()
        scale = choose(stacked, calibration.load(group))
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


def _candidates(weight: Tensor, statistics: dict[str, Tensor]) -> Iterator[Tensor]:
    """Scales [in] to try: none, one for each α, and only what exceeds a quantile of the columns."""
    inputs = _absmax(statistics)
    yield torch.ones_like(inputs)
    for alpha in ALPHAS:
        yield fixed(alpha)(weight, statistics)
    for level in inputs.quantile(torch.tensor(QUANTILES)).tolist():
        yield _usable((inputs / max(level, 1e-12)).clamp(min=1), inputs, weight.abs().amax(0))


def _w8a8_error(inputs: Tensor, weight: Tensor, exact: Tensor) -> float:
    """Mean squared error of the outputs [tokens, out] with int8 inputs and int8 weights.

    `inputs` [tokens, in] with a scale a token, `weight` [out, in] with a scale a channel.
    """
    step = inputs.abs().amax(1, keepdim=True).clamp(min=1e-12) / LEVELS
    rounded = torch.round(inputs / step) * step
    grid = minmax_grid(weight, bits=8, group_size=weight.shape[1], symmetric=True)
    return float((rounded @ quantize(weight, grid).dequantize().t() - exact).square().mean())


def _absmax(statistics: dict[str, Tensor]) -> Tensor:
    """The largest magnitude of each input column, [in]."""
    return torch.maximum(statistics["maximum"].abs(), statistics["minimum"].abs())


def _usable(raw: Tensor, inputs: Tensor, weights: Tensor) -> Tensor:
    """`raw` [in] as powers of two; 1 where a column is never reached or has no weights."""
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
