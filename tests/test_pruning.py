"""Pruning of weight matrices and of whole language models: patterns, scores, formats, stages."""

import json
import logging
import math
from pathlib import Path

import pytest
import torch
import yaml
from conftest import TEXT
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse
from torch import Tensor
from transformers import AutoTokenizer

from inferlab.calibration.capture import CalibrateParams, calibrate
from inferlab.calibration.statistics import Accumulator, Calibration
from inferlab.data.windows import cut_windows, tokenise
from inferlab.errors import InferlabError
from inferlab.models.adapters import layer_names, linear_groups
from inferlab.models.loading import load_model
from inferlab.params import load
from inferlab.pruning import kernels
from inferlab.pruning.checkpoint import METHODS, check_columns, prune_checkpoint
from inferlab.pruning.formats import (
    csr_bytes,
    is_two_four,
    pack_bitmask,
    pack_two_four,
    stored_bytes,
    to_csr,
)
from inferlab.pruning.patterns import Pattern, TwoFour, Unstructured
from inferlab.pruning.scores import CompensationParams, Score, prune
from inferlab.pruning.semi_structured import two_four_by_chance
from inferlab.quantization.gptq import output_error
from inferlab.store import open_checkpoint, save_checkpoint, save_tensors
from stages import prune as prune_stage
from stages import semi_structured

ROOT = Path(__file__).parent.parent
COLUMNS = 192  # more than the columns whose mask SparseGPT decides at once
PLAIN = CompensationParams(damping=0.01, activation_order=False)
ORDERED = CompensationParams(damping=0.01, activation_order=True)
PATTERNS = [TwoFour(), Unstructured(0.5), Unstructured(0.7)]


