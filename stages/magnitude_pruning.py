"""33.8: what the classifier loses with its smallest weights, and what that saves."""

from pathlib import Path

from inferlab.distillation.scored import load_checked
from inferlab.models.encoder import load_classifier
from inferlab.pruning.magnitude import other_bytes
from inferlab.pruning.magnitude_measures import kernel_times, latency_table, size_table, summary
from inferlab.pruning.magnitude_plots import plot_pruning
from inferlab.pruning.magnitude_study import (
    MagnitudePruningParams,
    begin,
    follow_all,
    kept_models,
    point_table,
)
from inferlab.pruning.recovery import make_material
from inferlab.run import stage

LOGITS = Path("data/teacher_logits")


def main() -> None:
    with stage("magnitude_pruning", MagnitudePruningParams) as run:
        params = run.params
        teacher, labels = load_classifier(Path("models/teacher"))
        train, test = (load_checked(LOGITS, split, labels) for split in ("train", "test"))
        material = make_material(train, test, params.test_documents, params.max_tokens, run.name)
        with run.timed("prune"):
            start = begin(teacher, material, params, run.seed)
            points = follow_all(teacher, start, material, params, run.seed, run.threads)
        rows = point_table(points, material.test_labels, run.seed)
        models = kept_models(points)
        sizes = size_table(models)
        batches, rounds = params.latency_batches, params.latency_rounds
        times = latency_table(models, material.test_tokens, batches, rounds, run.threads)
        documents, other = len(material.test_labels), other_bytes(models[0.0])
        run.metrics(f"metrics/{run.name}.json", summary(rows, sizes, times, other, documents))
        run.timing(**kernel_times(times))
        run.table(f"plots/{run.name}/points.csv", rows)
        run.table(f"plots/{run.name}/sizes.csv", sizes)
        run.table(f"plots/{run.name}/latencies.csv", times)
        plot_pruning(rows, sizes, times, run.output(f"plots/{run.name}/pruning.png"))


if __name__ == "__main__":
    main()
