"""Magnitude pruning of the classifier: masks, schedules, formats, kernels, and the stage."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from test_distill import LABELS, scored
from test_teacher import make_encoder

from inferlab.distillation.scored import save_scored
from inferlab.distillation.training import TrainingParams, accuracy
from inferlab.errors import InferlabError
from inferlab.models.encoder import TextClassifier, new_classifier, save_classifier
from inferlab.profiling import latency
from inferlab.pruning.magnitude import (
    format_bytes,
    keep_masks,
    matrices,
    other_bytes,
    prune_weights,
    sparsities,
    with_sparse_layers,
)
from inferlab.pruning.magnitude_measures import NEVER, sparse_faster_from
from inferlab.pruning.magnitude_study import Arm, Point, follow, make_arms, point_table
from inferlab.pruning.recovery import Material, RecoveryParams, make_material, retrain
from inferlab.store import read_json
from stages import magnitude_pruning

SETTINGS = TrainingParams(epochs=0.5, batch=16, learning_rate=0.01, warmup=0.1, weight_decay=0.0)
RECOVERY = RecoveryParams(teacher_share=0.5, temperature=2.0, training=SETTINGS)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def material(encoder: Path) -> Material:
    """Documents whose label is told by one word, and logits that know it."""
    plain = new_classifier(encoder, 2, seed=0)
    return make_material(scored(plain, 128, 0), scored(plain, 96, 1), 0, 6, "x")


@pytest.fixture(scope="module")
def teacher(encoder: Path, material: Material) -> TextClassifier:
    """A tiny classifier that has learnt the task. Not to be changed."""
    torch.set_num_threads(1)
    model = new_classifier(encoder, 2, seed=0)
    retrain(model, material, RECOVERY, 30, seed=0)
    return model.eval()


def copy_of(model: TextClassifier) -> TextClassifier:
    again = TextClassifier(model.shape, model.pad)
    again.load_state_dict(model.state_dict())
    return again.eval()


def test_thresholds_by_hand() -> None:
    weights = {"a": torch.tensor([[1.0, -2.0], [3.0, -4.0]]), "b": torch.tensor([[10.0, -20.0]])}
    shared = keep_masks(weights, 0.5, "global")
    assert shared["a"].tolist() == [[False, False], [False, True]]
    assert shared["b"].tolist() == [[True, True]]
    alone = keep_masks(weights, 0.5, "layer")
    assert alone["a"].tolist() == [[False, False], [True, True]]
    assert alone["b"].tolist() == [[False, True]]


@given(st.floats(0, 0.99), st.floats(0, 0.99), st.integers(0, 9))
@settings(max_examples=30, deadline=None)
def test_global_threshold_parts_large_from_small_and_steps_are_nested(
    one: float, two: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = {name: torch.randn(3, 5, generator=generator) for name in "ab"}
    low, high = sorted((one, two))
    kept = keep_masks(weights, high, "global")
    magnitudes = torch.cat([weights[name].abs().flatten() for name in "ab"])
    flat = torch.cat([kept[name].flatten() for name in "ab"])
    assert int((~flat).sum()) == int(30 * high)
    if not flat.all():
        assert magnitudes[~flat].amax() <= magnitudes[flat].amin()
    first = keep_masks(weights, low, "global")
    stepped = keep_masks({name: weights[name] * first[name] for name in "ab"}, high, "global")
    assert all(torch.equal(stepped[name], kept[name]) for name in "ab")


def test_only_the_layers_matrices_are_pruned(teacher: TextClassifier) -> None:
    model = copy_of(teacher)
    prune_weights(model, 0.5, "layer")
    changed = {
        name
        for (name, one), other in zip(
            model.state_dict().items(), teacher.state_dict().values(), strict=True
        )
        if not torch.equal(one, other)
    }
    names = ("query", "key", "value", "output", "up", "down")
    assert changed == {f"layers.{layer}.{name}.weight" for layer in (0, 1) for name in names}
    assert set(sparsities(model).values()) == {0.5}


def test_what_is_pruned_stays_zero_in_training(teacher: TextClassifier, material: Material) -> None:
    model = copy_of(teacher)
    clear = prune_weights(model, 0.7, "global")
    before = {name: weight.detach().clone() for name, weight in matrices(model).items()}
    retrain(model, material, RECOVERY, 1, seed=0, after_step=clear)
    for name, weight in matrices(model).items():
        zero = before[name] == 0
        assert (weight[zero] == 0).all()
        assert not torch.equal(weight, before[name])
    assert torch.equal(model.words.weight, teacher.words.weight)
    assert sparsities(model)["all"] == pytest.approx(0.7, abs=1e-3)


def test_sparse_kernels_compute_the_same(teacher: TextClassifier, material: Material) -> None:
    model = copy_of(teacher)
    prune_weights(model, 0.8, "global")
    tokens = material.test_tokens[:7]
    with torch.no_grad():
        expected = model(tokens)
        found = with_sparse_layers(model)(tokens)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert isinstance(model.layers[0].up, torch.nn.Linear)


def test_bytes_by_hand(teacher: TextClassifier) -> None:
    """Two layers of four 16 x 16 matrices, one 32 x 16 and one 16 x 32; a quarter is kept."""
    model = copy_of(teacher)
    prune_weights(model, 0.75, "layer")
    count = 2 * (4 * 256 + 2 * 512)
    offsets = 2 * (4 * 17 + 33 + 17)
    assert format_bytes(model, torch.float32) == {
        "dense": 4 * count,
        "csr": 8 * count // 4 + 4 * offsets,
        "bitmask": 4 * count // 4 + count // 8,
    }
    assert format_bytes(model, torch.bfloat16)["csr"] == 6 * count // 4 + 4 * offsets
    everything = sum(weight.nbytes for weight in model.parameters())
    assert other_bytes(model) == everything - 4 * count


def test_arms_have_had_equal_training() -> None:
    arms = make_arms((0.3, 0.5, 0.7, 0.9))
    rounds: dict[tuple[str, float], int] = {}
    for arm in arms:
        behind = 0
        for sparsity, more in arm.path:
            behind += more
            if arm.threshold == "global":
                rounds[arm.schedule, sparsity] = behind
    for sparsity in (0.5, 0.7, 0.9):
        assert rounds["one_shot_retrained", sparsity] == rounds["iterative", sparsity]
        assert rounds["one_shot", sparsity] == 0
    assert rounds["unpruned", 0.0] == rounds["iterative", 0.9] == 4


def test_first_step_of_both_retrained_schedules_is_the_same(
    teacher: TextClassifier, material: Material
) -> None:
    path = Arm("iterative", "global", ((0.5, 1), (0.9, 1)))
    once = Arm("one_shot_retrained", "global", ((0.5, 1),))
    first, second = follow(path, teacher, material, RECOVERY, seed=3, keep=True)
    (alone,) = follow(once, teacher, material, RECOVERY, seed=3)
    assert torch.equal(first.logits, alone.logits)
    assert (first.rounds, second.rounds, alone.model) == (2, 3, None)
    zero = {name: weight == 0 for name, weight in matrices(first.model).items()}
    assert all((weight[zero[name]] == 0).all() for name, weight in matrices(second.model).items())
    assert second.lowest <= 0.9 <= second.highest


def test_retraining_makes_good_what_pruning_breaks(
    teacher: TextClassifier, material: Material
) -> None:
    def score(schedule: str, path: tuple[tuple[float, int], ...]) -> float:
        points = follow(Arm(schedule, "global", path), teacher, material, RECOVERY, seed=0)
        return accuracy(points[-1].logits, material.test_labels)

    whole = score("unpruned", ((0.0, 0),))
    broken = score("one_shot", ((0.9, 0),))
    healed = score("iterative", ((0.5, 10), (0.9, 10)))
    assert whole > 0.9
    assert broken < healed - 0.1


def test_table_pairs_documents_and_spreads_over_seeds() -> None:
    labels = torch.zeros(4, dtype=torch.long)

    def point(schedule: str, sparsity: float, rounds: int, right: list[int]) -> Point:
        logits = torch.tensor([[float(one), 0.5] for one in right])
        return Point(schedule, "global", sparsity, rounds, logits, sparsity, sparsity)

    rows = point_table(
        [
            point("unpruned", 0.0, 1, [1, 1, 1, 0]),
            point("iterative", 0.9, 2, [1, 1, 0, 0]),
            point("iterative", 0.9, 2, [1, 0, 0, 0]),
            point("one_shot", 0.9, 1, [0, 0, 0, 0]),
        ],
        labels,
        seed=0,
    )
    found = {row["schedule"]: row for row in rows}
    assert found["iterative"]["accuracy_mean"] == 0.375
    assert found["iterative"]["accuracy_std"] == pytest.approx(0.25 / math.sqrt(2))
    assert found["iterative"]["minus_unpruned"] == -0.375
    assert found["one_shot"]["minus_iterative"] == -0.375
    assert found["unpruned"]["minus_unpruned"] == found["iterative"]["minus_iterative"] == 0


def latencies(csr: dict[float, float]) -> list[dict[str, Any]]:
    times = {("dense_bf16", 0.0): 2.0}
    for sparsity, taken in csr.items():
        times |= {("dense", sparsity): 4.0, ("csr", sparsity): taken}
    first = [
        {"kernel": kernel, "sparsity": sparsity, "batch": 1, "latency_ms": taken}
        for (kernel, sparsity), taken in times.items()
    ]
    return [*first, {"kernel": "csr", "sparsity": 0.0, "batch": 2, "latency_ms": 0.1}]


def test_where_sparse_first_wins() -> None:
    found = latencies({0.0: 9.0, 0.5: 5.0, 0.7: 3.0, 0.9: 1.0})
    assert sparse_faster_from(found, "dense") == 0.7
    assert sparse_faster_from(found, "dense_bf16") == 0.9
    assert sparse_faster_from(latencies({0.0: 9.0, 0.5: 5.0}), "dense") == NEVER == -1


def test_median_leaves_the_first_round_out(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    order = []
    taken = {"a": iter([9.0, 1.0, 3.0, 2.0]), "b": iter([9.0, 5.0, 5.0, 5.0])}

    def call(name: str) -> None:
        order.append(name)
        clock[0] += next(taken[name])

    monkeypatch.setattr(latency.time, "perf_counter", lambda: clock[0])
    found = latency.median_ms({"a": lambda: call("a"), "b": lambda: call("b")}, rounds=3)
    assert found == {"a": 2000, "b": 5000}
    assert order == ["a", "b"] * 4


@pytest.mark.parametrize("sparsity", [-0.1, 1.0, 1.5, math.nan])
def test_sparsity_outside_its_range_is_refused(teacher: TextClassifier, sparsity: float) -> None:
    with pytest.raises(InferlabError, match=r"sparsity must be at least 0 and below 1; got"):
        prune_weights(copy_of(teacher), sparsity, "global")


@pytest.mark.parametrize(
    ("tokens", "documents", "message"),
    [
        (7, 0, r"y.max_tokens must be at most the teacher's 6; got 7 \(params.yaml: y.max_tokens"),
        (6, 41, r"y.test_documents must be at most the teacher's 40; got 41"),
    ],
)
def test_more_than_the_teacher_has_is_refused(
    teacher: TextClassifier, tokens: int, documents: int, message: str
) -> None:
    with pytest.raises(InferlabError, match=message):
        make_material(scored(teacher, 8, 0), scored(teacher, 40, 1), documents, tokens, "y")


def write_project(teacher: TextClassifier, encoder: Path, name: str, changes: dict) -> dict:
    """In the current folder: a teacher, its logits, and small parameters of the stage `name`."""
    content = yaml.safe_load(Path("params.yaml").read_text())
    content["run"]["threads"] = 1
    common = {"test_documents": 40, "max_tokens": 6, "latency_batches": [1, 2]}
    content[name] |= {**common, "latency_rounds": 1, **changes}
    content[name]["recovery"]["training"] |= {"epochs": 0.5, "batch": 16, "learning_rate": 0.01}
    Path("params.yaml").write_text(yaml.safe_dump(content))
    Path("models/teacher").mkdir(parents=True)
    save_classifier(Path("models/teacher"), teacher, LABELS, encoder)
    Path("data/teacher_logits").mkdir(parents=True)
    splits = {"train": scored(teacher, 64, 0), "test": scored(teacher, 50, 1)}
    save_scored(Path("data/teacher_logits"), splits, LABELS)
    return content


@pytest.mark.smoke
def test_stage_magnitude_pruning(
    teacher: TextClassifier, encoder: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latency, "SHORTEST", 0.001)
    levels = [0.0, 0.3, 0.5, 0.7, 0.9]
    content = write_project(teacher, encoder, "magnitude_pruning", {"seeds": 2})
    magnitude_pruning.main()
    found = read_json(Path("metrics/magnitude_pruning.json"))
    names = ("accuracy", "bytes", "latency_ms")
    assert {f"{name}_{100 * level:g}" for name in names for level in levels} <= set(found)
    sizes = [found[f"bytes_{100 * level:g}"] for level in levels]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == sum(weight.nbytes for weight in teacher.parameters())
    assert found["sparse_faster_from"] in (NEVER, *levels)
    rows = Path("plots/magnitude_pruning/points.csv").read_text().splitlines()
    # three unpruned, four of each other schedule and threshold
    assert len(rows) == 1 + 3 + 5 * 4
    # both fp32 kernels at five sparsities and bf16 once, for two batches
    latency_rows = Path("plots/magnitude_pruning/latencies.csv").read_text().splitlines()
    assert len(latency_rows) == 1 + 2 * 11
    assert Path("plots/magnitude_pruning/pruning.png").stat().st_size > 0

    for wrong, message in (
        ([0.0, 0.5, 1.0], r"magnitude_pruning.sparsities.2 must be less than 1; got 1.0"),
        ([0.0, -0.5], r"magnitude_pruning.sparsities.1 must be greater than or equal to 0"),
        ([0.3, 0.5], r"begin with 0, the unpruned model, and rise .*; got 0.3, 0.5"),
        ([0.0, 0.5, 0.3], r"begin with 0, the unpruned model, and rise .*; got 0, 0.5, 0.3"),
        ([], r"begin with 0, the unpruned model, and rise .*; got none"),
    ):
        content["magnitude_pruning"]["sparsities"] = wrong
        Path("params.yaml").write_text(yaml.safe_dump(content))
        with pytest.raises(SystemExit, match=message):
            magnitude_pruning.main()
    content["magnitude_pruning"]["sparsities"] = levels
    Path("params.yaml").write_text(yaml.safe_dump(content))
    Path("data/teacher_logits/manifest.json").write_text('{"labels": ["sky", "sea"]}')
    with pytest.raises(SystemExit, match="teacher and student must have the same labels"):
        magnitude_pruning.main()
    assert read_json(Path("metrics/magnitude_pruning.json")) == found


def test_retraining_takes_whole_rounds(teacher: TextClassifier, material: Material) -> None:
    """Two rounds are twice the documents: the training of one with twice the epochs."""
    longer = replace(RECOVERY, training=replace(SETTINGS, epochs=1.0))
    one, two = copy_of(teacher), copy_of(teacher)
    retrain(one, material, RECOVERY, 2, seed=0)
    retrain(two, material, longer, 1, seed=0)
    assert torch.equal(one.layers[0].up.weight, two.layers[0].up.weight)
    retrain(one, material, RECOVERY, 0, seed=0)
    assert torch.equal(one.layers[0].up.weight, two.layers[0].up.weight)