def correlated(tokens: int = 600, seed: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    """A weight [24, COLUMNS] and the statistics of inputs that move together, at many scales."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(24, COLUMNS, generator=generator)
    sources = torch.randn(tokens, 16, generator=generator)
    inputs = sources @ torch.randn(16, COLUMNS, generator=generator)
    inputs += 0.5 * torch.randn(tokens, COLUMNS, generator=generator)
    inputs *= torch.rand(COLUMNS, generator=generator) * 2 + 0.1
    hessian = 2 * inputs.t() @ inputs / tokens
    return weight, {"hessian": hessian, "square": hessian.diagonal() / 2}


def naive(weight: Tensor, hessian: Tensor, pattern: Pattern, order: Tensor) -> Tensor:
    """SparseGPT by full inverses, in double precision: equations (3) and (5) of the paper.

    Each removed weight's error over [H⁻¹]qq is spread over the columns that are left, then row and
    column q are eliminated from the inverse. Scores of columns decided together take the pivots
    that elimination will have brought.
    """
    work = weight.double().clone()
    damped = hessian.double() + 0.01 * hessian.diagonal().mean() * torch.eye(len(hessian))
    inverse, removed = torch.linalg.inv(damped), torch.zeros_like(work, dtype=torch.bool)
    for place, q in enumerate(order.tolist()):
        if place % pattern.together == 0:
            together = order[place : place + pattern.together]
            ahead, pivots = inverse.clone(), []
            for column in together.tolist():
                pivots.append(ahead[column, column].clone())
                ahead -= torch.outer(ahead[:, column], ahead[column]) / pivots[-1]
            scores = work[:, together].square() / torch.stack(pivots)
            removed[:, together] = ~pattern.keep_shared(scores)
        error = work[:, q] * removed[:, q] / inverse[q, q]
        work -= torch.outer(error, inverse[q])
        inverse = inverse - torch.outer(inverse[:, q], inverse[q]) / inverse[q, q]
    return work.masked_fill(removed, 0)


def test_two_four_by_hand() -> None:
    scores = torch.tensor([[1.0, 9, 2, 8, 4, 3, 2, 1]])
    assert TwoFour().keep(scores).tolist() == [[False, True, False, True, True, True, False, False]]


@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 9))
@settings(max_examples=30, deadline=None)
def test_two_four_keeps_the_best_two_of_each_four(rows: int, fours: int, seed: int) -> None:
    scores = torch.rand(rows, 4 * fours, generator=torch.Generator().manual_seed(seed)).round(
        decimals=1
    )
    kept = TwoFour().keep(scores).view(-1, 4)
    assert (kept.sum(1) == 2).all()
    lowest = scores.view(-1, 4).masked_fill(~kept, math.inf).amin(1)
    assert (scores.view(-1, 4).masked_fill(kept, -math.inf).amax(1) <= lowest).all()


@given(st.integers(1, 6), st.integers(1, 40), st.floats(0, 0.99))
@settings(max_examples=30, deadline=None)
def test_unstructured_removes_the_wanted_share_also_among_equals(
    rows: int, columns: int, sparsity: float
) -> None:
    equal = torch.ones(rows, columns)
    removed = (~Unstructured(sparsity).keep(equal)).sum(1)
    assert removed.tolist() == [int(columns * sparsity)] * rows
    shared = (~Unstructured(sparsity).keep_shared(equal)).sum()
    assert shared == int(rows * columns * sparsity)


@pytest.mark.parametrize("sparsity", [-0.1, 1.0, 1.5, math.nan])
def test_sparsity_outside_its_range_is_refused(sparsity: float) -> None:
    with pytest.raises(InferlabError, match=r"sparsity must be at least 0 and below 1; got"):
        Unstructured(sparsity)


def test_width_that_is_no_multiple_of_four_is_refused() -> None:
    message = r"h\.0 has 6 columns, which is no multiple of 4; 2:4 .* prune it unstructured"
    with pytest.raises(InferlabError, match=message):
        TwoFour().check(6, "h.0")
    with pytest.raises(InferlabError, match="the matrix has 6 columns"):
        prune(torch.ones(2, 6), {}, TwoFour(), "magnitude", PLAIN)


def test_activation_score_weighs_by_the_inputs() -> None:
    """By magnitude 3 and 4 stay; the norms 10, 1, 1, 0 make it 10, 2, 3, 0."""
    weight = torch.tensor([[1.0, 2, 3, 4]])
    statistics = {"square": torch.tensor([100.0, 1, 1, 0])}
    magnitude = prune(weight, statistics, TwoFour(), "magnitude", PLAIN)
    activation = prune(weight, statistics, TwoFour(), "activation", PLAIN)
    assert magnitude.weight.tolist() == [[0, 0, 3, 4]]
    assert activation.weight.tolist() == [[1, 0, 3, 0]]


def test_sparsegpt_by_hand() -> None:
    """H = [[2, 1], [1, 2]]: losing w₀ costs 1.5·w₀², losing w₁ then 2·w₁²; w₁ takes w₀/2."""
    statistics = {"hessian": torch.tensor([[2.0, 1.0], [1.0, 2.0]]), "square": torch.ones(2)}
    tiny = CompensationParams(damping=1e-9, activation_order=False)
    found = prune(torch.tensor([[1.0, 1.0]]), statistics, Unstructured(0.5), "sparsegpt", tiny)
    torch.testing.assert_close(found.weight, torch.tensor([[0.0, 1.5]]))


@pytest.mark.parametrize("compensation", [PLAIN, ORDERED])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_sparsegpt_equals_the_naive_reference(
    pattern: Pattern, compensation: CompensationParams
) -> None:
    weight, statistics = correlated()
    hessian = statistics["hessian"]
    order = torch.arange(COLUMNS)
    if compensation.activation_order:
        energy = hessian.diagonal().view(-1, pattern.group).sum(1)
        first = torch.argsort(energy, descending=True) * pattern.group
        order = (first[:, None] + torch.arange(pattern.group)).flatten()
    found = prune(weight, statistics, pattern, "sparsegpt", compensation)
    expected = naive(weight, hessian, pattern, order)
    assert torch.equal(found.weight == 0, expected == 0)
    torch.testing.assert_close(found.weight.double(), expected, rtol=1e-3, atol=1e-4)
    assert not found.fell_back


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_each_score_beats_the_simpler_one_on_correlated_inputs(pattern: Pattern, seed: int) -> None:
    weight, statistics = correlated(seed=seed)
    errors = {}
    for score in ("magnitude", "activation", "sparsegpt"):
        found = prune(weight, statistics, pattern, score, ORDERED)
        share = float((found.weight == 0).double().mean())
        assert share == pytest.approx(pattern.sparsity, abs=0.01)
        errors[score] = output_error(weight, found.weight, statistics["hessian"])
    assert errors["activation"] < 0.8 * errors["magnitude"]
    assert errors["sparsegpt"] < 0.5 * errors["activation"]


def test_two_four_is_a_special_case_and_so_loses_more() -> None:
    weight, statistics = correlated()
    four, free = (
        prune(weight, statistics, one, "magnitude", PLAIN).weight
        for one in (TwoFour(), Unstructured(0.5))
    )
    assert (weight - four).square().sum() > (weight - free).square().sum()
    assert is_two_four(four)
    assert not is_two_four(free)


def test_uncorrelated_inputs_leave_nothing_to_compensate() -> None:
    weight, _ = correlated()
    square = torch.linspace(0.5, 2, COLUMNS)
    statistics = {"hessian": torch.diag(2 * square), "square": square}
    found = prune(weight, statistics, TwoFour(), "sparsegpt", CompensationParams(1e-9, False))
    expected = prune(weight, statistics, TwoFour(), "activation", PLAIN)
    torch.testing.assert_close(found.weight, expected.weight)


def test_sparsity_zero_changes_nothing() -> None:
    weight, statistics = correlated()
    for score in ("magnitude", "activation", "sparsegpt"):
        found = prune(weight, statistics, Unstructured(0.0), score, ORDERED)
        assert torch.equal(found.weight, weight)


def test_hopeless_hessian_falls_back_to_the_activation_score() -> None:
    weight, statistics = correlated()
    bad = statistics | {"hessian": torch.full((COLUMNS, COLUMNS), math.nan)}
    before = weight.clone()
    found = prune(weight, bad, TwoFour(), "sparsegpt", ORDERED)
    assert found.fell_back
    expected = prune(weight, statistics, TwoFour(), "activation", ORDERED)
    assert torch.equal(found.weight, expected.weight)
    assert torch.equal(weight, before)


def test_dead_columns_do_no_harm() -> None:
    weight, statistics = correlated()
    hessian = statistics["hessian"].clone()
    dead = torch.tensor([0, 50, 191])
    hessian[dead] = 0
    hessian[:, dead] = 0
    found = prune(
        weight,
        {"hessian": hessian, "square": hessian.diagonal() / 2},
        TwoFour(),
        "sparsegpt",
        PLAIN,
    )
    assert torch.isfinite(found.weight).all()
    assert not found.fell_back


def test_packed_bytes_by_hand() -> None:
    """Eight bf16 weights, four kept: 8 bytes of values, 4 · 2 bits, or 8 bits of mask."""
    weight = torch.tensor([[0.0, 1, 2, 0, 3, 0, 0, 4]]).bfloat16()
    packed = pack_two_four(weight)
    assert packed.values.tolist() == [[1, 2, 3, 4]]
    assert packed.positions.tolist() == [0b11_00_10_01]
    assert packed.nbytes == 9
    mask = pack_bitmask(weight)
    assert (mask.mask.tolist(), mask.nbytes) == ([0b01101001], 9)
    # CSR: 4 values, 4 columns of 4 bytes, 2 offsets of 4 bytes
    assert stored_bytes(weight) == {"dense": 16, "csr": 32, "bitmask": 9, "two_four": 9}


@given(st.integers(1, 7), st.integers(1, 9), st.integers(0, 20), st.booleans())
@settings(max_examples=40, deadline=None)
def test_packing_and_back_is_the_identity(rows: int, fours: int, seed: int, fp32: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, 4 * fours, generator=generator)
    weight = weight * (torch.rand(weight.shape, generator=generator) < 0.8)
    weight = weight if fp32 else weight.bfloat16()
    assert torch.equal(pack_bitmask(weight).dense(), weight)
    pruned = weight * TwoFour().keep(weight.abs())
    assert torch.equal(pack_two_four(pruned).dense(), pruned)
    assert is_two_four(pruned)


def test_csr_is_what_scipy_stores() -> None:
    weight, statistics = correlated()
    pruned = prune(weight, statistics, Unstructured(0.7), "magnitude", PLAIN).weight
    ours, theirs = to_csr(pruned), sparse.csr_matrix(pruned.numpy())
    assert ours.col_indices().tolist() == theirs.indices.tolist()
    assert csr_bytes(ours) == theirs.data.nbytes + theirs.indices.nbytes + theirs.indptr.nbytes


def test_two_four_takes_what_torch_takes() -> None:
    from torch.sparse._semi_structured_conversions import (
        sparse_semi_structured_from_dense_cutlass,
    )

    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    pruned = weight * TwoFour().keep(weight.abs())
    values, positions = sparse_semi_structured_from_dense_cutlass(pruned)
    packed = pack_two_four(pruned)
    assert torch.equal(packed.values, values)
    assert packed.nbytes == values.nbytes + positions.nbytes


def test_matrix_that_is_not_two_four_is_not_packed_as_such() -> None:
    with pytest.raises(InferlabError, match="a matrix of 1 x 4 is not 2:4 sparse"):
        pack_two_four(torch.ones(1, 4))
    assert "two_four" not in stored_bytes(torch.ones(2, 6))


def test_two_four_by_chance_is_the_share_of_fours_with_two_at_most() -> None:
    """Half of each row stays: of the fours of this one two, two and three, one."""
    weight = torch.tensor([[9.0, 8, 1, 1, 9, 8, 7, 1], [9, 8, 1, 1, 9, 8, 1, 1]])
    assert two_four_by_chance(weight) == 1.0
    crowded = torch.tensor([[9.0, 9, 9, 1, 1, 1, 9, 1]])
    assert two_four_by_chance(crowded) == 0.5


def test_kernels_say_what_they_need_and_what_was_found(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with caplog.at_level(logging.INFO):
        assert kernels.two_four_times(torch.ones(4, 4), 8) == {}
    assert "capability 8.0 or newer; found no CUDA device" in caplog.text
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert kernels.missing().endswith("found 7.5")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert kernels.missing() is None


@pytest.mark.gpu
def test_kernels_run_on_a_gpu() -> None:
    if reason := kernels.missing():
        pytest.skip(reason)
    found = kernels.two_four_times(torch.randn(512, 512), 256)
    assert set(found) == {"dense_ms", "two_four_ms", "two_four_speedup"}


@pytest.fixture(scope="module", params=["tiny_llama", "tiny_gpt2"])
def calibrated(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A tiny model's folder and its calibration."""
    folder = request.getfixturevalue(request.param)
    calibration = Calibration(tmp_path_factory.mktemp("calibration"))
    model, groups = load_model(folder, threads=1), linear_groups(open_checkpoint(folder))
    seen = {group.name: Accumulator() for group in groups}
    for name, accumulator in seen.items():
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, inputs, seen=accumulator: seen.observe(inputs[0].flatten(0, 1))
        )
    with torch.inference_mode():
        model(torch.randint(3, 512, (4, 64), generator=torch.Generator().manual_seed(0)))
    for block in {group.block for group in groups}:
        names = [group.name for group in groups if group.block == block]
        calibration.save(block, {name: seen[name].statistics() for name in names})
    return folder, calibration.folder


