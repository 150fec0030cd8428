"""Samplers on a density whose exact estimates are known, then a small network that learns to draw scenes.

Notable here:
- in one dimension an exact flow takes quantiles to quantiles, so errors of samplers without noise need no samples
- where noise is drawn, both samplers begin from the same numbers
- a distance between sets of pictures has a floor: that of two sets of true pictures of the same size stands beside it
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any

from pippin.claims import Evidence, Scale, claim

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from pippin.generate.condition import Samples
    from pippin.generate.diffusion import Diffusion
    from pippin.generate.mixtures import GaussianMixture
    from pippin.generate.prediction import Estimate
    from pippin.generate.samplers import Denoiser
    from pippin.generate.schedules import NoiseSchedule


@dataclass(frozen=True)
class Size:
    """How much is done: samples of the mixture; steps of the short and the long training, batch, pictures compared."""

    seeds: tuple[int, ...]
    draws: int
    short: int
    long: int
    batch: int
    pictures: int
    known: int
    features: int


SIZES = {
    "smoke": Size((0,), 2000, 2, 4, 4, 16, 32, 5),
    "laptop": Size((0, 1, 2), 200_000, 300, 3000, 16, 600, 4096, 250),
    "gpu": Size((0, 1, 2), 200_000, 300, 3000, 128, 2000, 20_000, 250),
}
STEPS = (5, 10, 20, 40, 80)
GUIDANCE, EVALUATIONS = (1.0, 1.5, 3.0), (10, 20, 40)
"""Of the network: what is looked at on a GPU, with the first seed."""
RATE = 2e-3
DELTAS = (0.4, 0.2, 0.1, 0.05, 0.025)
"""Steps back from the middle of the cosine schedule."""


@claim(
    id="diffusion-core",
    source="arXiv:2406.08929",
    paper="a reverse step becomes Gaussian as its length goes to 0; DDIM is deterministic and exact for a point in any "
    "number of steps; DDIM and linear flow matching are one ODE up to a change of time; training either is least "
    "squares",
    setting="the mixture 0.35 N(-1.2, 0.15²) + 0.65 N(0.8, 0.3²) with its exact estimates, 5 to 80 steps, cosine "
    "schedule for DDPM and DDIM, straight path for Euler and Heun, Wasserstein distance; a U-Net of 0.31 million "
    "weights (v, cosine schedule, batch 16) on 16 by 16 scenes of 1 to 3 objects, runs of 300 and of 3,000 steps each "
    "with its own cosine rate, Frechet distance of 600 pictures in the features of a small classifier of scenes; at "
    "gpu scale a diffusion transformer of 33 million weights on 32 by 32 scenes by number of objects, and its "
    "distances over steps and guidance",
    accept="mixture: from 5 to 10 to 20 to 40 steps each doubling divides the error of DDIM and Euler by 1.6 to 2.4; "
    "from 5 to 10 to 20 that of Heun by 3 or more; DDIM is nearer than DDPM at 5, 10, 20, 40 and 80 steps on every "
    "seed; a point is reached in one step of DDIM within 1e-5; all kinds of prediction give the same samples within "
    "1e-5 for every sampler; DDIM equals the tutorial's step within 1e-5, and equals Euler on the straight path; the "
    "divergence of a reverse step from its Gaussian falls with each halving of its length from 0.4, where it is above "
    "0.05, to 0.025, where it is below 0.001. Scenes, means over 3 seeds: the Frechet distance falls by more than 3 "
    "times from 300 to 3,000 steps of training, and 20 steps of Heun and 40 of DDIM differ by no more than the larger "
    "of their standard deviations over the seeds",
)
def run(scale: Scale) -> Evidence:
    """The mixture, then scenes."""
    evidence, size = Evidence(), SIZES[scale.name]
    held = _orders(evidence) | _identities(evidence) | _reverse_steps(evidence)
    for seed in size.seeds:
        _drawn(evidence, seed, size.draws)
    held["drawn"] = all(
        ode < sde
        for steps in STEPS
        for ode, sde in zip(
            evidence.each(f"mixture, DDIM, {steps} steps, drawn"), evidence.each(f"mixture, DDPM, {steps} steps"),
            strict=True,
        )
    )  # fmt: skip
    for seed in size.seeds:
        _scenes(evidence, seed, size, large=scale.name == "gpu")
    heun, ddim = (evidence.each(f"scenes, {name}") for name in ("20 steps of Heun", "40 steps of DDIM"))
    spread = max(statistics.stdev(each) if len(each) > 1 else 0.0 for each in (heun, ddim))
    short, long = evidence.mean("scenes, short training, 20 steps of Heun"), statistics.fmean(heun)
    evidence.add("scenes, distance after short over long training", short / long)
    return evidence.accept(
        **held, learnt=short > 3 * long, equal=abs(statistics.fmean(heun) - statistics.fmean(ddim)) <= spread
    )


# --- the mixture ------------------------------------------------------------------------------------------------------


def _mixture() -> GaussianMixture:
    from pippin.generate.mixtures import GaussianMixture

    return GaussianMixture([0.35, 0.65], [[-1.2], [0.8]], [0.15**2, 0.3**2])


def _quantiles(n: int) -> tuple[Tensor, Tensor]:
    """Of the normal density and of the mixture, (n, 1) each, float64; the latter by bisection."""
    import torch

    mixture = _mixture()
    shares = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    low, high = torch.full_like(shares, -5.0), torch.full_like(shares, 5.0)
    spread = mixture.covariances[:, 0, 0].sqrt()
    for _ in range(60):
        middle = (low + high) / 2
        below = torch.special.ndtr((middle[:, None] - mixture.means[:, 0]) / spread) @ mixture.weights < shares
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return torch.special.ndtri(shares)[:, None], low[:, None]


def _orders(evidence: Evidence) -> dict[str, bool]:
    """The errors of samplers that draw nothing."""
    from pippin.generate.mixtures import exact_denoiser
    from pippin.generate.samplers import integrate
    from pippin.generate.schedules import NoiseSchedule

    z, exact = _quantiles(4000)
    arms: dict[str, tuple[NoiseSchedule, Any]] = {
        "DDIM": (NoiseSchedule.vp_cosine(), "ddim"),
        "Euler": (NoiseSchedule.flow(), "euler"),
        "Heun": (NoiseSchedule.flow(), "heun"),
        "DPM-Solver++(2M)": (NoiseSchedule.vp_cosine(), "dpm++2m"),
    }
    ratios: dict[str, list[float]] = {}
    for name, (schedule, method) in arms.items():
        errors = []
        for steps in STEPS:
            start = schedule.s(schedule.start) * z
            x = integrate(exact_denoiser(_mixture(), schedule), schedule, start, schedule.grid(steps), method=method)
            errors.append(float((x.sort(0).values - exact).abs().mean()))
            evidence.add(f"mixture, {name}, {steps} steps", errors[-1])
        ratios[name] = [before / after for before, after in pairwise(errors)]
    return {
        "first_order": all(1.6 <= ratio <= 2.4 for name in ("DDIM", "Euler") for ratio in ratios[name][:3]),
        "second_order": all(ratio >= 3 for ratio in ratios["Heun"][:2]),
    }


def _drawn(evidence: Evidence, seed: int, draws: int) -> None:
    """DDPM and DDIM from the same random numbers, and the distance of that many exact samples."""
    from pippin.generate.mixtures import exact_denoiser
    from pippin.generate.noise import Noise
    from pippin.generate.prediction import Estimate
    from pippin.generate.samplers import integrate
    from pippin.generate.schedules import NoiseSchedule

    schedule = NoiseSchedule.vp_cosine()
    exact = exact_denoiser(_mixture(), schedule)
    wanted = _quantiles(draws)[1][:, 0]

    def denoiser(x: Tensor, t: float) -> Estimate:
        """All draws are one sample, so that one source of noise serves them."""
        found = exact(x.view(-1, 1), t)
        return Estimate(found.x0.view(x.shape), found.eps.view(x.shape))

    def distance(x: Tensor) -> float:
        return float((x.flatten().double().sort().values - wanted).abs().mean())

    evidence.add("mixture, exact samples", distance(_mixture().sample(draws, seed=50 + seed)), seed=seed)
    for steps in STEPS:
        noise = Noise(1, seed=seed)
        z = schedule.s(schedule.start) * noise.normal((draws,))
        grid = schedule.grid(steps)
        ode = integrate(denoiser, schedule, z, grid, method="ddim")
        sde = integrate(denoiser, schedule, z, grid, method="ddpm", noise=noise)
        evidence.add(f"mixture, DDIM, {steps} steps, drawn", distance(ode), seed=seed)
        evidence.add(f"mixture, DDPM, {steps} steps", distance(sde), seed=seed)


def _identities(evidence: Evidence) -> dict[str, bool]:
    """What must be equal: a point and DDIM's end, all predictions, DDIM and the tutorial's step, DDIM and Euler."""
    from pippin.generate.mixtures import GaussianMixture, exact_denoiser
    from pippin.generate.noise import Noise
    from pippin.generate.samplers import integrate
    from pippin.generate.schedules import NoiseSchedule

    z, _ = _quantiles(100)
    z = z.float()
    cosine, flow, ve = NoiseSchedule.vp_cosine(), NoiseSchedule.flow(), NoiseSchedule.ve(8.0, rho=0.5)
    point = exact_denoiser(GaussianMixture([1.0], [[0.7]], [0.0]), cosine)
    missed = float((integrate(point, cosine, z, cosine.grid(1), method="ddim") - 0.7).abs().max())
    apart = 0.0
    for schedule, kinds in ((cosine, ("x0", "eps", "v", "flow")), (flow, ("x0", "eps", "flow"))):
        for method in ("ddpm", "ddim", "euler", "heun", "dpm++2m"):
            how: dict[str, Any] = {"method": method, "grid": schedule.grid(20)}
            start = schedule.s(schedule.start) * z.double()
            ends = [
                integrate(_predicted(kind, schedule), schedule, start, noise=Noise(len(z)), **how) for kind in kinds
            ]
            apart = max(apart, *(float((end - ends[0]).abs().max()) for end in ends[1:]))
    denoiser = exact_denoiser(_mixture(), ve)
    x = y = 8.0 * z
    for t, r in pairwise(ve.grid(20)):
        mean = y + (1 - r * r / (t * t)) * (denoiser(y, t).x0 - y)
        y = y + t / (r + t) * (mean - y)
        x = integrate(denoiser, ve, x, [t, r], method="ddim")
    step = float((x - y).abs().max())
    straight = exact_denoiser(_mixture(), flow)
    ddim = integrate(straight, flow, z, flow.grid(20), method="ddim")
    same = float((ddim - integrate(straight, flow, z, flow.grid(20), method="euler")).abs().max())
    for name, value in (
        ("point, missed by one step of DDIM", missed),
        ("largest difference between kinds of prediction", apart),
        ("largest difference of DDIM and the tutorial's step", step),
        ("largest difference of DDIM and Euler on the straight path", same),
    ):
        evidence.add(name, value)
    return {"point": missed <= 1e-5, "predictions": apart <= 1e-5, "tutorial": step <= 1e-5, "straight": same <= 1e-5}


def _predicted(kind: Any, schedule: NoiseSchedule) -> Denoiser:
    """The exact estimates, by way of what a network of a kind would say."""
    from pippin.generate.mixtures import exact_denoiser
    from pippin.generate.prediction import estimate, target

    exact = exact_denoiser(_mixture(), schedule)

    def denoiser(x: Tensor, t: float) -> Estimate:
        found = exact(x, t)
        return estimate(target(found.x0, found.eps, t, kind, schedule), x, t, kind, schedule)

    return denoiser


def _reverse_steps(evidence: Evidence) -> dict[str, bool]:
    """How far the density of the sample one step back is from the normal density of its mean and variance."""
    import torch

    from pippin.generate.schedules import NoiseSchedule

    schedule, mixture, t = NoiseSchedule.vp_cosine(), _mixture(), 0.5
    y = torch.linspace(-6, 6, 48_001, dtype=torch.float64)
    found = []
    for delta in DELTAS:
        r = t - delta
        a = schedule.a(t) / schedule.a(r)
        fresh = schedule.s(t) ** 2 - a * a * schedule.s(r) ** 2
        log = mixture.log_prob(y[:, None], schedule.a(r), schedule.s(r)) - (a * y) ** 2 / (2 * fresh)  # given x_t = 0
        density = (log - log.max()).exp()
        density = density / torch.trapezoid(density, y)
        mean = torch.trapezoid(density * y, y)
        variance = torch.trapezoid(density * (y - mean) ** 2, y)
        normal = -((y - mean) ** 2) / (2 * variance) - 0.5 * (2 * math.pi * variance).log()
        divergence = float(torch.trapezoid(torch.where(density > 0, density * (density.log() - normal), 0.0), y))
        evidence.add(f"divergence of a reverse step of {delta} from its Gaussian", divergence, unit="nats")
        found.append(divergence)
    falls = all(after < before for before, after in pairwise(found))
    return {"gaussian": falls and found[0] > 0.05 and found[-1] < 1e-3}


# --- scenes -----------------------------------------------------------------------------------------------------------


class Pictures:
    """Batches of scenes drawn again and again from some that were made once.

    Args:
        known: the scenes.
        batch: of each batch.
        seed: of the order.
        classes: whether the number of objects is told.
    """

    def __init__(self, known: Any, batch: int, seed: int, *, classes: bool) -> None:
        self.x, self.labels, self.classes = known.x, known.counts - 1, classes
        self.batch, self.seed = batch, seed

    def __iter__(self) -> Iterator[Samples]:
        """Without end."""
        import torch

        from pippin.generate.condition import Condition, Samples

        generator = torch.Generator().manual_seed(self.seed)
        while True:
            index = torch.randint(len(self.x), (self.batch,), generator=generator)
            yield Samples(self.x[index], Condition(labels=self.labels[index]) if self.classes else None)


def _model(shape: tuple[int, ...], seed: int, *, large: bool) -> Diffusion:
    from pippin.generate.condition import ConditionSpec
    from pippin.generate.diffusion import Diffusion, DiffusionConfig
    from pippin.generate.dit import DiTConfig
    from pippin.generate.unet import UNetConfig

    network = DiTConfig(width=384, layers=12, heads=6, patch=2) if large else UNetConfig(width=24, patch=2)
    condition = ConditionSpec(classes=3, null=True) if large else ConditionSpec()
    return Diffusion(DiffusionConfig(shape, network, condition=condition)).initialise(seed)


def _scenes(evidence: Evidence, seed: int, size: Size, *, large: bool) -> None:
    """A short and a long run of one seed, and how far their pictures are from true ones."""
    import torch

    from pippin.data.scenes import SceneSpec, scenes
    from pippin.evaluate.features import scene_features
    from pippin.evaluate.sample_quality import frechet_distance
    from pippin.generate.condition import Condition
    from pippin.generate.diffusion import Denoising
    from pippin.train import AdamW, Cosine, Trainer

    spec = SceneSpec(size=32, radius=(3.0, 5.0)) if large else SceneSpec()
    device = "cuda" if large and torch.cuda.is_available() else "cpu"
    features = scene_features(spec, 0, steps=size.features)
    known, real, other = (
        scenes(spec, n, seed=1000 * seed + k) for k, n in enumerate((size.known, *[size.pictures] * 2))
    )
    wanted = features(real.x)
    evidence.add("scenes, true pictures", frechet_distance(features(other.x), wanted), seed=seed)
    condition = Condition(labels=other.counts - 1) if large else None
    half = device == "cuda"
    how: dict[str, Any] = {"schedule": Cosine(warmup=0.05), "precision": "bfloat16" if half else "float32"}

    def trained(steps: int) -> Diffusion:
        model = _model((spec.channels, spec.size, spec.size), seed, large=large)
        data = Pictures(known, size.batch, seed, classes=large)
        rate = RATE / 4 if large else RATE
        Trainer(
            model, Denoising(), data, steps=steps, optimiser=AdamW(lr=rate), seed=seed, device=device, show=False, **how
        ).fit()
        return model.eval()

    def note(name: str, model: Diffusion, **options: Any) -> None:
        parts = []
        for first in range(0, size.pictures, 500):
            n = min(500, size.pictures - first)
            shown = None if condition is None else condition.rows(slice(first, first + n))
            with torch.autocast(device, torch.bfloat16, enabled=half):
                parts.append(model.sample(shown, n, seed=first, **options).cpu())
        evidence.add(f"scenes, {name}", frechet_distance(features(torch.cat(parts)), wanted), seed=seed)

    note("short training, 20 steps of Heun", trained(size.short), steps=20, method="heun")
    model = trained(size.long)
    note("20 steps of Heun", model, steps=20, method="heun")
    note("40 steps of DDIM", model, steps=40, method="ddim")
    if large and seed == size.seeds[0]:
        for guidance, evaluations in product(GUIDANCE, EVALUATIONS):
            about = f"{evaluations} evaluations, guidance {guidance}"
            note(f"DDIM, {about}", model, steps=evaluations, method="ddim", guidance=guidance)
            note(f"Heun, {about}", model, steps=evaluations // 2, method="heun", guidance=guidance)
