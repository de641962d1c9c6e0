"""33.28: memory, speed, perplexity and capacity of the lean runtime, each feature and all."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor
from transformers import AutoConfig

from inferlab import params as parameters
from inferlab.errors import InferlabError
from inferlab.kvcache.architecture import model_without_memory
from inferlab.kvcache.capacity import DoesNotFitError, Plan, capacity
from inferlab.kvcache.features import TRANSFORMERS, Engine, Features, load_engine, runtime_arms
from inferlab.kvcache.shape import Architecture
from inferlab.models.runtime.cache import CHUNK, Window
from inferlab.models.runtime.kernel import compiled
from inferlab.profiling.residence import Residence, peak_residence
from inferlab.run import progress
from inferlab.store import open_checkpoint

MIB = 2**20
Positive = Annotated[int, Field(gt=0)]
Arms = dict[str, Features | None]


@parameters.section
class StudyWindow:
    """How far a token sees, as `Window`."""

    size: int
    anchors: int

    def __post_init__(self) -> None:
        """Raise ValueError where `Window` refuses."""
        try:
            Window(self.size, self.anchors)
        except InferlabError as error:
            raise ValueError(str(error)) from None


@parameters.section
class MemoryEfficientParams:
    """The section `memory_efficient`."""

    window: StudyWindow
    heldout_windows: Positive
    batch: Positive
    prompt_tokens: Positive
    new_tokens: Annotated[int, Field(gt=0, le=CHUNK)]
    rounds: Positive
    gpu: str
    models: tuple[str, ...]
    length: Positive
    reserve_share: Annotated[float, Field(ge=0, lt=1)]

    def arms(self) -> Arms:
        """What is compared, by name; the plain implementation first."""
        return {TRANSFORMERS: None, **runtime_arms(Window(self.window.size, self.window.anchors))}

    def prompts(self, windows: Tensor) -> Tensor:
        """The first tokens of held-out windows [windows, length]: [batch, prompt_tokens].

        Raises InferlabError when there are fewer windows or they are shorter.
        """
        wanted = {"heldout_windows": self.heldout_windows, "batch": self.batch}
        for name, count in wanted.items():
            if count > len(windows):
                raise InferlabError(
                    f"memory_efficient.{name} is {count}, but only {len(windows)} held-out windows "
                    "were prepared (params.yaml: prepare.heldout_windows)"
                )
        if self.prompt_tokens > windows.shape[1]:
            raise InferlabError(
                f"memory_efficient.prompt_tokens is {self.prompt_tokens}, but held-out windows "
                f"have {windows.shape[1]} tokens (params.yaml: prepare.window_length)"
            )
        return windows[: self.batch, : self.prompt_tokens]


def peak_memory(
    arms: Arms, folders: Mapping[str, Path], prompts: Tensor, new_tokens: int, threads: int
) -> dict[str, tuple[Residence, int]]:
    """Peaks of each arm in a process of its own that loads, prefills and decodes; cache bytes."""
    files = [file for one in folders.values() for file in open_checkpoint(one, True).files]
    return {
        name: peak_residence(
            files,
            _prepared,
            *(features, folders, prompts.tolist(), new_tokens, threads),
            preload=[__name__],
        )
        for name, features in progress(arms.items(), "memory")
    }


def _prepared(
    features: Features | None,
    folders: Mapping[str, Path],
    prompts: list[list[int]],
    new_tokens: int,
    threads: int,
) -> Callable[[], int]:
    """In the child: what the libraries take by themselves is there before anything is measured."""
    torch.set_num_threads(threads)
    warm = torch.ones(1024, 1024, dtype=torch.bfloat16)
    _ = warm @ warm
    model_without_memory(AutoConfig.from_pretrained(folders["bf16"]))
    compiled()
    held: list[Engine] = []

    def operation() -> int:
        engine = load_engine(features, folders, threads)
        held.append(engine)  # the last look at this process must still find the pages it mapped
        engine.start(torch.tensor(prompts), new_tokens)
        engine.decode(new_tokens)
        return engine.cache_bytes

    return operation


def load_engines(arms: Arms, folders: Mapping[str, Path], threads: int) -> dict[str, Engine]:
    """Every arm, in this process."""
    return {name: load_engine(features, folders, threads) for name, features in arms.items()}


def decode_speeds(
    engines: Mapping[str, Engine], prompt: Tensor, new_tokens: int, rounds: int
) -> dict[str, float]:
    """Tokens a second of each engine after `prompt` [1, tokens], the median of `rounds`.

    Engines take turns in each round; one more warms up. After each the tokens are forgotten.
    """
    for engine in engines.values():
        engine.start(prompt, new_tokens)
    seen: dict[str, list[float]] = {name: [] for name in engines}
    turns = [(turn, name) for turn in range(rounds + 1) for name in engines]
    for turn, name in progress(turns, "speed"):
        start = time.perf_counter()
        engines[name].decode(new_tokens)
        seconds = time.perf_counter() - start
        engines[name].rewind(new_tokens)
        if turn:
            seen[name].append(new_tokens / seconds)
    return {name: median(found) for name, found in seen.items()}


def score(arms: Arms, engines: Mapping[str, Engine], windows: Tensor) -> dict[str, Tensor]:
    """Mean nats a token of each of `windows` [windows, length]: [windows], by arm.

    Arms that differ only in where their weights lie compute the same and are scored once.
    """
    same = {name: features and replace(features, mapped=False) for name, features in arms.items()}
    found: dict[Features | None, Tensor] = {}
    for name, features in progress(same.items(), "perplexity"):
        if features not in found:
            nats = [engines[name].nats(window) for window in windows.split(1)]
            found[features] = torch.cat(nats) / (windows.shape[1] - 1)
    return {name: found[features] for name, features in same.items()}


def arm_table(
    arms: Arms,
    memory: Mapping[str, tuple[Residence, int]],
    speeds: Mapping[str, float],
    nats: Mapping[str, Tensor],
) -> list[dict[str, Any]]:
    """One row an arm. `perplexity_ratio` is to the plain implementation's, paired by window."""
    rows = []
    for name in arms:
        residence, cache = memory[name]
        mean = float(nats[name].mean())
        rows.append(
            {
                "arm": name,
                "anonymous_mib": round(residence.anonymous / MIB, 1),
                "file_backed_mib": round(residence.file_backed / MIB, 1),
                "cache_mib": round(cache / MIB, 2),
                "decode_tokens_per_s": round(speeds[name], 1),
                "token_perplexity": round(math.exp(mean), 4),
                "perplexity_ratio": round(math.exp(mean - float(nats[TRANSFORMERS].mean())), 5),
            }
        )
    return rows


