"""Metrics are finite numbers, outputs appear on success only, and a killed stage leaves none."""

import errno
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from inferlab import params
from inferlab.errors import InferlabError
from inferlab.run import Run, checked, stage

PARAMS = "run: {seed: 7, threads: 1}\nexample: {size: 3}\nmany: {first: {size: 1}}\n"
STAGE = """
import sys, time
from inferlab import params
from inferlab.run import stage

@params.section
class Params:
    size: int

with stage("example", Params) as run:
    folder = run.folder("models/example")
    (folder / "weights").write_text("half")
    run.metrics("metrics/example.json", {"size": 1})
    print("writing", flush=True)
    if "wait" in sys.argv:
        time.sleep(60)
    (folder / "weights").write_text("whole")
"""


@params.section
class Params:
    size: int


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("params.yaml").write_text(PARAMS)


def files() -> set[str]:
    return {str(path) for path in Path().rglob("*") if path.is_file()} - {"params.yaml"}


def test_success_publishes_everything_and_the_time() -> None:
    with stage("example", Params) as run:
        (run.folder("models/example") / "weights").write_text("whole")
        run.metrics("metrics/example.json", {"size": run.params.size, "share": np.float32(0.5)})
        run.table("plots/example.csv", [{"x": 1, "y": "a"}, {"x": 2, "y": "b"}])
        with run.timed("work"):
            pass
        run.timing(tokens_per_s=4.0)
        assert not Path("metrics/example.json").exists()
    assert files() == {
        "models/example/weights",
        "metrics/example.json",
        "metrics/timing/example.json",
        "plots/example.csv",
    }
    assert json.loads(Path("metrics/example.json").read_text()) == {"size": 3, "share": 0.5}
    assert Path("plots/example.csv").read_text() == "x,y\n1,a\n2,b\n"
    timing = json.loads(Path("metrics/timing/example.json").read_text())
    assert set(timing) == {"seconds", "work_seconds", "tokens_per_s"}
    assert timing["seconds"] >= timing["work_seconds"] >= 0


def test_key_names_the_section_and_the_timing_file() -> None:
    with stage("many", Params, "first") as run:
        assert run.params.size == 1
    with stage("many", Params, "second", section="example") as run:
        assert run.params.size == 3
    assert files() == {"metrics/timing/many/first.json", "metrics/timing/many/second.json"}


def test_new_outputs_replace_old_ones_whole() -> None:
    Path("models/example").mkdir(parents=True)
    Path("models/example/old").write_text("old")
    with stage("example", Params) as run:
        (run.folder("models/example") / "new").write_text("new")
    assert files() == {"models/example/new", "metrics/timing/example.json"}


def test_every_source_of_chance_follows_the_seed() -> None:
    def draws() -> tuple[float, float, float]:
        with stage("example", Params):
            return random.random(), float(np.random.random()), float(torch.rand(()))

    first = draws()
    assert draws() == first
    Path("params.yaml").write_text(PARAMS.replace("seed: 7", "seed: 8"))
    assert all(new != old for new, old in zip(draws(), first, strict=True))


def test_threads_of_zero_means_every_core() -> None:
    with stage("example", Params) as run:
        assert run.threads == 1
        assert torch.get_num_threads() == 1
    Path("params.yaml").write_text(PARAMS.replace("threads: 1", "threads: 0"))
    with stage("example", Params) as run:
        assert run.threads == len(os.sched_getaffinity(0))
        assert torch.get_num_threads() == run.threads


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), "m.json: loss must be finite; got nan"),
        (float("-inf"), "m.json: loss must be finite; got -inf"),
        (np.float32("nan"), "m.json: loss must be finite; got nan"),
        (True, "m.json: loss must be a number; got bool True"),
        (np.bool_(True), "m.json: loss must be a number; got bool True"),
        ("3.1", "m.json: loss must be a number; got str '3.1'"),
        ([1.0], "m.json: loss must be a number; got list [1.0]"),
        (None, "m.json: loss must be a number; got NoneType None"),
        ({"a": 1}, "m.json: loss must be a number; got dict {'a': 1}"),
    ],
)
def test_metric_that_is_no_finite_number_is_refused_by_name(value: Any, message: str) -> None:
    with pytest.raises(InferlabError) as caught:
        checked({"accuracy": 0.5, "loss": value}, "m.json")
    assert str(caught.value) == message


