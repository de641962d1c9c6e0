"""The simulators' sweeps on a Ray cluster of two nodes, beside the same sweeps on this machine."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml
from test_simulation_studies import COST, section

from inferlab import params as parameters
from inferlab.errors import InferlabError
from inferlab.simulation import runs
from inferlab.simulation.cost import save_costs
from inferlab.simulation.runs import Workers, spread

ROOT = Path(__file__).parent.parent
STAGES = {
    "continuous_batching": ("continuous_study", "rates.csv"),
    "chunked_prefill": ("chunked_study", "chunks.csv"),
    "scheduling": ("scheduling_study", "policies.csv"),
    "autoscaling": ("autoscaling_study", "settings.csv"),
}
# Runs a stage and writes down which process, or which node of Ray, did each of its points.
DRIVER = """
    import importlib, json, os, sys
    from pathlib import Path
    stage, study = sys.argv[1:]
    study = importlib.import_module(f"inferlab.simulation.{study}")
    plain, places = study.spread, []

    def spread(function, work, workers, threads):
        def located(*arguments):
            place = str(os.getpid())
            if workers.backend == "ray":
                import ray
                place = ray.get_runtime_context().get_node_id()
            return place, function(*arguments)
        found = plain(located, work, workers, threads)
        places.extend(place for place, _ in found)
        return [result for _, result in found]

    study.spread = spread
    importlib.import_module(f"stages.{stage}").main()
    Path("places.json").write_text(json.dumps(places))
"""
needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="needs Ray: `make ray`; found no package ray"
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of two nodes, which are gone afterwards."""
    command = [sys.executable, "tests/ray_nodes.py"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as nodes:
        assert nodes.stdin is not None and nodes.stdout is not None
        try:
            address = nodes.stdout.readline().strip()
            processes = psutil.Process(nodes.pid).children(recursive=True)
            assert sum(one.name() == "raylet" for one in processes) == 2
            yield address
        finally:
            nodes.stdin.close()
    _, left = psutil.wait_procs(processes, timeout=60.0)
    assert [one for one in left if one.status() != psutil.STATUS_ZOMBIE] == []


def run_stage(folder: Path, stage: str, backend: str, address: str | None) -> dict[str, bytes]:
    """What the stage writes in a folder of its own, without its timing."""
    folder.mkdir()
    (folder / "data/step_cost").mkdir(parents=True)
    save_costs(folder / "data/step_cost/costs.json", {"this_machine": COST})
    study, table = STAGES[stage]
    workers = {"jobs": 0, "backend": backend, "address": None}
    content = {"run": {"seed": 0, "threads": 2}, stage: section(stage, workers=workers)}
    (folder / "params.yaml").write_text(yaml.safe_dump(content))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    if address is not None:
        environment |= {"RAY_ADDRESS": address, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    driver = [sys.executable, "-c", textwrap.dedent(DRIVER), stage, study]
    subprocess.run(driver, cwd=folder, env=environment, check=True)
    names = f"metrics/{stage}.json", f"plots/{stage}/{table}"
    return {name: (folder / name).read_bytes() for name in names}


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_two_nodes_give_what_this_machine_gives(stage: str, cluster: str, tmp_path: Path) -> None:
    seconds, found = {}, {}
    for backend, address in (("loky", None), ("ray", cluster)):
        start = time.perf_counter()
        found[backend] = run_stage(tmp_path / backend, stage, backend, address)
        seconds[backend] = time.perf_counter() - start
    places = json.loads((tmp_path / "ray/places.json").read_text())
    print(
        f"{stage}: {len(places)} points; loky {seconds['loky']:.1f} s, "
        f"ray on {len(set(places))} nodes {seconds['ray']:.1f} s"
    )
    assert found["ray"] == found["loky"]
    # Ray draws the process for each point; there are two of them, one a node.
    assert len(set(places)) == 2 or len(places) == 2


@needs_ray
@pytest.mark.slow
def test_more_jobs_than_the_cluster_has(cluster: str) -> None:
    code = f"""
        from inferlab.simulation.runs import Workers, spread
        spread(abs, [(1,)], Workers(3, "ray", {cluster!r}), 1)
    """
    environment = os.environ | {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    line = done.stderr.splitlines()[-1]
    assert "workers.jobs is 3, but the Ray cluster has 2 processors; lower it, or set 0" in line


@needs_ray
@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:{port}", "no-such-host.invalid:6379"])
def test_nobody_at_the_address(address: str) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = address.format(port=closed.getsockname()[1])
        with pytest.raises(InferlabError) as caught:
            spread(abs, [(1,)], Workers(0, "ray", address), 1)
    assert str(caught.value).startswith(f"no Ray cluster at {address} (")
    assert "start one with `ray start --head`, or set workers.address to null" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_ray_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InferlabError, match="Ray is not installed; run `make ray`, or choose loky"):
        spread(abs, [(1,)], Workers(0, "ray", None), 1)


def test_the_lock_of_ray_moves_nothing_else() -> None:
    """It is installed without dependencies: what it needs has to be in the project's lock."""
    pinned = [line for line in (ROOT / "requirements/ray.txt").read_text().splitlines() if line]
    names = [line.split("==")[0] for line in pinned if not line.startswith((" ", "#"))]
    assert names == ["ray"]
    lock = (ROOT / "requirements/lock.txt").read_text()
    for name in ("click", "filelock", "jsonschema", "msgpack", "packaging", "protobuf", "requests"):
        assert f"\n{name}==" in lock


@pytest.mark.parametrize(
    ("workers", "message"),
    [
        (
            {"jobs": 0, "backend": "loky", "address": "10.0.0.1:6379"},
            "address is of a Ray cluster, but backend is loky; set backend to ray or address to",
        ),
        ({"jobs": 0, "backend": "dask", "address": None}, "backend must be one of 'loky', 'thr"),
        ({"jobs": -1, "backend": "ray", "address": None}, "jobs must be greater than or equal"),
    ],
)
def test_sections_that_are_refused(
    tmp_path: Path, workers: dict[str, object], message: str
) -> None:
    file = tmp_path / "params.yaml"
    file.write_text(yaml.safe_dump({"workers": workers}))
    with pytest.raises(InferlabError, match=message):
        parameters.load("workers", runs.Workers, file)
