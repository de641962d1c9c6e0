"""Iteration-level batching, step by step, by the rules of vLLM V1 (v1/core/sched/scheduler.py).

In each step the running requests come first, in the order of their admission, each with as many
tokens as it lacks under the token budget; a single one is a decoding request. When the block pool
is empty the request at the tail is preempted and later computes everything again. Then, if nothing
was preempted, waiting requests are admitted, the head first and none past it, as long as there are
budget, a free sequence, and free blocks for the whole prompt, although only those of the first
chunk are taken. There is no prefix cache: prefix.py has one. (Yu et al., Orca, OSDI 2022; Kwon et
al., 2023.)
"""

from inferlab.simulation.cost import StepCost, read
from inferlab.simulation.limits import Limits
from inferlab.simulation.record import Record
from inferlab.simulation.schedulers.fifo import Fifo
from inferlab.simulation.schedulers.waiting import WaitingQueue
from inferlab.simulation.workload import Workload


class Sequence:
    """A request in the engine. Its tokens are prompt + generated, `computed` of them are cached."""

    __slots__ = (
        "arrival",
        "blocks",
        "computed",
        "generated",
        "index",
        "last",
        "order",
        "output",
        "prompt",
        "shift",
    )

    def __init__(self, index: int, arrival: int, prompt: int, output: int) -> None:
        self.index = index
        self.arrival = arrival
        self.prompt = prompt
        self.output = output
        self.computed = 0
        self.generated = 0
        self.blocks = 0
        self.last = 0
        self.order = 0
        self.shift = 0

    @property
    def tokens(self) -> int:
        """All that must be cached before the next token comes."""
        return self.prompt + self.generated


