"""The batching simulator: simulated requests a second on one core, and memory of a million.

`python -m benchmarks.simulator`; needs no stage. Requests of 500 and 200 tokens on one A100 (the
published step cost of Llama-3-8B) at 0.8 of its capacity: the fast path with a million requests,
and both paths with 5,000, which must agree to the bit.
"""

import resource
import time
from pathlib import Path

from inferlab import run
from inferlab.simulation.cost import from_seconds
from inferlab.simulation.engine import Engine
from inferlab.simulation.fast import simulate
from inferlab.simulation.limits import Limits
from inferlab.simulation.published import published_fit
from inferlab.simulation.record import requests_per_s
from inferlab.simulation.workload import Lengths, Normal, make_workload
from inferlab.store import write_json

MANY, FEW = 1_000_000, 5_000
LENGTHS = Lengths(Normal(500.0, 200.0, 1, 2000), Normal(200.0, 100.0, 1, 1000))
LIMITS = Limits(64, 2048, True, 0, 5000, 16)


def peak_mib() -> float:
    """Peak resident memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Write metrics/benchmarks/simulator.json."""
    cost = from_seconds(published_fit("a100").seconds)
    sample = make_workload(LENGTHS, FEW, 1.0, 1.0, seed=0)
    rate = 0.8 * requests_per_s(simulate(sample.at_once(), cost, LIMITS))
    few = make_workload(LENGTHS, FEW, rate, 1.0, seed=0)
    start = time.perf_counter()
    plain = Engine(few, cost, LIMITS).run()
    slow = time.perf_counter() - start
    if not plain.same_as(simulate(few, cost, LIMITS)):
        raise SystemExit("the fast and the step-by-step path differ")
    before = peak_mib()
    many = make_workload(LENGTHS, MANY, rate, 1.0, seed=0)
    start = time.perf_counter()
    simulate(many, cost, LIMITS)
    fast = time.perf_counter() - start
    found = {
        "requests_per_s": MANY / fast,
        "requests_per_s_step_by_step": FEW / slow,
        "fast_over_step_by_step": MANY / fast / (FEW / slow),
        "peak_mib_of_a_million": peak_mib(),
        "peak_mib_before": before,
    }
    Path("metrics/benchmarks").mkdir(parents=True, exist_ok=True)
    write_json(Path("metrics/benchmarks/simulator.json"), run.checked(found, "simulator.json"))


if __name__ == "__main__":
    main()
