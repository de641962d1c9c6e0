"""The stages calibrate, quantize and evaluate in turn, on a tiny model of each architecture."""

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml
from conftest import TEXT
from transformers import AutoTokenizer

from inferlab.data.windows import cut_windows, tokenise
from inferlab.evaluation.tasks import write_task
from inferlab.models.loading import load_model, load_tokenizer
from inferlab.models.scoring import load_for_scoring
from inferlab.quantization.methods import METHODS
from inferlab.serving import unpacked
from inferlab.store import load_tensors, open_checkpoint, save_tensors
from stages import calibrate, evaluate, quantize

pytestmark = pytest.mark.smoke
ROOT = Path(__file__).parent.parent
EVALUATED = {
    "token_perplexity",
    "word_perplexity",
    "bits_per_byte",
    "trivia_accuracy",
    "trivia_accuracy_se",
    "cloze_accuracy",
    "cloze_accuracy_se",
    "model_bytes",
    "bits_per_weight",
    "packed",
}
EIGHT_BITS = ("int8_tensor", "int8", "mixed")
QUANTIZED = {"layers_quantized", "layers_fallback", "output_error_vs_rtn", "bits_per_weight"}


@dataclass(frozen=True)
class Architecture:
    """A tiny model, the variants that work for it, and how many linear layers it has."""

    fixture: str
    variants: tuple[str, ...]
    layers: int
    packed: int


LLAMA = Architecture("tiny_llama", tuple(METHODS), layers=14, packed=1)
GPT2 = Architecture(
    "tiny_gpt2", ("int8_tensor", "int8", "mixed", "int4_rtn", "gptq"), layers=8, packed=0
)


def write_project(model: Path) -> None:
    """In the current folder: parameters, a model, windows and tasks."""
    content = yaml.safe_load((ROOT / "params.yaml").read_text())
    content["run"]["threads"] = 1
    content["calibrate"] |= {"windows": 4, "batch": 3}
    for variant in ("int4_rtn", "gptq", "gptqmodel"):
        content["quantize"][variant]["group_size"] = 32
    Path("params.yaml").write_text(yaml.safe_dump(content))
    shutil.copytree(model, "models/base")
    tokenizer = AutoTokenizer.from_pretrained(model)
    stream = tokenise(tokenizer, [{"title": "a", "text": TEXT, "format": "plain"}], "heldout")
    windows = cut_windows(stream, 6, 64, "none", None)
    Path("data/windows").mkdir(parents=True)
    save_tensors(Path("data/windows/heldout.safetensors"), windows)
    ids = {"input_ids": windows["input_ids"].flip(0).roll(7, 1)}
    save_tensors(Path("data/windows/calibration.safetensors"), ids)
    Path("data/tasks").mkdir()
    question = {"question": "Where does it rise?", "choices": ["hills", "sea", "town", "mill"]}
    write_task(Path("data/tasks"), "trivia", [question | {"label": n} for n in range(4)])
    write_task(Path("data/tasks"), "cloze", [{"context": "The river", "word": "rises"}] * 3)


@pytest.fixture(scope="module", params=[LLAMA, GPT2], ids=lambda one: one.fixture)
def architecture(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Architecture]:
    """The current folder holds everything that the stages made of the architecture's model."""
    one: Architecture = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("project"))
        write_project(request.getfixturevalue(one.fixture))
        calibrate.main()
        evaluate.main("base")
        for variant in one.variants:
            quantize.main(variant)
            evaluate.main(variant)
        yield one


def metrics(path: str) -> dict[str, float]:
    return json.loads(Path("metrics", path).read_text())


def test_calibration_covers_every_group(architecture: Architecture) -> None:
    found = metrics("calibrate.json")
    assert (found["groups"], found["tokens"]) == (8, 4 * 64)
    assert len(list(Path("data/calibration").iterdir())) == 2
    assert Path("plots/calibrate/inputs.csv").read_text().count("\n") == 9


def test_evaluation_has_its_keys_and_all_are_finite(architecture: Architecture) -> None:
    for variant in ("base", *architecture.variants):
        found = metrics(f"evaluate/{variant}.json")
        assert set(found) == EVALUATED
        assert all(math.isfinite(value) for value in found.values())
        assert found["trivia_accuracy"] == 0.25
        assert found["model_bytes"] > 0
        windows = Path(f"plots/evaluate/{variant}.csv").read_text()
        assert windows.count("\n") == 7
        timing = metrics(f"timing/evaluate/{variant}.json")
        assert timing["perplexity_tokens_per_s"] > 0


def test_quantization_has_its_keys_and_covers_every_layer(architecture: Architecture) -> None:
    for variant in architecture.variants:
        found = metrics(f"quantize/{variant}.json")
        assert set(found) >= QUANTIZED
        assert all(math.isfinite(value) for value in found.values())
        assert found["layers_quantized"] + found["layers_16bit"] == architecture.layers
        assert (found["layers_16bit"] > 0) == (variant == "mixed")
        assert found["layers_fallback"] == 0
        assert metrics(f"timing/quantize/{variant}.json")["seconds"] > 0


