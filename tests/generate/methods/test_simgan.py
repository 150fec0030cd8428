"""Oracles: receptive fields by gradients, the buffer's bookkeeping, losses by hand, shifts that are known."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from jaxtyping import TypeCheckError

from pippin.core.errors import CorruptedFile, InvalidArgument, InvalidInput, LabelDrift, UnsupportedModel
from pippin.generate.methods.simgan import train
from pippin.generate.methods.simgan.model import (
    HistoryBuffer,
    PatchDiscriminator,
    RefinerConfig,
    SimRefiner,
    regularized_features,
)
from pippin.generate.methods.simgan.train import LabelProbe, RefinerTrainingConfig, displacement, fit
from pippin.train import Loss

SMALL = RefinerConfig(
    (1, 12, 12),
    channels=6,
    num_blocks=1,
    discriminator_channels=(8, 8),
    discriminator_strides=(2, 1),
    discriminator_pool=False,
)


def blobs(n: int, seed: int, level: float = 0.5, size: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """A soft disc on a dark ground, and where it is."""
    generator = torch.Generator().manual_seed(seed)
    place = 2 * torch.rand(n, 2, generator=generator) - 1
    at = torch.arange(size) + 0.5 - size / 2
    row, column = (3 * place[:, i].view(n, 1, 1) for i in range(2))
    cover = (2.5 - torch.hypot(at[:, None] - row, at - column) + 0.5).clamp(0, 1)
    return (cover * (level + 0.5) - 0.5)[:, None], place


def test_a_new_refiner_is_the_identity_and_its_last_layer_learns_first():
    x, _ = blobs(3, 0)
    refiner = SimRefiner(SMALL)
    assert torch.equal(refiner(x), x)
    refiner(x).square().sum().backward()
    assert refiner.last.weight.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("widths", "strides", "pool", "patch"),
    [
        ((4, 4), (2, 1), False, 7),
        ((4, 4, 4), (2, 2, 1), True, 23),
        ((4, 4, 4), (1, 1, 1), False, 7),
        ((4,), (1,), True, 5),
    ],
)
def test_a_patch_is_what_one_answer_depends_on(widths, strides, pool, patch):
    judge = PatchDiscriminator(RefinerConfig((1, 40, 40), 4, 1, widths, strides, pool))
    with torch.no_grad():
        for parameter in judge.parameters():
            parameter.abs_()  # so that no ReLU hides a dependence
    assert judge.patch == patch
    # the maximum passes a gradient to one place only: over many images every place gets its turn
    x = torch.rand(100, 1, 40, 40, generator=torch.Generator().manual_seed(0)).requires_grad_()
    odds = judge(x)
    middle = odds.shape[-1] // 2
    odds[:, middle, middle].sum().backward()
    seen = x.grad.abs().sum((0, 1)) > 0
    rows = seen.any(1).nonzero()
    assert int(rows.max() - rows.min()) + 1 == patch


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 6), st.integers(2, 20), st.integers(0, 1000))
def test_the_history_gives_half_of_each_and_keeps_its_size(half, capacity, seed):
    capacity = max(capacity, half)
    history = HistoryBuffer(capacity, seed=seed)
    given_, step = set(), 0
    while len(history) < capacity:
        current = torch.arange(step, step + 2 * half).float().view(-1, 1)
        assert torch.equal(history.mix(current), current)
        given_ |= set(current.flatten().tolist())
        step += 2 * half
    for _ in range(5):
        before = set(history.images.flatten().tolist())
        current = torch.arange(step, step + 2 * half).float().view(-1, 1)
        mixed = history.mix(current)
        after = set(history.images.flatten().tolist())
        assert torch.equal(mixed[:half], current[:half])
        assert set(mixed[half:].flatten().tolist()) <= before
        assert len(set(mixed[half:].flatten().tolist())) == half
        assert len(after) == capacity
        assert len(after - before) == half
        assert after - before <= set(current.flatten().tolist())
        step += 2 * half


def test_what_is_kept():
    x = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(regularized_features(x, "identity"), x)
    torch.testing.assert_close(regularized_features(x + 0.7, "gradient"), regularized_features(x, "gradient"))
    gradient = regularized_features(x, "gradient")
    assert gradient.shape == (2, 3 * (3 * 5 + 4 * 4))
    torch.testing.assert_close(gradient[0, 0], x[0, 0, 1, 0] - x[0, 0, 0, 0])
    swapped = x[:, [2, 0, 1]]
    torch.testing.assert_close(regularized_features(swapped, "channel_mean"), regularized_features(x, "channel_mean"))
    assert torch.equal(regularized_features(x, lambda y: y[:, :1]), x[:, :1])


def test_losses_are_the_papers_and_the_judge_is_left_alone():
    x, _ = blobs(4, 0)
    refiner, judge = SimRefiner(SMALL), PatchDiscriminator(SMALL)
    with torch.no_grad():
        refiner.last.weight.normal_(0, 0.3, generator=torch.Generator().manual_seed(2))
    loss = train._RefinerLoss(judge, 2.5, "identity")(refiner, x, torch.Generator())
    refined = refiner(x)
    says_refined = torch.sigmoid(judge(refined))
    realism = -(1 - says_refined).log().mean((1, 2)).sum()
    torch.testing.assert_close(loss.total, realism + 2.5 * (refined - x).abs().mean((1, 2, 3)).sum())
    loss.total.backward()
    assert all(parameter.grad is None for parameter in judge.parameters())
    assert refiner.first.weight.grad.abs().sum() > 0
    real, _ = blobs(4, 1)
    found = train._discriminator_loss(judge, (refined.detach(), real), torch.Generator())
    says_real = torch.sigmoid(judge(real))
    by_hand = -says_refined.log().mean((1, 2)).sum() - (1 - says_real).log().mean((1, 2)).sum()
    torch.testing.assert_close(found.total, by_hand)
    right = ((says_refined > 0.5).float().mean() + (says_real <= 0.5).float().mean()) / 2
    assert float(found.metrics["accuracy"]) / 4 == pytest.approx(float(right))


def test_a_refiner_learns_the_brightness_of_real_pictures_and_moves_nothing():
    synthetic, place = blobs(200, 0)
    real, _ = blobs(200, 1, level=0.1)
    refiner = SimRefiner(SMALL)
    how = RefinerTrainingConfig(
        weight=0.3,
        batch_size=16,
        discriminator_warmup_steps=10,
        history_size=64,
        lr=3e-3,
        eval_every=20,
        probe_steps=250,
    )
    before = torch.random.get_rng_state()
    result = fit(refiner, synthetic, real, 40, labels=place, config=how, show_progress=False)
    assert torch.equal(before, torch.random.get_rng_state())
    peak = refiner.refine(synthetic).amax((1, 2, 3)).mean().item()
    assert abs(peak - real.max().item()) < 0.5 * abs(synthetic.max().item() - real.max().item())
    assert [after for after, _ in result.evaluations] == [20, 40]
    last = result.evaluations[-1][1]
    assert last["moved"] < 0.3
    assert last["label_score"] > 0.9
    assert len(result.refiner_training.steps) == 80
    assert len(result.discriminator_training.steps) == 50
    assert "label_score" in str(result.report())


def test_fit_is_the_same_for_the_same_seed():
    synthetic, _ = blobs(40, 0)
    real, _ = blobs(40, 1, level=0.1)
    how = RefinerTrainingConfig(batch_size=4, discriminator_warmup_steps=2, history_size=8)
    ends = []
    for seed in (0, 0, 1):
        refiner = SimRefiner(SMALL)
        fit(refiner, synthetic, real, 3, config=how, seed=seed, show_progress=False)
        ends.append(refiner.refine(synthetic))
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


def test_labels_that_lose_their_meaning_are_told(monkeypatch):
    synthetic, place = blobs(120, 0)
    how = RefinerTrainingConfig(
        batch_size=4, discriminator_warmup_steps=1, history_size=0, eval_every=1, probe_steps=80
    )

    def blacken(model, batch, generator):
        return Loss((model(batch) - batch.mean()).square().mean((1, 2, 3)).sum() * 50, len(batch))

    monkeypatch.setattr(train, "_RefinerLoss", lambda *_: blacken)
    refiner = SimRefiner(SMALL)
    with torch.no_grad():  # far from the identity: nothing of the image is left
        refiner.last.bias.fill_(3.0)
    with pytest.warns(LabelDrift, match="keeps .*% of its score"):
        fit(refiner, synthetic, synthetic, 1, labels=place, config=how, show_progress=False)


def test_a_probe_scores_as_its_definition():
    x, place = blobs(300, 0)
    probe = LabelProbe.fit(x, place, steps=100)
    assert probe.base > 0.6
    said = probe.predict(x[:50])
    wanted = 1 - ((said - place[:50]) ** 2).sum() / ((place[:50] - place[:50].mean(0)) ** 2).sum()
    assert probe.score(x[:50], place[:50]) == pytest.approx(float(wanted), abs=1e-4)
    classes = LabelProbe.fit(x, (place[:, 0] > 0).long(), steps=50)
    assert classes.base > 0.75
    assert set(classes.predict(x).tolist()) == {0, 1}


@pytest.mark.parametrize(("down", "right"), [(0.0, 0.0), (1.0, -2.0), (0.5, 0.3), (-1.4, 0.0)])
def test_displacement_is_the_shift_that_was_made(down, right):
    at = torch.arange(16) + 0.5 - 8

    def disc(row, column, level):
        return (level * (3.5 - torch.hypot(at[:, None] - row, at - column)).clamp(0, 1) - 0.5)[None, None]

    found = displacement(disc(0.2, -0.1, 1.0), 0.6 * disc(0.2 + down, -0.1 + right, 1.0) + 0.1)
    assert found.item() == pytest.approx((down**2 + right**2) ** 0.5, abs=0.2)


def test_a_data_set_keeps_its_labels_and_pictures_are_clipped():
    x, place = blobs(300, 0)
    refiner = SimRefiner(SMALL)
    with torch.no_grad():
        refiner.last.bias.fill_(0.8)
    refined, labels = refiner.refine_dataset(x, place)
    assert labels is place
    torch.testing.assert_close(refined, (x + 0.8).clamp(-1, 1))


def test_saving_and_loading(tmp_path):
    x, _ = blobs(3, 0)
    refiner = SimRefiner(SMALL, seed=4)
    with torch.no_grad():
        refiner.last.weight.fill_(0.1)
    refiner.metadata["data"] = "blobs"
    refiner.save(tmp_path / "refiner")
    again = SimRefiner.load(tmp_path / "refiner")
    assert torch.equal(again(x), refiner(x))
    assert again.config == SMALL
    assert again.metadata == {"data": "blobs"}
    config = tmp_path / "refiner" / "config.json"
    text = config.read_text()
    config.write_text(text.replace('"channels": 6', '"channels": 7'))
    with pytest.raises(CorruptedFile, match=r"first\.weight"):
        SimRefiner.load(tmp_path / "refiner")
    config.write_text(text.replace("pippin_refiner", "other"))
    with pytest.raises(UnsupportedModel, match="'other'"):
        SimRefiner.load(tmp_path / "refiner")


def test_training_leaves_no_warning_where_nothing_drifts():
    x, place = blobs(60, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(
            SimRefiner(SMALL),
            x,
            x,
            1,
            labels=place,
            config=RefinerTrainingConfig(batch_size=4, discriminator_warmup_steps=1, history_size=0, probe_steps=80),
            show_progress=False,
        )


X = torch.zeros(4, 1, 12, 12)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda r: RefinerConfig((1, 12, 12), channels=0), InvalidArgument, "channels must be"),
        (lambda r: RefinerConfig((1, 12, 12), discriminator_strides=(2,)), InvalidArgument, "one stride for each"),
        (lambda r: HistoryBuffer(1), InvalidArgument, "capacity must be at least 2, got 1"),
        (lambda r: HistoryBuffer(4).mix(torch.zeros(3, 1)), InvalidArgument, "3 images"),
        (lambda r: regularized_features(X, "pixels"), (InvalidArgument, TypeCheckError), "'pixels'"),
        (lambda r: RefinerTrainingConfig(weight=-1.0), InvalidArgument, "weight must be"),
        (lambda r: RefinerTrainingConfig(batch_size=5), InvalidArgument, "batch_size=5"),
        (lambda r: RefinerTrainingConfig(history_size=16), InvalidArgument, "history_size=16"),
        (lambda r: r.refine(torch.zeros(1, 3, 12, 12)), InvalidArgument, r"\(3, 12, 12\)"),
        (lambda r: r.refine(X[:0]), InvalidInput, "no images"),
        (lambda r: r.refine(X + 2), InvalidInput, "from 2 to 2"),
        (lambda r: r.refine(X / 0), InvalidInput, "NaN"),
        (lambda r: r.refine_dataset(X, torch.zeros(3)), InvalidInput, "3 labels for 4"),
        (lambda r: fit(r, X, X, 0), InvalidArgument, "steps must be"),
        (lambda r: fit(r, X, torch.zeros(4, 1, 10, 10), 1), InvalidArgument, r"real images of shape \(1, 10, 10\)"),
        (lambda r: fit(r, X, X[:0], 1), InvalidInput, "no real images"),
        (lambda r: fit(r, X, X, 1, labels=torch.zeros(3)), InvalidInput, "3 labels"),
        (lambda r: fit(r, X, X, 1, labels=torch.zeros(4)), InvalidInput, "20 images"),
        (lambda r: displacement(X, X[:, :, :4]), InvalidArgument, "shifts of 3 pixels"),
    ],
)
def test_bad_input_names_the_value(call, error, message):
    with pytest.raises(error, match=message):
        call(SimRefiner(SMALL))


def test_softplus_is_the_log_of_the_other_answer():
    odds = torch.tensor([-2.0, 0.3, 4.0])
    torch.testing.assert_close(F.softplus(odds), -(1 - torch.sigmoid(odds)).log())
