"""The probes against scores whose locality is known, and the length curve against a drawer that never fails or does."""

import math

import pytest
import torch
from scipy.stats import norm

from pippin.core.errors import InvalidArgument
from pippin.data.synthetic.scenes import SceneObject, SceneSpec, cell_map, render, sample_scenes
from pippin.generate.composition.locality import cell_regions, length_curve, locality_report, random_cells
from pippin.generate.conditions import Conditioning, ConditioningSpec
from pippin.generate.diffusion.diffusion import Diffusion, DiffusionConfig
from pippin.generate.diffusion.local_network import LocalNetConfig
from pippin.generate.diffusion.prediction import Estimate
from pippin.generate.diffusion.schedules import NoiseSchedule

COSINE = NoiseSchedule.vp_cosine()
CELLS, SIZE = 2, 8
REGIONS = cell_regions(CELLS, SIZE)
PRESENT = random_cells(CELLS, 2, 12, seed=1).flatten(1)
X0 = torch.randn(12, 1, SIZE, SIZE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def draw(present: torch.Tensor) -> Conditioning:
    return Conditioning(vector=present.float())


class Linear:
    """Data are estimated as ``mix * condition`` in each region plus a blur of the samples of a known radius."""

    def __init__(self, mix: torch.Tensor, radius: int = 0, product: float = 0.0) -> None:
        self.mix, self.radius, self.product = mix.double(), radius, product

    def estimate(self, x: torch.Tensor, t: float, condition: Conditioning | None = None) -> Estimate:
        assert condition is not None
        c = condition.vector.double()
        level = c @ self.mix.T + self.product * c.sum(1, keepdim=True).square()
        x0 = torch.einsum("nk,khw->nhw", level, REGIONS.double())[:, None]
        size = 2 * self.radius + 1
        x0 = x0 + torch.nn.functional.avg_pool2d(x, size, 1, self.radius)
        return Estimate(x0, (x - COSINE.a(t) * x0) / COSINE.s(t))


def test_sensitivity_is_the_square_of_what_a_conditioner_changes():
    mix = torch.tensor([[2.0, 1.0, 0, 0], [0, 1.0, 0, 0], [0, 0, 3.0, 1.0], [0.5, 0, 0, 1.0]])
    report = locality_report(Linear(mix), COSINE, X0, PRESENT, draw, REGIONS)
    wanted = mix.double().square() / mix.double().square().sum(1, keepdim=True)
    for one in report.at:
        torch.testing.assert_close(one.sensitivity, wanted, rtol=1e-6, atol=1e-9)
    own = wanted.diagonal().mean()
    other = (wanted.sum() - wanted.diagonal().sum()) / 12
    assert report.R_cond == pytest.approx(float(own / other), rel=1e-6)


def test_independent_parts_are_perfectly_local_and_additive():
    report = locality_report(Linear(torch.eye(4)), COSINE, X0, PRESENT, draw, REGIONS)
    assert math.isinf(report.R_cond)
    assert report.additivity_gap == pytest.approx(0.0, abs=1e-12)
    assert report.r90 == 0
    assert report.to_dict()["R_cond"] is None


def test_a_model_that_ignores_its_condition_is_not_local():
    report = locality_report(Linear(torch.zeros(4, 4)), COSINE, X0, PRESENT, draw, REGIONS)
    assert report.R_cond == pytest.approx(1.0)


def test_the_gap_of_a_product_is_the_one_by_hand():
    """The squared number of conditioners: both together change 4p where each alone changes p, beside their own."""
    p = 0.3
    report = locality_report(Linear(torch.eye(4), product=p), COSINE, X0, PRESENT, draw, REGIONS)
    gap = torch.full((4,), 2 * p)
    both = torch.tensor([1 + 4 * p, 1 + 4 * p, 4 * p, 4 * p])
    assert report.additivity_gap == pytest.approx(float(gap.norm() / both.norm()), rel=1e-6)


@pytest.mark.parametrize("radius", [1, 2])
def test_influence_ends_where_the_blur_ends(radius):
    x0 = X0.repeat(6, 1, 1, 1)
    report = locality_report(Linear(torch.eye(4), radius), COSINE, x0, PRESENT.repeat(6, 1), draw, REGIONS, probes=64)
    shares = report.at[0].influence
    assert sum(shares) == pytest.approx(1.0)
    assert not any(shares[radius + 1 :])
    # the mean over pixels u of how many pixels v lie at each distance inside of the image
    lines = torch.arange(SIZE)
    apart = (lines[:, None] - lines[None]).abs()
    counts = [int((torch.maximum(apart[:, None, :, None], apart[None, :, None]) == r).sum()) for r in range(radius + 1)]
    for share, count in zip(shares, counts, strict=False):
        assert share == pytest.approx(count / sum(counts), rel=0.05)
    assert report.r90 == radius


def test_a_local_network_has_the_radius_of_its_window():
    config = DiffusionConfig(
        (1, 12, 12), LocalNetConfig(channels=8, num_blocks=2, radius=2), ConditioningSpec(map_channels=1)
    )
    model = Diffusion(config).initialize(0)
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        parameter.data.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    model.eval().requires_grad_(False)
    batch = sample_scenes(SceneSpec(size=12, objects=(2, 2), cells=3, radius=(1.0, 1.4)), 6, seed=0)
    report = locality_report(
        model,
        COSINE,
        batch.x,
        batch.presence.flatten(1),
        lambda p: Conditioning(map=cell_map(p.view(-1, 3, 3), 12, width=0.1)),
        cell_regions(3, 12),
        times=(0.5,),
    )
    assert not any(report.at[0].influence[3:])
    assert report.at[0].influence[2] > 0
    # neighbors (4 pixels apart) see a label two pixels inside of a region, cells further off see nothing
    assert float(report.at[0].sensitivity[0, 8]) < 1e-6
    assert float(report.at[0].sensitivity[0, 0]) > 0.5
    assert len(report.report().rows) == 3


def test_the_report_is_drawn(tmp_path):
    report = locality_report(Linear(torch.eye(4) + 0.1, 1), COSINE, X0, PRESENT, draw, REGIONS)
    report.plot(tmp_path / "locality.png")
    assert (tmp_path / "locality.png").read_bytes().startswith(b"\x89PNG")
    assert "additivity gap at t=0.50" in str(report)


class Restless:
    def __init__(self) -> None:
        self.calls = 0

    def estimate(self, x: torch.Tensor, t: float, condition: Conditioning | None = None) -> Estimate:
        self.calls += 1
        return Estimate(x, x * self.calls)


class Learning(torch.nn.Identity):
    """A network in training mode."""

    def estimate(self, x, t, condition=None):
        return Estimate(x, x)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": Learning()}, "training mode"),
        ({"model": Restless()}, "two evaluations"),
        ({"regions": REGIONS[:3]}, r"regions of shape \(3, 8, 8\) for 4 conditioners"),
        ({"regions": REGIONS | REGIONS[0]}, "16 pixels lie in several"),
        ({"regions": REGIONS & ~REGIONS[0]}, "16 in none|no partition"),
        ({"times": (0.0,)}, "must be above 0"),
        ({"times": (1.5,)}, "must be above 0"),
        ({"probes": 0}, "probes must be at least 1"),
        ({"present": PRESENT & (PRESENT.cumsum(1) == 1)}, "must have two"),
        ({"draw": lambda p: draw(p * torch.tensor([1, 1, 0, 1]))}, "conditioner 2 cannot be toggled"),
    ],
)
def test_what_cannot_be_probed_is_refused(changes, message):
    arguments = {
        "model": Linear(torch.eye(4)),
        "schedule": COSINE,
        "x0": X0,
        "present": PRESENT,
        "draw": draw,
        "regions": REGIONS,
        **changes,
    }
    with pytest.raises(InvalidArgument, match=message):
        locality_report(**arguments)


