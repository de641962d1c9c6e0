"""Inter-token latencies of a whole run, counted in bins 1 % wide: memory does not grow with it."""

from bisect import bisect_right
from itertools import pairwise

import numpy as np

from inferlab.simulation.cost import PICOSECONDS

_EDGES = [round(PICOSECONDS / 10**6 * 1.01**power) for power in range(2360)]
"""Picoseconds, from a microsecond to four hours."""


class Gaps:
    """A histogram of gaps between the tokens of a request."""

    def __init__(self) -> None:
        self.counts = [0] * (len(_EDGES) + 1)
        self.longest = 0

    def add(self, gap: int, count: int = 1) -> None:
        """`count` gaps of `gap` picoseconds."""
        self.counts[bisect_right(_EDGES, gap)] += count
        if gap > self.longest:
            self.longest = gap

    def add_rising(self, first: int, rise: int, steps: int, count: int) -> None:
        """`count` gaps each of first, first + rise, … picoseconds, `steps` of them; rise >= 0."""
        last = first + rise * (steps - 1)
        low, high = bisect_right(_EDGES, first), bisect_right(_EDGES, last)
        done = 0
        for place in range(low, high):
            below = -(-(_EDGES[place] - first) // rise)
            self.counts[place] += (below - done) * count
            done = below
        self.counts[high] += (steps - done) * count
        if last > self.longest:
            self.longest = last

    @property
    def total(self) -> int:
        """How many gaps."""
        return sum(self.counts)

    def percentile(self, percent: float) -> float:
        """Seconds below which `percent` % of the gaps lie, within 0.5 %; 0 without gaps."""
        if not self.total:
            return 0.0
        reached = np.cumsum(self.counts)
        place = int(np.searchsorted(reached, percent / 100 * reached[-1]))
        bounds = [0, *_EDGES, self.longest]
        low, high = list(pairwise(bounds))[place]
        return min((low + high) / 2, self.longest) / PICOSECONDS
