"""What the stage cost_report compares: machines and API prices under one workload."""

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from inferlab import params as parameters
from inferlab.economics.cost import (
    Machine,
    Price,
    Rates,
    Workload,
    break_even,
    usd_per_mtok,
)
from inferlab.economics.hardware import rented
from inferlab.economics.prices import ApiPrice, api_price
from inferlab.errors import InferlabError, lookup

THIS_MACHINE = "this_machine"
Tokens = Annotated[int, Field(ge=1)]
Usd = Annotated[float, Field(gt=0)]


@parameters.section
class CostReportParams:
    """The section `cost_report`; its keys are explained in params.yaml."""

    variants: Annotated[tuple[str, ...], Field(min_length=1)]
    input_tokens: Tokens
    output_tokens: Tokens
    requests_per_day: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)]
    peak_to_mean: Annotated[float, Field(ge=1)]
    published_model: str
    offers: dict[str, str]
    usd_per_hour: dict[str, Usd | None]
    api_models: tuple[str, ...]
    break_even_against: dict[str, str]
    usd_per_mtok: dict[str, tuple[float, float]]
    price_date: datetime.date


@dataclass(frozen=True)
class Comparison:
    """Machines and API prices under one workload. `against` maps a machine to its API model."""

    workload: Workload
    machines: Sequence[Machine]
    apis: Mapping[str, ApiPrice]
    against: Mapping[str, str]
    published_model: str


def compare(params: CostReportParams, measured: Mapping[str, Rates]) -> Comparison:
    """Resolve every machine and price. `measured` maps a variant to its rates on this machine.

    Raises InferlabError for an unknown name or a missing price, with the keys that would do.
    """
    workload = Workload(params.input_tokens, params.output_tokens, params.peak_to_mean)
    known = dict.fromkeys([*params.offers, THIS_MACHINE])
    for hardware in (*params.usd_per_hour, *params.break_even_against):
        lookup(known, hardware, "hardware in cost_report")
    machines = [
        rented(hardware, offer, params.published_model, _own_price(params, hardware))
        for hardware, offer in params.offers.items()
    ]
    against = {machine.name: _reference(params, machine.name) for machine in machines}
    price = _own_price(params, THIS_MACHINE)
    if price is None:
        raise InferlabError("cost_report.usd_per_hour.this_machine must be a price; it is missing")
    for variant, rates in measured.items():
        machine = Machine(f"{THIS_MACHINE}_{variant}", rates, price)
        machines.append(machine)
        against[machine.name] = _reference(params, THIS_MACHINE)
    names = dict.fromkeys([*params.api_models, *against.values()])
    apis = {
        name: api_price(name, workload, params.price_date, params.usd_per_mtok) for name in names
    }
    return Comparison(workload, machines, apis, against, params.published_model)


def metrics(comparison: Comparison) -> dict[str, float]:
    """The flat metrics; a break-even of 0 requests a day means that there is none."""
    workload, values = comparison.workload, {}
    for machine in comparison.machines:
        input_usd, output_usd = usd_per_mtok(machine, workload)
        api = comparison.apis[comparison.against[machine.name]]
        crossing = break_even(machine, workload, api.usd_per_request(workload))
        values[f"usd_per_mtok_input_{machine.name}"] = input_usd
        values[f"usd_per_mtok_output_{machine.name}"] = output_usd
        values[f"break_even_requests_per_day_{machine.name}"] = crossing or 0
        if machine.rates.fit_error:
            values[f"fit_error_pct_{machine.name}"] = 100 * machine.rates.fit_error
    return values


def _own_price(params: CostReportParams, hardware: str) -> Price | None:
    usd = params.usd_per_hour.get(hardware)
    if usd is None:
        return None
    source = f"set by the user, not a quote (params.yaml: cost_report.usd_per_hour.{hardware})"
    return Price(usd, params.price_date.isoformat(), source)


def _reference(params: CostReportParams, hardware: str) -> str:
    if hardware not in params.break_even_against:
        raise InferlabError(
            f"cost_report.break_even_against has no {hardware}; name an API model for it"
        )
    return params.break_even_against[hardware]
