"""`inferlab cost`: the cost report for one's own numbers."""

import datetime
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.table import Table

from inferlab.economics.cost import (
    Machine,
    Price,
    Rates,
    Workload,
    break_even,
    busy_share,
    daily_usd,
    instances,
    usd_per_mtok,
)
from inferlab.economics.hardware import offers, rented
from inferlab.economics.prices import ApiPrice, api_price
from inferlab.errors import InferlabError, lookup
from inferlab.terminal import console

COMMAND_LINE = "given on the command line"
DEFAULT_APIS = ("groq/llama-3.1-8b-instant", "aws/meta.llama3-8b-instruct-v1:0")


def cost(
    prefill_tokens_per_s: Annotated[
        float | None, typer.Option(help="Input tokens a second of one saturated replica.")
    ] = None,
    decode_tokens_per_s: Annotated[
        float | None,
        typer.Option(
            help="Output tokens a second of one saturated replica, at your lengths of context."
        ),
    ] = None,
    usd_per_hour: Annotated[
        float | None, typer.Option(help="US dollars an hour of one whole instance.")
    ] = None,
    replicas: Annotated[
        int | None, typer.Option(help="Copies of the model on one instance; 1 when not given.")
    ] = None,
    offer: Annotated[
        str | None,
        typer.Option(help="Known instance, such as aws_p5_4xlarge: fills what is not given."),
    ] = None,
    published_model: Annotated[
        str, typer.Option(help="Model whose published rates go with --offer.")
    ] = "llama_3_8b",
    input_tokens: Annotated[int, typer.Option(help="Input tokens of a request.")] = 500,
    output_tokens: Annotated[int, typer.Option(help="Output tokens of a request.")] = 200,
    requests_per_day: Annotated[
        list[int], typer.Option(help="Load; may be given several times.")
    ] = [10_000, 100_000, 1_000_000],  # noqa: B006
    peak_to_mean: Annotated[
        float, typer.Option(help="Busiest hour over mean hour; instances carry the peak.")
    ] = 2.0,
    api: Annotated[
        list[str],
        typer.Option(
            help="API as provider/model, or NAME=INPUT:OUTPUT with prices per million tokens; "
            "may be given several times."
        ),
    ] = list(DEFAULT_APIS),  # noqa: B006
    price_date: Annotated[
        str | None, typer.Option(help="Day of the prices, YYYY-MM-DD; today when not given.")
    ] = None,
) -> None:
    """Cost of serving: per million tokens, per day, and break-even against API prices."""
    day = _day(price_date)
    workload = Workload(input_tokens, output_tokens, peak_to_mean)
    if any(requests < 1 for requests in requests_per_day):
        raise InferlabError("--requests-per-day must be at least 1")
    own = _rates(prefill_tokens_per_s, decode_tokens_per_s)
    price = None
    if usd_per_hour is not None:
        price = Price(usd_per_hour, day.isoformat(), COMMAND_LINE)
    machine = _machine(own, price, replicas, offer, published_model)
    apis = [_api(text, workload, day) for text in api]
    terminal = console()
    terminal.print(_per_million_tokens(machine, workload, apis))
    terminal.print(_daily(machine, workload, apis, requests_per_day))
    terminal.print(_break_even(machine, workload, apis))
    terminal.print(_sources(machine), soft_wrap=True)


def _machine(
    own: Rates | None, price: Price | None, replicas: int | None, offer: str | None, model: str
) -> Machine:
    """The user's numbers, and those of the offer where there are none."""
    if offer is None:
        if own is None:
            raise InferlabError(
                "missing rates: give --prefill-tokens-per-s and --decode-tokens-per-s, or --offer"
            )
        if price is None:
            raise InferlabError("missing price: give --usd-per-hour, or --offer")
        return Machine("own instance", own, price, 1 if replicas is None else replicas)
    known = rented(lookup(offers(), offer, "offer").hardware, offer, model)
    return Machine(
        offer,
        own or known.rates,
        price or known.instance_hour,
        known.replicas if replicas is None else replicas,
    )


def _rates(prefill: float | None, decode: float | None) -> Rates | None:
    if prefill is None and decode is None:
        return None
    if prefill is None or decode is None:
        raise InferlabError("give both --prefill-tokens-per-s and --decode-tokens-per-s")
    return Rates(prefill, decode, COMMAND_LINE)


def _api(text: str, workload: Workload, day: datetime.date) -> ApiPrice:
    """`provider/model`, or `name=input:output` with the user's own prices."""
    name, own, prices = text.partition("=")
    if not own:
        return api_price(name, workload, day)
    try:
        input_usd, output_usd = (float(usd) for usd in prices.split(":"))
        if not name:
            raise ValueError
    except ValueError:
        raise InferlabError(f"--api must be NAME=INPUT:OUTPUT in USD; got {text!r}") from None
    return api_price(name, workload, day, {name: (input_usd, output_usd)})


def _day(text: str | None) -> datetime.date:
    if text is None:
        return datetime.datetime.now(tz=datetime.UTC).date()
    try:
        return datetime.date.fromisoformat(text)
    except ValueError:
        raise InferlabError(f"--price-date must be a day as YYYY-MM-DD; got {text!r}") from None


def _per_million_tokens(machine: Machine, workload: Workload, apis: Sequence[ApiPrice]) -> Table:
    table = _table("US dollars per million tokens", "", "input", "output", "price of", "source")
    usd = usd_per_mtok(machine, workload)
    price = machine.instance_hour
    hourly = f"{price.usd:g} USD an hour, {price.source}"
    table.add_row(machine.name, *(f"{one:.4g}" for one in usd), price.date, hourly)
    for api in apis:
        usd = (api.usd_per_mtok_input, api.usd_per_mtok_output)
        table.add_row(api.model, *(f"{one:.4g}" for one in usd), api.date, api.source)
    return table


def _daily(
    machine: Machine, workload: Workload, apis: Sequence[ApiPrice], loads: Sequence[int]
) -> Table:
    names = [api.model for api in apis]
    table = _table("US dollars a day", "requests", "instances", "busy", machine.name, *names)
    for load in loads:
        table.add_row(
            f"{load:,}",
            f"{instances(machine, workload, load):,}",
            f"{100 * busy_share(machine, workload, load):.1f} %",
            f"{daily_usd(machine, workload, load):,.2f}",
            *(f"{load * api.usd_per_request(workload):,.2f}" for api in apis),
        )
    return table


def _break_even(machine: Machine, workload: Workload, apis: Sequence[ApiPrice]) -> Table:
    table = _table("Break-even", "against", "cheaper from requests a day")
    for api in apis:
        crossing = break_even(machine, workload, api.usd_per_request(workload))
        table.add_row(api.model, "never" if crossing is None else f"{crossing:,}")
    return table


def _sources(machine: Machine) -> str:
    rates = machine.rates
    fit = f" (fit error {100 * rates.fit_error:.1f} %)" if rates.fit_error else ""
    return (
        f"Rates of a replica: prefill {rates.prefill_tokens_per_s:,.0f}, "
        f"decode {rates.decode_tokens_per_s:,.0f} tokens/s; {rates.source}{fit}. "
        f"Replicas on a whole instance, which is paid for 24 hours a day: {machine.replicas}."
    )


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        left = number == 0 or column == "source"
        table.add_column(column, justify="left" if left else "right", overflow="fold")
    return table
