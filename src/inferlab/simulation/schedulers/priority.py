"""Classes of requests, the lower number first; first in, first out within a class."""

from collections.abc import Sequence

from inferlab.simulation.schedulers.waiting import Item, WaitingQueue

STRICT = 10**24
"""Picoseconds, longer than any run."""


class Priority(WaitingQueue[Item]):
    """By class. With `ageing` picoseconds of waiting a request rises by one class; None: never."""

    def __init__(self, classes: Sequence[int], ageing: int | None = None) -> None:
        super().__init__()
        self.classes = classes
        self.step = STRICT if ageing is None else ageing

    def key(self, item: Item) -> int:
        return self.classes[item.index] * self.step + item.arrival
