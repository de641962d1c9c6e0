"""Step costs of GPUs from published benchmarks of static batches.

A batch of B sequences with P tokens in and O out takes a step for its prompts and O − 1 more: its
latency is a sum of the same terms as a step's cost, so that coefficients follow by least squares.
The rows of `published_steps.csv` are Llama-3-8B in fp16 on one GPU with vLLM, each with its source
(LLM-Inference-Bench, arXiv:2411.00136). Input and output are equally long there, so the rows of one
output token are what tells prefill from decoding. The attention of a prompt cannot be told from its
matrix products by them: it is charged at the same floating-point rate.
"""

from dataclasses import replace
from importlib import resources

import numpy as np
import pandas as pd

from inferlab.errors import lookup
from inferlab.simulation.fit import Fit, fit

PAIR_OVER_TOKEN = 4 * 32 * 4096 / (2 * 8.03e9)
"""Floating-point operations of a query-key pair (scores, values; 32 layers of width 4,096) over a
token's (two a parameter)."""


def published_fit(hardware: str) -> Fit:
    """Coefficients of one GPU. Raises InferlabError naming the known ones for any other."""
    file = resources.files("inferlab.simulation") / "published_steps.csv"
    with resources.as_file(file) as path:
        rows = pd.read_csv(path)
    lookup(dict.fromkeys(rows["hardware"]), hardware, "hardware")
    rows = rows[rows["hardware"] == hardware]
    batch, prompt, output = (rows[name].to_numpy(float) for name in ("batch", "input", "output"))
    value = rows["value"].to_numpy(float)
    is_rate = (rows["metric"] == "total_tokens_per_s").to_numpy()
    seconds = np.where(is_rate, batch * (prompt + output) / value, value / 1000)
    found = fit(_terms(batch, prompt, output), seconds)
    pair = PAIR_OVER_TOKEN * found.seconds["token"]
    return replace(found, seconds=found.seconds | {"pair": pair})


def _terms(batch: np.ndarray, prompt: np.ndarray, output: np.ndarray) -> np.ndarray:
    """How often each term but `pair` is paid in a whole batch: [rows, terms]."""
    decode = output - 1
    context = batch * decode * (prompt + (decode - 1) / 2)
    tokens = batch * (prompt + decode) + PAIR_OVER_TOKEN * batch * prompt**2 / 2
    return np.stack([1 + decode, tokens, batch * (1 + decode), context], axis=1)
