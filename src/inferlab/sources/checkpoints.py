"""Model folders from what a source hands over: safetensors stay, GGUF is dequantized."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from inferlab import store
from inferlab.errors import InferlabError
from inferlab.models.adapters import model_prefix

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def write_language_model(source: Path, folder: Path) -> str:
    """Write a causal language model as a bf16 checkpoint; returns where its weights came from.

    `source` is a checkpoint folder, a GGUF file, or a folder with one GGUF file. Raises
    InferlabError on a folder that is no checkpoint, pickled or quantized weights, no tokenizer.
    """
    files = sorted(source.glob("*.gguf")) if source.is_dir() else [source]
    if len(files) == 1 and files[0].suffix == ".gguf":
        return _from_gguf(files[0], folder)
    return _copy(source, folder, torch.bfloat16, model_prefix)


def write_encoder(source: Path, folder: Path) -> str:
    """Write an encoder as a checkpoint in the dtype that it was published in."""
    return _copy(source, folder, None, lambda checkpoint: "")


def _copy(
    source: Path,
    folder: Path,
    dtype: torch.dtype | None,
    prefix_of: Callable[[store.Checkpoint], str],
) -> str:
    """Copy a checkpoint shard by shard, with floating-point tensors cast to `dtype`."""
    checkpoint = store.open_checkpoint(source)
    prefix = prefix_of(checkpoint)
    if not any((source / name).is_file() for name in TOKENIZER_FILES):
        raise InferlabError(
            f"{source} has no tokenizer; copy tokenizer.json and tokenizer_config.json beside it"
        )
    store.copy_beside_weights(source, folder)
    published: Counter[str] = Counter()
    for file in checkpoint.files:
        tensors = store.load_tensors(file)
        for name, tensor in tensors.items():
            if tensor.is_floating_point():
                published[str(tensor.dtype).removeprefix("torch.")] += tensor.numel()
                tensors[name] = tensor.to(dtype or tensor.dtype)
        renamed = {f"{prefix}{name}": tensor for name, tensor in tensors.items()}
        store.save_tensors(folder / file.name, renamed)
    config = {key: value for key, value in checkpoint.config.items() if key != "torch_dtype"}
    main = published.most_common(1)[0][0]
    config["dtype"] = str(dtype).removeprefix("torch.") if dtype else main
    _copy_index(source, folder, prefix)
    store.write_json(folder / "config.json", config)
    return f"published in {main}, stored in {config['dtype']}"


def _copy_index(source: Path, folder: Path, prefix: str) -> None:
    if not (source / store.INDEX).is_file():
        return
    index = store.read_json(source / store.INDEX)
    index["weight_map"] = {f"{prefix}{name}": file for name, file in index["weight_map"].items()}
    shards = [folder / name for name in set(index["weight_map"].values())]
    index["metadata"] = {"total_size": sum(shard.stat().st_size for shard in shards)}
    store.write_json(folder / store.INDEX, index)


def _from_gguf(file: Path, folder: Path) -> str:
    """Dequantize a GGUF file to a bf16 checkpoint with its tokenizer and chat template."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.integrations.gguf.reader import GgufHeader

    try:
        header = GgufHeader.from_file(str(file))
    except ValueError as error:
        raise InferlabError(f"{file} is not a readable GGUF file: {error}") from None
    place = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    # With dequantize=True transformers drops the quantizer, which save_pretrained would refuse.
    model = AutoModelForCausalLM.from_pretrained(
        **place, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**place).save_pretrained(folder)
    types = Counter(GGMLQuantizationType(tensor.ggml_type) for tensor in header.tensors)
    blocks = [
        f"{kind.name}, {count} tensors, blocks of {GGML_QUANT_SIZES[kind][0]}"
        for kind, count in types.most_common()
    ]
    return f"dequantized from GGUF ({'; '.join(blocks)}), stored in bfloat16"
