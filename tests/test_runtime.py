"""The runtime against transformers, against dequantized weights, and its refusals."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_models import dequantized, make_model, quantized, random_tokens
from safetensors.torch import load_file, save_file
from torch import Tensor

from inferlab.errors import InferlabError
from inferlab.models.runtime.cache import Window
from inferlab.models.runtime.config import read_config
from inferlab.models.runtime.decoding import (
    Sampling,
    generate,
    last_states,
    padded,
    probabilities,
)
from inferlab.models.runtime.linear import Dense, Int4, Int8, int8_rows
from inferlab.models.runtime.llama import Llama
from inferlab.models.runtime.loading import load_llama
from inferlab.models.runtime.reading import ReadTensors
from inferlab.models.runtime.rope import Rope, read_rope, rotate
from inferlab.store import open_checkpoint

ROOT = Path(__file__).parent.parent
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
STRETCHED = {
    "default": {"rope_type": "default", "rope_theta": 300.0},
    "linear": {"rope_type": "linear", "rope_theta": 300.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 300.0, "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": YARN | {"rope_theta": 300.0},
    "yarn_scaled": YARN | {"rope_theta": 9e4, "mscale": 1.0, "mscale_all_dim": 0.7},
    "yarn_exact": YARN | {"rope_theta": 9e4, "truncate": False, "beta_fast": 16.0},
}
MODELS: dict[str, dict[str, Any]] = {
    "tied": {"tie_word_embeddings": True},
    "biased": {"attention_bias": True, "mlp_bias": True, "head_dim": 6},
    "every head its own keys": {"num_key_value_heads": 4},
    "one key head": {"num_key_value_heads": 1},
    "mistral": {"family": "mistral", "sliding_window": 7},
    "qwen2": {"family": "qwen2", "sliding_window": 7, "use_sliding_window": False},
    "qwen3": {"family": "qwen3", "head_dim": 16},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 32 channels, in fp32. Read only."""
    return make_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Llama:
    return load_llama(folder, "fp32")


