"""Attention heads: importance by brute force, who goes, real removal, and the stage."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from test_magnitude_pruning import RECOVERY, copy_of, write_project
from test_teacher import make_encoder
from torch import Tensor

from inferlab.errors import InferlabError
from inferlab.models.encoder import TextClassifier, new_classifier
from inferlab.profiling import latency
from inferlab.pruning.head_measures import arm_table, correlation_table, layer_table
from inferlab.pruning.head_study import Arm, Outcome, make_arms, try_arm
from inferlab.pruning.heads import head_counts, importance, least_important, remove_heads
from inferlab.pruning.recovery import Material, classify
from inferlab.store import read_json
from stages import head_pruning

HEADS = 4
HEAD_DIM = 4


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def teacher(encoder: Path) -> TextClassifier:
    """Two layers of four heads, random weights. Not to be changed."""
    return new_classifier(encoder, 2, seed=0).eval()


@pytest.fixture(scope="module")
def documents() -> tuple[Tensor, Tensor]:
    """Tokens [40, 6], more than one batch, some padded; and labels."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(4, 13, (40, 6), generator=generator)
    tokens[:, 0] = 2
    tokens[::3, 4:] = 0
    return tokens, torch.randint(2, (40,), generator=generator)


def marks(*heads: tuple[int, int]) -> Tensor:
    removed = torch.zeros(2, HEADS, dtype=torch.bool)
    for layer, head in heads:
        removed[layer, head] = True
    return removed


def test_gradient_score_by_brute_force(
    teacher: TextClassifier, documents: tuple[Tensor, Tensor]
) -> None:
    """One document after the other, with the factors that all tokens share."""
    expected = torch.zeros(2, HEADS)
    for tokens, label in zip(*documents, strict=True):
        masks = [torch.ones(HEADS, requires_grad=True) for _ in range(2)]
        loss = F.cross_entropy(teacher(tokens[None], masks), label[None])
        expected += torch.stack(torch.autograd.grad(loss, masks)).abs() / len(documents[1])
    found = importance(teacher, *documents)["gradient"]
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)


def test_gradient_is_the_slope_of_the_loss(
    teacher: TextClassifier, documents: tuple[Tensor, Tensor]
) -> None:
    tokens, labels = documents[0][:1], documents[1][:1]
    found = importance(teacher, tokens, labels)["gradient"]
    losses = []
    for factor in (0.99, 1.01):
        mask = torch.ones(HEADS)
        mask[2] = factor
        losses.append(F.cross_entropy(teacher(tokens, [torch.ones(HEADS), mask]), labels))
    slope = float((losses[1] - losses[0]).detach()) / 0.02
    assert float(found[1, 2]) == pytest.approx(abs(slope), rel=0.02)


def test_taylor_score_by_brute_force(
    teacher: TextClassifier, documents: tuple[Tensor, Tensor]
) -> None:
    """Batches of 32 and 8 documents count by their size; each head's weights one by one."""
    expected = torch.zeros(2, HEADS)
    for tokens, labels in zip(*(one.split(32) for one in documents), strict=True):
        model = copy_of(teacher)
        F.cross_entropy(model(tokens), labels).backward()
        for number, layer in enumerate(model.layers):
            for head in range(HEADS):
                own = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
                total = (layer.output.weight * layer.output.weight.grad)[:, own].square().sum()
                for module in (layer.query, layer.key, layer.value):
                    for weight in (module.weight, module.bias):
                        total += (weight * weight.grad)[own].square().sum()
                expected[number, head] += total.detach() * len(labels) / 40
    found = importance(teacher, *documents)["taylor"]
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-3)


def test_a_head_that_gives_nothing_goes_first_and_is_not_missed(
    teacher: TextClassifier, documents: tuple[Tensor, Tensor]
) -> None:
    model = copy_of(teacher)
    with torch.no_grad():
        model.layers[1].output.weight[:, 2 * HEAD_DIM : 3 * HEAD_DIM] = 0
    scores = importance(model, *documents)
    for name in ("gradient", "taylor"):
        removed = least_important(scores[name], 1 / 8)
        assert removed.nonzero().tolist() == [[1, 2]]
        assert float(scores[name][1, 2]) == 0
    smaller = remove_heads(model, removed)
    with torch.no_grad():
        torch.testing.assert_close(smaller(documents[0]), model(documents[0]))


