"""33.1: INT8 and INT4 of random tensors, errors beside the theory."""

from inferlab.quantization import basics
from inferlab.quantization.basics_plots import plot_errors
from inferlab.run import stage


def main() -> None:
    """Write metrics/quantization_basics.json, the table of all cases and the histograms."""
    with stage("quantization_basics", basics.BasicsParams) as run:
        cases = basics.outcomes(basics.make_inputs(run.params, run.seed))
        symmetric = [case for case in cases if case.scheme == "symmetric"]
        plain = [case for case in symmetric if case.source == "normal"]
        folder = "plots/quantization_basics"
        run.table(f"{folder}/errors.csv", [case.row() for case in cases])
        run.table(f"{folder}/histogram.csv", basics.histogram(plain))
        plot_errors(symmetric, run.output(f"{folder}/histogram.png"))
        run.metrics("metrics/quantization_basics.json", basics.metrics(cases))


if __name__ == "__main__":
    main()
