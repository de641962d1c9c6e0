"""The fleet by hand and by conservation laws, policies, forecasts, and the stage."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from inferlab import params as sections
from inferlab.errors import InferlabError
from inferlab.serving.metrics import Objective
from inferlab.simulation.autoscaling import (
    FleetParams,
    Instance,
    Outcome,
    simulate,
    weighted_p95,
)
from inferlab.simulation.autoscaling_settings import (
    AutoscalingParams,
    Known,
    Setting,
    make_settings,
)
from inferlab.simulation.autoscaling_study import (
    choose,
    make_days,
    make_known,
    run_all,
    setting_table,
)
from inferlab.simulation.cost import from_seconds, save_costs
from inferlab.simulation.instance import simulated_instance
from inferlab.simulation.limits import Limits
from inferlab.simulation.load_day import MINUTES, make_load
from inferlab.simulation.load_forecast import forecast, last_value, mean_error
from inferlab.simulation.runs import Workers, lower_bound
from inferlab.simulation.scaling_policies import (
    Fixed,
    Hybrid,
    Predictive,
    Reactive,
    Schedule,
    ahead_of,
    without_short_gaps,
)
from inferlab.simulation.workload import Lengths, Normal
from stages import autoscaling

ROOT = Path(__file__).parent.parent
STEPS = MINUTES * 12
COST = from_seconds({"base": 0.02, "token": 3e-4, "sequence": 2e-4, "context": 3e-6, "pair": 1e-7})


def instance(limit_ms: float) -> Instance:
    """Every first token takes 100 ms at a load of 0.2 and 900 ms at 1: no distribution."""
    loads, ttft_ms = np.array([0.2, 1.0]), np.array([100.0, 900.0])
    limits_ms = np.array([0.0, 99.999, 100.0, 899.999, 900.0, limit_ms])
    return Instance(2.0, loads, ttft_ms, limits_ms, 1.0 * (ttft_ms[:, None] <= limits_ms))


INSTANCE = instance(2000.0)
FLEET = FleetParams(
    usd_per_hour=8.0,
    spin_up_s=120,
    drain_s=20,
    least=1,
    most=40,
    longest_wait_s=10.0,
    cooldown_out_s=120,
    cooldown_in_s=300,
    flap_minutes=15,
    step_s=5,
)


def steady(rate: float) -> np.ndarray:
    """One day with the same number of requests a second."""
    return np.full((1, STEPS), 5 * rate)


def run(
    arrivals: np.ndarray, policy: Any, start: float, limit_ms: float = 2000.0, **changes: Any
) -> Outcome:
    fleet = replace(FLEET, **changes)
    return simulate(arrivals, [policy], np.full(len(arrivals), start), instance(limit_ms), fleet)


def plan(*levels: tuple[int, int]) -> Schedule:
    """Instances from each minute on."""
    instances = np.zeros((1, MINUTES))
    for minute, count in levels:
        instances[:, minute:] = count
    return Schedule(instances)


def test_a_fixed_fleet_costs_its_hours() -> None:
    found = run(steady(7.0), Fixed(4), 1)
    assert found.usd[0, 0] == pytest.approx(4 * 24 * 8)
    assert found.compliance[0, 0] == 1
    assert (found.changes[0, 0], found.dropped[0, 0]) == (0, 0)


def test_billing_starts_at_the_launch_and_ends_after_draining() -> None:
    """Two instances more from a launch at 60 to a drain at 70 min, and 20 s of draining."""
    found = run(steady(1.0), plan((0, 1), (60, 3), (70, 1)), 1)
    extra_hours = 2 * (600 + 20) / 3600
    assert found.usd[0, 0] == pytest.approx(8 * (24 + extra_hours))
    ready = found.ready[0, 0]
    assert (ready[60], ready[61], ready[62], ready[69], ready[70]) == (1, 1, 1, 3, 1)
    assert found.flaps[0, 0] == 1


def test_instances_are_ready_after_their_spin_up_and_not_before() -> None:
    """Of 6 requests a second 2 are served until the launched instances join after 120 s."""
    found = run(steady(6.0), plan((0, 1), (1, 3)), 1, longest_wait_s=1e9)
    # 60 s before the launch and 120 s of spin-up at 4 a second too many, never worked off.
    assert found.waiting[0, 0] == pytest.approx(180 * 4)


def test_overload_drops_what_would_wait_too_long() -> None:
    """2 a second of 3 are served; the queue holds 10 s of work, the rest is dropped."""
    found = run(steady(3.0), Fixed(1), 1)
    assert found.served[0, 0] == pytest.approx(2 * 86400)
    assert found.waiting[0, 0] == pytest.approx(20)
    assert found.dropped[0, 0] == pytest.approx(86400 - 20)
    assert found.compliance[0, 0] < 0.01


def test_late_is_a_wait_and_the_time_of_a_loaded_instance_together() -> None:
    """A burst that waits 1.2 s is late at 900 ms of service, and in time at a looser objective."""
    burst = steady(2.0)
    burst[0, 100] += 2.4
    late = run(burst, Fixed(1), 1)
    assert late.compliance[0, 0] < 1
    assert run(burst, Fixed(1), 1, limit_ms=2101.0).compliance[0, 0] == 1


def test_in_time_is_the_share_of_a_distribution_after_the_wait() -> None:
    """Half of the first tokens within 1 s at no load, a tenth at full load; all within 2 s."""
    within = np.array([[0.0, 0.5, 1.0], [0.0, 0.1, 0.8]])
    found = Instance(1.0, np.array([0.0, 1.0]), np.zeros(2), np.array([0.0, 1e3, 2e3]), within)
    loads, waits = np.array([0.0, 1.0, 0.5, 1.0, 1.0, 2.0]), np.array([1e3, 0, 1e3, 1500, 2500, 0])
    assert found.in_time(loads, waits) == pytest.approx([0.5, 0.8, 0.3, 0.05, 0.0, 0.8])


def test_compliance_counts_the_late_ones_of_a_full_instance() -> None:
    """A full instance keeps 95 %; its fleet keeps no more, although its P95 is in time."""
    within = np.array([[0.0, 1.0], [0.0, 0.95]])
    full = Instance(2.0, np.array([0.2, 1.0]), np.array([1e2, 2e3]), np.array([0.0, 2e3]), within)
    found = simulate(steady(2.0), [Fixed(1)], np.ones(1), full, FLEET)
    assert found.compliance[0, 0] == pytest.approx(0.95)


@settings(max_examples=3, deadline=None)
@given(st.integers(0, 1000), st.floats(0.5, 12.0), st.floats(0.1, 0.9))
def test_every_request_is_served_waiting_or_dropped(seed: int, rate: float, growth: float) -> None:
    random = np.random.default_rng(seed)
    arrivals = random.poisson(5 * rate * random.uniform(0.2, 2, (2, 24)).repeat(STEPS // 24, 1))
    found = run(arrivals.astype(float), Reactive(700, 300, growth), 3)
    total = found.served + found.waiting + found.dropped
    assert np.allclose(total, found.offered)
    assert np.allclose(found.offered, arrivals.sum(1))
    assert (found.dropped >= 0).all() and (found.within <= found.offered - found.dropped).all()
    assert (found.ready >= 1).all() and (found.ready <= FLEET.most).all()


def test_runs_side_by_side_are_those_alone() -> None:
    random = np.random.default_rng(0)
    arrivals = random.poisson(20, (2, STEPS)).astype(float)
    policies = [Fixed(3), Reactive(700, 300, 0.25)]
    both = simulate(arrivals, policies, np.array([2.0, 4.0]), INSTANCE, FLEET)
    alone = simulate(arrivals[1:], policies[1:], np.array([4.0]), INSTANCE, FLEET)
    assert np.array_equal(both.ready[1, 1], alone.ready[0, 0])
    assert both.usd[1, 1] == alone.usd[0, 0]
    assert both.compliance[1, 1] == alone.compliance[0, 0]


def test_reactive_grows_under_load_and_counts_what_is_pending() -> None:
    """A jump to five instances' worth: never more in flight than the policy asked for."""
    arrivals = steady(1.0)
    arrivals[0, STEPS // 2 :] = 5 * 9.0
    found = run(arrivals, Reactive(700, 300, 0.25), 1)
    ready = found.ready[0, 0]
    assert ready[MINUTES // 2] == 1 and 6 <= ready[-1] <= 11
    assert ready.max() <= 12
    assert found.dropped[0, 0] > 0


def test_cool_downs_slow_changes_and_avoid_flaps() -> None:
    random = np.random.default_rng(1)
    arrivals = random.poisson(5 * 8 * random.uniform(0.5, 1.5, (3, 288)).repeat(60, 1)).astype(
        float
    )
    quick, slow = (
        run(arrivals, Reactive(700, 500, 0.25), 4, cooldown_out_s=one, cooldown_in_s=one)
        for one in (0, 900)
    )
    assert quick.flaps.sum() > 2 * slow.flaps.sum()
    assert quick.changes.sum() > slow.changes.sum()


def test_decisions_by_hand() -> None:
    seen, there = np.array([800.0, 500.0, 100.0, np.nan]), np.array([4.0, 4.0, 4.0, 4.0])
    reactive = Reactive(700, 300, 0.3)
    assert reactive.wanted(0, seen, there).tolist() == [6, 4, 3, 4]
    predictive = Predictive(np.array([[2.0, 3.1], [2.0, 4.0], [2.0, 2.0], [2.0, 7.0]]), 0.1)
    assert predictive.wanted(1, seen, there).tolist() == [4, 5, 3, 8]
    # High P95: the larger; between: no less than now; low: the forecast; unknown: no less.
    assert Hybrid(predictive, reactive).wanted(1, seen, there).tolist() == [6, 5, 3, 8]


def test_plans_look_ahead_and_keep_instances_through_short_gaps() -> None:
    needed = np.array([[1.0, 3, 1, 1, 2, 1, 1, 1, 2]])
    assert ahead_of(needed, 2)[0].tolist() == [3, 3, 2, 2, 2, 1, 2, 2, 2]
    assert without_short_gaps(needed, 2)[0].tolist() == [1, 3, 2, 2, 2, 1, 1, 1, 2]
    assert without_short_gaps(needed, 3)[0].tolist() == [1, 3, 2, 2, 2, 2, 2, 2, 2]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=30), st.integers(0, 5))
