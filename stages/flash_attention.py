"""33.26: tiled attention beside the standard one and torch's own."""

from inferlab.attention.flash_plots import plot_flash
from inferlab.attention.flash_study import (
    FlashAttentionParams,
    backward,
    compare,
    metrics,
    resident_peaks,
    sweep_tiles,
    times,
)
from inferlab.run import stage


def main() -> None:
    with stage("flash_attention", FlashAttentionParams) as run:
        resident = resident_peaks(run.params) if run.params.device == "cpu" else {}
        rows, gradients = compare(run.params), backward(run.params)
        tiles = sweep_tiles(run.params)
        run.metrics("metrics/flash_attention.json", metrics(rows, gradients, resident))
        run.timing(**times(rows, gradients))
        folder = "plots/flash_attention"
        run.table(f"{folder}/lengths.csv", rows)
        run.table(f"{folder}/backward.csv", gradients)
        run.table(f"{folder}/tiles.csv", tiles)
        plot_flash(rows, tiles, run.output(f"{folder}/flash.png"))


if __name__ == "__main__":
    main()
