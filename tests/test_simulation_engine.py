"""The batching engine against closed forms and conservation laws, and its fast path against it."""

from dataclasses import replace
from math import factorial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferlab.errors import InferlabError
from inferlab.simulation.cost import PICOSECONDS, StepCost, from_seconds, read
from inferlab.simulation.engine import Engine, Sequence
from inferlab.simulation.fast import FastEngine, simulate
from inferlab.simulation.gaps import Gaps
from inferlab.simulation.limits import Limits
from inferlab.simulation.record import Record, is_unstable, latencies, requests_per_s
from inferlab.simulation.runs import Workers, interval, spread
from inferlab.simulation.schedulers import POLICIES, Known, make_queue
from inferlab.simulation.schedulers.fifo import Fifo
from inferlab.simulation.schedulers.priority import Priority
from inferlab.simulation.schedulers.shortest import ShortestFirst
from inferlab.simulation.static import simulate_static
from inferlab.simulation.workload import Workload, gamma_arrivals

MS = PICOSECONDS // 1000
COST = StepCost(base=20 * MS, token=2 * MS, sequence=MS, context=3_000_001, half_pair=777)
CLOCK = StepCost(base=MS, token=0, sequence=0, context=0, half_pair=0)
ROOMY = Limits(8, 512, True, 0, 4096, 16)


def workload(
    arrivals: list[float], prompts: list[int], outputs: list[int], classes: list[int] | None = None
) -> Workload:
    """Arrivals in seconds."""
    times = np.rint(np.array(arrivals) * PICOSECONDS).astype(np.int64)
    kinds = np.array(classes if classes else [0] * len(prompts))
    return Workload(times, np.array(prompts), np.array(outputs), kinds)


def random_workload(
    count: int, rate: float, seed: int, prompt: int = 60, output: int = 30
) -> Workload:
    rng = np.random.default_rng(seed)
    arrivals = gamma_arrivals(rate, 1.0, count, rng)
    prompts, outputs = rng.integers(1, prompt, count), rng.integers(1, output, count)
    return Workload(arrivals, prompts, outputs, rng.integers(0, 2, count))


def both(work: Workload, limits: Limits, cost: StepCost = COST, policy: str = "fifo") -> Record:
    """The record of the plain engine, once the fast one has been seen to agree to the bit."""
    known = Known(work, cost, limits.token_budget, 0.5, 0.1, 1.0, 0)
    plain = Engine(work, cost, limits, make_queue(policy, known)).run()
    assert plain.same_as(FastEngine(work, cost, limits, make_queue(policy, known)).run())
    return plain


def test_two_requests_by_hand() -> None:
    """Steps: 10 tokens of A; A and 4 of B; A and B; B alone. Budget 10, A arrives first."""
    cost = StepCost(base=100, token=10, sequence=1000, context=1, half_pair=0)
    work = Workload(np.array([0, 5]), np.array([10, 4]), np.array([3, 3]), np.zeros(2, dtype=int))
    record = both(work, Limits(4, 10, True, 0, 8, 16), cost)
    steps = [
        100 + 10 * 10 + 1000,
        100 + 10 * 5 + 2000 + 10,
        100 + 10 * 2 + 2000 + 11 + 4,
        100 + 10 + 1000 + 5,
    ]
    ends = np.cumsum(steps)
    assert record.first.tolist() == [ends[0], ends[1]]
    assert record.finish.tolist() == [ends[2], ends[3]]
    assert (record.steps, record.tokens_out, record.gaps.total) == (4, 6, 4)
    assert record.gaps.longest == max(steps[1:])


def test_a_prompt_gets_what_the_decoding_leaves_of_the_budget() -> None:
    """A decodes (1 token), so that B's 20 tokens take 7 + 7 + 6 under a budget of 8."""
    cost = StepCost(base=0, token=MS, sequence=0, context=0, half_pair=0)
    record = both(workload([0, 0.001], [8, 20], [9, 1]), Limits(4, 8, True, 0, 8, 16), cost)
    assert record.first.tolist() == [8 * MS, (8 + 8 + 8 + 7) * MS]


def test_the_head_of_the_line_blocks_and_the_whole_prompt_must_fit() -> None:
    """Four blocks of 4: A holds two or three, B wants four and waits; so does C, who wants one."""
    work = workload([0, 0.001, 0.002], [8, 14, 2], [4, 1, 1])
    record = both(work, Limits(4, 64, True, 0, 4, 4), CLOCK)
    assert record.first.tolist() == [MS, 5 * MS, 6 * MS]
    assert record.preemptions == 0


