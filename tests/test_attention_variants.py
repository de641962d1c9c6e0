"""MHA, GQA and MQA against torch's own; pooled heads against the closed form; the stage."""

import csv
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_models import make_model, random_tokens
from torch import Tensor
from transformers import AutoModelForCausalLM

from inferlab.attention.grouped import AttentionLayer, LayerCache, grouped_attention, pool_heads
from inferlab.attention.pooled_model import (
    ARMS,
    Comparison,
    RealModelParams,
    from_layer,
    heldout,
    kept,
    pool_model,
    pooled,
    turns,
    window_nats,
)
from inferlab.attention.pooling import (
    PARTS,
    RandomHeadsParams,
    expected_cosine,
    kept_share,
    random_cosines,
    replaced,
)
from inferlab.attention.variants_study import AttentionVariantsParams, cache_table, sdpa
from inferlab.errors import InferlabError
from inferlab.kvcache.architecture import load_architecture
from inferlab.models.runtime.llama import attention
from inferlab.models.runtime.loading import load_llama
from inferlab.params import load
from inferlab.store import save_tensors
from stages import attention_variants


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_layer(heads: int = 4, head_dim: int = 8, hidden: int = 32) -> AttentionLayer:
    inner = heads * head_dim
    shapes = [(inner, hidden)] * 3 + [(hidden, inner)]
    weights = (normal(*shape, seed=n) / math.sqrt(hidden) for n, shape in enumerate(shapes))
    return AttentionLayer(*weights, head_dim)


def test_two_tokens_by_hand() -> None:
    """Equal scores: the first token sees its own value, the second the mean of both."""
    zero, values = torch.zeros(1, 1, 2, 1), torch.tensor([2.0, 6.0]).view(1, 1, 2, 1)
    queries = torch.zeros(1, 3, 2, 1)
    assert grouped_attention(queries, zero, values).flatten().tolist() == [2, 4] * 3


def test_a_head_reads_the_kv_head_of_its_group() -> None:
    values = torch.tensor([1.0, 2.0]).view(1, 2, 1, 1)
    found = grouped_attention(torch.zeros(1, 6, 1, 1), torch.zeros(1, 2, 1, 1), values)
    assert found.flatten().tolist() == [1, 1, 1, 2, 2, 2]


