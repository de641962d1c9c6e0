"""Packed 4-bit weights for a vLLM that cannot compute with them: the same ones in 16 bits."""

import logging
from pathlib import Path

import torch

from inferlab.store import copy_beside_weights, open_checkpoint

log = logging.getLogger(__name__)


def has_int4_kernel() -> bool:
    """Whether vLLM 0.32 has a kernel for GPTQ weights here; on x86 processors it wants AVX-512."""
    return torch.cuda.is_available() or torch.backends.cpu.get_cpu_capability() != "AVX2"


def servable(name: str, model: Path, scratch: Path) -> Path:
    """`model`, or a copy in the new folder `scratch` with GPTQ weights unpacked to bf16.

    The copy computes the same function in the memory and at the speed of 16 bits; a warning says
    so. Made only where vLLM would not start. Raises InferlabError when `model` is no checkpoint.
    """
    config = open_checkpoint(model, quantized=True).config
    method = config.get("quantization_config", {}).get("quant_method")
    if method != "gptq" or has_int4_kernel():
        return model
    from inferlab.models.scoring import load_for_scoring

    log.warning(
        "%s: vLLM has no kernel for 4-bit weights on this processor (no AVX-512), so it serves "
        "them unpacked: memory and speed are those of 16 bits",
        name,
    )
    unpacked = load_for_scoring(model, torch.get_num_threads())
    unpacked.save_pretrained(scratch)
    copy_beside_weights(model, scratch)
    return scratch
