"""Calibration, routing against brute force, the simulated pair, and the stage."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from inferlab import params as sections
from inferlab.data.documents import Documents
from inferlab.distillation.scored import Scored, save_answers, save_scored
from inferlab.errors import InferlabError
from inferlab.evaluation.calibration import (
    auroc,
    expected_calibration_error,
    fit_temperature,
    reliability,
    top_probability,
)
from inferlab.simulation.cascade import (
    EVERYTHING,
    Answers,
    choose_threshold,
    oracle_accuracy,
    random_accuracy,
    route,
)
from inferlab.simulation.cascade_pair import PairParams, pair_costs, pair_table, simulate
from inferlab.simulation.cascade_scores import load_scores, measured_cost_ratio
from inferlab.simulation.cascade_study import CascadeParams, choice_table, curve_table, judge
from inferlab.store import read_json, write_json
from stages import cascade

LABELS = ("sky", "sport", "sea")
THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.9)


def make_answers(confidence: list[float], small: list[int], large: list[int]) -> Answers:
    return Answers(np.array(confidence), np.array(small, bool), np.array(large, bool))


@st.composite
def any_answers(draw: st.DrawFn) -> Answers:
    count = draw(st.integers(1, 12))
    bits = st.lists(st.integers(0, 1), min_size=count, max_size=count)
    confidence = draw(st.lists(st.floats(0, 1), min_size=count, max_size=count))
    return make_answers(confidence, draw(bits), draw(bits))


EXAMPLE = make_answers([0.9, 0.8, 0.6, 0.4], [1, 0, 1, 0], [1, 1, 0, 1])


def test_routing_by_hand() -> None:
    """Below 0.7 the last two are escalated: one is lost and one is won."""
    point = route(EXAMPLE, 0.7)
    assert (point.escalated, point.accuracy) == (0.5, 0.5)
    assert point.cost(0.1) == pytest.approx(0.6)
    assert route(EXAMPLE, 0.5).accuracy == 0.75
    assert (route(EXAMPLE, 0.0).accuracy, route(EXAMPLE, 1.0).accuracy) == (0.5, 0.75)
    assert oracle_accuracy(EXAMPLE, 0.25) == 0.75
    assert oracle_accuracy(EXAMPLE, 1.0) == 1.0
    assert random_accuracy(EXAMPLE, 0.5) == pytest.approx(0.625)


@given(any_answers(), st.floats(0, 1))
def test_routing_by_going_through_the_questions(answers: Answers, threshold: float) -> None:
    asked = right = 0
    for confidence, small, large in zip(
        answers.confidence, answers.small_right, answers.large_right, strict=True
    ):
        asked += confidence < threshold
        right += large if confidence < threshold else small
    point = route(answers, threshold)
    assert point.escalated == pytest.approx(asked / len(answers.confidence))
    assert point.accuracy == pytest.approx(right / len(answers.confidence))
    assert point.accuracy <= oracle_accuracy(answers, point.escalated) + 1e-12


@given(any_answers(), st.floats(0, 1), st.floats(0, 1))
def test_a_higher_threshold_never_escalates_less(
    answers: Answers, one: float, other: float
) -> None:
    low, high = sorted((one, other))
    assert route(answers, low).escalated <= route(answers, high).escalated


def test_random_routing_is_the_mean_over_all_choices() -> None:
    random = np.random.default_rng(0)
    drawn = []
    for _ in range(4000):
        chosen = random.permutation(4) < 2
        drawn.append(np.where(chosen, EXAMPLE.large_right, EXAMPLE.small_right).mean())
    assert np.mean(drawn) == pytest.approx(random_accuracy(EXAMPLE, 0.5), abs=0.01)


def test_the_cheapest_threshold_that_loses_little_is_chosen() -> None:
    assert choose_threshold(EXAMPLE, (0.95, 0.7, 0.5), 0.0) == 0.5
    assert choose_threshold(EXAMPLE, (0.7, 0.85), 0.0) == 0.85
    assert choose_threshold(EXAMPLE, (0.3, 0.35), 0.25) == 0.3
    assert choose_threshold(EXAMPLE, (0.3, 0.35), 0.0) == EVERYTHING


@pytest.mark.parametrize("threshold", [-0.1, 1.5, float("nan")])
def test_thresholds_outside_are_refused(threshold: float) -> None:
    with pytest.raises(InferlabError, match="a threshold must be between 0 and 1; got"):
        route(EXAMPLE, threshold)


def test_answers_of_different_lengths_are_refused() -> None:
    with pytest.raises(InferlabError, match="got 2 confidences, 1 answers of the small model and"):
        make_answers([0.1, 0.2], [1], [1, 0])


def test_calibration_error_by_hand() -> None:
    """Two bins: 0.2 and 0.4 with one right of two, 0.9 and 0.7 with both right."""
    confidence, right = np.array([0.2, 0.4, 0.9, 0.7]), np.array([1, 0, 1, 1], bool)
    error = 0.5 * abs(0.5 - 0.3) + 0.5 * abs(1 - 0.8)
    assert expected_calibration_error(confidence, right, 2) == pytest.approx(error)
    bins = reliability(confidence, right, 2)
    assert [(one.count, one.accuracy) for one in bins] == [(2, 0.5), (2, 1.0)]
    assert reliability(np.array([1.0]), np.array([True]), 10)[0].confidence == 1.0
    with pytest.raises(InferlabError, match="of one length above 0; got 1 and 0"):
        reliability(np.array([1.0]), np.array([], bool), 10)


def logits_and_labels(sharpness: float, count: int = 4000) -> tuple[np.ndarray, np.ndarray]:
    """Labels drawn from the softmax of logits, and the logits times `sharpness`."""
    random = np.random.default_rng(0)
    logits = 2 * random.standard_normal((count, 5))
    chances = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    labels = (chances.cumsum(1) > random.random((count, 1))).argmax(1)
    return sharpness * logits, labels


@pytest.mark.parametrize("sharpness", [0.5, 1.0, 4.0])
def test_temperature_is_found_and_mends_calibration(sharpness: float) -> None:
    logits, labels = logits_and_labels(sharpness)
    temperature = fit_temperature(logits[:2000], labels[:2000])
    assert temperature == pytest.approx(sharpness, rel=0.1)
    rest, right = logits[2000:], logits[2000:].argmax(1) == labels[2000:]
    before, after = (
        expected_calibration_error(top_probability(rest, one), right, 15)
        for one in (1.0, temperature)
    )
    assert after < 0.04
    assert sharpness == 1.0 or after < before / 2


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=2, max_size=30))
def test_auroc_is_the_librarys(pairs: list[tuple[int, bool]]) -> None:
    confidence = np.array([one / 4 for one, _ in pairs])
    right = np.array([one for _, one in pairs])
    if right.all() or not right.any():
        assert auroc(confidence, right) == 0.5
    else:
        assert auroc(confidence, right) == pytest.approx(roc_auc_score(right, confidence))


@pytest.fixture(scope="module")
def pair() -> PairParams:
    root = Path(__file__).parent.parent
    return sections.load("cascade", CascadeParams, root / "params.yaml").pair


def test_simulated_answers_are_what_is_assumed(pair: PairParams) -> None:
    found = {signal: simulate(pair, 0.5, signal, 0) for signal in (0.1, 0.8)}
    for answers in found.values():
        assert answers.small_accuracy == pytest.approx(pair.small.accuracy, abs=0.015)
        assert answers.large_accuracy == pytest.approx(pair.large.accuracy, abs=0.015)
        error = expected_calibration_error(answers.confidence, answers.small_right, 15)
        assert error < 0.02
    low, high = (auroc(one.confidence, one.small_right) for one in found.values())
    assert 0.5 < low < high - 0.1
    # One hidden quantity: whatever the weaker model has right, the stronger one has as well.
    nested = simulate(pair, 1.0, 0.5, 0)
    assert not (nested.small_right & ~nested.large_right).any()
    apart = simulate(pair, 0.0, 0.5, 0)
    both = (apart.small_right & apart.large_right).mean()
    assert both == pytest.approx(pair.small.accuracy * pair.large.accuracy, abs=0.015)


def test_costs_of_the_pair_by_hand(pair: PairParams) -> None:
    prices = {"mine/small": (1.0, 2.0), "mine/large": (10.0, 20.0)}
    own = replace(
        pair,
        small=replace(pair.small, model="mine/small", ttft_ms=((100, 10.0), (200, 30.0))),
        large=replace(pair.large, model="mine/large", ttft_ms=((100, 100.0), (200, 100.0))),
        input_tokens=150,
        output_tokens=100,
        usd_per_mtok=prices,
    )
    costs = pair_costs(own)
    assert costs.small_usd == pytest.approx((150 * 1 + 100 * 2) / 1e6)
    assert costs.ratio == pytest.approx(0.1)
    assert (costs.small_ttft_ms, costs.large_ttft_ms) == (20, 100)
    curve, chosen = pair_table(own, costs, (0.0, 1.0), 0.01, 0)
    none, all_of_them = curve[:2]
    assert none["cost_vs_large"] == pytest.approx(0.1) and none["ttft_ms_mean"] == 20
    assert all_of_them["cost_vs_large"] == pytest.approx(1.1)
    assert all_of_them["usd_per_1000"] == pytest.approx(1000 * 1.1 * costs.large_usd)
    assert len(chosen) == len(own.correlations) * len(own.signals)


def test_a_better_signal_never_makes_the_cascade_dearer(pair: PairParams) -> None:
    ordered = replace(pair, correlations=(0.5,), signals=(0.2, 0.5, 0.9))
    _, chosen = pair_table(ordered, pair_costs(ordered), np.linspace(0, 1, 41), 0.02, 0)
    escalated = [row["escalated"] for row in chosen]
    assert escalated == sorted(escalated, reverse=True) and escalated[0] > escalated[-1] + 0.1


def test_committed_prices_have_date_and_source(pair: PairParams) -> None:
    costs = pair_costs(pair)
    assert 0 < costs.ratio < 1
    for one in (costs.small, costs.large):
        assert one.date == pair.price_date.isoformat() and "genai-prices" in one.source


def test_faults_of_the_pair_are_one_line(pair: PairParams) -> None:
    unknown = replace(pair.small, model="together/meta-llama/Llama-2-7b-chat")
    with pytest.raises(InferlabError, match=r"did you mean .*meta-llama/Llama-2-7b-chat-hf"):
        pair_costs(replace(pair, small=unknown))
    with pytest.raises(InferlabError, match=r"pair.input_tokens must lie within .*got 9000"):
        pair_costs(replace(pair, input_tokens=9000))
    free = replace(pair, usd_per_mtok={pair.large.model: (0.0, 0.0)})
    with pytest.raises(InferlabError, match="costs nothing; a cascade before it saves nothing"):
        pair_costs(free)


def scored(count: int, seed: int) -> Scored:
    """Documents of three labels and a teacher that is right nine times of ten."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (count,), generator=random)
    said = torch.where(torch.rand(count, generator=random) < 0.9, labels, (labels + 1) % 3)
    logits = 3 * torch.nn.functional.one_hot(said, 3) + torch.randn(count, 3, generator=random) / 9
    tokens = torch.ones(count, 4, dtype=torch.int32)
    return Scored(Documents(tokens, labels), logits, torch.zeros(count, 2, 2))