@given(st.sampled_from([1, 2, 4, 8]), st.integers(1, 300), st.integers(0, 20), st.integers(1, 2))
@settings(deadline=None, max_examples=40)
def test_as_torchs_own(kv_heads: int, tokens: int, before: int, batch: int) -> None:
    queries = normal(batch, 8, tokens, 16)
    keys, values = (normal(batch, kv_heads, tokens + before, 16, seed=n) for n in (1, 2))
    seen = torch.ones(tokens, tokens + before, dtype=torch.bool).tril(before)
    expected = F.scaled_dot_product_attention(
        queries, keys, values, attn_mask=seen, enable_gqa=True
    )
    found = grouped_attention(queries, keys, values)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    if before == 0:
        torch.testing.assert_close(sdpa(queries, keys, values), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_decoding_gives_what_prefill_gives(kv_heads: int) -> None:
    layer, states = make_layer().pooled(kv_heads), normal(2, 9, 32)
    whole = layer(states, layer.new_cache(2, 9))
    cache = layer.new_cache(2, 9)
    parts = [layer(part, cache) for part in states.split([4, 1, 1, 3], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-5)
    assert cache.bytes == 2 * 2 * kv_heads * 9 * 8 * 4


def test_mqa_is_mha_whose_heads_are_equal() -> None:
    one = make_layer().pooled(1)
    many = replace(one, key=one.key.repeat(4, 1), value=one.value.repeat(4, 1))
    states = normal(1, 6, 32)
    outputs = [layer(states, layer.new_cache(1, 6)) for layer in (one, many)]
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-5)
    assert many.pooled(2).kv_heads == 2
    torch.testing.assert_close(many.pooled(1).key, one.key)


def test_means_of_neighbours_by_hand() -> None:
    heads = torch.tensor([1.0, 3.0, 10.0, 20.0]).view(1, 4, 1, 1)
    assert pool_heads(heads, 1, 2).flatten().tolist() == [2, 15]
    assert pool_heads(heads, 1, 1).flatten().tolist() == [8.5]
    assert pool_heads(heads, 1, 4).equal(heads)
    keys, values = replaced(heads, heads, "keys", 2)
    assert (keys.flatten().tolist(), values) == ([2, 2, 15, 15], heads)


def test_pooling_weights_is_pooling_what_they_project() -> None:
    layer, states = make_layer(), normal(1, 7, 32)
    pooled = layer.pooled(2)
    cache, small = layer.new_cache(1, 7), pooled.new_cache(1, 7)
    layer(states, cache)
    pooled(states, small)
    torch.testing.assert_close(pool_heads(cache.keys, 1, 2), small.keys, rtol=0, atol=1e-5)
    torch.testing.assert_close(pool_heads(cache.values, 1, 2), small.values, rtol=0, atol=1e-5)


def test_closed_form_at_its_ends() -> None:
    assert kept_share(4, 0) == 0.25
    assert kept_share(4, 1) == kept_share(1, 0) == 1
    assert expected_cosine(4, 1, 9, 2) == expected_cosine(1, 0, 9, 2) == 1
    assert expected_cosine(4, 0, 0, 3) == expected_cosine(4, 0, 7, 3, "values") == 0.5
    assert expected_cosine(4, 0, 2, 1e9, "keys") == pytest.approx(math.exp(-0.75))
    assert expected_cosine(4, 0, 2, 0, "keys") == pytest.approx(0.5)


def test_random_heads_follow_the_closed_form() -> None:
    params = RandomHeadsParams(600, 60, (0.0, 0.5, 1.0), 0.8, 2)
    rows = random_cosines(8, 48, (2, 1), params, "cpu")
    assert len(rows) == 2 * len(PARTS) * 3
    for row in rows:
        assert row["cosine"] == pytest.approx(row["expected"], abs=0.03), row
        if row["correlation"] == 1:
            assert row["cosine"] == pytest.approx(1, abs=1e-4)
    independent = {
        (row["kv_heads"], row["part"]): row["cosine"] for row in rows if row["correlation"] == 0
    }
    assert independent[1, "both"] < independent[2, "both"] < 0.5
    assert independent[1, "both"] < independent[1, "values"] < independent[1, "keys"]


def test_share_that_means_keep() -> None:
    heads = normal(1, 4, 5000, 2)
    assert kept(heads) == pytest.approx(0.25, abs=0.02)
    assert kept(heads[:, :1].expand(1, 4, -1, -1)) == pytest.approx(1)
    common = normal(1, 1, 5000, 2, seed=1)
    mixed = math.sqrt(0.4) * common + math.sqrt(0.6) * heads
    assert kept(mixed) == pytest.approx(kept_share(4, 0.4), abs=0.02)


def turned_copies(seed: int = 0) -> Tensor:
    """Three heads that are one, each in coordinates of its own: [2, 3, 40, 6]."""
    rotations = torch.stack([torch.linalg.qr(normal(6, 6, seed=seed + n))[0] for n in range(3)])
    return normal(2, 1, 40, 6, seed=seed + 9) @ rotations


def test_turning_undoes_rotations() -> None:
    heads = turned_copies()
    rotations = turns(heads)
    eye = torch.eye(6).expand(3, 6, 6)
    torch.testing.assert_close(rotations @ rotations.mT, eye, rtol=0, atol=1e-5)
    torch.testing.assert_close(rotations[0], eye[0], rtol=0, atol=1e-5)
    assert kept(heads) < 0.6
    assert kept(heads @ rotations) == pytest.approx(1, abs=1e-5)


def test_aligned_values_lose_nothing_where_heads_differ_by_rotations() -> None:
    queries, keys, values = (
        normal(2, 6, 40, 6, seed=5),
        normal(2, 3, 40, 6, seed=6),
        turned_copies(),
    )
    mask = torch.ones(2, 40, 40, dtype=torch.bool).tril()
    exact = attention(queries, keys, values, mask)
    found = pooled(queries, keys, values, mask, "values", aligned=True)
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-5)
    plain = pooled(queries, keys, values, mask, "values")
    assert F.cosine_similarity(plain, exact, dim=-1).mean() < 0.8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of four heads and two KV heads. Read only."""
    return make_model(tmp_path_factory.mktemp("model"))


def test_pooled_attention_is_a_model_with_pooled_weights(folder: Path, tmp_path: Path) -> None:
    """transformers, with one KV head whose weights are the mean, as the judge."""
    tokens = random_tokens(2, 20)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    state = theirs.state_dict()
    for name in [n for n in state if "k_proj" in n or "v_proj" in n]:
        state[name] = state[name].unflatten(0, (2, -1)).mean(0)
    config = theirs.config
    config.num_key_value_heads = 1
    smaller = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    smaller.load_state_dict(state)
    logits = smaller.eval()(tokens).logits[:, :-1]
    expected = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    found = window_nats(load_llama(folder, "fp32"), tokens, from_layer(0, ARMS["both"]))
    torch.testing.assert_close(
        found.float(), expected.view(2, -1).mean(1).detach(), rtol=0, atol=1e-4
    )


def test_comparing_changes_nothing(folder: Path) -> None:
    model, tokens = load_llama(folder, "fp32"), random_tokens(2, 20)
    comparison = Comparison(model)
    assert torch.equal(window_nats(model, tokens, comparison), window_nats(model, tokens))
    assert [row["layer"] for row in comparison.rows] == [0, 1]
    for row in comparison.rows:
        assert 0.5 * 0.8 < row["kept_values"] < 1
        assert all(0 < row[f"cosine_{part}"] < 0.999 for part in PARTS)


def test_one_kv_head_is_pooled_already(tmp_path: Path) -> None:
    model = load_llama(make_model(tmp_path / "one", num_key_value_heads=1), "fp32")
    rows, arms = pool_model(model, random_tokens(2, 12))
    assert all(row["cosine_both"] == pytest.approx(1, abs=1e-5) for row in rows)
    assert [row["nats_over_dense"] for row in arms] == pytest.approx([0] * 8, abs=1e-5)


def test_arms_pool_as_many_layers_as_they_say(folder: Path) -> None:
    model, tokens = load_llama(folder, "fp32"), random_tokens(3, 30)
    _, arms = pool_model(model, tokens)
    assert [row["layers"] for row in arms] == [0, *[2] * len(ARMS), 1]
    assert arms[0]["nats_over_dense"] == 0
    assert len({row["token_perplexity"] for row in arms}) == len(arms) == 8


def test_cache_of_eight_kv_heads_is_llama_3_8bs() -> None:
    params = load("attention_variants", AttentionVariantsParams)
    found = {row["cache"]: row["bytes_per_token"] for row in cache_table(params)}
    assert found["gqa fp16"] == load_architecture("llama_3_8b").shape.bytes_per_token("fp16")
    assert found["mha fp16"] == 4 * found["gqa fp16"] == 32 * found["mqa fp16"] == 524_288
    assert found["gqa int8"] == found["gqa fp16"] * (128 + 4) // 256


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 3, 4), (2, 3, 4), (2, 3, 4)), r"must be \[batch, heads, tokens, head_dim\]"),
        (((1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 5, 4)), "keys and values alike"),
        (((1, 2, 3, 4), (1, 2, 3, 5), (1, 2, 3, 5)), "batch and head_dim .* differ"),
        (((1, 4, 3, 4), (1, 3, 3, 4), (1, 3, 3, 4)), "4 heads cannot share 3 KV heads evenly"),
        (((1, 2, 3, 4), (1, 4, 3, 4), (1, 4, 3, 4)), "2 heads cannot share 4 KV heads evenly"),
        (((1, 2, 3, 4), (1, 2, 2, 4), (1, 2, 2, 4)), "each query needs its own key at least"),
    ],
)
def test_shapes_that_do_not_match(shapes: tuple[tuple[int, ...], ...], message: str) -> None:
    with pytest.raises(InferlabError, match=message):
        grouped_attention(*(torch.zeros(shape) for shape in shapes))


def test_heads_that_cannot_be_shared_out() -> None:
    with pytest.raises(InferlabError, match="4 heads cannot be pooled to 3: groups would be un"):
        make_layer().pooled(3)
    with pytest.raises(InferlabError, match="4 heads cannot be pooled to 0"):
        make_layer().pooled(0)


def test_cache_that_is_full() -> None:
    cache = LayerCache(torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 4, 2), used=3)
    with pytest.raises(InferlabError, match="5 tokens do not fit a cache of 4"):
        cache.append(torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 2, 2))
    assert cache.used == 3


def test_too_few_windows() -> None:
    windows = torch.zeros(3, 16, dtype=torch.int32)
    assert heldout(windows, RealModelParams(2, 8)).shape == (2, 8)
    for params in (RealModelParams(4, 8), RealModelParams(2, 17)):
        with pytest.raises(InferlabError, match=r"but 3 of 16 were prepared; lower attention_var"):
            heldout(windows, params)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"groups": 5}, "groups must divide heads, 32; got 5"),
        ({"random": {"queries": 2000}}, "queries must be at most tokens, 1024, .*; got 2000"),
        ({"random": {"correlations": [0.5]}}, r"correlations must contain 0, .*; got \[0.5\]"),
        ({"random": {"correlations": [0, 1.5]}}, "less than or equal to 1; got 1.5"),
        ({"model": {"windows": 1}}, "greater than or equal to 2; got 1"),
        ({"decode_lengths": []}, "at least 1 item"),
    ],
)
def test_parameters_out_of_range(change: dict[str, Any], message: str, workspace: Path) -> None:
    write_params(change)
    with pytest.raises(InferlabError, match=message):
        load("attention_variants", AttentionVariantsParams)


def write_params(change: dict[str, Any]) -> None:
    content = yaml.safe_load(Path("params.yaml").read_text())
    content["run"]["threads"] = 1
    section = content["attention_variants"]
    for key, value in change.items():
        section[key] = section[key] | value if isinstance(value, dict) else value
    Path("params.yaml").write_text(yaml.safe_dump(content))


SMALL = {
    "heads": 4,
    "head_dim": 16,
    "groups": 2,
    "prefill_lengths": [16, 32],
    "decode_lengths": [16, 64],
    "prefill_repeats": 1,
    "decode_repeats": 1,
    "random": {"tokens": 64, "queries": 16, "seeds": 2},
    "model": {"windows": 2, "tokens": 32},
}


@pytest.mark.smoke
def test_stage(workspace: Path, tiny_llama: Path) -> None:
    write_params(SMALL)
    shutil.copytree(tiny_llama, "models/base")
    Path("data/windows").mkdir(parents=True)
    windows = {"input_ids": random_tokens(3, 40, vocabulary=512)}
    save_tensors(Path("data/windows/heldout.safetensors"), windows)
    attention_variants.main()
    found = json.loads(Path("metrics/attention_variants.json").read_text())
    assert found["max_error_sdpa"] < 1e-5
    assert found["cosine_mqa"] < found["cosine_gqa"] < 1
    assert found["model_token_perplexity"] != found["model_token_perplexity_mqa"]
    timing = json.loads(Path("metrics/timing/attention_variants.json").read_text())
    assert timing["decode_attention_ms_mqa_64"] > 0
    rows = {}
    for name in ("cache", "latency", "random_heads", "layers", "perplexity"):
        with Path(f"plots/attention_variants/{name}.csv").open() as file:
            rows[name] = len(list(csv.DictReader(file)))
    assert rows == {
        "cache": 6,
        "latency": 2 * 2 * 3 * 3,
        "random_heads": 2 * 3 * 7,
        "layers": 2,
        "perplexity": 8,
    }
    assert Path("plots/attention_variants/variants.png").stat().st_size > 10_000
