"""Windows and what is counted in them, and the parameters of the stage prepare."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from inferlab import params
from inferlab.data.corpus import Article
from inferlab.data.prepare import PrepareParams, clean_and_split, cut, load_tokenizer, summary
from inferlab.data.windows import Stream, cut_windows, tokenise
from inferlab.errors import InferlabError
from inferlab.store import save_tensors

BOS = 256


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    """One token a byte, so that every count is known; a BOS token, no pad token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: number for number, symbol in enumerate(alphabet)} | {"<s>": BOS}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")


def article(title: str, text: str) -> Article:
    return {"title": title, "text": text, "format": "plain"}


def test_stream_joins_articles_without_special_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    stream = tokenise(tokenizer, [article("a", "ab c"), article("b", "dé")], "heldout")
    assert stream.text == "ab c\n\ndé\n\n"
    assert tokenizer.decode(stream.input_ids) == stream.text
    assert stream.article_tokens == [6, 5]
    assert stream.input_ids.dtype == np.int32
    assert BOS not in stream.input_ids
    assert stream.ends.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 8, 9, 10]


def test_counts_are_of_the_scored_tokens_only(tokenizer: PreTrainedTokenizerBase) -> None:
    stream = tokenise(tokenizer, [article("a", "ab cd ef")], "heldout")  # 10 tokens with "\n\n"
    windows = cut_windows(stream, 2, 5, "none", None)
    assert [tokenizer.decode(row) for row in windows["input_ids"]] == ["ab cd", " ef\n\n"]
    assert windows["bytes"].tolist() == [4, 4]  # "b cd" and "ef\n\n"
    assert windows["words"].tolist() == [2, 1]


def test_window_policy_puts_bos_first_and_scores_all_text(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    stream = tokenise(tokenizer, [article("a", "ab cd ef")], "heldout")
    windows = cut_windows(stream, 2, 6, "window", tokenizer.bos_token_id)
    assert windows["input_ids"][:, 0].tolist() == [BOS, BOS]
    assert [tokenizer.decode(row[1:]) for row in windows["input_ids"]] == ["ab cd", " ef\n\n"]
    assert windows["bytes"].tolist() == [5, 5]
    assert windows["words"].tolist() == [2, 1]


def test_windows_are_spread_over_the_stream_without_overlap() -> None:
    ids = np.arange(107, dtype=np.int32)
    stream = Stream("heldout", "x" * 107, ids, np.arange(1, 108), [107])
    windows = cut_windows(stream, 4, 10, "none", None)["input_ids"]
    assert windows[:, 0].tolist() == [0, 30, 60, 90]
    everything = cut_windows(stream, 10, 10, "none", None)["input_ids"]
    assert everything.flatten().tolist() == list(range(100))


def test_bytes_of_multibyte_text_add_up(tokenizer: PreTrainedTokenizerBase) -> None:
    text = "né à Zürich " * 20
    stream = tokenise(tokenizer, [article("a", text)], "heldout")
    count = len(stream.input_ids) // 2
    windows = cut_windows(stream, count, 3, "window", BOS)
    covered = int(stream.ends[2 * count - 1])
    assert int(windows["bytes"].sum()) == len(stream.text[:covered].encode())


def test_too_short_text_tells_found_and_needed(tokenizer: PreTrainedTokenizerBase) -> None:
    stream = tokenise(tokenizer, [article("a", "abcdefgh")], "heldout")
    with pytest.raises(
        InferlabError, match=r"heldout text is too short: 10 tokens found, 12 needed for 3 windows"
    ):
        cut_windows(stream, 3, 4, "none", None)


def test_missing_bos_matters_only_where_the_policy_needs_it(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    tokenizer.bos_token = None
    assert tokenizer.pad_token is None
    stream = tokenise(tokenizer, [article("a", "abcdefgh")], "heldout")
    assert cut_windows(stream, 2, 4, "none", tokenizer.bos_token_id)["input_ids"].shape == (2, 4)
    with pytest.raises(InferlabError, match=r"prepare.bos is 'window', but .* set prepare.bos to"):
        cut_windows(stream, 2, 4, "window", tokenizer.bos_token_id)


SECTION = {
    "window_length": 8,
    "calibration_windows": 2,
    "heldout_windows": 3,
    "training_tokens": 50,
    "calibration_share": 0.3,
    "heldout_share": 0.3,
    "shortest_article": 10,
    "bos": "none",
    "cloze": {"sentences": 2, "shortest_words": 3, "longest_words": 9, "context_sentences": 0},
}


def prepare_params(tmp_path: Path, **changes: object) -> PrepareParams:
    file = tmp_path / "params.yaml"
    file.write_text(json.dumps({"prepare": {**SECTION, **changes}}))
    return params.load("prepare", PrepareParams, file)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"window_length": 1},
            r"window_length must be at least 2; got 1 \(.*yaml: prepare\)",
        ),
        ({"heldout_windows": 0}, "heldout_windows must be at least 1; got 0"),
        ({"heldout_share": 0.7}, r"together below 1; got 0.3 and 0.7"),
        ({"bos": "article"}, "prepare.bos must be one of 'none', 'window'; got 'article'"),
        ({"cloze": {**SECTION["cloze"], "shortest_words": 10}}, "needs 2 <= shortest_words <= lo"),
        ({"windows": 3}, "prepare.windows is not a parameter"),
    ],
)
def test_bad_parameters_are_refused(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(InferlabError, match=message):
        prepare_params(tmp_path, **changes)


def test_tensors_and_metrics_of_all_splits(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    config = prepare_params(tmp_path)
    articles = [article(f"{place}", f"text of number {place} here ") for place in range(20)]
    splits = clean_and_split([*articles, article("stub", "stub")], config, seed=0)
    streams = {name: tokenise(tokenizer, split, name) for name, split in splits.items()}
    tensors = cut(streams, config, None)
    assert {name: list(content) for name, content in tensors.items()} == {
        "calibration": ["input_ids"],
        "heldout": ["input_ids", "words", "bytes"],
        "training": ["input_ids"],
    }
    assert tensors["training"]["input_ids"].tolist() == streams["training"].input_ids[:50].tolist()
    metrics = summary(streams, tensors, {"trivia": [{}], "cloze": [{}, {}]})
    assert metrics["bytes_per_token"] == 1.0  # one token a byte, and no window cuts a character
    assert sum(metrics[f"{name}_articles"] for name in splits) == 20
    assert metrics["cloze_sentences"] == 2


def test_window_longer_than_the_context_and_missing_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 64}')
    with pytest.raises(InferlabError, match=r"it has neither model.safetensors"):
        load_tokenizer(tmp_path, 65)
    save_tensors(tmp_path / "model.safetensors", {})
    with pytest.raises(InferlabError, match=r"window_length is 65, but the model's context is 64"):
        load_tokenizer(tmp_path, 65)
    with pytest.raises(InferlabError, match="has no tokenizer that loads"):
        load_tokenizer(tmp_path, 64)
