"""33.27: linear + ReLU and softmax + dropout, unfused, fused by hand and by torch.compile."""

from inferlab.fusion.compiling import fresh_cache
from inferlab.fusion.plots import plot_fusion
from inferlab.fusion.study import (
    OperatorFusionParams,
    cases,
    check,
    compile_all,
    measure,
    metrics,
    pairs,
    times,
)
from inferlab.run import stage


def main() -> None:
    with stage("operator_fusion", OperatorFusionParams) as run:
        linear, softmax = pairs(run.params, run.seed)
        with fresh_cache(run.params.compile):
            found, seconds = compile_all([*cases(linear), *cases(softmax)])
            rows = [row for case in found for row in measure(case, run.params)]
            checks = check(softmax, list(found[-1].calls), run.params.dropout)
        run.metrics("metrics/operator_fusion.json", metrics(rows, checks))
        run.timing(**times(rows), **seconds)
        run.table("plots/operator_fusion/cases.csv", rows)
        run.table("plots/operator_fusion/dropout.csv", checks)
        plot_fusion(rows, run.output("plots/operator_fusion/fusion.png"))


if __name__ == "__main__":
    main()
