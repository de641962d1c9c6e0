"""The engine with vLLM's prefix cache: full blocks keep their content until they are taken again.

A block is known by all tokens up to its end, so that a request finds the longest run of its first
blocks that is still there: of a text that it has in common with others, and of itself after a
preemption. At least one token is computed anew. Blocks that nobody uses are free and are taken in
the order in which they became so, the last ones of a sequence first (v1/core/block_pool.py,
v1/core/kv_cache_manager.py).
"""

from inferlab.simulation.cost import StepCost
from inferlab.simulation.engine import Engine, Sequence
from inferlab.simulation.limits import Limits
from inferlab.simulation.schedulers.waiting import WaitingQueue
from inferlab.simulation.workload import Workload

Content = tuple[int, int]
"""Whose text it is, and which block of it: a group counts from 0 up, a request from -1 down."""


class BlockPool:
    """Blocks by number, what the full ones hold, and the free ones in the order of eviction."""

    def __init__(self, blocks: int) -> None:
        self.free = dict.fromkeys(range(blocks))
        self.cached: dict[Content, int] = {}
        self._content: dict[int, Content] = {}
        self._users = [0] * blocks

    def take(self) -> int:
        """The free block that comes first; what it held is gone."""
        block = next(iter(self.free))
        del self.free[block]
        if (content := self._content.pop(block, None)) is not None:
            del self.cached[content]
        self._users[block] = 1
        return block

    def share(self, block: int) -> None:
        """Use a block as it is."""
        self.free.pop(block, None)
        self._users[block] += 1

    def keep(self, block: int, content: Content) -> None:
        """Let a full block be found; where another one holds the same, that one is found."""
        if content not in self.cached:
            self.cached[content] = block
            self._content[block] = content

    def give_back(self, blocks: list[int]) -> None:
        """Use these blocks of a sequence no more."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if not self._users[block]:
                self.free[block] = None


class PrefixEngine(Engine):
    """`Engine` with the cache on, step by step. `reused`: tokens that were not computed again."""

    def __init__(
        self,
        workload: Workload,
        cost: StepCost,
        limits: Limits,
        queue: WaitingQueue[Sequence] | None = None,
    ) -> None:
        super().__init__(workload, cost, limits, queue)
        self.reused = 0
        self._pool = BlockPool(limits.blocks)
        self._held: dict[int, list[int]] = {}

    def _admissible(self, budget: int, free: int) -> bool:
        if not len(self.waiting) or len(self.running) >= self.limits.max_num_seqs:
            return False
        head = self.waiting.head()
        found = self._found(head)
        missing = head.tokens - len(found) * self.limits.block_size
        idle = sum(block in self._pool.free for block in found)
        needed = self.limits.blocks_of(head.tokens) - len(found) + idle
        return (self.limits.chunked_prefill or missing <= budget) and needed <= free

    def _reuse(self, sequence: Sequence) -> None:
        found = self._found(sequence)
        for block in found:
            self._pool.share(block)
        self._held[sequence.index] = found
        sequence.blocks = len(found)
        sequence.computed = len(found) * self.limits.block_size
        self.reused += sequence.computed
        self.free = len(self._pool.free)

    def _grow(self, sequence: Sequence, tokens: int) -> bool:
        before = self.free
        if not super()._grow(sequence, tokens):
            return False
        held, size = self._held[sequence.index], self.limits.block_size
        held += [self._pool.take() for _ in range(before - self.free)]
        for number in range(sequence.computed // size, tokens // size):
            self._pool.keep(held[number], self._content(sequence, number))
        return True

    def _release(self, sequence: Sequence) -> None:
        self._pool.give_back(self._held.pop(sequence.index))
        sequence.blocks = 0
        self.free = len(self._pool.free)

    def _found(self, sequence: Sequence) -> list[int]:
        """The cached blocks of a sequence's start; its last token is always left to compute."""
        found = []
        for number in range((sequence.tokens - 1) // self.limits.block_size):
            block = self._pool.cached.get(self._content(sequence, number))
            if block is None:
                break
            found.append(block)
        return found

    def _content(self, sequence: Sequence, number: int) -> Content:
        prefixes = self.workload.prefixes
        end = (number + 1) * self.limits.block_size
        if prefixes is not None and end <= min(prefixes.tokens, sequence.prompt):
            return int(prefixes.group[sequence.index]), number
        return -1 - sequence.index, number
