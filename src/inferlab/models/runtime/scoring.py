"""Score text with the runtime, through the cache that it would decode with."""

import torch
import torch.nn.functional as F
from torch import Tensor

from inferlab.models.runtime.cache import Window
from inferlab.models.runtime.llama import Llama

LOGIT_ROWS = 128


@torch.inference_mode()
def window_nats(
    model: Llama, tokens: Tensor, cache: str | None = None, window: Window | None = None
) -> Tensor:
    """Nats of each window of `tokens` [batch, length], fp64 [batch]; its first token is context.

    Keys and values go through a cache of the dtype `cache` and are seen as it holds them, rounded
    to 8 bits for int8; `window` bounds what a token sees. Raises InferlabError for an unknown dtype
    and when a window of text is longer than the model's context.
    """
    kept = model.new_cache(len(tokens), tokens.shape[1], cache, window)
    states = model.hidden(tokens[:, :-1], kept).flatten(0, 1)
    wanted = tokens[:, 1:].flatten()
    # The logits of a whole window would be the largest tensor by far.
    losses = [
        F.cross_entropy(model.logits(rows), targets, reduction="none")
        for rows, targets in zip(states.split(LOGIT_ROWS), wanted.split(LOGIT_ROWS), strict=True)
    ]
    return torch.cat(losses).view(len(tokens), -1).double().sum(1)
