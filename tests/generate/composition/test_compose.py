"""Compositions against closed forms: where they are exact, where they are biased for ever, and what repairs them."""

import warnings

import pytest
import torch

from pippin.core.errors import CompositionAtRisk, InvalidArgument
from pippin.generate.composition.compose import ComponentModel, Composed, composability, compose
from pippin.generate.conditions import Conditioning, ConditioningSpec
from pippin.generate.contract import Generator, SamplingStep
from pippin.generate.diffusion.diffusion import Diffusion, DiffusionConfig
from pippin.generate.diffusion.gaussian_mixture import GaussianMixture, exact_denoiser
from pippin.generate.diffusion.local_network import LocalNetConfig
from pippin.generate.diffusion.prediction import Estimate
from pippin.generate.diffusion.samplers import Langevin, integrate
from pippin.generate.diffusion.schedules import NoiseSchedule

COSINE = NoiseSchedule.vp_cosine()


def gaussian(mean: list[float], variances: list[float], shear: float = 0.0) -> ComponentModel:
    """Independent features z of these means and variances, seen as ``x = A^-1 z`` with ``A = [[1, shear], [0, 1]]``."""
    back = torch.tensor([[1.0, -shear], [0.0, 1.0]], dtype=torch.float64)
    covariance = back @ torch.diag(torch.tensor(variances, dtype=torch.float64)) @ back.T
    mixture = GaussianMixture([1.0], [(back @ torch.tensor(mean, dtype=torch.float64)).tolist()], covariance[None])
    return ComponentModel(exact_denoiser(mixture, COSINE), COSINE, (2,))


def pair(shear: float = 0.0, background: ComponentModel | None = None) -> Composed:
    first = gaussian([1.0, 0.0], [0.01, 0.04], shear)
    second = gaussian([0.0, 1.0], [0.04, 0.01], shear)
    return compose([first, second], background or gaussian([0.0, 0.0], [0.04, 0.04], shear))


