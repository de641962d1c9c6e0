"""The draft study: acceptance and speed of several drafters on a real target, and break-even."""

import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from pydantic import Field

from inferlab.errors import InferlabError
from inferlab.models.runtime.decoding import GREEDY, Sampling, generate
from inferlab.models.runtime.llama import Llama
from inferlab.params import section
from inferlab.run import progress
from inferlab.speculative.break_even import best_length, speedup
from inferlab.speculative.closed_form import expected_tokens
from inferlab.speculative.decoding import LONGEST, Trace, speculate
from inferlab.speculative.drafters import Drafter, ModelDrafter

COST_ROUNDS = 15


@section
class LookupParams:
    """Tokens that must match, the longest first."""

    longest: Annotated[int, Field(ge=1)]
    shortest: Annotated[int, Field(ge=1)]

    def __post_init__(self) -> None:
        """Raise ValueError when nothing could match."""
        if self.shortest > self.longest:
            raise ValueError(
                f"shortest must be at most longest; got {self.shortest} and {self.longest}"
            )


@section
class DraftModelsParams:
    """The section `draft_models`."""

    target: str
    drafts: dict[str, str]
    ngram_order: Annotated[int, Field(ge=1, le=6)]
    lookup: LookupParams
    length: Annotated[int, Field(ge=1, le=LONGEST)]
    prompts: Annotated[int, Field(ge=1)]
    prompt_tokens: Annotated[int, Field(ge=8)]
    new_tokens: Annotated[int, Field(ge=8)]
    temperature: Annotated[float, Field(gt=0)]
    vllm: bool


@dataclass
class Tally:
    """What a drafter did over the prompts of one kind."""

    traces: list[Trace] = field(default_factory=list)
    speedups: list[float] = field(default_factory=list)
    mismatches: int = 0

    def by_position(self) -> list[float]:
        """Chance that a proposal is kept, by its place in the round, of those that were tried."""
        tried = _added([trace.tried for trace in self.traces])
        accepted = _added([trace.accepted for trace in self.traces])
        return [kept / seen for kept, seen in zip(accepted, tried, strict=True) if seen]

    @property
    def tried(self) -> int:
        """Proposals that the target looked at."""
        return sum(sum(trace.tried) for trace in self.traces)

    @property
    def proposing(self) -> float:
        """Share of the target's passes that had a proposal to look at."""
        passes = sum(trace.target_passes for trace in self.traces)
        return sum(sum(trace.tried[:1]) for trace in self.traces) / passes

    @property
    def acceptance(self) -> float:
        """Share of them that it kept; 0 when nothing was proposed."""
        return sum(sum(trace.accepted) for trace in self.traces) / max(1, self.tried)

    @property
    def tokens_per_pass(self) -> float:
        """Tokens that a pass of the target yields."""
        tokens = sum(len(trace.tokens) - 1 for trace in self.traces)
        return tokens / sum(trace.target_passes for trace in self.traces)


Tallies = dict[tuple[str, str, str], Tally]
"""By drafter, decoding (greedy or sampled) and kind of prompt."""


def by_model(model: Llama) -> Callable[[Sampling], Drafter]:
    """A drafter of its own for each sequence, sampling as the target does."""
    return lambda sampling: ModelDrafter(model, sampling)


def run_prompts(
    target: Llama,
    drafters: Mapping[str, Callable[[Sampling], Drafter]],
    prompts: Sequence[tuple[str, list[int]]],
    params: DraftModelsParams,
    seed: int,
) -> Tallies:
    """Decode each prompt plainly and with each drafter, in turn, greedily and by sampling.

    Speed-ups are against plain decoding of the same prompt in the same turn.
    """
    tallies: Tallies = defaultdict(Tally)
    decodings = {"greedy": GREEDY, "sampled": Sampling(params.temperature, seed=seed)}
    turns = [(name, number) for name in decodings for number in range(len(prompts))]
    for name, number in progress(turns, "prompts"):
        (kind, prompt), sampling = prompts[number], decodings[name]
        plain, rate = plainly(target, prompt, params.new_tokens, sampling)
        for drafter, make in drafters.items():
            trace = speculate(
                target, prompt, make(sampling), params.length, params.new_tokens, sampling
            )
            tally = tallies[drafter, name, kind]
            tally.traces.append(trace)
            tally.speedups.append((len(trace.tokens) - 1) / trace.seconds / rate)
            if sampling.temperature == 0:
                pairs = zip(plain, trace.tokens, strict=True)
                tally.mismatches += sum(one != other for one, other in pairs)
    return dict(tallies)


def plainly(
    target: Llama, prompt: Sequence[int], new_tokens: int, sampling: Sampling
) -> tuple[list[int], float]:
    """The text without a drafter, and its tokens per second after the first."""
    steps = generate(target, [prompt], new_tokens, sampling, stop_at_end=False)
    tokens = next(steps)
    start = time.perf_counter()
    tokens += [token for step in steps for token in step]
    seconds = time.perf_counter() - start
    return [int(token) for token in tokens if token is not None], (new_tokens - 1) / seconds