def test_removal_equals_a_mask_of_zero_with_smaller_matrices(
    teacher: TextClassifier, documents: tuple[Tensor, Tensor]
) -> None:
    removed = marks((0, 0), (0, 3), (1, 1))
    smaller = remove_heads(teacher, removed)
    with torch.no_grad():
        masked = teacher(documents[0], [(~own).float() for own in removed])
        torch.testing.assert_close(smaller(documents[0]), masked, atol=1e-5, rtol=1e-5)
    assert head_counts(smaller) == [2, 3]
    assert head_counts(teacher) == [4, 4]
    assert smaller.layers[0].query.weight.shape == (2 * HEAD_DIM, 16)
    assert smaller.layers[1].output.weight.shape == (16, 3 * HEAD_DIM)
    # Each head has 4 rows of 16 and 4 biases in three matrices, 4 columns of 16 in the fourth.
    counts = [sum(weight.numel() for weight in one.parameters()) for one in (teacher, smaller)]
    assert counts[0] - counts[1] == 3 * (3 * (64 + 4) + 64)


def test_least_important_by_hand() -> None:
    scores = torch.tensor([[0.1, 0.2, 0.3, 0.4], [5.0, 0.25, 7.0, 8.0]])
    assert least_important(scores, 0.25).nonzero().tolist() == [[0, 0], [0, 1]]
    # The fourth lowest is the best of layer 0, which stays: the next one goes instead.
    half = least_important(torch.tensor([[0.1, 0.2, 0.3, 0.4], [5.0, 6.0, 7.0, 8.0]]), 0.5)
    assert half.nonzero().tolist() == [[0, 0], [0, 1], [0, 2], [1, 0]]
    assert not least_important(scores, 0.1).any()


