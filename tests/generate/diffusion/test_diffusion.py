"""Diffusion models against exact networks, closed-form losses, and a task whose answer is known."""

import dataclasses

import pytest
import torch
from jaxtyping import TypeCheckError
from pydantic import TypeAdapter
from torch import nn

import pippin
from pippin.core.errors import InvalidArgument, InvalidInput
from pippin.generate.conditions import Conditioning, ConditioningSpec, Samples
from pippin.generate.contract import Generator
from pippin.generate.diffusion.diffusion import Denoising, Diffusion, DiffusionConfig, held_out_loss
from pippin.generate.diffusion.dit import DiTConfig
from pippin.generate.diffusion.gaussian_mixture import GaussianMixture
from pippin.generate.diffusion.local_network import LocalNetConfig
from pippin.generate.diffusion.prediction import add_noise, target
from pippin.generate.diffusion.samplers import Langevin, inpainting, integrate
from pippin.generate.diffusion.schedules import NoiseSchedule
from pippin.generate.diffusion.unet import UNetConfig
from pippin.generate.noise import Noise
from pippin.train import AdamW, Trainer

SMALL = UNetConfig(base_channels=8, num_levels=1)
SPEC = ConditioningSpec(num_classes=2, null=True)
SHAPE = (1, 4, 4)


def made(**changes) -> Diffusion:
    config = DiffusionConfig(SHAPE, SMALL, condition=SPEC)
    return Diffusion(dataclasses.replace(config, **changes)).initialize(0).eval()


def stirred(**changes) -> Diffusion:
    """Weights of which none is zero, so that everything matters."""
    model = made(**changes)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.requires_grad_(False)


class Exact(nn.Module):
    """What a perfect network says of normal data; ``off`` is added to it."""

    def __init__(self, config: DiffusionConfig, variance: float) -> None:
        super().__init__()
        self.config, self.off = config, nn.Parameter(torch.zeros(()))
        self.mixture = GaussianMixture([1.0], [[0.3]], [variance])

    def forward(self, x, t, condition=None):
        schedule, rows = self.config.schedule, []
        for row, time in zip(x, t.tolist(), strict=True):
            row = row.view(-1, 1).double()
            found = self.mixture.estimate(row, schedule.a(time), schedule.s(time))
            rows.append(target(found.x0, found.eps, time, self.config.prediction, schedule).view(x.shape[1:]))
        return torch.stack(rows).float() + self.off


def exact(kind: str, schedule: NoiseSchedule, variance: float) -> Diffusion:
    model = made(prediction=kind, schedule=schedule, condition=ConditioningSpec())
    model.network = Exact(model.config, variance)
    return model


def data(n: int, variance: float) -> Samples:
    return Samples(0.3 + variance**0.5 * torch.randn(n, *SHAPE, generator=torch.Generator().manual_seed(3)))


@pytest.mark.parametrize(
    ("kind", "schedule"),
    [("x0", NoiseSchedule.flow()), ("flow", NoiseSchedule.flow()), ("v", NoiseSchedule.vp_cosine()),
     ("eps", NoiseSchedule.vp_cosine())],
)  # fmt: skip
def test_the_least_loss_is_what_nobody_can_know(kind, schedule):
    """Of data with variance v, x0 is uncertain by v s² / (a² v + s²); other kinds by a multiple of it."""
    variance, n = 0.4, 600
    times = torch.linspace(0.0005, 0.9985, 999, dtype=torch.float64)
    a, s = schedule.a(times), schedule.s(times)
    uncertain = variance * s**2 / (a**2 * variance + s**2)
    factor = {"x0": torch.ones_like(a), "eps": (a / s) ** 2, "v": s**-2, "flow": s**-2}[kind]
    model = exact(kind, schedule, variance)
    loss = held_out_loss(model, data(n, variance), seed=4)
    assert loss == pytest.approx(float((uncertain * factor).mean()), rel=0.03)
    model.network.off.data.fill_(0.5)
    assert held_out_loss(model, data(n, variance), seed=4) == pytest.approx(loss + 0.25, rel=0.05)


