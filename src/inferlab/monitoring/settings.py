"""The section `monitoring`: a scenario in phases, alert rules, and how the server is started."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from inferlab import params as parameters
from inferlab.errors import suggestion
from inferlab.monitoring.measures import Measure, names, window_s
from inferlab.serving.engine import EngineParams

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
PerSecond = Annotated[float, Field(ge=0)]
AlertName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


@parameters.section
class Phase:
    """A stretch of the scenario.

    `clients` send one request after the other; `requests_per_s` come whoever still waits.
    `too_long_per_s` requests do not fit the engine and `cut_per_s` are left by their client in
    the middle of the stream. `frozen`: the server's processes are stopped for the whole phase.
    """

    seconds: Seconds
    input_tokens: Count
    output_tokens: Count
    clients: Annotated[int, Field(ge=0)] = 0
    requests_per_s: PerSecond = 0.0
    too_long_per_s: PerSecond = 0.0
    cut_per_s: PerSecond = 0.0
    frozen: bool = False


@parameters.section
class Alert:
    """A measure on the wrong side of a threshold for `for_s` seconds.

    `expected`: the phases in which it must begin, `tolerated`: in which it may; anywhere else it
    counts as unexpected.
    """

    value: Measure
    for_s: Annotated[float, Field(ge=0)]
    severity: Literal["info", "warning", "critical"]
    summary: Annotated[str, Field(min_length=1, pattern=r"^[^{}]+$")]
    above: float | None = None
    below: float | None = None
    expected: tuple[str, ...] = ()
    tolerated: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raise ValueError unless there is exactly one threshold."""
        if (self.above is None) == (self.below is None):
            raise ValueError("give exactly one of above, below")

    @property
    def threshold(self) -> float:
        """The limit, whichever side is wrong."""
        return self.above if self.above is not None else self.below


@parameters.section
class MonitoringParams:
    """The section `monitoring`."""

    variant: str
    scrape_s: Annotated[float, Field(ge=0.1)]
    window_s: Seconds
    cut_after_s: Seconds
    cut_output_tokens: Count
    usd_per_hour: Annotated[float, Field(ge=0)]
    phases: Annotated[dict[str, Phase], Field(min_length=1)]
    alerts: Annotated[dict[AlertName, Alert], Field(min_length=1)]
    engine: EngineParams

    def __post_init__(self) -> None:
        """Raise ValueError when phases, alerts and the engine do not fit each other."""
        for name, phase in self.phases.items():
            longest = phase.input_tokens + phase.output_tokens
            if phase.cut_per_s:
                longest = max(longest, phase.input_tokens + self.cut_output_tokens)
            if longest > self.engine.max_model_len:
                raise ValueError(
                    f"a request of phase {name} has {longest} tokens, engine.max_model_len is "
                    f"{self.engine.max_model_len}; shorten it or raise the limit"
                )
        for name, alert in self.alerts.items():
            for phase in (*alert.expected, *alert.tolerated):
                if phase not in self.phases:
                    hint = suggestion(phase, self.phases)
                    raise ValueError(f"alert {name} names no phase {phase!r}; {hint}")
            require_window(f"alert {name}", window_s(alert.value), self.scrape_s)
        require_window("window_s", self.window_s, self.scrape_s)


def require_window(what: str, window: float, scrape_s: float) -> None:
    """Raise ValueError when a window holds too few scrapes for a rate, even with one missing."""
    if 0 < window < 3 * scrape_s:
        raise ValueError(
            f"{what}: a window of {window:g} s holds fewer than three scrapes, one every "
            f"{scrape_s:g} s; make it {3 * scrape_s:g} s or longer"
        )


def wanted(alerts: Mapping[str, Alert], section: str = "monitoring") -> dict[str, list[str]]:
    """The names of the series that each alert reads, by the key of params.yaml."""
    return {f"{section}.alerts.{name}": names(alert.value) for name, alert in alerts.items()}


def spans(phases: Mapping[str, Phase]) -> dict[str, tuple[float, float]]:
    """When each phase begins and ends, in seconds."""
    found, start = {}, 0.0
    for name, phase in phases.items():
        found[name] = (start, start + phase.seconds)
        start += phase.seconds
    return found


def phase_at(seconds: float, phases: Mapping[str, Phase]) -> str:
    """The phase that a moment of the scenario belongs to; the last one after its end too."""
    for name, (_, end) in spans(phases).items():
        if seconds < end:
            return name
    return name
