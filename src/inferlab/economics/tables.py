"""The tables of the cost report, one plain row a machine or API model; US dollars throughout."""

from collections.abc import Sequence
from typing import Any

from inferlab.economics.comparison import THIS_MACHINE, Comparison
from inferlab.economics.cost import (
    Machine,
    break_even,
    busy_share,
    daily_usd,
    instances,
    usd_per_mtok,
)
from inferlab.economics.hardware import share_of_peak

Row = dict[str, Any]


def per_million_tokens(comparison: Comparison) -> list[Row]:
    """One row a machine and one an API model: US dollars per million tokens and their sources."""
    rows = []
    for machine in comparison.machines:
        input_usd, output_usd = usd_per_mtok(machine, comparison.workload)
        rates, price = machine.rates, machine.instance_hour
        row = _price_row(machine.name, input_usd, output_usd, price.date, price.source)
        row |= {
            "usd_per_instance_hour": price.usd,
            "replicas": machine.replicas,
            "prefill_tokens_per_s": round(rates.prefill_tokens_per_s, 1),
            "decode_tokens_per_s": round(rates.decode_tokens_per_s, 1),
            "fit_error_pct": round(100 * rates.fit_error, 2) if rates.fit_error else "",
            "prefill_share_of_peak_pct": _peak_pct(machine, comparison.published_model),
            "rates_source": rates.source,
        }
        rows.append(row)
    blank = dict.fromkeys(list(rows[0])[5:], "")
    for api in comparison.apis.values():
        usd = (api.usd_per_mtok_input, api.usd_per_mtok_output)
        rows.append(_price_row(api.model, *usd, api.date, api.source) | blank)
    return rows


def daily_costs(comparison: Comparison, requests_per_day: Sequence[int]) -> list[Row]:
    """One row a load and machine or API model: whole instances and US dollars a day."""
    workload, rows = comparison.workload, []
    for requests in requests_per_day:
        for machine in comparison.machines:
            count = instances(machine, workload, requests)
            busy = round(100 * busy_share(machine, workload, requests), 2)
            usd = daily_usd(machine, workload, requests)
            row = _daily_row(requests, machine.name, usd)
            rows.append(row | {"instances": count, "busy_pct": busy})
        for api in comparison.apis.values():
            usd = requests * api.usd_per_request(workload)
            rows.append(_daily_row(requests, api.model, usd) | {"instances": "", "busy_pct": ""})
    return rows


def break_evens(comparison: Comparison) -> list[Row]:
    """One row a machine and API model; `reference` is 1 for the comparison that is like with like.

    `requests_per_day` is empty and `exists` 0 where the API is cheaper at every load.
    """
    workload, rows = comparison.workload, []
    for machine in comparison.machines:
        for api in comparison.apis.values():
            crossing = break_even(machine, workload, api.usd_per_request(workload))
            rows.append(
                {
                    "machine": machine.name,
                    "api": api.model,
                    "reference": int(comparison.against[machine.name] == api.model),
                    "exists": int(crossing is not None),
                    "requests_per_day": crossing or "",
                    "instances": instances(machine, workload, crossing) if crossing else "",
                }
            )
    return rows


def _peak_pct(machine: Machine, model: str) -> float | str:
    if machine.name.startswith(THIS_MACHINE):
        return ""
    return round(100 * share_of_peak(machine.name, model, machine.rates.prefill_tokens_per_s), 1)


def _price_row(name: str, input_usd: float, output_usd: float, date: str, source: str) -> Row:
    return {
        "name": name,
        "usd_per_mtok_input": float(f"{input_usd:.6g}"),
        "usd_per_mtok_output": float(f"{output_usd:.6g}"),
        "price_date": date,
        "price_source": source,
    }


def _daily_row(requests: int, name: str, usd: float) -> Row:
    return {"requests_per_day": requests, "name": name, "usd_per_day": float(f"{usd:.6g}")}
