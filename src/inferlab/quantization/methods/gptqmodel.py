"""The GPTQModel library with its own defaults, on the same calibration text as our GPTQ."""

import os
from typing import Annotated, Literal

import torch
from pydantic import Field

from inferlab.errors import InferlabError
from inferlab.models.adapters import layer_names, linear_groups
from inferlab.params import section
from inferlab.quantization.driver import (
    Job,
    Report,
    check_group_size,
    errors_against_rtn,
    stored_bits_per_weight,
)
from inferlab.quantization.formats import read_gptq
from inferlab.store import copy_beside_weights, open_checkpoint


@section
class GptqModelParams:
    """The section `quantize.gptqmodel`."""

    bits: Literal[2, 4, 8]
    group_size: Annotated[int, Field(gt=0)]
    symmetric: bool
    batch: Annotated[int, Field(gt=0)]


def run(job: Job, params: GptqModelParams) -> Report:
    """Let the library calibrate, quantize and save; measure the result as ours is measured."""
    groups = linear_groups(job.checkpoint)
    check_group_size(job.checkpoint, groups, params.group_size)
    # The library wants two workers or more, whatever the cores, and refuses to start with less.
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", str(max(job.threads, 2)))
    from gptqmodel import GPTQModel, QuantizeConfig

    config = QuantizeConfig(bits=params.bits, group_size=params.group_size, sym=params.symmetric)
    model = GPTQModel.load(str(job.checkpoint.folder), config, dtype=torch.bfloat16)
    windows = job.calibration_windows().long()
    examples = [{"input_ids": w, "attention_mask": torch.ones_like(w)} for w in windows]
    model.quantize(examples, batch_size=params.batch)
    model.save(str(job.output))
    copy_beside_weights(job.checkpoint.folder, job.output)
    return _report(job, params)


def _report(job: Job, params: GptqModelParams) -> Report:
    saved = open_checkpoint(job.output, quantized=True)
    version = 2 if saved.config["quantization_config"].get("checkpoint_format") == "gptq_v2" else 1

    def dequantized(layer: str) -> torch.Tensor:
        parts = ("qweight", "qzeros", "scales", "g_idx")
        tensors = {f"{layer}.{part}": saved.tensor(f"{layer}.{part}") for part in parts}
        if (tensors[f"{layer}.g_idx"].diff() < 0).any():
            raise InferlabError(f"gptqmodel saved {layer} with an activation order of its own")
        return read_gptq(tensors, layer, params.bits, version).dequantize()

    ratio = errors_against_rtn(job, dequantized, params.bits, params.group_size, params.symmetric)
    layers = len(layer_names(linear_groups(job.checkpoint)))
    return Report(layers, 0, ratio, stored_bits_per_weight(job), packed=True)