def student_logits(test: Scored, seeds: int) -> torch.Tensor:
    """Students that are too sure of themselves, and less often right where they are less sure."""
    random = torch.Generator().manual_seed(9)
    labels = torch.nn.functional.one_hot(test.documents.labels, 3)
    logits = labels + torch.randn(seeds, *labels.shape, generator=random)
    return 4 * logits


@pytest.fixture
def project(workspace: Path) -> dict[str, Any]:
    """The current folder holds the logits of a teacher and of two students of it."""
    content = yaml.safe_load(Path("params.yaml").read_text())
    content["run"]["threads"] = 1
    content["cascade"] |= {"halves": 3}
    content["cascade"]["pair"] |= {"questions": 500, "seeds": 2}
    Path("params.yaml").write_text(yaml.safe_dump(content))
    for folder in ("data/teacher_logits", "data/student_logits", "metrics/timing"):
        Path(folder).mkdir(parents=True)
    test = scored(600, 0)
    save_scored(Path("data/teacher_logits"), {"test": test}, LABELS)
    save_answers(Path("data/student_logits"), student_logits(test, 2), test, LABELS)
    latencies = {"student_latency_ms_batch_32": 2.0, "teacher_latency_ms_batch_32": 80.0}
    write_json(Path("metrics/timing/distill.json"), latencies)
    return content


