"""Ways to choose which tokens leave a full cache. To add one: a file, and a line in `METHODS`."""

from collections.abc import Callable

from inferlab.errors import lookup
from inferlab.kvcache.eviction.heavy_hitters import heavy_hitters
from inferlab.kvcache.eviction.policy import Limits, Policy
from inferlab.kvcache.eviction.sinks_and_recent import sinks_and_recent
from inferlab.kvcache.eviction.uniform import uniform

METHODS: dict[str, Callable[[Limits], Policy]] = {
    "h2o": heavy_hitters,
    "random": uniform,
    "recent": sinks_and_recent,
}


def make_policy(method: str, limits: Limits) -> Policy:
    """The policy of a method. Raises InferlabError for an unknown one, with a suggestion."""
    return lookup(METHODS, method, "eviction method")(limits)