def test_the_tail_is_preempted_and_computes_everything_again() -> None:
    """Two blocks of 2 each for A and B; A's fifth token takes B's block."""
    work = workload([0, 0], [2, 2], [4, 4])
    cost = StepCost(base=0, token=MS, sequence=0, context=0, half_pair=0)
    record = both(work, Limits(2, 16, True, 0, 3, 2), cost)
    # Step 1: both prompts (4). Step 2: A takes the third block, B is preempted (1). A: 2 more.
    # Then B's prompt and its first token again (3), and two tokens more.
    assert record.preemptions == 1
    assert record.finish.tolist() == [7 * MS, 12 * MS]
    assert record.first.tolist() == [4 * MS, 4 * MS]


def test_without_chunks_a_prompt_waits_until_all_of_it_fits_beside_the_decoding() -> None:
    """Two decode and leave 15 tokens of 17: B's 16 come in two steps, or when both have ended."""
    work = workload([0, 0, 0.0001], [2, 3, 16], [4, 4, 1])
    cost = StepCost(base=0, token=MS, sequence=0, context=0, half_pair=0)
    split, whole = (
        both(work, Limits(3, 17, chunked, 0, 64, 16), cost) for chunked in (True, False)
    )
    assert split.first[2] == (5 + 17 + 3) * MS
    assert whole.first[2] == (5 + 2 + 2 + 2 + 16) * MS


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    rate=st.floats(0.3, 40),
    seqs=st.integers(1, 7),
    budget=st.integers(7, 70),
    chunk=st.integers(0, 7),
    blocks=st.integers(20, 60),
    size=st.sampled_from([1, 4, 5, 16]),
    chunked=st.booleans(),
    clients=st.none() | st.integers(1, 9),
    policy=st.sampled_from(sorted(POLICIES)),
)
def test_fast_and_slow_paths_agree_to_the_bit(
    seed: int,
    rate: float,
    seqs: int,
    budget: int,
    chunk: int,
    blocks: int,
    size: int,
    chunked: bool,
    clients: int | None,
    policy: str,
) -> None:
    """Conservation, Little's law and the pool's invariants are asserted inside, in both."""
    work = random_workload(60, rate, seed)
    if clients is not None:
        work = work.closed(clients)
    limits = Limits(seqs, budget, chunked, chunk if chunked else 0, blocks, size)
    both(work, limits, policy=policy)


def test_short_blocks_really_happen_in_what_is_compared() -> None:
    tight = Limits(6, 32, True, 5, 14, 5)
    record = both(random_workload(200, 20, 1), tight)
    assert record.preemptions > 20
    assert 0 < record.rejected < 40


@given(st.integers(1, 300), st.integers(1, 80), st.integers(1, 64))
def test_alone_a_request_takes_the_closed_form(prompt: int, output: int, budget: int) -> None:
    limits = Limits(1, budget, True, 0, 400, 1)
    record = both(workload([1.5], [prompt], [output]), limits)
    first, last = COST.alone(prompt, output, budget)
    assert record.first[0] - record.arrival[0] == first
    assert record.finish[0] - record.arrival[0] == last


def test_alone_by_hand() -> None:
    """Prompt 3 under a budget of 2: chunks of 2 and 1; then two tokens behind 3 and 4 cached."""
    cost = StepCost(base=1000, token=100, sequence=10, context=7, half_pair=3)
    first = (1000 + 200 + 10 + 3 * 4) + (1000 + 100 + 10 + 7 * 2)
    assert cost.alone(3, 3, 2) == (first, first + 2 * 1110 + 7 * (3 + 4))
    assert read(4, 6) == (0, 4 * 16) and read(1, 6) == (6, 0)


def mean_wait(outputs: np.ndarray, rate: float, servers: int, seed: int) -> float:
    """Mean seconds in the queue of a run whose service takes a millisecond a token."""
    count = len(outputs)
    arrivals = gamma_arrivals(rate, 1.0, count, np.random.default_rng([seed, 1]))
    ones = np.ones(count, dtype=np.int64)
    limits = Limits(servers, max(servers, 64), True, 0, 10**9, 16)
    record = simulate(Workload(arrivals, ones, outputs, 0 * ones), CLOCK, limits)
    return float(latencies(record, skip=0.1).ttft.mean()) - 0.001


def erlang_c(servers: int, offered: float) -> float:
    """The chance to wait in M/M/c (Erlang 1917)."""
    busy = offered**servers / factorial(servers) / (1 - offered / servers)
    return busy / (sum(offered**n / factorial(n) for n in range(servers)) + busy)


@pytest.mark.parametrize(
    ("servers", "load", "exponential"), [(1, 0.7, True), (1, 0.7, False), (3, 0.8, True)]
)
def test_waiting_times_of_queueing_theory(servers: int, load: float, exponential: bool) -> None:
    """M/M/1, M/D/1 (Pollaczek and Khinchine) and M/M/c: theory lies in the run's interval."""
    rate, waits = load * servers, []
    for seed in range(30):
        rng = np.random.default_rng([seed, 0])
        drawn = rng.exponential(1000, 2500) if exponential else np.full(2500, 1000)
        outputs = np.maximum(1, np.rint(drawn)).astype(np.int64)
        waits.append(mean_wait(outputs, rate, servers, seed))
    found = interval(waits)
    theory = erlang_c(servers, rate) / (servers - rate) if exponential else load / 2 / (1 - load)
    assert abs(found.mean - theory) < found.half
    assert found.half < 0.2 * theory


