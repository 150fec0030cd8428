"""Oracles: the diffusion path of Gaussian data, which is known in closed form, and TarFlow's own single step."""

from types import SimpleNamespace

import pytest
import torch
from jaxtyping import TypeCheckError

from pippin.core.errors import InvalidArgument, InvalidInput, NonFiniteSample
from pippin.generate.conditions import Conditioning, ConditioningSpec
from pippin.generate.contract import Generator
from pippin.generate.flows.itarflow import IterativeDenoise, IterativeTarFlow, flow_denoiser
from pippin.generate.flows.tarflow import TarFlow, TarFlowConfig
from pippin.generate.noise import Noise

LOW, HIGH = 0.02, 0.5


class Gaussian:
    """A flow whose data are Gaussian, with its exact score; each label has its own mean."""

    shape = (1, 2, 2)
    config = SimpleNamespace(noise_std_range=(LOW, HIGH))

    def __init__(self, spread: float = 0.3) -> None:
        self.spread, self.mean, self.asked = spread, 0.1, []

    def score(self, x, condition=None, t=None):
        self.asked.append((len(x), float(t)))
        mean = self.mean if condition is None else condition.labels.view(-1, 1, 1, 1).float()
        return -(x - mean) / (self.spread**2 + t**2)

    def path(self, x, mean=0.1):
        """Where the ordinary differential equation leads from the highest noise to the least, then one last step."""
        variance = self.spread**2
        at_low = mean + ((variance + LOW**2) / (variance + HIGH**2)) ** 0.5 * (x - mean)
        return mean + variance / (variance + LOW**2) * (at_low - mean)


@pytest.fixture
def noisy():
    return 0.1 + 0.6 * torch.randn(6, 1, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("method", "steps", "order"), [("ode", 40, 1), ("heun", 12, 2)])
def test_steps_follow_the_closed_path_and_halving_them_shows_the_order(noisy, method, steps, order):
    model = Gaussian()
    wanted = model.path(noisy)
    errors = [
        (IterativeDenoise(n, method)(model, noisy) - wanted).abs().max().item() for n in (steps + 1, 2 * steps + 1)
    ]
    assert errors[0] < 0.05
    assert errors[0] / errors[1] == pytest.approx(2**order, rel=0.35)


def test_levels_are_visited_as_published(noisy):
    model = Gaussian()
    IterativeDenoise(steps=4)(model, noisy)
    assert [t for _, t in model.asked] == pytest.approx([0.5, 0.34, 0.18, 0.02])


def test_one_step_is_tweedies_formula(noisy):
    model = Gaussian()
    wanted = 0.1 + 0.09 / (0.09 + 0.25) * (noisy - 0.1)
    torch.testing.assert_close(IterativeDenoise(1)(model, noisy), wanted)


def test_fresh_noise_keeps_the_variance_of_the_data():
    # exact samples at the highest noise become samples with the variance of the data, up to the size of the steps
    n = 3000
    x = Noise(n, seed=1).normal((1, 2, 2)).double() * (0.3**2 + HIGH**2) ** 0.5 + 0.1
    out = IterativeDenoise(60, "sde", batch_size=n)(Gaussian(), x, seed=7)
    assert out.std().item() == pytest.approx(0.3, rel=0.06)
    assert out.mean().item() == pytest.approx(0.1, abs=0.02)
    again = IterativeDenoise(60, "sde", batch_size=n)(Gaussian(), x[:5], seed=7)
    torch.testing.assert_close(again, out[:5])


def test_rows_conditions_and_clipping(noisy):
    model = Gaussian()
    labels = Conditioning(labels=torch.tensor([0, 1, 2, 0, 1, 2]))
    whole = IterativeDenoise(5, batch_size=6)(model, noisy, labels)
    model.asked.clear()
    parts = IterativeDenoise(5, batch_size=4)(model, noisy, labels)
    torch.testing.assert_close(parts, whole)
    assert [n for n, _ in model.asked] == [4, 2] * 5
    clipped = flow_denoiser(model, labels, clip=True)(noisy, 0.3)
    open_ = flow_denoiser(model, labels)(noisy, 0.3)
    assert open_.x0.max() > 1
    torch.testing.assert_close(clipped.x0, open_.x0.clamp(-1, 1))
    torch.testing.assert_close(clipped.x0 + 0.3 * clipped.eps, noisy)


@pytest.fixture(scope="module")
def flow():
    config = TarFlowConfig(
        (1, 4, 4),
        layers_per_block=(1, 1),
        hidden_size=16,
        num_attention_heads=2,
        condition=ConditioningSpec(num_classes=3),
        noise_std_range=(0.05, 0.4),
    )
    model = TarFlow(config).initialize(0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def test_one_step_of_a_flow_is_its_own_denoising(flow):
    condition = Conditioning(labels=torch.tensor([0, 1, 2]))
    drawn = IterativeTarFlow(flow, IterativeDenoise(1)).sample(condition, seed=3)
    torch.testing.assert_close(drawn, flow.sample(condition, seed=3))
    more = IterativeTarFlow(flow).sample(condition, steps=4, seed=3)
    by_hand = flow.sample(condition, seed=3, denoise=False)
    for t, r in ((0.4, 0.4 - 0.35 / 3), (0.4 - 0.35 / 3, 0.4 - 0.7 / 3), (0.4 - 0.7 / 3, 0.05), (0.05, 0.0)):
        clean = by_hand + t**2 * flow.score(by_hand, condition, t)
        by_hand = by_hand - (by_hand - clean) / t * (t - r)
    torch.testing.assert_close(more, by_hand, atol=1e-5, rtol=1e-4)


def test_every_token_and_every_step_is_told_and_samples_stand_alone(flow):
    model, told = IterativeTarFlow(flow, IterativeDenoise(3, "sde")), []
    assert isinstance(model, Generator)
    one = Conditioning(labels=torch.tensor([1]))
    drawn = model.sample(one, 3, seed=5, on_step=told.append)
    assert [step.done for step in told][-3:] == [9, 10, 11]
    assert {step.total for step in told} == {11}
    assert told[0].done == 1
    torch.testing.assert_close(model.sample(one, 2, seed=6), drawn[1:], atol=1e-5, rtol=1e-4)


def test_a_step_that_is_not_finite_is_numbered(noisy):
    model = Gaussian()
    plain = model.score
    model.score = lambda x, condition=None, t=None: plain(x, condition, t) / (0.0 if t < 0.2 else 1.0)
    with pytest.raises(NonFiniteSample, match="step 3 of 4"):
        IterativeDenoise(4)(model, noisy)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: IterativeDenoise(0), InvalidArgument, "steps must be"),
        (lambda x: IterativeDenoise(method="euler"), (InvalidArgument, TypeCheckError), "'euler'"),
        (lambda x: IterativeDenoise()(Gaussian(), x, t=0.6), InvalidArgument, "t is 0.6.*0.02 to 0.5"),
        (lambda x: IterativeDenoise()(Gaussian(), x, t=0.0), InvalidArgument, "t is 0.0"),
        (lambda x: IterativeDenoise()(Gaussian(), x[:, :, :1]), InvalidArgument, r"\(1, 1, 2\)"),
        (lambda x: IterativeDenoise()(Gaussian(), x / 0), InvalidInput, "NaN or infinite"),
        (
            lambda x: IterativeTarFlow(TarFlow(TarFlowConfig((1, 4, 4), hidden_size=16, num_attention_heads=2))),
            InvalidArgument,
            "one noise level",
        ),
    ],
)
def test_bad_input_names_the_value(noisy, call, error, message):
    with pytest.raises(error, match=message):
        call(noisy)