def test_bridged_plans_are_never_dearer(levels: list[int], gap: int) -> None:
    """Cost: instance minutes, and for each launch as many as the gap that is bridged."""
    needed = np.array([levels], dtype=float)
    bridged = without_short_gaps(needed, gap)
    assert (bridged >= needed).all()

    def cost(instances: np.ndarray) -> float:
        launches = np.maximum(np.diff(instances[0], prepend=0), 0).sum()
        return instances.sum() + gap * launches

    assert cost(bridged) <= cost(needed)


def test_p95_is_weighted() -> None:
    values = np.array([[1.0, 1.0, 7.0], [5.0, 5.0, 7.0]])
    weights = np.array([[96.0, 94.0, 0.0], [4.0, 6.0, 0.0]])
    assert weighted_p95(values, weights).tolist() == [1, 5, 0]


@pytest.fixture(scope="module")
def params() -> AutoscalingParams:
    found = sections.load("autoscaling", AutoscalingParams, ROOT / "params.yaml")
    load = replace(found.load, history_days=3)
    tried = replace(found.settings, models=("ridge",), fixed=(8, 14), high=(0.8,), growth=(0.25,))
    return replace(found, days=4, load=load, settings=replace(tried, margins=(0.1, 0.3)))


def test_load_has_its_mean_and_its_daily_spikes(params: AutoscalingParams) -> None:
    quiet = replace(params.load.surprises, a_day=0.0)
    load = replace(params.load, surprises=quiet, level_spread=0.0, history_days=0)
    plain = make_load(replace(load, daily_spikes=()), 2.0, 5, 0)
    assert plain.minutes.sum() / 86400 == pytest.approx(12, rel=0.02)
    assert plain.minutes.sum() == plain.steps.sum()
    assert len(plain.steps) == STEPS and len(plain.history) == 0
    spiky = make_load(load, 2.0, 5, 0)
    gain = (spiky.minutes - plain.minutes).reshape(24, 60).mean(1) / 60
    assert gain[9] > 0.8 and gain[20] > 1.5 and abs(gain[3]) < 0.5


