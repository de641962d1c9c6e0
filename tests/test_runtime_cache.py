"""The cache: masks and the ring against brute force, 8 bits, going back, and what is refused."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_models import make_model, random_tokens
from torch import Tensor

from inferlab.errors import InferlabError
from inferlab.models.runtime import cache as cache_module
from inferlab.models.runtime.cache import EMPTY, KVCache, Window, quantize_heads
from inferlab.models.runtime.llama import Llama, attention
from inferlab.models.runtime.loading import load_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Llama:
    return load_llama(make_model(tmp_path_factory.mktemp("llama")), "fp32")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that rings turn over within few tokens."""
    monkeypatch.setattr(cache_module, "CHUNK", 5)


def brute_mask(length: int, size: int, anchors: int) -> Tensor:
    """Which of `length` positions each one sees, one at a time."""
    mask = torch.zeros(length, length, dtype=torch.bool)
    for query in range(length):
        seen = [key for key in range(anchors) if key <= query]
        seen += range(max(0, query - (size - anchors) + 1), query + 1)
        mask[query, seen] = True
    return mask


def masked_logits(model: Llama, tokens: Tensor, mask: Tensor) -> Tensor:
    """The model over a full cache, with `mask` [length, length] in place of the causal one."""

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor, _: Tensor) -> Tensor:
        return attention(queries, keys, values, mask[None].expand(len(queries), -1, -1))

    cache = model.new_cache(len(tokens), tokens.shape[1])
    return model.logits(model.hidden(tokens, cache, attend=attend))


def test_mask_by_hand() -> None:
    """Window of three with one anchor: the first position, the one before, and the token itself."""
    assert brute_mask(5, 3, 1).int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 0, 1, 1, 0],
        [1, 0, 0, 1, 1],
    ]


@pytest.mark.parametrize(("size", "anchors"), [(1, 0), (6, 0), (6, 2), (7, 6), (30, 4), (100, 1)])
@pytest.mark.parametrize("step", [1, 3, 40])
def test_bounded_cache_sees_what_the_mask_shows(
    model: Llama, size: int, anchors: int, step: int
) -> None:
    """Token by token, in drafts, and all at once (in chunks), while the ring turns over."""
    tokens = random_tokens(2, 40)
    cache = model.new_cache(2, 40, window=Window(size, anchors))
    assert cache.slots == min(40, size + 4)
    assert cache.keys.shape[3] == cache.slots + 1
    found = torch.cat([model.forward(part, cache) for part in tokens.split(step, 1)], 1)
    expected = masked_logits(model, tokens, brute_mask(40, size, anchors))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_any_course_of_drafts_ends_like_one_pass(model: Llama, data: st.DataObject) -> None:
    """Sequences of a batch grow, pause (as padding) and go back, each on its own."""
    size = data.draw(st.integers(2, 12))
    window = data.draw(st.sampled_from([None, Window(size, data.draw(st.integers(0, size - 1)))]))
    tokens, cache = random_tokens(2, 64, seed=size), model.new_cache(2, 64, window=window)
    lengths = torch.zeros(2, dtype=torch.long)
    for _ in range(data.draw(st.integers(1, 6))):
        columns = data.draw(st.integers(1, 5))
        flags = st.lists(st.booleans(), min_size=columns, max_size=columns)
        real = torch.tensor([data.draw(flags) for _ in range(2)])
        places = (lengths[:, None] + real.cumsum(1) - 1).clamp(min=0)
        model.forward(tokens.gather(1, places), cache, real)
        lengths = lengths + real.sum(1)
        # What may be rejected is at most what the last pass brought.
        back = torch.tensor([data.draw(st.integers(0, int(n))) for n in real.sum(1)])
        cache.truncate(lengths - back)
        lengths = lengths - back
    assert torch.equal(cache.lengths, lengths)
    following = tokens.gather(1, lengths[:, None])
    found = model.forward(following, cache)[:, 0]
    for row, length in enumerate(lengths.tolist()):
        limit = (window.size, window.anchors) if window else (99, 0)
        mask = brute_mask(length + 1, *limit)
        expected = masked_logits(model, tokens[row : row + 1, : length + 1], mask)[0, -1]
        torch.testing.assert_close(found[row], expected, rtol=0, atol=1e-4)


def test_grouped_heads_attend_as_repeated_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(2, 6, 3, 8, generator=generator)
    keys, values = torch.randn(2, 2, 2, 10, 8, generator=generator)
    mask = torch.rand(2, 3, 10, generator=generator) > 0.4
    repeated = [one.repeat_interleave(3, dim=1) for one in (keys, values)]
    expected = F.scaled_dot_product_attention(queries, *repeated, attn_mask=mask[:, None])
    torch.testing.assert_close(attention(queries, keys, values, mask), expected)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
