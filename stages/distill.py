"""33.6: students of the teacher, trained with and without its logits."""

from pathlib import Path

import torch

from inferlab.distillation.comparison import arm_table
from inferlab.distillation.plots import plot_temperatures
from inferlab.distillation.scored import load_checked, save_answers
from inferlab.distillation.students import make_lesson
from inferlab.distillation.study import DistillParams, latencies, make_arms, summary, train_all
from inferlab.models.encoder import load_classifier, save_classifier
from inferlab.run import stage

TEACHER = Path("models/teacher")
LOGITS = Path("data/teacher_logits")


def main() -> None:
    """Write models/student, data/student_logits (the kept arm, every seed) and the comparison."""
    with stage("distill", DistillParams) as run:
        params = run.params
        arms = make_arms(params)
        teacher, labels = load_classifier(TEACHER)
        train, test = (load_checked(LOGITS, split, labels) for split in ("train", "test"))
        lesson = make_lesson(teacher, train, test, params.student)
        with run.timed("train"):
            students = train_all(arms, lesson, params, run.seed, run.threads)
        logits = {name: torch.stack([one.logits for one in own]) for name, own in students.items()}
        rows = arm_table(arms, logits, test.documents.labels, run.seed)
        kept, model = logits[params.kept], students[params.kept][0].model
        save_classifier(run.folder("models/student"), model, labels, TEACHER)
        save_answers(run.folder("data/student_logits"), kept, test, labels)

        models = {"teacher": teacher, "student": model}
        found = summary(rows, models, test, kept[0])
        run.metrics("metrics/distill.json", found)
        run.table("plots/distill/arms.csv", rows)
        image = run.output("plots/distill/temperatures.png")
        plot_temperatures(rows, found["teacher_accuracy"], image)
        tokens = {"teacher": test.documents.tokens, "student": lesson.test_tokens}
        run.timing(**latencies(models, tokens, run.threads))


if __name__ == "__main__":
    main()
