"""Candidates from what was measured: served loads on vLLM, and one request at a time without it."""

from collections.abc import Mapping, Sequence

from inferlab.errors import InferlabError
from inferlab.reporting.requirements import Candidate

BASE = "base"
TASKS = ("trivia_accuracy", "cloze_accuracy")
Rows = Sequence[Mapping[str, str]]
Losses = Mapping[str, tuple[float, float]]
AS_SERVED = "served_perplexity_ratio"


def losses(quality: Mapping[str, Mapping[str, float]]) -> dict[str, tuple[float, float]]:
    """Of each evaluated variant: perplexity over the base's, largest drop of a task's accuracy.

    `quality`: the metrics of the stage evaluate by variant. Raises InferlabError without a base.
    """
    if BASE not in quality:
        raise InferlabError(
            f"no variant can be compared: metrics/evaluate/{BASE}.json is missing; "
            f"run dvc repro evaluate@{BASE}"
        )
    base = quality[BASE]
    return {
        name: (
            found["token_perplexity"] / base["token_perplexity"],
            max(0.0, *(base[task] - found[task] for task in TASKS)),
        )
        for name, found in quality.items()
    }


def as_served(found: Losses, metrics: Mapping[str, Mapping[str, float]]) -> Losses:
    """`found`, with perplexities that come out of the server's own arithmetic, over the base's.

    `metrics`: of the stage serve_benchmark by variant. A variant whose perplexity was not asked of
    its server keeps that of its checkpoint, as all do where the base's was not.
    """
    base = metrics.get(BASE, {}).get(AS_SERVED)
    if base is None:
        return found
    return {
        name: (ratio * metrics.get(name, {}).get(AS_SERVED, base) / base, loss)
        for name, (ratio, loss) in found.items()
    }


def served(rows: Rows, found: Losses) -> list[Candidate]:
    """Candidates on vLLM, from the concurrency table of the stage serve_benchmark.

    Times are those of the slowest round: a limit is to hold in every one. Loads with failed
    requests, and variants that were not evaluated, are left out.
    """
    return [
        Candidate(
            variant=row["variant"],
            engine="vLLM",
            concurrency=int(row["concurrency"]),
            ttft_ms=float(row["ttft_ms_p95_max"]),
            tpot_ms=float(row["tpot_ms_p95_max"]),
            requests_per_s=float(row["requests_per_s"]),
            low=_requests(row, "output_tokens_per_s_min"),
            high=_requests(row, "output_tokens_per_s_max"),
            perplexity_ratio=found[row["variant"]][0],
            accuracy_loss=found[row["variant"]][1],
        )
        for row in rows
        if row["variant"] in found and not int(row["failed_requests"])
    ]


def unserved(rows: Rows, found: Losses, input_tokens: int, output_tokens: int) -> list[Candidate]:
    """Candidates in transformers, one request at a time, from the table of format_comparison.

    Computed from the rates of prefill and decoding: no server, no queue, no spread.
    """
    candidates = []
    for row in rows:
        if row["variant"] not in found:
            continue
        first = input_tokens / float(row["transformers_prefill_tokens_per_s"])
        each = 1 / float(row["transformers_decode_tokens_per_s"])
        rate = 1 / (first + (output_tokens - 1) * each)
        ratio, loss = found[row["variant"]]
        times = (1000 * first, 1000 * each)
        candidates.append(
            Candidate(
                row["variant"], "transformers", 1, *times, rate, rate, rate, ratio, loss, True
            )
        )
    return candidates


def _requests(row: Mapping[str, str], key: str) -> float:
    """A bound of throughput in requests a second: all requests of a load are of one length."""
    return float(row[key]) * float(row["requests_per_s"]) / float(row["output_tokens_per_s"])
