"""What is watched of a vLLM server: the measures behind the table, the plots and the panels.

Every name is one that vLLM 0.32 exports; the stage checks them against the server it has started.
"""

from dataclasses import dataclass

from inferlab.monitoring.measures import Latest, Measure, Quantile, Rate, Ratio

TTFT = "vllm:time_to_first_token_seconds"
TPOT = "vllm:request_time_per_output_token_seconds"
ITL = "vllm:inter_token_latency_seconds"
FINISHED = "vllm:request_success_total"
ANSWERED = "http_requests_total"
QUANTILES = {"p50": 0.5, "p95": 0.95}


@dataclass(frozen=True)
class Panel:
    """A panel of a dashboard: its title, the unit as Grafana names it, and measures by legend."""

    title: str
    unit: str
    lines: dict[str, Measure]


def measures(window_s: float) -> dict[str, Measure]:
    """The columns of the table that come from the server, by name; rates over `window_s`."""
    return {
        "requests_running": Latest("latest", "vllm:num_requests_running"),
        "requests_waiting": Latest("latest", "vllm:num_requests_waiting"),
        "kv_cache_share": Latest("latest", "vllm:kv_cache_usage_perc", aggregate="max"),
        **_quantiles("ttft", TTFT, window_s),
        **_quantiles("tpot", TPOT, window_s),
        **_quantiles("itl", ITL, window_s),
        "prompt_tokens_per_s": Rate("rate", "vllm:prompt_tokens_total", window_s),
        "output_tokens_per_s": Rate("rate", "vllm:generation_tokens_total", window_s),
        "finished_per_s": Rate("rate", FINISHED, window_s),
        "refused_per_s": Rate("rate", ANSWERED, window_s, {"status": "4xx"}),
        "answered_per_s": Rate("rate", ANSWERED, window_s, {"status": "2xx"}),
        "preemptions_per_s": Rate("rate", "vllm:num_preemptions_total", window_s),
        "front_end_cores": Rate("rate", "process_cpu_seconds_total", window_s),
        "front_end_bytes": Latest("latest", "process_resident_memory_bytes"),
    }


def panels(window_s: float) -> list[Panel]:
    """The panels of the Grafana dashboard, in reading order."""
    known = measures(window_s)

    def some(*columns: str) -> dict[str, Measure]:
        return {name.replace("_", " "): known[name] for name in columns}

    answered = Ratio("ratio", FINISHED, ANSWERED, window_s, {}, {"status": "2xx"})
    refused = Ratio("ratio", ANSWERED, ANSWERED, window_s, {"status": "4xx"})
    return [
        Panel("Time to first token", "s", some("ttft_p50_s", "ttft_p95_s")),
        Panel("Time per output token, by request", "s", some("tpot_p50_s", "tpot_p95_s")),
        Panel("Time between tokens", "s", some("itl_p50_s", "itl_p95_s")),
        Panel(
            "Requests running and waiting", "short", some("requests_running", "requests_waiting")
        ),
        Panel("KV cache in use", "percentunit", some("kv_cache_share")),
        Panel("Tokens a second", "short", some("prompt_tokens_per_s", "output_tokens_per_s")),
        Panel("Requests a second", "reqps", some("finished_per_s", "refused_per_s")),
        Panel(
            "Refused, and answered to the end",
            "percentunit",
            {"refused of all": refused, "finished of accepted": answered},
        ),
        Panel("Preemptions a second", "short", some("preemptions_per_s")),
        Panel("Processors of the front end", "short", some("front_end_cores")),
        Panel("Memory of the front end", "bytes", some("front_end_bytes")),
        Panel("Target up", "short", {"up": Latest("latest", "up", aggregate="min")}),
    ]


def _quantiles(name: str, metric: str, window_s: float) -> dict[str, Measure]:
    return {
        f"{name}_{label}_s": Quantile("quantile", metric, quantile, window_s)
        for label, quantile in QUANTILES.items()
    }