def test_load_is_that_of_its_seed(params: AutoscalingParams) -> None:
    one, same, other = (make_load(params.load, 2.0, 5, seed) for seed in (3, 3, 4))
    assert np.array_equal(one.steps, same.steps) and not np.array_equal(one.steps, other.steps)


@pytest.mark.parametrize("model", ["ridge", "boosting"])
def test_forecasts_beat_the_last_value_and_know_nothing_of_the_future(
    model: str, params: AutoscalingParams
) -> None:
    load = make_load(replace(params.load, history_days=7), 2.0, 5, 1)
    guess = forecast(load.history, load.minutes, 2, model, 0)
    naive = mean_error(last_value(load.history, load.minutes), load.minutes, 2)
    assert mean_error(guess, load.minutes, 2) < naive
    changed = load.minutes.copy()
    changed[700:] = 0
    again = forecast(load.history, changed, 2, model, 0)
    assert np.allclose(guess[:701], again[:701])
    assert not np.allclose(guess[701:710], again[701:710])


def test_forecasts_that_are_refused(params: AutoscalingParams) -> None:
    day = np.ones(MINUTES)
    with pytest.raises(
        InferlabError, match=r"at least 2 days of history; got 1 \(autoscaling.load"
    ):
        forecast(day, day, 2, "ridge", 0)
    with pytest.raises(InferlabError, match=r"forecasting model 'rigde'; .*did you mean ridge\?"):
        forecast(np.ones(2 * MINUTES), day, 2, "rigde", 0)