def pass_seconds(model: Llama, context: Sequence[int], tokens: int) -> float:
    """Seconds of one pass over `tokens` tokens after `context`, median of several."""
    cache = model.new_cache(1, len(context) + tokens)
    model.hidden(torch.tensor([list(context)]), cache)
    inputs = torch.tensor([list(context[:tokens])])
    seen = []
    for _ in range(COST_ROUNDS + 1):
        start = time.perf_counter()
        model.forward(inputs, cache)
        seen.append(time.perf_counter() - start)
        cache.truncate(len(context))
    return statistics.median(seen[1:])


@dataclass(frozen=True)
class Costs:
    """In passes of the target over one token. `verify[n]`: of one over n + 1; n from 0 on."""

    draft: dict[str, float]
    verify: list[float]


def costs(target: Llama, models: Mapping[str, Llama], context: Sequence[int]) -> Costs:
    """What passes of target and drafts cost, one after another in this minute."""
    verify = [pass_seconds(target, context, tokens) for tokens in range(1, LONGEST + 2)]
    draft = {name: pass_seconds(model, context, 1) for name, model in models.items()}
    return Costs(
        {name: seconds / verify[0] for name, seconds in draft.items()},
        [seconds / verify[0] for seconds in verify],
    )


def table(tallies: Tallies, found: Costs, params: DraftModelsParams) -> list[dict[str, Any]]:
    """One row a drafter, decoding and kind, with the closed form's speed-up beside the measured.

    A drafter without a model has cost 0 here; its own time is in `draft_share`.
    """
    rows = []
    for (drafter, decoding, kind), tally in tallies.items():
        acceptance, cost = tally.acceptance, found.draft.get(drafter, 0.0)
        proposing, length = tally.proposing, params.length
        best = best_length(acceptance, cost, found.verify)
        seconds = sum(trace.seconds for trace in tally.traces)
        rows.append(
            {
                "drafter": drafter,
                "decoding": decoding,
                "kind": kind,
                "acceptance": acceptance,
                "tokens_per_pass": tally.tokens_per_pass,
                "expected_tokens_per_pass": proposing * expected_tokens(acceptance, length)
                + (1 - proposing),
                "cost_ratio": cost,
                "proposing": proposing,
                "speedup": statistics.median(tally.speedups),
                "predicted_speedup": speedup(acceptance, length, cost, found.verify, proposing),
                "best_length": best,
                "best_speedup": speedup(acceptance, best, cost, found.verify, proposing),
                "draft_share": sum(trace.draft_seconds for trace in tally.traces) / seconds,
                "proposals": tally.tried,
            }
        )
    return rows


def position_table(tallies: Tallies) -> list[dict[str, Any]]:
    """Acceptance by place in the round, over all kinds: one row a drafter, decoding and place."""
    rows = []
    for drafter, decoding in dict.fromkeys(key[:2] for key in tallies):
        together = Tally(
            [
                trace
                for key, one in tallies.items()
                for trace in one.traces
                if key[:2] == (drafter, decoding)
            ]
        )
        rows += [
            {"drafter": drafter, "decoding": decoding, "place": place + 1, "acceptance": share}
            for place, share in enumerate(together.by_position())
        ]
    return rows


def cost_table(found: Costs) -> list[dict[str, Any]]:
    """One row a pass: of the target over 1, 2, … tokens, of each draft over one."""
    target = [("target", tokens, cost) for tokens, cost in enumerate(found.verify, start=1)]
    drafts = [(name, 1, cost) for name, cost in found.draft.items()]
    return [
        {"pass": f"{name}, {tokens}", "model": name, "tokens": tokens, "cost": cost}
        for name, tokens, cost in [*target, *drafts]
    ]


def summary(tallies: Tallies) -> dict[str, float]:
    """The metrics: acceptance and speed-up of each drafter over all greedy prompts.

    Raises InferlabError when there is no greedy run.
    """
    values: dict[str, float] = {}
    drafters = dict.fromkeys(key[0] for key in tallies)
    for drafter in drafters:
        runs = [one for key, one in tallies.items() if key[:2] == (drafter, "greedy")]
        if not runs:
            raise InferlabError(f"no greedy run of {drafter}, which the metrics are about")
        together = Tally([trace for one in runs for trace in one.traces])
        values[f"acceptance_{drafter}"] = together.acceptance
        values[f"speedup_{drafter}"] = statistics.median(s for one in runs for s in one.speedups)
    return values | {"greedy_mismatches": sum(one.mismatches for one in tallies.values())}


def _added(counts: Sequence[Sequence[int]]) -> list[int]:
    return [sum(column) for column in itertools.zip_longest(*counts, fillvalue=0)]
