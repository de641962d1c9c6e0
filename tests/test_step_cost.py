"""Step costs: the fit, the log of a real scheduler, the server's arguments, and the validation."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from inferlab import params as parameters
from inferlab.errors import InferlabError
from inferlab.serving.engine import EngineParams, command
from inferlab.serving.load import Outcome
from inferlab.simulation import validation
from inferlab.simulation.cost import StepCost, from_seconds, load_cost, save_costs
from inferlab.simulation.cost_study import round_factors
from inferlab.simulation.fit import TERMS, fit
from inferlab.simulation.limits import Limits
from inferlab.simulation.measured import (
    Measured,
    StepCostParams,
    trace_workload,
    with_limits,
)
from inferlab.simulation.published import published_fit
from inferlab.simulation.steps import Steps, Window, front_end_seconds, read_window
from inferlab.store import read_json, save_tensors

TRUE = {"base": 0.03, "token": 2e-3, "sequence": 2.5e-3, "context": 1e-6, "pair": 2e-6}


def features(count: int, seed: int) -> np.ndarray:
    """Steps of a busy engine: [steps, terms]."""
    rng = np.random.default_rng(seed)
    sequences = rng.integers(1, 17, count)
    prefill = np.where(rng.random(count) < 0.3, rng.integers(16, 512, count), 0)
    context, pairs = sequences * rng.integers(10, 500, count), prefill**2 / 2
    columns = [np.ones(count), sequences + prefill, sequences, context, pairs]
    return np.stack(columns, axis=1).astype(float)


def test_fit_recovers_what_made_the_times() -> None:
    table = features(200, 0)
    found = fit(table, table @ [TRUE[term] for term in TERMS])
    assert found.seconds == pytest.approx(TRUE, rel=1e-6)
    assert found.p95_error < 1e-8


def test_noise_does_not_pull_the_fit_down() -> None:
    """Slow steps count in full: relative to what was measured, 30 % noise would cost 15 %."""
    table = features(20_000, 1)
    exact = table @ [TRUE[term] for term in TERMS]
    noise = np.random.default_rng(2).lognormal(-0.045, 0.3, len(exact))
    found = fit(table, exact * noise)
    assert found.ratios.mean() == pytest.approx(1, abs=0.01)
    predicted = table @ [found.seconds[term] for term in TERMS]
    assert predicted.sum() == pytest.approx(exact.sum(), rel=0.02)
    assert found.median_error == pytest.approx(0.2, abs=0.02)


def test_fit_needs_steps_that_took_time() -> None:
    with pytest.raises(InferlabError, match="4 steps cannot give 5 coefficients; measure longer"):
        fit(features(4, 0), np.ones(4))
    with pytest.raises(InferlabError, match="took no time"):
        fit(features(8, 0), np.zeros(8))


def test_published_gpus_are_plausible() -> None:
    """fp16 weights of Llama-3-8B, 16 GB, are read in every step: at 2 and 3.35 TB/s 8, 4.8 ms."""
    slow, fast = (published_fit(name) for name in ("a100", "h100"))
    assert 0.008 < slow.seconds["base"] + slow.seconds["token"] < 0.018
    assert 0.0048 < fast.seconds["base"] + fast.seconds["token"] < 0.010
    assert slow.seconds["token"] > fast.seconds["token"] > 2 * 8.03e9 / 989e12
    assert max(slow.median_error, fast.median_error) < 0.05
    with pytest.raises(InferlabError, match=r"unknown hardware 'a10'; known: a100, h100; did you"):
        published_fit("a10")


def test_costs_are_kept_by_hardware(tmp_path: Path) -> None:
    costs = {
        "this_machine": from_seconds(TRUE | {"front_end": 0.004}),
        "a100": StepCost(1, 2, 3, 4, 5),
    }
    save_costs(tmp_path / "costs.json", costs)
    assert load_cost(tmp_path / "costs.json", "this_machine") == costs["this_machine"]
    assert costs["this_machine"].half_pair == 10**6 and costs["this_machine"].front_end == 4 * 10**9
    with pytest.raises(
        InferlabError, match="unknown hardware 'a101'; known: a100, this_machine; did"
    ):
        load_cost(tmp_path / "costs.json", "a101")
    with pytest.raises(InferlabError, match=r"holds no step costs.*; run stage step_cost"):
        load_cost(tmp_path / "none.json", "a100")


LOG = """\
add,0.5
step,0.6,0.7,9,1,0,81,0,1,0
add,10.0
add,10.1
step,10.2,10.5,32,1,0,1024,0,1,2
step,10.6,10.9,17,2,32,256,0,1,2
step,10.95,11.0,2,2,60,0,1,0,1
step,11.2,11.25,1,1,40,0,0,0,0
"""


def test_log_by_hand(tmp_path: Path) -> None:
    """A step lasts until the next begins, the last one until it ends."""
    log = tmp_path / "log"
    log.write_text(LOG)
    window = read_window(log, 9.0, 20.0)
    assert window.steps.seconds == pytest.approx([0.4, 0.35, 0.25, 0.05])
    assert window.steps.features[1].tolist() == [1, 17, 2, 32, 128]
    assert window.preemptions == 1
    assert window.engine_ttft == pytest.approx((10.5 + 10.9 - 10.0 - 10.1) / 2)
    seen = [Outcome(0, 0, 2, (0.7, 2.0), 32, 2, None), Outcome(0, 0.1, 2, (1.0, 2.0), 16, 2, None)]
    assert front_end_seconds(seen, window.engine_ttft) == pytest.approx(0.8 - 0.65)
    with pytest.raises(InferlabError, match="holds no step of a load"):
        read_window(log, 30.0, 40.0)
    with pytest.raises(InferlabError, match="2 requests came and 1 got a first token"):
        read_window(log, 9.0, 10.55)


def test_drift_is_the_rounds_own_factor() -> None:
    table = features(50, 3)
    exact = table @ [TRUE[term] for term in TERMS]
    rounds = [[([], Window(Steps(factor * exact, table), 0.0))] for factor in (0.9, 1.0, 1.2)]
    found = fit(table, exact)
    assert round_factors(Measured(rounds, []), found) == pytest.approx([0.9, 1.0, 1.2])


def section(**changes: Any) -> dict[str, Any]:
    return yaml.safe_load(Path("params.yaml").read_text())["step_cost"] | changes


def read(folder: Path, content: dict[str, Any]) -> StepCostParams:
    file = folder / "params.yaml"
    file.write_text(yaml.safe_dump({"step_cost": content}))
    return parameters.load("step_cost", StepCostParams, file)


def test_server_gets_the_limits_that_are_simulated(tmp_path: Path) -> None:
    params = read(tmp_path, section())
    limits = Limits(8, 256, True, 64, 48, 32)
    engine = with_limits(params.engine, limits, Path("/logs/heldout"))
    assert isinstance(engine, EngineParams)
    assert engine.max_num_seqs == 8 and not engine.prefix_caching
    expected = {
        "--max-num-batched-tokens=256",
        "--num-gpu-blocks-override=49",
        "--block-size=32",
        "--long-prefill-token-threshold=64",
        "--enable-chunked-prefill",
        "--scheduler-cls=inferlab.simulation.recorder.RecordingScheduler",
        '--additional-config={"step_log": "/logs/heldout"}',
    }
    assert set(engine.extra_arguments) == expected
    assert "--tensor-parallel-size=1" in command("x", Path("x"), 1, engine)
    split = dataclasses.replace(params.engine, tensor_parallel=2, pipeline_parallel=3)
    line = command("x", Path("x"), 1, with_limits(split, limits, Path("x")))
    assert "--tensor-parallel-size=2" in line and "--pipeline-parallel-size=3" in line
    whole = with_limits(params.engine, Limits(8, 256, False, 0, 48, 32), Path("x"))
    assert "--no-enable-chunked-prefill" in whole.extra_arguments


def test_requests_that_do_not_fit_their_server_are_refused(tmp_path: Path) -> None:
    too_long = [{"concurrency": 1, "input_tokens": 1270, "output_tokens": 16}]
    with pytest.raises(InferlabError, match="loads: a request of 1270 and 16 tokens does not fit"):
        read(tmp_path, section(loads=too_long))
    content = section()
    content["heldout_limits"]["blocks"] = 4
    with pytest.raises(
        InferlabError, match="traces: short_prompts: a request of 128 and 48 tokens"
    ):
        read(tmp_path, content)


def replays(params: StepCostParams, seed: int, factors: list[float]) -> dict[str, Any]:
    """What an engine would have shown that takes `factor` times as long in each round."""
    from inferlab.simulation.fast import simulate
    from inferlab.simulation.record import latencies

    cost = from_seconds(TRUE | {"front_end": 0.004})
    traces: dict[str, Any] = {}
    for trace in params.traces:
        rounds = []
        for factor in factors:
            work = trace_workload(trace, seed)
            record = simulate(work, validation.scaled(cost, factor), params.heldout_limits)
            seen = latencies(record, cost.front_end)
            due = (record.arrival / 1e12).tolist()
            rounds.append(
                {
                    "due": due,
                    "end": [one + late for one, late in zip(due, seen.e2e.tolist(), strict=True)],
                    "ttft": seen.ttft.tolist(),
                    "tpot": [None if np.isnan(one) else one for one in seen.tpot.tolist()],
                    "e2e": seen.e2e.tolist(),
                    "steps": record.steps,
                    "preemptions": record.preemptions,
                    "step_ms": 1.0,
                }
            )
        traces[trace.name] = rounds
    return {"traces": traces, "factors": factors}


def test_a_simulator_that_is_right_has_no_error(tmp_path: Path) -> None:
    params = read(tmp_path, section())
    cost = from_seconds(TRUE | {"front_end": 0.004})
    judged = validation.judge(cost, params, replays(params, 0, [1.0, 1.0]), 0)
    values = validation.metrics(judged)
    assert max(value for name, value in values.items() if name.endswith("_pct")) < 1e-6
    assert values["configurations"] == 3
    assert values["preemptions_engine"] == values["preemptions_simulated"] > 0
    assert min(one.present for one in judged) > 1
    assert {one.name for one in judged if one.saturated} == {"overload"}


def test_a_drifting_engine_shows_in_the_spread_and_not_when_adapted(tmp_path: Path) -> None:
    params = read(tmp_path, section())
    cost = from_seconds(TRUE | {"front_end": 0.004})
    judged = validation.judge(cost, params, replays(params, 0, [1.0, 1.5]), 0)
    values = validation.metrics(judged)
    assert values["repeat_spread_pct"] > 30
    assert values["e2e_error_pct"] > 10 > 1e-6 > values["e2e_error_adapted_pct"]
    rows = validation.table(judged)
    assert len(rows) == 4 * 4 and rows[0]["engine_lowest"] < rows[0]["engine_highest"]


def test_other_traces_than_were_recorded_are_refused(tmp_path: Path) -> None:
    params = read(tmp_path, section())
    recorded = replays(params, 0, [1.0])
    del recorded["traces"]["overload"]
    with pytest.raises(InferlabError, match=r"recorded traces are .*; run stage step_cost again"):
        validation.judge(from_seconds(TRUE | {"front_end": 0.0}), params, recorded, 0)
    only = dataclasses.replace(params, traces=params.traces[3:])
    alone = {"traces": {"overload": replays(params, 0, [1.0])["traces"]["overload"]}}
    judged = validation.judge(from_seconds(TRUE), only, alone | {"factors": [1.0]}, 0)
    with pytest.raises(InferlabError, match="every held-out trace is beyond saturation; add one"):
        validation.metrics(judged)


@pytest.mark.smoke
def test_stages_with_real_servers(workspace: Path, tiny_llama: Path) -> None:
    """Two servers of a tiny model; their steps are fitted and their traces judged."""
    import shutil

    import torch

    from stages import simulator_validation, step_cost

    content = yaml.safe_load(Path("params.yaml").read_text())
    smoke = yaml.safe_load((Path(__file__).parent.parent / "params/smoke.yaml").read_text())
    for name, value in smoke["step_cost"].items():
        own = content["step_cost"]
        own[name] = own[name] | value if isinstance(value, dict) else value
    content["step_cost"]["variant"] = "base"
    Path("params.yaml").write_text(yaml.safe_dump(content))
    shutil.copytree(tiny_llama, "models/base")
    Path("data/windows").mkdir(parents=True)
    ids = torch.randint(3, 500, (4, 256), generator=torch.Generator().manual_seed(0))
    save_tensors(Path("data/windows/training.safetensors"), {"input_ids": ids})
    step_cost.main()
    found = read_json(Path("metrics/step_cost.json"))
    assert found["base_ms"] + found["token_us"] + found["sequence_us"] > 0
    assert found["steps"] >= 8 + 8
    assert set(json.loads(Path("data/step_cost/costs.json").read_text())) == {
        "this_machine",
        "a100",
        "h100",
    }
    simulator_validation.main()
    judged = read_json(Path("metrics/simulator_validation.json"))
    keys = ("throughput", "ttft", "tpot", "e2e")
    assert {f"{key}_error_pct" for key in keys} | {"repeat_spread_pct"} <= set(judged)
    assert Path("plots/simulator_validation/errors.png").stat().st_size > 0
