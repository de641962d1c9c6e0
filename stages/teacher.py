"""Fine-tune the encoder on labelled text and keep its logits: the teacher of the students."""

from pathlib import Path

from inferlab.data.documents import load_tokenizer, make_splits
from inferlab.distillation.scored import save_scored
from inferlab.distillation.teacher import TeacherParams, label_table, summary, teach
from inferlab.models.encoder import new_classifier, save_classifier
from inferlab.run import stage
from inferlab.store import read_rows

ENCODER = Path("models/encoder")


def main() -> None:
    """Write models/teacher, and data/teacher_logits: tokens, labels, logits of train and test."""
    with stage("teacher", TeacherParams) as run:
        params = run.params
        rows = {name: read_rows(Path(f"data/labelled_text/{name}.jsonl")) for name in params.limits}
        tokenizer = load_tokenizer(ENCODER, params.max_tokens)
        labels, documents = make_splits(rows, tokenizer, params.limits, run.seed)
        with run.timed("teach"):
            model = new_classifier(ENCODER, len(labels), run.seed)
            taught = teach(model, documents, params, run.seed)
        save_classifier(run.folder("models/teacher"), model, labels, ENCODER)
        save_scored(run.folder("data/teacher_logits"), taught.scored, labels)
        run.metrics("metrics/teacher.json", summary(taught))
        run.table("plots/teacher/labels.csv", label_table(taught.scored["test"], labels))
        steps = [{"step": number, "loss": loss} for number, loss in enumerate(taught.losses)]
        run.table("plots/teacher/training.csv", steps)


if __name__ == "__main__":
    main()
