"""One training loop and the scores of a classifier, for teachers, students and pruned models."""

import math
from collections.abc import Callable
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from inferlab.models.encoder import TextClassifier
from inferlab.params import section


@section
class TrainingParams:
    """How a model is trained: AdamW, learning rate up over `warmup` and then down to zero."""

    epochs: Annotated[float, Field(gt=0)]
    batch: Annotated[int, Field(gt=0)]
    learning_rate: Annotated[float, Field(gt=0)]
    warmup: Annotated[float, Field(ge=0, lt=1)]
    weight_decay: Annotated[float, Field(ge=0)]


def device() -> torch.device:
    """A CUDA device where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def minimise(
    model: nn.Module,
    loss: Callable[[Tensor], Tensor],
    rows: int,
    settings: TrainingParams,
    seed: int,
    after_step: Callable[[], None] | None = None,
) -> list[float]:
    """Train the parameters of `model` that want gradients; returns the loss of each step.

    `loss` maps row numbers [batch] to a scalar; each epoch takes all `rows` once, in an order that
    follows from `seed`. Products are in bf16, weights and updates in fp32. `after_step` may put
    pruned weights back to zero.
    """
    generator = torch.Generator().manual_seed(seed)
    epochs = math.ceil(settings.epochs)
    order = torch.cat([torch.randperm(rows, generator=generator) for _ in range(epochs)])
    batches = order[: max(1, round(settings.epochs * rows))].split(settings.batch)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    rate, decay = settings.learning_rate, settings.weight_decay
    optimizer = torch.optim.AdamW(trained, rate, weight_decay=decay, fused=True)
    model.train()
    losses = []
    for step, batch in enumerate(batches):
        optimizer.param_groups[0]["lr"] = rate * _ramp(step, len(batches), settings.warmup)
        with torch.autocast(device().type, dtype=torch.bfloat16):
            value = loss(batch)
        optimizer.zero_grad(set_to_none=True)
        value.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        if after_step:
            after_step()
        losses.append(float(value.detach()))
    model.eval()
    return losses


@torch.inference_mode()
def predict(model: TextClassifier, tokens: Tensor, batch: int = 128) -> Tensor:
    """Logits fp32 [documents, labels] of tokens [documents, tokens], products in bf16."""
    model.eval()
    place = next(model.parameters()).device
    with torch.autocast(place.type, dtype=torch.bfloat16):
        return torch.cat([model(part.to(place)).cpu() for part in tokens.split(batch)])


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """Share of documents whose largest logit is the label's."""
    return float((logits.argmax(1) == labels).double().mean())


def accuracy_error(share: float, documents: int) -> float:
    """Standard error of a share of right answers."""
    return math.sqrt(share * (1 - share) / documents)


def class_f1(logits: Tensor, labels: Tensor) -> Tensor:
    """F1 of each label [labels], fp64; 0 for one that is neither given nor right anywhere."""
    count = logits.shape[1]
    predicted = logits.argmax(1)
    right = torch.bincount(labels[predicted == labels], minlength=count).double()
    total = torch.bincount(labels, minlength=count) + torch.bincount(predicted, minlength=count)
    return 2 * right / total.clamp(min=1)


def macro_f1(logits: Tensor, labels: Tensor) -> float:
    """Mean of the labels' F1."""
    return float(class_f1(logits, labels).mean())


def _ramp(step: int, steps: int, warmup: float) -> float:
    """Share of the learning rate at `step`: linear up over the warm-up, linear down after it."""
    rising = max(1.0, warmup * steps)
    return min((step + 1) / rising, (steps - step) / max(1.0, steps - rising), 1.0)