def test_littles_law_in_the_engines_own_time() -> None:
    """Requests in the system, integrated by the engine's clock = the sum of their latencies."""
    record = both(random_workload(300, 4.0, 3), ROOMY)
    assert record.present == int((record.finish - record.arrival).sum())
    broken = replace(record, present=record.present + 1)
    with pytest.raises(AssertionError):
        broken.check()


@pytest.mark.parametrize("policy", ["fifo", "shortest_oracle", "priority"])
def test_more_load_never_lowers_mean_waiting(policy: str) -> None:
    limits = Limits(4, 64, True, 0, 200, 16)
    for seed in range(3):
        means = []
        for rate in (0.5, 1.0, 2.0, 4.0, 8.0):
            work = random_workload(300, rate, seed)
            known = Known(work, COST, 64, 0.5, 0.1, 1.0, 0)
            record = simulate(work, COST, limits, make_queue(policy, known))
            means.append(latencies(record).ttft.mean())
        assert means == sorted(means)
        assert means[-1] > 2 * means[0]


def run_of(seed: int) -> tuple[list[int], int]:
    record = simulate(random_workload(80, 5.0, seed), COST, ROOMY)
    return record.finish.tolist(), record.gaps.longest


@pytest.mark.parametrize(
    "backend",
    ["threading", "multiprocessing", pytest.param("loky", marks=pytest.mark.smoke)],
)
def test_backends_give_the_same_to_the_bit(backend: str) -> None:
    work = [(seed,) for seed in range(4)]
    assert spread(run_of, work, Workers(2, backend, None), 2) == [run_of(seed) for seed in range(4)]
    assert run_of(0) != run_of(1)


def test_what_never_fits_is_rejected_and_counted() -> None:
    """A pool of 4 blocks of 4 holds 16 tokens; the last of an output is never cached."""
    work = workload([0, 0, 0], [16, 16, 17], [1, 2, 1])
    record = both(work, Limits(2, 64, True, 0, 4, 4))
    assert record.rejected == 2
    assert record.served.tolist() == [True, False, False]
    whole = both(workload([0], [60], [8]), Limits(2, 64, False, 0, 100, 4))
    assert whole.rejected == 1
    closed = both(work.closed(1), Limits(2, 64, True, 0, 4, 4))
    assert closed.rejected == 2


def test_closed_loop_keeps_its_clients_busy() -> None:
    work = random_workload(50, 1.0, 0).closed(3)
    record = both(work, ROOMY)
    order = np.sort(record.finish)
    assert (np.sort(record.arrival)[3:] == order[:-3]).all()
    with pytest.raises(InferlabError, match="clients must be at least 1; got 0"):
        work.closed(0)


def test_policies_by_hand() -> None:
    """A runs; B (long), C (short) and D (shortest, latest) wait for its place."""
    work = workload([0, 0.001, 0.002, 0.003], [1] * 4, [100, 50, 20, 10], [1, 1, 1, 0])
    limits = Limits(1, 8, True, 0, 64, 16)
    sizes = [int(output) * MS for output in work.outputs]
    orders = {
        "fifo": (Fifo[Sequence](), [0, 1, 2, 3]),
        "shortest": (ShortestFirst[Sequence](sizes), [0, 3, 2, 1]),
        "aged": (ShortestFirst[Sequence](sizes, 25.0), [0, 2, 1, 3]),
        "very aged": (ShortestFirst[Sequence](sizes, 50.0), [0, 1, 2, 3]),
        "priority": (Priority[Sequence](work.classes.tolist()), [0, 3, 1, 2]),
        "priority, aged": (Priority[Sequence](work.classes.tolist(), MS), [0, 1, 2, 3]),
    }
    for name, (queue, order) in orders.items():
        record = FastEngine(work, CLOCK, limits, queue).run()
        assert np.argsort(record.finish, kind="stable").tolist() == order, name


def test_unknown_policy_is_answered_with_the_known_ones() -> None:
    known = Known(workload([0], [1], [1]), COST, 8, 0.5, 0.1, 1.0, 0)
    with pytest.raises(
        InferlabError, match=r"unknown policy 'fifi'; known: .* did you mean fifo\?"
    ):
        make_queue("fifi", known)