class Wrong(nn.Module):
    """Says something whose data are off by 1 everywhere, and whose noise explains what is seen with them."""

    def __init__(self, x0: torch.Tensor, config: DiffusionConfig) -> None:
        super().__init__()
        self.config, self.wrong = config, nn.Parameter(x0 + 1.0)

    def forward(self, x, t, condition=None):
        schedule, at = self.config.schedule, t.view(-1, 1, 1, 1)
        eps = (x - schedule.a(at) * self.wrong) / schedule.s(at)
        return target(self.wrong, eps, t, self.config.prediction, schedule)


@pytest.mark.parametrize("kind", ["x0", "eps", "v", "flow"])
def test_min_snr_weighs_the_error_of_the_data_whatever_is_predicted(kind):
    schedule = NoiseSchedule.flow() if kind == "flow" else NoiseSchedule.vp_cosine()
    truth = data(64, 0.3)
    model = made(prediction=kind, schedule=schedule, condition=ConditioningSpec())
    model.network = Wrong(truth.x, model.config)
    objective = Denoising(weighting="min_snr")
    loss = objective(model, truth, torch.Generator().manual_seed(5))
    t = objective.sample_times(64, schedule, torch.Generator().manual_seed(5))
    ratio = (schedule.a(t) / schedule.s(t)) ** 2
    assert float(loss.total.detach()) == pytest.approx(float(ratio.clamp(max=5.0).sum()), rel=1e-3)


def test_times_are_spread_evenly_over_their_distribution():
    generator, flow = torch.Generator().manual_seed(0), NoiseSchedule.flow()
    even = Denoising().sample_times(100, flow, generator).sort().values
    torch.testing.assert_close(even.diff(), torch.full((99,), 0.00999), rtol=0.02, atol=1e-5)
    middle = Denoising(times="logit_normal", logit_mean=0.4, logit_std=0.7).sample_times(20_001, flow, generator)
    logit = (middle / flow.max_time).logit()
    assert float(logit.mean()) == pytest.approx(0.4, abs=0.01)
    assert float(logit.std()) == pytest.approx(0.7, abs=0.01)
    assert float(Denoising().sample_times(1000, NoiseSchedule.karras(), generator).min()) > 0.002


def two_points(n: int, seed: int) -> Samples:
    labels = torch.randint(0, 2, (n,), generator=torch.Generator().manual_seed(seed))
    return Samples((labels * 1.2 - 0.6).view(-1, 1, 1, 1).expand(-1, *SHAPE).contiguous(), Conditioning(labels=labels))


@pytest.mark.parametrize("schedule", [NoiseSchedule.vp_cosine(), NoiseSchedule.karras(10.0, 0.01)])
def test_a_trained_model_draws_what_each_class_is(schedule):
    kind = "v" if schedule.preserves_variance else "x0"
    model = made(schedule=schedule, prediction=kind).train()
    batches = [two_points(32, seed) for seed in range(120)]
    Trainer(model, Denoising(), batches, steps=120, optimizer=AdamW(lr=5e-3), seed=0, show_progress=False).fit()
    model.eval()
    labels = torch.tensor([0, 1] * 8)
    x = model.sample(Conditioning(labels=labels), steps=8).mean((1, 2, 3))
    torch.testing.assert_close(x.view(8, 2).mean(0), torch.tensor([-0.6, 0.6]), rtol=0, atol=0.15)
    guided = model.sample(Conditioning(labels=labels), steps=8, guidance=2.0).mean((1, 2, 3))
    assert torch.equal(guided > 0, labels == 1)
    free = model.sample(n=24, steps=8).mean((1, 2, 3))
    assert 4 <= int((free > 0).sum()) <= 20  # without a class, both
    assert float(free.abs().mean()) == pytest.approx(0.6, abs=0.2)


