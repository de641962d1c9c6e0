"""33.28: the lean runtime's memory, speed and quality, each feature on its own and all together."""

from dataclasses import replace
from pathlib import Path

from inferlab.kvcache.architecture import load_architecture
from inferlab.kvcache.features_plots import plot_features
from inferlab.kvcache.features_study import (
    MemoryEfficientParams,
    arm_table,
    batch_table,
    decode_speeds,
    load_engines,
    metrics,
    peak_memory,
    score,
)
from inferlab.run import stage
from inferlab.store import load_tensors

FOLDERS = {"bf16": Path("models/base"), "int8": Path("models/int8")}


def main() -> None:
    with stage("memory_efficient", MemoryEfficientParams) as run:
        params, arms = run.params, run.params.arms()
        windows = load_tensors(Path("data/windows/heldout.safetensors"))["input_ids"].long()
        prompts = params.prompts(windows)
        own = replace(load_architecture("models/base"), name="base")
        others = [load_architecture(name) for name in params.models]
        batches = batch_table(arms, [own, *others], params)
        with run.timed("memory"):
            memory = peak_memory(arms, FOLDERS, prompts, params.new_tokens, run.threads)
        with run.timed("speed"):
            engines = load_engines(arms, FOLDERS, run.threads)
            speeds = decode_speeds(engines, prompts[:1], params.new_tokens, params.rounds)
        with run.timed("perplexity"):
            nats = score(arms, engines, windows[: params.heldout_windows])
        rows = arm_table(arms, memory, speeds, nats)

        run.metrics("metrics/memory_efficient.json", metrics(rows, batches))
        run.timing(**{f"{name}_decode_tokens_per_s": speed for name, speed in speeds.items()})
        folder = "plots/memory_efficient"
        run.table(f"{folder}/arms.csv", rows)
        run.table(f"{folder}/batches.csv", batches)
        plot_features(rows, batches, params.gpu, run.output(f"{folder}/features.png"))


if __name__ == "__main__":
    main()
