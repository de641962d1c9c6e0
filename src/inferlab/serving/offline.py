"""vLLM as a library, in a process that ends with the work and has imported nothing else before it.

vLLM takes threads, memory and signal handlers of the process that it lives in. As it starts it also
looks into every module that is there already, and trips over one of numba's (0.32).
"""

import os
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from joblib.externals.loky import ProcessPoolExecutor

from inferlab.errors import InferlabError

Result = TypeVar("Result")

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
"""No hub, no telemetry, loopback only, threads where the system puts them, a single process."""


def alone(function: Callable[..., Result], *arguments: Any, told: str) -> Result:
    """What `function` returns for `arguments` in a new process with ENVIRONMENT.

    The process imports the module of `function`, not that of the program, as multiprocessing's
    would. Raises InferlabError with the text `told` when it dies.
    """
    with ProcessPoolExecutor(1) as pool:
        try:
            return pool.submit(_prepared, function, arguments).result()
        except BrokenProcessPool:
            raise InferlabError(told) from None


def _prepared(function: Callable[..., Result], arguments: tuple[Any, ...]) -> Result:
    os.environ.update(ENVIRONMENT)
    return function(*arguments)
