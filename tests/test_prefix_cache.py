"""The simulator's prefix cache: hits by hand, eviction, and what it must not change."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferlab.errors import InferlabError
from inferlab.simulation.cost import PICOSECONDS, StepCost
from inferlab.simulation.engine import Engine
from inferlab.simulation.limits import Limits
from inferlab.simulation.prefix import BlockPool, PrefixEngine
from inferlab.simulation.prefix_study import PrefixParams, gain, prefix_table
from inferlab.simulation.runs import Workers
from inferlab.simulation.workload import Prefixes, Workload, gamma_arrivals

MS = PICOSECONDS // 1000
TOKENS = StepCost(base=0, token=MS, sequence=0, context=0, half_pair=0)


def requests(
    arrivals: list[int], prompts: list[int], outputs: list[int], prefixes: Prefixes | None = None
) -> Workload:
    """Arrivals in milliseconds."""
    times, kinds = np.array(arrivals, dtype=np.int64) * MS, np.zeros(len(prompts), dtype=np.int64)
    return Workload(times, np.array(prompts), np.array(outputs), kinds, prefixes=prefixes)


def random_requests(count: int, rate: float, seed: int) -> Workload:
    rng = np.random.default_rng(seed)
    arrivals = gamma_arrivals(rate, 1.0, count, rng)
    prompts, outputs = rng.integers(1, 40, count), rng.integers(1, 20, count)
    return Workload(arrivals, prompts, outputs, np.zeros(count, dtype=np.int64))


def test_the_second_of_a_group_computes_only_its_own_part() -> None:
    """Ten common tokens are two full blocks of 4; the third block holds tokens of its own too."""
    work = requests([0, 100], [14, 13], [1, 1], Prefixes(np.array([0, 0]), 10))
    engine = PrefixEngine(work, TOKENS, Limits(2, 64, True, 0, 16, 4))
    record = engine.run()
    assert engine.reused == 8
    assert record.finish.tolist() == [14 * MS, (100 + 5) * MS]


def test_groups_share_nothing_with_each_other() -> None:
    work = requests([0, 100], [14, 13], [1, 1], Prefixes(np.array([0, 1]), 10))
    engine = PrefixEngine(work, TOKENS, Limits(2, 64, True, 0, 16, 4))
    assert engine.run().finish.tolist() == [14 * MS, (100 + 13) * MS]
    assert engine.reused == 0


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    """Eight tokens are two full blocks, but the second holds the token whose logits are wanted."""
    work = requests([0, 100], [8, 8], [1, 1], Prefixes(np.array([0, 0]), 8))
    engine = PrefixEngine(work, TOKENS, Limits(2, 64, True, 0, 16, 4))
    assert engine.run().finish.tolist() == [8 * MS, (100 + 4) * MS]


def test_blocks_in_use_are_shared_and_need_no_free_ones() -> None:
    """A holds 3 of 4 blocks for as long as it decodes; B shares two of them and takes the last."""
    work = requests([0, 20], [10, 10], [3, 1], Prefixes(np.array([0, 0]), 8))
    record = PrefixEngine(work, TOKENS, Limits(2, 64, True, 0, 4, 4)).run()
    alone = Engine(work, TOKENS, Limits(2, 64, True, 0, 4, 4)).run()
    assert record.finish[1] < alone.finish[1]
    assert record.finish[1] == (20 + 2) * MS


def test_what_was_free_longest_is_evicted_first_and_ends_before_starts() -> None:
    pool = BlockPool(4)
    one, two = [pool.take(), pool.take()], [pool.take(), pool.take()]
    for group, blocks in enumerate((one, two)):
        for number, block in enumerate(blocks):
            pool.keep(block, (group, number))
        pool.give_back(blocks)
    assert [pool.take() for _ in range(3)] == [one[1], one[0], two[1]]
    assert pool.cached == {(1, 0): two[0]}


def test_a_preempted_request_finds_its_own_blocks() -> None:
    """As in the engine without a cache, but B has its full block of 2 still, and computes less."""
    work = requests([0, 0], [3, 3], [4, 4])
    limits = Limits(2, 16, True, 0, 4, 2)
    cached, plain = PrefixEngine(work, TOKENS, limits), Engine(work, TOKENS, limits)
    record, without = cached.run(), plain.run()
    assert record.preemptions == without.preemptions == 1
    assert cached.reused == 2
    assert without.finish[1] - record.finish[1] == 2 * MS


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    rate=st.floats(0.3, 40),
    seqs=st.integers(1, 6),
    budget=st.integers(6, 70),
    blocks=st.integers(20, 60),
    size=st.sampled_from([1, 4, 5, 16]),
    groups=st.integers(1, 5),
)
def test_all_blocks_come_back_and_the_same_requests_fit(
    seed: int, rate: float, seqs: int, budget: int, blocks: int, size: int, groups: int
) -> None:
    """Conservation, Little's law and the pool's invariants are asserted inside the run."""
    work = random_requests(50, rate, seed).prefixed(groups, 12, seed)
    limits = Limits(seqs, budget, True, 0, blocks, size)
    engine = PrefixEngine(work, TOKENS, limits)
    record = engine.run()
    assert not engine._held and sum(engine._pool._users) == 0
    assert len(engine._pool.free) == blocks
    assert record.rejected == Engine(work, TOKENS, limits).run().rejected


def test_without_common_texts_and_preemptions_it_is_the_plain_engine() -> None:
    work, limits = random_requests(300, 5.0, 3), Limits(6, 64, True, 0, 400, 4)
    engine = PrefixEngine(work, TOKENS, limits)
    record, plain = engine.run(), Engine(work, TOKENS, limits).run()
    assert plain.preemptions == 0
    assert record.same_as(plain)
    assert engine.reused == 0


def test_a_cache_that_holds_the_common_text_gains_and_one_that_does_not_hardly() -> None:
    """Two texts of 16 blocks fit the 40 blocks beside the running requests; 40 texts do not."""
    params = PrefixParams(tokens=64, groups=(2, 40), load=0.5)
    limits, workers = Limits(2, 64, True, 0, 60, 4), Workers(1, "sequential", None)
    rows = prefix_table(params, random_requests(300, 1.0, 5), TOKENS, limits, workers, 0, 1)
    few, many = gain(rows, 2), gain(rows, 40)
    assert few > 1.8
    assert 0.99 < many < few
    off, on = rows[0], rows[1]
    assert (off["reused_share"], off["cache"], on["cache"]) == (0, "off", "on")
    assert on["reused_share"] > 0.5
    assert on["ttft_ms_p95"] < off["ttft_ms_p95"]


@pytest.mark.parametrize(("groups", "tokens"), [(0, 8), (2, 0)])
def test_prefixes_that_are_refused(groups: int, tokens: int) -> None:
    with pytest.raises(InferlabError, match=f"at least 1; got {groups} and {tokens}"):
        random_requests(4, 1.0, 0).prefixed(groups, tokens, 0)
