"""lm-eval tasks on a model: only the logits of the answers are computed, not of every position."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from inferlab.evaluation.tasks import load_tasks
from inferlab.run import progress

Scored = tuple[float, bool]


@dataclass(frozen=True)
class Row:
    """A context and its continuations, one after the other, as one sequence.

    Each continuation sees the context and itself and stands at the positions after the context,
    so it is scored as if it were alone, but the context is computed once.
    """

    context: list[int]
    continuations: list[list[int]]
    numbers: list[int]

    @property
    def tokens(self) -> list[int]:
        """What is given to the model: no continuation's last token, whose logits nobody needs."""
        return self.context + [token for part in self.continuations for token in part[:-1]]

    @property
    def length(self) -> int:
        """Number of `tokens`."""
        return len(self.context) + sum(len(part) - 1 for part in self.continuations)

    @property
    def positions(self) -> list[int]:
        """The position of each token."""
        start = len(self.context)
        after = [start + place for part in self.continuations for place in range(len(part) - 1)]
        return list(range(start)) + after

    def visible(self) -> Tensor:
        """May the token of a row see that of a column? Bool [length, length]."""
        part = [0] * len(self.context)
        for number, continuation in enumerate(self.continuations, start=1):
            part += [number] * (len(continuation) - 1)
        owner = torch.tensor(part)
        causal = torch.ones(len(part), len(part), dtype=torch.bool).tril()
        return causal & ((owner[:, None] == owner) | (owner == 0))

    def places(self) -> Iterator[list[int]]:
        """For each continuation, the tokens whose logits predict it."""
        end = len(self.context)
        for part in self.continuations:
            yield [len(self.context) - 1, *range(end, end + len(part) - 1)]
            end += len(part) - 1


class Scorer(TemplateLM):
    """What lm-eval asks of a model, for tasks that rank given answers."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch_tokens: int
    ) -> None:
        super().__init__()
        self._model = model
        self.tokenizer = tokenizer
        self._batch_tokens = batch_tokens
        self.scored_tokens = 0

    @property
    def eot_token_id(self) -> int:
        """The token that stands for an empty context."""
        return self.tokenizer.eos_token_id

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Token ids, without special tokens unless asked for."""
        return self.tokenizer.encode(string, add_special_tokens=bool(add_special_tokens))

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[Scored]:
        """(log-likelihood, is it the greedy choice) of each continuation, in the order asked."""
        asked: dict[tuple[int, ...], list[int]] = {}
        for number, (_key, context, _continuation) in enumerate(requests):
            asked.setdefault(tuple(context), []).append(number)
        rows = [
            Row(list(context), [requests[number][2] for number in numbers], numbers)
            for context, numbers in asked.items()
        ]
        results: dict[int, Scored] = {}
        for batch in progress(self._batches(rows), "tasks"):
            numbers = [number for row in batch for number in row.numbers]
            results |= dict(zip(numbers, self._score(batch), strict=True))
        return [results[number] for number in range(len(requests))]

    def _batches(self, rows: list[Row]) -> list[list[Row]]:
        """Neighbours in length, at most `batch_tokens` tokens with padding."""
        batches: list[list[Row]] = [[]]
        for row in sorted(rows, key=lambda one: one.length):
            if batches[-1] and (len(batches[-1]) + 1) * row.length > self._batch_tokens:
                batches.append([])
            batches[-1].append(row)
        return batches

    @torch.inference_mode()
    def _score(self, rows: list[Row]) -> list[Scored]:
        width = max(row.length for row in rows)
        tokens = torch.zeros(len(rows), width, dtype=torch.long)
        positions = torch.zeros(len(rows), width, dtype=torch.long)
        # Padding sees itself alone, so that its states stay finite.
        visible = torch.eye(width, dtype=torch.bool).repeat(len(rows), 1, 1, 1)
        for number, row in enumerate(rows):
            tokens[number, : row.length] = torch.tensor(row.tokens)
            positions[number, : row.length] = torch.tensor(row.positions)
            visible[number, 0, : row.length, : row.length] = row.visible()
        self.scored_tokens += tokens.numel()
        states = self._model.base_model(
            input_ids=tokens, position_ids=positions, attention_mask=visible, use_cache=False
        )[0]
        picked = [states[n, places] for n, row in enumerate(rows) for places in row.places()]
        logits = self._model.get_output_embeddings()(torch.cat(picked)).float()
        targets = [token for row in rows for part in row.continuations for token in part]
        sizes = [len(part) for part in picked]
        return self._sums(logits.log_softmax(-1), torch.tensor(targets), sizes)

    @staticmethod
    def _sums(log_probabilities: Tensor, targets: Tensor, sizes: list[int]) -> list[Scored]:
        chosen = log_probabilities.gather(1, targets[:, None])[:, 0]
        greedy = log_probabilities.argmax(1) == targets
        return [
            (float(values.sum()), bool(matches.all()))
            for values, matches in zip(chosen.split(sizes), greedy.split(sizes), strict=True)
        ]

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Not needed: perplexity has a module of its own."""
        raise NotImplementedError("see inferlab.evaluation.perplexity")

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Not needed: the tasks rank given answers."""
        raise NotImplementedError("the tasks rank given answers")


def run_tasks(scorer: Scorer, folder: Path) -> dict[str, float]:
    """`<task>_accuracy` and `<task>_accuracy_se` of each task of a folder."""
    # Standard errors of a mean are computed in closed form, but only with bootstrap_iters above 0.
    outcome = simple_evaluate(
        model=scorer,
        tasks=load_tasks(folder),
        # The tasks are given whole: an index of lm-eval's own thousands would cost seconds.
        task_manager=TaskManager(include_defaults=False),
        log_samples=False,
        bootstrap_iters=1,
    )
    return {
        f"{task}_accuracy{suffix}": float(values[f"{metric},none"])
        for task, values in outcome["results"].items()
        for suffix, metric in (("", "acc"), ("_se", "acc_stderr"))
    }
