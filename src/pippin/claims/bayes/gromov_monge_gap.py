"""The Gromov-Monge gap as a regularizer: harmless to a fit, useful to a code; each against distortion.

Notable here:
- on a toy map the gap and the distortion have the same weight; only one of them is in the way of the fit. The source
  gives no figures for it: scaled distances at weight 1 failed in a pilot on another seed, so squared distances at 0.1,
  which were tried after that, are not taken alone; both are run, and what is asked of the fit is asked of both
- the autoencoders differ in the geometric term alone; it has one weight, which was not chosen by their scores
- a gap between points and the images of other points is as strong a term, and must do nothing for a code
"""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pippin.claims import Condition, Evidence, Scale, claim

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from pippin.bayes.latent.disentanglement import GeometricRegularizer
    from pippin.claims.worlds.distributions.toy_maps import Term


@dataclass(frozen=True)
class _Size:
    """Sizes of the toy map, then of the autoencoders, of DCI (rows, trees) and of the timing.

    ``more`` adds the arms on the encoder and on scaled distances.
    """

    toy_steps: int
    toy_points: int
    toy_fresh: int
    steps: int
    betas: tuple[float, ...]
    kind: Any
    hidden: tuple[int, ...]
    pixels: int
    sprites: int
    rows: int
    trees: int
    more: bool
    timed: int


SIZES = Scale.choose(
    smoke=_Size(2, 16, 100, 2, (2.0,), "mlp", (16, 8), 16, 128, 40, 2, False, 2),
    laptop=_Size(200, 64, 1000, 1500, (2.0, 4.0), "mlp", (128, 64), 32, 6144, 1500, 40, False, 60),
    gpu=_Size(1000, 128, 1000, 4000, (2.0, 4.0), "conv", (32, 32, 64, 64, 256), 64, 20_000, 4000, 50, True, 60),
)
TOY_WEIGHTS: dict[Any, float] = {"l2": 0.1, "scl2": 1.0}
"""Of the geometric term beside a Sinkhorn divergence, for each cost; the gap and the distortion alike."""
WEIGHT = 100.0
"""Of the geometric term of the autoencoders, the gap and the distortion alike; at 10 the gap is too small to matter."""
BETAS = (2.0, 4.0)
LATENT, BATCH, RATE = 6, 64, 2e-3


def _every_seed(e: Evidence, name: str, arm: str, other: str, share: float) -> bool:
    return all(a <= share * b for a, b in e.pairs(name, arm, other))


@claim(
    id="gromov-monge-gap",
    source="arXiv:2407.07829",
    headline="keeping geometry as far as the two distributions allow disentangles better than the base autoencoder and "
    "than keeping it at any cost (distortion); best with angles, on the decoder; and it leaves the fit of a map alone",
    setting="a map from four Gaussians to a square with a Sinkhorn divergence (200 steps of 64 points; squared "
    "distances at weight 0.1 and scaled ones at weight 1, for both terms); 6,144 synthetic sprites (shape 3, scale 4, "
    "rotation 8, x 8, y 8; 32x32), dense autoencoders of 6 dimensions, 1,500 steps of 64, beta 2 and 4, cosines on the "
    "decoder, weight 100 for both terms; 3 seeds",
    method="gap",
    negative_controls=("base", "distortion", "gap of shuffled pairs"),
    positive_control="true factors",
    conditions=[
        Condition(
            "above the base",
            "DCI-D above the base autoencoder's: in at least 5 of 6 pairs of seed and beta, and with a 95 % interval "
            "of the paired difference of means over beta above 0",
            lambda e, arm: (
                sum(a > b for beta in BETAS for a, b in e.pairs(f"DCI-D, beta {beta:g}", arm, "base")) >= 5
                and e.paired("DCI-D", arm, "base").low > 0
            ),
            headline=True,
        ),
        Condition(
            "above distortion",
            "DCI-D, mean over beta, above that with distortion: 95 % interval of the paired difference above 0",
            lambda e, arm: e.paired("DCI-D", arm, "distortion").low > 0,
            headline=True,
        ),
        Condition(
            "the fit stays",
            "the toy map's Wasserstein fit is within 10 % of that without a term, with both costs, every seed",
            lambda e, arm: all(_every_seed(e, f"toy fit, {cost}", arm, "base", 1.1) for cost in TOY_WEIGHTS),
        ),
        Condition(
            "distortion costs the fit",
            "and at most half of that with distortion, with both costs, every seed",
            lambda e, arm: all(_every_seed(e, f"toy fit, {cost}", arm, "distortion", 0.5) for cost in TOY_WEIGHTS),
        ),
        Condition(
            "neighbors",
            "the toy map loses fewer neighbors than without a term, with both costs, every seed",
            lambda e, arm: all(
                a < b for cost in TOY_WEIGHTS for a, b in e.pairs(f"toy neighbors lost, {cost}", arm, "base")
            ),
        ),
        Condition(
            "cost",
            "the term takes at most twice the time of a step without it",
            lambda e, arm: e.mean("added time of a step", arm) <= 2,
        ),
    ],
    reported="DCI-C, DCI-I and reconstruction; on a GPU, the gap on the encoder and of distances",
    version=2,
    superseded={
        1: "means of three seeds were compared without their spread and no wrong pairing was tried; how near the "
        "solver comes to the best permutation, and the gap's laws, are held by tests"
    },
)
def run(scale: Scale) -> Evidence:
    """Measure toy maps, then autoencoders, then the cost of a step."""
    evidence, size = Evidence(), SIZES[scale]
    for seed in range(1) if scale.is_smoke else range(3):
        _toy(evidence, seed, size)
        _autoencoders(evidence, seed, size)
    _cost(evidence, size)
    return evidence


