"""The engines that are measured on this machine, beside the published ones."""

from collections.abc import Mapping, Sequence
from typing import Any


def prompt_tokens(settings: Mapping[str, Any]) -> dict[str, int]:
    """Tokens of the prompt before which each stage measured; `settings`: the whole params.yaml."""
    return {
        "serve_benchmark": settings["serve_benchmark"]["middle"]["input_tokens"],
        "format_comparison": settings["format_comparison"]["prompt_tokens"],
        "memory_efficient": settings["memory_efficient"]["prompt_tokens"],
    }


def measured_table(
    served: Mapping[str, Mapping[str, float]],
    formats: Sequence[Mapping[str, str]],
    arms: Sequence[Mapping[str, str]],
    prompts: Mapping[str, int],
) -> list[dict[str, Any]]:
    """What was measured here, one sequence at a time: tokens a second of decoding, by engine.

    `served`: metrics of serve_benchmark by variant, over HTTP; `formats`, `arms`: the tables of
    format_comparison and memory_efficient; `prompts`: tokens of the prompt in each of the three.
    A ratio to transformers stands only beside what ran in turns with it, in memory_efficient.
    """
    table = [
        _measured("vLLM", variant, 1000 / found["tpot_ms_p50_c1"], "serve_benchmark", prompts)
        for variant, found in served.items()
    ]
    table += [
        _measured(
            "transformers",
            row["variant"],
            float(row["transformers_decode_tokens_per_s"]),
            "format_comparison",
            prompts,
        )
        for row in formats
    ]
    speeds = {row["arm"]: float(row["decode_tokens_per_s"]) for row in arms}
    for arm, (engine, variant) in ARMS.items():
        if arm in speeds:
            row = _measured(engine, variant, speeds[arm], "memory_efficient", prompts)
            table.append(
                row | {"over_transformers": round(speeds[arm] / speeds["transformers"], 3)}
            )
    return table


ARMS = {
    "transformers": ("transformers", "base"),
    "runtime": ("lean runtime", "base"),
    "int8_weights": ("lean runtime", "int8"),
}
"""The arms of memory_efficient that are an engine with the weights of a variant."""


def _measured(
    engine: str, variant: str, speed: float, stage: str, prompts: Mapping[str, int]
) -> dict[str, Any]:
    return {
        "engine": engine,
        "variant": variant,
        "name": f"{engine}, {variant} ({stage})",
        "prompt_tokens": prompts[stage],
        "decode_tokens_per_s": round(speed, 2),
        "over_transformers": "",
        "measured_by": stage,
    }
