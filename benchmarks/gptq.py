"""Our GPTQ beside GPTQModel: perplexity, time and peak memory on the same calibration text.

`python -m benchmarks.gptq`, in a project folder where `dvc repro quantize` has run. Each
measurement is a process of its own. Own time is split into what is done once a model (calibrate)
and what every further point of a sweep costs (quantize). `own_plain` takes all tokens alike, as the
library does, so that its calibration needs no gradients.
"""

import dataclasses
import multiprocessing
import resource
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from inferlab import params, run
from inferlab.calibration import capture
from inferlab.calibration.statistics import Calibration
from inferlab.evaluation.perplexity import perplexity
from inferlab.models.loading import load_model, quieten
from inferlab.quantization.driver import Job
from inferlab.quantization.methods import METHODS
from inferlab.store import load_tensors, open_checkpoint, write_json

WINDOWS = Path("data/windows/calibration.safetensors")
CALIBRATIONS = {"own": True, "own_plain": False}
"""Ours, and whether tokens are weighed by the loss' gradient."""
VARIANTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "own_symmetric": ("gptq", "own", {"symmetric": True, "token_weights": "gradient"}),
    "own_asymmetric": ("gptq", "own", {"symmetric": False, "token_weights": "gradient"}),
    "own_plain": ("gptq", "own_plain", {"symmetric": True, "token_weights": "none"}),
    "gptqmodel": ("gptqmodel", "own", {}),
}
"""Method, calibration, and what differs from the method's section of params.yaml."""


def calibrate(folder: str, gradients: bool) -> dict[str, float]:
    """Write the statistics of the windows that the stage calibrate reads into `folder`."""
    checkpoint = open_checkpoint(Path("models/base"))
    config = params.load("calibrate", capture.CalibrateParams)
    config = dataclasses.replace(config, gradients=gradients)
    tokens = load_tensors(WINDOWS)["input_ids"][: config.windows]
    capture.calibrate(checkpoint, tokens, config, Calibration(Path(folder)))
    return {}


def quantize(
    method: str, statistics: str, output: str, changes: dict[str, Any]
) -> dict[str, float]:
    """Make the variant `method`, its params changed by `changes`, in `output`."""
    chosen = METHODS[method]
    config = dataclasses.replace(params.load(f"quantize.{method}", chosen.params), **changes)
    checkpoint = open_checkpoint(Path("models/base"))
    threads = torch.get_num_threads()
    chosen.run(
        Job(checkpoint, Calibration(Path(statistics)), WINDOWS, Path(output), threads), config
    )
    return {}


def score(folder: str) -> dict[str, float]:
    """Token perplexity of a variant on the held-out windows."""
    model = load_model(Path(folder), torch.get_num_threads())
    heldout = load_tensors(Path("data/windows/heldout.safetensors"))
    return {"perplexity": perplexity(model, heldout, batch=2).token}


def measured(function: Any, *arguments: Any) -> dict[str, float]:
    """What `function` returns, with its seconds and the peak memory of its process in GiB."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_timed, function, *arguments).result()


def _timed(function: Any, *arguments: Any) -> dict[str, float]:
    quieten()
    start = time.perf_counter()
    found = function(*arguments)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {"seconds": time.perf_counter() - start, "peak_gib": peak, **found}


def main() -> None:
    """Measure both and write metrics/benchmarks/gptq.json."""
    windows = params.load("calibrate", capture.CalibrateParams).windows
    result: dict[str, float] = {"windows": windows}
    with tempfile.TemporaryDirectory(dir="data") as scratch:
        for name, gradients in CALIBRATIONS.items():
            statistics = Path(scratch, f"{name}_statistics")
            statistics.mkdir()
            once = measured(calibrate, str(statistics), gradients)
            result |= {
                f"{name}_calibrate_s": once["seconds"],
                f"{name}_calibrate_peak_gib": once["peak_gib"],
            }
        for name, (method, calibration, changes) in VARIANTS.items():
            statistics, output = Path(scratch, f"{calibration}_statistics"), Path(scratch, name)
            output.mkdir()
            made = measured(quantize, method, str(statistics), str(output), changes)
            result |= {
                f"{name}_quantize_s": made["seconds"],
                f"{name}_peak_gib": made["peak_gib"],
                f"{name}_perplexity": measured(score, str(output))["perplexity"],
            }
            print(result, file=sys.stderr, flush=True)
    peer = result["gptqmodel_quantize_s"]
    weighted = result["own_calibrate_s"] + result["own_symmetric_quantize_s"]
    plain = result["own_plain_calibrate_s"] + result["own_plain_quantize_s"]
    result |= {
        "own_over_gptqmodel_time": weighted / peer,
        "own_plain_over_gptqmodel_time": plain / peer,
        "own_sweep_point_over_gptqmodel_time": result["own_symmetric_quantize_s"] / peer,
    }
    Path("metrics/benchmarks").mkdir(parents=True, exist_ok=True)
    write_json(Path("metrics/benchmarks/gptq.json"), run.checked(result, "gptq.json"))


if __name__ == "__main__":
    main()