def drawn(composed: Composed, steps: int, shear: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact mean and covariance of the features of what DDIM draws: with Gaussians it is an affine map of the noise."""
    corners = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    grid = COSINE.grid(steps)
    out = integrate(composed, COSINE, COSINE.s(grid[0]) * corners, grid, method="ddim")
    features = out @ torch.tensor([[1.0, shear], [0.0, 1.0]], dtype=torch.float64).T
    matrix = (features[1:] - features[0]).T
    return features[0], matrix @ matrix.T


def correlation(covariance: torch.Tensor) -> float:
    return float(covariance[0, 1] / (covariance[0, 0] * covariance[1, 1]).sqrt())


def test_parts_of_separate_coordinates_compose_exactly():
    for steps, spread in ((200, 0.097), (1000, 0.0993)):
        mean, covariance = drawn(pair(), steps)
        torch.testing.assert_close(mean, torch.ones(2, dtype=torch.float64), rtol=0, atol=2e-3)
        assert covariance.diagonal().sqrt().tolist() == pytest.approx([spread, spread], abs=5e-4)
        assert correlation(covariance) == pytest.approx(0.0, abs=1e-9)


def test_the_composed_score_is_the_gradient_of_the_composed_density():
    x = torch.randn(5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    a, s = COSINE.a(0.4), COSINE.s(0.4)
    mixtures = [
        GaussianMixture([0.4, 0.6], [[1.0, 0.0], [-0.5, 0.3]], [0.05, 0.1]),
        GaussianMixture([1.0], [[0.0, 1.0]], [0.2]),
        GaussianMixture([1.0], [[0.2, 0.1]], [0.5]),
    ]
    parts = [ComponentModel(exact_denoiser(mixture, COSINE), COSINE, (2,)) for mixture in mixtures]
    weights = (1.0, 0.5)
    log_p = [mixture.log_prob(x, a, s) for mixture in mixtures]
    density = log_p[2] + sum(w * (p - log_p[2]) for w, p in zip(weights, log_p, strict=False))
    (wanted,) = torch.autograd.grad(density.sum(), x)
    found = compose(parts[:2], parts[2], weights=weights)(x.detach(), 0.4)
    torch.testing.assert_close(found.score(s), wanted, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(a * found.x0 + s * found.eps, x.detach(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("shear", "mean"), [(0.5, 1.05), (0.9, 1.08), (1.5, 1.10)])
def test_mixed_features_leave_a_bias_that_more_steps_do_not_remove(shear, mean):
    few, covariance = drawn(pair(shear), 200, shear)
    many, finer = drawn(pair(shear), 800, shear)
    assert few.tolist() == pytest.approx([mean, mean], abs=0.01)
    torch.testing.assert_close(few, many, rtol=0, atol=2e-3)
    assert correlation(covariance) < -0.1
    assert correlation(finer) == pytest.approx(correlation(covariance), abs=0.05)


def affine_langevin(composed: Composed, x: torch.Tensor, covariance: torch.Tensor, langevin: Langevin):
    """Mean and covariance after Langevin steps, exactly: the score of a Gaussian is affine."""
    corners = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    score = composed(corners, langevin.t).score(COSINE.s(langevin.t))
    step = torch.eye(2, dtype=torch.float64) + langevin.step_size * (score[1:] - score[0]).T
    for _ in range(langevin.steps):
        x = step @ x + langevin.step_size * score[0]
        covariance = step @ covariance @ step.T + 2 * langevin.step_size * torch.eye(2, dtype=torch.float64)
    return x, covariance


@pytest.mark.parametrize("shear", [0.5, 0.9, 1.5])
def test_a_corrector_at_a_small_time_removes_that_bias(shear):
    composed, langevin = pair(shear), Langevin(400, 2e-4, 1e-3)
    back = torch.tensor([[1.0, -shear], [0.0, 1.0]], dtype=torch.float64)
    mean, covariance = drawn(composed, 200, shear)
    mean, covariance = affine_langevin(composed, back @ mean, back @ covariance @ back.T, langevin)
    forth = torch.linalg.inv(back)
    assert (forth @ mean).tolist() == pytest.approx([1.0, 1.0], abs=7e-3)
    assert abs(correlation(forth @ covariance @ forth.T)) < 0.02


def test_samples_with_a_corrector_agree():
    langevin = Langevin(400, 2e-4, 1e-3)
    x = pair(0.9).sample(n=200, steps=50, method="ddim", corrector=langevin, seed=3)
    features = x.double() @ torch.tensor([[1.0, 0.9], [0.0, 1.0]], dtype=torch.float64).T
    assert features.mean(0).tolist() == pytest.approx([1.0, 1.0], abs=0.028)  # four standard errors; the bias is 0.08


def test_a_background_of_any_part_is_not_the_composition():
    mean, _ = drawn(pair(background=gaussian([0.5, 0.5], [0.275, 0.275])), 200)
    assert mean.tolist() == pytest.approx([0.685, 0.685], abs=0.02)


def test_the_report_tells_the_cases_apart():
    sound, sheared = composability(pair()), composability(pair(1.5))
    assert sound.verdict == "sound"
    assert sound.largest == pytest.approx(0.0, abs=1e-6)
    assert sound.advice == ("The parts change different features (largest cosine 0.00), so their scores can be added.",)
    assert sheared.verdict == "at risk"
    against = composability(pair(background=gaussian([0.5, 0.5], [0.275, 0.275])))
    assert against.verdict == "at risk"
    assert against.cosine[0, 1] < -0.3
    assert "any one object" in " ".join(against.advice)
    # of mixed features the differences keep their directions at small times, whatever their signs
    near = composability(pair(1.5), torch.randn(50, 2, dtype=torch.float64), times=(1e-4,))
    assert near.largest == pytest.approx(1.5 / (1 + 1.5**2) ** 0.5, abs=1e-3)
    assert "Langevin" in " ".join(sheared.advice)
    assert "at risk" in str(sheared)
    assert sheared.to_dict()["cosine"][0][0] == pytest.approx(1.0)


def test_the_cosine_is_that_of_the_differences_by_hand():
    """With equal covariances the differences are constant, whatever the samples: the cosine of the means' differences
    in the metric of the covariance."""
    parts = [gaussian(mean, [0.1, 0.1]) for mean in ([1.0, 0.2], [0.4, 1.0], [0.0, 0.0])]
    report = composability(compose(parts[:2], parts[2]), torch.randn(7, 2), times=(0.1, 0.6))
    expected = (0.4 + 0.2) / (1.04**0.5 * 1.16**0.5)
    assert report.largest == pytest.approx(expected, abs=1e-5)
    assert [t for t, _ in report.by_time] == [0.1, 0.6]
    assert [value for _, value in report.by_time] == pytest.approx([expected, expected], abs=1e-5)
    size = (0.4 + 0.2) / (1.04**0.5 * 1.16**0.5)
    assert float(report.overlap[0, 1]) == pytest.approx(size, abs=1e-5)


def test_opposed_parts_share_all_places_but_a_color_each_is_sound():
    """Channels of an image are one place: two colors at one place overlap, and are orthogonal."""

    def color(channel: int | None) -> ComponentModel:
        def score(x: torch.Tensor, t: float) -> torch.Tensor:
            pull = -x.clone()
            if channel is not None:
                pull[:, channel, 1, 1] += 3.0
            return pull

        return ComponentModel.scored(score, COSINE, (3, 4, 4))

    report = composability(compose([color(0), color(1)], color(None)), torch.zeros(2, 3, 4, 4))
    assert report.largest == pytest.approx(0.0, abs=1e-6)
    assert float(report.overlap[0, 1]) == pytest.approx(1.0, abs=1e-6)
    assert report.verdict == "sound"
    assert "share positions" in " ".join(report.advice)


def test_sampling_warns_where_it_goes_wrong_and_not_where_a_corrector_runs():
    with pytest.warns(CompositionAtRisk, match="Parts 0 and 1 change the same features"):
        pair(1.5).sample(n=4, steps=20, method="ddim")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pair(1.5).sample(n=4, steps=20, method="ddim", corrector=Langevin(2, 1e-4, 1e-3))
        pair(0.0).sample(n=4, steps=20, method="ddim")


def test_a_score_is_enough_and_gives_the_same_samples():
    mixture = GaussianMixture([0.5, 0.5], [[1.0, 0.0], [-1.0, 0.5]], [0.1, 0.3])

    def score(x: torch.Tensor, t: float) -> torch.Tensor:
        return mixture.estimate(x, COSINE.a(t), COSINE.s(t)).score(COSINE.s(t))

    by_score = compose([ComponentModel.scored(score, COSINE, (2,))]).sample(n=5, steps=10, seed=1)
    direct = compose([ComponentModel(exact_denoiser(mixture, COSINE), COSINE, (2,))]).sample(n=5, steps=10, seed=1)
    torch.testing.assert_close(by_score, direct, rtol=0, atol=1e-4)


# --- models -----------------------------------------------------------------------------------------------------------


def model(seed: int = 0, *, null: bool = True, schedule: NoiseSchedule = COSINE, size: int = 8) -> Diffusion:
    config = DiffusionConfig(
        (1, size, size),
        LocalNetConfig(channels=8, num_blocks=1),
        ConditioningSpec(map_channels=1, null=null),
        schedule,
        "eps",
        "ddim",
        5,
    )
    made = Diffusion(config).initialize(seed)
    generator = torch.Generator().manual_seed(seed + 10)
    for parameter in made.parameters():
        parameter.data.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return made.eval().requires_grad_(False)


def bump(row: int, column: int, n: int = 1) -> Conditioning:
    drawn = torch.zeros(n, 1, 8, 8)
    drawn[:, :, row, column] = 1.0
    return Conditioning(map=drawn)


def test_conditions_of_one_model_are_one_call_and_the_sum_of_single_calls():
    one, calls = model(), []
    one.network.register_forward_pre_hook(lambda module, arguments: calls.append(len(arguments[0])))
    composed = compose([bump(1, 1), bump(6, 6, n=3)], "null", of=one, weights=[1.0, 2.0])
    x = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    found = composed(x, 0.5)
    assert calls == [9]
    single = [one.estimate(x, 0.5, c) for c in (bump(1, 1, 3), bump(6, 6, 3), bump(0, 0, 3).null())]
    for name in ("x0", "eps"):
        first, second, behind = (getattr(value, name) for value in single)
        wanted = behind + (first - behind) + 2 * (second - behind)
        torch.testing.assert_close(getattr(found, name), wanted, rtol=0, atol=1e-4)


def test_models_compose_like_their_denoisers_and_one_part_is_the_model_itself():
    first, second, behind = model(1), model(2), model(3)
    x = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    found = compose([ComponentModel.of(first, bump(2, 2)), second], behind)(x, 0.3).eps
    nothing = bump(0, 0, 2).null()
    a, b, c = (
        m.estimate(x, 0.3, cond).eps for m, cond in ((first, bump(2, 2, 2)), (second, nothing), (behind, nothing))
    )
    torch.testing.assert_close(found, a + b - c, rtol=0, atol=1e-4)
    alone = compose([bump(2, 2)], of=first)
    assert torch.equal(alone.sample(n=2, seed=4), first.sample(bump(2, 2, 2), seed=4))


def test_a_weight_on_one_part_is_guidance():
    one = model()
    composed = compose([bump(3, 3)], "null", of=one, weights=[2.5])
    guided = one.sample(bump(3, 3, 2), seed=2, guidance=2.5)
    torch.testing.assert_close(composed.sample(n=2, seed=2), guided, rtol=0, atol=1e-3)


def test_a_composition_is_a_generator_whose_callback_can_end_it():
    composed = compose([bump(1, 1, 2), bump(6, 6)], "null", of=model())
    assert isinstance(composed, Generator)
    seen: list[int] = []

    def stop(step: SamplingStep) -> None:
        seen.append(step.done)
        if step.done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        composed.sample(on_step=stop)
    assert seen == [1, 2]


def nothing(x: torch.Tensor, t: float) -> Estimate:
    return Estimate(0 * x, x)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: compose([]), "at least one"),
        (lambda: compose([bump(1, 1), bump(2, 2)], of=model()), "2 parts with weights .* need a background"),
        (lambda: compose([bump(1, 1)], of=model(), weights=[2.0]), "need a background"),
        (lambda: compose([bump(1, 1)], "null", of=model(), weights=[1.0, 2.0]), "2 weights for 1 parts"),
        (lambda: compose([bump(1, 1)]), "give the model as of="),
        (lambda: compose([bump(1, 1), bump(2, 2)], "null", of=model(null=False)), "background='null'"),
        (lambda: compose([gaussian([0, 0], [1, 1])] * 2, "null"), "background='null'"),
        (lambda: compose([model(1), model(2, size=16)], model(3)), r"part 1 has the shape \(1, 16, 16\)"),
        (
            lambda: compose([model(1), model(2)], model(3, schedule=NoiseSchedule.flow())),
            "the background has the schedule .*flow",
        ),
        (lambda: compose([bump(1, 1, 2), bump(2, 2, 3)], "null", of=model()), r"of \[2, 3\] samples"),
        (lambda: compose([Conditioning(labels=torch.tensor([1]))], of=model()), "the model reads"),
        (lambda: compose([bump(1, 1, 2)], of=model()).sample(n=3), "n=3 samples for conditions of 2"),
        (lambda: compose([bump(1, 1, 2)], of=model())(torch.zeros(3, 1, 8, 8), 0.5), "3 samples for conditions of 2"),
        (lambda: compose([model()]).sample(bump(1, 1)), "the model reads no condition"),
        (lambda: compose([model()]).sample(guidance=2.0), "guidance=2.0"),
        (lambda: composability(pair(), torch.zeros(2, 2), times=(0.0, 0.5)), "must be above 0"),
        (lambda: composability(pair(), torch.zeros(2, 3)), r"samples of shape \(3,\)"),
    ],
)
def test_what_cannot_be_composed_is_refused(make, message):
    with pytest.raises(InvalidArgument, match=message):
        make()


def test_one_part_by_itself_is_sound():
    assert composability(compose([ComponentModel(nothing, COSINE, (2,))])).verdict == "sound"