@pytest.mark.parametrize("variant", METHODS)
@pytest.mark.parametrize("score", ["magnitude", "activation", "sparsegpt"])
def test_whole_model(
    calibrated: tuple[Path, Path], tmp_path: Path, variant: str, score: Score
) -> None:
    model, folder = calibrated
    checkpoint = open_checkpoint(model)
    sparsity = {"sparsity": 0.5} if variant == "pruned50" else {}
    params = METHODS[variant](**sparsity, score=score, compensation=ORDERED)
    report = prune_checkpoint(checkpoint, Calibration(folder), params, tmp_path)
    saved, groups = open_checkpoint(tmp_path), linear_groups(checkpoint)
    assert report.layers_pruned == len(layer_names(groups))
    assert report.sparsity == pytest.approx(0.5, abs=0.001)
    assert report.bits_per_weight == pytest.approx(9, abs=0.01)
    assert report.bytes["dense"] == 2 * report.weights
    assert ("two_four" in report.bytes) == (variant == "sparse24")
    for group in groups:
        for weight in group.weights(saved):
            assert variant == "pruned50" or is_two_four(weight)
    pruned = {f"{name}.weight" for name in layer_names(groups)}
    assert saved.names == checkpoint.names
    for name in saved.names:
        same = torch.equal(saved.tensor(name), checkpoint.tensor(name))
        assert same == (name not in pruned), name
    if score == "magnitude":
        assert report.output_error_vs_magnitude == 1
        assert report.layer_sparsity_min == report.layer_sparsity_max == 0.5
    else:
        assert report.output_error_vs_magnitude < 1


