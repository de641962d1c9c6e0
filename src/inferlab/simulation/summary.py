"""The figures of one simulated run, and of several seeds together."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from inferlab.serving.metrics import Objective
from inferlab.simulation.record import (
    WARM_UP,
    Record,
    is_unstable,
    latencies,
    requests_per_s,
    seconds,
)
from inferlab.simulation.runs import interval


def figures(record: Record, front_end: int, objective: Objective) -> dict[str, float]:
    """Rates and latency percentiles (milliseconds) of a run; `unstable`: 1 when it fell behind."""
    found = latencies(record, front_end, WARM_UP)
    tpot = np.nan_to_num(found.tpot)
    within = (1e3 * found.ttft <= objective.ttft_ms) & (1e3 * tpot <= objective.tpot_ms)
    values = {
        "requests_per_s": requests_per_s(record),
        "output_tokens_per_s": record.tokens_out / max(seconds(record), 1e-12),
        "goodput_requests_per_s": float(within.mean()) * requests_per_s(record),
        "preemptions_per_request": record.preemptions / len(record.workload),
        "rejected": record.rejected,
        "padding_share": record.padding / max(1, record.padding + _tokens(record)),
        "unstable": int(is_unstable(record)),
        "itl_ms_p50": 1e3 * record.gaps.percentile(50),
        "itl_ms_p99": 1e3 * record.gaps.percentile(99),
        "e2e_ms_mean": 1e3 * float(found.e2e.mean()),
    }
    for name, sample in (("ttft", found.ttft), ("tpot", found.tpot), ("e2e", found.e2e)):
        for percent in (50, 95, 99):
            values[f"{name}_ms_p{percent}"] = 1e3 * float(np.nanpercentile(sample, percent))
    return values


def over_seeds(runs: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Each figure's mean over seeds and `…_half`, half its 95 % interval, empty of a single run.

    The system counts as unstable when most seeds say so. Latencies of an unstable one depend on
    how long it ran, so they are left empty: there is no steady state to average.
    """
    unstable = sum(run["unstable"] for run in runs) * 2 > len(runs)
    row: dict[str, Any] = {"unstable": int(unstable)}
    for name in runs[0]:
        if name == "unstable":
            continue
        found = interval([run[name] for run in runs])
        hidden = unstable and name.startswith(("ttft", "e2e"))
        row[name] = "" if hidden else found.mean
        row[f"{name}_half"] = "" if hidden or len(runs) < 2 else found.half
    return row


def _tokens(record: Record) -> int:
    served = record.served
    return int(record.workload.prompts[served].sum() + record.workload.outputs[served].sum())