@given(st.integers(1, 5), st.integers(1, 6), st.floats(0, 0.99), st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_as_many_go_as_asked_and_no_layer_is_left_without(
    layers: int, heads: int, share: float, seed: int
) -> None:
    scores = torch.rand(layers, heads, generator=torch.Generator().manual_seed(seed))
    wanted = int(share * layers * heads)
    if wanted > layers * (heads - 1):
        with pytest.raises(InferlabError, match="layers keeps at least one"):
            least_important(scores, share)
        return
    removed = least_important(scores, share)
    assert int(removed.sum()) == wanted
    assert (~removed).any(1).all()


def test_removing_all_heads_of_a_layer_is_refused(teacher: TextClassifier) -> None:
    with pytest.raises(InferlabError) as caught:
        remove_heads(teacher, marks(*((1, head) for head in range(HEADS))))
    assert str(caught.value) == "layer 1 would lose all of its 4 heads; keep at least one"
    with pytest.raises(InferlabError) as caught:
        least_important(torch.rand(2, HEADS), 0.9)
    assert str(caught.value) == (
        "7 of 8 heads are too many to remove: each of the 2 layers keeps at least one, so that 6 "
        "may go; lower the share"
    )


def test_other_faults_are_named(teacher: TextClassifier) -> None:
    with pytest.raises(InferlabError, match=r"marked for 3 x 4 heads, .* layers have 4, 4; mark"):
        remove_heads(teacher, torch.zeros(3, 4, dtype=torch.bool))
    with pytest.raises(InferlabError, match=r"marked for 2 x 4 heads, .* layers have 3, 4; mark"):
        remove_heads(remove_heads(teacher, marks((0, 1))), marks((0, 0)))
    for share in (-0.1, 1.0, float("nan")):
        with pytest.raises(InferlabError, match="share of heads must be at least 0 and below 1"):
            least_important(torch.rand(2, HEADS), share)


def test_arms_average_samples_and_turn_the_order_round() -> None:
    gradient = torch.tensor([[[1.0, 2, 3, 4], [5, 6, 7, 8]], [[9.0, 2, 3, 4], [5, 6, 7, 8]]])
    scores = {"gradient": gradient, "taylor": -gradient}
    arms = make_arms(scores, (0.25,), draws=3, seed=0)
    found = {arm.choice: arm.removed.nonzero().tolist() for arm in arms}
    assert found["whole"] == []
    assert found["gradient"] == [[0, 1], [0, 2]]  # head 0 of layer 0 has a mean of 5
    assert found["most_important"] == [[1, 2], [1, 3]] == found["taylor"]
    random = [arm.removed for arm in arms if arm.choice == "random"]
    assert len(random) == 3
    assert not all(torch.equal(random[0], one) for one in random)
    again = make_arms(scores, (0.25,), draws=3, seed=0)
    assert all(torch.equal(one.removed, two.removed) for one, two in zip(arms, again, strict=True))


def test_an_arm_is_tested_before_and_after_recovery(
    teacher: TextClassifier, documents: tuple[Tensor, Tensor]
) -> None:
    tokens = documents[0]
    labels = (tokens == 7).any(1).long()
    material = Material(tokens, labels, F.one_hot(labels, 2).float() * 4, tokens, labels)
    arm = Arm("gradient", 0.25, 0, marks((0, 1), (1, 3)))
    longer = replace(RECOVERY, training=replace(RECOVERY.training, epochs=10.0))
    outcome = try_arm(arm, teacher, material, longer, seed=0)
    assert torch.equal(outcome.pruned, classify(remove_heads(teacher, arm.removed), tokens))
    assert F.cross_entropy(outcome.recovered, labels) < F.cross_entropy(outcome.pruned, labels)
    assert head_counts(teacher) == [4, 4]


def test_correlation_by_hand() -> None:
    first = torch.arange(8.0).view(2, 4)
    values = torch.stack([first, 10 * first, -first])
    rows = correlation_table({"gradient": values, "taylor": values.flip(0)})
    found = {row["pair"]: (row["heads"], row["layers"]) for row in rows}
    assert found["gradient, samples 1 and 2"] == pytest.approx((1, 1))
    assert found["gradient, samples 1 and 3"] == pytest.approx((-1, -1))
    assert len(rows) == 3 + 3 + 1


def test_table_compares_with_random_removal_in_the_same_state() -> None:
    labels = torch.zeros(4, dtype=torch.long)

    def outcome(choice: str, share: float, draw: int, *right: list[int]) -> Outcome:
        both = [torch.tensor([[float(one), 0.5] for one in own]) for own in right]
        return Outcome(Arm(choice, share, draw, marks()), *both)

    rows = arm_table(
        [
            outcome("whole", 0.0, 0, [1, 1, 1, 0], [1, 1, 1, 1]),
            outcome("gradient", 0.5, 0, [1, 1, 0, 0], [1, 1, 1, 0]),
            outcome("random", 0.5, 0, [1, 0, 0, 0], [1, 1, 0, 0]),
            outcome("random", 0.5, 1, [0, 0, 0, 0], [1, 1, 1, 0]),
        ],
        labels,
        seed=0,
    )
    found = {(row["choice"], row["state"]): row for row in rows}
    assert found["random", "pruned"]["accuracy_mean"] == 0.125
    assert found["random", "pruned"]["accuracy_std"] == pytest.approx(0.25 / 2**0.5)
    assert found["gradient", "pruned"]["minus_random"] == 0.375
    assert found["gradient", "recovered"]["minus_random"] == 0.125
    assert found["gradient", "recovered"]["minus_whole"] == -0.25


def test_layers_count_what_they_lose() -> None:
    arms = [Arm("gradient", 0.25, 0, marks((0, 1), (0, 2))), Arm("random", 0.25, 0, marks((1, 1)))]
    rows = layer_table(torch.rand(3, 2, HEADS), arms, [0.5, 0.1])
    assert [row["heads_lost_25"] for row in rows] == [2, 0]
    assert [row["nats_without_half"] for row in rows] == [0.5, 0.1]


@pytest.mark.smoke
def test_stage_head_pruning(
    teacher: TextClassifier, encoder: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latency, "SHORTEST", 0.001)
    content = write_project(teacher, encoder, "head_pruning", {"sample_documents": 16})
    head_pruning.main()
    found = read_json(Path("metrics/head_pruning.json"))
    names = ("accuracy_0", "accuracy_25", "accuracy_50", "accuracy_random_25", "accuracy_random_50")
    assert set(names) <= set(found)
    assert found["bytes_0"] - found["bytes_25"] == 4 * 2 * (3 * (64 + 4) + 64)
    arms = Path("plots/head_pruning/arms.csv").read_text().splitlines()
    assert len(arms) == 1 + 2 * (1 + 2 * 4)
    assert len(Path("plots/head_pruning/heads.csv").read_text().splitlines()) == 1 + 8
    assert Path("plots/head_pruning/heads.png").stat().st_size > 0
    assert read_json(Path("metrics/timing/head_pruning.json"))["latency_ms_50_batch_2"] > 0

    for changes, message in (
        ({"shares": [0.9]}, r"7 of 8 heads are too many to remove"),
        ({"shares": [1.0]}, r"head_pruning.shares.0 must be less than 1; got 1.0"),
        ({"samples": 2}, r"head_pruning.samples must be greater than or equal to 3; got 2"),
        (
            {"sample_documents": 22},
            r"wants 3 samples of 22 training documents, but the teacher has",
        ),
    ):
        faulty = content | {"head_pruning": content["head_pruning"] | changes}
        Path("params.yaml").write_text(yaml.safe_dump(faulty))
        with pytest.raises(SystemExit, match=message):
            head_pruning.main()
    assert read_json(Path("metrics/head_pruning.json")) == found