def test_the_same_seed_gives_the_same_samples_bit_for_bit_and_samples_do_not_know_their_batch():
    model, before = stirred(), torch.random.get_rng_state()
    for options in ({"method": "heun"}, {"method": "ddpm"}, {"method": "ddim", "eta": 0.5}):
        once, again = (model.sample(n=3, steps=4, seed=7, **options) for _ in range(2))
        assert torch.equal(once, again)
        alone = model.sample(n=1, steps=4, seed=9, **options)
        torch.testing.assert_close(alone[0], once[2], rtol=0, atol=1e-4)
        assert not torch.equal(once, model.sample(n=3, steps=4, seed=8, **options))
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("mixes", [False, True])
def test_guidance_combines_what_is_said_with_and_without_the_condition(mixes):
    model, x = stirred(), torch.randn(3, *SHAPE, generator=torch.Generator().manual_seed(0))
    model.network.mixes_samples = mixes
    condition = Conditioning(labels=torch.tensor([0, 1, 1]))
    given, absent = (model.estimate(x, 0.6, c) for c in (condition, condition.null()))
    assert not torch.allclose(given.x0, absent.x0)
    for guidance in (0.0, 1.0, 2.5):
        found = model.denoiser(condition, guidance)(x, 0.6)
        for name in ("x0", "eps"):
            with_, without = getattr(given, name), getattr(absent, name)
            torch.testing.assert_close(
                getattr(found, name), without + guidance * (with_ - without), rtol=1e-4, atol=1e-4
            )


def test_sampling_is_integrating_from_the_noise_of_the_seed():
    model = stirred(method="dpm++2m", steps=6)
    condition, schedule = Conditioning(labels=torch.tensor([1, 0])), model.config.schedule
    z = Noise(2, seed=3).normal(SHAPE)
    wanted = integrate(
        model.denoiser(condition), schedule, schedule.s(schedule.max_time) * z, schedule.grid(6), method="dpm++2m"
    )
    assert torch.equal(model.sample(condition, seed=3), wanted)


def test_beginning_from_pictures_keeps_as_much_of_them_as_is_asked():
    model = exact("v", NoiseSchedule.vp_cosine(), 0.4)
    x = data(4, 0.4).x
    kept = [float((model.sample(x_init=x, t_init=t, steps=6, seed=2) - x).square().mean()) for t in (0.02, 0.3, 0.999)]
    assert kept[0] < 0.01 < kept[1] < kept[2]
    noise = Noise(4, seed=2).normal(SHAPE)
    schedule = dataclasses.replace(NoiseSchedule.vp_cosine(), max_time=0.3)
    wanted = integrate(model.denoiser(), schedule, add_noise(x, noise, 0.3, schedule), schedule.grid(6))
    assert torch.equal(model.sample(x_init=x, t_init=0.3, steps=6, seed=2), wanted)


def test_correctors_and_projections_reach_the_sampler():
    model = stirred()
    plain = model.sample(n=2, steps=3)
    assert not torch.equal(plain, model.sample(n=2, steps=3, corrector=Langevin(2, 0.01, 0.2)))
    known, mask = torch.full((2, *SHAPE), 0.25), torch.zeros(1, 4, 4, dtype=torch.bool)
    mask[:, :2] = True
    x = model.sample(n=2, steps=3, project=inpainting(known, mask, model.config.schedule, Noise(2)))
    assert bool((x[:, :, :2] == 0.25).all())
    assert not bool((x[:, :, 2:] == 0.25).any())


def test_a_saved_model_draws_the_same_pictures(tmp_path):
    for changes in ({}, {"schedule": NoiseSchedule.karras(), "prediction": "flow"}):
        model = stirred(**changes)
        model.metadata = {"classes": ["dark", "light"]}
        model.save(tmp_path / "model")
        found = pippin.load(tmp_path / "model", device="cpu")
        assert isinstance(found, Generator)
        assert found.config == model.config
        assert found.metadata == model.metadata
        condition = Conditioning(labels=torch.tensor([0, 1]))
        assert torch.equal(found.sample(condition, guidance=2.0), model.sample(condition, guidance=2.0))


@pytest.mark.parametrize(
    "network", [UNetConfig(patch_size=2), DiTConfig(num_hidden_layers=2), LocalNetConfig(num_blocks=1)]
)
def test_every_network_is_told_from_its_file(network):
    config = DiffusionConfig((1, 8, 8), network, schedule=NoiseSchedule.flow(), prediction="flow")
    adapter = TypeAdapter(DiffusionConfig)
    assert adapter.validate_json(adapter.dump_json(config)) == config
    model = Diffusion(config).initialize(0)
    assert bool((model.sample(n=2, steps=1, seed=0)).isfinite().all())


