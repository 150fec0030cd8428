"""Oracles for the denoiser over views: who depends on whom, passes with and without cache, problems with known ends."""

import math
from dataclasses import replace

import pytest
import torch
from jaxtyping import TypeCheckError

import pippin
from pippin.core.errors import InvalidArgument, InvalidInput, NonFiniteSample
from pippin.generate.conditions import Conditioning, ConditioningSpec, Samples
from pippin.generate.contract import Generator
from pippin.generate.methods.dart.heads import BlockCache
from pippin.generate.methods.dart.loss import NoisyViews
from pippin.generate.methods.dart.model import DART, DartConfig
from pippin.generate.methods.dart.schedule import NomadSchedule
from pippin.generate.noise import Noise
from pippin.nn.images.patches import patchify, unpatchify
from pippin.train import AdamW, Trainer

STEPS = 3
TINY = DartConfig(
    (1, 4, 4),
    patch_size=2,
    num_hidden_layers=2,
    hidden_size=24,
    num_attention_heads=2,
    schedule=NomadSchedule.cosine(STEPS),
)
CLASSES = replace(TINY, condition=ConditioningSpec(num_classes=3, null=True))


def made(config=TINY, seed=0):
    """A model of which every weight matters."""
    model = DART(config).initialize(seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model.requires_grad_(False)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- who sees whom ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sees", ["all", "view", "statistic"])
def test_a_view_changes_no_guess_from_noisier_views(sees):
    model = made(replace(TINY, attends_to=sees))
    x, noise = normal(1, 1, 4, 4), normal(1, STEPS, 1, 4, 4, seed=1)
    before, _ = model(x, noise, None)
    for level in range(STEPS):
        other = noise.clone()
        other[:, level, 0, 0, 0] += 1.0  # one pixel of one view
        changed = (model(x, other, None)[0] - before)[0].abs().amax(-1) > 1e-6
        assert not changed[:level].any()
        assert changed[level].all()  # all tokens of a view see each other
        assert bool(changed[level + 1 :].all()) == (sees != "view") or level == STEPS - 1
        assert not (sees == "view" and changed[level + 1 :].any())


def test_token_by_token_a_patch_depends_on_those_before_it():
    model = made(replace(TINY, order="ar"))
    x, noise = normal(1, 1, 4, 4), normal(1, STEPS, 1, 4, 4, seed=1)
    before, _ = model(x, noise, None)
    for level in range(1, STEPS):
        for token, (row, column) in enumerate([(0, 0), (0, 2), (2, 0), (2, 2)]):
            other = noise.clone()
            other[:, level, 0, row, column] += 1.0
            changed = (model(x, other, None)[0] - before)[0].abs().amax(-1) > 1e-6
            assert not changed[: level - 1].any()
            assert changed[level - 1].tolist() == [patch > token for patch in range(4)]
            assert changed[level:].all()


def test_masks_by_hand():
    cache = BlockCache(1, torch.tensor([0, 1, 1, 2]), prefix_mask=None)
    assert cache.mask(0, 4)[0, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    assert cache.mask(3, 1) is None
    alone = BlockCache(1, torch.tensor([0, 1, 1, 2]), only_own=True, prefix_mask=torch.tensor([[True], [True]]))
    assert alone.mask(1, 3)[0, 0].int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 0], [1, 0, 0, 1]]
    with pytest.raises(InvalidArgument, match="a sequence of 4 positions holds 0 tokens and was given 5"):
        cache.append(0, torch.zeros(1, 1, 5, 2), torch.zeros(1, 1, 5, 2), None)


TEXT = ConditioningSpec(text_dim=5, num_classes=3, null=True)


def text_of(n):
    there = torch.arange(4)[None] < torch.tensor([[4], [1], [0]])[:n]
    return Conditioning(text=normal(n, 4, 5, seed=7), text_mask=there, labels=torch.tensor([2, 0, -1])[:n])


