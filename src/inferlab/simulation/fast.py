"""The same engine, faster: what does not change is counted, not done.

As long as every decoding sequence gets its token in every step, all of them move as one: they are
kept as a count, the sum of their contexts, how many of them need a block at which step, and a heap
of the steps at which they end. A step with prefill then costs as much as its prefills, and a
stretch in which nothing is admitted, ended or short of blocks costs one sum. Where blocks or the
budget run short, sequences are put in order again and the plain engine makes the step.
"""

import heapq
from math import isqrt

from inferlab.simulation.cost import StepCost, read
from inferlab.simulation.engine import Engine, Sequence
from inferlab.simulation.limits import Limits
from inferlab.simulation.record import Record
from inferlab.simulation.schedulers.waiting import WaitingQueue
from inferlab.simulation.workload import Workload


class FastEngine(Engine):
    """Results are those of `Engine`, to the bit.

    While `_together`, a decoding sequence has generated `_clock + shift` tokens, and `running`
    holds the sequences in no order; otherwise all is as in `Engine`.
    """

    def __init__(
        self,
        workload: Workload,
        cost: StepCost,
        limits: Limits,
        queue: WaitingQueue[Sequence] | None = None,
    ) -> None:
        super().__init__(workload, cost, limits, queue)
        self._together = True
        self._clock = 0
        self._decoding: set[Sequence] = set()
        self._prefilling: list[Sequence] = []
        self._context = 0
        self._due = [0] * limits.block_size
        self._ends: list[tuple[int, int, Sequence]] = []
        self._newest = 0

    def _advance(self) -> None:
        if not self._together:
            self._step()
            self._gather()
        elif not self._stretch() and not self._mixed():
            self._scatter()
            self._step()
            self._gather()

    def _stretch(self) -> bool:
        """Skip ahead while all that happens is decoding. False if something else is due now."""
        count = len(self._decoding)
        if not count or self._prefilling:
            return False
        due = self._due[self._clock % len(self._due)]
        if due > self.free:
            return False
        budget = self.limits.token_budget - count
        if budget > 0 and self._admissible(budget, self.free - due):
            return False
        steps = self._steps_with_blocks(self._ends[0][0] - self._clock, count)
        first = self.cost.step(count, count, self._context, 0)
        rise = self.cost.context * count
        full = budget <= 0 or len(self.running) >= self.limits.max_num_seqs
        if not full and self._next < len(self._arrivals):
            wait = self._arrivals[self._next] - self.now
            steps = min(steps, _steps_until(wait, first, rise))
        self.free -= self._blocks_due(steps)
        self._clock += steps
        self._context += count * steps
        self._pass(first * steps + rise * (steps * (steps - 1) // 2), steps)
        self.record.gaps.add_rising(first, rise, steps, count)
        self.record.tokens_out += count * steps
        self._end()
        return True

    def _mixed(self) -> bool:
        """One step with prefill in it. False, with nothing done, if the running ones fall short."""
        limits, count = self.limits, len(self._decoding)
        due = self._due[self._clock % len(self._due)]
        chunk = limits.chunk or limits.token_budget
        if len(self.running) + len(self.waiting) == 1:
            chunk = limits.token_budget
        wanted = [min(one.tokens - one.computed, chunk) for one in self._prefilling]
        blocks = sum(
            limits.blocks_of(one.computed + new) - one.blocks
            for one, new in zip(self._prefilling, wanted, strict=True)
        )
        behind = bool(self._prefilling) and self._newest > self._prefilling[0].order
        short = count + sum(wanted) > limits.token_budget
        if due + blocks > self.free or count > limits.token_budget or (behind and short):
            return False
        self.free -= due
        budget = limits.token_budget - count
        scheduled: list[tuple[Sequence, int]] = []
        for one, new in zip(self._prefilling, wanted, strict=True):
            new = min(new, budget)
            if new:
                self._grow(one, one.computed + new)
                scheduled.append((one, new))
                budget -= new
        already = len(scheduled)
        self._admit(scheduled, budget, chunk)
        self._prefilling += [one for one, _ in scheduled[already:]]
        self._compute(scheduled, count)
        return True

    def _compute(self, scheduled: list[tuple[Sequence, int]], count: int) -> None:
        """Let the step's time pass and hand out its tokens, to `count` decoding ones and others."""
        tokens, context, half_pairs = count, self._context, 0
        for one, new in scheduled:
            cached, pairs = read(new, one.computed)
            tokens += new
            context += cached
            half_pairs += pairs
        sequences = count + len(scheduled)
        duration = self.cost.step(tokens, sequences, context, half_pairs)
        self._pass(duration)
        if count:
            self.record.gaps.add(duration, count)
        self.record.tokens_out += count
        self._clock += 1
        self._context += count
        for one, new in scheduled:
            one.computed += new
            if one.computed == one.tokens:
                self._hand_out(one)
                self._prefilling.remove(one)
                if one.generated < one.output:
                    self._join(one)
                else:
                    self.running.remove(one)
        self._end()

    def _end(self) -> None:
        """Finish the decoding sequences whose last token came with this step, oldest first."""
        while self._ends and self._ends[0][0] == self._clock:
            one = heapq.heappop(self._ends)[2]
            self._leave(one)
            self.running.remove(one)
            self._finish(one)

    def _join(self, one: Sequence) -> None:
        """Let a sequence that has just got a token decode with the others."""
        one.shift = one.generated - self._clock
        self._decoding.add(one)
        self._context += one.computed
        self._due[(self._clock - one.computed) % len(self._due)] += 1
        heapq.heappush(self._ends, (one.output - one.shift, one.order, one))
        self._newest = max(self._newest, one.order)

    def _leave(self, one: Sequence) -> None:
        """Write down where a decoding sequence stands, and count it no longer."""
        one.generated = self._clock + one.shift
        one.computed = one.tokens - 1
        one.blocks = self.limits.blocks_of(one.computed)
        one.last = self.now
        self._decoding.remove(one)
        self._context -= one.computed
        self._due[(self._clock - one.computed) % len(self._due)] -= 1

    def _scatter(self) -> None:
        """From moving as one to the plain engine's state."""
        for one in list(self._decoding):
            self._leave(one)
        self._ends.clear()
        self.running.sort(key=lambda one: one.order)
        self._together = False

    def _gather(self) -> None:
        """Back again, if every decoding sequence has got a token in the last step."""
        decoding = [one for one in self.running if one.computed == one.tokens - 1 and one.generated]
        if any(one.last != self.now for one in decoding):
            return
        self._newest = 0
        for one in decoding:
            self._join(one)
        self._prefilling = [one for one in self.running if one not in self._decoding]
        self._together = True

    def _blocks_due(self, steps: int) -> int:
        """Blocks that the decoding sequences take in the next steps."""
        size = len(self._due)
        rounds, rest = divmod(steps, size)
        taken = rounds * len(self._decoding)
        return taken + sum(self._due[(self._clock + step) % size] for step in range(rest))

    def _steps_with_blocks(self, steps: int, count: int) -> int:
        """The most of `steps` for which there are blocks."""
        size = len(self._due)
        if count * (steps // size + 1) <= self.free:
            return steps
        left, done = self.free, 0
        while done < steps:
            left -= self._due[(self._clock + done) % size]
            if left < 0:
                break
            done += 1
        return done


def _steps_until(wait: int, first: int, rise: int) -> int:
    """Steps of first, first + rise, … picoseconds until `wait` have passed, at least 1."""
    if rise == 0:
        return max(1, -(-wait // first))
    linear = 2 * first - rise
    steps = max(1, (isqrt(linear * linear + 8 * rise * wait) - linear) // (2 * rise))

    def taken(count: int) -> int:
        return first * count + rise * (count * (count - 1) // 2)

    while taken(steps) < wait:
        steps += 1
    while steps > 1 and taken(steps - 1) >= wait:
        steps -= 1
    return steps


def simulate(
    workload: Workload,
    cost: StepCost,
    limits: Limits,
    queue: WaitingQueue[Sequence] | None = None,
) -> Record:
    """Serve a workload with continuous batching, first come first served unless `queue` differs."""
    return FastEngine(workload, cost, limits, queue).run()
