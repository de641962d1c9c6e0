"""What the rounds of whole configurations say: one row each, and the metrics from these."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from inferlab.serving import metrics
from inferlab.serving.end_to_end import EndToEndParams, Round

MIB = 2**20
SPEEDS = ("ttft_ms", "decode_tokens_per_s", "throughput_tokens_per_s", "throughput_spread")


def table(
    rounds: Mapping[str, Sequence[Round]], perplexities: Mapping[str, float], params: EndToEndParams
) -> list[dict[str, Any]]:
    """One row a configuration; `perplexities`: of each configuration.

    `ttft_ms` and `decode_tokens_per_s` are medians over all requests of one client, throughput and
    the shares medians over rounds, with the throughput's lowest and highest round and its spread,
    (highest - lowest) / median. There is a column `gpu_share` only where a GPU was seen. Raises
    InferlabError when all requests of one client failed.
    """
    rows = []
    for name, configuration in params.configurations.items():
        own = rounds[name]
        single = metrics.summary([outcome for one in own for outcome in one.single])
        rates = [metrics.output_tokens_per_s(one.together) for one in own]
        gpu = [one.usage.gpu_share for one in own if one.usage.gpu_share is not None]
        rows.append(
            {
                "configuration": name,
                "engine": configuration.engine,
                "variant": configuration.variant,
                "speculative": int(configuration.speculative),
                "ttft_ms": round(single["ttft_ms_p50"], 1),
                "decode_tokens_per_s": round(1000 / single["tpot_ms_p50"], 2),
                "throughput_tokens_per_s": round(median(rates), 2),
                "throughput_min": round(min(rates), 2),
                "throughput_max": round(max(rates), 2),
                "throughput_spread": round((max(rates) - min(rates)) / (median(rates) or 1), 4),
                "cpu_share": round(median(one.usage.cpu_share for one in own), 4),
                **({"gpu_share": round(median(gpu), 4)} if gpu else {}),
                "memory_mib": round(max(one.usage.peak_bytes for one in own) / MIB, 1),
                "token_perplexity": round(perplexities[name], 4),
                "failed_requests": sum(_failed(one) for one in own),
            }
        )
    return rows


def ratios(rows: Sequence[Mapping[str, Any]], reference: str) -> dict[str, float]:
    """The metrics: throughput over that of `reference`, quality, failed requests."""
    rates = {row["configuration"]: row["throughput_tokens_per_s"] for row in rows}
    values = {
        f"throughput_ratio_{name}": rate / rates[reference]
        for name, rate in rates.items()
        if name != reference
    }
    values |= {f"token_perplexity_{row['configuration']}": row["token_perplexity"] for row in rows}
    return values | {"failed_requests": sum(row["failed_requests"] for row in rows)}


def speeds(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What is measured of speed, by quantity and configuration."""
    return {f"{name}_{row['configuration']}": row[name] for name in SPEEDS for row in rows}


def _failed(one: Round) -> int:
    return metrics.failures([*one.single, *one.together]).total()