def theirs(folder: Path, tokens: Tensor) -> Tensor:
    """The logits of transformers, fp32."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return reference(input_ids=tokens).logits


def ours(model: Llama, tokens: Tensor, **settings: Any) -> Tensor:
    cache = model.new_cache(len(tokens), tokens.shape[1], **settings)
    return model.forward(tokens, cache)


@pytest.mark.parametrize("mapped", [True, False])
def test_logits_are_those_of_transformers(tiny_llama: Path, mapped: bool) -> None:
    tokens = random_tokens(2, 40, vocabulary=512)
    found = ours(load_llama(tiny_llama, "fp32", mapped), tokens)
    assert (found - theirs(tiny_llama, tokens)).abs().max() < 1e-4


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_the_family(name: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", **MODELS[name])
    tokens = random_tokens(2, 24)
    found = ours(load_llama(folder, "fp32"), tokens)
    assert (found - theirs(folder, tokens)).abs().max() < 1e-4


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / "models/base").is_dir(), reason="needs models/base (dvc repro)")
def test_logits_of_the_real_model() -> None:
    tokens = random_tokens(2, 200, vocabulary=49152)
    found = ours(load_llama(ROOT / "models/base", "fp32"), tokens)
    assert (found - theirs(ROOT / "models/base", tokens)).abs().max() < 1e-4


def test_bf16_is_close_to_fp32(tiny_llama: Path) -> None:
    tokens = random_tokens(2, 40, vocabulary=512)
    exact, rounded = (ours(load_llama(tiny_llama, dtype), tokens) for dtype in ("fp32", "bf16"))
    assert 0 < (exact - rounded).abs().max() < 0.05 * exact.abs().max()


@pytest.mark.parametrize("kind", ["int8", "int8_tensor", "int4", "int4_zero"])
@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("tokens", [1, 30])
def test_packed_weights_compute_as_dequantized_ones(
    kind: str, mapped: bool, tokens: int, folder: Path, model: Llama, tmp_path: Path
) -> None:
    """Both for few rows, which are multiplied as stored, and for many."""
    packed = load_llama(quantized(folder, tmp_path / kind, kind), "fp32", mapped)
    layer, expected = packed.layers[0].down.parts[0], Int8 if "int8" in kind else Int4
    assert isinstance(layer, expected) and isinstance(packed.head, Int8)
    inputs = random_tokens(1, tokens)
    found = ours(packed, inputs)
    torch.testing.assert_close(found, ours(dequantized(packed), inputs), rtol=0, atol=1e-4)
    assert (found - ours(model, inputs)).abs().max() > 1e-3


def test_weights_in_files_are_read_as_they_are(folder: Path, tmp_path: Path) -> None:
    source = quantized(folder, tmp_path / "int8", "int8")
    codes = open_checkpoint(source, quantized=True).tensor("model.layers.1.mlp.up_proj.weight")
    assert torch.equal(load_llama(source).layers[1].gate_up.parts[1].codes, codes)


def test_mapped_weights_take_no_memory_of_their_own(folder: Path) -> None:
    """Two loads of one file see the same pages; a copy would lie somewhere else each time."""

    def pages() -> set[str]:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return {line.split()[0] for line in lines if str(folder) in line}

    if not Path("/proc/self/maps").is_file():
        pytest.skip("needs /proc/self/maps, which this system has not")
    loaded = load_llama(folder, "fp32")
    address = loaded.layers[0].down.parts[0].weight.data_ptr()
    spans = [[int(end, 16) for end in span.split("-")] for span in pages()]
    assert any(low <= address < high for low, high in spans)


@pytest.mark.parametrize("kind", ["base", "int8", "int4"])
def test_weights_read_into_memory_are_the_mapped_ones(
    kind: str, folder: Path, tmp_path: Path
) -> None:
    source = folder if kind == "base" else quantized(folder, tmp_path / kind, kind)
    checkpoint = open_checkpoint(source, quantized=True)
    read = ReadTensors(checkpoint.files)
    assert sorted(read) == checkpoint.names and len(read) == len(checkpoint.names)
    for name in checkpoint.names:
        found, expected = read[name], checkpoint.tensor(name)
        assert found.dtype == expected.dtype and torch.equal(found, expected)
    tokens = random_tokens(1, 12)
    mapped, own = (ours(load_llama(source, mapped=mapped), tokens) for mapped in (True, False))
    torch.testing.assert_close(own, mapped, rtol=0, atol=0.05 * float(mapped.abs().max()))


def test_weights_read_into_memory_outlive_their_file(folder: Path, tmp_path: Path) -> None:
    """Nothing of the process points into the file, so that overwriting it changes no weight."""
    source = changed(folder, tmp_path / "model")
    loaded = load_llama(source, "fp32", mapped=False)
    before = ours(loaded, random_tokens(1, 8))
    file = source / "model.safetensors"
    size = file.stat().st_size
    with file.open("r+b") as opened:
        opened.write(b"\0" * size)
    assert torch.equal(ours(loaded, random_tokens(1, 8)), before)


@pytest.mark.parametrize("offset", [0, 8, 16, 24])
@pytest.mark.parametrize("ins", [32, 40, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_codes_may_lie_anywhere_in_a_file(offset: int, ins: int, dtype: torch.dtype) -> None:
    """torch's own kernel reads aligned vectors, and kills the process where they are not."""
    generator = torch.Generator().manual_seed(0)
    memory = torch.randint(-127, 128, (64 + 32 * ins,), generator=generator, dtype=torch.int8)
    start = -memory.data_ptr() % 64 + offset
    codes = memory[start : start + 31 * ins].view(31, ins)
    layer = Int8(codes, torch.rand(31, generator=generator) + 0.5)
    inputs = torch.randn(12, ins, generator=generator).to(dtype)
    expected = inputs.float() @ layer.dense.t()
    error = (layer(inputs).float() - expected).abs().max() / expected.abs().max()
    assert error < (1e-5 if dtype == torch.float32 else 0.02)