def load_both() -> Any:
    return load_scores(Path("data/student_logits"), Path("data/teacher_logits"))


def test_thresholds_are_chosen_without_the_half_they_are_judged_on(
    project: dict[str, Any],
) -> None:
    """Spoiled labels of one half change what is chosen on it and nothing else."""
    params = sections.load("cascade", CascadeParams)
    params = replace(params, halves=2, thresholds=THRESHOLDS)
    scores = load_both()
    before = judge(scores, params, seed=0)
    judged = np.random.default_rng(0).permutation(len(scores.labels))[300:]
    labels = scores.labels.copy()
    labels[judged] = (labels[judged] + 1) % 3
    after = judge(replace(scores, labels=labels), params, seed=0)
    scaled = 1 + len(THRESHOLDS)
    for row, name in itertools.product((0, scaled), ("threshold", "temperature", "escalated")):
        assert before[row][name] == after[row][name]
    assert before[0]["accuracy"] > after[0]["accuracy"] + 0.2


def test_a_cascade_of_a_student_that_knows_its_limits_beats_random_routing(
    project: dict[str, Any],
) -> None:
    params = sections.load("cascade", CascadeParams)
    rows = judge(load_both(), params, 0)
    raw, scaled = choice_table(rows, 0.025, params.accuracy_loss)
    curve = curve_table(rows, params.thresholds, 0.025)
    (row,) = (one for one in curve if (one["confidence"], one["threshold"]) == ("scaled", 0.7))
    assert row["random_accuracy"] + 0.02 < row["accuracy"] < row["oracle_accuracy"]
    assert row["cost_vs_teacher"] == pytest.approx(0.025 + row["escalated"])
    assert scaled["ece"] < raw["ece"] / 2
    assert scaled["temperature"] > 1.5


