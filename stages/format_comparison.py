"""33.5: bytes, quality with intervals and speed of every format, in one table."""

import csv
from pathlib import Path

from inferlab.evaluation.comparison import FormatComparisonParams, summary, table
from inferlab.evaluation.plots import plot_bytes_against_perplexity
from inferlab.evaluation.speed import speeds
from inferlab.models.loading import load_model
from inferlab.run import stage
from inferlab.store import load_tensors, read_json


def main() -> None:
    """Measure prefill and decoding in transformers; the rest was measured upstream."""
    with stage("format_comparison", FormatComparisonParams) as run:
        params, quality, windows = run.params, {}, {}
        for name in params.variants:
            quality[name] = read_json(Path(f"metrics/evaluate/{name}.json"))
            with Path(f"plots/evaluate/{name}.csv").open() as file:
                windows[name] = [float(r["token_perplexity"]) for r in csv.DictReader(file)]
        served = {
            name: read_json(Path(f"metrics/serve_benchmark/{name}.json"))
            for name in set(params.served_as.values())
        }
        tokens = load_tensors(Path("data/windows/heldout.safetensors"))["input_ids"]
        prompt = tokens[:1, : params.prompt_tokens].long()
        models = {name: load_model(Path("models", name), run.threads) for name in params.variants}
        found = speeds(models, prompt, params.new_tokens, params.rounds)

        rows = table(params, quality, windows, found, served)
        run.metrics("metrics/format_comparison.json", summary(rows))
        run.table("plots/format_comparison/formats.csv", rows)
        plot_bytes_against_perplexity(rows, run.output("plots/format_comparison/pareto.png"))
        for name, (prefill, decode) in found.items():
            run.timing(**{f"{name}_prefill_tokens_per_s": prefill})
            run.timing(**{f"{name}_decode_tokens_per_s": decode})


if __name__ == "__main__":
    main()