def test_int4_layout_by_hand() -> None:
    """One group of four: codes 1 2 | 3 4, the second half in the high bits."""
    layer = Int4(
        torch.tensor([[0x31, 0x42]], dtype=torch.uint8),
        torch.tensor([[0.5]], dtype=torch.float16),
        torch.tensor([[2]], dtype=torch.uint8),
    )
    assert layer.dense.tolist() == [[-0.5, 0.0, 0.5, 1.0]]
    assert layer(torch.tensor([[2.0, 3.0, 5.0, 7.0]])).tolist() == [[8.5]]


def test_int8_head_is_within_half_a_step() -> None:
    weight = torch.randn(50, 16, generator=torch.Generator().manual_seed(0))
    rounded = int8_rows(weight)
    step = rounded.scale[:, None]
    assert ((rounded.dense - weight).abs() <= step * 0.51 + weight.abs() / 256).all()
    assert torch.equal(int8_rows(torch.zeros(2, 4)).dense, torch.zeros(2, 4))


@pytest.mark.parametrize("name", STRETCHED)
def test_rope_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(head_dim=32, max_position_embeddings=256, rope_parameters=STRETCHED[name])
    positions = torch.arange(0, 256, 5)[None]
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    raw = {"rope_parameters": STRETCHED[name]}
    old = {"rope_theta": STRETCHED[name]["rope_theta"], "rope_scaling": STRETCHED[name]}
    for style in (raw, old):
        found = read_rope(style, 32, 256).angles(positions)
        torch.testing.assert_close(found[0], cos[..., :16], rtol=0, atol=1e-4)
        torch.testing.assert_close(found[1], sin[..., :16], rtol=0, atol=1e-4)


def test_rotation_by_hand() -> None:
    """A quarter turn takes the first half to the second and the second to minus the first."""
    cos, sin = Rope(torch.tensor([torch.pi / 2, 0.0])).angles(torch.tensor([1]))
    turned = rotate(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), cos, sin)
    torch.testing.assert_close(turned, torch.tensor([[-3.0, 2.0, 1.0, 4.0]]))


def greedy(model: Llama, prompts: list[list[int]], count: int = 12) -> list[list[int]]:
    steps = list(generate(model, prompts, count, stop_at_end=False))
    return [[step[row] for step in steps] for row in range(len(prompts))]


def test_greedy_decoding_is_that_of_an_uncached_model(model: Llama) -> None:
    prompt = random_tokens(1, 5)
    sequence = prompt
    for _ in range(12):
        sequence = torch.cat((sequence, ours(model, sequence)[:, -1:].argmax(-1)), dim=1)
    assert greedy(model, prompt.tolist()) == sequence[:, 5:].tolist()


def test_a_batch_gives_the_same_tokens_as_one_by_one(model: Llama) -> None:
    prompts = [random_tokens(1, length, seed=length)[0].tolist() for length in (1, 9, 4, 17)]
    alone = [greedy(model, [prompt])[0] for prompt in prompts]
    assert greedy(model, prompts) == alone
    assert len({tuple(tokens) for tokens in alone}) == 4


@pytest.mark.parametrize("left", [True, False])
def test_padding_on_either_side_changes_no_logit(model: Llama, left: bool) -> None:
    prompts = [random_tokens(1, length, seed=length)[0].tolist() for length in (3, 11, 6)]
    tokens, real = padded(prompts, left)
    cache = model.new_cache(3, 20)
    logits = model.forward(tokens, cache, real)
    assert cache.lengths.tolist() == [3, 11, 6]
    following = random_tokens(3, 2, seed=9)
    after = model.forward(following, cache)
    for row, prompt in enumerate(prompts):
        whole = torch.cat((torch.tensor([prompt]), following[row : row + 1]), dim=1)
        expected = ours(model, whole)[0]
        found = torch.cat((logits[row, real[row]], after[row]))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("kind", ["fp32", "int8", "window"])