# --- length -----------------------------------------------------------------------------------------------------------

SPEC = SceneSpec(cells=4, radius=(1.2, 1.6))


def rendered(wanted: torch.Tensor) -> torch.Tensor:
    things = [
        [SceneObject("disc", 4 * row + 2.0, 4 * column + 2.0, 1.5) for row, column in one.nonzero().tolist()]
        for one in wanted
    ]
    return render(SPEC, things)[0].float() / 127.5 - 1


def at_most(most: int):
    def sample(wanted: torch.Tensor, seed: int) -> torch.Tensor:
        kept = wanted.flatten(1) & (wanted.flatten(1).cumsum(1) <= most)
        return rendered(kept.view_as(wanted))

    return sample


def test_a_drawer_that_never_fails_has_the_longest_horizon():
    curve = length_curve(at_most(16), SPEC, (0, 1, 8, 16), n=5)
    assert curve.accuracy == curve.exact == (1.0,) * 4
    assert curve.error == (0.0,) * 4
    assert curve.horizon == 16


def test_a_drawer_of_three_objects_ends_where_it_must(tmp_path):
    curve = length_curve(at_most(3), SPEC, (1, 3, 4, 6), n=5)
    assert curve.accuracy == pytest.approx((1.0, 1.0, 1 - 1 / 16, 1 - 3 / 16))
    assert curve.exact == (1.0, 1.0, 0.0, 0.0)
    assert curve.error == pytest.approx((0.0, 0.0, -1.0, -3.0))
    assert curve.horizon == 3
    assert str(curve).startswith("Length curve")
    curve.plot(tmp_path / "curve.svg")
    assert b"<svg" in (tmp_path / "curve.svg").read_bytes()


def test_random_cells_are_uniform():
    drawn = random_cells(4, 3, 4000, seed=2).float().mean(0)
    spread = (3 / 16 * 13 / 16 / 4000) ** 0.5
    assert float((drawn - 3 / 16).abs().max()) < norm.ppf(1 - 1e-4) * spread


@pytest.mark.parametrize(
    ("spec", "counts", "n", "message"),
    [
        (SceneSpec(), (1,), 4, "without a grid"),
        (SPEC, (3, 1), 4, "must rise"),
        (SPEC, (1, 17), 4, "must rise from 0 to 16"),
        (SPEC, (), 4, "must rise"),
        (SPEC, (1,), 0, "n must be at least 1"),
    ],
)
def test_what_has_no_curve_is_refused(spec, counts, n, message):
    with pytest.raises(InvalidArgument, match=message):
        length_curve(at_most(3), spec, counts, n=n)
