"""Files: Hugging Face checkpoint folders, read one tensor at a time, tensor files, JSON lines.

Weights are in safetensors only; nothing here reads a pickle.
"""

import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
from safetensors.torch import load_file, save_file
from torch import Tensor

from inferlab.errors import InferlabError

WEIGHTS = "model.safetensors"
CARD = "variant.json"
INDEX = "model.safetensors.index.json"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
BESIDE_WEIGHTS = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab.*",
    "merges.txt",
    "spiece.model",
)
"""What a variant takes over unchanged from the checkpoint that it was made from."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder. Tensors are memory mapped and read when they are asked for.

    `changed` holds tensors that stand in for those of the same name and shape in the files.
    """

    folder: Path
    config: dict[str, Any]
    _file_of: dict[str, Path]
    _open: dict[Path, Any] = field(default_factory=dict, repr=False)
    changed: Mapping[str, Tensor] = field(default_factory=dict, repr=False)

    @property
    def names(self) -> list[str]:
        """The tensors' names, sorted."""
        return sorted(self._file_of)

    @property
    def files(self) -> list[Path]:
        """The safetensors files that hold the tensors: one, or the shards of the index."""
        return sorted(set(self._file_of.values()))

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def tensor(self, name: str) -> Tensor:
        """The tensor `name`. Raises InferlabError when the checkpoint has none of that name."""
        return self.changed[name] if name in self.changed else self._handle(name).get_tensor(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the tensor `name`, without reading it."""
        return tuple(self._handle(name).get_slice(name).get_shape())

    def _handle(self, name: str) -> Any:
        if name not in self._file_of:
            raise InferlabError(f"{self.folder} holds no tensor {name!r}")
        file = self._file_of[name]
        if file not in self._open:
            self._open[file] = _opened(file)
        return self._open[file]


def open_checkpoint(folder: Path, quantized: bool = False) -> Checkpoint:
    """Check a checkpoint folder and open it; a quantized one only when `quantized` is set.

    Raises InferlabError when config.json or the safetensors are missing or unreadable, when a
    shard that the index names is missing, or when the weights are pickled or already quantized.
    """
    config = _config(folder)
    if "quantization_config" in config and not quantized:
        method = config["quantization_config"].get("quant_method", "an unknown method")
        raise InferlabError(
            f"{folder} is already quantized ({method}); give the 16- or 32-bit original"
        )
    return Checkpoint(folder, config, _files(folder))


def save_checkpoint(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], aside_from: Path
) -> None:
    """Write a checkpoint into the existing `folder`: model.safetensors, and config.json last.

    The tokenizer and generation settings are copied from the checkpoint `aside_from`.
    """
    copy_beside_weights(aside_from, folder)
    save_tensors(folder / WEIGHTS, tensors)
    write_json(folder / "config.json", config)


def copy_beside_weights(source: Path, target: Path) -> None:
    """Copy the files of a checkpoint folder that are neither weights nor config.json."""
    for pattern in BESIDE_WEIGHTS:
        for file in filter(Path.is_file, sorted(source.glob(pattern))):
            shutil.copyfile(file, target / file.name)


def save_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file that transformers and vLLM read as torch tensors."""
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, file, metadata={"format": "pt"})


def load_tensors(file: Path) -> dict[str, Tensor]:
    """Read a whole safetensors file. Raises InferlabError when it is missing or broken."""
    try:
        return load_file(file)
    except (OSError, safetensors.SafetensorError) as error:
        raise InferlabError(f"{file} is not a readable safetensors file: {error}") from None


def write_card(folder: Path, bits_per_weight: float, packed: bool) -> None:
    """Say beside a variant's weights how they are stored; `packed` is false for simulated ones."""
    card = {"bits_per_weight": bits_per_weight, "packed": int(packed)}
    (folder / CARD).write_text(json.dumps(card) + "\n")


def read_card(folder: Path) -> dict[str, float]:
    """`bits_per_weight` and `packed` of a variant; one without a card is a plain checkpoint."""
    if (folder / CARD).is_file():
        return read_json(folder / CARD)
    checkpoint = open_checkpoint(folder, quantized=True)
    largest = max((checkpoint.tensor(name) for name in checkpoint.names), key=Tensor.numel)
    return {"bits_per_weight": 8.0 * largest.element_size(), "packed": 1}


def folder_bytes(folder: Path) -> int:
    """Bytes of all files of a folder, subfolders included."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object. Raises InferlabError when it is missing or holds anything else."""
    try:
        content = json.loads(file.read_text())
    except FileNotFoundError:
        raise InferlabError(f"{file} is missing; run the stage that writes it") from None
    except ValueError as error:
        raise InferlabError(f"{file} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise InferlabError(f"{file} must hold an object; found {type(content).__name__}")
    return content


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write an object as indented JSON."""
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Read JSON lines, one object a line. Raises InferlabError naming the first bad line."""
    rows = []
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise InferlabError(f"{file}:{number} is not JSON: {error}") from None
    return rows


def write_rows(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write JSON lines, one object a line."""
    with file.open("w", encoding="utf-8") as lines:
        lines.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    if not file.is_file():
        raise InferlabError(
            f"{folder} is no checkpoint: it has no config.json; "
            "give a Hugging Face folder with config.json, safetensors and tokenizer"
        )
    return read_json(file)


def _files(folder: Path) -> dict[str, Path]:
    """Which safetensors file of the folder holds which tensor."""
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map", {})
        missing = {name for name in weight_map.values() if not (folder / name).is_file()}
        if missing:
            raise InferlabError(
                f"{folder} lacks {len(missing)} of the shards that {INDEX} names, "
                f"for instance {min(missing)}; copy the whole folder"
            )
        return {name: folder / shard for name, shard in weight_map.items()}
    if not (folder / WEIGHTS).is_file():
        pickled = sorted(file.name for mask in PICKLED for file in folder.glob(mask))
        if pickled:
            raise InferlabError(
                f"{folder} holds pickled weights only ({pickled[0]}), which are never loaded; "
                "save it as safetensors first"
            )
        raise InferlabError(f"{folder} is no checkpoint: it has neither {WEIGHTS} nor {INDEX}")
    names = _opened(folder / WEIGHTS).keys()
    return dict.fromkeys(names, folder / WEIGHTS)


def _opened(file: Path) -> Any:
    try:
        return safetensors.safe_open(file, framework="pt")
    except safetensors.SafetensorError as error:
        raise InferlabError(f"{file} is not a readable safetensors file: {error}") from None