@pytest.mark.parametrize("sees", ["all", "view", "statistic"])
@pytest.mark.parametrize("strides", [[1, 1, 1], [2, 1], [1, 2], [3]])
def test_reading_on_with_a_cache_equals_one_pass(sees, strides):
    model = made(replace(TINY, attends_to=sees, condition=TEXT))
    x, noise, condition = normal(3, 1, 4, 4), normal(3, STEPS, 1, 4, 4, seed=1), text_of(3)
    whole, _ = model(x, noise, condition)
    drawing = model.decoding(condition, 3)
    views, at = model.config.schedule.views(x, noise), 0
    for stride in strides:
        at += stride
        step = drawing.predict(views[:, at - stride : at])
        torch.testing.assert_close(patchify(step, 2), whole[:, at - 1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("order", ["parallel", "ar"])
def test_what_was_sampled_is_what_the_network_expects_of_its_own_views(order):
    model = made(replace(TINY, order=order, condition=TEXT))
    guesses = []
    drawn = model.sample(text_of(3), seed=4, on_step=lambda step: guesses.append(step.estimate()))
    schedule, again = model.config.schedule, Noise(3, seed=4)
    views = [again.normal((1, 4, 4))]
    for t, guess in zip((2, 1), guesses, strict=False):
        views.append(schedule.view(guess, again.normal((1, 4, 4)), t))
    gammas = torch.tensor(schedule.gammas[::-1]).view(1, STEPS, 1, 1, 1)
    noise = (torch.stack(views, 1) - gammas.sqrt() * drawn[:, None]) / (1 - gammas).sqrt()
    expected, _ = model(drawn, noise, text_of(3))
    for level, guess in enumerate(guesses):
        torch.testing.assert_close(patchify(guess, 2), expected[:, level], rtol=0, atol=2e-4)
    torch.testing.assert_close(drawn, guesses[-1])


def test_padding_of_a_text_says_nothing():
    model = made(replace(TINY, condition=TEXT))
    condition = text_of(2)
    longer = Conditioning(
        labels=condition.labels,
        text=torch.cat([condition.text, normal(2, 3, 5, seed=9)], 1),
        text_mask=torch.cat([condition.text_mask, torch.zeros(2, 3, dtype=torch.bool)], 1),
    )
    torch.testing.assert_close(model.sample(condition), model.sample(longer), rtol=0, atol=1e-5)


# --- sampling ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", ["gaussian", "fm"])
@pytest.mark.parametrize("order", ["parallel", "ar"])
def test_a_sample_is_its_seed_alone_and_survives_a_folder(order, head, tmp_path):
    model = made(replace(CLASSES, order=order, head=head, head_steps=3))
    assert isinstance(model, Generator)
    labels = torch.tensor([0, 1, 2])
    three = model.sample(Conditioning(labels=labels), seed=5, guidance=1.5)
    one = model.sample(Conditioning(labels=labels[1:2]), seed=6, guidance=1.5)
    torch.testing.assert_close(three[1:2], one, rtol=0, atol=0.02)  # of numbers up to 10, through many passes
    model.metadata = {"classes": ["a", "b", "c"]}
    model.save(tmp_path / "dart")
    loaded = pippin.load(tmp_path / "dart", device="cpu")
    assert loaded.metadata == model.metadata
    assert loaded.config == model.config
    assert torch.equal(loaded.sample(Conditioning(labels=labels), seed=5, guidance=1.5), three)


@pytest.mark.parametrize("head", ["gaussian", "fm"])
def test_guidance_is_a_line_through_both_guesses(head):
    model = made(replace(CLASSES, head=head, head_steps=1))
    condition = Conditioning(labels=torch.tensor([1, 2]))

    def first(condition, guidance=1.0):
        steps = []
        model.sample(condition, guidance=guidance, on_step=lambda step: steps.append(step.estimate()))
        return steps[0]

    with_it, without = first(condition), first(condition.null())
    torch.testing.assert_close(first(condition, 3.0), 3 * with_it - 2 * without, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(first(condition, 0.0), without, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("order", ["parallel", "ar"])
def test_what_is_known_stays_and_is_read(order):
    model = made(replace(TINY, order=order))
    image, mask = normal(1, 1, 4, 4, seed=3), torch.zeros(4, 4, dtype=torch.bool)
    mask[:, :2] = True
    drawn = model.sample(n=2, seed=1, known=(image, mask))
    assert torch.equal(drawn[..., :2], image[..., :2].expand(2, 1, 4, 2))
    other = model.sample(n=2, seed=1, known=(image + 1, mask))
    assert ((drawn - other)[..., 2:].abs() > 1e-4).any()


def test_from_a_given_sample():
    model = made()
    x = 3 + normal(2, 1, 4, 4, seed=3)
    assert torch.equal(model.sample(n=2, x_init=x, strength=1.0), model.sample(n=2))
    seen = []
    total = []
    model._inputs, read = lambda views: seen.append(views.clone()) or read(views), model._inputs
    for strength in (0.0, 0.34, 0.67):
        model.sample(x_init=x, strength=strength, on_step=lambda step: total.append(step.total))
    firsts = [seen[0], seen[1], seen[3]]
    assert total == [1, 2, 2, 3, 3, 3]
    assert [views.shape[1] for views in firsts] == [3, 2, 1]
    for views in firsts:  # views of the sample, with noise of the schedule's size
        gammas = torch.tensor(model.config.schedule.gammas[::-1][: views.shape[1]]).view(1, -1, 1, 1, 1)
        noise = (views - gammas.sqrt() * x[:, None]) / (1 - gammas).sqrt()
        assert 0.6 < float(noise.std()) < 1.4
        assert abs(float(noise.mean())) < 0.5


def test_a_step_that_raises_ends_it_and_numbers_that_are_not_finite_are_told():
    model = made()
    calls = []

    def stop(step):
        calls.append(step.done)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.sample(on_step=stop)
    assert calls == [1]
    model.position_embedding[0, 0] = math.nan
    with pytest.raises(NonFiniteSample, match="view 3 of 3") as caught:
        model.sample()
    assert caught.value.step == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: replace(TINY, patch_size=3), "patch_size=3 does not divide samples of 4 by 4"),
        (lambda: replace(TINY, num_hidden_layers=0), "num_hidden_layers must be at least 1"),
        (lambda: replace(TINY, num_attention_heads=5), "hidden_size=24 with num_attention_heads=5"),
        (lambda: replace(TINY, condition=ConditioningSpec(map_channels=1)), "no map"),
        (lambda: replace(TINY, order="ar", attends_to="view"), "attends_to='view' does not"),
        (lambda: NoisyViews(condition_dropout=1.0), "condition_dropout must be"),
        (lambda: made().sample(steps=4), "steps must be at most 3"),
        (lambda: made(replace(TINY, order="ar")).sample(steps=2), "must be 3"),
        (lambda: made().sample(strength=0.5), "x_init"),
        (lambda: made().sample(x_init=torch.zeros(1, 1, 4, 4), strength=1.5), "strength must be from 0 to 1"),
        (lambda: made().sample(x_init=torch.zeros(1, 1, 8, 8)), r"\(1, 8, 8\); the model's are \(1, 4, 4\)"),
        (lambda: made().sample(n=3, x_init=torch.zeros(2, 1, 4, 4)), "x_init holds 2 samples for n=3"),
        (lambda: made().sample(known=(torch.zeros(1, 1, 4, 4), torch.ones(3, 3).bool())), r"mask of \(3, 3\)"),
        (lambda: made().sample(head_steps=3), "head='fm'"),
        (lambda: made(CLASSES).sample(guidance=2.0), "no condition was given"),
        (lambda: made(CLASSES).sample(Conditioning(labels=torch.tensor([3]))), "label 3 is outside"),
        (
            lambda: made(replace(TINY, condition=ConditioningSpec(text_dim=5))).sample(
                Conditioning(labels=torch.tensor([1]))
            ),
            "text",
        ),
        (lambda: made().errors(torch.zeros(1, 3, 4, 4)), r"\(3, 4, 4\)"),
    ],
)
def test_bad_arguments_are_told_before_any_work(make, message):
    with pytest.raises(InvalidArgument, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NoisyViews("elbo"), "'elbo'"),
        (lambda: made().sample(known=(torch.zeros(1, 1, 4, 4), torch.zeros(4, 4))), r"give booleans|f32\[4,4\]"),
    ],
)
def test_what_is_of_another_type_is_refused(make, message):
    """By our own check, or before it by that of types, which tests switch on."""
    with pytest.raises((InvalidArgument, TypeCheckError), match=message):
        make()


