"""What is watched: one number at each moment, made from metrics as Prometheus would make it.

Four forms, each with its PromQL: the latest value, the rate of a counter, the ratio of two rates,
and the quantile of a histogram. The same measures give alert rules, the table of a recording and
the panels of a dashboard.
"""

from typing import Annotated, Literal

from pydantic import Field

from inferlab import params as parameters

Name = Annotated[str, Field(pattern=r"^[a-zA-Z_:][a-zA-Z0-9_:]*$")]
Window = Annotated[float, Field(gt=0)]


@parameters.section
class Latest:
    """The value of a gauge now, over all its series with these labels."""

    kind: Literal["latest"]
    metric: Name
    labels: dict[str, str] = Field(default_factory=dict)
    aggregate: Literal["sum", "min", "max"] = "sum"


@parameters.section
class Rate:
    """How much a counter grows a second, over a window of `window_s` seconds."""

    kind: Literal["rate"]
    metric: Name
    window_s: Window
    labels: dict[str, str] = Field(default_factory=dict)


@parameters.section
class Ratio:
    """The rate of a counter over that of another (`of`), both over `window_s` seconds."""

    kind: Literal["ratio"]
    metric: Name
    of: Name
    window_s: Window
    labels: dict[str, str] = Field(default_factory=dict)
    of_labels: dict[str, str] = Field(default_factory=dict)


@parameters.section
class Quantile:
    """A quantile of what a histogram saw in the last `window_s` seconds, by its buckets."""

    kind: Literal["quantile"]
    metric: Name
    quantile: Annotated[float, Field(gt=0, lt=1)]
    window_s: Window
    labels: dict[str, str] = Field(default_factory=dict)


Measure = Annotated[Latest | Rate | Ratio | Quantile, Field(discriminator="kind")]


def names(measure: Measure) -> list[str]:
    """The names of the series that a measure reads, as the server exports them."""
    match measure:
        case Quantile():
            return [f"{measure.metric}_bucket"]
        case Ratio():
            return list(dict.fromkeys([measure.metric, measure.of]))
        case _:
            return [measure.metric]


def window_s(measure: Measure) -> float:
    """The seconds that a measure looks back; 0 for the latest value."""
    return 0.0 if isinstance(measure, Latest) else measure.window_s


def expression(measure: Measure, window: str | None = None) -> str:
    """The measure in PromQL; `window` replaces its own, as in `$__rate_interval` of Grafana."""
    over = f"[{window or duration(window_s(measure))}]"
    match measure:
        case Latest():
            return f"{measure.aggregate}({_selector(measure.metric, measure.labels)})"
        case Rate():
            return f"sum(rate({_selector(measure.metric, measure.labels)}{over}))"
        case Ratio():
            part = f"sum(rate({_selector(measure.metric, measure.labels)}{over}))"
            return f"{part} / sum(rate({_selector(measure.of, measure.of_labels)}{over}))"
        case Quantile():
            buckets = _selector(f"{measure.metric}_bucket", measure.labels)
            return f"histogram_quantile({measure.quantile:g}, sum by (le) (rate({buckets}{over})))"


def duration(seconds: float) -> str:
    """A duration as Prometheus writes it: `10s`, `1500ms`."""
    whole = float(seconds).is_integer()
    return f"{seconds:.0f}s" if whole else f"{1000 * seconds:.0f}ms"


def _selector(metric: str, labels: dict[str, str]) -> str:
    return f"{metric}{{{label_text(labels)}}}" if labels else metric


def label_text(labels: dict[str, str]) -> str:
    """Labels as they stand between the braces of a series, quotes and backslashes escaped."""
    escaped = {
        name: value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        for name, value in labels.items()
    }
    return ",".join(f'{name}="{value}"' for name, value in escaped.items())