def _toy(evidence: Evidence, seed: int, size: _Size) -> None:
    """Train a map with each term; record its fit on fresh points and the share of neighbors that it loses."""
    import torch

    from pippin.bayes.transport.gromov import distortion, gromov_monge_gap
    from pippin.claims.worlds.distributions import toy_maps as toy

    fresh = torch.Generator().manual_seed(1000 + seed)
    x, target = toy.four_gaussians(size.toy_fresh, fresh), toy.square(size.toy_fresh, fresh)

    def note(arm: str, term: Term | None, costs: Any) -> None:
        with torch.no_grad():
            y = toy.trained_map(seed, term, steps=size.toy_steps, points=size.toy_points)(x)
        fit, lost = toy.wasserstein(y, target), toy.neighbors_lost(x, y, size.toy_fresh // 10)
        for cost in costs:
            evidence.add(f"toy fit, {cost}", fit, arm=arm, seed=seed)
            evidence.add(f"toy neighbors lost, {cost}", lost, arm=arm, seed=seed)

    note("base", None, TOY_WEIGHTS)
    for cost, weight in TOY_WEIGHTS.items():
        terms: dict[str, Term] = {
            "distortion": lambda a, b, c=cost, w=weight: w * distortion(a, b, c),  # type: ignore[misc]
            "gap": lambda a, b, c=cost, w=weight: w * gromov_monge_gap(a, b, c),  # type: ignore[misc]
            "gap of shuffled pairs": lambda a, b, c=cost, w=weight: w * gromov_monge_gap(a, b.roll(1, 0), c),  # type: ignore[misc]
        }
        for arm, term in terms.items():
            note(arm, term, [cost])
    own = toy.wasserstein(toy.square(size.toy_fresh, fresh), target)
    evidence.add("toy fit", own, arm="the square to itself", seed=seed)


def _terms(more: bool = False) -> dict[str, GeometricRegularizer | None]:
    """The geometric term of the autoencoder of each arm."""
    from pippin.bayes.latent.disentanglement import GeometricRegularizer
    from pippin.bayes.transport.gromov import cost_matrix

    shuffled = (lambda x: cost_matrix(x, "cos"), lambda y: cost_matrix(y.roll(1, 0), "cos"))
    arms: dict[str, GeometricRegularizer | None] = {
        "base": None,
        "distortion": GeometricRegularizer(WEIGHT, "distortion"),
        "gap": GeometricRegularizer(WEIGHT),
        "gap of shuffled pairs": GeometricRegularizer(WEIGHT, cost=shuffled),
    }
    if more:
        arms["gap on the encoder"] = GeometricRegularizer(WEIGHT, apply="encoder")
        arms["gap of distances"] = GeometricRegularizer(WEIGHT, cost="scl2")
    return arms


def _autoencoders(evidence: Evidence, seed: int, size: _Size) -> None:
    """Record DCI of every arm for each beta, and of the true factors."""
    from pippin.data.synthetic.sprites import FACTORS
    from pippin.evaluate.disentanglement import dci

    images, factors = _sprites(size)
    options: dict[str, Any] = {"train": size.rows, "test": size.rows // 2, "num_trees": size.trees, "names": FACTORS}
    oracle = dci(factors.float(), factors, seed=seed, **options)
    for arm, geometry in {"true factors": None, **_terms(size.more)}.items():
        found = []
        for beta in size.betas:
            codes, missed = (None, 0.0) if arm == "true factors" else _codes(images, seed, beta, geometry, size)
            scores = oracle if codes is None else dci(codes, factors, seed=seed, **options)
            found.append(scores.disentanglement)
            evidence.add(f"DCI-D, beta {beta:g}", scores.disentanglement, arm=arm, seed=seed)
            evidence.add(f"DCI-C, beta {beta:g}", scores.completeness, arm=arm, seed=seed)
            evidence.add(f"DCI-I, beta {beta:g}", scores.informativeness, arm=arm, seed=seed)
            evidence.add(f"reconstruction, beta {beta:g}", missed, arm=arm, seed=seed, unit="nats")
        evidence.add("DCI-D", statistics.fmean(found), arm=arm, seed=seed)


def _sprites(size: _Size) -> tuple[Tensor, Tensor]:
    """Images of sprites and their generating factors."""
    import torch

    from pippin.data.synthetic.sprites import Sprites, SpriteSpec

    many = SpriteSpec(64, scales=6, rotations=40, xs=32, ys=32)
    sprites = Sprites(many if size.pixels == 64 else SpriteSpec(size.pixels))
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(len(sprites), (size.sprites,), generator=generator)
    if size.sprites == len(sprites):
        numbers = torch.arange(len(sprites))
    return sprites.images(numbers), sprites.factors(numbers)


def _codes(
    images: Tensor, seed: int, beta: float, geometry: GeometricRegularizer | None, size: _Size
) -> tuple[Tensor, float]:
    """Train an autoencoder; its posterior means, and its reconstruction loss in nats at the last step."""
    import torch

    from pippin.bayes.latent.disentanglement import DisentanglingElbo
    from pippin.bayes.latent.vae import VAE, VAEConfig
    from pippin.claims.worlds.training import fit

    device = _device(size)
    shape = (1, size.pixels, size.pixels)
    vae = VAE(VAEConfig(shape, LATENT, size.hidden, architecture=size.kind), seed=seed).to(device)

    def batches() -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield images[torch.randint(len(images), (BATCH,), generator=generator)]

    objective = DisentanglingElbo(beta=beta, geometry=geometry)
    training = fit(
        vae, objective, batches(),
        steps=size.steps, seed=seed, lr=RATE, warmup=0.02, weight_decay=0.0, max_grad_norm=None,
    )  # fmt: skip
    with torch.no_grad():
        codes = torch.cat([vae.encode(part.to(device))[0].cpu() for part in images.split(1024)])
    return codes, float(training.steps[-1].metrics["reconstruction"])


def _device(size: _Size) -> str:
    import torch

    return "cuda" if size.pixels == 64 and torch.cuda.is_available() else "cpu"


def _cost(evidence: Evidence, size: _Size) -> None:
    """Record the time of a step relative to the base: medians over steps of all arms, interleaved."""
    from pippin.bayes.latent.disentanglement import DisentanglingElbo
    from pippin.bayes.latent.vae import VAE, VAEConfig
    from pippin.train import AdamW, Trainer

    device, seconds = _device(size), dict[str, list[float]]()
    images = _sprites(size)[0][:2048].to(device)
    trainers = {}
    for arm, geometry in _terms().items():
        vae = VAE(VAEConfig(tuple(images.shape[1:]), LATENT, size.hidden, architecture=size.kind)).to(device)
        cycle = itertools.cycle(list(images.split(BATCH))[: len(images) // BATCH])
        options: dict[str, Any] = {"optimizer": AdamW(lr=RATE, weight_decay=0.0), "show_progress": False}
        objective = DisentanglingElbo(geometry=geometry)
        trainers[arm] = Trainer(vae, objective, cycle, steps=10_000, max_grad_norm=None, **options)
        trainers[arm].advance(3)
    for _ in range(size.timed):
        for arm, trainer in trainers.items():
            began = time.perf_counter()
            trainer.advance(1)
            seconds.setdefault(arm, []).append(time.perf_counter() - began)
    base = statistics.median(seconds["base"])
    for arm, each in seconds.items():
        evidence.add("added time of a step", statistics.median(each) / base - 1, arm=arm)
