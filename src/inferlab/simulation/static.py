"""Static batching: a batch is filled, padded to its longest, and held until its longest has ended.

What engines did before iteration-level batching (Yu et al., Orca, OSDI 2022, section 2). Tokens are
streamed as they come, so that a request's first token is that of its batch; but it is over, and its
place free, only when the batch is.
"""

import numpy as np

from inferlab.errors import InferlabError
from inferlab.simulation.cost import PICOSECONDS, StepCost
from inferlab.simulation.limits import Limits
from inferlab.simulation.record import Record
from inferlab.simulation.workload import Workload


def simulate_static(
    workload: Workload, cost: StepCost, limits: Limits, batch: int, wait_s: float
) -> Record:
    """Serve a workload in batches of `batch`, first come first served.

    A batch starts when it is full, or when its first request has waited `wait_s` seconds; it is
    cut short where its padded cache would not fit the pool. Raises InferlabError for a closed
    loop, whose clients could never fill a batch larger than they are many.
    """
    if workload.clients is not None:
        raise InferlabError("static batching waits for arrivals; give it an open workload")
    record = Record.of(workload)
    record.arrival[:] = workload.arrivals
    fits = [
        limits.blocks_of(int(p) + int(o) - 1) <= limits.blocks
        for p, o in zip(workload.prompts, workload.outputs, strict=True)
    ]
    waiting = np.flatnonzero(fits)
    record.rejected = len(workload) - len(waiting)
    arrivals = workload.arrivals[waiting]
    wait = round(wait_s * PICOSECONDS)
    now = place = 0
    while place < len(waiting):
        ready = int(arrivals[place]) + wait
        if place + batch <= len(waiting):
            ready = min(ready, int(arrivals[place + batch - 1]))
        now = max(now, ready)
        arrived = int(np.searchsorted(arrivals, now, side="right"))
        members = _fitting(waiting[place : min(arrived, place + batch)], workload, limits)
        now = _serve(record, members, cost, now)
        place += len(members)
    record.check()
    return record


def _fitting(members: np.ndarray, workload: Workload, limits: Limits) -> np.ndarray:
    """The first members [batch] whose padded cache fits the pool, at least one."""
    while len(members) > 1:
        longest = int(workload.prompts[members].max() + workload.outputs[members].max()) - 1
        if len(members) * limits.blocks_of(longest) <= limits.blocks:
            break
        members = members[:-1]
    return members


def _serve(record: Record, members: np.ndarray, cost: StepCost, start: int) -> int:
    """Write down what becomes of the members of a batch; returns when it ends."""
    count = len(members)
    prompts, outputs = record.workload.prompts[members], record.workload.outputs[members]
    prompt = int(prompts.max())
    first = start + cost.step(count * prompt, count, 0, count * prompt * prompt)
    decode = cost.step(count, count, count * prompt, 0)
    rise = cost.context * count

    def after(steps: int) -> int:
        return first + decode * steps + rise * (steps * (steps - 1) // 2)

    done = 0
    for active, steps in _segments(outputs):
        record.gaps.add_rising(decode + rise * done, rise, steps, active)
        done += steps
    end = after(done)
    record.first[members] = first
    record.last[members] = [after(int(output) - 1) for output in outputs]
    record.finish[members] = end
    record.steps += 1 + done
    record.tokens_out += int(outputs.sum())
    record.padding += count * (prompt + done + 1) - int(prompts.sum() + outputs.sum())
    waited = count * start - int(record.arrival[members].sum(dtype=object))
    record.present += waited + count * (end - start)
    return end


def _segments(outputs: np.ndarray) -> list[tuple[int, int]]:
    """(sequences still active, decode steps) from one end of an output to the next."""
    steps = np.sort(outputs) - 1
    lengths = np.diff(steps, prepend=0).tolist()
    return [(len(steps) - ended, length) for ended, length in enumerate(lengths) if length]