def test_padding_on_either_side_gives_the_tokens_of_one_by_one(
    model: Llama, left: bool, kind: str
) -> None:
    """The token after each prompt, and those that greedy decoding of the batch goes on to."""
    prompts = [random_tokens(1, length, seed=length)[0].tolist() for length in (2, 13, 7)]
    settings = {"window": Window(6, 2)} if kind == "window" else {"dtype": kind}

    def decoded(rows: list[list[int]]) -> list[list[int]]:
        tokens, real = padded(rows, left)
        cache = model.new_cache(len(rows), 40, **settings)
        chosen = [model.logits(last_states(model.hidden(tokens, cache, real), real)).argmax(-1)]
        for _ in range(9):
            chosen.append(model.forward(chosen[-1][:, None], cache)[:, -1].argmax(-1))
        return torch.stack(chosen, dim=1).tolist()

    alone = [decoded([prompt])[0] for prompt in prompts]
    assert decoded(prompts) == alone
    assert len({tuple(tokens) for tokens in alone}) == 3


def test_a_cache_that_fills_up_while_decoding_says_so_and_keeps_what_it_has(model: Llama) -> None:
    prompt = random_tokens(1, 5).tolist()
    free = greedy(model, prompt, 8)[0]
    cache = model.new_cache(1, 8)
    steps = generate(model, prompt, 8, cache=cache, stop_at_end=False)
    assert [next(steps)[0] for _ in range(4)] == free[:4]
    with pytest.raises(InferlabError) as fault:
        next(steps)
    assert str(fault.value) == (
        "the cache of 8 positions is full: a sequence of 9 tokens needs a larger one"
    )
    assert cache.lengths.tolist() == [8]
    assert cache.positions[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, -1]


def test_a_sequence_that_ended_yields_nothing_more(model: Llama) -> None:
    prompts = random_tokens(2, 6).tolist()
    free = greedy(model, prompts)
    end = free[0][3]
    assert end not in free[1][:6]
    ending = replace(model, config=replace(model.config, end_tokens=(end,)))
    first = free[0].index(end)
    steps = list(generate(ending, prompts, 6))
    assert [step[0] for step in steps] == free[0][: first + 1] + [None] * (5 - first)
    assert [step[1] for step in steps] == free[1][:6]
    assert len(list(generate(ending, prompts[:1], 6))) == first + 1


def test_probabilities_by_hand() -> None:
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log()
    assert probabilities(logits, Sampling(1.0))[0].tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4])
    top = probabilities(logits, Sampling(1.0, top_k=2))[0].tolist()
    assert top == pytest.approx([0, 0, 3 / 7, 4 / 7])
    nucleus = probabilities(logits, Sampling(1.0, top_p=0.75))[0].tolist()
    assert nucleus == pytest.approx([0, 2 / 9, 3 / 9, 4 / 9])
    sharp = probabilities(logits, Sampling(0.5))[0].tolist()
    assert sharp == pytest.approx([one / 0.3 for one in (0.01, 0.04, 0.09, 0.16)])


def test_sampling_repeats_by_seed_and_follows_the_chances(model: Llama) -> None:
    prompt = random_tokens(1, 4).tolist()

    def sampled(seed: int, top_k: int = 0, rows: int = 1) -> list[list[int | None]]:
        return list(generate(model, prompt * rows, 3, Sampling(2.0, top_k, seed=seed)))

    assert sampled(1) == sampled(1)
    assert sampled(1, rows=8) != sampled(2, rows=8)
    assert sampled(1, top_k=1) == [[token] for token in greedy(model, prompt, 3)[0]]
    chances = probabilities(ours(model, torch.tensor(prompt))[0, -1], Sampling(2.0))
    drawn = torch.tensor(next(generate(model, prompt * 4000, 1, Sampling(2.0)))).bincount()
    likeliest = int(chances.argmax())
    assert int(drawn[likeliest]) / 4000 == pytest.approx(float(chances[likeliest]), abs=0.03)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "temperature must be 0 or above; got -1.0"),
        ({"top_k": -1}, "top_k must be 0 (off) or above; got -1"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1; got 0.0"),
    ],
)
def test_impossible_sampling_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InferlabError) as fault:
        Sampling(**settings)
    assert str(fault.value) == message


