"""What one step of an engine takes, in whole picoseconds.

Time is an integer, so that adding the steps of a stretch one by one and adding them at once give
the same sum to the bit.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from inferlab.errors import InferlabError, lookup

PICOSECONDS = 10**12


@dataclass(frozen=True)
class StepCost:
    """seconds = base + token·tokens + sequence·sequences + context·context + half_pair·2·pairs.

    `tokens` are those that the step computes, `sequences` those that it serves, `context` the
    cached tokens that single tokens (decoding) read, and a chunk of `new` tokens behind
    `computed` ones has new·(computed + new/2) pairs of a query and a key. All in picoseconds;
    `front_end` is what a request spends outside the engine, before its first token.
    """

    base: int
    token: int
    sequence: int
    context: int
    half_pair: int
    front_end: int = 0

    def __post_init__(self) -> None:
        """Raise InferlabError unless every coefficient is at least 0 and a step takes time."""
        for name, value in asdict(self).items():
            if not isinstance(value, int) or value < 0:
                raise InferlabError(f"step cost: {name} must be a whole number >= 0; got {value!r}")
        if not self.base + self.token + self.sequence:
            raise InferlabError("step cost: base, token and sequence are all 0; steps take no time")

    def step(self, tokens: int, sequences: int, context: int, half_pairs: int) -> int:
        """Picoseconds of one step."""
        return (
            self.base
            + self.token * tokens
            + self.sequence * sequences
            + self.context * context
            + self.half_pair * half_pairs
        )

    def alone(self, prompt: int, output: int, token_budget: int) -> tuple[int, int]:
        """Picoseconds to the first and to the last token of a request that has the engine alone."""
        now = computed = 0
        while computed < prompt:
            new = min(prompt - computed, token_budget)
            context, half_pairs = read(new, computed)
            now += self.step(new, 1, context, half_pairs)
            computed += new
        steps = output - 1
        context = steps * prompt + steps * (steps - 1) // 2
        return now, now + steps * self.step(1, 1, 0, 0) + self.context * context


def read(new: int, computed: int) -> tuple[int, int]:
    """(context, half pairs) of `new` tokens behind `computed` cached ones."""
    return (computed, 0) if new == 1 else (0, new * (2 * computed + new))


def from_seconds(coefficients: Mapping[str, float]) -> StepCost:
    """Coefficients in seconds; `pair` in place of `half_pair`, as they are fitted."""
    seconds = dict(coefficients)
    seconds["half_pair"] = seconds.pop("pair") / 2
    return StepCost(**{name: round(value * PICOSECONDS) for name, value in seconds.items()})


def save_costs(path: Path, costs: Mapping[str, StepCost]) -> None:
    """Write the costs of every piece of hardware by name."""
    path.write_text(json.dumps({name: asdict(one) for name, one in costs.items()}, indent=2) + "\n")


def load_cost(path: Path, hardware: str) -> StepCost:
    """The step cost of `hardware`. Raises InferlabError when the file has none of that name."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InferlabError(f"{path} holds no step costs: {error}; run stage step_cost") from None
    return StepCost(**lookup(content, hardware, "hardware"))
