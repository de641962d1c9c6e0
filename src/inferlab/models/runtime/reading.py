"""Tensors of safetensors files without memory mapping: each is read into memory of its own.

What a mapped file holds is shared with the page cache of the operating system and dropped when
memory is short; what is read belongs to the process. The runtime maps, unless told otherwise.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inferlab.errors import lookup

DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}
LENGTH_BYTES = 8


class ReadTensors(Mapping[str, Tensor]):
    """The tensors of `files` by name, each read anew whenever it is asked for."""

    def __init__(self, files: Sequence[Path]) -> None:
        """Read the headers. The files must be valid, as `store.open_checkpoint` makes sure."""
        self._places: dict[str, tuple[Path, int, dict[str, Any]]] = {}
        for file in files:
            with file.open("rb") as opened:
                length = int.from_bytes(opened.read(LENGTH_BYTES), "little")
                header = json.loads(opened.read(length))
            header.pop("__metadata__", None)
            data = LENGTH_BYTES + length
            self._places |= {name: (file, data, entry) for name, entry in header.items()}

    def __getitem__(self, name: str) -> Tensor:
        """The tensor `name`. Raises InferlabError for a dtype that the runtime has no use for."""
        file, data, entry = self._places[name]
        dtype = lookup(DTYPES, entry["dtype"], f"dtype of {name} in {file}")
        start, end = entry["data_offsets"]
        content = np.fromfile(file, np.uint8, end - start, offset=data + start)
        return torch.from_numpy(content).view(dtype).reshape(entry["shape"])

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
