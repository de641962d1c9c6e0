"""The tables and metrics of 33.9: accuracy, size and latency by arm, and how stable ranks are."""

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import mean

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor

from inferlab.data.tables import Row
from inferlab.distillation.comparison import right
from inferlab.distillation.training import accuracy_error, device
from inferlab.models.encoder import TextClassifier
from inferlab.profiling.latency import median_ms
from inferlab.pruning.head_study import Arm, Outcome
from inferlab.pruning.heads import remove_heads
from inferlab.pruning.recovery import paired_columns


def arm_table(outcomes: Sequence[Outcome], labels: Tensor, seed: int) -> list[Row]:
    """One row a choice, share and state (pruned, recovered), over the draws.

    `minus_whole` is to the whole model in the same state, `minus_random` to random removal of the
    same share in the same state, each paired by document with its 95 % interval.
    """
    hits: dict[tuple[str, float, str], np.ndarray] = {}
    for choice, share in dict.fromkeys((one.arm.choice, one.arm.share) for one in outcomes):
        own = [one for one in outcomes if (one.arm.choice, one.arm.share) == (choice, share)]
        for state in ("pruned", "recovered"):
            logits = torch.stack([getattr(one, state) for one in own])
            hits[choice, share, state] = right(logits, labels)
    rows = []
    for (choice, share, state), found in hits.items():
        row = {
            "arm": f"{choice} {100 * share:g} %, {state}",
            "choice": choice,
            "share": share,
            "state": state,
            "draws": len(found),
            "accuracy_mean": found.mean(),
            "accuracy_std": found.mean(1).std(ddof=1) if len(found) > 1 else 0.0,
        }
        whole = hits["whole", 0.0, state]
        row |= paired_columns("whole", found, whole, seed)
        rows.append(
            row | paired_columns("random", found, hits.get(("random", share, state), whole), seed)
        )
    return rows


def head_table(scores: Mapping[str, Tensor], arms: Sequence[Arm]) -> list[Row]:
    """One row a head: its scores, mean and std over samples, and at which shares it goes.

    scores: [samples, layers, heads].
    """
    ranked = [arm for arm in arms if arm.choice == "gradient"]
    _, layers, heads = scores["gradient"].shape
    rows = []
    for layer, head in itertools.product(range(layers), range(heads)):
        row = {"head": f"layer {layer} head {head}", "layer": layer}
        for name, values in scores.items():
            own = values[:, layer, head]
            row |= {name: float(own.mean()), f"{name}_std": float(own.std())}
        row |= {f"removed_{100 * arm.share:g}": int(arm.removed[layer, head]) for arm in ranked}
        rows.append(row)
    return rows


def layer_table(scores: Tensor, arms: Sequence[Arm], losses: Sequence[float]) -> list[Row]:
    """One row a layer: mean score, heads that it loses at each share, and what half of them cost.

    scores: [samples, layers, heads]; losses: nats by layer, of that layer alone.
    """
    ranked = [arm for arm in arms if arm.choice == "gradient"]
    return [
        {
            "name": f"layer {layer}",
            "layer": layer,
            "importance_mean": float(scores[:, layer].mean()),
            "importance_std": float(scores[:, layer].mean(1).std()),
            **{f"heads_lost_{100 * arm.share:g}": int(arm.removed[layer].sum()) for arm in ranked},
            "nats_without_half": loss,
        }
        for layer, loss in enumerate(losses)
    ]


def correlation_table(scores: Mapping[str, Tensor]) -> list[Row]:
    """Rank correlation (Spearman) of two samples by each score, and of both scores, one row a pair.

    Over heads, and over the layers' means. scores: [samples, layers, heads].
    """
    pairs = {
        f"{name}, samples {one + 1} and {two + 1}": (values[one], values[two])
        for name, values in scores.items()
        for one, two in itertools.combinations(range(len(values)), 2)
    }
    pairs["gradient and taylor"] = (scores["gradient"].mean(0), scores["taylor"].mean(0))
    return [
        {
            "pair": name,
            "heads": _correlation(one.flatten(), two.flatten()),
            "layers": _correlation(one.mean(1), two.mean(1)),
        }
        for name, (one, two) in pairs.items()
    ]


def latency_table(
    models: Mapping[float, TextClassifier],
    tokens: Tensor,
    batches: Sequence[int],
    rounds: int,
) -> list[Row]:
    """Bytes in fp32, and median milliseconds of classifying a batch in bf16, by share removed.

    tokens: [documents, length].
    """
    sizes = {
        share: sum(one.nbytes for one in model.parameters()) for share, model in models.items()
    }
    served = {share: model.bfloat16().to(device()).eval() for share, model in models.items()}
    rows = []
    for batch in batches:
        part = tokens[:batch].to(device())
        with torch.inference_mode():
            found = median_ms({key: partial(one, part) for key, one in served.items()}, rounds)
        rows += [
            {
                "case": f"{100 * share:g} % of heads removed, batch {batch}",
                "share": share,
                "batch": batch,
                "latency_ms": taken,
                "bytes": sizes[share],
            }
            for share, taken in found.items()
        ]
    return rows


def ranked_models(teacher: TextClassifier, arms: Sequence[Arm]) -> dict[float, TextClassifier]:
    """The whole model and those without their least important heads, by share removed."""
    chosen = [arm for arm in arms if arm.choice in ("whole", "gradient")]
    return {arm.share: remove_heads(teacher, arm.removed) for arm in chosen}


def summary(
    rows: Sequence[Row], correlations: Sequence[Row], latencies: Sequence[Row], documents: int
) -> dict[str, float]:
    """The stage's metrics: accuracy without recovery unless `recovered` is in the name."""
    accuracies = {(row["choice"], row["share"], row["state"]): row["accuracy_mean"] for row in rows}
    whole = accuracies["whole", 0.0, "pruned"]
    found = {"accuracy_0": whole, "accuracy_0_se": accuracy_error(whole, documents)}
    names = {"gradient": "", "random": "random_", "most_important": "most_important_"}
    shares = sorted({row["share"] for row in rows} - {0.0})
    for choice, name in names.items():
        for share in shares:
            found[f"accuracy_{name}{100 * share:g}"] = accuracies[choice, share, "pruned"]
    found["accuracy_recovered_0"] = accuracies["whole", 0.0, "recovered"]
    for share in shares:
        found[f"accuracy_recovered_{100 * share:g}"] = accuracies["gradient", share, "recovered"]
    found |= {f"bytes_{100 * row['share']:g}": row["bytes"] for row in latencies}
    samples = [row for row in correlations if row["pair"].startswith("gradient, ")]
    for over in ("heads", "layers"):
        found[f"rank_correlation_{over}"] = mean(row[over] for row in samples)
    return found | {"rank_correlation_taylor": correlations[-1]["heads"]}


def times(latencies: Sequence[Row]) -> dict[str, float]:
    """`latency_ms_<share>_batch_<n>` of every row, for the timing file."""
    return {
        f"latency_ms_{100 * row['share']:g}_batch_{row['batch']}": row["latency_ms"]
        for row in latencies
    }


def _correlation(one: Tensor, two: Tensor) -> float:
    return float(spearmanr(one.numpy(), two.numpy()).statistic)