def test_cached_decoding_equals_one_pass(model: Llama, dtype: str) -> None:
    """In every dtype of the cache: what is read back is what was stored, whenever it was."""
    tokens = random_tokens(2, 12)
    whole = model.forward(tokens, model.new_cache(2, 12, dtype))
    cache = model.new_cache(2, 20, dtype)
    steps = torch.cat([model.forward(part, cache) for part in tokens.split(1, 1)], 1)
    torch.testing.assert_close(steps, whole, rtol=0, atol=1e-4)


def test_eight_bits_cost_little_and_save_memory(model: Llama) -> None:
    tokens = random_tokens(1, 30)
    logits, sizes = {}, {}
    for dtype in ("fp32", "bf16", "int8"):
        cache = model.new_cache(1, 30, dtype)
        logits[dtype], sizes[dtype] = model.forward(tokens, cache), cache.bytes
    error = (logits["int8"] - logits["fp32"]).abs().max()
    assert 0 < error < 0.05 * logits["fp32"].abs().max()
    rows = 2 * 2 * 31 * 2  # layers, key heads, slots, keys and values
    assert sizes == {"fp32": rows * 8 * 4, "bf16": rows * 8 * 2, "int8": rows * (8 + 4)}


def test_scale_of_a_vector_by_hand() -> None:
    codes, scale = quantize_heads(torch.tensor([[1.27, -0.5, 0.004], [0.0, 0.0, 0.0]]))
    assert codes.tolist() == [[127, -50, 0], [0, 0, 0]]
    assert scale.tolist() == pytest.approx([0.01, 1.0])


def test_padding_writes_into_the_spare_slot_only(model: Llama) -> None:
    cache = model.new_cache(1, 6)
    model.forward(random_tokens(1, 4), cache, torch.tensor([[False, True, False, True]]))
    assert cache.positions[0].tolist() == [0, 1, *[EMPTY] * 5]
    assert cache.used == 2
    assert not cache.keys[:, :, :, 2:6].any() and cache.keys[:, :, :, 6].any()


def test_a_full_cache_refuses_and_stays_as_it_was(model: Llama) -> None:
    cache = model.new_cache(1, 6)
    model.forward(random_tokens(1, 4), cache)
    model.forward(random_tokens(1, 2), cache)
    before = cache.positions.clone()
    with pytest.raises(InferlabError, match="the cache of 6 positions is full: a sequence of 7"):
        model.forward(random_tokens(1, 1), cache)
    assert torch.equal(cache.positions, before) and cache.lengths.tolist() == [6]
    cache.truncate(5)
    model.forward(random_tokens(1, 1), cache)


def test_a_window_does_not_lift_the_limit(model: Llama) -> None:
    cache = model.new_cache(1, 12, window=Window(4, 1))
    model.forward(random_tokens(1, 12), cache)
    with pytest.raises(InferlabError, match="the cache of 12 positions is full"):
        model.forward(random_tokens(1, 1), cache)


def test_context_and_window_that_do_not_fit_are_refused(model: Llama) -> None:
    with pytest.raises(InferlabError, match="257 positions do not fit the model's context of 256"):
        model.new_cache(1, 257)
    for size, anchors in ((4, 4), (3, 4), (4, -1)):
        with pytest.raises(InferlabError, match=f"window {size} must be larger than its anchors"):
            Window(size, anchors)


def test_going_back_further_than_a_ring_holds_is_refused(model: Llama) -> None:
    cache = model.new_cache(1, 60, window=Window(8, 2))
    model.forward(random_tokens(1, 40), cache)
    cache.truncate(37)
    with pytest.raises(InferlabError, match=r"goes back 5 tokens from the furthest .* asked for 6"):
        cache.truncate(34)
    assert cache.lengths.tolist() == [37]
    full = model.new_cache(1, 60)
    model.forward(random_tokens(1, 40), full)
    full.truncate(0)
    assert (full.positions == EMPTY).all()


def test_sequences_take_slots_in_their_own_order(model: Llama) -> None:
    """A ring of 3 + 4 slots after one anchor: position 8 replaces position 1."""
    cache = KVCache(model.config, 1, 60, window=Window(4, 1))
    cache.place(5)
    cache.place(4)
    assert cache.positions[0].tolist() == [0, 8, 2, 3, 4, 5, 6, 7, EMPTY]


def test_mapped_file_is_not_written(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    before = (folder / "model.safetensors").read_bytes()
    loaded = load_llama(folder, "fp32")
    loaded.forward(random_tokens(1, 8), loaded.new_cache(1, 8))
    assert (folder / "model.safetensors").read_bytes() == before
