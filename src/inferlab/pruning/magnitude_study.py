"""33.8: schedules and thresholds of magnitude pruning on the classifier, from one common start."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from joblib import Parallel, delayed
from pydantic import Field
from torch import Tensor

from inferlab.data.tables import Row
from inferlab.distillation.comparison import right
from inferlab.distillation.training import device
from inferlab.models.encoder import TextClassifier
from inferlab.params import section
from inferlab.pruning.magnitude import Threshold, prune_weights, sparsities
from inferlab.pruning.recovery import Material, RecoveryParams, classify, paired_columns, retrain

THRESHOLDS: tuple[Threshold, ...] = ("global", "layer")
ROUND_SEEDS = 1000
"""Apart are the seeds of two rounds, so that each round sees other documents."""

Positive = Annotated[int, Field(gt=0)]


@section
class MagnitudePruningParams:
    """The section `magnitude_pruning`."""

    sparsities: tuple[Annotated[float, Field(ge=0, lt=1)], ...]
    test_documents: Annotated[int, Field(ge=0)]
    max_tokens: Annotated[int, Field(ge=3)]
    seeds: Positive
    jobs: Annotated[int, Field(ge=0)]
    backend: Literal["loky", "threading"]
    latency_batches: Annotated[tuple[Positive, ...], Field(min_length=1)]
    latency_rounds: Positive
    recovery: RecoveryParams

    def __post_init__(self) -> None:
        levels = self.sparsities
        if len(levels) < 2 or levels[0] != 0 or list(levels) != sorted(set(levels)):
            given = ", ".join(f"{level:g}" for level in levels)
            raise ValueError(
                "sparsities must begin with 0, the unpruned model, and rise to at least one more; "
                f"got {given or 'none'}"
            )


@dataclass(frozen=True)
class Arm:
    """Where a path leads from the start: at each step a sparsity, and rounds of retraining."""

    schedule: str
    threshold: Threshold
    path: tuple[tuple[float, int], ...]

    @property
    def retrained(self) -> bool:
        """Does luck come in by the order of documents?"""
        return any(rounds for _, rounds in self.path)


@dataclass(frozen=True)
class Point:
    """One step of an arm, tested: logits fp32 [documents, labels].

    `rounds` of retraining lie behind it, that of the start among them; `lowest` and `highest` are
    the sparsities of single matrices; the model is kept only where it is measured further.
    """

    schedule: str
    threshold: Threshold
    sparsity: float
    rounds: int
    logits: Tensor
    lowest: float
    highest: float
    model: TextClassifier | None = None


def make_arms(levels: Sequence[float]) -> list[Arm]:
    """Every arm, those with most work first; `levels` are the sparsities above 0, rising.

    One-shot-then-retrained gets as many rounds as the iterative schedule has had up to the same
    sparsity. At the first level both are the same, which is run once.
    """
    rising = [Arm("iterative", one, tuple((level, 1) for level in levels)) for one in THRESHOLDS]
    unpruned = Arm("unpruned", "global", ((0.0, len(levels)),))
    retrained = [
        Arm("one_shot_retrained", "global", ((level, rounds),))
        for rounds, level in enumerate(levels, start=1)
        if rounds > 1
    ]
    one_shot = [Arm("one_shot", one, tuple((level, 0) for level in levels)) for one in THRESHOLDS]
    return [*rising, unpruned, *reversed(retrained), *one_shot]


def begin(
    teacher: TextClassifier, material: Material, params: MagnitudePruningParams, seed: int
) -> Point:
    """The start of all arms: the unpruned model after one round, so that all have had the same."""
    model = copy.deepcopy(teacher).to(device())
    retrain(model, material, params.recovery, 1, seed)
    return _unpruned(model.cpu(), material, rounds=1)


def follow_all(
    teacher: TextClassifier,
    start: Point,
    material: Material,
    params: MagnitudePruningParams,
    seed: int,
    threads: int,
) -> list[Point]:
    """The teacher as it comes, the start, and every arm, once a seed where it is retrained.

    Arms run side by side, each in one thread, so that results do not depend on how many do.
    """
    arms = make_arms(params.sparsities[1:])
    work = [(arm, n) for arm in arms for n in range(params.seeds if arm.retrained else 1)]
    jobs = Parallel(n_jobs=params.jobs or threads, backend=params.backend)
    keep = (arms[0], 0)
    found = [[_unpruned(teacher, material, rounds=0), start]]
    found += jobs(
        delayed(follow)(arm, start.model, material, params.recovery, seed + n, (arm, n) == keep)
        for arm, n in work
    )
    torch.set_num_threads(threads)
    points = [point for path in found for point in path]
    first = [one for one in points if one.schedule == "iterative" and one.rounds == 2]
    both = [one for one in first if one.threshold == "global"]
    return points + [replace(one, schedule="one_shot_retrained", model=None) for one in both]


def follow(
    arm: Arm,
    start: TextClassifier,
    material: Material,
    params: RecoveryParams,
    seed: int,
    keep: bool = False,
) -> list[Point]:
    """Prune and retrain a copy of `start` along the arm's path; `keep` the model of each point."""
    torch.set_num_threads(1)
    model = copy.deepcopy(start).to(device())
    points, behind = [], 1
    for sparsity, rounds in arm.path:
        clear = prune_weights(model, sparsity, arm.threshold)
        retrain(model, material, params, rounds, seed + ROUND_SEEDS * behind, clear)
        behind += rounds
        logits = classify(model, material.test_tokens)
        shares = [share for name, share in sparsities(model).items() if name != "all"]
        kept = copy.deepcopy(model).cpu() if keep else None
        place = arm.schedule, arm.threshold, sparsity, behind
        points.append(Point(*place, logits, min(shares), max(shares), kept))
    return points


