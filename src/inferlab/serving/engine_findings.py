"""What the pairs of published rows say: a finding for each group of each question."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

from inferlab.serving.engine_comparison import Pair
from inferlab.serving.published import METRICS, TENSORRT, VLLM, Row


@dataclass(frozen=True)
class Finding:
    """Pairs that answer one question together."""

    question: str
    group: str
    pairs: Sequence[Pair]

    @property
    def advantages(self) -> list[float]:
        """Of each pair."""
        return [pair.advantage for pair in self.pairs]

    @property
    def mean(self) -> float:
        """The geometric mean of the advantages."""
        return geometric_mean(self.advantages)


def _by_batch(row: Row) -> str | None:
    batch = row.load.removeprefix("static ")
    static = row.metric == "total_throughput"
    return f"{row.input_tokens} tokens in and out, {batch}" if static else None


def _throughput_of_burst(row: Row) -> str | None:
    burst = row.metric == "output_throughput" and "at once" in row.load
    return f"{row.input_tokens} tokens in, {row.model.split('/')[-1]}" if burst else None


def _first_token_of_burst(row: Row) -> str | None:
    burst = row.metric == "ttft_median" and "at once" in row.load
    return f"{row.input_tokens} tokens in, {row.gpu.split()[0]}" if burst else None


def _light_load(row: Row) -> str | None:
    name = row.metric.replace("_", " ")
    return f"{name}, {row.load}" if row.load.endswith(" clients") else None


def _of_batch(row: Row) -> str | None:
    return row.gpu.split()[0] if row.metric == "ttft_of_batch" else None


def _next_token_of_burst(row: Row) -> str | None:
    burst = row.metric == "tpot_mean" and "at once" in row.load
    return row.gpu.split()[0] if burst else None


def _by_era(row: Row) -> str | None:
    """The heaviest load of an era: a batch of 64, or all requests at once."""
    heavy = row.load.endswith(" 64") or "at once" in row.load
    return row.era if heavy and row.metric.endswith("throughput") else None


def _memory(row: Row) -> str | None:
    return row.precision if row.metric == "memory_peak" else None


QUESTIONS: dict[str, Callable[[Row], str | None]] = {
    "throughput by batch": _by_batch,
    "throughput of a burst": _throughput_of_burst,
    "first token of a burst": _first_token_of_burst,
    "next tokens of a burst": _next_token_of_burst,
    "first token of a static batch": _of_batch,
    "light load": _light_load,
    "throughput under the heaviest load, by era": _by_era,
    "memory that is reserved": _memory,
}
"""What is asked, and the group that a row belongs to in the answer; None: to none."""


def answer(pairs: Sequence[Pair]) -> list[Finding]:
    """A finding for each group of each question, in the order of the rows."""
    found = []
    for question, group_of in QUESTIONS.items():
        groups: dict[str, list[Pair]] = {}
        for pair in pairs:
            if group := group_of(pair.vllm):
                groups.setdefault(group, []).append(pair)
        found += [Finding(question, group, members) for group, members in groups.items()]
    return found


def verdict(finding: Finding, margin: float) -> str:
    """The engine that is ahead by more than `margin` in every pair; neither; or no verdict."""
    if not METRICS[finding.pairs[0].vllm.metric].verdict:
        return "no verdict"
    if min(finding.advantages) > 1 + margin:
        return TENSORRT
    return VLLM if max(finding.advantages) < 1 / (1 + margin) else "neither"


def finding_table(findings: Sequence[Finding], margin: float) -> list[dict[str, Any]]:
    """One row a finding, with the lines of the published file that it rests on."""
    return [
        {
            "finding": f"{one.question}: {one.group}",
            "question": one.question,
            "group": one.group,
            "advantage": round(one.mean, 4),
            "lowest": round(min(one.advantages), 4),
            "highest": round(max(one.advantages), 4),
            "pairs": len(one.pairs),
            "ahead": verdict(one, margin),
            "lines": " ".join(f"{pair.vllm.line}/{pair.tensorrt.line}" for pair in one.pairs),
        }
        for one in findings
    ]


def metrics(
    rows: Sequence[Row], pairs: Sequence[Pair], findings: Sequence[Finding]
) -> dict[str, float]:
    """Counts, and TensorRT-LLM's advantage (above 1: ahead) by length and batch, era, metric.

    Of the batches the smallest and the largest; the others are in the table of findings.
    """
    values: dict[str, float] = {
        "rows": len(rows),
        "pairs": len(pairs),
        "rows_left_out": len(rows) - 2 * len(pairs),
    }
    batches = {_tokens_and_batch(one): one.mean for one in findings if _is_by_batch(one)}
    sizes = {batch for _, batch in batches}
    for (tokens, batch), mean in batches.items():
        if batch in (min(sizes), max(sizes)):
            values[f"throughput_advantage_{tokens}_batch_{batch}"] = mean
    for one in findings:
        if one.question.endswith("by era"):
            values[f"throughput_advantage_{one.group.replace('-', '_').lower()}"] = one.mean
    for metric in ("ttft_median", "tpot_mean", "memory_peak"):
        values[f"{metric}_advantage"] = geometric_mean(
            pair.advantage for pair in pairs if pair.vllm.metric == metric
        )
    return values


def _is_by_batch(finding: Finding) -> bool:
    return QUESTIONS[finding.question] is _by_batch


def _tokens_and_batch(finding: Finding) -> tuple[int, int]:
    row = finding.pairs[0].vllm
    return int(row.input_tokens), int(row.load.split()[-1])
