"""Refined images of a simulator train a gaze regressor better than raw ones, and keep what their labels say.

Notable here:
- real images have another distribution of gazes than simulated ones: a refiner that moved pupils would look more real
  and be worse, and a decoder that knows the simulator's geometry would see it
- labels of real images serve for tests and for the oracle only: nothing is stopped or chosen by them
- matching histograms and adding noise, which needs no network, is asked the same rule
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pippin.claims import Condition, Evidence, Scale, claim

if TYPE_CHECKING:
    from torch import Tensor

    from pippin.claims.worlds.images.eyes import Eyes
    from pippin.generate.methods.simgan.model import SimRefiner


@dataclass(frozen=True)
class _Size:
    """Seeds, images of each kind, training rounds, steps of regressors, and the networks."""

    seeds: tuple[int, ...]
    images: int
    tests: int
    max_rounds: int
    steps: int
    batch: int
    history: int
    width: int
    blocks: int
    judge: tuple[int, ...]
    arms: tuple[str, ...]
    rates: tuple[float, ...]


ARMS = ("refined", "no regularization", "no history")
SIZES = Scale.choose(
    smoke=_Size((0,), 64, 32, 4, 3, 4, 8, 4, 1, (4, 4), ARMS, (3e-3,)),
    laptop=_Size((0, 1, 2), 4000, 1000, 500, 400, 24, 960, 12, 2, (24, 24), ARMS, (1e-3, 3e-3, 9e-3)),
    gpu=_Size(
        (0, 1, 2, 3, 4),
        20_000,
        5000,
        1500,
        1500,
        128,
        5120,
        64,
        4,
        (64, 64),
        (*ARMS, "gradient", "more steps"),
        (1e-3, 3e-3, 9e-3),
    ),
)
WEIGHT = 5.0
"""Of self-regularization, on the mean absolute change of a pixel."""
ERROR = "gaze error on real images"


@claim(
    id="simgan",
    source="arXiv:1612.07828",
    headline="gaze on real images: 7.8 degrees of error when trained on refined images, 11.2 on raw simulated ones; "
    "people tell refined from real images by chance (517 of 1,000)",
    setting="synthetic eyes of 24 by 24 pixels (4,000 simulated with gazes uniform within 4 pixels, 4,000 real through "
    "a hidden camera: blur 1 pixel, levels bent, dark corners, fixed and photon noise, gazes gathered about one "
    "place); refiner of width 12 with 2 blocks, discriminator of 7 by 7 patches, 500 rounds of 2 and 1 steps of 24 "
    "images, regularization 5 per mean absolute change; regressor of 30k parameters, 400 steps, its learning rate for "
    "every arm by the same search over three on a quarter of the arm's own images; 1,000 labeled real images for tests",
    method="refined",
    negative_controls=("raw", "histograms and noise", "no regularization"),
    positive_control="labeled real",
    conditions=[
        Condition(
            "gaze",
            "the error on real tests is below that of a regressor trained on raw images on every seed, and on average "
            "at least 0.3 of the way down to that of one trained on labeled real images (published: 7.8 against 11.2 "
            "degrees)",
            lambda e, arm: (
                all(a < b for a, b in e.pairs(ERROR, arm, "raw"))
                and e.mean(ERROR, arm)
                <= e.mean(ERROR, "raw") - 0.3 * (e.mean(ERROR, "raw") - e.mean(ERROR, "labeled real"))
            ),
            headline=True,
        ),
        Condition(
            "beyond histograms",
            "and below that of one trained on simulated images with the histogram and the noise of real ones: 95 % "
            "interval of the paired difference below 0",
            lambda e, arm: e.paired(ERROR, arm, "histograms and noise").high < 0,
        ),
        Condition(
            "labels kept",
            "pupils found by the simulator's geometry lie within 0.7 pixels of their labels, and without "
            "regularization at least twice as far, means over seeds",
            lambda e, arm: (
                e.mean("pupil to label", arm) < 0.7
                and e.mean("pupil to label", "no regularization") >= 2 * e.mean("pupil to label", arm)
            ),
        ),
        Condition(
            "history",
            "the variance over time of the discriminator's loss on early refined images is lower than without the "
            "history on at least 2 of 3 seeds",
            lambda e, arm: (
                3 * sum(a < b for a, b in e.pairs("variance of the discriminator's loss", arm, "no history"))
                >= 2 * len(e.each("variance of the discriminator's loss", arm))
            ),
        ),
        Condition(
            "realism",
            "a fresh classifier tells raw from real images in more than 95 %, and these in at least 10 points less, "
            "means over seeds (published: people are right in 517 of 1,000)",
            lambda e, arm: (
                e.mean("told from real images", "raw") > 0.95
                and e.mean("told from real images", arm) <= e.mean("told from real images", "raw") - 0.1
            ),
        ),
    ],
    reported="the mean change of a pixel; whether people tell images apart is not measured, a classifier stands in",
    version=2,
    superseded={
        1: "matching histograms and adding noise, which needs no network and does better on two of three seeds, was "
        "reported beside the rule and not asked it"
    },
)
def run(scale: Scale) -> Evidence:
    """Measure all arms on each seed."""
    from pippin.claims.worlds.images.eyes import decoded, matched, photographed, simulated
    from pippin.claims.worlds.images.gaze_regressors import away, discriminability, gaze_error
    from pippin.claims.worlds.training import device_for

    evidence, size = Evidence(), SIZES[scale]
    for seed in size.seeds:
        made, real = simulated(size.images, seed), photographed(size.images, seed)
        labeled, test = photographed(size.images, 1000 + seed), photographed(size.tests, 2000 + seed)
        arms = {"raw": made.x, "histograms and noise": matched(made.x, real.x, seed)}
        for arm in size.arms:
            refiner, variance = _refined(arm, made, real, seed, size, device_for(scale.name))
            evidence.add("variance of the discriminator's loss", variance, arm=arm, seed=seed, unit="nats squared")
            arms[arm] = refiner.refine(made.x)
        for arm, x in arms.items():
            evidence.add(
                ERROR, gaze_error(x, made.gaze, test, seed, size.steps, size.rates), arm=arm, seed=seed, unit="pixels"
            )
            evidence.add("pupil to label", away(decoded(x), made.gaze), arm=arm, seed=seed, unit="pixels")
            evidence.add("mean change of a pixel", (x - made.x).abs().mean(), arm=arm, seed=seed)
        for arm in ("raw", "refined", "histograms and noise"):
            accuracy = discriminability(arms[arm], real.x, seed, size.steps, size.rates)
            evidence.add("told from real images", accuracy, arm=arm, seed=seed)
        best = gaze_error(labeled.x, labeled.gaze, test, seed, size.steps, size.rates)
        evidence.add(ERROR, best, arm="labeled real", seed=seed, unit="pixels")
    return evidence


def _refined(arm: str, made: Eyes, real: Eyes, seed: int, size: _Size, device: str) -> tuple[SimRefiner, float]:
    """Train a refiner; also the variance of the discriminator's loss on early images after a quarter of the rounds."""
    import torch
    import torch.nn.functional as F

    from pippin.generate.methods.simgan.model import PatchDiscriminator, RefinerConfig, SimRefiner
    from pippin.generate.methods.simgan.train import RefinerTrainingConfig, fit

    config = RefinerConfig((1, 24, 24), size.width, size.blocks, size.judge, (2, 1), discriminator_pool=False)
    refiner = SimRefiner(config, seed=seed).to(device)
    options = RefinerTrainingConfig(
        weight=0.0 if arm == "no regularization" else WEIGHT,
        regularizer="gradient" if arm == "gradient" else "identity",
        batch_size=size.batch,
        refiner_steps=8 if arm == "more steps" else 2,
        discriminator_warmup_steps=size.max_rounds // 2,
        history_size=0 if arm == "no history" else size.history,
        eval_every=max(1, size.max_rounds // 20),
    )
    early: list[Tensor] = []
    losses: list[float] = []
    calls = 0

    def measure(refiner: SimRefiner, judge: PatchDiscriminator) -> dict[str, float]:
        nonlocal calls
        calls += 1
        if 4 * calls * options.eval_every >= size.max_rounds:
            if not early:
                early.append(refiner.refine(made.x[:256]))
            with torch.no_grad():
                losses.append(float(F.softplus(-judge(early[0].to(device))).mean()))
        return {}

    fit(refiner, made.x, real.x, size.max_rounds, config=options, measure=measure, seed=seed, show_progress=False)
    return refiner, statistics.pvariance(losses)