def test_variants_say_how_they_are_stored(architecture: Architecture) -> None:
    base = metrics("evaluate/base.json")
    assert (base["bits_per_weight"], base["packed"]) == (16, 1)
    for variant in architecture.variants:
        found = metrics(f"evaluate/{variant}.json")
        assert found["packed"] == architecture.packed
        bits = 8 if variant in EIGHT_BITS else 4
        assert bits < found["bits_per_weight"] < bits + 1.6
        if architecture.packed:
            assert found["model_bytes"] < base["model_bytes"]


def test_eight_bits_lose_next_to_nothing(architecture: Architecture) -> None:
    base = metrics("evaluate/base.json")["token_perplexity"]
    for variant in architecture.variants:
        found = metrics(f"evaluate/{variant}.json")["token_perplexity"]
        limit = 0.01 if variant in EIGHT_BITS else 0.15
        assert 0 < abs(found / base - 1) < limit


def test_perplexities_agree_with_each_other(architecture: Architecture) -> None:
    heldout = load_tensors(Path("data/windows/heldout.safetensors"))
    tokens = 6 * 63
    for variant in ("base", *architecture.variants):
        found = metrics(f"evaluate/{variant}.json")
        nats = math.log(found["token_perplexity"]) * tokens
        words, size = float(heldout["words"].sum()), float(heldout["bytes"].sum())
        assert math.log(found["word_perplexity"]) == pytest.approx(nats / words, rel=1e-5)
        assert found["bits_per_byte"] == pytest.approx(nats / size / math.log(2), rel=1e-5)


@torch.no_grad()
def test_what_is_scored_is_what_a_stranger_loads(architecture: Architecture) -> None:
    tokens = load_tensors(Path("data/windows/heldout.safetensors"))["input_ids"][:2].long()
    for variant in ("base", *architecture.variants):
        folder = Path("models", variant)
        loaded = [load(folder, threads=1) for load in (load_for_scoring, load_model)]
        ours, theirs = (model(tokens).logits.float() for model in loaded)
        # Both round activations to 8 bits, one by 1/127 and the other by 2/255 of the maximum.
        limit = 0.05 if variant.startswith(("int8", "mixed")) else 0.02
        assert float((ours - theirs).std() / theirs.std()) < limit, variant


@torch.no_grad()
def test_vllm_without_a_kernel_is_given_the_same_weights_unpacked(
    architecture: Architecture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpacked, "has_int4_kernel", lambda: False)
    model = Path("models/gptq")
    served = unpacked.servable("gptq", model, tmp_path / "gptq")
    assert (served != model) == bool(architecture.packed)
    assert "quantization_config" not in open_checkpoint(served).config
    assert unpacked.servable("int8", Path("models/int8"), tmp_path / "int8") == Path("models/int8")
    tokens = load_tensors(Path("data/windows/heldout.safetensors"))["input_ids"][:2].long()
    ours, theirs = (load_for_scoring(path, 1)(tokens).logits for path in (model, served))
    assert torch.equal(ours, theirs)
    assert len(load_tokenizer(served)) == len(load_tokenizer(model))


def test_vllm_with_a_kernel_is_given_the_packed_weights(
    architecture: Architecture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpacked, "has_int4_kernel", lambda: True)
    assert unpacked.servable("gptq", Path("models/gptq"), tmp_path / "x") == Path("models/gptq")


def test_error_compensation_pays(architecture: Architecture) -> None:
    assert metrics("quantize/gptq.json")["output_error_vs_rtn"] < 0.9
    assert metrics("quantize/int4_rtn.json")["output_error_vs_rtn"] == pytest.approx(1, abs=0.05)


def test_nothing_but_outputs_is_left_and_the_base_is_untouched(
    architecture: Architecture, request: pytest.FixtureRequest
) -> None:
    assert not [path for path in Path().rglob("*") if ".partial" in path.name]
    assert {path.name for path in Path("models").iterdir()} == {"base", *architecture.variants}
    original = open_checkpoint(request.getfixturevalue(architecture.fixture))
    base = open_checkpoint(Path("models/base"))
    assert base.names == original.names
    assert all(torch.equal(base.tensor(name), original.tensor(name)) for name in base.names)


def test_running_again_gives_the_same(architecture: Architecture) -> None:
    names = [f"{stage}/gptq.json" for stage in ("quantize", "evaluate")]
    before = [metrics(name) for name in names]
    quantize.main("gptq")
    evaluate.main("gptq")
    assert [metrics(name) for name in names] == before


def test_faults_stop_with_a_line_and_change_nothing(architecture: Architecture) -> None:
    content = yaml.safe_load(Path("params.yaml").read_text())
    weights = Path("models/gptq/model.safetensors").read_bytes()
    faulty = json.loads(json.dumps(content))
    faulty["calibrate"]["windows"] = 7
    faulty["quantize"]["gptq"]["group_size"] = 48
    Path("params.yaml").write_text(yaml.safe_dump(faulty))
    try:
        with pytest.raises(SystemExit, match=r"calibrate.windows is 7, but only 6 were prepared"):
            calibrate.main()
        with pytest.raises(SystemExit, match="group_size 48 does not divide the 64 columns"):
            quantize.main("gptq")
    finally:
        Path("params.yaml").write_text(yaml.safe_dump(content))
    assert Path("models/gptq/model.safetensors").read_bytes() == weights
    assert len(list(Path("data/calibration").iterdir())) == 2
