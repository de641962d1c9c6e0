"""33.12: INT8 for the cache, by who shares a scale, beside 16 bits."""

from dataclasses import replace
from pathlib import Path

from inferlab.kvcache import quantization_study as study
from inferlab.kvcache.quantization_plots import plot_quantization
from inferlab.kvcache.scoring import check_length
from inferlab.models.runtime.loading import load_llama
from inferlab.run import stage
from inferlab.store import load_tensors


def main() -> None:
    """Round the cache of the real model and synthetic tensors, and score what is left."""
    with stage("kv_quantization", study.KvQuantizationParams) as run:
        params = run.params
        model = replace(load_llama(Path("models/base"), "fp32"), compiled=False)
        check_length(model.config, params.tokens, "kv_quantization.tokens")
        windows = load_tensors(Path("data/windows/heldout.safetensors"))["input_ids"]
        tokens = study.take_tokens(windows, params)
        with run.timed("score"):
            scores, captured = study.run_arms(model, tokens, params)
        heads = study.head_table(captured, params)
        errors = study.error_table(captured, params, run.seed)
        rows = study.arm_table(scores, captured, params)
        run.metrics("metrics/kv_quantization.json", study.metrics(rows, params))
        run.table("plots/kv_quantization/heads.csv", heads)
        run.table("plots/kv_quantization/errors.csv", errors)
        run.table("plots/kv_quantization/arms.csv", rows)
        plot_quantization(heads, rows, run.output("plots/kv_quantization/heads.png"))


if __name__ == "__main__":
    main()