@pytest.mark.smoke
def test_stage(project: dict[str, Any]) -> None:
    cascade.main()
    found = json.loads(Path("metrics/cascade.json").read_text())
    assert found["ece_after"] < found["ece_before"]
    assert found["student_accuracy"] < found["cascade_accuracy"] < found["oracle_accuracy"]
    assert found["cost_vs_teacher"] == pytest.approx(2 / 80 + found["escalated"])
    for name, lines in (("curve", 20), ("choices", 2), ("pair_curve", 90), ("pair_choices", 9)):
        assert Path(f"plots/cascade/{name}.csv").read_text().count("\n") == lines + 1
    for name in ("cascade", "pair"):
        assert Path(f"plots/cascade/{name}.png").stat().st_size > 10_000


@pytest.mark.smoke
def test_a_stated_cost_replaces_the_measured_one(project: dict[str, Any]) -> None:
    project["cascade"]["cost_ratio"] = 0.2
    Path("params.yaml").write_text(yaml.safe_dump(project))
    Path("metrics/timing/distill.json").unlink()
    cascade.main()
    found = json.loads(Path("metrics/cascade.json").read_text())
    assert found["cost_vs_teacher"] == pytest.approx(0.2 + found["escalated"])


def test_other_labels_documents_and_batches_are_refused(project: dict[str, Any]) -> None:
    student, test = Path("data/student_logits"), scored(600, 0)
    write_json(student / "manifest.json", {"labels": ["sky", "sport", "lake"]})
    with pytest.raises(InferlabError, match="teacher has 3, the student 3, and 'lake' is known to"):
        load_both()
    fewer = scored(500, 0)
    save_answers(student, student_logits(fewer, 2), fewer, LABELS)
    with pytest.raises(InferlabError, match="holds logits of 500 documents and 3 labels"):
        load_both()
    other = replace(test, documents=replace(test.documents, labels=test.documents.labels.flip(0)))
    save_answers(student, student_logits(test, 2), other, LABELS)
    with pytest.raises(InferlabError, match="give the documents different labels; run the stage"):
        load_both()
    timing = read_json(Path("metrics/timing/distill.json"))
    with pytest.raises(InferlabError, match=r"cascade.latency_batch must be one .* \[32\]; got 8"):
        measured_cost_ratio(timing, 8, Path("metrics/timing/distill.json"))


@pytest.mark.smoke
def test_stage_refuses_bad_parameters_before_any_work(project: dict[str, Any]) -> None:
    faults = {
        "cascade.thresholds.1 must be less than or equal to 1; got 1.5": {"thresholds": [0.5, 1.5]},
        "cascade.thresholds.0 must be greater than or equal to 0; got -0.5": {"thresholds": [-0.5]},
    }
    for message, change in faults.items():
        Path("params.yaml").write_text(
            yaml.safe_dump(project | {"cascade": project["cascade"] | change})
        )
        with pytest.raises(SystemExit, match=message):
            cascade.main()
    assert not Path("plots").exists()
