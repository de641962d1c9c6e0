"""33.22: vLLM against TensorRT-LLM from published figures, only where conditions are equal."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from inferlab.params import section
from inferlab.serving.published import METRICS, TENSORRT, VLLM, Row

CONDITIONS = ("model", "precision", "gpu", "gpus", "input_tokens", "output_tokens", "load", "era")
LENGTHS = ("input_tokens", "output_tokens")


@section
class EngineComparisonParams:
    """The section `engine_comparison`."""

    length_tolerance: Annotated[float, Field(ge=0, lt=1)]
    margin: Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True)
class Pair:
    """Two rows under equal conditions."""

    vllm: Row
    tensorrt: Row

    @property
    def advantage(self) -> float:
        """Of TensorRT-LLM over vLLM, as a ratio in which more is better: above 1 it is ahead."""
        ratio = self.tensorrt.value / self.vllm.value
        return ratio if METRICS[self.vllm.metric].more_is_better else 1 / ratio


def differences(one: Row, other: Row, tolerance: float) -> list[str]:
    """The conditions in which two rows differ.

    Lengths may differ by the share `tolerance`. What neither states is taken for equal within one
    source, which measured both alike, and for different between two.
    """
    found = []
    for name in CONDITIONS:
        ours, theirs = getattr(one, name), getattr(other, name)
        if not ours and not theirs:
            equal = one.source == other.source
        elif name in LENGTHS and ours and theirs:
            equal = math.isclose(float(ours), float(theirs), rel_tol=tolerance)
        else:
            equal = ours == theirs
        if not equal:
            found.append(name)
    return found


def match(rows: Sequence[Row], tolerance: float) -> tuple[list[Pair], list[Row]]:
    """The pairs of rows that differ in nothing but the engine, and the rows without a partner."""
    waiting = [row for row in rows if row.engine == TENSORRT]
    pairs, alone = [], []
    for row in (row for row in rows if row.engine == VLLM):
        partner = next(
            (
                other
                for other in waiting
                if other.metric == row.metric and not differences(row, other, tolerance)
            ),
            None,
        )
        if partner is None:
            alone.append(row)
        else:
            waiting.remove(partner)
            pairs.append(Pair(row, partner))
    return pairs, alone + waiting


def mismatch_table(
    alone: Sequence[Row], rows: Sequence[Row], tolerance: float
) -> list[dict[str, Any]]:
    """Rows that are left out of every ratio: the nearest row of the other engine, what differs."""
    table = []
    for row in alone:
        others = [one for one in rows if one.engine != row.engine and one.metric == row.metric]
        nearest = min(others, key=lambda one: len(differences(row, one, tolerance)), default=None)
        differs = differences(row, nearest, tolerance) if nearest else ["metric"]
        table.append(
            _described(row)
            | {
                "nearest_line": nearest.line if nearest else "",
                "differs_in": ", ".join(differs),
                "value": row.value,
                "source": row.source,
            }
        )
    return table


def pair_table(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """One row a pair: conditions, both values and the advantage of TensorRT-LLM."""
    return [
        _described(pair.vllm)
        | {
            "line_tensorrt": pair.tensorrt.line,
            "version_tensorrt": pair.tensorrt.engine_version,
            "vllm": pair.vllm.value,
            "tensorrt": pair.tensorrt.value,
            "advantage": round(pair.advantage, 4),
            "source": pair.vllm.source,
        }
        for pair in pairs
    ]


def _described(row: Row) -> dict[str, Any]:
    described = {name: getattr(row, name) for name in CONDITIONS}
    label = f"{row.metric}, {row.gpu.split()[0]}, {row.input_tokens or '?'} in, {row.load}"
    return {
        "label": label,
        "line": row.line,
        "engine": row.engine,
        "version": row.engine_version,
        "metric": row.metric,
        "unit": METRICS[row.metric].unit,
        **described,
    }
