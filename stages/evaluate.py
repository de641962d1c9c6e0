"""Score one variant: perplexity on held-out text, accuracy on two tasks, and its size."""

import sys
from pathlib import Path

from inferlab.evaluation.harness import Scorer, run_tasks
from inferlab.evaluation.perplexity import EvaluateParams, perplexity
from inferlab.models.loading import load_tokenizer
from inferlab.models.scoring import load_for_scoring
from inferlab.run import stage
from inferlab.store import folder_bytes, load_tensors, read_card


def main(variant: str) -> None:
    """Write metrics/evaluate/<variant>.json, and the perplexity of each window as a plot."""
    folder = Path("models") / variant
    with stage("evaluate", EvaluateParams, variant, section="evaluate") as run:
        with run.timed("load"):
            model = load_for_scoring(folder, run.threads)
        windows = load_tensors(Path("data/windows/heldout.safetensors"))
        with run.timed("perplexity"):
            score = perplexity(model, windows, run.params.batch)
        scorer = Scorer(model, load_tokenizer(folder), run.params.batch_tokens)
        with run.timed("tasks"):
            accuracies = run_tasks(scorer, Path("data/tasks"))
        quality = {
            "token_perplexity": score.token,
            "word_perplexity": score.word,
            "bits_per_byte": score.bits_per_byte,
        }
        size = {"model_bytes": folder_bytes(folder)} | read_card(folder)
        run.metrics(f"metrics/evaluate/{variant}.json", quality | accuracies | size)
        run.table(f"plots/evaluate/{variant}.csv", score.by_window())
        run.timing(perplexity_tokens_per_s=score.scored / run.seconds("perplexity"))


if __name__ == "__main__":
    main(sys.argv[1])
