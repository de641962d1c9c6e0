"""33.13: a sliding window, with and without anchors, on the real model."""

from dataclasses import replace
from pathlib import Path

from inferlab.data.heldout import heldout_inputs
from inferlab.kvcache import window_study as study
from inferlab.kvcache.scoring import check_length
from inferlab.kvcache.window_plots import plot_windows
from inferlab.models.runtime.loading import load_llama
from inferlab.run import stage

MODEL = Path("models/base")


def main() -> None:
    """Compare windows with full attention by masks, and check the masks by real caches."""
    with stage("sliding_window", study.SlidingWindowParams) as run:
        params = run.params
        model = load_llama(MODEL, params.dtype)
        check_length(model.config, params.tokens, "sliding_window.tokens")
        corpus, windows = Path("data/corpus"), Path("data/windows")
        tokens = heldout_inputs(MODEL, corpus, windows, params.inputs, params.tokens)
        plain = replace(model, compiled=False)
        with run.timed("score"):
            scores = study.scored_arms(plain, tokens, params)
        with run.timed("decode"):
            decoded, full_rate = study.decoded_arms(model, tokens, params)
        rows = study.arm_table(scores, model, params)
        along = study.position_table(scores)
        share = study.sink_share(plain, tokens, params)
        run.metrics("metrics/sliding_window.json", study.metrics(rows, share, decoded))
        run.table("plots/sliding_window/arms.csv", rows)
        run.table("plots/sliding_window/along.csv", along)
        image = run.output("plots/sliding_window/windows.png")
        plot_windows(rows, along, params.positions.window, image)
        rates = {f"decode_tokens_per_s_{name}": one.tokens_per_s for name, one in decoded.items()}
        run.timing(**rates, decode_tokens_per_s_full=full_rate)


if __name__ == "__main__":
    main()
