"""Published benchmarks of vLLM and TensorRT-LLM: the rows beside this module, each with its source.

`era` is the half-year of the engines' releases; where a source does not pin a version, that of its
measurement. `load` is how requests arrive.
"""

import csv
import math
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from inferlab.errors import InferlabError, lookup

FILE = "published_engines.csv"
VLLM, TENSORRT = "vLLM", "TensorRT-LLM"


@dataclass(frozen=True)
class Metric:
    """The unit of a metric, is more of it better, and can it be compared at all?"""

    unit: str
    more_is_better: bool
    verdict: bool = True


METRICS = {
    "total_throughput": Metric("tokens/s", True),  # input and output tokens
    "output_throughput": Metric("tokens/s", True),
    "ttft_of_batch": Metric("ms", False),  # until each prompt of a static batch has its first token
    "ttft_median": Metric("ms", False),  # waiting in the queue included
    "tpot_mean": Metric("ms", False),
    "memory_peak": Metric("MB", False, verdict=False),  # both reserve a share of the card
}
REQUIRED = ("unit", "source_title", "source_location", "source_date", "era")


@dataclass(frozen=True)
class Row:
    """One published figure and its conditions; lengths in tokens, empty where not stated."""

    line: int
    engine: str
    engine_version: str
    era: str
    model: str
    precision: str
    gpu: str
    gpus: str
    input_tokens: str
    output_tokens: str
    load: str
    metric: str
    value: float
    source: str


def read_published(file: Path | None = None) -> list[Row]:
    """The rows of a file, or those that the package holds.

    Raises InferlabError, naming the line, for a row without a unit, source or era, with an unknown
    engine or metric, in another unit than its metric's, or whose value is no number above 0.
    """
    place = file or resources.files("inferlab.serving").joinpath(FILE)
    name = place.name
    with place.open(encoding="utf-8", newline="") as lines:
        reader = csv.DictReader(lines)
        return [_row(raw, f"{name}:{reader.line_num}", reader.line_num) for raw in reader]


def _row(raw: dict[str, str], place: str, line: int) -> Row:
    for key in REQUIRED:
        if not (raw.get(key) or "").strip():
            raise InferlabError(f"{place} has no {key}; give it, or take the row out")
    for key, known in (("engine", (VLLM, TENSORRT)), ("metric", tuple(METRICS))):
        try:
            lookup(dict.fromkeys(known), raw[key], key)
        except InferlabError as error:
            raise InferlabError(f"{place}: {error}") from None
    unit = METRICS[raw["metric"]].unit
    if raw["unit"] != unit:
        raise InferlabError(f"{place}: {raw['metric']} must be in {unit}; got {raw['unit']}")
    conditions = {key: raw[key] for key in Row.__dataclass_fields__ if key in raw}
    source = f"{raw['source_title']}, {raw['source_location']}, {raw['source_date']}"
    return Row(
        **conditions | {"line": line, "value": _value(raw["value"], place), "source": source}
    )


def _value(text: str, place: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise InferlabError(f"{place}: value must be a number above 0; got {text!r}")
    return value
