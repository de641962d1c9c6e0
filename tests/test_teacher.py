"""Posts without headers, documents as tensors, the classifier beside transformers, training."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import f1_score
from tokenizers import Tokenizer

from inferlab.data.documents import Documents, label_names, load_tokenizer, make_documents
from inferlab.data.posts import strip_post
from inferlab.distillation.scored import load_labels, load_scored, require_same_labels
from inferlab.distillation.training import TrainingParams, class_f1, minimise, predict
from inferlab.errors import InferlabError
from inferlab.models.encoder import (
    Shape,
    TextClassifier,
    load_classifier,
    new_classifier,
    save_classifier,
)
from inferlab.store import read_json, write_rows
from stages import teacher

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "ball", "puck", "bat", "ice"]
WORDS += ["orbit", "moon", "the", "a", "of"]
POST = """\
From: someone@example.org
Subject: Orbits

In article <1@example.org> other@example.org writes:
> The moon is far away.
It is not that far away.

Indeed it is near.

--
Someone, somewhere
"""


def make_encoder(folder: Path) -> Path:
    """A tiny BERT with random weights and a word tokenizer, saved by transformers."""
    from tokenizers import models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=32,
        max_position_embeddings=32,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    BertModel(config).save_pretrained(folder)
    ids = {word: number for number, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT. Read only."""
    return make_encoder(tmp_path_factory.mktemp("encoder"))


def rows(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"label": label, "text": text} for label, text in pairs]


def test_a_post_loses_header_quotes_and_footer() -> None:
    assert strip_post(POST) == "It is not that far away.\n\nIndeed it is near."


def test_a_post_without_header_keeps_its_first_paragraph() -> None:
    assert strip_post("First.\n\nSecond.\n\nThird.") == "First.\n\nSecond."


def test_of_flattened_text_only_the_attribution_goes() -> None:
    flat = "re dogs in article apr acs ucalgary ca charles parr writes what a dog weighs"
    assert " ".join(strip_post(flat).split()) == "re dogs what a dog weighs"
    assert strip_post("an article in article form about writing") == (
        "an article in article form about writing"
    )


@given(st.text(alphabet=st.sampled_from("ab \n>:-|Sx"), max_size=60))
def test_stripping_only_ever_removes(text: str) -> None:
    stripped = strip_post(text)
    characters = iter(text)
    assert all(character in characters for character in stripped)


def test_documents_are_cut_padded_and_numbered(encoder: Path) -> None:
    found = make_documents(
        rows(("ice", "the puck"), ("ball", "bat bat bat"), ("ball", "in article x writes")),
        ("ball", "ice"),
        load_tokenizer(encoder, 4),
        limit=0,
        seed=0,
    )
    pairs = (found.labels, found.tokens)
    by_label = {int(label): ids.tolist() for label, ids in zip(*pairs, strict=True)}
    assert by_label == {1: [2, 10, 5, 3], 0: [2, 6, 6, 3]}
    assert found.empty == 1


def test_a_subset_keeps_the_share_of_each_label(encoder: Path) -> None:
    many = rows(*[("ball", "bat")] * 60, *[("ice", "puck")] * 30, *[("sky", "moon")] * 10)
    found = make_documents(many, ("ball", "ice", "sky"), load_tokenizer(encoder, 4), 20, seed=1)
    assert torch.bincount(found.labels).tolist() == [12, 6, 2]


def test_a_split_that_lacks_a_label_is_named() -> None:
    both = rows(("ball", "bat"), ("ice", "puck"))
    assert label_names({"train": both, "test": both}) == ("ball", "ice")
    with pytest.raises(InferlabError, match=r"test.jsonl has 1 of the 2 labels and lacks ice"):
        label_names({"train": both, "test": both[:1]})


def test_a_label_outside_the_map_is_named(encoder: Path) -> None:
    with pytest.raises(InferlabError, match=r"label 'ballet' is not in the label map; .*mean ball"):
        make_documents(rows(("ballet", "bat")), ("ball",), load_tokenizer(encoder, 4), 0, 0)


def test_a_label_whose_documents_are_all_empty_is_named(encoder: Path) -> None:
    texts = rows(("ball", "bat"), ("ice", "in article x writes"))
    with pytest.raises(InferlabError, match="none of the label 'ice' that is not empty after"):
        make_documents(texts, ("ball", "ice"), load_tokenizer(encoder, 4), 0, 0)


def test_different_label_sets_are_refused() -> None:
    require_same_labels(("a", "b"), ("a", "b"), Path("x"))
    with pytest.raises(InferlabError, match="teacher has 2, the student 1, and 'b' is known to"):
        require_same_labels(("a", "b"), ("a",), Path("models/teacher"))
    with pytest.raises(InferlabError, match="their order differs"):
        require_same_labels(("a", "b"), ("b", "a"), Path("models/teacher"))


