"""Tiny models with random weights, made without any hub, and a project folder to run stages in."""

import shutil
from pathlib import Path
from typing import Any

import pytest

import inferlab  # noqa: F401  (before transformers: keeps it from asking a hub)

ROOT = Path(__file__).parent.parent
VOCABULARY = 512
CONTEXT = 512
TEXT = """\
The river rises in the hills north of the old town and runs for forty miles to the sea. In spring
the snow melts, the water stands high, and boats can go up as far as the stone bridge. A mill was
built there in 1742; it ground corn until a fire destroyed the wheel, and nobody wanted to pay for
another one. Today the building houses a small museum with letters, maps and a few paintings by
people who once lived nearby. Fishermen say that the best places are below the weir, where trout
wait in the shade of willows for whatever the current brings. Children learn to swim in the quiet
pool behind the church, and on Sundays families walk along the path between the fields. Farmers
grow wheat, barley and potatoes on the flat land; sheep graze on the slopes. During the war the
railway carried timber from the forest to the harbour, but the line was closed in 1961 and its
track has become a road for bicycles. Visitors usually come in summer, when every room is taken,
every window is open, and music from the square can be heard until midnight. Why do so many of
them return? Perhaps because nothing much has changed: the same bell, the same bread, the same
slow brown water under the same seven arches, going on as if time were something that happened
elsewhere. However, the council has plans: a hotel, two car parks, and a bridge of glass.
"""


def _save_tokenizer(folder: Path) -> None:
    """A byte-level BPE trained on TEXT, with BOS, EOS and pad tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([TEXT], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    tokenizer.save_pretrained(folder)


def _save_model(folder: Path, config: Any) -> Path:
    """A checkpoint of random bf16 weights, large enough that its logits are far from uniform."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    _save_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose heads are wider than hidden/heads, with untied embeddings. Read only."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        initializer_range=0.1,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    return _save_model(tmp_path_factory.mktemp("tiny_llama"), config)


@pytest.fixture(scope="session")
def tiny_gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2, whose linear layers are stored transposed. Read only."""
    from transformers import GPT2Config

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=64,
        n_layer=2,
        n_head=2,
        n_positions=CONTEXT,
        initializer_range=0.1,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    return _save_model(tmp_path_factory.mktemp("tiny_gpt2"), config)


@pytest.fixture(scope="session")
def dvc_stages(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Every stage of dvc.yaml as DVC itself resolves it, one object an item of a matrix.

    Read from a copy, so that a pipeline that runs meanwhile is no disturbance.
    """
    from dvc.repo import Repo

    folder = tmp_path_factory.mktemp("graph")
    for name in ("dvc.yaml", "params.yaml"):
        shutil.copyfile(ROOT / name, folder / name)
    with Repo.init(str(folder), no_scm=True) as repository:
        return list(repository.index.stages)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Tensors here are tiny: more threads would only wait for each other."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project folder with the repository's params.yaml, made the current one."""
    shutil.copyfile(ROOT / "params.yaml", tmp_path / "params.yaml")
    monkeypatch.chdir(tmp_path)
    return tmp_path
