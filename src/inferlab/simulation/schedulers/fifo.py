"""First in, first out."""

from inferlab.simulation.schedulers.waiting import Item, WaitingQueue


class Fifo(WaitingQueue[Item]):
    """By arrival."""

    def key(self, item: Item) -> int:
        return item.arrival
