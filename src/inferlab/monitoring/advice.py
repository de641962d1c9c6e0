"""What to do, from what was seen: every piece of advice stands beside the figure it rests on."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inferlab.monitoring.evaluation import Episode
from inferlab.monitoring.promtool import Verdict
from inferlab.monitoring.recording import Recording
from inferlab.monitoring.results import error_counts, growth, missed, unexpected
from inferlab.monitoring.scenario import Observed
from inferlab.monitoring.settings import MonitoringParams, spans
from inferlab.monitoring.watched import ANSWERED, FINISHED

Row = dict[str, Any]
FULL = 0.9
"""The share of the KV cache or of the processors from which on it counts as the limit."""
ROOM = 0.5
"""A KV cache that was never fuller than this has room for more requests at once."""
SLOWER = 2.0
"""How many times slower first tokens must get for a phase to count as too much."""
PROMPT_ERROR = "too_long"


@dataclass(frozen=True)
class Advice:
    """`seen`: the figure; `do`: what follows from it."""

    seen: str
    do: str


@dataclass(frozen=True)
class Seen:
    """All that advice is drawn from. `rows`: a tick each, `phases`: a phase each."""

    params: MonitoringParams
    recording: Recording
    observed: Observed
    episodes: Sequence[Episode]
    rows: Sequence[Row]
    phases: Sequence[Row]
    verdict: Verdict
    cores: int


def advice(seen: Seen) -> list[Advice]:
    """What follows from the scenario, the most pressing first; nothing where nothing was seen."""
    found = [
        *_alerts(seen),
        *_queue(seen),
        *_cache(seen),
        *_processors(seen),
        *_errors(seen),
        *_gaps(seen),
        *_unseen(seen),
        *_memory(seen),
        *_cost(seen),
    ]
    return found or [
        Advice("no limit was reached in any phase", "nothing to change; raise the load")
    ]


def _alerts(seen: Seen) -> list[Advice]:
    silent = [f"{name} in {phase}" for name, phase in missed(seen.episodes, seen.params)]
    loud = [f"{one.alert} at {one.since:g} s" for one in unexpected(seen.episodes, seen.params)]
    found = []
    if silent:
        found.append(
            Advice(
                f"expected and silent: {', '.join(silent)}",
                "compare their thresholds with the table of phases: lower them, or raise the load",
            )
        )
    if loud:
        found.append(
            Advice(
                f"fired where nobody expected it: {', '.join(loud)}",
                "raise the threshold or for_s, or look for what happened at that time",
            )
        )
    return found


def _queue(seen: Seen) -> list[Advice]:
    """The phase with the longest queue, against the first phase."""
    base, worst = seen.phases[0], max(seen.phases, key=lambda row: row["waiting_max"])
    if worst is base or not worst["waiting_max"]:
        return []
    phase = seen.params.phases[worst["phase"]]
    load = f"{phase.clients} clients" if phase.clients else f"{phase.requests_per_s:g} requests/s"
    running = max(row["requests_running"] or 0 for row in seen.rows)
    text = f"in {worst['phase']} ({load}) up to {worst['waiting_max']:.0f} requests waited"
    text += f" while at most {running:.0f} ran"
    before, after = base["ttft_ms_p95"], worst["ttft_ms_p95"]
    if not before or not after or after < SLOWER * before:
        return [Advice(text, "the queue is short enough for first tokens to stay as they were")]
    rates = [row["output_tokens_per_s"] for row in (base, worst)]
    text += f"; TTFT p95 rose from {before:,.0f} to {after:,.0f} ms "
    text += f"and tokens a second from {rates[0]:.0f} to {rates[1]:.0f}"
    if phase.clients:
        return [
            Advice(
                text,
                f"admit at most {running:.0f} requests at once for each instance (429 from the "
                f"proxy beyond), or start another one when requests wait",
            )
        ]
    return [Advice(text, "start another instance, or admit fewer requests a second")]


def _cache(seen: Seen) -> list[Advice]:
    share = max(row["kv_cache_share"] or 0 for row in seen.rows)
    waited = max(row["requests_waiting"] or 0 for row in seen.rows)
    text = f"the KV cache was at most {100 * share:.0f} % full"
    preempted = growth(seen.recording, "vllm:num_preemptions_total")
    if preempted:
        return [
            Advice(
                f"{text} and {preempted:.0f} requests lost their place in it",
                "give it more memory (engine.kv_cache_gib), quantize it, or lower max_num_seqs",
            )
        ]
    if share >= FULL:
        return [Advice(text, "it is the limit: more memory for it, or shorter requests")]
    if waited and share <= ROOM:
        limit = seen.params.engine.max_num_seqs
        return [
            Advice(
                f"{text} while requests waited",
                f"they waited not for memory but for max_num_seqs ({limit}): raise it as far as "
                f"the time between tokens allows",
            )
        ]
    return []


def _processors(seen: Seen) -> list[Advice]:
    """Whether the engine computed all the time, on its GPU or else on its threads."""
    if any(row["gpu_share"] != "" for row in seen.rows):
        busy = max(row["gpu_share"] or 0 for row in seen.rows)
        if busy < FULL:
            return []
        text = f"the GPU was busy up to {100 * busy:.0f} % of the time"
        return [Advice(text, "it is the limit: smaller weights, or another GPU")]
    threads = seen.params.engine.threads or max(1, seen.cores - 1)
    base, busiest = seen.phases[0], max(seen.phases, key=lambda row: row["output_tokens_per_s"])
    before, after = (row["cpu_cores_mean"] or 0 for row in (base, busiest))
    if after < FULL * threads:
        return []
    text = f"in {busiest['phase']} the server kept {after:.2f} processors busy, and its engine "
    text += f"computes on {threads} of {seen.cores}"
    if busiest is not base and before >= FULL * threads:
        text += (
            f"; in {base['phase']} it was {before:.2f} at "
            f"{base['output_tokens_per_s']:.0f} tokens a second against "
            f"{busiest['output_tokens_per_s']:.0f}"
        )
        return [Advice(text, "scale by the queue: use of processors tells any load from none only")]
    return [Advice(text, "computing is the limit: raise engine.threads, else add a machine")]


def _unseen(seen: Seen) -> list[Advice]:
    """What clients waited while the server stood still, and what it says of that itself."""
    for row in seen.phases:
        waited = row["ttft_ms_p95"]
        if not seen.params.phases[row["phase"]].frozen or not waited:
            continue
        _, end = spans(seen.params.phases)[row["phase"]]
        window = [one for one in seen.rows if 0 <= one["seconds"] - end <= seen.params.window_s]
        told = max(
            (1000 * one["ttft_p95_s"] for one in window if one["ttft_p95_s"] != ""), default=0
        )
        if told < waited / SLOWER:
            text = (
                f"TTFT p95 of requests sent during {row['phase']} was {waited:,.0f} ms for their "
            )
            text += f"clients; the server's own p95 afterwards was {told:,.0f} ms at most"
            return [Advice(text, "measure from outside too: a server that hangs sees no one wait")]
    return []


def _errors(seen: Seen) -> list[Advice]:
    kinds = error_counts(seen.observed.sent)
    found = []
    if refused := kinds.pop(PROMPT_ERROR, 0):
        counted = growth(seen.recording, ANSWERED, {"status": "4xx"})
        found.append(
            Advice(
                f"{refused} requests were refused as too long (the server counted {counted:.0f})",
                f"tell clients the limit of {seen.params.engine.max_model_len} tokens, "
                f"or count tokens before the server does",
            )
        )
    if cut := kinds.pop("cut", 0):
        aborted = growth(seen.recording, FINISHED, {"finished_reason": "abort"})
        wasted = sum(len(one.outcome.chunks) for one in seen.observed.sent if one.error == "cut")
        found.append(
            Advice(
                f"{cut} clients left early, after {wasted} chunks in all, and the server's "
                f"counter of aborted requests grew by {aborted:.0f}",
                "watch the finished requests as a share of the accepted ones, as the alert does"
                + ("; that counter does not tell" if aborted < cut else ""),
            )
        )
    if kinds:
        text = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        found.append(Advice(f"other failed requests: {text}", "read the server's log at that time"))
    return found


def _gaps(seen: Seen) -> list[Advice]:
    gaps = seen.recording.gaps
    if not gaps:
        return []
    frozen = [row for row in seen.rows if seen.params.phases[row["phase"]].frozen]
    inside = sum(not row["up"] for row in frozen)
    text = f"{gaps} of {len(seen.rows)} scrapes failed, {inside} of them while it was frozen"
    if gaps > inside + 1:
        return [
            Advice(
                text,
                "the server answers /metrics late under load: scrape less often and "
                "let the alert on up wait for two scrapes or more",
            )
        ]
    return [
        Advice(text, "keep the alert on up: gauges are gone in a gap, and with them their alerts")
    ]


def _memory(seen: Seen) -> list[Advice]:
    whole = max(row["memory_gib"] for row in seen.rows)
    told = max(((row["front_end_bytes"] or 0) / 2**30 for row in seen.rows), default=0)
    if not told or told > FULL * whole:
        return []
    return [
        Advice(
            f"the server exports {told:.2f} GiB of resident memory, its processes hold {whole:.2f}",
            "watch the machine as well: process_resident_memory_bytes leaves the engine out",
        )
    ]


def _cost(seen: Seen) -> list[Advice]:
    known = [row for row in seen.phases if row["usd_per_1000_requests"]]
    if len(known) < 2:
        return []
    low, high = (pick(known, key=lambda row: row["usd_per_1000_requests"]) for pick in (min, max))
    return [
        Advice(
            f"1,000 requests cost {low['usd_per_1000_requests']:.4f} dollars in {low['phase']} and "
            f"{high['usd_per_1000_requests']:.4f} in {high['phase']}",
            "an instance costs the same idle or full: few and full ones, as far as TTFT allows",
        )
    ]
