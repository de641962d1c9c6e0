"""What `token_eviction` is asked for, and the arms that follow from it."""

from typing import Annotated, Literal

from pydantic import Field

from inferlab import params as parameters
from inferlab.errors import suggestion
from inferlab.kvcache.eviction import METHODS, make_policy
from inferlab.kvcache.eviction.cache import Arm
from inferlab.kvcache.eviction.policy import Limits, Policy

Positive = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(gt=0, lt=1)]


@parameters.section
class BlockCheck:
    """Where eviction token by token is run beside eviction by blocks."""

    budget: Positive
    tokens: Positive


@parameters.section
class DecodeParams:
    """How the cost of keeping scores is timed."""

    tokens: Positive
    rounds: Positive


@parameters.section
class TokenEvictionParams:
    """The section `token_eviction`."""

    tokens: Positive
    inputs: Positive
    dtype: Literal["bf16", "fp32"]
    methods: Annotated[tuple[str, ...], Field(min_length=1)]
    budget: Positive
    budgets: Annotated[tuple[Positive, ...], Field(min_length=1)]
    recent_share: Share
    other_shares: tuple[Share, ...]
    sinks: Positive
    block: Positive
    seeds: Positive
    check: BlockCheck
    decode: DecodeParams

    def __post_init__(self) -> None:
        for method in self.methods:
            if method not in METHODS:
                raise ValueError(
                    f"methods: unknown eviction method {method!r}; {suggestion(method, METHODS)}"
                )
        if "h2o" not in self.methods:
            raise ValueError(f"methods must contain h2o; got {', '.join(self.methods)}")
        if max(self.budgets) >= self.tokens:
            raise ValueError(
                f"budgets must be below tokens {self.tokens}, or nothing is evicted; "
                f"got {max(self.budgets)}"
            )
        needed = max(2 * self.block + self.sinks, self.block / (1 - self.recent_share))
        if min(self.budgets) < needed:
            raise ValueError(
                f"budgets must be at least {needed:.0f}, so that sinks or recent tokens and two "
                f"blocks of {self.block} fit; got {min(self.budgets)}"
            )
        if self.other_shares and self.block / (1 - max(self.other_shares)) > self.budget:
            raise ValueError(
                f"other_shares must leave a block of {self.block} of the budget {self.budget}; "
                f"got {max(self.other_shares)}"
            )
        for name, budget in (("budget", self.budget), ("check.budget", self.check.budget)):
            if budget not in self.budgets:
                raise ValueError(f"{name} must be one of budgets; got {budget}")
        if not self.check.budget < self.check.tokens <= self.tokens:
            raise ValueError(
                f"check.tokens must be above check.budget {self.check.budget} and at most tokens "
                f"{self.tokens}; got {self.check.tokens}"
            )
        room = self.tokens - self.budget + self.block
        if self.decode.tokens * (self.decode.rounds + 1) > room:
            raise ValueError(
                f"decode.tokens times one more than decode.rounds must be at most {room}, the "
                f"tokens beyond the budget; got {self.decode.tokens} and {self.decode.rounds}"
            )

    def policy(self, method: str, budget: int, seed: int = 0, share: float | None = None) -> Policy:
        """How a method decides at a budget. Raises InferlabError for an unknown method."""
        recent = int(budget * (self.recent_share if share is None else share))
        return make_policy(method, Limits(recent, self.sinks, seed))

    def arms(self, budget: int, seed: int) -> dict[str, Arm]:
        """Every method; at `budget` also other draws, shares of recent tokens and positions."""
        arms = {name: Arm(self.policy(name, budget, seed)) for name in self.methods}
        if budget == self.budget:
            more = range(1, self.seeds) if "random" in self.methods else ()
            arms |= {f"random_{n}": Arm(self.policy("random", budget, seed + n)) for n in more}
            for share in self.other_shares:
                arms[f"h2o_recent_{share:g}"] = Arm(self.policy("h2o", budget, share=share))
            names = [name for name in self.methods if name != "random"]
            arms |= {f"{n}_compacted": Arm(self.policy(n, budget), compacted=True) for n in names}
        return arms
