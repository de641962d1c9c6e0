"""NF4 by bitsandbytes: 4-bit codes on the quantiles of a normal distribution, no calibration.

Dettmers et al. 2023, "QLoRA" (arXiv:2305.14314), section 3.
"""

from typing import Literal

import torch

from inferlab.models.adapters import layer_names, linear_groups
from inferlab.params import section
from inferlab.quantization.driver import Job, Report, errors_against_rtn, stored_bits_per_weight
from inferlab.store import copy_beside_weights

BLOCK = 64


@section
class Nf4Params:
    """The section `quantize.nf4`."""

    bits: Literal[4]
    double_quantization: bool


def run(job: Job, params: Nf4Params) -> Report:
    """Load through transformers in 4 bits, on the CPU, and save what was loaded."""
    import bitsandbytes
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=params.double_quantization,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model = AutoModelForCausalLM.from_pretrained(
        job.checkpoint.folder,
        quantization_config=config,
        dtype=torch.bfloat16,
        # A GPU that is there would be taken, while the weights compared with are on the CPU.
        device_map={"": "cpu"},
    )
    model.save_pretrained(job.output)
    copy_beside_weights(job.checkpoint.folder, job.output)

    def dequantized(layer: str) -> torch.Tensor:
        weight = model.get_submodule(layer).weight
        return bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state)

    ratio = errors_against_rtn(job, dequantized, params.bits, BLOCK, symmetric=True)
    layers = len(layer_names(linear_groups(job.checkpoint)))
    return Report(layers, 0, ratio, stored_bits_per_weight(job), packed=True)
