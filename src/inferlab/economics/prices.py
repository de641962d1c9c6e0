"""Prices of API providers by the token, offline from the data of genai-prices."""

import datetime
import difflib
import importlib.metadata
import math
from collections.abc import Mapping
from dataclasses import dataclass

from genai_prices import Usage, calc_price, data_snapshot

from inferlab.economics.cost import MILLION, Workload
from inferlab.errors import InferlabError

NOON = datetime.time(12, tzinfo=datetime.UTC)
"""Some providers charge by the time of day; noon in UTC is the hour that is asked for."""


@dataclass(frozen=True)
class ApiPrice:
    """US dollars per million input and output tokens of one provider's model."""

    model: str
    usd_per_mtok_input: float
    usd_per_mtok_output: float
    date: str
    source: str

    def usd_per_request(self, workload: Workload) -> float:
        """US dollars for one request of the workload's shape."""
        input_usd = workload.input_tokens * self.usd_per_mtok_input
        return (input_usd + workload.output_tokens * self.usd_per_mtok_output) / MILLION


def api_price(
    name: str,
    workload: Workload,
    day: datetime.date,
    overrides: Mapping[str, tuple[float, float]] | None = None,
) -> ApiPrice:
    """The price of `name` (provider/model, as genai-prices names them) on `day`.

    It is asked for one request of the workload's shape, since some prices have tiers by length.
    `overrides` maps names to prices of the user's own per million input and output tokens.
    Raises InferlabError for a model that is unknown or has no price by the token.
    """
    if overrides and name in overrides:
        return _set_price(name, overrides[name], day)
    provider, _, model = name.partition("/")
    usage = Usage(input_tokens=workload.input_tokens, output_tokens=workload.output_tokens)
    asked = datetime.datetime.combine(day, NOON)
    try:
        found = calc_price(usage, model, provider_id=provider, genai_request_timestamp=asked)
    except LookupError:
        raise InferlabError(f"unknown API model {name!r}; {_suggestion(name)}") from None
    rate = found.model_price
    if rate.input_mtok is None or rate.output_mtok is None:
        raise InferlabError(
            f"API model {name!r} has no price by the token in genai-prices; "
            "take another model or set its price"
        )
    version = importlib.metadata.version("genai-prices")
    pages = (found.provider.pricing_urls or ["no page given"])[0]
    return ApiPrice(
        model=name,
        usd_per_mtok_input=float(found.input_price * MILLION / workload.input_tokens),
        usd_per_mtok_output=float(found.output_price * MILLION / workload.output_tokens),
        date=day.isoformat(),
        source=f"genai-prices {version} for that day ({pages})",
    )


def _set_price(name: str, usd_per_mtok: tuple[float, float], day: datetime.date) -> ApiPrice:
    if not all(math.isfinite(usd) and usd >= 0 for usd in usd_per_mtok):
        raise InferlabError(f"the price of {name} must be 0 or more; got {usd_per_mtok}")
    return ApiPrice(name, *usd_per_mtok, day.isoformat(), "set by the user")


def _suggestion(name: str) -> str:
    """The closest of some thousand names; a list of all of them would help nobody."""
    providers = data_snapshot.get_snapshot().providers
    names = [f"{provider.id}/{model.id}" for provider in providers for model in provider.models]
    close = difflib.get_close_matches(name, names, n=3)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return "write provider/model as genai-prices does, for example groq/llama-3.1-8b-instant"
