"""Choosing layers, acceptance, distillation through a shared head, the checkpoint, the stage."""

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from conftest import TEXT
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_models import make_model, random_tokens
from torch import Tensor
from transformers import AutoModelForCausalLM

from inferlab.data.windows import cut_windows, tokenise
from inferlab.distillation.acceptance import (
    compare,
    interval,
    overlap,
    target_states,
)
from inferlab.distillation.depth import (
    Trunk,
    divergence,
    evenly_spaced,
    importances,
    most_important,
    removed_in_turn,
)
from inferlab.distillation.draft import (
    DraftParams,
    TextParams,
    check,
    first_tokens,
    training_windows,
)
from inferlab.distillation.draft_checkpoint import save_draft, shares
from inferlab.distillation.shallow import DistillationParams, Exam, distance, distil
from inferlab.errors import InferlabError
from inferlab.evaluation.tasks import write_task
from inferlab.models.loading import load_model, load_tokenizer
from inferlab.models.runtime.config import read_config
from inferlab.models.runtime.decoding import generate
from inferlab.models.runtime.loading import load_llama
from inferlab.params import load
from inferlab.reporting.variants import variant_rows
from inferlab.speculative.closed_form import expected_tokens
from inferlab.store import load_tensors, open_checkpoint, save_tensors
from stages import draft, evaluate

LAYERS = 5
TOKENS = random_tokens(3, 24, seed=1)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of five blocks with tied embeddings. Read only."""
    return make_model(
        tmp_path_factory.mktemp(request.param),
        request.param,
        num_hidden_layers=LAYERS,
        tie_word_embeddings=True,
    )


@pytest.fixture
def trunk(folder: Path) -> Trunk:
    return Trunk(load_model(folder, 1))


@torch.no_grad()
def log_probabilities(folder: Path, tokens: Tensor, kept: list[int] | None = None) -> Tensor:
    """By transformers alone: [windows, length, vocabulary], of some blocks if asked for."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    if kept is not None:
        blocks = model.model.layers
        model.model.layers = torch.nn.ModuleList(blocks[number] for number in kept)
    return model(tokens, use_cache=False).logits.float().log_softmax(-1)


def test_acceptance_by_hand() -> None:
    """min(0.5, 0.2) + min(0.3, 0.2) + min(0.2, 0.6) = 0.6; a distribution accepts itself."""
    target, other = torch.tensor([[0.5, 0.3, 0.2]]).log(), torch.tensor([[0.2, 0.2, 0.6]]).log()
    assert float(overlap(target, other)) == pytest.approx(0.6)
    assert float(overlap(target, target)) == pytest.approx(1)


