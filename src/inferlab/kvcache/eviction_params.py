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
    curve_tokens: Positive
    inputs: Positive
    dtype: Literal["bf16", "fp32"]
    methods: Annotated[tuple[str, ...], Field(min_length=1)]
    curve_methods: tuple[str, ...]
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
        if "h2o" not in self.curve_methods or set(self.curve_methods) - set(self.methods):
            raise ValueError(
                "curve_methods must be some of methods, h2o among them; "
                f"got {', '.join(self.curve_methods) or 'none'}"
            )
        if not self.block < self.curve_tokens <= self.tokens:
            raise ValueError(
                f"curve_tokens must be above block {self.block} and at most tokens {self.tokens}; "
                f"got {self.curve_tokens}"
            )
        if max(self.budgets) >= self.curve_tokens:
            raise ValueError(
                f"budgets must be below curve_tokens {self.curve_tokens}, or nothing is evicted; "
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
        if not self.check.budget < self.check.tokens <= self.curve_tokens:
            raise ValueError(
                f"check.tokens must be above check.budget {self.check.budget} and at most "
                f"curve_tokens {self.curve_tokens}; got {self.check.tokens}"
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
        """The methods that run at a budget."""
        names = self.methods if budget == self.budget else self.curve_methods
        return {name: Arm(self.policy(name, budget, seed)) for name in names}

    def more_arms(self, seed: int) -> dict[str, Arm]:
        """Only at `budget`: other draws, other shares of recent tokens, compacted positions."""
        budget = self.budget
        seeds = range(1, self.seeds) if "random" in self.methods else ()
        arms = {f"random_{n}": Arm(self.policy("random", budget, seed + n)) for n in seeds}
        for share in self.other_shares:
            arms[f"h2o_recent_{share:g}"] = Arm(self.policy("h2o", budget, share=share))
        names = [name for name in self.methods if name != "random"]
        return arms | {f"{n}_compacted": Arm(self.policy(n, budget), True) for n in names}
