"""33.19: long prompts in chunks, simulated with the measured engine's step cost."""

from pathlib import Path

from inferlab.run import stage
from inferlab.simulation import chunked_study as study
from inferlab.simulation.chunked_plots import plot_chunks
from inferlab.simulation.cost import load_cost


def main() -> None:
    with stage("chunked_prefill", study.ChunkedPrefillParams) as run:
        cost = load_cost(Path("data/step_cost/costs.json"), run.params.hardware)
        rows = study.chunk_table(run.params, cost, run.seed, run.threads)
        run.metrics("metrics/chunked_prefill.json", study.metrics(rows, run.params))
        run.table("plots/chunked_prefill/chunks.csv", rows)
        goal = run.params.itl_goal_ms
        plot_chunks(rows, goal, run.output("plots/chunked_prefill/chunks.png"))


if __name__ == "__main__":
    main()