def test_metrics_keep_integers_and_unwrap_numpy() -> None:
    result = checked({"a": 3, "b": np.int64(4), "c": np.float64(0.25)}, "m.json")
    assert result == {"a": 3, "b": 4, "c": 0.25}
    assert [type(value) for value in result.values()] == [int, int, float]


def nan_in_metrics(run: Run[Params]) -> None:
    run.metrics("metrics/example.json", {"loss": float("nan")})


def nan_in_timing(run: Run[Params]) -> None:
    run.timing(tokens_per_s=float("inf"))


def fault_of_the_user(run: Run[Params]) -> None:
    raise InferlabError("the corpus is empty; give text")


def table_without_rows(run: Run[Params]) -> None:
    run.table("plots/example.csv", [])


def output_never_written(run: Run[Params]) -> None:
    run.output("plots/example.png")


def disk_full(run: Run[Params]) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "weights")


def disk_full_in_words(run: Run[Params]) -> None:
    """As safetensors and tokenizers say it, whose errors are no OSError and have no number."""
    raise RuntimeError("Error while serializing:\nNo space left on device (os error 28)")


def disk_full_below(run: Run[Params]) -> None:
    try:
        disk_full(run)
    except OSError as error:
        raise RuntimeError("could not save") from error


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (nan_in_metrics, "inferlab: metrics/example.json: loss must be finite; got nan"),
        (nan_in_timing, "inferlab: metrics/timing/example.json: tokens_per_s must be finite"),
        (fault_of_the_user, "inferlab: the corpus is empty; give text"),
        (table_without_rows, "inferlab: plots/example.csv: a table without rows"),
        (output_never_written, "inferlab: stage example did not write plots/example.png"),
        (disk_full, "inferlab: no space left for the outputs of stage example: "),
        (
            disk_full_in_words,
            "inferlab: no space left for the outputs of stage example: Error while serializing: No",
        ),
        (disk_full_below, "inferlab: no space left for the outputs of stage example: could not s"),
    ],
)
def test_fault_exits_with_its_line_and_leaves_what_was_there(
    fault: Callable[[Run[Params]], None], message: str
) -> None:
    Path("models/example").mkdir(parents=True)
    Path("models/example/old").write_text("old")
    with pytest.raises(SystemExit) as caught, stage("example", Params) as run:
        (run.folder("models/example") / "new").write_text("new")
        fault(run)
    assert str(caught.value.code).startswith(message)
    assert files() == {"models/example/old"}


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, PermissionError])
def test_other_exceptions_pass_through_and_leave_nothing(error: type[BaseException]) -> None:
    with pytest.raises(error), stage("example", Params) as run:
        run.metrics("metrics/example.json", {"loss": 1.0})
        (run.folder("models/example") / "new").write_text("new")
        raise error
    assert files() == set()


def test_faulty_parameters_stop_before_the_body() -> None:
    Path("params.yaml").write_text(PARAMS.replace("size: 3", "size: x"))
    with pytest.raises(SystemExit) as caught, stage("example", Params):
        pytest.fail("the body has run")
    assert str(caught.value.code) == (
        "inferlab: example.size must be a valid integer; got 'x' (params.yaml: example.size)"
    )


def test_killed_stage_leaves_no_final_output_and_the_next_run_works() -> None:
    Path("script.py").write_text(STAGE)
    command = [sys.executable, "script.py"]
    process = subprocess.Popen([*command, "wait"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    process.stdout.close()
    assert any("half" in Path(file).read_text() for file in files())
    assert not Path("models/example").exists()
    assert not Path("metrics/example.json").exists()

    subprocess.run(command, check=True, capture_output=True)
    assert Path("models/example/weights").read_text() == "whole"
    assert files() == {
        "script.py",
        "models/example/weights",
        "metrics/example.json",
        "metrics/timing/example.json",
    }
