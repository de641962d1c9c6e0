"""33.14: multi-head, grouped-query and multi-query attention; what pooling K/V heads does."""

from pathlib import Path

from inferlab.attention.pooled_model import heldout, pool_model
from inferlab.attention.pooling import random_cosines
from inferlab.attention.variants_plots import plot_variants
from inferlab.attention.variants_study import (
    AttentionVariantsParams,
    cache_table,
    latencies,
    metrics,
    times,
)
from inferlab.models.runtime.loading import load_llama
from inferlab.run import stage
from inferlab.store import load_tensors


def main() -> None:
    with stage("attention_variants", AttentionVariantsParams) as run:
        params = run.params
        prepared = load_tensors(Path("data/windows/heldout.safetensors"))["input_ids"]
        windows = heldout(prepared, params.model)
        rows, error = latencies(params, run.seed)
        sizes, groups = (params.heads, params.head_dim), (params.groups, 1)
        cosines = random_cosines(*sizes, groups, params.random, params.device)
        layers, arms = pool_model(load_llama(Path("models/base"), "fp32"), windows)
        values = metrics(params, error, cosines, layers, arms)
        run.metrics("metrics/attention_variants.json", values)
        run.timing(**times(rows))
        folder = "plots/attention_variants"
        tables = {"cache": cache_table(params), "latency": rows, "random_heads": cosines}
        for name, table in (tables | {"layers": layers, "perplexity": arms}).items():
            run.table(f"{folder}/{name}.csv", table)
        plot_variants(rows, cosines, layers, run.output(f"{folder}/variants.png"))


if __name__ == "__main__":
    main()