def test_one_condition_serves_all_pictures_that_are_changed():
    model, x = stirred(), data(3, 0.4).x
    one, three = Conditioning(labels=torch.tensor([1])), Conditioning(labels=torch.tensor([1, 1, 1]))
    changed = [model.sample(c, x_init=x, t_init=0.5, steps=2) for c in (one, three)]
    assert torch.equal(changed[0], changed[1])


def test_conditions_are_left_out_of_learning_only_where_the_model_has_a_form_for_none():
    seen = []
    for null in (True, False):
        model = made(condition=ConditioningSpec(num_classes=2, null=null))
        forward = model.network.forward
        model.network.forward = lambda x, t, c, f=forward: seen.append(c.labels) or f(x, t, c)
        Denoising(condition_dropout=0.5)(model, two_points(64, 0), torch.Generator().manual_seed(0))
    assert 16 < int((seen[0] == -1).sum()) < 48
    assert int((seen[1] == -1).sum()) == 0


def test_what_a_network_adds_to_the_loss_is_added_once_for_each_sample():
    model, batch = made(), two_points(8, 0)
    plain = Denoising()(model, batch, torch.Generator().manual_seed(0))
    model.network.auxiliary_loss = lambda: torch.tensor(0.25)
    more = Denoising()(model, batch, torch.Generator().manual_seed(0))
    torch.testing.assert_close(more.total, plain.total + 8 * 0.25)
    torch.testing.assert_close(more.metrics["error"], plain.total.detach())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: DiffusionConfig(SHAPE, schedule=NoiseSchedule.flow()), "'v' needs"),
        (lambda m: DiffusionConfig(SHAPE, steps=0), "steps must be at least 1"),
        (lambda m: m.sample(guidance=2.0), "no condition was given"),
        (lambda m: m.sample(Conditioning(labels=torch.tensor([2]))), "label 2 is outside"),
        (lambda m: m.sample(method="heun", eta=0.3), "only 'ddim'"),
        (lambda m: m.sample(x_init=torch.zeros(1, *SHAPE)), "come together"),
        (lambda m: m.sample(x_init=torch.zeros(1, 1, 5, 5), t_init=0.5), r"samples of shape \(1, 5, 5\)"),
        (lambda m: m.sample(x_init=torch.zeros(1, *SHAPE), t_init=1.5), "t_init=1.5"),
        (lambda m: m.estimate(torch.zeros(1, *SHAPE), 1.5), "times from 1.5 to 1.5"),
        (lambda m: m.estimate(torch.zeros(2, *SHAPE), torch.tensor([0.5, -0.5])), "times from -0.5"),
        (lambda m: Denoising(condition_dropout=1.0), "condition_dropout must be"),
        (lambda m: Denoising()(m, Samples(torch.zeros(2, 1, 8, 8)), torch.Generator()), r"shape \(1, 8, 8\)"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(InvalidArgument, match=message):
        call(stirred())


def test_guidance_of_a_model_that_always_saw_its_condition_is_refused():
    with pytest.raises(InvalidArgument, match="not trained without its condition"):
        stirred(condition=ConditioningSpec(num_classes=2)).sample(Conditioning(labels=torch.tensor([0])), guidance=2.0)


def test_levels_in_place_of_samples_are_refused():
    """By our own check, or before it by that of types, which tests switch on."""
    with pytest.raises((InvalidInput, TypeCheckError), match=r"levels / 127\.5 - 1|u8\[2,1,4,4\]"):
        Denoising()(made(), Samples(torch.zeros(2, *SHAPE, dtype=torch.uint8)), torch.Generator())


def test_a_word_that_is_none_of_the_choices_is_refused():
    """By our own check, or before it by that of types, which tests switch on."""
    with pytest.raises((InvalidArgument, TypeCheckError), match="snr"):
        Denoising(weighting="snr")