def test_foresight_is_cheapest_among_those_that_keep_the_target(
    params: AutoscalingParams,
) -> None:
    days = make_days(params, INSTANCE.capacity, 0)
    known, errors = make_known(days, params, INSTANCE, 0)
    found = make_settings(params, known)
    outcome = run_all(days, found, known, INSTANCE, params, 1)
    rows = setting_table(found, outcome)
    bound = [row for row in rows if row["policy"] == "foresight"]
    assert max(row["compliance"] for row in bound) > 0.99
    least = min(row["usd_per_day"] for row in bound if row["compliance"] > 0.99)
    others = [row for row in rows if row["policy"] != "foresight" and row["compliance"] > 0.99]
    assert others and all(row["usd_per_day"] > least for row in others)
    # What it costs is what the plan takes: its instance minutes, and draining after each.
    place = next(n for n, one in enumerate(found) if one.policy == "foresight")
    instances = found[place].rule.instances
    drained = np.maximum(-np.diff(instances, axis=1), 0).sum(1)
    minutes = instances.sum(1) + drained * params.fleet.drain_s / 60
    assert np.allclose(outcome.usd[place], minutes / 60 * 8)
    assert {row["model"] for row in errors} == {"last value", "ridge"}


@pytest.mark.parametrize("jobs", [2, 7, 1000])
def test_split_settings_come_to_the_same_to_the_bit(params: AutoscalingParams, jobs: int) -> None:
    days = make_days(params, INSTANCE.capacity, 0)
    known, _ = make_known(days, params, INSTANCE, 0)
    found = make_settings(params, known)
    whole = run_all(days, found, known, INSTANCE, params, 1)
    split = replace(params, workers=Workers(jobs, "threading", None))
    parts = run_all(days, found, known, INSTANCE, split, 1)
    for field in fields(Outcome):
        assert np.array_equal(getattr(parts, field.name), getattr(whole, field.name))