def batch_table(
    arms: Arms, architectures: Sequence[Architecture], params: MemoryEfficientParams
) -> list[dict[str, Any]]:
    """The most sequences on one GPU by calculation, 0 where weights and one do not fit.

    Sequences have the length of the parameters, or the model's context where that is shorter. A
    GPU gets a copy of what a file maps to, so there `mapped` gains nothing. Raises InferlabError
    for an unknown GPU.
    """
    return [
        {
            "model": architecture.name,
            "arm": name,
            "series": f"{architecture.name}, {name}",
            "weights": features.weights,
            "cache": features.cache,
            "tokens": (length := min(params.length, architecture.shape.context or params.length)),
            "tokens_kept": min(length, features.window.size) if features.window else length,
            "largest_batch": _largest_batch(architecture, features, params, length),
        }
        for architecture in architectures
        for name, features in ((name, one or Features()) for name, one in arms.items())
    ]


def _largest_batch(
    architecture: Architecture, features: Features, params: MemoryEfficientParams, length: int
) -> int:
    if features.window:
        size = features.window.size
        windows = tuple(min(own or size, size) for own in architecture.shape.windows)
        architecture = replace(architecture, shape=replace(architecture.shape, windows=windows))
    stored = (features.weights, features.cache, params.reserve_share)
    try:
        found = capacity(architecture, Plan(params.gpu, *stored, gpus=1), length)
    except DoesNotFitError:
        return 0
    return found.largest_batch(length)


def metrics(rows: Sequence[dict[str, Any]], batches: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Peak memory of the plain ones and of all together, perplexities, and batches by model."""
    by_arm = {row["arm"]: row for row in rows}
    values: dict[str, float] = {
        f"anonymous_mib_{name}": by_arm[name]["anonymous_mib"]
        for name in (TRANSFORMERS, "runtime", "all")
    }
    values["file_backed_mib_all"] = by_arm["all"]["file_backed_mib"]
    for name in (TRANSFORMERS, "int8_weights", "int8_cache", "window", "all"):
        values[f"token_perplexity_{name}"] = by_arm[name]["token_perplexity"]
    for row in batches:
        if row["arm"] in ("runtime", "all"):
            values[f"largest_batch_{row['arm']}_{row['model']}"] = row["largest_batch"]
    return values
