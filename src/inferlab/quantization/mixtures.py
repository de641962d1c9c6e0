"""Run a model with some layers in INT8 and some in 16 bits on held-out text, without saving it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import exp

from torch import Tensor
from transformers import PreTrainedModel

from inferlab.models.scoring import Int8Linear
from inferlab.quantization.mixed_precision import Rule, Unit, choose, megabytes
from inferlab.quantization.sensitivity import divergence, log_probabilities
from inferlab.quantization.w8a8 import running_as
from inferlab.run import progress


@dataclass(frozen=True)
class Mixture:
    """`kept`: the units in 16 bits. `nats_predicted`: the sum of those of the others."""

    name: str
    rule: str
    kept: tuple[Unit, ...]
    nats_predicted: float


def mixtures(
    units: list[Unit], rules: Iterable[Rule], shares: Iterable[float], suffix: str = ""
) -> list[Mixture]:
    """All INT8, then each rule at each share of weights in 16 bits.

    `suffix` ends the names of the rules.
    """
    total = sum(unit.nats for unit in units)
    words = suffix.replace("_", " ")
    found = [Mixture(f"all INT8{words}", f"none{suffix}", (), total)]
    for rule in rules:
        for share in shares:
            kept = tuple(choose(units, rule, share))
            name = f"{100 * share:g} % in 16 bits by {rule}{words}"
            left = total - sum(unit.nats for unit in kept)
            found.append(Mixture(name, f"{rule}{suffix}", kept, left))
    return found


def run_mixtures(
    model: PreTrainedModel,
    int8: Mapping[str, Int8Linear],
    wanted: list[Mixture],
    windows: Tensor,
) -> list[dict[str, float | str]]:
    """Each mixture on `windows` [windows, tokens], one row each.

    `model` holds the 16-bit weights that `int8` was made of. `nats`: KL divergence of its
    predictions, a token; `token_perplexity` beside `token_perplexity_16bit`, the model's own.
    """
    nats = dict.fromkeys(range(len(wanted)), 0.0)
    loss = dict.fromkeys((*nats, "16-bit"), 0.0)
    for window in progress(windows, "mixtures", len(windows)):
        reference = log_probabilities(model, window)
        loss["16-bit"] += _loss(reference, window)
        for number, mixture in enumerate(wanted):
            kept = {layer for unit in mixture.kept for layer in unit.layers}
            with running_as(model, int8, int8.keys() - kept):
                found = log_probabilities(model, window)
            nats[number] += divergence(reference, found)
            loss[number] += _loss(found, window)
    weights = sum(layer.weight.numel() for layer in int8.values())
    return [
        {
            "mixture": mixture.name,
            "rule": mixture.rule,
            "layers_16bit": sum(len(unit.layers) for unit in mixture.kept),
            "megabytes": megabytes(weights, sum(unit.weights for unit in mixture.kept)),
            "nats_predicted": mixture.nats_predicted,
            "nats": nats[number] / len(windows),
            "token_perplexity": exp(loss[number] / len(windows)),
            "token_perplexity_16bit": exp(loss["16-bit"] / len(windows)),
        }
        for number, mixture in enumerate(wanted)
    ]


def _loss(predictions: Tensor, window: Tensor) -> float:
    """Mean −log p of each next token. `predictions`: [tokens, vocabulary]; `window`: [tokens]."""
    return float(-predictions[:-1].gather(1, window[1:, None]).mean())
