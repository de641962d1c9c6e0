"""Alert rules in Prometheus' format, and what its own promtool says of them.

promtool replays series through Prometheus' rule engine, so it can judge two things: that a rule
fires when its threshold is passed and stays silent when it is not (synthetic series), and that our
evaluation of a recording fires and clears at the same ticks as Prometheus would.
"""

import math
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from inferlab.monitoring.evaluation import Episode
from inferlab.monitoring.measures import duration, expression, label_text, names
from inferlab.monitoring.recording import Recording, Series
from inferlab.monitoring.settings import Alert

GROUP = "inferlab"
NEEDED = "promtool, of Prometheus (Debian: apt-get install prometheus; make tools does it)"


@dataclass(frozen=True)
class Case:
    """Series, and the alerts that must be firing at some ticks (all others must not)."""

    name: str
    recording: Recording
    firing: Mapping[int, Sequence[str]]
    alerts: Sequence[str]
    """The alerts that are asked for at each of these ticks."""


@dataclass(frozen=True)
class Verdict:
    """What promtool found. `version`: empty when there is none; `output`: what it printed."""

    version: str
    passed: bool
    output: str

    @property
    def checked(self) -> bool:
        return bool(self.version)


def rules(alerts: Mapping[str, Alert], interval_s: float) -> dict[str, Any]:
    """A Prometheus rule file with one group, evaluated every `interval_s` seconds."""
    return {
        "groups": [
            {
                "name": GROUP,
                "interval": duration(interval_s),
                "rules": [rule(name, alert) for name, alert in alerts.items()],
            }
        ]
    }


def rule(name: str, alert: Alert) -> dict[str, Any]:
    """One alerting rule."""
    sign = ">" if alert.above is not None else "<"
    return {
        "alert": name,
        "expr": f"{expression(alert.value)} {sign} {alert.threshold:g}",
        "for": duration(alert.for_s),
        "labels": {"severity": alert.severity},
        "annotations": {"summary": alert.summary},
    }


def firing_ticks(
    recording: Recording, found: Sequence[Episode], alerts: Mapping[str, Alert]
) -> Case:
    """Our own evaluation of a recording as a case: what fires at each of its ticks."""
    firing: dict[int, list[str]] = {tick: [] for tick in range(recording.ticks)}
    for one in found:
        if one.fired is None:
            continue
        first = round(one.fired / recording.interval_s)
        end = recording.ticks
        if one.cleared is not None:
            end = round(one.cleared / recording.interval_s)
        for tick in range(first, end):
            firing[tick].append(one.alert)
    return Case("the recorded series", recording, firing, list(alerts))


def unit_tests(
    cases: Sequence[Case], alerts: Mapping[str, Alert], rule_file: str
) -> dict[str, Any]:
    """The cases as a test file for `promtool test rules`."""
    interval = duration(cases[0].recording.interval_s)
    tests = [_test(case, alerts) for case in cases]
    return {"rule_files": [rule_file], "evaluation_interval": interval, "tests": tests}


def check(alerts: Mapping[str, Alert], cases: Sequence[Case], interval_s: float) -> Verdict:
    """Let promtool check the rules and run the cases; a verdict without version if it is absent."""
    program = shutil.which("promtool")
    if program is None:
        return Verdict("", False, f"not checked: needed {NEEDED}; found none on the PATH")
    with tempfile.TemporaryDirectory(prefix="inferlab-") as folder:
        rule_file, test_file = Path(folder, "rules.yml"), Path(folder, "tests.yml")
        rule_file.write_text(dump(rules(alerts, interval_s)))
        done = [_call(program, "check", "rules", str(rule_file))]
        if cases:
            test_file.write_text(dump(unit_tests(cases, alerts, rule_file.name)))
            done.append(_call(program, "test", "rules", str(test_file)))
    passed = all(one.returncode == 0 for one in done)
    texts = [one.stdout + one.stderr for one in done]
    output = "\n".join(texts).replace(f"{folder}/", "").strip()
    return Verdict(version(program), passed, output)


def version(program: str) -> str:
    """The version of promtool or prometheus, such as 2.42.0."""
    done = _call(program, "--version")
    found = re.search(r"version (\d+\.\d+\.\d+)", done.stdout + done.stderr)
    return found.group(1) if found else "unknown"


def closed_windows() -> bool:
    """Whether the installed Prometheus has windows closed at their start: those before 3 do."""
    program = shutil.which("promtool")
    return program is None or not version(program).startswith("3.")


def dump(content: Mapping[str, Any]) -> str:
    """YAML in the order given, long lines unbroken."""
    return yaml.safe_dump(dict(content), sort_keys=False, width=1_000_000)


def _call(program: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=False)


def _test(case: Case, alerts: Mapping[str, Alert]) -> dict[str, Any]:
    recording = case.recording
    read = {name for alert in case.alerts for name in names(alerts[alert].value)}
    series = [one for name in sorted(read) for one in recording.series.get(name, ())]
    return {
        "name": case.name,
        "interval": duration(recording.interval_s),
        "input_series": [{"series": _notation(one), "values": _values(one)} for one in series],
        "alert_rule_test": [
            {
                "eval_time": duration(tick * recording.interval_s),
                "alertname": name,
                "exp_alerts": [_expected(alerts[name])] if name in firing else [],
            }
            for tick, firing in case.firing.items()
            for name in case.alerts
        ],
    }


def _expected(alert: Alert) -> dict[str, Any]:
    return {
        "exp_labels": {"severity": alert.severity},
        "exp_annotations": {"summary": alert.summary},
    }


def _notation(series: Series) -> str:
    labels = label_text(dict(series.labels))
    return f"{series.name}{{{labels}}}" if labels else series.name


def _values(series: Series) -> str:
    """The values as promtool reads them. Where a series ends Prometheus marks it stale."""
    texts = []
    before = math.nan
    for value in series.values.tolist():
        if not math.isnan(value):
            texts.append(repr(value))
        else:
            texts.append("_" if math.isnan(before) else "stale")
        before = value
    return " ".join(texts)
