"""A flow trained over a range of noise draws at much noise and refines in steps: shape and texture from one model.

Notable here:
- one step and many steps begin with the same samples of the same model; nothing else differs
- two flows of one noise level each, of equal size and steps, show the dilemma: little noise, poor shape; much, blur
- the score is checked apart from sampling, on held-out pictures and against finite differences
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pippin.claims import Evidence, Scale, claim

if TYPE_CHECKING:
    from torch import Tensor

    from pippin.data.scenes import SceneSpec
    from pippin.evaluate.features import Features
    from pippin.generate.tarflow import TarFlow


@dataclass(frozen=True)
class Size:
    """How much is trained and drawn: seeds, pixels, network, updates of each flow, samples, and numbers of steps."""

    seeds: tuple[int, ...]
    pixels: int
    objects: tuple[int, int]
    layers: tuple[int, ...]
    width: int
    heads: int
    updates: int
    batch: int
    samples: int
    held_out: int
    steps: tuple[int, ...]
    features: int


SIZES = {
    "smoke": Size((0,), 8, (1, 1), (1, 1), 16, 1, 3, 4, 24, 8, (2, 3), 3),
    "laptop": Size((0, 1, 2), 12, (1, 2), (1, 1, 1, 3), 48, 2, 400, 16, 1000, 256, (10, 25), 250),
    "gpu": Size((0, 1, 2), 32, (1, 5), (2, 2, 2, 10), 512, 8, 6000, 128, 10_000, 2048, (5, 10, 30), 1000),
}
LOW, HIGH = 0.02, 0.5
FIXED = (0.05, 0.5)
LEVELS = (0.05, 0.1, 0.2, 0.5)


@claim(
    id="itarflow",
    source="arXiv:2604.20041",
    paper="FID-50k of 1.68 on ImageNet 64 (TarFlow: 2.66 to 2.90) from one flow trained over a range of noise, sampled "
    "at the most noise and denoised in steps by its own score",
    setting="made scenes of 12 by 12 pixels with 1 or 2 objects; patch 2, blocks of 1, 1, 1 and 3 layers of width 48, "
    "400 updates of 16 pictures, noise from 0.02 to 0.5; 1,000 samples; features of a small classifier of scenes",
    accept="from the same samples at noise 0.5, denoising in the most steps has a lower Frechet distance than in one, "
    "by more than the standard deviation of the difference over the seeds, and fine energy nearer to that of real "
    "pictures. Of flows trained at one level, that of 0.05 has fewer samples with a right number of objects and that "
    "of 0.5 has fine energy further from real; the flow with a range is, within one standard deviation over seeds, no "
    "worse than the better of both in each. On held-out pictures the mean square error of its estimate at noise 0.05, "
    "0.1, 0.2 and 0.5 is below the noise's variance and below that of the flow of the other level; the score equals "
    "finite differences within 1e-3; nats per dimension at 0.05 and 0.5 are within 0.05 of the flows trained there",
)
def run(scale: Scale) -> Evidence:
    """All seeds, and what follows from them."""
    evidence, size = Evidence(), SIZES[scale.name]
    exact = all([_seed(evidence, seed, size, scale.name) for seed in size.seeds])
    best = size.steps[-1]
    mean, each = evidence.mean, evidence.each
    gains = [
        one - many
        for one, many in zip(each("Frechet distance, 1 step"), each(f"Frechet distance, {best} steps"), strict=True)
    ]
    evidence.add("Frechet distance saved", statistics.mean(gains) / mean("Frechet distance, 1 step"), unit="share")
    small, large = (f"noise {level}" for level in FIXED)
    many = f"{best} steps"
    right = {name: each(f"right counts, {name}") for name in (small, large, many)}
    rough = {name: each(f"distance of log fine energy, {name}") for name in (small, large, many, "1 step")}
    better = max((small, large), key=lambda name: statistics.mean(right[name]))
    sharper = min((small, large), key=lambda name: statistics.mean(rough[name]))
    within = [(mean(f"square error at {level}"), mean(f"other level's error at {level}"), level) for level in LEVELS]
    return evidence.accept(
        distance=statistics.mean(gains) > _deviation(gains),
        energy=statistics.mean(rough[many]) < statistics.mean(rough["1 step"]),
        dilemma=statistics.mean(right[small]) < statistics.mean(right[large])
        and statistics.mean(rough[large]) > statistics.mean(rough[small]),
        shape=statistics.mean(right[many]) >= statistics.mean(right[better]) - _deviation(right[better]),
        texture=statistics.mean(rough[many]) <= statistics.mean(rough[sharper]) + _deviation(rough[sharper]),
        score=all(error < level**2 and error < other for error, other, level in within),
        exact=exact,
        likelihood=all(abs(mean(f"nats above its own flow at {level}")) <= 0.05 for level in FIXED),
    )


def _deviation(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _seed(evidence: Evidence, seed: int, size: Size, scale: str) -> bool:
    """Three flows of one seed; whether the score is the gradient."""
    from pippin.claims._flow_pictures import Net, SceneBatches, device, trained
    from pippin.data.scenes import SceneSpec, scenes
    from pippin.evaluate.features import scene_features
    from pippin.generate.iterative import IterativeDenoise

    spec = SceneSpec(size=size.pixels, objects=size.objects)
    place = device(scale)
    net = Net(size.layers, size.width, size.heads)

    def flow(**noise: object) -> TarFlow:
        data = SceneBatches(spec, size.batch, seed)
        return trained(net.config(size.pixels, **noise), data, size.updates, seed, place)  # type: ignore[arg-type]

    ranged = flow(noise_range=(LOW, HIGH))
    fixed = {level: flow(noise=level) for level in FIXED}
    features = scene_features(spec, steps=size.features)
    real = scenes(spec, size.samples, seed=50_000 + seed).x
    start = _drawn(ranged, size.samples, seed)
    for steps in (1, *size.steps):
        x = IterativeDenoise(steps, rows=250)(ranged, start).cpu()
        _note(evidence, f"{steps} step{'s' * (steps > 1)}", x, real, features, spec, seed)
    for level, model in fixed.items():
        x = _drawn(model, size.samples, seed)
        clean = [model.denoise(part) for part in x.split(250)]
        _note(evidence, f"noise {level}", _joined(clean), real, features, spec, seed)
    held = scenes(spec, size.held_out, seed=60_000 + seed).x.to(place)
    return _scores(evidence, ranged, fixed, held, seed)


def _drawn(flow: TarFlow, n: int, seed: int) -> Tensor:
    """Samples with their noise; other seeds than those of any training."""
    import torch

    parts = [
        flow.sample(n=min(250, n - first), seed=10_000 * (seed + 1) + first, denoise=False)
        for first in range(0, n, 250)
    ]
    return torch.cat(parts)


def _joined(parts: list[Tensor]) -> Tensor:
    import torch

    return torch.cat(parts).cpu()


def _note(
    evidence: Evidence, name: str, x: Tensor, real: Tensor, features: Features, spec: SceneSpec, seed: int
) -> None:
    """Distance, share of right counts, and fine energy."""
    from pippin.data.scenes import count
    from pippin.evaluate.sample_quality import energy_ratio, frechet_distance

    low, high = spec.objects
    found = count(x, spec)
    ratio = energy_ratio(x, real)
    evidence.add(f"Frechet distance, {name}", frechet_distance(features(x), features(real)), seed=seed)
    evidence.add(f"right counts, {name}", float(((found >= low) & (found <= high)).float().mean()), seed=seed)
    evidence.add(f"fine energy over real, {name}", ratio, seed=seed)
    evidence.add(f"distance of log fine energy, {name}", abs(math.log(ratio)), seed=seed)


def _scores(evidence: Evidence, ranged: TarFlow, fixed: dict[float, TarFlow], held: Tensor, seed: int) -> bool:
    """Estimates and densities on held-out pictures."""
    import torch

    noise = torch.randn(held.shape, generator=torch.Generator().manual_seed(70_000 + seed)).to(held)
    low, high = FIXED
    for level in LEVELS:
        noisy = held + level * noise
        clean = noisy + level**2 * ranged.score(noisy, t=level)
        # the flow of the other level takes these pictures for pictures with its own noise
        other = noisy + level**2 * fixed[low if level == high else high].score(noisy)
        evidence.add(f"square error at {level}", float((clean - held).square().mean()), seed=seed)
        evidence.add(f"other level's error at {level}", float((other - held).square().mean()), seed=seed)
    for level, model in fixed.items():
        noisy = held + level * noise
        with torch.no_grad():
            apart = (model.log_prob(noisy) - ranged.log_prob(noisy, t=level)).mean() / held[0].numel()
        evidence.add(f"nats above its own flow at {level}", float(apart), seed=seed, unit="nats/dim")
    return _gradient(evidence, ranged, held[:4] + 0.1 * noise[:4], seed)


def _gradient(evidence: Evidence, flow: TarFlow, x: Tensor, seed: int) -> bool:
    """Whether the score along a direction is the density's finite difference."""
    import torch

    def unit(x: Tensor) -> Tensor:
        return x / x.square().sum((1, 2, 3), keepdim=True).sqrt()

    score = flow.score(x, t=0.1)
    random = torch.randn(x.shape, generator=torch.Generator().manual_seed(80_000 + seed)).to(x)
    # partly along the score, where the density changes most: 32 bits leave enough digits of the difference
    way = unit(unit(score) + unit(random))
    step = 1e-2

    def density(steps: int) -> Tensor:
        with torch.no_grad():
            return flow.log_prob(x + steps * step * way, t=0.1).double()

    difference = (8 * (density(1) - density(-1)) - (density(2) - density(-2))) / (12 * step)
    along = (score * way).sum((1, 2, 3)).double()
    apart = float(((along - difference).abs() / difference.abs()).max())
    evidence.add("score and finite difference", apart, seed=seed, unit="relative")
    return apart < 1e-3