def test_settings_are_judged_on_days_that_they_were_not_chosen_on(
    params: AutoscalingParams,
) -> None:
    days = make_days(params, INSTANCE.capacity, 0)
    known, _ = make_known(days, params, INSTANCE, 0)
    found = make_settings(params, known)
    outcome = run_all(days, found, known, INSTANCE, params, 1)
    picks = choose(found, outcome, 0.99, 0.5)
    assert [row["policy"] for _, row in picks] == [*params.policies, "foresight"]
    spoiled = replace(outcome, usd=outcome.usd.copy())
    spoiled.usd[:, 2:] *= 3
    later = choose(found, spoiled, 0.99, 0.5)
    for (before, row), (after, again) in zip(picks, later, strict=True):
        assert before == after
        assert again["usd_per_day"] == pytest.approx(3 * row["usd_per_day"])
    judged = setting_table(found, outcome, slice(2, None))
    assert picks[0][1]["compliance"] == judged[picks[0][0]]["compliance"]


def test_a_setting_that_keeps_the_target_by_luck_is_not_chosen() -> None:
    kept = [[0.985, 0.989, 0.997, 1.0], [0.9915, 0.992, 0.9925, 0.992], [0.999] * 4]
    assert lower_bound([1.0, 2.0, 3.0], 0.95) == pytest.approx(2 - 2.919986 / 3**0.5)
    within = np.tile(np.array(kept), 2)
    usd = np.repeat([[1.0], [2.0], [3.0]], 8, axis=1)
    ones = np.ones_like(usd)
    outcome = Outcome(**{field.name: ones for field in fields(Outcome)})
    outcome = replace(outcome, usd=usd, within=within)
    settings = [Setting("fixed", str(n), Fixed(n), ("fixed",) * (n == 3)) for n in (1, 2, 3)]
    [(mean, _)] = choose(settings, outcome, 0.99, 0.5)
    [(sure, row)] = choose(settings, outcome, 0.99, 0.95)
    assert (mean, sure, row["kept_target_before"], row["at_end"]) == (0, 1, 1, "")
    [(none, row)] = choose(settings, outcome, 0.9999, 0.95)
    assert (none, row["kept_target_before"], row["at_end"]) == (2, 0, "fixed")


def test_settings_know_the_ends_of_their_sweeps(params: AutoscalingParams) -> None:
    tried = replace(params.settings, high=(0.5, 0.2, 0.8, 1.0), growth=(0.25,), fixed=(8, 12, 14))
    known = Known(INSTANCE, {"ridge": np.ones((1, MINUTES))}, np.ones((1, MINUTES)))
    found = make_settings(replace(params, settings=tried), known)
    ends = {one.name: one.at_end for one in found}
    assert [ends[f"{n} instances"] for n in (8, 12, 14)] == [("fixed",), (), ("fixed",)]
    assert [ends[f"as at {n}%, +25%"] for n in (20, 80, 100)] == [("high",), (), ()]
    assert ends["ridge +10%, as at 50%"] == ("margins",)
    # Of an instance with 100 ms at a load of 0.2 and 900 at 1, the P95 at 0.8 and at 0.6 of it.
    (rule,) = (one.rule for one in found if one.name == "as at 80%, +25%")
    assert (rule.high_ms, rule.low_ms) == pytest.approx((700.0, 380.0))


