"""The scenario's watcher on a server that answers, stalls and vanishes; the stage; the command."""

import asyncio
import contextlib
import csv
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import psutil
import pytest
import yaml
from browser import Browser, find_chromium

from inferlab import cli
from inferlab.errors import InferlabError
from inferlab.monitoring import grafana
from inferlab.monitoring.command import configuration
from inferlab.monitoring.evaluation import Episode
from inferlab.monitoring.recording import exported, record
from inferlab.monitoring.results import alert_episodes
from inferlab.monitoring.scenario import _frozen, scrape, watch
from inferlab.monitoring.settings import MonitoringParams
from inferlab.params import load
from inferlab.profiling.processes import Meter
from stages import monitoring

ROOT = Path(__file__).parent.parent
SCRAPED = (ROOT / "tests/fixtures/vllm_metrics.txt").read_text()
Answer = Callable[[int], "str | int | None"]


@contextlib.asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[str]:
    """/metrics on loopback. `answer`, by the number of the request: a text, a status, or None
    for a connection that is closed at once."""
    count = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            said = answer(count)
            count += 1
            if said is not None:
                status, body = (said, "") if isinstance(said, int) else (200, said)
                head = f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n"
                writer.write(f"{head}connection: close\r\n\r\n{body}".encode())
                await writer.drain()
        writer.close()

    listener = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with listener:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def test_target_gone_is_a_gap_with_its_alert_and_no_crash() -> None:
    """Scrapes 1 to 3 fail, each in its own way; taken as a second apart, they raise the alert."""
    failures = {1: None, 2: 500, 3: "this is no metric"}

    async def run() -> list[str | None]:
        said = serving(lambda number: failures.get(number, SCRAPED))
        async with said as url, httpx.AsyncClient() as client:
            ticks = await watch(client, url, os.getpid(), 1.0, 5, time.perf_counter())
        return [tick.text for tick in ticks]

    recorded = record(asyncio.run(run()), 1.0)
    assert recorded.gaps == 3
    rules = load("monitoring", MonitoringParams, ROOT / "params.yaml").alerts
    found = alert_episodes(recorded, rules, closed=True)
    assert found == [Episode("ServerDown", 1.0, 3.0, 4.0)]


