"""33.11: what a KV cache takes, and what fits beside the weights."""

from pathlib import Path

from inferlab.kvcache.architecture import load_architecture
from inferlab.kvcache.memory_plots import plot_memory
from inferlab.kvcache.memory_study import (
    KvMemoryParams,
    capacities,
    capacity_table,
    metrics,
    real_caches,
    size_table,
)
from inferlab.run import stage


def main() -> None:
    with stage("kv_memory", KvMemoryParams) as run:
        architectures = [load_architecture(name) for name in run.params.models]
        found = capacities(architectures, run.params)
        sizes = size_table(architectures, run.params)
        checks = real_caches(Path("models/base"), run.params.check_tokens)
        difference = max(abs(row["held_bytes"] - row["computed_bytes"]) for row in checks)
        values = metrics(architectures, found, run.params)
        run.metrics("metrics/kv_memory.json", values | {"real_cache_difference_bytes": difference})
        folder = "plots/kv_memory"
        run.table(f"{folder}/sizes.csv", sizes)
        run.table(f"{folder}/capacities.csv", capacity_table(found, run.params))
        run.table(f"{folder}/real_caches.csv", checks)
        plot_memory(sizes, found, max(run.params.lengths), run.output(f"{folder}/memory.png"))


if __name__ == "__main__":
    main()
