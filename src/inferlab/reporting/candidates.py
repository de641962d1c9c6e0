"""Candidates from what was measured: loads on vLLM, and one request at a time without a server."""

from collections.abc import Mapping, Sequence

from inferlab.errors import InferlabError
from inferlab.reporting.requirements import Candidate

BASE = "base"
TASKS = ("trivia_accuracy", "cloze_accuracy")
Rows = Sequence[Mapping[str, str]]
Losses = Mapping[str, tuple[float, float]]
AS_SERVED = "served_perplexity_ratio"
FROM_RATES = "computed from rates of prefill and decoding"
FROM_MEDIANS = "medians of one client's requests"


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


def in_transformers(
    rows: Rows, found: Losses, input_tokens: int, output_tokens: int
) -> list[Candidate]:
    """Candidates in transformers, one request at a time, from the table of format_comparison.

    Computed from the rates of prefill and decoding: no server, no queue, no spread.
    """
    return [
        _one_at_a_time(
            row["variant"],
            "transformers",
            first=input_tokens / float(row["transformers_prefill_tokens_per_s"]),
            each=1 / float(row["transformers_decode_tokens_per_s"]),
            output_tokens=output_tokens,
            lost=found[row["variant"]],
            unserved=FROM_RATES,
        )
        for row in rows
        if row["variant"] in found
    ]


def in_runtime(
    rows: Rows, quality: Mapping[str, Mapping[str, float]], longer: float, output_tokens: int
) -> list[Candidate]:
    """Candidates on the lean runtime, plain and drafting, from the table of end_to_end.

    Medians of one client's requests, without a server. `longer`: the prompts that are asked for
    over those measured there; the time to the first token grows with them, as at one rate. The
    perplexity is the table's own. Configurations with failed requests, and variants that were not
    evaluated, are left out.
    """
    found = losses(quality)
    base = quality[BASE]["token_perplexity"]
    return [
        _one_at_a_time(
            row["variant"],
            "runtime with drafts" if int(row["speculative"]) else "runtime",
            first=longer * float(row["ttft_ms"]) / 1000,
            each=1 / float(row["decode_tokens_per_s"]),
            output_tokens=output_tokens,
            lost=(float(row["token_perplexity"]) / base, found[row["variant"]][1]),
            unserved=FROM_MEDIANS,
        )
        for row in rows
        if row["engine"] == "runtime"
        and row["variant"] in found
        and not int(row["failed_requests"])
    ]


def _one_at_a_time(
    variant: str,
    engine: str,
    first: float,
    each: float,
    output_tokens: int,
    lost: tuple[float, float],
    unserved: str,
) -> Candidate:
    """One request after the other: `first` and `each` are seconds to the first and next tokens."""
    rate = 1 / (first + (output_tokens - 1) * each)
    times = (1000 * first, 1000 * each)
    return Candidate(variant, engine, 1, *times, rate, rate, rate, *lost, unserved)


def _requests(row: Mapping[str, str], key: str) -> float:
    """A bound of throughput in requests a second: all requests of a load are of one length."""
    return float(row[key]) * float(row["requests_per_s"]) / float(row["output_tokens_per_s"])
