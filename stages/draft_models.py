"""33.17: drafters for a real target: who is accepted how often, what it saves, when it pays."""

from pathlib import Path

from transformers import AutoTokenizer

from inferlab.models.runtime.loading import load_llama
from inferlab.run import stage
from inferlab.speculative import draft_study as study
from inferlab.speculative.draft_plots import plot_break_even
from inferlab.speculative.drafters import LookupDrafter, NgramDrafter
from inferlab.speculative.prompts import make_prompts
from inferlab.speculative.vllm_peer import Load, ngram_speedup
from inferlab.store import load_tensors

WINDOWS = Path("data/windows")
MODELS = Path("models")


def main() -> None:
    """Run all drafters on all prompts."""
    with stage("draft_models", study.DraftModelsParams) as run:
        params, folder = run.params, MODELS / run.params.target
        heldout = load_tensors(WINDOWS / "heldout.safetensors")["input_ids"]
        text = load_tensors(WINDOWS / "training.safetensors")["input_ids"].flatten().numpy()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        prompts = make_prompts(tokenizer, heldout, params.prompts, params.prompt_tokens)
        target = load_llama(folder)
        models = {name: load_llama(MODELS / draft) for name, draft in params.drafts.items()}
        lookup = (params.lookup.longest, params.lookup.shortest)
        ngram = NgramDrafter(text, params.ngram_order)
        drafters = {name: study.by_model(model) for name, model in models.items()} | {
            "ngram": lambda sampling: ngram,
            "lookup": lambda sampling: LookupDrafter(*lookup),
        }
        tallies = study.run_prompts(target, drafters, prompts, params, run.seed)
        costs = study.costs(target, models, prompts[0][1])
        values = study.summary(tallies)
        if params.vllm:
            ids = [prompt for _, prompt in prompts]
            load = Load(folder, ids, params.new_tokens, params.length, lookup, run.threads)
            values["vllm_ngram_speedup"] = ngram_speedup(load)
        rows = study.table(tallies, costs, params)
        run.metrics("metrics/draft_models.json", values)
        run.table("plots/draft_models/runs.csv", rows)
        run.table("plots/draft_models/positions.csv", study.position_table(tallies))
        run.table("plots/draft_models/costs.csv", study.cost_table(costs))
        plot_break_even(rows, costs.verify, run.output("plots/draft_models/break_even.png"))


if __name__ == "__main__":
    main()
