"""lm-eval tasks on a model: only the logits of the answers are computed, not of every position."""

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
        order = sorted(
            range(len(requests)), key=lambda i: len(requests[i][1]) + len(requests[i][2])
        )
        results: dict[int, Scored] = {}
        for indices in progress(self._batches(requests, order), "tasks"):
            pairs = [(requests[i][1], requests[i][2]) for i in indices]
            results |= dict(zip(indices, self._score(pairs), strict=True))
        return [results[i] for i in range(len(requests))]

    def _batches(self, requests: list[Any], order: list[int]) -> list[list[int]]:
        """Neighbours in length, at most `batch_tokens` tokens with padding."""
        batches: list[list[int]] = [[]]
        for i in order:
            length = len(requests[i][1]) + len(requests[i][2])
            if batches[-1] and (len(batches[-1]) + 1) * length > self._batch_tokens:
                batches.append([])
            batches[-1].append(i)
        return batches

    @torch.inference_mode()
    def _score(self, pairs: list[tuple[list[int], list[int]]]) -> list[Scored]:
        """Padding stands on the right, where a causal model never looks back to it."""
        rows = [context + continuation for context, continuation in pairs]
        width = max(map(len, rows))
        tokens = torch.zeros(len(rows), width - 1, dtype=torch.long)
        for row, ids in enumerate(rows):
            tokens[row, : len(ids) - 1] = torch.tensor(ids[:-1])
        self.scored_tokens += tokens.numel()
        states = self._model.base_model(input_ids=tokens, use_cache=False)[0]
        picked = [
            states[row, len(context) - 1 : len(context) + len(continuation) - 1]
            for row, (context, continuation) in enumerate(pairs)
        ]
        logits = self._model.get_output_embeddings()(torch.cat(picked)).float()
        targets = torch.tensor([token for _, continuation in pairs for token in continuation])
        return self._sums(logits.log_softmax(-1), targets, [len(part) for part in picked])

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
