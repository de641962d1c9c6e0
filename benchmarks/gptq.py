"""Our GPTQ beside GPTQModel: perplexity, time and peak memory on the same calibration text.

`python -m benchmarks.gptq`, in a project folder where `dvc repro quantize` has run. Each
measurement is a process of its own. Own time is split into what is done once a model (calibrate)
and what every further point of a sweep costs (quantize).
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
from inferlab.calibration.capture import run_blocks
from inferlab.calibration.statistics import Calibration
from inferlab.evaluation.perplexity import perplexity
from inferlab.models.loading import load_model, quieten
from inferlab.quantization.driver import Job
from inferlab.quantization.methods import METHODS
from inferlab.store import load_tensors, open_checkpoint, write_json

WINDOWS = Path("data/windows/calibration.safetensors")
OWN_SIZES, PEER_SIZES = (8, 16, 64), (16, 64)


def calibrate(folder: str, windows: int) -> dict[str, float]:
    """Write the statistics of the first `windows` windows into `folder`."""
    checkpoint = open_checkpoint(Path("models/base"))
    tokens = load_tensors(WINDOWS)["input_ids"][:windows]
    calibration = Calibration(Path(folder))
    for number, observed in enumerate(run_blocks(checkpoint, tokens, batch=4)):
        found = {name: inputs.statistics() for name, inputs in observed.items()}
        calibration.save(number, found)
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
    """Measure all sizes and write metrics/benchmarks/gptq.json."""
    result: dict[str, float] = {}

    def record(**values: float) -> None:
        result.update({name: round(value, 3) for name, value in values.items()})
        print(values, file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(dir="data") as scratch:
        for size in OWN_SIZES:
            folder = Path(scratch) / f"calibration_{size}"
            folder.mkdir()
            once = measured(calibrate, str(folder), size)
            record(**{f"own_calibrate_s_{size}": once["seconds"]})
            for kind in ("symmetric", "asymmetric"):
                output = Path(scratch) / f"{kind}_{size}"
                output.mkdir()
                changes = {"symmetric": kind == "symmetric"}
                point = measured(quantize, "gptq", str(folder), str(output), changes)
                record(
                    **{
                        f"own_{kind}_perplexity_{size}": measured(score, str(output))["perplexity"],
                        f"own_{kind}_quantize_s_{size}": point["seconds"],
                        f"own_{kind}_peak_gib_{size}": max(once["peak_gib"], point["peak_gib"]),
                    }
                )
        for size in PEER_SIZES:
            output = Path(scratch) / f"gptqmodel_{size}"
            output.mkdir()
            folder = Path(scratch) / f"calibration_{size}"
            peer = measured(quantize, "gptqmodel", str(folder), str(output), {})
            record(
                **{
                    f"gptqmodel_perplexity_{size}": measured(score, str(output))["perplexity"],
                    f"gptqmodel_s_{size}": peer["seconds"],
                    f"gptqmodel_peak_gib_{size}": peer["peak_gib"],
                }
            )
    largest = max(PEER_SIZES)
    own = result[f"own_calibrate_s_{largest}"] + result[f"own_symmetric_quantize_s_{largest}"]
    result["own_over_gptqmodel_time"] = round(own / result[f"gptqmodel_s_{largest}"], 3)
    Path("metrics/benchmarks").mkdir(parents=True, exist_ok=True)
    write_json(Path("metrics/benchmarks/gptq.json"), run.checked(result, "gptq.json"))


if __name__ == "__main__":
    main()
