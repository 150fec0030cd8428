"""Two networks trained by least squares, one for DDIM and one by flow matching, are one ODE; then scenes by both.

Notable here:
- the two networks share nothing but the data: that they take the same noise to the same sample is not by construction
- in one dimension an exact flow takes quantiles to quantiles, so distances need no random samples
- a distance between sets of images has a floor: that of two sets of true scenes of the same size stands beside it
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from pippin.claims import Condition, Evidence, Scale, claim

if TYPE_CHECKING:
    from torch import Tensor

    from pippin.generate.diffusion.diffusion import Diffusion
    from pippin.generate.diffusion.schedules import NoiseSchedule


@dataclass(frozen=True)
class _Size:
    """Training steps and learning rates on the mixture, both runs on scenes, and images to sample."""

    seeds: tuple[int, ...]
    steps: int
    rates: tuple[float, ...]
    short: int
    long: int
    batch: int
    images: int
    known: int
    features: int


SIZES = Scale.choose(
    smoke=_Size((0,), 3, (3e-3,), 1, 2, 4, 8, 32, 2),
    laptop=_Size((0, 1, 2), 3000, (1e-3, 3e-3, 1e-2), 300, 3000, 16, 600, 4096, 250),
    gpu=_Size((0, 1, 2), 3000, (1e-3, 3e-3, 1e-2), 300, 3000, 128, 2000, 20_000, 250),
)
FEW, MANY = (5, 10, 20), 80
GUIDANCE, EVALUATIONS = (1.0, 1.5, 3.0), (10, 20, 40)
"""Of the network of scenes: what is looked at on a GPU, with the first seed."""


@claim(
    id="diffusion-core",
    source="arXiv:2406.08929",
    headline="DDIM is deterministic, and DDIM and linear flow matching are one ODE up to a change of time; training "
    "either is least squares; a reverse step becomes Gaussian as its length goes to 0 (a tutorial, without figures)",
    setting="the mixture 0.35 N(-1.2, 0.15²) + 0.65 N(0.8, 0.3²), of standard deviation 1: a perceptron of two layers "
    "of 64 for v on the cosine schedule and one for the velocity of the straight path, 3,000 steps of 512, learning "
    "rate of each by the same search; a U-Net of 0.31 million weights (v, cosine schedule, batch 16) on 16 by 16 "
    "scenes of 1 to 3 objects, runs of 300 and of 3,000 steps each with its own cosine rate, Frechet distance of 600 "
    "images in the features of a small classifier of scenes; at gpu scale a diffusion transformer of 33 million "
    "weights on 32 by 32 scenes by number of objects",
    method="DDIM",
    negative_controls=("DDPM", "other noise", "one normal distribution"),
    positive_control="exact estimates",
    conditions=[
        Condition(
            "one ODE",
            "80 steps of DDIM and 80 Euler steps of the network of linear flow matching, trained apart, take the same "
            "noise to samples at a mean distance of at most 0.05, every seed",
            lambda e, arm: e.max("distance to flow matching from the same noise", arm) <= 0.05,
            headline=True,
        ),
        Condition(
            "least squares",
            "and the samples of both networks are within 0.05 of the mixture (Wasserstein-1), every seed",
            lambda e, arm: all(
                e.max(f"Wasserstein-1 distance, {MANY} steps", each) <= 0.05 for each in (arm, "flow matching")
            ),
            headline=True,
        ),
        Condition(
            "few steps",
            "at 5, 10 and 20 steps of the same network the samples are nearer to the mixture than those of DDPM, every "
            "seed",
            lambda e, arm: all(
                a < b for n in FEW for a, b in e.pairs(f"Wasserstein-1 distance, {n} steps", arm, "DDPM")
            ),
        ),
        Condition(
            "scenes",
            "the Frechet distance of scenes after 3,000 steps of training is less than a third of that after 300, "
            "means over seeds",
            lambda e, arm: (
                3 * e.mean("Frechet distance of scenes", arm) < e.mean("Frechet distance of scenes", "short training")
            ),
        ),
        Condition(
            "as Heun",
            "40 steps of DDIM and 20 of Heun, as many evaluations, differ in Frechet distance by no more than the "
            "larger of their standard deviations over the seeds",
            lambda e, arm: (
                abs(e.mean("Frechet distance of scenes", arm) - e.mean("Frechet distance of scenes", "Heun"))
                <= max(_deviation(e.each("Frechet distance of scenes", each)) for each in (arm, "Heun"))
            ),
        ),
    ],
    reported="distances by steps and guidance at gpu scale; orders of convergence, a reverse step that becomes "
    "Gaussian and the equality of predictions are closed forms, which tests hold",
    version=2,
    superseded={
        1: "nearly all of it was closed forms, which tests hold and which say nothing of trained networks; that DDIM "
        "and flow matching are one ODE was asked of exact estimates alone, and there was no control"
    },
)
def run(scale: Scale) -> Evidence:
    """Measure the mixture, then scenes, on each seed."""
    from pippin.claims.worlds.distributions.one_dimensional_mixture import perceptron
    from pippin.claims.worlds.training import SEARCH_SEED, best_rate
    from pippin.generate.diffusion.schedules import NoiseSchedule

    evidence, size = Evidence(), SIZES[scale]
    kinds = {"DDIM": ("v", NoiseSchedule.vp_cosine()), "flow matching": ("flow", NoiseSchedule.flow())}
    rates = {}
    for arm, (kind, schedule) in kinds.items():
        rates[arm] = best_rate(
            size.rates,
            lambda lr, k=kind, s=schedule: perceptron(k, s, size.steps // 3, lr, SEARCH_SEED)[1],  # type: ignore[misc]
        )
        evidence.add("learning rate", rates[arm], arm=arm)
    for seed in size.seeds:
        networks = {
            arm: perceptron(kind, schedule, size.steps, rates[arm], 500 * index + seed)[
                0
            ]  # other weights, other samples
            for index, (arm, (kind, schedule)) in enumerate(kinds.items())
        }
        _mixture_samples(evidence, networks, seed)
        _scenes(evidence, seed, size, scale.name)
    return evidence


def _deviation(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _mixture_samples(evidence: Evidence, networks: dict[str, Any], seed: int) -> None:
    """Record how far each sampler maps quantiles of the normal density from those of the mixture."""
    import torch

    from pippin.claims.worlds.distributions.one_dimensional_mixture import mixture, quantiles
    from pippin.generate.diffusion.gaussian_mixture import exact_denoiser
    from pippin.generate.diffusion.prediction import Estimate
    from pippin.generate.diffusion.samplers import integrate
    from pippin.generate.diffusion.schedules import NoiseSchedule
    from pippin.generate.noise import Noise

    cosine, straight = NoiseSchedule.vp_cosine(), NoiseSchedule.flow()
    z, wanted = quantiles()
    exact = exact_denoiser(mixture(), cosine)

    def exact_row(x: Tensor, t: float) -> Estimate:
        found = exact(x.view(-1, 1), t)
        return Estimate(found.x0.view(x.shape), found.eps.view(x.shape))

    def sampled(denoiser: Any, schedule: NoiseSchedule, method: Any, steps: int) -> Tensor:
        noise, start = Noise(1, seed=seed), schedule.s(schedule.max_time) * z
        with torch.no_grad():
            x = integrate(denoiser, schedule, start, schedule.grid(steps), method=method, noise=noise)
        return x.float()

    for steps in (*FEW, MANY):
        arms = {
            "flow matching": sampled(networks["flow matching"], straight, "euler", steps),
            "DDIM": sampled(networks["DDIM"], cosine, "ddim", steps),
            "DDPM": sampled(networks["DDIM"], cosine, "ddpm", steps),
            "exact estimates": sampled(exact_row, cosine, "ddim", steps),
        }
        arms["other noise"] = arms["DDIM"][:, torch.randperm(z.shape[1], generator=torch.Generator().manual_seed(seed))]
        arms["one normal distribution"] = wanted.mean() + wanted.std() * z
        for arm, x in arms.items():
            away = float((x.sort(1).values - wanted).abs().mean())
            evidence.add(f"Wasserstein-1 distance, {steps} steps", away, arm=arm, seed=seed)
            if steps == MANY and arm != "flow matching":
                apart = float((x - arms["flow matching"]).abs().mean())
                evidence.add("distance to flow matching from the same noise", apart, arm=arm, seed=seed)


def _model(shape: tuple[int, ...], seed: int, *, large: bool) -> Diffusion:
    from pippin.generate.conditions import ConditioningSpec
    from pippin.generate.diffusion.diffusion import Diffusion, DiffusionConfig
    from pippin.generate.diffusion.dit import DiTConfig
    from pippin.generate.diffusion.unet import UNetConfig

    network = (
        DiTConfig(hidden_size=384, num_hidden_layers=12, num_attention_heads=6, patch_size=2)
        if large
        else UNetConfig(base_channels=24, patch_size=2)
    )
    condition = ConditioningSpec(num_classes=3, null=True) if large else ConditioningSpec()
    return Diffusion(DiffusionConfig(shape, network, condition=condition)).initialize(seed)


def _scenes(evidence: Evidence, seed: int, size: _Size, scale: str) -> None:
    """Train a short and a long run on one seed, and record the distance of their samples from true scenes."""
    import torch

    from pippin.claims.worlds.images.scene_pool import Distance, PoolBatches, labeled
    from pippin.claims.worlds.training import device_for, fit
    from pippin.data.synthetic.scenes import SceneSpec, sample_scenes
    from pippin.generate.conditions import Samples
    from pippin.generate.diffusion.diffusion import Denoising

    large, device = scale == "gpu", device_for(scale)
    spec = SceneSpec(size=32, radius=(3.0, 5.0)) if large else SceneSpec()
    known, real, other = (
        sample_scenes(spec, n, seed=1000 * seed + k) for k, n in enumerate((size.known, *[size.images] * 2))
    )
    distance = Distance(real.x, spec, size.features)
    condition = labeled(other).condition if large else None

    def trained(steps: int) -> Diffusion:
        model = _model((spec.channels, spec.size, spec.size), seed, large=large)
        data = PoolBatches(labeled(known) if large else Samples(known.x), size.batch, seed)
        fit(model, Denoising(), data, steps=steps, seed=seed, lr=5e-4 if large else 2e-3, device=device)
        return model.requires_grad_(False)

    def note(arm: str, model: Diffusion, **options: Any) -> None:
        parts = []
        for first in range(0, size.images, 500):
            n = min(500, size.images - first)
            shown = None if condition is None else condition.select(slice(first, first + n))
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                parts.append(model.sample(shown, n, seed=first, **options).cpu())
        evidence.add("Frechet distance of scenes", distance(torch.cat(parts)), arm=arm, seed=seed)

    evidence.add("Frechet distance of scenes", distance(other.x), arm="true scenes", seed=seed)
    note("short training", trained(size.short), steps=40, method="ddim")
    model = trained(size.long)
    for arm, steps, method in (("DDIM", 40, "ddim"), ("Heun", 20, "heun"), ("DDPM", 40, "ddpm")):
        note(arm, model, steps=steps, method=method)
    if large and seed == size.seeds[0]:
        for guidance, evaluations in product(GUIDANCE, EVALUATIONS):
            about = f"{evaluations} evaluations, guidance {guidance}"
            note(f"DDIM, {about}", model, steps=evaluations, method="ddim", guidance=guidance)
            note(f"Heun, {about}", model, steps=evaluations // 2, method="heun", guidance=guidance)
