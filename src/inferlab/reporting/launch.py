"""How the recommended server is started: the command and environment of the benchmark."""

import shlex
from pathlib import Path

from inferlab.serving.engine import EngineParams, command, environment

PORT = 8000
VARIABLES = (
    "HF_HUB_OFFLINE",
    "VLLM_NO_USAGE_STATS",
    "VLLM_HOST_IP",
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "VLLM_CPU_OMP_THREADS_BIND",
    "VLLM_CPU_INT4_W4A8",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
)
"""Those that `environment` sets for a server; the rest is what it hands on."""


def shell_command(variant: str, engine: EngineParams) -> str:
    """The server of a variant, to paste into a shell in the project's folder."""
    found = environment(engine)
    variables = [f"{name}={shlex.quote(found[name])}" for name in VARIABLES if name in found]
    _, *arguments = command(variant, Path("models", variant), PORT, engine)
    module, options = arguments[:2], arguments[2:]
    lines = [" ".join(["python", *module]), *map(shlex.quote, options)]
    return " \\\n  ".join([*variables, *lines])