def test_prompts_that_cannot_be_run_are_refused(model: Llama) -> None:
    with pytest.raises(InferlabError, match="prompt 1 has no tokens"):
        next(generate(model, [[5], []], 3))
    with pytest.raises(InferlabError, match="260 positions do not fit the model's context of 256"):
        next(generate(model, [[5] * 250], 10))


def changed(folder: Path, target: Path, **config: Any) -> Path:
    """A copy of a checkpoint with keys of config.json set, or taken out where None."""
    shutil.copytree(folder, target)
    raw = json.loads((target / "config.json").read_text()) | config
    raw = {name: value for name, value in raw.items() if value is not None}
    (target / "config.json").write_text(json.dumps(raw))
    return target


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mamba"}, "unknown architecture of the runtime (model_type) 'mamba'"),
        ({"hidden_size": None}, "hidden_size must be a whole number above 0; found None"),
        (
            {"head_dim": None, "num_attention_heads": 5, "num_key_value_heads": 5},
            "head_dim is missing and hidden_size 32 does not divide by num_attention_heads 5",
        ),
        (
            {"num_key_value_heads": 3},
            "num_attention_heads 4 must be a multiple of num_key_value_heads 3",
        ),
        (
            {"num_key_value_heads": None},
            "layers.0.self_attn.k_proj.weight must be [32, 32] by config.json; found [16, 32]",
        ),
        ({"hidden_act": "gelu"}, "hidden_act must be silu; found 'gelu'"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types mixes full_attention and sliding_attention",
        ),
        ({"rope_parameters": {"rope_type": "longrope"}}, "unknown rope_type 'longrope'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_type 'linear' needs 'factor'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1"),
        ({"quantization_config": {"quant_method": "awq"}}, "is quantized by 'awq'"),
        (
            {"intermediate_size": 64},
            "model.layers.0.mlp.gate_proj.weight must be [64, 32] by config.json; found [48, 32]",
        ),
    ],
)
def test_configs_that_do_not_fit_are_refused(
    config: dict[str, Any], message: str, folder: Path, tmp_path: Path
) -> None:
    target = changed(folder, tmp_path / "model", **config)
    with pytest.raises(InferlabError) as fault:
        load_llama(target)
    assert message in str(fault.value) and str(target) in str(fault.value)
    assert "\n" not in str(fault.value)


def test_defaults_of_a_config(folder: Path, tmp_path: Path) -> None:
    """Keys and values for every head; head_dim from the hidden size; one end token or several."""
    target = changed(folder, tmp_path / "model", num_key_value_heads=None, head_dim=None)
    config = read_config(open_checkpoint(target))
    assert (config.kv_heads, config.head_dim, config.group) == (4, 8, 1)
    assert config.end_tokens == (1,)
    (target / "generation_config.json").write_text('{"eos_token_id": [1, 7]}')
    assert read_config(open_checkpoint(target)).end_tokens == (1, 7)


def test_without_a_number_of_key_heads_every_head_has_its_own(tmp_path: Path) -> None:
    whole = make_model(tmp_path / "whole", num_key_value_heads=4)
    without = changed(whole, tmp_path / "without", num_key_value_heads=None)
    tokens = random_tokens(2, 12)
    found = ours(load_llama(without, "fp32"), tokens)
    assert (found - theirs(without, tokens)).abs().max() < 1e-4
    assert torch.equal(found, ours(load_llama(whole, "fp32"), tokens))