class Engine:
    """One run of a workload. Every step is made on its own; `FastEngine` skips what it may."""

    def __init__(
        self,
        workload: Workload,
        cost: StepCost,
        limits: Limits,
        queue: WaitingQueue[Sequence] | None = None,
    ) -> None:
        self.workload = workload
        self.cost = cost
        self.limits = limits
        self.waiting: WaitingQueue[Sequence] = Fifo() if queue is None else queue
        self.running: list[Sequence] = []
        self.free = limits.blocks
        self.now = 0
        self.record = Record.of(workload)
        self._inside = 0
        self._admitted = 0
        self._next = 0
        closed = workload.clients
        first = workload.arrivals.tolist() if closed is None else [0] * min(closed, len(workload))
        self._arrivals: list[int] = first

    def run(self) -> Record:
        """Serve everything. Asserts that all blocks came back and no request was lost."""
        while self._more():
            self._advance()
        assert self.free == self.limits.blocks
        self.record.check()
        return self.record

    def _more(self) -> bool:
        """Take in what has arrived, after idle time if need be. False once everybody is served."""
        self._ingest()
        while not self._inside and self._next < len(self._arrivals):
            self.now = max(self.now, self._arrivals[self._next])
            self._ingest()
        return self._inside > 0

    def _advance(self) -> None:
        """Let something happen: here, one step."""
        self._step()

    def _ingest(self) -> None:
        """Let what has arrived wait, or reject what can never fit."""
        while self._next < len(self._arrivals) and self._arrivals[self._next] <= self.now:
            index, arrival = self._next, self._arrivals[self._next]
            self._next += 1
            prompt, output = int(self.workload.prompts[index]), int(self.workload.outputs[index])
            self.record.arrival[index] = arrival
            if self.limits.fits(prompt, output):
                self.waiting.push(Sequence(index, arrival, prompt, output))
                self._inside += 1
                self.record.present += self.now - arrival
            else:
                self.record.rejected += 1
                self._follow()

    def _follow(self) -> None:
        """In a closed loop the client whose request ended sends the next one."""
        if self.workload.clients is not None and len(self._arrivals) < len(self.workload):
            self._arrivals.append(self.now)

    def _step(self) -> None:
        scheduled = self._schedule()
        tokens = context = half_pairs = 0
        for sequence, new in scheduled:
            tokens += new
            cached, pairs = read(new, sequence.computed)
            context += cached
            half_pairs += pairs
        if scheduled:
            self._pass(self.cost.step(tokens, len(scheduled), context, half_pairs))
        for sequence, new in scheduled:
            sequence.computed += new
            if sequence.computed == sequence.tokens:
                self._hand_out(sequence)
        self.running = [one for one in self.running if one.generated < one.output]

    def _schedule(self) -> list[tuple[Sequence, int]]:
        """The sequences of the next step and how many tokens each of them computes."""
        budget = self.limits.token_budget
        alone = len(self.running) + len(self.waiting) == 1
        chunk = budget if alone else self.limits.chunk or budget
        scheduled: list[tuple[Sequence, int]] = []
        preempted = False
        place = 0
        while place < len(self.running) and budget > 0:
            sequence = self.running[place]
            new = min(sequence.tokens - sequence.computed, chunk, budget)
            while not self._grow(sequence, sequence.computed + new):
                preempted = True
                victim = self.running.pop()
                self._preempt(victim)
                if victim is sequence:
                    return scheduled
            scheduled.append((sequence, new))
            budget -= new
            place += 1
        if not preempted:
            self._admit(scheduled, budget, chunk)
        return scheduled

    def _admit(self, scheduled: list[tuple[Sequence, int]], budget: int, chunk: int) -> None:
        """Add waiting sequences, the head of the queue first, until one does not fit."""
        while budget > 0 and self._admissible(budget, self.free):
            sequence = self.waiting.pop()
            self._reuse(sequence)
            new = min(sequence.tokens - sequence.computed, chunk, budget)
            self._grow(sequence, sequence.computed + new)
            self._admitted += 1
            sequence.order = self._admitted
            self.running.append(sequence)
            scheduled.append((sequence, new))
            budget -= new

    def _admissible(self, budget: int, free: int) -> bool:
        """Whether the head of the queue may start with this budget and so many free blocks."""
        if not len(self.waiting) or len(self.running) >= self.limits.max_num_seqs:
            return False
        tokens = self.waiting.head().tokens
        whole = self.limits.chunked_prefill or tokens <= budget
        return whole and self.limits.blocks_of(tokens) <= free

    def _reuse(self, sequence: Sequence) -> None:
        """Take over what is cached of an admitted sequence: here, nothing."""

    def _grow(self, sequence: Sequence, tokens: int) -> bool:
        """Take blocks so that `tokens` can be cached; False, with none taken, if there are not."""
        needed = self.limits.blocks_of(tokens) - sequence.blocks
        if needed > self.free:
            return False
        sequence.blocks += needed
        self.free -= needed
        assert 0 <= self.free <= self.limits.blocks
        return True

    def _preempt(self, victim: Sequence) -> None:
        """Back to the queue; all of it will be computed again, and what was handed out stays so."""
        self._release(victim)
        victim.computed = 0
        self.waiting.push(victim)
        self.record.preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        self.free += sequence.blocks
        sequence.blocks = 0
        assert self.free <= self.limits.blocks

    def _pass(self, duration: int, steps: int = 1) -> None:
        self.now += duration
        self.record.present += duration * self._inside
        self.record.steps += steps

    def _hand_out(self, sequence: Sequence) -> None:
        """The token that ends this step."""
        if sequence.generated:
            self.record.gaps.add(self.now - sequence.last)
        else:
            self.record.first[sequence.index] = self.now
        sequence.generated += 1
        sequence.last = self.now
        self.record.tokens_out += 1
        if sequence.generated == sequence.output:
            self._finish(sequence)

    def _finish(self, sequence: Sequence) -> None:
        self._release(sequence)
        self.record.last[sequence.index] = self.now
        self.record.finish[sequence.index] = self.now
        self._inside -= 1
        self._follow()