def test_classifier_equals_transformers_and_is_loaded_by_it(encoder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    model = new_classifier(encoder, 3, seed=1).eval()
    save_classifier(tmp_path, model, ("a", "b", "c"), encoder)
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    tokens = torch.tensor([[2, 5, 6, 7, 3, 0, 0], [2, 8, 3, 0, 0, 0, 0], [2, 4, 9, 10, 11, 12, 3]])
    mask = (tokens != 0).long()
    with torch.inference_mode():
        expected = theirs(input_ids=tokens, attention_mask=mask).logits
        assert torch.allclose(model(tokens), expected, atol=1e-5)
    again, labels = load_classifier(tmp_path)
    assert labels == ("a", "b", "c")
    assert torch.equal(again(tokens), model(tokens))


def test_head_mask_of_zero_is_a_head_that_gives_nothing(encoder: Path) -> None:
    model = new_classifier(encoder, 3, seed=1).eval()
    tokens = torch.tensor([[2, 5, 6, 3]])
    masks = [torch.ones(4), torch.tensor([1.0, 0.0, 1.0, 1.0])]
    masked = model(tokens, masks)
    assert torch.equal(model(tokens, [torch.ones(4)] * 2), model(tokens))
    with torch.no_grad():
        model.layers[1].output.weight[:, 4:8] = 0
    assert torch.allclose(masked, model(tokens), atol=1e-6)


def test_only_bert_is_taken(tiny_llama: Path) -> None:
    with pytest.raises(InferlabError, match="is a 'llama' model; the classifier takes 'bert'"):
        new_classifier(tiny_llama, 2, seed=0)


def test_class_f1_equals_scikit_learn() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(200, 5), torch.randint(4, (200,))
    expected = f1_score(labels, logits.argmax(1), average=None, labels=range(5), zero_division=0)
    assert class_f1(logits, labels).tolist() == pytest.approx(expected)


def settings(**changes: float) -> TrainingParams:
    plain = dict(epochs=1.0, batch=4, learning_rate=0.01, warmup=0.1, weight_decay=0.0)
    return TrainingParams(**(plain | changes))


def test_an_epoch_takes_each_row_once_and_parts_are_allowed() -> None:
    model = torch.nn.Linear(1, 1)
    seen: list[int] = []

    def loss(batch: torch.Tensor) -> torch.Tensor:
        seen.extend(batch.tolist())
        return model(torch.ones(1)).sum()

    minimise(model, loss, 10, settings(epochs=1.5), seed=3)
    assert sorted(seen[:10]) == list(range(10))
    assert len(seen) == 15


def test_training_learns_what_can_be_learnt_and_repeats() -> None:
    torch.manual_seed(0)
    tokens = torch.randint(4, 13, (64, 6), dtype=torch.int32)
    documents = Documents(tokens, (tokens == 7).any(1).long())
    shape = Shape(
        vocabulary=13, positions=8, hidden=16, layers=1, heads=2, intermediate=32, labels=2
    )

    def trained() -> tuple[list[float], torch.Tensor]:
        torch.manual_seed(1)
        model = TextClassifier(shape)

        def loss(batch: torch.Tensor) -> torch.Tensor:
            logits = model(documents.tokens[batch])
            return torch.nn.functional.cross_entropy(logits, documents.labels[batch])

        losses = minimise(model, loss, 64, settings(epochs=12, batch=16), seed=0)
        return losses, predict(model, documents.tokens)

    losses, logits = trained()
    assert losses[-1] < 0.5 * losses[0]
    assert torch.equal(logits, trained()[1])


@pytest.mark.smoke
def test_stage_teacher(encoder: Path, workspace: Path) -> None:
    content = yaml.safe_load(Path("params.yaml").read_text())
    content["run"]["threads"] = 1
    content["teacher"] |= {"documents": 0, "max_tokens": 8, "frozen_layers": 1}
    content["teacher"]["training"] |= {"epochs": 8.0, "batch": 8, "learning_rate": 0.01}
    Path("params.yaml").write_text(yaml.safe_dump(content))
    Path("models").mkdir()
    Path("models/encoder").symlink_to(encoder)
    texts = rows(*[("sport", "the ball of a bat"), ("sky", "a moon of the orbit")] * 20)
    Path("data/labelled_text").mkdir(parents=True)
    for split in ("train", "test"):
        write_rows(Path(f"data/labelled_text/{split}.jsonl"), texts)
    teacher.main()
    assert read_json(Path("metrics/teacher.json"))["accuracy"] == 1
    assert load_labels(Path("data/teacher_logits")) == ("sky", "sport")
    test = load_scored(Path("data/teacher_logits"), "test")
    model, labels = load_classifier(Path("models/teacher"))
    assert labels == ("sky", "sport")
    assert torch.allclose(predict(model, test.documents.tokens), test.logits, atol=0.05)
    assert test.features.shape == (40, 2, 16)
    assert Path("plots/teacher/training.csv").read_text().count("\n") == 41

    content["teacher"]["frozen_layers"] = 2
    Path("params.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(SystemExit, match="frozen_layers must be below 2, the encoder's layers"):
        teacher.main()
    assert json.loads(Path("metrics/teacher.json").read_text())["accuracy"] == 1
