"""The simulated studies: figures, fairness, bad input, and the stages on a given step cost."""

import csv
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import yaml

from inferlab import params as parameters
from inferlab.errors import InferlabError
from inferlab.simulation import chunked_study, continuous_study, scheduling_study, summary
from inferlab.simulation.continuous_plots import plot_rates
from inferlab.simulation.cost import from_seconds, save_costs
from inferlab.simulation.fast import simulate
from inferlab.simulation.limits import Limits
from inferlab.simulation.record import Record
from inferlab.simulation.runs import interval
from inferlab.simulation.workload import Workload
from inferlab.store import read_json
from stages import chunked_prefill, continuous_batching, scheduling

COST = from_seconds(
    {"base": 0.03, "token": 2e-3, "sequence": 2.5e-3, "context": 1e-6, "pair": 2e-6}
)
LIMITS = {
    "max_num_seqs": 32,
    "token_budget": 2048,
    "chunked_prefill": True,
    "chunk": 0,
    "blocks": 728,
    "block_size": 32,
}
SMALL: dict[str, dict[str, Any]] = {
    "continuous_batching": {"requests": 150, "loads": [0.5, 0.7, 1.5], "seeds": 2},
    "chunked_prefill": {"requests": 150, "long_shares": [0.2], "seeds": 2},
    "scheduling": {"requests": 150, "loads": [0.9, 1.3], "seeds": 2},
    "autoscaling": {"days": 4, "policies": ["fixed", "reactive"]},
}


def section(name: str, **changes: Any) -> dict[str, Any]:
    content = yaml.safe_load(Path("params.yaml").read_text())[name]
    content["workers"] = {"jobs": 1, "backend": "sequential", "address": None}
    return content | SMALL[name] | changes


def read(folder: Path, name: str, kind: type, **changes: Any) -> Any:
    file = folder / "params.yaml"
    file.write_text(yaml.safe_dump({name: section(name, **changes)}))
    return parameters.load(name, kind, file)


def finished(finish: list[float], classes: list[int], tokens: list[int]) -> Record:
    """A record of requests that all arrived at 0."""
    ones = np.ones(len(finish), dtype=np.int64)
    work = Workload(0 * ones, np.array(tokens) - 1, ones, np.array(classes))
    times = (np.array(finish) * 1e12).astype(np.int64)
    return Record(work, 0 * ones, times, times, times)


def test_jain_by_hand() -> None:
    assert scheduling_study.jain(np.array([2.0, 2.0, 2.0])) == 1
    assert scheduling_study.jain(np.array([1.0, 0.0, 0.0, 0.0])) == 0.25
    assert scheduling_study.jain(np.array([1.0, 3.0])) == pytest.approx(16 / 20)


def test_service_gap_by_hand() -> None:
    which = np.arange(4)
    one_after_the_other = finished([1, 2, 3, 4], [0, 0, 1, 1], [5, 5, 9, 9])
    chosen = one_after_the_other.workload.classes == 0
    assert scheduling_study.service_gap(one_after_the_other, which, chosen) == 1
    in_turn = finished([1, 2, 3, 4], [0, 1, 0, 1], [5, 9, 5, 9])
    chosen = in_turn.workload.classes == 0
    assert scheduling_study.service_gap(in_turn, which, chosen) == pytest.approx(0.5)
    assert scheduling_study.service_gap(in_turn, which, np.ones(4, dtype=bool)) == 0


def test_interval_by_hand() -> None:
    """Student's t with two degrees of freedom: 4.303 standard errors."""
    found = interval([1.0, 2.0, 3.0])
    assert found.mean == 2
    assert found.half == pytest.approx(4.303 / np.sqrt(3), rel=1e-3)
    assert interval([5.0]).half == 0


def test_unstable_points_print_no_average() -> None:
    steady = {"unstable": 0, "ttft_ms_p50": 5.0, "e2e_ms_mean": 9.0, "requests_per_s": 1.0}
    grown = steady | {"unstable": 1, "ttft_ms_p50": 900.0}
    row = summary.over_seeds([grown, grown, steady])
    assert row["unstable"] == 1
    assert row["ttft_ms_p50"] == row["e2e_ms_mean"] == row["e2e_ms_mean_half"] == ""
    assert row["requests_per_s"] == 1
    assert summary.over_seeds([grown, steady, steady])["ttft_ms_p50"] == pytest.approx(910 / 3)