def test_static_batch_by_hand() -> None:
    """Two at a time, padded to the longest; the third is alone and starts when its wait is over."""
    cost = StepCost(base=1000, token=10, sequence=1, context=1, half_pair=1)
    work = Workload(
        np.array([0, 50, 60]), np.array([4, 2, 3]), np.array([1, 3, 2]), np.zeros(3, dtype=int)
    )
    record = simulate_static(work, cost, ROOMY, 2, 1e-8)
    first = 50 + 1000 + 10 * 8 + 2 + 2 * 16
    decode = [1000 + 20 + 2 + 2 * 4, 1000 + 20 + 2 + 2 * 5]
    end = first + sum(decode)
    assert record.first[:2].tolist() == [first, first]
    assert record.last[:2].tolist() == [first, end]
    assert record.finish[:2].tolist() == [end, end]
    alone = max(end, 60 + 10_000)
    assert record.first[2] == alone + 1000 + 30 + 1 + 9
    assert record.gaps.total == 3
    assert record.padding == (2 * 4 - 6) + (2 * 3 - 4)


def test_static_batch_of_one_is_the_engine_with_one_sequence() -> None:
    work = random_workload(60, 2.0, 5)
    static = simulate_static(work, COST, ROOMY, 1, 5.0)
    own = both(work, replace(ROOMY, max_num_seqs=1))
    chunked = work.prompts == 1  # a prompt of one token counts as a token that reads no context
    assert np.abs(static.finish - own.finish).max() <= 777 * (1 + chunked.sum())
    with pytest.raises(InferlabError, match="give it an open workload"):
        simulate_static(work.closed(2), COST, ROOMY, 1, 5.0)


def test_continuous_batching_beats_static_when_lengths_differ() -> None:
    work = replace(random_workload(300, 1.0, 7), arrivals=np.zeros(300, dtype=np.int64))
    continuous = requests_per_s(simulate(work, COST, ROOMY))
    static = [requests_per_s(simulate_static(work, COST, ROOMY, n, 5.0)) for n in (1, 4, 8)]
    assert continuous > max(static)


@given(st.integers(1, 10**13), st.integers(0, 10**9), st.integers(1, 300), st.integers(1, 9))
def test_rising_gaps_are_those_added_one_by_one(
    first: int, rise: int, steps: int, count: int
) -> None:
    at_once, singly = Gaps(), Gaps()
    at_once.add_rising(first, rise, steps, count)
    for step in range(steps):
        singly.add(first + rise * step, count)
    assert at_once.counts == singly.counts and at_once.longest == singly.longest


def test_percentiles_of_gaps_are_within_a_bin() -> None:
    drawn = np.random.default_rng(0).lognormal(0, 1, 5000)
    gaps = Gaps()
    for one in drawn:
        gaps.add(int(one * PICOSECONDS))
    for percent in (1, 50, 99, 100):
        exact = np.percentile(drawn, percent, method="inverted_cdf")
        assert gaps.percentile(percent) == pytest.approx(exact, rel=0.012)
    assert Gaps().percentile(50) == 0


def test_overload_is_told_from_a_steady_state() -> None:
    limits = Limits(4, 64, True, 0, 400, 16)
    most = requests_per_s(simulate(random_workload(400, 1e6, 0), COST, limits))
    for load, expected in ((0.5, False), (0.8, False), (1.2, True), (2.0, True)):
        found = [
            is_unstable(simulate(random_workload(1000, load * most, seed), COST, limits))
            for seed in range(3)
        ]
        assert found == [expected] * 3, load
    closed = simulate(random_workload(400, 1.0, 0).closed(50), COST, limits)
    assert not is_unstable(closed)


@pytest.mark.parametrize(
    ("coefficients", "message"),
    [
        ({"base": -1.0}, "base must be a whole number >= 0; got -1000000000000"),
        ({"base": 0.0, "token": 0.0, "sequence": 0.0}, "steps take no time"),
    ],
)
def test_step_costs_that_are_refused(coefficients: dict[str, float], message: str) -> None:
    whole = {"base": 1.0, "token": 1.0, "sequence": 1.0, "context": 0.0, "pair": 0.0}
    with pytest.raises(InferlabError, match=message):
        from_seconds(whole | coefficients)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunk": 65}, "chunk must be at most token_budget, 64; got 65"),
        ({"token_budget": 3}, "token_budget must be at least max_num_seqs, 4, .*; got 3"),
        ({"chunk": 8, "chunked_prefill": False}, "chunk must be 0 without chunked_prefill; got 8"),
        ({"blocks": 0}, "greater than or equal to 1"),
        ({"max_num_seqs": 0}, "greater than or equal to 1"),
    ],
)
def test_limits_that_are_refused(change: dict[str, int], message: str) -> None:
    fine = {"max_num_seqs": 4, "token_budget": 64, "chunked_prefill": True, "chunk": 0}
    with pytest.raises(ValueError, match=message):
        Limits(**(fine | {"blocks": 8, "block_size": 4} | change))
