"""The queue in front of an engine. A policy is an order by one key that never changes.

Ageing that grows evenly with the time waited moves every waiting request alike, so it needs no
sorting again: subtracting a·(now − arrival) from a size orders as adding a·arrival to it does.
"""

import heapq
from abc import ABC, abstractmethod
from typing import Generic, Protocol, TypeVar


class Queued(Protocol):
    """What waits: the place of its request in the workload, and when it arrived."""

    index: int
    arrival: int


Item = TypeVar("Item", bound=Queued)


class WaitingQueue(ABC, Generic[Item]):
    """Requests by rising key. A preempted one comes back under its old key."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Item]] = []

    @abstractmethod
    def key(self, item: Item) -> int:
        """The smaller, the sooner; picoseconds."""

    def push(self, item: Item) -> None:
        """Let `item` wait."""
        heapq.heappush(self._heap, (self.key(item), item.index, item))

    def head(self) -> Item:
        """The next one, which stays."""
        return self._heap[0][2]

    def pop(self) -> Item:
        """The next one, which leaves."""
        return heapq.heappop(self._heap)[2]

    def __len__(self) -> int:
        return len(self._heap)