def test_smaller_chunks_shorten_the_tail_and_lengthen_the_wait(tmp_path: Path) -> None:
    """The claim of 33.19, and the chunk that is chosen for a goal between the two."""
    params = read(tmp_path, "chunked_prefill", chunked_study.ChunkedPrefillParams)
    cheap = replace(COST, half_pair=COST.half_pair // 10)
    rows = chunked_study.chunk_table(params, cheap, seed=0, threads=1)
    tails = [row["itl_ms_p999"] for row in rows]
    assert tails == sorted(tails)
    assert 3 * tails[0] < tails[-1]
    waits = [row["ttft_long_ms_p95"] for row in rows]
    assert waits[0] > waits[2]
    goal = rows[0]["itl_ms_p999"] + 1.0
    assert chunked_study.best_chunk(rows, 0.2, goal) == 128
    assert chunked_study.best_chunk(rows, 0.2, 1.0) is None
    assert chunked_study.best_chunk(rows, 0.2, 1e9) is not None
    assert chunked_study.metrics(rows, replace(params, itl_goal_ms=1.0))["best_chunk"] == -1


def test_chunks_bound_the_step() -> None:
    """No step computes more tokens than the chunk, so no gap is longer than that step."""
    limits = chunked_study.arm_limits(128, Limits(32, 8192, True, 0, 1456, 32))
    rng = np.random.default_rng(0)
    prompts, outputs = rng.integers(1, 3000, 80), rng.integers(1, 200, 80)
    work = Workload(np.sort(rng.integers(0, 10**14, 80)), prompts, outputs, 0 * prompts)
    record = simulate(work, COST, limits)
    most = COST.step(128, 32, 32 * 3200, 128 * 2 * 3200)
    assert record.preemptions == 0
    assert record.gaps.longest <= most


@pytest.fixture(scope="module")
def scheduled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Every policy below and above capacity."""
    folder = tmp_path_factory.mktemp("scheduling")
    params = read(folder, "scheduling", scheduling_study.SchedulingParams, requests=400)
    rate = scheduling_study.capacity(params, COST, 0)
    return scheduling_study.policy_table(params, COST, rate, 0, 1)


def test_starvation_is_shown_and_cured(scheduled: list[dict[str, Any]]) -> None:
    """Shortest first has the lower mean, and in overload long waits, which ageing shortens."""
    rows = {(row["load"], row["policy"]): row for row in scheduled}
    high = 1.3
    assert rows[0.9, "shortest_oracle"]["run_mean_minus_fifo_s"] < 0
    waits = {name: rows[high, name]["largest_wait_s"] for name in ("fifo", "shortest_oracle")}
    assert waits["shortest_oracle"] > 1.5 * waits["fifo"]
    assert rows[high, "shortest_aged"]["largest_wait_s"] < waits["shortest_oracle"]
    assert rows[high, "priority"]["urgent_p95_s"] < 0.5 * rows[high, "fifo"]["urgent_p95_s"]
    assert rows[high, "priority_aged"]["normal_p95_s"] <= rows[high, "priority"]["normal_p95_s"]
    assert (
        rows[high, "shortest_oracle"]["service_gap_sizes"] > rows[high, "fifo"]["service_gap_sizes"]
    )


def test_overload_is_flagged_and_has_no_steady_mean(scheduled: list[dict[str, Any]]) -> None:
    for row in scheduled:
        assert row["unstable"] == int(row["load"] > 1)
        assert (row["steady_mean_s"] == "") == (row["load"] > 1)


@pytest.mark.parametrize(
    ("name", "kind", "changes", "message"),
    [
        (
            "continuous_batching",
            continuous_study.ContinuousBatchingParams,
            {"steady_load": 0.6},
            "steady_load must be one of loads; got 0.6",
        ),
        (
            "continuous_batching",
            continuous_study.ContinuousBatchingParams,
            {"loads": [0.7, 0.0]},
            r"loads.1 must be greater than 0; got 0.0",
        ),
        (
            "chunked_prefill",
            chunked_study.ChunkedPrefillParams,
            {"chunks": [128, 8193]},
            "chunks must lie between limits.max_num_seqs, 32, and limits.token_budget, 8192; got",
        ),
        (
            "chunked_prefill",
            chunked_study.ChunkedPrefillParams,
            {"long_prompts": {"mean": 9e3, "std": 1.0, "least": 1025, "most": 9000}},
            "limits.token_budget must hold a whole request of 9700 tokens",
        ),
        (
            "scheduling",
            scheduling_study.SchedulingParams,
            {"policies": ["priority"]},
            "policies must hold fifo",
        ),
        (
            "scheduling",
            scheduling_study.SchedulingParams,
            {"steady_load": 0.8},
            "steady_load must be one of loads; got 0.8",
        ),
        (
            "continuous_batching",
            continuous_study.ContinuousBatchingParams,
            {"limits": LIMITS | {"blocks": 81}},
            "a request of 1912 and 700 tokens can never be served from 81 blocks of 32",
        ),
        (
            "chunked_prefill",
            chunked_study.ChunkedPrefillParams,
            {"limits": LIMITS | {"blocks": 100, "token_budget": 8192}},
            "a request of 4096 and 700 tokens can never be served from 100 blocks of 32",
        ),
        (
            "scheduling",
            scheduling_study.SchedulingParams,
            {"limits": LIMITS | {"blocks": 65}},
            "a request of 1400 and 700 tokens can never be served from 65 blocks of 32",
        ),
    ],
)
def test_sections_that_are_refused(
    tmp_path: Path, name: str, kind: type, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InferlabError, match=message) as caught:
        read(tmp_path, name, kind, **changes)
    assert f"params.yaml: {name}" in str(caught.value)


def test_a_trace_takes_the_place_of_drawn_requests(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    lines = [f"{i},{10 + i},{3}" for i in range(100)]
    file.write_text("\n".join(["timestamp,input_tokens,output_tokens", *lines]))
    kind = continuous_study.ContinuousBatchingParams
    params = read(tmp_path, "continuous_batching", kind, trace=str(file))
    work = continuous_study.workload_of(params, 4.0, seed=1)
    assert work.prompts.tolist() == list(range(10, 110))
    assert (work.arrivals[-1] - work.arrivals[0]) / 1e12 == pytest.approx(99 / 4)
    rows = continuous_study.rates_table(params, COST, 1.0, 0, 1)
    assert all(row["requests_per_s_half"] == "" and row["requests_per_s"] > 0 for row in rows)
    plot_rates(rows, tmp_path / "rates.png")


def test_traces_that_cannot_be_run(tmp_path: Path) -> None:
    kind, missing = continuous_study.ContinuousBatchingParams, tmp_path / "none.csv"
    params = read(tmp_path, "continuous_batching", kind, trace=str(missing))
    with pytest.raises(InferlabError, match=r"none.csv cannot be read as a trace: .*No such file"):
        continuous_study.workload_of(params, 1.0, 0)
    missing.write_text("timestamp,input_tokens,output_tokens\n0,10,3\n1,30000,1\n")
    with pytest.raises(InferlabError, match=r"none.csv: limits: a request of 30512 and 1 tokens"):
        continuous_study.workload_of(params, 1.0, 0)


def test_the_largest_wait_is_of_everybody_and_an_undisturbed_request_has_no_slowdown() -> None:
    """20 requests that never meet, short and long ones in turn; the first is made to wait."""
    ones = np.ones(20, dtype=np.int64)
    prompts = np.where(np.arange(20) % 2, 500, 1)
    work = Workload(np.arange(20) * 10**15, prompts, ones, 0 * ones)
    cost = replace(COST, front_end=10**12)
    record = simulate(work, cost, Limits(**LIMITS))
    record.first[0] += 10**14
    found = scheduling_study.run_figures(record, cost, 2048)
    assert found["largest_wait_s"] == pytest.approx(100 + (cost.alone(1, 1, 2048)[1] / 1e12 + 1))
    assert found["jain_slowdown"] == pytest.approx(1)


def run_stage(module: ModuleType, name: str) -> dict[str, float]:
    content = yaml.safe_load(Path("params.yaml").read_text())
    content[name] = section(name)
    Path("params.yaml").write_text(yaml.safe_dump(content))
    Path("data/step_cost").mkdir(parents=True, exist_ok=True)
    save_costs(Path("data/step_cost/costs.json"), {"this_machine": COST})
    module.main()
    return read_json(Path(f"metrics/{name}.json"))


def table(path: str) -> list[dict[str, str]]:
    with Path(path).open() as file:
        return list(csv.DictReader(file))


@pytest.mark.smoke
def test_stage_continuous_batching(workspace: Path) -> None:
    found = run_stage(continuous_batching, "continuous_batching")
    assert found["capacity_ratio_to_best_static"] > 1.2
    assert found["capacity_static_1_rps"] < found["capacity_static_8_rps"]
    rows = table("plots/continuous_batching/rates.csv")
    assert len(rows) == 5 * 3
    beyond = [row for row in rows if row["load"] == "1.5"]
    assert all(row["unstable"] == "1" and row["ttft_ms_p95"] == "" for row in beyond)
    speeds = read_json(Path("metrics/timing/continuous_batching.json"))
    assert speeds["simulated_requests_per_s_fast"] > 0
    assert Path("plots/continuous_batching/rates.png").stat().st_size > 0


@pytest.mark.smoke
def test_stage_chunked_prefill(workspace: Path) -> None:
    found = run_stage(chunked_prefill, "chunked_prefill")
    assert found["itl_ms_p999_128"] < found["itl_ms_p999_whole"]
    assert len(table("plots/chunked_prefill/chunks.csv")) == 5
    assert Path("plots/chunked_prefill/chunks.png").stat().st_size > 0


@pytest.mark.smoke
def test_stage_scheduling(workspace: Path) -> None:
    found = run_stage(scheduling, "scheduling")
    assert found["mean_s_shortest_oracle"] < found["mean_s_fifo"]
    assert len(table("plots/scheduling/policies.csv")) == 2 * 7
    assert Path("plots/scheduling/policies.png").stat().st_size > 0


@pytest.mark.smoke
def test_unknown_policy_stops_the_stage(workspace: Path) -> None:
    content = yaml.safe_load(Path("params.yaml").read_text())
    content["scheduling"]["policies"] = ["fifo", "shortest_orakle"]
    Path("params.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(
        SystemExit, match=r"unknown policy 'shortest_orakle'; known: .* did you mean"
    ):
        scheduling.main()
    assert not list(Path().rglob("*.csv"))
