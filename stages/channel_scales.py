"""33.2: one scale a tensor, a channel or a group of columns, on every linear layer."""

from pathlib import Path

from inferlab.quantization import channel_scales as study
from inferlab.quantization.channel_scales_plots import plot_prediction, plot_scales
from inferlab.run import stage
from inferlab.store import open_checkpoint


def main() -> None:
    """Write metrics/channel_scales.json, the table of all layers and the channels of one."""
    with stage("channel_scales", study.ChannelScalesParams) as run:
        errors = study.layer_errors(open_checkpoint(Path("models/base")), run.params)
        detail = next(one for one in errors if one.name == run.params.layer)
        folder = "plots/channel_scales"
        run.table(f"{folder}/layers.csv", study.layer_table(errors))
        run.table(f"{folder}/channels.csv", study.channel_table(detail))
        plot_scales(errors, detail, run.output(f"{folder}/scales.png"))
        plot_prediction(errors, run.output(f"{folder}/prediction.png"))
        run.metrics("metrics/channel_scales.json", study.metrics(errors, run.params.layer))


if __name__ == "__main__":
    main()