def test_unknown_dtypes_are_refused(folder: Path, model: Llama) -> None:
    with pytest.raises(
        InferlabError, match="unknown dtype of the runtime 'fp8'; known: bf16, fp32"
    ):
        load_llama(folder, "fp8")
    with pytest.raises(InferlabError, match="unknown dtype of the cache 'int4'; known: bf16, fp32"):
        model.new_cache(1, 8, "int4")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("norm.weight", lambda one: one.to(torch.int32), "must be float32 or bfloat16 or float16"),
        (
            "layers.1.mlp.down_proj.weight",
            lambda one: one[:, :40],
            "must be [32, 48] by config.json; found [32, 40]",
        ),
        ("embed_tokens.weight", lambda one: one[:90], "must be [96, 32] by config.json; found [90"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    name: str, change: Callable[[Tensor], Tensor], message: str, folder: Path, tmp_path: Path
) -> None:
    target = changed(folder, tmp_path / "model")
    tensors = load_file(target / "model.safetensors")
    tensors[f"model.{name}"] = change(tensors[f"model.{name}"]).contiguous()
    save_file(tensors, target / "model.safetensors")
    with pytest.raises(InferlabError) as fault:
        load_llama(target)
    assert f"model.{name} " in str(fault.value) and message in str(fault.value)


def test_a_missing_shard_is_named(folder: Path, tmp_path: Path) -> None:
    target = changed(folder, tmp_path / "model")
    tensors = load_file(target / "model.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "model-00001-of-00002.safetensors")}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InferlabError, match=r"lacks 1 of the shards .*model-00001-of-00002"):
        load_llama(target)


@pytest.mark.parametrize("mapped", [True, False])
def test_shards_are_read_and_one_without_its_tensor_is_named(
    mapped: bool, folder: Path, model: Llama, tmp_path: Path
) -> None:
    target = changed(folder, tmp_path / "model")
    tensors = load_file(target / "model.safetensors")
    (target / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "two.safetensors": names[1::2]}
    for shard, held in shards.items():
        save_file({name: tensors[name] for name in held}, target / shard)
    index = {"weight_map": {name: shard for shard, held in shards.items() for name in held}}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    tokens = random_tokens(1, 9)
    assert torch.equal(ours(load_llama(target, "fp32", mapped), tokens), ours(model, tokens))
    save_file({names[1]: tensors[names[1]]}, target / "two.safetensors")
    with pytest.raises(InferlabError, match=r"\S+ is not in the file that should hold it"):
        load_llama(target, "fp32", mapped)


def test_a_missing_tensor_is_named(folder: Path, tmp_path: Path) -> None:
    target = changed(folder, tmp_path / "model")
    tensors = load_file(target / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, target / "model.safetensors")
    with pytest.raises(InferlabError, match=r"holds no tensor 'model.layers.1.mlp.up_proj.weight'"):
        load_llama(target)


def test_packed_weights_that_do_not_fit_are_refused(folder: Path, tmp_path: Path) -> None:
    source = quantized(folder, tmp_path / "int4", "int4")
    settings = json.loads((source / "config.json").read_text())["quantization_config"]
    eight = changed(source, tmp_path / "eight", quantization_config=settings | {"bits": 8})
    with pytest.raises(InferlabError, match="reads 4-bit GPTQ weights; found 8 bits"):
        load_llama(eight)
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.g_idx"
    tensors[name] = tensors[name].flip(0)
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(InferlabError, match=r"down_proj was saved in activation order"):
        load_llama(source)
    source = quantized(folder, tmp_path / "int8", "int8")
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight_scale"
    tensors[name] = tensors[name][:5].clone()
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(InferlabError, match=r"must hold a scale a channel \(32\) or one; found 5"):
        load_llama(source)


def test_plain_models_keep_their_head(model: Llama) -> None:
    assert isinstance(model.head, Dense)
    assert model.head.weight.dtype == torch.float32
