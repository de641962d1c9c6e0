"""Windows by masks against real bounded caches, compacted positions against brute force."""

import csv
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from heldout_text import TITLES, set_params, write_heldout
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_models import make_model, random_tokens
from torch import Tensor
from transformers import AutoTokenizer

from inferlab import params as parameters
from inferlab.data.heldout import heldout_articles, heldout_inputs
from inferlab.errors import InferlabError
from inferlab.kvcache import windows as windows_module
from inferlab.kvcache.scoring import check_length, paired_error, score
from inferlab.kvcache.weights import attention_weights
from inferlab.kvcache.window_study import SlidingWindowParams
from inferlab.kvcache.windows import (
    Arm,
    anchor_share,
    bounded_states,
    full_cache,
    shifted,
    windowed_states,
)
from inferlab.models.runtime.cache import Window
from inferlab.models.runtime.llama import Llama
from inferlab.models.runtime.loading import load_llama
from inferlab.models.runtime.rope import rotate
from stages import sliding_window


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Llama:
    return load_llama(make_model(tmp_path_factory.mktemp("llama")), "fp32")


@pytest.fixture(autouse=True)
def small_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that an input takes several."""
    monkeypatch.setattr(windows_module, "PASS", 16)


@pytest.mark.parametrize("window", [Window(1), Window(8), Window(8, 3), Window(20, 4)])
def test_masks_give_what_a_bounded_cache_decodes(model: Llama, window: Window) -> None:
    tokens = random_tokens(2, 70)
    arm = Arm(window)
    masked = windowed_states(model, tokens, {"arm": arm, "wider": Arm(Window(40))})["arm"]
    decoded, cache = bounded_states(model, tokens, window)
    torch.testing.assert_close(masked, decoded, rtol=0, atol=1e-4)
    assert cache.slots == min(70, window.size + 63)


def test_until_the_window_is_full_nothing_changes(model: Llama) -> None:
    tokens = random_tokens(1, 60)
    states = windowed_states(model, tokens, {"w": Arm(Window(24)), "c": Arm(Window(24, 2))})
    for name in ("w", "c"):
        assert torch.equal(states[name][:, :24], states["full"][:, :24])
        assert not torch.isclose(states[name][:, 24:], states["full"][:, 24:], atol=1e-4).all()


def test_a_narrow_window_diverges_more(model: Llama) -> None:
    tokens = random_tokens(2, 80)
    arms = {f"w{size}": Arm(Window(size)) for size in (4, 16, 64)}
    scores = score(model, windowed_states(model, tokens, arms), tokens, "full")
    found = [scores[name].kl() for name in ("w4", "w16", "w64", "full")]
    assert found == sorted(found, reverse=True)
    assert found[-2] > 0 and found[-1] == 0


def brute_compacted(queries: Tensor, keys: Tensor, values: Tensor, arm: Arm, rope: Any) -> Tensor:
    """Each query alone, keys and query rotated by their place in the cache; all unrotated here."""
    outputs = torch.zeros_like(queries)
    group = queries.shape[1] // keys.shape[1]
    for place in range(queries.shape[2]):
        seen = [key for key in range(arm.window.anchors) if key <= place]
        first = max(len(seen), place - arm.window.recent + 1)
        seen += range(first, place + 1)
        cos, sin = rope.angles(torch.arange(len(seen)))
        turned = rotate(keys[0, :, seen], cos, sin)
        query = rotate(queries[0, :, place], cos[-1], sin[-1])
        for head in range(queries.shape[1]):
            scores = turned[head // group] @ query[head] / math.sqrt(queries.shape[-1])
            outputs[0, head, place] = scores.softmax(0) @ values[0, head // group, seen]
    return outputs


def test_compacted_positions_against_brute_force(model: Llama) -> None:
    arm, length = Arm(Window(7, 2), "compacted"), 20
    generator = torch.Generator().manual_seed(1)
    queries, keys, values = (
        torch.randn(1, heads, length, 8, generator=generator) for heads in (4, 2, 2)
    )
    rope = model.config.rope
    expected = brute_compacted(queries, keys, values, arm, rope)
    cache = full_cache(model, 1, length)
    cache.window = arm.window
    positions, _ = cache.place(length)
    cos, sin = rope.angles(positions[0])
    attend = shifted(model, cache, arm, 0)
    rotated = (rotate(queries, cos, sin), rotate(keys, cos, sin))
    found = attend(0, *rotated, values, cache.visible(positions))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_positions_matter_for_anchors_alone(model: Llama) -> None:
    tokens = random_tokens(1, 60)
    anchored, alone = Window(20, 4), Window(20)
    arms = {
        "kept": Arm(anchored),
        "far 0": Arm(anchored, "distant"),
        "compacted": Arm(anchored, "compacted"),
        "alone": Arm(alone),
        "alone, compacted": Arm(alone, "compacted"),
    }
    states = windowed_states(model, tokens, arms, far=0)
    torch.testing.assert_close(states["far 0"], states["kept"], rtol=0, atol=1e-4)
    torch.testing.assert_close(states["alone, compacted"], states["alone"], rtol=0, atol=1e-4)
    assert (states["compacted"] - states["kept"]).abs().max() > 1e-2
    far = windowed_states(model, tokens, {"far": Arm(anchored, "distant")}, far=1000)["far"]
    assert (far - states["kept"]).abs().max() > 1e-2


def test_weights_by_hand() -> None:
    """Two query heads of one KV head; scores 0 and ln 3 give a quarter and three quarters."""
    keys = torch.tensor([[[[0.0], [math.log(3)]]]])
    queries = torch.ones(1, 2, 2, 1)
    found = attention_weights(queries, keys, torch.ones(2, 2, dtype=torch.bool).tril())
    expected = [[1.0, 0.0], [0.25, 0.75]] * 2
    torch.testing.assert_close(found, torch.tensor([[expected]]))


def test_anchor_share_of_even_attention(model: Llama) -> None:
    """Without queries every slot gets the same: 4 of 29 to 4 of 32 for the last four tokens."""
    layers = [SimpleNamespace(**vars(layer)) for layer in model.layers]
    for layer in layers:
        real = layer.qkv
        layer.qkv = lambda inputs, real=real: real(inputs) * torch.tensor([0.0] * 32 + [1.0] * 32)
    even = Llama(model.config, model.embedding, layers, model.norm, model.head, compiled=False)
    expected = sum(4 / seen for seen in (29, 30, 31, 32)) / 4
    assert anchor_share(even, random_tokens(1, 32), 4, 4) == pytest.approx(expected)


def test_scores_by_hand() -> None:
    """Tokens 0 and 1 come; the second arm is like the first but for the last position."""
    full = torch.tensor([0.5, 0.3, 0.2]).log()
    other = torch.tensor([0.25, 0.55, 0.2]).log()
    states = {"full": full.expand(1, 3, 3), "other": torch.stack([full, other, other])[None]}
    model: Any = SimpleNamespace(logits=lambda states: states.float())
    found = score(model, states, torch.tensor([[2, 0, 1]]), "full")
    assert found["full"].perplexity() == pytest.approx(1 / math.sqrt(0.5 * 0.3))
    assert found["other"].nats[0].tolist() == pytest.approx([-math.log(0.5), -math.log(0.55)])
    divergence = 0.5 * math.log(0.5 / 0.25) + 0.3 * math.log(0.3 / 0.55)
    assert found["other"].divergence[0].tolist() == pytest.approx([0, divergence], abs=1e-6)
    assert found["other"].kl(first=2) == pytest.approx(divergence, abs=1e-6)
    assert found["full"].correct[0].tolist() == [True, False]
    assert (found["full"].accuracy(), found["other"].accuracy()) == (0.5, 1.0)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**16), st.integers(2, 6))
def test_error_of_a_constant_difference_is_none(seed: int, blocks: int) -> None:
    one = torch.randn(2, blocks * 64, generator=torch.Generator().manual_seed(seed))
    assert paired_error(one + 3, one) == pytest.approx(0, abs=1e-6)
    assert paired_error(one, torch.zeros_like(one)) > 0


def test_error_of_independent_values() -> None:
    values = torch.randn(4, 64 * 64, generator=torch.Generator().manual_seed(0))
    expected = 1 / math.sqrt(values.numel())
    assert paired_error(values, torch.zeros_like(values)) == pytest.approx(expected, rel=0.2)


def test_heldout_text_is_that_of_prepare(workspace: Path, tiny_llama: Path) -> None:
    write_heldout(tiny_llama)
    found = heldout_inputs(tiny_llama, Path("data/corpus"), Path("data/windows"), 2, 200)
    assert found.shape == (2, 200) and found.dtype == torch.long
    text = AutoTokenizer.from_pretrained(tiny_llama).decode(found[0])
    assert text.startswith("b. The river rises in the hills north of the old town")
    manifest = json.loads(Path("data/windows/manifest.json").read_text())
    manifest["tokens"]["heldout"] += 1
    Path("data/windows/manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(InferlabError, match=r"tokens, but data/windows was made of .*run prepare"):
        heldout_inputs(tiny_llama, Path("data/corpus"), Path("data/windows"), 2, 200)


def test_articles_that_are_missing_are_named() -> None:
    articles = [{"title": "a", "text": "one", "format": "plain"}]
    manifest = {"titles": {"heldout": list(TITLES)}}
    with pytest.raises(InferlabError, match=r"lacks 1 of the 2 articles .* for instance 'b'"):
        heldout_articles(articles, manifest)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"anchors": 128}, "windows must be larger than anchors 128: .* got 128"),
        ({"windows": [2000]}, "windows must be more than 64 below tokens 2048"),
        ({"decoded": 128}, "decoded must be above the smallest window, 128"),
        ({"positions": {"window": 300, "far_tokens": 1}}, "positions.window must be one of window"),
        ({"dtype": "fp8"}, "dtype must be one of 'bf16', 'fp32'; got 'fp8'"),
        ({"window": 3}, "window is not a parameter; .*did you mean windows"),
    ],
)
def test_parameters_that_are_refused(workspace: Path, changes: Any, message: str) -> None:
    set_params("sliding_window", **changes)
    with pytest.raises(InferlabError, match=message) as error:
        parameters.load("sliding_window", SlidingWindowParams)
    assert "\n" not in str(error.value)


def test_what_does_not_fit_is_refused(model: Llama) -> None:
    with pytest.raises(InferlabError, match="tokens is 257, but the model's context is 256 tokens"):
        check_length(model.config, 257, "sliding_window.tokens")
    with pytest.raises(InferlabError, match="window 4 must be larger than its anchors 4"):
        Arm(Window(4, 4))
    with pytest.raises(InferlabError, match=r"treatment of positions 'compact'; .*compacted\?"):
        Arm(Window(4, 2), "compact")


@pytest.mark.smoke
def test_stage(workspace: Path, tiny_llama: Path) -> None:
    shutil.copytree(tiny_llama, "models/base")
    write_heldout(tiny_llama)
    positions = {"window": 64, "far_tokens": 4000}
    changes = {"tokens": 192, "windows": [16, 64], "anchors": 2, "decoded": 64}
    set_params("sliding_window", positions=positions, **changes)
    sliding_window.main()
    found = json.loads(Path("metrics/sliding_window.json").read_text())
    arms = ["full", "w16", "w16_anchored", "w64", "w64_anchored"]
    assert all(found[f"token_perplexity_{arm}"] > 1 for arm in arms)
    assert found["bounded_cache_kl_nats"] < 1e-3
    with Path("plots/sliding_window/arms.csv").open() as file:
        rows = {row["arm"]: row for row in csv.DictReader(file)}
    assert set(rows) == {*arms, "w64_compacted", "w64_distant"}
    assert float(rows["w16"]["kl_nats"]) > float(rows["w64"]["kl_nats"]) > 0
    sizes = [int(rows[arm]["cache_bytes"]) for arm in ("w16", "w64", "full")]
    assert sizes == [2 * 2 * 2 * 32 * 2 * slots for slots in (16 + 64, 64 + 64, 193)]
    assert Path("plots/sliding_window/windows.png").stat().st_size > 10_000


@pytest.mark.smoke
def test_stage_refuses_more_than_the_context(workspace: Path, tiny_llama: Path) -> None:
    shutil.copytree(tiny_llama, "models/base")
    write_heldout(tiny_llama)
    with pytest.raises(SystemExit, match=r"sliding_window.tokens is 2048, but .* context is 512"):
        sliding_window.main()
    assert not list(Path().rglob("*.partial")) and not Path("metrics").exists()