@given(st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_acceptance_is_one_minus_total_variation(seed: int) -> None:
    logits = torch.randn(2, 4, 9, generator=torch.Generator().manual_seed(seed)) * 3
    target, other = logits.double().log_softmax(-1)
    variation = (target.exp() - other.exp()).abs().sum(-1) / 2
    assert torch.allclose(overlap(target, other), 1 - variation)
    assert torch.equal(overlap(target, other), overlap(other, target))


def test_acceptance_is_what_sampling_accepts() -> None:
    """Drafted tokens are kept with chance min(1, p/q)."""
    generator = torch.Generator().manual_seed(0)
    target, other = (torch.randn(2, 8, generator=generator) * 2).softmax(-1)
    drawn = torch.multinomial(other, 200_000, replacement=True, generator=generator)
    chance = (target[drawn] / other[drawn]).clamp(max=1)
    kept = (torch.rand(len(drawn), generator=generator) < chance).double().mean()
    assert float(kept) == pytest.approx(float(overlap(target.log(), other.log())), abs=0.005)


def test_expected_tokens_by_hand_and_by_sampling() -> None:
    assert expected_tokens(0.0, 4) == 1
    assert expected_tokens(1.0, 4) == 5
    assert expected_tokens(0.5, 4) == pytest.approx((1 - 0.5**5) / (1 - 0.5))
    hits = np.random.default_rng(0).random((100_000, 4)) < 0.6
    drawn = 1 + np.cumprod(hits, axis=1).sum(1).mean()
    assert expected_tokens(0.6, 4) == pytest.approx(drawn, abs=0.01)


def test_interval_is_students() -> None:
    values = torch.tensor([0.1, 0.3], dtype=torch.float64)
    assert interval(values) == pytest.approx(12.7062 * 0.1, rel=1e-4)
    assert interval(torch.full((5,), 0.4).double()) == 0


def test_even_spacing_takes_both_ends() -> None:
    assert evenly_spaced(30, 10) == (0, 3, 6, 10, 13, 16, 19, 23, 26, 29)
    assert evenly_spaced(5, 1) == (0,)
    assert evenly_spaced(4, 4) == (0, 1, 2, 3)


def test_the_largest_stay_in_the_models_order() -> None:
    rows = [{"layer": n, "kl_rise": value} for n, value in enumerate([0.5, 0.1, 0.9, 0.5, 0.2])]
    assert most_important(rows, "kl_rise", 2) == (0, 2)
    assert most_important(rows, "kl_rise", 3) == (0, 2, 3)


def test_importances_equal_transformers(folder: Path, trunk: Trunk) -> None:
    rows = importances(trunk, TOKENS)
    whole = log_probabilities(folder, TOKENS)
    for row in rows:
        kept = [number for number in range(LAYERS) if number != row["layer"]]
        without = log_probabilities(folder, TOKENS, kept)
        nats = [
            F.nll_loss(one[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())
            for one in (whole, without)
        ]
        kl = (whole.exp() * (whole - without)).sum(-1)[:, :-1].mean()
        assert row["loss_rise"] == pytest.approx(float(nats[1] - nats[0]), abs=0.01)
        assert row["kl_rise"] == pytest.approx(float(kl), abs=0.01)
        assert 0 < row["block_influence"] < 2


@torch.no_grad()
def test_a_block_that_does_nothing_is_removed_first(trunk: Trunk) -> None:
    block = trunk.stack.blocks[3]
    block.self_attn.o_proj.weight.zero_()
    block.mlp.down_proj.weight.zero_()
    rows = importances(trunk, TOKENS)
    idle = rows[3]
    assert abs(idle["block_influence"]) < 1e-5
    assert (idle["loss_rise"], idle["kl_rise"]) == (0, 0)
    for measure in ("block_influence", "kl_rise"):
        assert most_important(rows, measure, LAYERS - 1) == (0, 1, 2, 4)
    assert removed_in_turn(trunk, TOKENS, LAYERS - 1, candidates=1) == (0, 1, 2, 4)


def test_removal_in_turn_equals_brute_force(folder: Path, trunk: Trunk) -> None:
    whole = log_probabilities(folder, TOKENS)[:, :-1].flatten(0, 1)
    left = list(range(LAYERS))
    for _ in range(3):
        options = [[one for one in left if one != gone] for gone in left]
        losses = [
            divergence(whole, log_probabilities(folder, TOKENS, kept)[:, :-1].flatten(0, 1))
            for kept in options
        ]
        left = options[int(np.argmin(losses))]
    assert removed_in_turn(trunk, TOKENS, 2, candidates=LAYERS) == tuple(left)


def test_the_target_as_its_own_draft(trunk: Trunk) -> None:
    found = compare(trunk, TOKENS, target_states(trunk, TOKENS, 2), trunk.stack, 2)
    assert found.acceptance == pytest.approx(1)
    assert found.greedy_agreement == 1


def test_comparison_equals_transformers(folder: Path, trunk: Trunk) -> None:
    kept = [0, 2, 4]
    found = compare(trunk, TOKENS, target_states(trunk, TOKENS, 3), trunk.stack.only(kept), 2)
    target, other = (log_probabilities(folder, TOKENS, one)[:, :-1] for one in (None, kept))
    nats = -other.gather(2, TOKENS[:, 1:, None]).mean()
    assert torch.allclose(found.accepted, overlap(target, other).double().mean(1), atol=0.005)
    agreed = (target.argmax(-1) == other.argmax(-1)).double().mean(1)
    assert torch.allclose(found.greedy, agreed, atol=2 / TOKENS.shape[1])
    assert math.log(found.perplexity) == pytest.approx(float(nats), rel=0.01)


def test_distance_and_its_slope_equal_autograd(trunk: Trunk) -> None:
    trunk.head = trunk.head.float()
    states = torch.randn(600, trunk.head.shape[1], requires_grad=True)
    teacher = torch.randn(600, trunk.head.shape[1])
    found = distance(states, teacher, trunk)
    (slope,) = torch.autograd.grad(found, states)
    own, target = (F.log_softmax(F.linear(one, trunk.head), -1) for one in (states, teacher))
    expected = F.kl_div(own, target, reduction="batchmean", log_target=True)
    assert float(found) == pytest.approx(float(expected), rel=1e-5)
    assert torch.allclose(slope, torch.autograd.grad(expected, states)[0], atol=1e-6)
    assert float(distance(teacher.requires_grad_(), teacher.detach(), trunk)) == pytest.approx(
        0, abs=1e-5
    )


def settings_of(**changes: float) -> DistillationParams:
    plain = dict(steps=40, windows=6, tokens=24, batch=3, learning_rate=3e-3, warmup=0.1)
    return DistillationParams(**(plain | dict(weight_decay=0.0, checks=2) | changes))


@pytest.fixture
def exam(trunk: Trunk) -> Exam:
    return Exam(TOKENS, target_states(trunk, TOKENS, 3), 3)


def test_distillation_teaches_the_target_and_repeats(trunk: Trunk, exam: Exam) -> None:
    """Trained on what it is scored on; the base's weights stay as they are."""
    windows = torch.cat([TOKENS, TOKENS])
    original = {name: value.clone() for name, value in trunk.stack.state_dict().items()}
    start = trunk.stack.only([0, 2, 4])
    before = exam.score(trunk, start)
    stack, checks = distil(trunk, start, windows, exam, settings_of(), seed=0)
    assert [one.step for one in checks] == [20, 40]
    assert checks[1].loss < checks[0].loss
    assert checks[1].found.acceptance > before.acceptance + 0.3
    again, _ = distil(trunk, start, windows, exam, settings_of(), seed=0)
    assert all(map(torch.equal, stack.state_dict().values(), again.state_dict().values()))
    assert all(torch.equal(original[name], one) for name, one in trunk.stack.state_dict().items())


def test_steps_are_what_was_asked_for_whatever_the_windows(trunk: Trunk, exam: Exam) -> None:
    for windows, batch, steps in ((6, 4, 7), (2, 3, 5), (6, 1, 1)):
        params = settings_of(windows=windows, batch=batch, steps=steps, checks=1)
        _, checks = distil(
            trunk, trunk.stack.only([0]), TOKENS.repeat(2, 1)[:windows], exam, params, 0
        )
        assert [one.step for one in checks] == [steps]


@pytest.mark.parametrize("tied", [True, False])
def test_checkpoint_loads_everywhere_and_is_what_was_scored(tmp_path: Path, tied: bool) -> None:
    base = make_model(
        tmp_path / "base", num_hidden_layers=LAYERS, tie_word_embeddings=tied, vocab_size=96
    )
    trunk = Trunk(load_model(base, 1))
    exam = Exam(TOKENS, target_states(trunk, TOKENS, 3), 3)
    kept = (0, 3)
    stack, checks = distil(
        trunk, trunk.stack.only(kept), TOKENS, exam, settings_of(windows=3), seed=0
    )
    target = tmp_path / "draft"
    target.mkdir()
    save_draft(target, open_checkpoint(base), kept, stack)
    loaded, info = AutoModelForCausalLM.from_pretrained(
        target, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert len(loaded.model.layers) == 2
    embedding, head = loaded.get_input_embeddings().weight, loaded.get_output_embeddings().weight
    assert (embedding.data_ptr() == head.data_ptr()) == tied
    with torch.no_grad():
        own = loaded.eval()(TOKENS).logits.float().log_softmax(-1)[:, :-1]
    accepted = overlap(log_probabilities(base, TOKENS)[:, :-1], own).double().mean()
    assert float(accepted) == pytest.approx(checks[-1].found.acceptance, abs=0.005)
    tokens = list(generate(load_llama(target), [[5, 6]], 3, stop_at_end=False))
    assert len(tokens) == 3


def test_shares_by_hand(tmp_path: Path) -> None:
    """A block has 2·32² + 2·16·32 + 3·32·48 + 2·32 = 7744 weights, all else 96·32 + 32."""
    base = make_model(tmp_path / "base", num_hidden_layers=LAYERS, tie_word_embeddings=True)
    trunk = Trunk(load_model(base, 1))
    target = tmp_path / "draft"
    target.mkdir()
    save_draft(target, open_checkpoint(base), (1, 2), trunk.stack.only((1, 2)))
    found = shares(open_checkpoint(target), open_checkpoint(base))
    share = (2 * 7744 + 3104) / (5 * 7744 + 3104)
    assert found == {"layers_share": 0.4, "parameters_share": share, "bytes_share": share}


def test_kinds_of_layers_follow_the_kept_ones(tmp_path: Path) -> None:
    base = make_model(tmp_path / "base", "qwen3", num_hidden_layers=LAYERS)
    trunk = Trunk(load_model(base, 1))
    (tmp_path / "draft").mkdir()
    save_draft(tmp_path / "draft", open_checkpoint(base), (0, 4), trunk.stack.only((0, 4)))
    config = open_checkpoint(tmp_path / "draft").config
    assert config["num_hidden_layers"] == len(config["layer_types"]) == 2


def test_training_windows_are_spread_and_do_not_overlap() -> None:
    found = training_windows(torch.arange(107), settings_of(windows=3, tokens=10))
    assert found[:, 0].tolist() == [0, 40, 90]
    assert (found - found[:, :1] == torch.arange(10)).all()


def test_too_little_text_is_named() -> None:
    with pytest.raises(
        InferlabError, match="wants 6 windows of 24 tokens, but the training text has 143"
    ):
        training_windows(torch.arange(143), settings_of())
    with pytest.raises(
        InferlabError, match=r"heldout wants 4 windows of 9 tokens, but 3 of 24 were"
    ):
        first_tokens(TOKENS, TextParams(4, 9), "heldout")
    with pytest.raises(
        InferlabError, match=r"wants 2 windows of 25 tokens, but 3 of 24 were prepared"
    ):
        first_tokens(TOKENS, TextParams(2, 25), "heldout")


def parameters() -> dict[str, Any]:
    content = yaml.safe_load(Path("params.yaml").read_text())
    content["run"]["threads"] = 1
    section = content["draft"]
    section |= {"keep": 1, "batch": 2}
    section["importance"] |= {"tokens": 32}
    section["heldout"] |= {"windows": 3, "tokens": 48}
    section["distillation"] |= {"steps": 6, "windows": 4, "tokens": 32, "checks": 2}
    section["decode"] = {"prompt_tokens": 8, "new_tokens": 4, "rounds": 1}
    return content


def write(content: dict[str, Any]) -> None:
    Path("params.yaml").write_text(yaml.safe_dump(content))


@pytest.fixture
def project(workspace: Path, tiny_llama: Path) -> Iterator[dict[str, Any]]:
    """The current folder holds a model and windows; gives the parameters written there."""
    content = parameters()
    write(content)
    shutil.copytree(tiny_llama, "models/base")
    stream = tokenise(
        load_tokenizer(tiny_llama), [{"title": "a", "text": TEXT, "format": "plain"}], "heldout"
    )
    windows = cut_windows(stream, 6, 64, "none", None)
    Path("data/windows").mkdir(parents=True)
    save_tensors(Path("data/windows/heldout.safetensors"), windows)
    save_tensors(
        Path("data/windows/calibration.safetensors"), {"input_ids": windows["input_ids"].flip(0)}
    )
    save_tensors(
        Path("data/windows/training.safetensors"), {"input_ids": windows["input_ids"].flatten()}
    )
    yield content


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("keep", 3, r"draft\.keep must be below 2, the layers of models/base; got 3"),
        ("keep", 2, r"draft\.keep must be below 2, the layers of models/base; got 2"),
        ("keep", 0, r"draft\.keep must be greater than or equal to 1; got 0 .*draft\.keep"),
        ("criterion", "depth", r"criterion must be one of 'block_influence', .*; got 'depth'"),
        ("heldout.tokens", 513, r"heldout\.tokens is 513, but the model's context is 512 tokens"),
        ("distillation.tokens", 999, r"distillation\.tokens is 999, but the model's context"),
        ("importance.tokens", 513, r"importance\.tokens is 513, but the model's context is 512"),
        ("heldout.windows", 1, r"heldout\.windows must be greater than or equal to 2; got 1"),
        ("heldout.tokens", 65, r"heldout wants 3 windows of 65 tokens, but 6 of 64 were prepared"),
        ("distillation.steps", 0, r"distillation\.steps must be greater than or equal to 1; got 0"),
        ("distillation.windows", 13, r"13 windows of 32 tokens, but the training text has 384"),
    ],
)  # fmt: skip
def test_faults_stop_with_a_line_and_write_nothing(
    project: dict[str, Any], path: str, value: Any, message: str
) -> None:
    *parts, last = path.split(".")
    block = project["draft"]
    for part in parts:
        block = block[part]
    block[last] = value
    write(project)
    with pytest.raises(SystemExit, match=message) as error:
        draft.main()
    assert "\n" not in str(error.value)
    assert not list(Path().rglob("*.json.partial")) and not Path("models/draft").exists()


def test_other_architectures_are_refused(workspace: Path, tiny_gpt2: Path) -> None:
    write(parameters())
    shutil.copytree(tiny_gpt2, "models/base")
    with pytest.raises(
        SystemExit, match=r"unknown architecture of the runtime .*'gpt2'; known: llama"
    ):
        draft.main()


def test_parameters_suit_the_default_model(tmp_path: Path, workspace: Path) -> None:
    params = load("draft", DraftParams)
    config = dict(num_hidden_layers=30, max_position_embeddings=8192)
    check(params, read_config(open_checkpoint(make_model(tmp_path / "m", **config))))


@pytest.mark.smoke
def test_stage(project: dict[str, Any]) -> None:
    draft.main()
    found = json.loads(Path("metrics/draft.json").read_text())
    assert len(found) == 12 and all(math.isfinite(value) for value in found.values())
    assert 0 < found["acceptance"] < 1
    assert found["layers_share"] == 0.5
    timing = json.loads(Path("metrics/timing/draft.json").read_text())
    assert set(timing) == {
        "choose_seconds",
        "distil_seconds",
        "base_decode_ms_per_token",
        "draft_decode_ms_per_token",
        "decode_cost_ratio",
        "seconds",
    }
    assert timing["decode_cost_ratio"] > 0
    assert Path("plots/draft/arms.csv").read_text().count("\n") == 7
    assert Path("plots/draft/steps.csv").read_text().count("\n") == 4
    assert Path("plots/draft/layers.csv").read_text().count("\n") == 3
    assert Path("plots/draft/draft.png").stat().st_size > 10_000
    base, own = (open_checkpoint(Path("models", name)) for name in ("base", "draft"))
    assert torch.equal(own.tensor("lm_head.weight"), base.tensor("lm_head.weight"))
    heldout = load_tensors(Path("data/windows/heldout.safetensors"))["input_ids"][:3, :48].long()
    target, other = (log_probabilities(one.folder, heldout)[:, :-1] for one in (base, own))
    accepted = float(overlap(target, other).double().mean())
    assert found["acceptance"] == pytest.approx(accepted, abs=0.005)

    question = {"question": "Where does it rise?", "choices": ["hills", "sea", "town", "mill"]}
    Path("data/tasks").mkdir()
    write_task(Path("data/tasks"), "trivia", [question | {"label": n} for n in range(4)])
    write_task(Path("data/tasks"), "cloze", [{"context": "The river", "word": "rises"}] * 3)
    evaluate.main("draft")
    scored = json.loads(Path("metrics/evaluate/draft.json").read_text())
    assert (scored["bits_per_weight"], scored["packed"]) == (16, 1)
    assert variant_rows(Path("metrics"))[0][0] == "draft"
