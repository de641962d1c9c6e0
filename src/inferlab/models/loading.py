"""Load a variant from its folder as a stranger would: through transformers, whatever its format."""

import logging
import os
import warnings
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from inferlab.models.wide import widen
from inferlab.store import Checkpoint, open_checkpoint


def load_model(folder: Path, threads: int) -> PreTrainedModel:
    """The model in bf16 on the CPU, packed weights as its format has them; for inference only.

    Raises InferlabError when the folder is no checkpoint of safetensors.
    """
    checkpoint = open_checkpoint(folder, quantized=True)
    quieten()
    # gptqmodel wants two workers or more, whatever the cores, and refuses to start with less.
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", str(max(threads, 2)))
    method = quantization_method(checkpoint)
    # bitsandbytes alone takes a GPU that is there without being asked to.
    device_map = {"": "cpu"} if method == "bitsandbytes" else None
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, device_map=device_map
    ).eval()
    widen(model)
    if method == "compressed-tensors":
        with torch.inference_mode():
            # It unpacks in the first call of the whole model; callers use its parts.
            model(input_ids=torch.zeros(1, 1, dtype=torch.long))
    return model


def quantization_method(checkpoint: Checkpoint) -> str | None:
    """`quant_method` of the checkpoint's config.json, or None."""
    return checkpoint.config.get("quantization_config", {}).get("quant_method")


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer saved beside the weights."""
    return AutoTokenizer.from_pretrained(folder)


def quieten() -> None:
    """Hide the progress bars and notices of model libraries; warnings of ours stay."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    for name in ("bitsandbytes", "gptqmodel"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
