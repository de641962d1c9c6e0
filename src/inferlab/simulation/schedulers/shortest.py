"""Shortest job first, by an estimate of each request's time on an idle engine."""

from collections.abc import Sequence

from inferlab.simulation.schedulers.waiting import Item, WaitingQueue


class ShortestFirst(WaitingQueue[Item]):
    """By estimated picoseconds; `ageing` is how many of them a picosecond of waiting takes off."""

    def __init__(self, sizes: Sequence[int], ageing: float = 0.0) -> None:
        super().__init__()
        self.sizes = sizes
        self.ageing = ageing

    def key(self, item: Item) -> int:
        return self.sizes[item.index] + int(self.ageing * item.arrival)
