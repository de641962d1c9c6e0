"""Cut the corpus into windows and make the evaluation tasks."""

from pathlib import Path

from inferlab.data import prepare
from inferlab.evaluation.tasks import write_task
from inferlab.run import stage
from inferlab.store import read_rows, save_tensors, write_json

MODEL = Path("models/base")


def main() -> None:
    """Prepare windows and tasks for the model in models/base."""
    with stage("prepare", prepare.PrepareParams) as run:
        articles = read_rows(Path("data/corpus/articles.jsonl"))
        questions = read_rows(Path("data/questions/questions.jsonl"))
        tokenizer = prepare.load_tokenizer(MODEL, run.params.window_length)
        splits = prepare.clean_and_split(articles, run.params, run.seed)
        with run.timed("tokenise"):
            streams = prepare.tokenise_splits(tokenizer, splits)
        tensors = prepare.cut(streams, run.params, tokenizer.bos_token_id)
        tasks = prepare.make_tasks(splits["heldout"], questions, run.params, run.seed)

        windows = run.folder("data/windows")
        for name, content in tensors.items():
            save_tensors(windows / f"{name}.safetensors", content)
        write_json(windows / "manifest.json", prepare.manifest(splits, streams, run.params))
        folder = run.folder("data/tasks")
        for name, rows in tasks.items():
            write_task(folder, name, rows)
        run.metrics("metrics/prepare.json", prepare.summary(streams, tensors, tasks))
        run.table("plots/prepare/articles.csv", prepare.article_table(splits, streams))


if __name__ == "__main__":
    main()
