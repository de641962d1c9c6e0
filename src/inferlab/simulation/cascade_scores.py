"""What the student and its teacher say of the test split, and what each costs."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from inferlab.distillation.scored import load_labels, require_same_labels
from inferlab.errors import InferlabError
from inferlab.evaluation.calibration import top_probability
from inferlab.simulation.cascade import Answers
from inferlab.store import load_tensors


@dataclass(frozen=True)
class Scores:
    """Logits fp64 of one test split.

    student: [seeds, documents, labels]; teacher: [documents, labels]; labels: int64 [documents].
    """

    student: NDArray[np.float64]
    teacher: NDArray[np.float64]
    labels: NDArray[np.int64]

    def answers(self, seed: int, temperature: float) -> Answers:
        """The answers of one student and of the teacher."""
        logits = self.student[seed]
        return Answers(
            top_probability(logits, temperature),
            logits.argmax(1) == self.labels,
            self.teacher.argmax(1) == self.labels,
        )


def load_scores(student: Path, teacher: Path) -> Scores:
    """Both models' logits of the test split, as the stages distill and teacher wrote them.

    Raises InferlabError unless both know the same labels and the same documents in the same order.
    """
    names = load_labels(teacher)
    require_same_labels(names, load_labels(student), student)
    small, large = (load_tensors(folder / "test.safetensors") for folder in (student, teacher))
    _, documents, labels = small["logits"].shape
    wanted = (len(large["labels"]), len(names))
    if {(documents, labels), tuple(large["logits"].shape)} != {wanted}:
        raise InferlabError(
            f"{student} holds logits of {documents} documents and {labels} labels, {teacher} of "
            f"{tuple(large['logits'].shape)}, and {wanted} documents and labels are given; "
            "run the stage distill again"
        )
    if not small["labels"].equal(large["labels"]):
        raise InferlabError(
            f"{student} and {teacher} give the documents different labels; run the stage distill "
            "again"
        )
    return Scores(
        small["logits"].double().numpy(),
        large["logits"].double().numpy(),
        large["labels"].numpy(),
    )


def measured_cost_ratio(timing: dict[str, float], batch: int, file: Path) -> float:
    """Student's over teacher's latency of `batch` documents, from the timing file of distill.

    Raises InferlabError naming the batches that were measured.
    """
    names = [f"{model}_latency_ms_batch_{batch}" for model in ("student", "teacher")]
    if not all(name in timing for name in names):
        known = sorted(
            int(name.rpartition("_")[2]) for name in timing if name.startswith("teacher_latency")
        )
        raise InferlabError(
            f"cascade.latency_batch must be one of the batches in {file}, {known}; got {batch}"
        )
    return timing[names[0]] / timing[names[1]]