def test_samples_that_are_no_numbers_are_refused():
    with pytest.raises(InvalidInput, match="NaN"):
        made().sample(x_init=torch.full((1, 1, 4, 4), math.nan))


# --- training ---------------------------------------------------------------------------------------------------------


class Signs:
    """Samples that are 1 everywhere or -1 everywhere: the best guess is a hyperbolic tangent, patches agree."""

    def __init__(self, shape, batch=48):
        self.shape, self.batch = shape, batch

    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        while True:
            yield Samples(self.draw(self.batch, generator))

    def draw(self, n, generator):
        sign = torch.randint(0, 2, (n, 1, 1, 1), generator=generator) * 2.0 - 1
        return sign.expand(n, *self.shape).clone()


def trained(config, steps, weighting="uniform"):
    model = DART(config).initialize(0)
    how = {"optimizer": AdamW(lr=4e-3, weight_decay=0.0), "ema": 0.97, "show_progress": False}
    trainer = Trainer(model, NoisyViews(weighting), Signs(config.shape), steps=steps, **how)
    training = trainer.fit()
    trainer.ema._exchange(model)
    return model.requires_grad_(False), training


def best_error(total, numbers):
    """E (1 - tanh(a + sqrt(a) e))^2 ... of a sign seen in ``numbers`` places with this ratio, by quadrature."""
    e = torch.linspace(-8, 8, 4001, dtype=torch.float64)
    density = torch.exp(-(e**2) / 2) / math.sqrt(2 * math.pi) * (e[1] - e[0])
    a = total * numbers
    return float((density * (1 - torch.tanh(a + math.sqrt(a) * e)) ** 2).sum())


