"""33.15: H2O beside random eviction, sinks with recent tokens, and the full cache."""

from dataclasses import replace
from pathlib import Path

from inferlab.data.heldout import heldout_inputs
from inferlab.kvcache import eviction_study as study
from inferlab.kvcache.eviction_params import TokenEvictionParams
from inferlab.kvcache.eviction_plots import plot_eviction
from inferlab.kvcache.scoring import check_length
from inferlab.models.runtime.loading import load_llama
from inferlab.run import stage

MODEL = Path("models/base")


def main() -> None:
    """Compare ways to evict at several budgets, and time what keeping scores costs."""
    with stage("token_eviction", TokenEvictionParams) as run:
        params = run.params
        model = replace(load_llama(MODEL, params.dtype), compiled=False)
        check_length(model.config, params.tokens, "token_eviction.tokens")
        corpus, windows = Path("data/corpus"), Path("data/windows")
        tokens = heldout_inputs(MODEL, corpus, windows, params.inputs, params.tokens)
        with run.timed("run"):
            runs = study.run_all(model, tokens, params, run.seed)
        with run.timed("score"):
            whole, curve = study.score_all(model, runs, tokens, params)
        block_nats = study.block_difference(model, runs, curve, tokens, params)
        attention = study.kept_attention(runs, params.block)
        methods, rows = study.method_table(whole, attention, params), study.curve_table(curve)
        held = study.held_table(runs)
        values = study.metrics(methods, rows, block_nats, params)
        run.metrics("metrics/token_eviction.json", values)
        run.table("plots/token_eviction/methods.csv", methods)
        run.table("plots/token_eviction/curve.csv", rows)
        run.table("plots/token_eviction/held.csv", held)
        image = run.output("plots/token_eviction/eviction.png")
        plot_eviction(rows, held, params.methods, image)
        run.timing(**{f"decode_ms_{name}": taken for name, taken in runs.decode_ms.items()})


if __name__ == "__main__":
    main()