def test_server_that_never_answers_is_a_gap_at_every_tick() -> None:
    async def silent() -> list[str | None]:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await asyncio.sleep(30)

        listener = await asyncio.start_server(handle, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        async with httpx.AsyncClient() as client:
            ticks = await watch(client, url, os.getpid(), 0.2, 3, time.perf_counter())
        listener.close()
        return [tick.text for tick in ticks]

    assert asyncio.run(silent()) == [None, None, None]


def test_nothing_to_scrape_is_one_line_with_the_address() -> None:
    with pytest.raises(InferlabError, match=r"nothing to scrape at http://127.0.0.1:9/metrics"):
        scrape("http://127.0.0.1:9")


def test_meter_reads_the_whole_tree() -> None:
    """A child that computes and holds 64 MiB is in its parent's use."""
    code = "held = bytearray(64 << 20)\nwhile True: pass"
    meter = Meter(os.getpid())
    meter.read(0.0)
    before = meter.read(1.0)
    child = subprocess.Popen([sys.executable, "-c", code])
    try:
        wait_until(lambda: psutil.Process(child.pid).cpu_times().user >= 0.5)
        use = meter.read(2.0)
    finally:
        child.kill()
        child.wait()
    assert use.cores >= 0.5
    assert use.memory_bytes - before.memory_bytes >= 64 << 20


def test_frozen_server_runs_on_afterwards() -> None:
    """The head is spared, its child stopped and then continued."""
    sleep = "[sys.executable, '-c', 'import time; time.sleep(60)']"
    code = f"import subprocess, sys; subprocess.run({sleep})"
    head = subprocess.Popen([sys.executable, "-c", code])
    try:
        parent = psutil.Process(head.pid)
        wait_until(lambda: bool(parent.children()))
        (child,) = parent.children()
        with _frozen(head.pid):
            wait_until(lambda: child.status() == psutil.STATUS_STOPPED)
            assert parent.status() != psutil.STATUS_STOPPED
        wait_until(lambda: child.status() != psutil.STATUS_STOPPED)
    finally:
        for process in [*parent.children(), parent]:
            process.kill()
        head.wait()


# The command.


def monitor(arguments: str, monkeypatch: pytest.MonkeyPatch) -> object:
    """The exit status of `inferlab monitor`, or its one line."""
    monkeypatch.setattr(sys, "argv", ["inferlab", "monitor", *arguments.split()])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return stopped.value.code


@pytest.mark.usefixtures("workspace")
def test_command_writes_what_prometheus_and_grafana_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("inferlab.monitoring.command.scrape", lambda url: SCRAPED)
    assert not monitor("--url http://127.0.0.1:8123/ --folder out --no-start", monkeypatch)
    config = yaml.safe_load(Path("out/prometheus.yml").read_text())
    assert config["scrape_configs"][0]["static_configs"] == [{"targets": ["127.0.0.1:8123"]}]
    assert config["scrape_configs"][0]["metrics_path"] == "/metrics"
    rules = yaml.safe_load(Path("out/rules.yml").read_text())["groups"][0]["rules"]
    section = yaml.safe_load(Path("params.yaml").read_text())["monitoring"]
    assert [rule["alert"] for rule in rules] == list(section["alerts"])
    dashboard = json.loads(Path("out/grafana.json").read_text())
    assert grafana.series_names(dashboard) <= exported(SCRAPED)
    assert "out/grafana.json" in capsys.readouterr().out
    if program := shutil.which("promtool"):
        subprocess.run([program, "check", "config", "out/prometheus.yml"], check=True)


@pytest.mark.usefixtures("workspace")
def test_command_without_prometheus_names_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferlab.monitoring.command.scrape", lambda url: SCRAPED)
    monkeypatch.setenv("PATH", "")
    line = str(monitor("--folder out", monkeypatch))
    assert line.startswith("inferlab: needed prometheus (Debian: apt-get install prometheus")
    assert len(line.splitlines()) == 1
    assert Path("out/rules.yml").exists()


@pytest.mark.usefixtures("workspace")
def test_command_without_a_server_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    line = str(monitor("--url http://127.0.0.1:9 --folder out", monkeypatch))
    assert line.startswith("inferlab: nothing to scrape at http://127.0.0.1:9/metrics")
    assert not Path("out").exists()


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://127.0.0.1", "http://"])
def test_url_must_be_http(url: str) -> None:
    with pytest.raises(InferlabError, match=r"--url must be as http://127.0.0.1:8000"):
        configuration(url, 1.0)


# The stage on a real server.


def write_project(model: Path) -> None:
    """In the current folder: a tiny model, text, and a scenario of a few seconds."""
    import torch

    from inferlab.store import save_tensors

    content = yaml.safe_load((ROOT / "params.yaml").read_text())
    content["run"]["threads"] = 1
    section = content["monitoring"]
    section |= {"window_s": 3.0, "cut_after_s": 0.3, "cut_output_tokens": 440}
    for name, phase in section["phases"].items():
        phase |= {"seconds": 5.0 if name == "outage" else 4.0, "input_tokens": 16}
    section["engine"] |= {"max_model_len": 480, "kv_cache_gib": 0.1, "threads": 1}
    Path("params.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    shutil.copytree(model, "models/int8")
    Path("data/windows").mkdir(parents=True)
    ids = torch.randint(3, 500, (8, 256), generator=torch.Generator().manual_seed(0))
    save_tensors(Path("data/windows/training.safetensors"), {"input_ids": ids})


def children() -> set[int]:
    return {one.pid for one in psutil.Process().children(recursive=True)}


def read_table(path: str) -> list[dict[str, str]]:
    with Path(path).open() as file:
        return list(csv.DictReader(file))


@pytest.mark.smoke
def test_stage_watches_a_real_server(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_project(tiny_llama)
    before = children()
    monitoring.main()
    assert children() <= before

    values = json.loads(Path("metrics/monitoring.json").read_text())
    assert values["errors_too_long"] == 4
    assert values["errors_cut"] >= 1
    assert values["errors_other"] == 0
    assert values["requests"] > 20
    assert values["scrape_gaps"] >= 3  # of the outage
    assert values["waiting_max"] >= 1
    assert values["promtool_agrees"] == values["promtool_checked"]
    assert values["promtool_checked"] == (shutil.which("promtool") is not None)

    rows = read_table("plots/monitoring/series.csv")
    assert len(rows) == 22
    by_phase = {row["phase"]: row for row in rows}
    assert list(by_phase) == ["normal", "overload", "errors", "outage", "recovery"]
    assert by_phase["outage"]["up"] == "0" and by_phase["outage"]["requests_running"] == ""
    assert float(by_phase["overload"]["output_tokens_per_s"]) > 0
    assert float(by_phase["recovery"]["memory_gib"]) > 0.1
    fired = {
        row["alert"]: row for row in read_table("plots/monitoring/alerts.csv") if row["fired_s"]
    }
    assert fired["ServerDown"]["phase"] in ("errors", "outage")
    check_report(Path("reports/monitoring"), set(values))


def check_report(folder: Path, figures: set[str]) -> None:
    """Rules, dashboard and page; the page asks for nothing and says nothing wrong in a browser."""
    assert {"alerts_fired", "alerts_missed", "alerts_unexpected", "kv_cache_share_max"} <= figures
    assert yaml.safe_load((folder / "rules.yml").read_text())["groups"][0]["name"] == "inferlab"
    assert json.loads((folder / "grafana.json").read_text())["panels"]
    html = (folder / "index.html").read_text()
    assert not re.findall(r"(?:src|href)=\"(?!#|data:)", html)
    assert "<script" not in html and "url(" not in html
    assert html.count('role="img" aria-label=') == html.count("<figure>")
    assert not re.findall(r"\bnan\b", html)
    if program := find_chromium():
        with Browser(program) as browser:
            browser.open(folder / "index.html", 390, 800, "dark")
            assert browser.evaluate("document.documentElement.scrollWidth") <= 390
            wrong = [one for one in browser.events if one["method"] == "Log.entryAdded"]
            asked = [
                one["params"]["request"]["url"]
                for one in browser.events
                if one["method"] == "Network.requestWillBeSent"
            ]
        assert not wrong
        assert all(url.startswith(("file:", "data:")) for url in asked)
