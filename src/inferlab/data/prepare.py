"""The steps of the stage `prepare`, from articles and questions to windows and tasks."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from inferlab import params
from inferlab.data.cleaning import clean_articles
from inferlab.data.cloze import ClozeParams, cloze
from inferlab.data.corpus import Article
from inferlab.data.splits import SPLITS, split_articles
from inferlab.data.tables import Row
from inferlab.data.trivia import four_way
from inferlab.data.windows import Bos, Stream, cut_windows, tokenise
from inferlab.errors import InferlabError
from inferlab.store import open_checkpoint


@params.section
class PrepareParams:
    """The section `prepare`; shares are of the corpus' characters, the rest is training text."""

    window_length: int
    calibration_windows: int
    heldout_windows: int
    training_tokens: int
    calibration_share: float
    heldout_share: float
    shortest_article: int
    bos: Bos
    cloze: ClozeParams

    def __post_init__(self) -> None:
        if self.window_length < 2:
            raise ValueError(f"window_length must be at least 2; got {self.window_length}")
        for name in ("calibration_windows", "heldout_windows", "training_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        shares = self.calibration_share, self.heldout_share
        if min(shares) <= 0 or sum(shares) >= 1:
            raise ValueError(
                "calibration_share and heldout_share must be above 0 and together below 1; "
                f"got {self.calibration_share} and {self.heldout_share}"
            )


def load_tokenizer(folder: Path, window_length: int) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint. A missing pad token is no fault: windows are never padded.

    Raises InferlabError when it cannot be loaded or a window exceeds the model's context.
    """
    config = open_checkpoint(folder).config
    context = config.get("max_position_embeddings", config.get("n_positions", window_length))
    if window_length > context:
        raise InferlabError(
            f"prepare.window_length is {window_length}, but the model's context is {context} tokens"
        )
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise InferlabError(f"{folder} has no tokenizer that loads: {reason}") from None


def clean_and_split(
    articles: list[Article], config: PrepareParams, seed: int
) -> dict[str, list[Article]]:
    """Plain-text articles of each split."""
    plain = clean_articles(articles, config.shortest_article)
    return split_articles(plain, config.calibration_share, config.heldout_share, seed)


def tokenise_splits(
    tokenizer: PreTrainedTokenizerBase, splits: dict[str, list[Article]]
) -> dict[str, Stream]:
    """The token stream of each split."""
    return {name: tokenise(tokenizer, articles, name) for name, articles in splits.items()}


def cut(
    streams: dict[str, Stream], config: PrepareParams, bos_token_id: int | None
) -> dict[str, dict[str, Tensor]]:
    """The tensors of each split's file.

    calibration: input_ids int32 [windows, length]; heldout: the same, and words and bytes int32
    [windows]; training: input_ids int32 [tokens]. Raises InferlabError on too little text.
    """
    windows = {
        name: cut_windows(streams[name], count, config.window_length, config.bos, bos_token_id)
        for name, count in (
            ("calibration", config.calibration_windows),
            ("heldout", config.heldout_windows),
        )
    }
    training = streams["training"].input_ids[: config.training_tokens]
    return {
        "calibration": {"input_ids": windows["calibration"]["input_ids"]},
        "heldout": windows["heldout"],
        "training": {"input_ids": torch.from_numpy(training)},
    }


def make_tasks(
    heldout: list[Article], questions: list[Row], config: PrepareParams, seed: int
) -> dict[str, list[Row]]:
    """The rows of the tasks `trivia` and `cloze`."""
    return {"trivia": four_way(questions, seed), "cloze": cloze(heldout, config.cloze, seed)}


def manifest(
    splits: dict[str, list[Article]], streams: dict[str, Stream], config: PrepareParams
) -> dict[str, Any]:
    """What stands in the windows: the policy, and the titles and sizes of each split."""
    return {
        "window_length": config.window_length,
        "bos": config.bos,
        "tokens": {name: len(streams[name].input_ids) for name in SPLITS},
        "titles": {name: [article["title"] for article in splits[name]] for name in SPLITS},
    }


def summary(
    streams: dict[str, Stream], tensors: dict[str, dict[str, Tensor]], tasks: dict[str, list[Row]]
) -> dict[str, float]:
    """The stage's metrics: counts, and bytes a scored token of the held-out windows."""
    heldout = tensors["heldout"]
    scored = heldout["input_ids"].shape[0] * (heldout["input_ids"].shape[1] - 1)
    sizes = {f"{name}_articles": len(streams[name].article_tokens) for name in SPLITS}
    sizes |= {f"{name}_tokens": len(streams[name].input_ids) for name in SPLITS}
    return {
        **sizes,
        "training_tokens_kept": tensors["training"]["input_ids"].numel(),
        "bytes_per_token": round(heldout["bytes"].sum().item() / scored, 4),
        "tokens_per_word": round(scored / heldout["words"].sum().item(), 4),
        "trivia_questions": len(tasks["trivia"]),
        "cloze_sentences": len(tasks["cloze"]),
    }


def article_table(splits: dict[str, list[Article]], streams: dict[str, Stream]) -> list[Row]:
    """One row an article: its split, title and tokens."""
    return [
        {"split": name, "title": article["title"], "tokens": tokens}
        for name in SPLITS
        for article, tokens in zip(splits[name], streams[name].article_tokens, strict=True)
    ]
