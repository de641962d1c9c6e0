"""What of the recommendation goes to DVC: flat metrics to compare, and a table to plot."""

from inferlab.reporting.advice import Advice
from inferlab.reporting.decision import pareto
from inferlab.reporting.requirements import overshoots, usd_per_million_requests

COLUMNS = (
    "candidate",
    "variant",
    "engine",
    "concurrency",
    "ttft_ms",
    "tpot_ms",
    "requests_per_s",
    "usd_per_million_requests",
    "perplexity_ratio",
    "within_limits",
    "on_front",
)


def metrics(advice: Advice | str) -> dict[str, float]:
    """The flat metrics; those of the recommendation are there when there is one."""
    if isinstance(advice, str):
        return {"candidates": 0}
    values: dict[str, float] = {
        "candidates": len(advice.case.candidates),
        "candidates_within_limits": sum(
            not overshoots(one, advice.wanted) for one in advice.case.candidates
        ),
        "candidates_on_front": len(advice.front),
    }
    if advice.decision.winner:
        chosen = advice.decision.winner.candidate
        values |= {
            "recommended_concurrency": chosen.concurrency,
            "recommended_requests_per_s": chosen.requests_per_s,
            "recommended_ttft_ms_p95": chosen.ttft_ms,
            "recommended_tpot_ms_p95": chosen.tpot_ms,
            "recommended_perplexity_ratio": chosen.perplexity_ratio,
            "recommended_machines": advice.decision.winner.machines,
            "recommended_usd_per_day": advice.decision.winner.usd_per_day,
        }
    return values


def table(advice: Advice | str) -> list[dict[str, object]]:
    """One row a candidate, for the plot of latency against cost; a blank one without any."""
    if isinstance(advice, str):
        return [dict.fromkeys(COLUMNS, "")]
    front = pareto(advice.case.candidates)
    return [
        {
            "candidate": f"{one.name}, {one.concurrency} at once",
            "variant": one.variant,
            "engine": one.engine,
            "concurrency": one.concurrency,
            "ttft_ms": one.ttft_ms,
            "tpot_ms": one.tpot_ms,
            "requests_per_s": one.requests_per_s,
            "usd_per_million_requests": usd_per_million_requests(
                one, advice.case.traffic, advice.case.usd_per_hour
            ),
            "perplexity_ratio": one.perplexity_ratio,
            "within_limits": int(not overshoots(one, advice.wanted)),
            "on_front": int(on_front),
        }
        for one, on_front in zip(advice.case.candidates, front, strict=True)
    ]
