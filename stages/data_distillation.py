"""33.7: questions that the model writes itself as training data, beside as many human ones."""

from pathlib import Path

from inferlab.distillation.answers import Learner
from inferlab.distillation.data_study import (
    DataDistillationParams,
    arm_means,
    make_exam,
    quality_table,
    run_arms,
    split_questions,
    summary,
    training_sets,
)
from inferlab.distillation.generation import Request, generate
from inferlab.distillation.plots import plot_amounts
from inferlab.models.loading import load_model, load_tokenizer
from inferlab.run import stage
from inferlab.store import read_rows, write_rows

MODEL = Path("models/base")


def main() -> None:
    """Write data/synthetic_questions, and what each training set teaches the model."""
    with stage("data_distillation", DataDistillationParams) as run:
        params = run.params
        questions = read_rows(Path("data/questions/questions.jsonl"))
        human, test = split_questions(questions, params, run.seed)
        amounts = params.generated, params.asked
        request = Request(MODEL, *amounts, human, test, params.generator, run.seed)
        with run.timed("generate"):
            generated = generate(request)
        learner = Learner(
            load_model(MODEL, run.threads), load_tokenizer(MODEL), params.trained_blocks
        )
        with run.timed("learn"):
            exam = make_exam(learner, test, run.seed)
            sets = training_sets(human, generated.filtered.kept, params)
            table = arm_means(run_arms(learner, sets, exam, params, run.seed))
        folder = run.folder("data/synthetic_questions")
        write_rows(folder / "questions.jsonl", generated.filtered.kept)
        run.metrics("metrics/data_distillation.json", summary(table, generated, exam))
        run.table("plots/data_distillation/arms.csv", table)
        run.table("plots/data_distillation/quality.csv", quality_table(human, generated, exam))
        plot_amounts(table, run.output("plots/data_distillation/amounts.png"))


if __name__ == "__main__":
    main()
