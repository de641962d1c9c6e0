"""The engines that are measured on this machine, beside the published ones."""

from collections.abc import Mapping, Sequence
from typing import Any


def prompt_tokens(settings: Mapping[str, Any]) -> dict[str, int]:
    """Tokens of the prompt before which each stage measured; `settings`: the whole params.yaml."""
    return {
        "serve_benchmark": settings["serve_benchmark"]["middle"]["input_tokens"],
        "format_comparison": settings["format_comparison"]["prompt_tokens"],
        "memory_efficient": settings["memory_efficient"]["prompt_tokens"],
        "end_to_end": settings["end_to_end"]["input_tokens"],
    }


def measured_table(
    served: Mapping[str, Mapping[str, float]],
    formats: Sequence[Mapping[str, str]],
    arms: Sequence[Mapping[str, str]],
    configurations: Sequence[Mapping[str, str]],
    prompts: Mapping[str, int],
) -> list[dict[str, Any]]:
    """What was measured here, one sequence at a time: tokens a second of decoding, by engine.

    `served`: metrics of serve_benchmark by variant, over HTTP; `formats`, `arms`, `configurations`:
    the tables of format_comparison, memory_efficient and end_to_end; `prompts`: tokens of the
    prompt in each of the four. A ratio to transformers stands only beside what ran in turns with
    it, in the last two.
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
    in_turns = {
        "memory_efficient": [(*ARMS[row["arm"]], row) for row in arms if row["arm"] in ARMS],
        "end_to_end": [
            (ENGINES[row["engine"]], row["variant"], row)
            for row in configurations
            if not int(row["speculative"])
        ],
    }
    for stage, own in in_turns.items():
        speeds = {
            (engine, variant): float(row["decode_tokens_per_s"]) for engine, variant, row in own
        }
        for (engine, variant), speed in speeds.items():
            found = _measured(engine, variant, speed, stage, prompts)
            if REFERENCE in speeds:
                found["over_transformers"] = round(speed / speeds[REFERENCE], 3)
            table.append(found)
    return table


REFERENCE = ("transformers", "base")
ENGINES = {"transformers": "transformers", "vllm": "vLLM", "runtime": "lean runtime"}
"""The engines of end_to_end."""
ARMS = {
    "transformers": REFERENCE,
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