@pytest.fixture
def project(workspace: Path) -> dict[str, Any]:
    """The current folder holds a step's cost; returns small parameters."""
    content = yaml.safe_load(Path("params.yaml").read_text())
    overlay = yaml.safe_load((ROOT / "params/smoke.yaml").read_text())["autoscaling"]
    content["run"]["threads"] = 1
    for key, value in overlay.items():
        content["autoscaling"][key] = (
            content["autoscaling"][key] | value if isinstance(value, dict) else value
        )
    Path("params.yaml").write_text(yaml.safe_dump(content))
    Path("data/step_cost").mkdir(parents=True)
    save_costs(Path("data/step_cost/costs.json"), {"this_machine": COST})
    return content


def test_an_instance_is_full_where_its_objective_ends(params: AutoscalingParams) -> None:
    """One token each, one at a time, in steps of 0.1 s: ten a second if nobody may wait."""
    one = Normal(1.0, 0.0, 1, 1)
    limits = Limits(1, 64, True, 0, 64, 32)
    objective = Objective(ttft_ms=1000.0, tpot_ms=100.0, share=0.95)
    changes = {"lengths": Lengths(one, one), "limits": limits, "objective": objective}
    wanted = replace(params.instance, **changes, requests=2000)
    cost = from_seconds({"base": 0.1, "token": 0, "sequence": 0, "context": 0, "pair": 0})
    found = simulated_instance(replace(wanted, loads=(0.1, 0.5, 1.0)), cost, 0)
    assert 6 < found.capacity < 10
    assert found.ttft_ms[0] < found.ttft_ms[1] < found.ttft_ms[2] == pytest.approx(1000, rel=0.2)
    # First tokens are of seeds that the capacity was not found on.
    assert found.limits_ms[-1] == 1000 and 0.93 < found.within[2, -1] < found.within[1, -1] == 1
    strict = replace(wanted, objective=replace(objective, ttft_ms=250.0))
    assert simulated_instance(strict, cost, 0).capacity < found.capacity
    with pytest.raises(InferlabError, match="this_machine keeps the objective at no load; loosen"):
        simulated_instance(replace(wanted, objective=replace(objective, ttft_ms=99.0)), cost, 0)
    with pytest.raises(InferlabError, match="capacity must be above 0; got 0"):
        replace(found, capacity=0.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"policies": ["reactiv"]}, r"holds 'reactiv'; known: .*did you mean reactive\?"),
        ({"load": {"history_days": 1}}, "history_days must be at least 2, to .*; got 1"),
        ({"load": {"mean_instances": 0.0}}, "load.mean_instances must be greater than 0; got 0.0"),
        ({"settings": {"models": ["arima"]}}, "settings.models holds 'arima'; known: boosting, ri"),
        ({"fleet": {"step_s": 7}}, "spin_up_s must be a multiple of step_s, 7; got 120"),
        ({"instance": {"loads": [1.0, 0.5]}}, "instance: loads must rise to 1; got 1.0, 0.5"),
        ({"instance": {"seeds": 1}}, "seeds must be greater than or equal to 2; got 1"),
        ({"fleet": {"most": 0}}, "most must be greater than or equal to 1; got 0"),
    ],
)
def test_parameters_that_are_refused(
    project: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    for key, value in change.items():
        old = project["autoscaling"][key]
        project["autoscaling"][key] = old | value if isinstance(value, dict) else value
    Path("params.yaml").write_text(yaml.safe_dump(project))
    with pytest.raises(InferlabError, match=message):
        sections.load("autoscaling", AutoscalingParams)


@pytest.mark.smoke
def test_stage(project: dict[str, Any]) -> None:
    autoscaling.main()
    found = json.loads(Path("metrics/autoscaling.json").read_text())
    for policy in ("fixed", "reactive", "predictive", "hybrid", "foresight"):
        assert found[f"usd_per_day_{policy}"] > 0
        assert 0 < found[f"compliance_{policy}"] <= 1
    assert 0 < found["forecast_error_pct_ridge"] < 50
    assert Path("plots/autoscaling/chosen.csv").read_text().count("\n") == 6
    for name in ("front", "day"):
        assert Path(f"plots/autoscaling/{name}.png").stat().st_size > 10_000
