"""Local tasks for lm-eval: how they are written down, and how they are loaded again."""

from pathlib import Path
from typing import Any

import yaml

from inferlab.errors import InferlabError
from inferlab.store import write_rows

METRICS = {"aggregation": "mean", "higher_is_better": True}
TASKS: dict[str, dict[str, Any]] = {
    "trivia": {
        "output_type": "multiple_choice",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_choice": "choices",
        "doc_to_target": "label",
        "metric_list": [{"metric": "acc", **METRICS}, {"metric": "acc_norm", **METRICS}],
    },
    "cloze": {
        "output_type": "loglikelihood",
        "doc_to_text": "{{context}}",
        "doc_to_target": " {{word}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc", **METRICS}],
    },
}
"""`trivia`: four answers ranked by log-likelihood; `cloze`: is the last word the greedy one?"""


def write_task(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    """Write `<name>.jsonl` and the task's `<name>.yaml`, which names it by file name only."""
    write_rows(folder / f"{name}.jsonl", rows)
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": f"{name}.jsonl"}},
        "test_split": "test",
        **TASKS[name],
        "metadata": {"version": 1.0},
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(task, sort_keys=False))


def load_tasks(folder: Path) -> list[dict[str, Any]]:
    """The tasks of a folder, for `lm_eval.simple_evaluate(tasks=...)`.

    The data files of each are looked for beside its YAML, wherever the folder is. Raises
    InferlabError when the folder has no task or a task's data file is missing.
    """
    tasks = [yaml.safe_load(file.read_text()) for file in sorted(folder.glob("*.yaml"))]
    if not tasks:
        raise InferlabError(f"{folder} holds no task; run the stage prepare")
    for task in tasks:
        files = task["dataset_kwargs"]["data_files"]
        for split, name in files.items():
            file = (folder / name).resolve()
            if not file.is_file():
                raise InferlabError(f"task {task['task']}: {file} is missing; run prepare again")
            files[split] = str(file)
    return tasks
