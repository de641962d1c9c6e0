"""vLLM's own scheduler, which also writes down what each step computed and how long it took.

Given to the server as `--scheduler-cls`; runs in the engine's process. Decisions are vLLM's. Times
are of the monotonic clock, which all processes of a machine share.
"""

import time
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from inferlab.simulation.cost import read


class RecordingScheduler(Scheduler):
    """Appends a line for each arrival and each step to the file `step_log` of additional_config.

    Lines are `add,arrival` and
    `step,start,end,tokens,sequences,context,half_pairs,preempted,first_tokens,left`, the last being
    how many requests are left. A request arrives at the front end, whose wall clock vLLM stamps it
    by; the scheduler gets it only once the step at hand is over.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        path = Path(self.vllm_config.additional_config["step_log"])
        self._log = path.open("a", buffering=1)
        self._scheduled: list[Request] = []
        self._step: list[float] = []

    def add_request(self, request: Request) -> None:
        arrival = request.arrival_time - time.time() + time.perf_counter()
        self._log.write(f"add,{arrival!r}\n")
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        started = time.perf_counter()
        output = super().schedule(*args, **kwargs)
        tokens = context = half_pairs = 0
        self._scheduled = [self.requests[name] for name in output.num_scheduled_tokens]
        for request in self._scheduled:
            new = output.num_scheduled_tokens[request.request_id]
            cached, pairs = read(new, request.num_computed_tokens - new)
            tokens += new
            context += cached
            half_pairs += pairs
        preempted = len(output.preempted_req_ids or ())
        self._step = [started, tokens, len(self._scheduled), context, half_pairs, preempted]
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        silent = [one for one in self._scheduled if not one.num_output_tokens]
        result = super().update_from_output(scheduler_output, model_runner_output)
        first_tokens = sum(one.num_output_tokens > 0 for one in silent)
        left = sum(self.get_request_counts())
        started, *work = self._step
        if work[0]:
            fields = [started, time.perf_counter(), *work, first_tokens, left]
            self._log.write(f"step,{','.join(map(repr, fields))}\n")
        return result
