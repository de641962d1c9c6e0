"""Instances for rent, and how fast they serve: published benchmarks and our own measurements.

The three CSV files beside this module hold the rows that are used, each with date and source.
"""

import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.optimize import nnls

from inferlab.economics.cost import Machine, Price, Rates
from inferlab.errors import InferlabError, lookup

FLOPS_PER_PARAMETER = 2  # a multiplication and an addition for each token


@dataclass(frozen=True)
class PublishedModel:
    """A model of published_serving.csv: its name there and its number of parameters."""

    name: str
    parameters: float


MODELS = {
    "llama_3_8b": PublishedModel("meta-llama/Meta-Llama-3-8B", 8.03e9),
    "qwen3_14b": PublishedModel("Qwen/Qwen3-14B", 14.8e9),
}
"""Models whose published rows on vLLM tell prefill from decode, on the A100 and on the H100."""


@dataclass(frozen=True)
class Offer:
    """One instance type of a provider: `gpus` of the kind `hardware` at the price per hour."""

    hardware: str
    gpus: int
    price: Price


def offers() -> dict[str, Offer]:
    """Every instance type in gpu_prices.csv by its name."""
    return {
        row["offer"]: Offer(
            hardware=row["hardware"],
            gpus=int(row["gpu_count"]),
            price=Price(float(row["usd_per_hour_total"]), row["date"], _described(row)),
        )
        for row in _read("gpu_prices.csv").to_dict("records")
    }


def rented(hardware: str, offer: str, model: str, usd_per_hour: Price | None = None) -> Machine:
    """The machine `hardware` rented as `offer`, one replica of the published model a GPU.

    Raises InferlabError when the offer is unknown or has other GPUs than `hardware`.
    """
    catalogue = offers()
    found = lookup(catalogue, offer, "offer")
    if found.hardware != hardware:
        fitting = ", ".join(name for name, one in catalogue.items() if one.hardware == hardware)
        known = ", ".join(sorted({one.hardware for one in catalogue.values()}))
        right = f"offers of {hardware}: {fitting}" if fitting else f"known hardware: {known}"
        raise InferlabError(f"offer {offer} is {found.hardware}, not {hardware}; {right}")
    rates = published_rates(hardware, model)
    return Machine(hardware, rates, usd_per_hour or found.price, found.gpus)


def published_rates(hardware: str, model: str) -> Rates:
    """Prefill and decode rates of one GPU, fitted to the published rows of a model on vLLM.

    Each row says how many seconds of the GPU a request with so many input and output tokens took;
    non-negative least squares on the relative error finds the seconds per input and output token.
    """
    name = lookup(MODELS, model, "published model").name
    rows = _read("published_serving.csv")
    gpus = dict.fromkeys(rows["hardware"])
    lookup(gpus, hardware, "hardware")
    rows = rows[(rows["model"] == name) & (rows["hardware"] == hardware)]
    tokens = rows[["input_len", "output_len"]].astype(float).to_numpy()
    seconds = np.array([_seconds_per_request(row) for row in rows.to_dict("records")])
    seconds_per_token, _ = nnls(tokens / seconds[:, None], np.ones(len(rows)))
    errors = tokens @ seconds_per_token / seconds - 1
    prefill, decode = (1 / seconds_per_token).tolist()
    first = rows.iloc[0]
    source = (
        f"{name}, {first['precision']}, {first['engine']}, {first['gpu']}: {len(rows)} rows of "
        f"{first['source_title']}, {first['source_date_or_version']}"
    )
    return Rates(prefill, decode, source, float(np.sqrt(np.mean(errors**2))))


def share_of_peak(hardware: str, model: str, prefill_tokens_per_s: float) -> float:
    """The part of the GPU's dense bf16 peak that a prefill rate needs; above 1 is impossible."""
    specs = _read("gpu_specs.csv").set_index("hardware")
    needed = FLOPS_PER_PARAMETER * MODELS[model].parameters * prefill_tokens_per_s
    return needed / (float(specs.loc[hardware, "bf16_dense_tflops"]) * 1e12)


def gpu_memory(hardware: str) -> int:
    """Nominal bytes of memory of one GPU, whose maker's GB are GiB (80 GB: 81,920 MiB).

    Raises InferlabError for an unknown one.
    """
    specs = _read("gpu_specs.csv").set_index("hardware")
    gibibytes = lookup(specs["memory_gib"].to_dict(), hardware, "GPU")
    return int(float(gibibytes) * 2**30)


def measured_rates(path: Path) -> tuple[Rates, int]:
    """Rates from a metrics file of the serving stage, and how many of its requests failed.

    Raises InferlabError naming the file when it is missing, no JSON, or lacks a key.
    """
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError:
        raise InferlabError(f"{path} is missing; run the stage serve_benchmark first") from None
    except json.JSONDecodeError as error:
        raise InferlabError(f"{path} is not JSON: {error}") from None
    for key in ("prefill_tokens_per_s", "decode_tokens_per_s", "failed_requests"):
        if key not in values:
            raise InferlabError(f"{path} has no {key}; run the stage serve_benchmark again")
    failed = int(values["failed_requests"])
    source = f"measured by serve_benchmark, {failed} requests failed ({path})"
    return Rates(values["prefill_tokens_per_s"], values["decode_tokens_per_s"], source), failed


def _seconds_per_request(row: dict[str, str]) -> float:
    """Seconds of the GPU a request took, by the metric of a row of published_serving.csv."""
    value, output_tokens = float(row["value"]), float(row["output_len"])
    match row["metric"]:
        case "total_tokens_per_s":
            return (float(row["input_len"]) + output_tokens) / value
        case "output_tokens_per_s":
            return output_tokens / value
        case "ttft_ms":  # one static batch of prompts, prefilled together
            return value / 1000 / float(row["batch_or_concurrency"])
        case other:
            raise InferlabError(f"published_serving.csv: unknown metric {other!r}")


def _read(name: str) -> pd.DataFrame:
    with resources.files("inferlab.economics").joinpath(name).open() as file:
        return pd.read_csv(file, dtype=str, keep_default_na=False)


def _described(row: dict[str, str]) -> str:
    note = f" ({row['note']})" if row["note"] else ""
    return f"{row['provider']} {row['item']}{note}"
