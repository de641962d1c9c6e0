"""The distillation study: which arms are trained, side by side, and what they come to."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal

import torch
from joblib import Parallel, delayed
from pydantic import Field
from torch import Tensor
from torch.utils.benchmark import Timer

from inferlab.data.tables import Row
from inferlab.distillation.scored import Scored
from inferlab.distillation.students import Arm, Lesson, Student, StudentParams, train_student
from inferlab.distillation.training import accuracy
from inferlab.errors import InferlabError
from inferlab.models.encoder import TextClassifier
from inferlab.params import section

LATENCY_BATCHES = (1, 32)
MEASURE_SECONDS = 0.5


@section
class DistillParams:
    """The section `distill`."""

    temperatures: tuple[Annotated[float, Field(gt=0)], ...]
    alpha: Annotated[float, Field(gt=0, lt=1)]
    feature_temperature: Annotated[float, Field(gt=0)]
    feature_weight: Annotated[float, Field(gt=0)]
    seeds: Annotated[int, Field(ge=1)]
    kept: str
    jobs: Annotated[int, Field(ge=0)]
    backend: Literal["loky", "threading"]
    student: StudentParams

    def __post_init__(self) -> None:
        if self.feature_temperature not in self.temperatures:
            raise ValueError(
                "feature_temperature must be one of temperatures, to compare features with logits "
                f"alone; got {self.feature_temperature:g}"
            )


def make_arms(params: DistillParams) -> list[Arm]:
    """Every arm of the study. Raises InferlabError when the one to keep is not among them."""
    arms = [Arm("ce"), Arm("ce_fresh", fresh=True)]
    for temperature in params.temperatures:
        arms.append(Arm(f"kl_t{temperature:g}", 1.0, temperature))
    for temperature in params.temperatures:
        arms.append(Arm(f"combined_t{temperature:g}", params.alpha, temperature))
    matched = params.feature_temperature
    arms.append(Arm(f"features_t{matched:g}", 1.0, matched, params.feature_weight))
    names = [arm.name for arm in arms]
    if params.kept not in names:
        raise InferlabError(
            f"distill.kept must be one of {', '.join(names)}; got {params.kept!r} "
            "(params.yaml: distill.kept)"
        )
    return arms


def train_all(
    arms: Sequence[Arm], lesson: Lesson, params: DistillParams, seed: int, threads: int
) -> dict[str, list[Student]]:
    """The students of each arm, one a seed.

    Students are small, so that one a core is faster than one on all cores: each has one thread,
    and the results do not depend on how many are trained at once.
    """
    work = [(arm, seed + number) for arm in arms for number in range(params.seeds)]
    jobs = Parallel(n_jobs=params.jobs or threads, backend=params.backend)
    trained = iter(jobs(delayed(_train)(arm, lesson, params, one) for arm, one in work))
    return {arm.name: [next(trained) for _ in range(params.seeds)] for arm in arms}


def _train(arm: Arm, lesson: Lesson, params: DistillParams, seed: int) -> Student:
    """A student, without its weights unless it is to be kept: they would be copied for nothing."""
    torch.set_num_threads(1)
    student = train_student(arm, lesson, params.student, seed)
    return student if arm.name == params.kept else replace(student, model=None)


def latency_ms(model: TextClassifier, tokens: Tensor, batch: int, threads: int) -> float:
    """Median milliseconds of classifying `batch` of the documents [documents, tokens] in bf16."""
    served = copy.deepcopy(model).bfloat16().eval()
    names = {"model": served, "tokens": tokens[:batch]}
    with torch.inference_mode():
        timer = Timer("model(tokens)", globals=names, num_threads=threads)
        return timer.blocked_autorange(min_run_time=MEASURE_SECONDS).median * 1000


def latencies(
    models: dict[str, TextClassifier], tokens: dict[str, Tensor], threads: int
) -> dict[str, float]:
    """`<model>_latency_ms_batch_<n>` of each model on its own tokens [documents, length]."""
    return {
        f"{name}_latency_ms_batch_{batch}": latency_ms(model, tokens[name], batch, threads)
        for batch in LATENCY_BATCHES
        for name, model in models.items()
    }


def summary(
    rows: Sequence[Row], models: dict[str, TextClassifier], test: Scored, kept: Tensor
) -> dict[str, float]:
    """The stage's metrics; `kept`: the kept arm's logits on the test split, of its first seed."""
    labels = test.documents.labels
    found: dict[str, float] = {"teacher_accuracy": accuracy(test.logits, labels)}
    for row in rows:
        found[f"{row['arm']}_accuracy_mean"] = row["accuracy_mean"]
        found[f"{row['arm']}_accuracy_std"] = row["accuracy_std"]
    same = test.logits.argmax(1) == kept.argmax(1)
    found["student_agreement_with_teacher"] = float(same.double().mean())
    for name, model in models.items():
        weights = list(model.parameters())
        found[f"{name}_parameters"] = sum(weight.numel() for weight in weights)
        found[f"{name}_weight_bytes"] = sum(weight.nbytes for weight in weights)
    return found