def test_damping_that_had_to_grow_is_logged(
    tiny_llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Eight tokens for 64 columns and more: no Hessian has a factor with next to no damping."""
    checkpoint, calibration = open_checkpoint(tiny_llama), Calibration(tmp_path)
    calibrate(checkpoint, torch.arange(3, 11)[None], CalibrateParams(1, 1, False), calibration)
    output = tmp_path / "variant"
    output.mkdir()

    def grown(damping: float, score: Score = "sparsegpt") -> list[str]:
        params = METHODS["sparse24"](score, CompensationParams(damping, activation_order=True))
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            prune_checkpoint(checkpoint, calibration, params, output)
        return [one.getMessage() for one in caplog.records]

    lines = grown(1e-10)
    assert [line.split(":")[0] for line in lines] == [g.name for g in linear_groups(checkpoint)]
    assert ": damping grew from 1e-10 to " in lines[0]
    assert not grown(0.1)
    assert not grown(1e-10, "activation")


def test_layer_that_two_four_does_not_fit_stops_before_any_work(
    tiny_llama: Path, tmp_path: Path
) -> None:
    original = open_checkpoint(tiny_llama)
    tensors = {name: original.tensor(name) for name in original.names}
    name = "model.layers.1.mlp.down_proj.weight"
    save_checkpoint(tmp_path, original.config, tensors | {name: tensors[name][:, :126]}, tiny_llama)
    with pytest.raises(InferlabError, match=r"model\.layers\.1\.mlp\.down_proj has 126 columns"):
        check_columns(open_checkpoint(tmp_path), TwoFour())
    check_columns(original, TwoFour())


def test_variants_are_in_the_graph_and_have_their_parameters() -> None:
    stages = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
    assert set(stages["prune"]["matrix"]["variant"]) == set(METHODS)
    assert set(METHODS) <= set(stages["evaluate"]["matrix"]["variant"])
    for variant, params in METHODS.items():
        assert load(f"prune.{variant}", params, ROOT / "params.yaml").pattern().sparsity == 0.5


@pytest.mark.parametrize("sparsity", [1.0, -0.5])
def test_sparsity_of_params_is_checked(workspace: Path, sparsity: float) -> None:
    content = yaml.safe_load((workspace / "params.yaml").read_text())
    content["prune"]["pruned50"]["sparsity"] = sparsity
    (workspace / "params.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(SystemExit, match=r"pruned50\.sparsity must be .*prune\.pruned50\.sparsity"):
        prune_stage.main("pruned50")


def test_unknown_variant_is_answered_with_the_known_ones() -> None:
    with pytest.raises(SystemExit, match=r"unknown variant 'sparse42'.*did you mean sparse24"):
        prune_stage.main("sparse42")


@pytest.fixture
def project(calibrated: tuple[Path, Path], workspace: Path, request: pytest.FixtureRequest) -> Path:
    """A project folder with a model, its calibration and held-out windows."""
    model, folder = calibrated
    content = yaml.safe_load((workspace / "params.yaml").read_text())
    content["run"]["threads"] = 1
    layer = layer_names(linear_groups(open_checkpoint(model)))[-2]
    content["semi_structured"] |= {"layer": layer, "windows": 4, "tokens": 64}
    (workspace / "params.yaml").write_text(yaml.safe_dump(content))
    (workspace / "models").mkdir()
    (workspace / "data").mkdir()
    (workspace / "models/base").symlink_to(model)
    (workspace / "data/calibration").symlink_to(folder)
    tokenizer = AutoTokenizer.from_pretrained(model)
    stream = tokenise(tokenizer, [{"title": "a", "text": TEXT, "format": "plain"}], "heldout")
    (workspace / "data/windows").mkdir()
    windows = cut_windows(stream, 6, 64, "none", None)
    save_tensors(workspace / "data/windows/heldout.safetensors", windows)
    return workspace


@pytest.mark.smoke
def test_stages_run(project: Path) -> None:
    for variant in METHODS:
        prune_stage.main(variant)
        found = json.loads(Path(f"metrics/prune/{variant}.json").read_text())
        assert found["packed"] == 0
        card = json.loads(Path(f"models/{variant}/variant.json").read_text())
        assert card == {"bits_per_weight": found["bits_per_weight"], "packed": 0}
    semi_structured.main()
    found = json.loads(Path("metrics/semi_structured.json").read_text())
    wanted = {
        f"token_perplexity_{pattern}{suffix}"
        for pattern in ("2_4", "unstructured")
        for suffix in ("", "_activation", "_sparsegpt")
    }
    assert wanted <= set(found)
    assert len(found) <= 12
    dense = found["token_perplexity_dense"]
    assert all(abs(found[name] / dense - 1) > 1e-4 for name in wanted)
    assert Path("plots/semi_structured/arms.csv").read_text().count("\n") == 7
    assert Path("plots/semi_structured/errors.png").stat().st_size > 10_000
    rows = Path("plots/semi_structured/layers.csv").read_text().count("\n")
    assert rows == 6 * 8 + 1


@pytest.mark.smoke
def test_faults_of_the_study_stop_with_a_line(project: Path) -> None:
    content = yaml.safe_load(Path("params.yaml").read_text())
    section = content["semi_structured"]
    faults = [
        ({"layer": "model.layer.1"}, r"semi_structured\.layer: the model has no linear layer"),
        ({"windows": 7}, r"wants 7 windows of 64 tokens, but 6 of 64 were prepared"),
    ]
    for change, message in faults:
        content["semi_structured"] = section | change
        Path("params.yaml").write_text(yaml.safe_dump(content))
        with pytest.raises(SystemExit, match=message):
            semi_structured.main()
    assert not Path("metrics").exists() or not list(Path("metrics").rglob("*.json"))