def point_table(points: Sequence[Point], labels: Tensor, seed: int) -> list[Row]:
    """One row a schedule, threshold and sparsity: accuracy over seeds, and paired differences.

    `minus_unpruned` is to the start, `minus_iterative` to the iterative schedule with a global
    threshold at the same sparsity, each with its 95 % interval over documents and seeds.
    """
    groups: dict[tuple, list[Point]] = {}
    for one in points:
        groups.setdefault((one.schedule, one.threshold, one.sparsity, one.rounds), []).append(one)
    hits = {
        key: right(torch.stack([one.logits for one in own]), labels) for key, own in groups.items()
    }
    start = hits["unpruned", "global", 0.0, 1]
    iterative = {key[2]: found for key, found in hits.items() if key[:2] == ("iterative", "global")}
    rows = []
    for key, own in groups.items():
        schedule, threshold, sparsity, rounds = key
        row = {
            "arm": f"{schedule} {threshold} {100 * sparsity:g} %, {rounds} rounds",
            "schedule": schedule,
            "threshold": threshold,
            "sparsity": sparsity,
            "rounds": rounds,
            "lowest_matrix_sparsity": min(one.lowest for one in own),
            "highest_matrix_sparsity": max(one.highest for one in own),
            "accuracy_mean": hits[key].mean(),
            "accuracy_std": hits[key].mean(1).std(ddof=1) if len(own) > 1 else 0.0,
        }
        row |= paired_columns("unpruned", hits[key], start, seed)
        rows.append(
            row | paired_columns("iterative", hits[key], iterative.get(sparsity, start), seed)
        )
    return sorted(rows, key=lambda row: (row["schedule"], row["threshold"], row["sparsity"]))


def kept_models(points: Sequence[Point]) -> dict[float, TextClassifier]:
    """The models that are measured further, by sparsity: the start, and the iterative ones."""
    return {one.sparsity: one.model for one in points if one.model is not None}


def _unpruned(model: TextClassifier, material: Material, rounds: int) -> Point:
    logits = classify(model, material.test_tokens)
    return Point("unpruned", "global", 0.0, rounds, logits, 0.0, 0.0, model.cpu())