def test_trained_guesses_are_as_good_as_they_can_be_and_views_pay():
    config = DartConfig(
        (1, 2, 2),
        patch_size=2,
        num_hidden_layers=1,
        hidden_size=32,
        num_attention_heads=2,
        schedule=NomadSchedule.cosine(4),
    )
    held = Signs(config.shape).draw(4000, torch.Generator().manual_seed(9))
    schedule = config.schedule
    for sees, ratios in (("all", schedule.total_snr), ("view", schedule.snr)):
        model, training = trained(replace(config, attends_to=sees), 150)
        errors = model.errors(held, seed=3)
        for error, ratio in zip(errors[2:], ratios[2:], strict=True):
            assert error == pytest.approx(best_error(ratio, 4), abs=0.03)
        assert set(training.steps[-1].metrics) >= {"first", "middle", "last"}
    assert best_error(schedule.snr[2], 4) > best_error(schedule.total_snr[2], 4)


def test_a_flow_draws_no_mean_and_token_by_token_patches_agree():
    # two views, the first of which says nearly nothing: what is drawn after it must be a sign, and the same for both
    config = DartConfig(
        (1, 2, 4),
        patch_size=2,
        num_hidden_layers=1,
        hidden_size=32,
        num_attention_heads=2,
        schedule=NomadSchedule.cosine(2, last=0.95),
        head="fm",
    )
    differ = {}
    for order in ("parallel", "ar"):
        model, training = trained(replace(config, order=order), 150)
        drawn = patchify(model.sample(n=200), 2).mean(-1)
        assert float((drawn.abs() - 1).abs().mean()) < 0.2
        assert training.steps[-1].metrics["flow"] < training.steps[0].metrics["flow"] / 2
        differ[order] = float((drawn.sign().prod(1) < 0).float().mean())
    assert differ["parallel"] > 0.25
    assert differ["ar"] < 0.05


def test_the_objective_gives_each_view_noise_of_its_own_and_drops_conditions():
    seen = {}
    model = DART(CLASSES).initialize(0)
    forward = model.forward
    model.forward = lambda x, noise, condition: (
        seen.update(noise=noise, labels=condition.labels) or forward(x, noise, condition)
    )
    batch = Samples(torch.zeros(2000, 1, 4, 4), Conditioning(labels=torch.ones(2000, dtype=torch.long)))
    loss = NoisyViews(condition_dropout=0.25)(model, batch, torch.Generator().manual_seed(0))
    flat = seen["noise"].transpose(0, 1).flatten(1)
    assert float((torch.corrcoef(flat) - torch.eye(STEPS)).abs().max()) < 0.02
    assert float((seen["labels"] == -1).float().mean()) == pytest.approx(0.25, abs=0.03)
    assert loss.count == 2000
    # at first the guess is the scaled view, whose error is known
    gammas = NomadSchedule.cosine(STEPS).gammas
    assert float(loss.metrics["first"]) / 2000 == pytest.approx(gammas[-1] * (1 - gammas[-1]), rel=0.05)
    with pytest.raises(InvalidArgument, match="the model's are"):
        NoisyViews()(model, Samples(torch.zeros(1, 1, 8, 8)), torch.Generator())


def test_patches_are_laid_out_as_the_samples_are():
    x = normal(2, 1, 4, 4)
    assert torch.equal(unpatchify(patchify(x, 2), 2, (4, 4)), x)
