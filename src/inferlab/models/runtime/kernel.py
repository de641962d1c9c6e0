"""The compiled pass over few tokens: building kernel.cpp, and handing it a model and a cache.

The source is compiled for this machine's processor at first use, into the user's cache folder.
Without a compiler, or for shapes that it does not take, the runtime computes in plain torch.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from inferlab.models.runtime.cache import KVCache
from inferlab.models.runtime.linear import Dense, Int4, Int8, Linear, Projection

if TYPE_CHECKING:
    from inferlab.models.runtime.llama import Layer, Llama

log = logging.getLogger("inferlab.runtime")
SOURCE = Path(__file__).with_name("kernel.cpp")
HEADERS = tuple(SOURCE.with_name(name) for name in ("kernel_vectors.h", "kernel_products.h"))
COMPILERS = ("g++", "c++", "clang++")
FLAGS = "-std=c++17 -O3 -fno-math-errno -fno-trapping-math -fopenmp -shared -fPIC -Wno-psabi"
LANES = 16
EVERYTHING = 2**30
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
INT4_KIND = 3


class _Matrix(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_int32) for name in ("kind", "rows", "group")],
        *[(name, ctypes.c_void_p) for name in ("weights", "scale", "zero", "bias")],
    ]


class _Projection(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_int32) for name in ("ins", "rows", "count")],
        ("parts", _Matrix * 3),
    ]


class _Layer(ctypes.Structure):
    _fields_ = [
        *[
            (name, ctypes.c_void_p)
            for name in ("attention_norm", "mlp_norm", "query_norm", "key_norm")
        ],
        *[(name, _Projection) for name in ("qkv", "output", "gate_up", "down")],
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        *[
            (name, ctypes.c_int32)
            for name in ("hidden", "intermediate", "layers", "heads", "kv_heads", "head_dim")
        ],
        *[(name, ctypes.c_float) for name in ("epsilon", "magnitude")],
        *[(name, ctypes.c_void_p) for name in ("frequencies", "norm", "layer")],
    ]


class _Cache(ctypes.Structure):
    _fields_ = [
        *[
            (name, ctypes.c_int32)
            for name in ("kind", "batch", "slots", "used", "anchors", "recent")
        ],
        *[
            (name, ctypes.c_void_p)
            for name in ("keys", "values", "key_scales", "value_scales", "positions")
        ],
    ]


class Kernel:
    """A model as the compiled code sees it. Keeps alive every tensor that it points to."""

    def __init__(self, model: "Llama", library: ctypes.CDLL) -> None:
        self._library = library
        self._kept: list[Tensor] = []
        size = model.config
        self._layers = (_Layer * size.layers)(*(self._layer(layer) for layer in model.layers))
        self._model = _Model(
            *(size.hidden, size.intermediate, size.layers, size.heads, size.kv_heads),
            *(size.head_dim, size.norm_epsilon, size.rope.magnitude),
            self._floats(size.rope.frequencies),
            self._floats(model.norm),
            ctypes.addressof(self._layers),
        )
        self._head = self._projection(Projection((model.head,)))

    def hidden(
        self, embeddings: Tensor, cache: KVCache, positions: Tensor, slots: Tensor
    ) -> Tensor:
        """Final states of `embeddings` [batch, tokens, hidden], placed in `cache`; fp32."""
        states = embeddings.to(torch.float32, copy=True)
        window = cache.window
        scales = (cache.key_scales, cache.value_scales)
        view = _Cache(
            *(KINDS[cache.keys.dtype], len(slots), cache.slots + 1, cache.used),
            *((window.anchors, window.recent) if window else (0, EVERYTHING)),
            *(cache.keys.data_ptr(), cache.values.data_ptr()),
            *(None if scale is None else scale.data_ptr() for scale in scales),
            cache.positions.data_ptr(),
        )
        self._library.forward(
            ctypes.byref(self._model),
            ctypes.byref(view),
            *(ctypes.c_void_p(one.data_ptr()) for one in (states, positions, slots)),
            slots.numel(),
            torch.get_num_threads(),
        )
        return states

    def logits(self, states: Tensor) -> Tensor:
        """The head on `states` [..., hidden]: [..., vocabulary], fp32."""
        inputs = states.float().contiguous()
        outputs = torch.empty(*states.shape[:-1], self._head.rows)
        self._library.multiply_all(
            ctypes.byref(self._head),
            ctypes.c_void_p(inputs.data_ptr()),
            inputs.numel() // inputs.shape[-1],
            ctypes.c_void_p(outputs.data_ptr()),
            torch.get_num_threads(),
        )
        return outputs

    def _layer(self, layer: "Layer") -> _Layer:
        norms = (layer.attention_norm, layer.mlp_norm, layer.query_norm, layer.key_norm)
        projections = (layer.qkv, layer.output, layer.gate_up, layer.down)
        return _Layer(*map(self._floats, norms), *map(self._projection, projections))

    def _projection(self, projection: Projection) -> _Projection:
        parts = projection.parts
        matrices = [self._matrix(part) for part in parts]
        rows = sum(matrix.rows for matrix in matrices)
        return _Projection(parts[0].ins, rows, len(parts), (_Matrix * 3)(*matrices))

    def _matrix(self, part: Linear) -> _Matrix:
        bias = self._floats(part.bias)
        match part:
            case Dense(weight):
                kind = KINDS[weight.dtype]
                return _Matrix(kind, len(weight), 0, self._pointer(weight), None, None, bias)
            case Int8(codes, scale):
                pointers = (self._pointer(codes), self._floats(scale), None, bias)
                return _Matrix(KINDS[torch.int8], len(codes), 0, *pointers)
            case Int4(codes, scale, zero):
                pointers = (*map(self._pointer, (codes, scale, zero)), bias)
                return _Matrix(INT4_KIND, len(codes), part.group_size, *pointers)

    def _floats(self, tensor: Tensor | None) -> int | None:
        return None if tensor is None else self._pointer(tensor.float())

    def _pointer(self, tensor: Tensor) -> int:
        self._kept.append(tensor.contiguous())
        return self._kept[-1].data_ptr()


def kernel_for(model: "Llama") -> Kernel | None:
    """The compiled pass for a model, or None where plain torch has to do."""
    if not _fits(model):
        return None
    library = compiled()
    return None if library is None else Kernel(model, library)


@functools.cache
def compiled(processor: str = "native") -> ctypes.CDLL | None:
    """The library, built if this machine has none yet; None, said once, when it has no compiler.

    `processor`: what it may use, in the compiler's words (-march), by default all of this one.
    """
    found = [name for name in (os.environ.get("CXX"), *COMPILERS) if name and shutil.which(name)]
    if not found:
        log.info("no C++ compiler found (%s): decoding in plain torch", ", ".join(COMPILERS))
        return None
    command = [found[0], f"-march={processor}", *FLAGS.split()]
    target = _build_folder() / f"kernel-{_fingerprint(command)}.so"
    if not target.is_file() and not _build(command, target):
        return None
    # The OpenMP calls find the runtime that torch has loaded: two pools would fight for the cores.
    return ctypes.CDLL(str(target))


def _build(command: Sequence[str], target: Path) -> bool:
    """Compile aside and rename, so that no process ever loads half a library."""
    with tempfile.TemporaryDirectory(dir=target.parent) as aside:
        library = Path(aside, target.name)
        result = subprocess.run(
            [*command, str(SOURCE), "-o", str(library)], capture_output=True, text=True, check=False
        )
        if result.returncode:
            first = next(iter(result.stderr.splitlines()), "no message")
            log.warning(
                "%s cannot build the kernel: decoding in plain torch (%s)", command[0], first
            )
            return False
        library.rename(target)
    return True


def _build_folder() -> Path:
    """`$XDG_CACHE_HOME/inferlab`, or a new folder where that cannot be written."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "inferlab"
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError:
        home = Path(tempfile.gettempdir())
    return home if os.access(home, os.W_OK) else Path(tempfile.mkdtemp(prefix="inferlab-"))


def _fingerprint(command: Sequence[str]) -> str:
    """Of source, command and processor: code for one processor may not run on another."""
    cpuinfo = Path("/proc/cpuinfo")
    processor = platform.machine() + platform.processor()
    if cpuinfo.is_file():
        lines = cpuinfo.read_text().splitlines()
        processor += "".join(
            sorted({line for line in lines if line.startswith(("flags", "model"))})
        )
    sources = "".join(file.read_text() for file in (SOURCE, *HEADERS))
    content = sources + " ".join(command) + processor
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _fits(model: "Llama") -> bool:
    """Whether the kernel takes the model: whole vectors everywhere, floats it knows."""
    parts = [part for layer in model.layers for one in layer.projections for part in one.parts]
    parts.append(model.head)
    groups = [part.group_size for part in parts if isinstance(part, Int4)]
    return (
        model.config.head_dim % LANES == 0
        and all(part.ins % LANES == 0 for part in parts)
        and all(size % (2 * LANES) == 0 for size in groups)
    )
