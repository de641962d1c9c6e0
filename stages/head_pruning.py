"""33.9: attention heads removed from the classifier, by importance and at random."""

from pathlib import Path

from inferlab.distillation.scored import load_checked
from inferlab.models.encoder import load_classifier
from inferlab.pruning.head_measures import (
    arm_table,
    correlation_table,
    head_table,
    latency_table,
    layer_table,
    ranked_models,
    summary,
    times,
)
from inferlab.pruning.head_plots import plot_heads
from inferlab.pruning.head_study import (
    HeadPruningParams,
    layer_losses,
    make_arms,
    sample_importance,
    try_all,
)
from inferlab.pruning.recovery import make_material
from inferlab.run import stage

LOGITS = Path("data/teacher_logits")


def main() -> None:
    with stage("head_pruning", HeadPruningParams) as run:
        params, seed = run.params, run.seed
        teacher, labels = load_classifier(Path("models/teacher"))
        train, test = (load_checked(LOGITS, split, labels) for split in ("train", "test"))
        material = make_material(train, test, params.test_documents, params.max_tokens, run.name)
        with run.timed("importance"):
            scores = sample_importance(teacher, material, params)
        arms = make_arms(scores, params.shares, params.draws, seed)
        with run.timed("remove"):
            outcomes = try_all(teacher, arms, material, params, seed, run.threads)
        rows = arm_table(outcomes, material.test_labels, seed)
        losses = layer_losses(teacher, scores["gradient"].mean(0), material, params)
        layers = layer_table(scores["gradient"], arms, losses)
        models, batches = ranked_models(teacher, arms), params.latency_batches
        latencies = latency_table(models, material.test_tokens, batches, params.latency_rounds)
        correlations = correlation_table(scores)
        found = summary(rows, correlations, latencies, len(material.test_labels))
        run.metrics("metrics/head_pruning.json", found)
        run.timing(**times(latencies))
        folder = "plots/head_pruning"
        run.table(f"{folder}/arms.csv", rows)
        run.table(f"{folder}/heads.csv", head_table(scores, arms))
        run.table(f"{folder}/layers.csv", layers)
        run.table(f"{folder}/correlations.csv", correlations)
        run.table(f"{folder}/latencies.csv", latencies)
        image = run.output(f"{folder}/heads.png")
        plot_heads(scores["gradient"], arms, rows, layers, image)


if __name__ == "__main__":
    main()
