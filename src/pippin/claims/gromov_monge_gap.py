"""The Gromov-Monge gap: exact where it can be checked, harmless to a fit, useful to a code; each against distortion.

Notable here:
- the solver is held against all permutations of a few points, before anything is built on it
- on a toy map the gap and the distortion have the same weight; only one of them is in the way of the fit. The source
  gives no figures for it: scaled distances at weight 1 failed in a pilot on another seed, so squared distances at 0.1,
  which were tried after that, are not taken alone; both are run, and what is asked of the fit is asked of both
- the autoencoders differ in the geometric term alone; it has one weight, which was not chosen by their scores
"""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pippin.claims import Evidence, Scale, claim

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch
    from torch import Tensor, nn

    from pippin.bayes.disentangle import Geometry


@dataclass(frozen=True)
class Size:
    """How much is looked at.

    Seeds; cases of each cost and number of points for exactness, and those numbers; steps of the toy map, its points
    and fresh ones; then for the autoencoders their steps, betas, kind and widths, the side of the sprites and how many
    there are, the rows and trees of DCI, whether the encoder and distances are tried as well, and steps that are timed.
    """

    seeds: tuple[int, ...]
    cases: int
    points: tuple[int, ...]
    toy_steps: int
    toy_points: int
    toy_fresh: int
    steps: int
    betas: tuple[float, ...]
    kind: Any
    hidden: tuple[int, ...]
    pixels: int
    pictures: int
    rows: int
    trees: int
    more: bool
    timed: int


SIZES = {
    "smoke": Size((0,), 1, (5,), 2, 16, 100, 2, (2.0,), "mlp", (32, 16), 16, 128, 100, 2, False, 2),
    "laptop": Size(
        (0, 1, 2), 8, (6, 7, 8), 200, 64, 1000, 1500, (2.0, 4.0), "mlp", (128, 64), 32, 6144, 1500, 40, False, 60
    ),
    "gpu": Size(
        (0, 1, 2),
        40,
        (6, 7, 8),
        1000,
        128,
        1000,
        4000,
        (4.0,),
        "conv",
        (32, 32, 64, 64, 256),
        64,
        20_000,
        4000,
        50,
        True,
        60,
    ),
}
COSTS = ("l2", "scl2", "cos")
TOY_WEIGHTS: dict[Any, float] = {"l2": 0.1, "scl2": 1.0}
"""Of the geometric term beside a Sinkhorn divergence, for each cost; the gap and the distortion alike."""
TOY_SIDE = 2.0
"""Of the square that is mapped to."""
WEIGHT = 100.0
"""Of the geometric term of the autoencoders, the gap and the distortion alike; at 10 the gap is too small to matter."""
LATENT, BATCH, RATE = 6, 64, 2e-3


@claim(
    id="gromov-monge-gap",
    source="arXiv:2407.07829",
    paper="keeping geometry as far as the two distributions allow disentangles better than the base autoencoder and "
    "than keeping it at any cost (distortion); best with angles, on the decoder; and it leaves the fit of a map alone",
    setting="all permutations of 6 to 8 points; a map from four Gaussians to a square with a Sinkhorn divergence (200 "
    "steps of 64 points; squared distances at weight 0.1 and scaled ones at weight 1, for both terms); 6,144 made "
    "sprites (shape 3, scale 4, rotation 8, x 8, y 8; 32x32), dense autoencoders of 6 dimensions, 1,500 steps of 64, "
    "beta 2 and 4, cosines on the decoder, weight 100 for both terms",
    accept="solver: polished within 2% of the optimum in at least 95% of all cases, unpolished at eps0 0.005 in at "
    "least 75% for squared distances; the gap of an isometry and of y = 2x below 1e-6, of a swap of two points between "
    "clusters above 0; its gradient equals finite differences within 1e-4. Toy map, with both costs, each by itself, "
    "means over 3 seeds: Wasserstein fit with the gap within 10% of that without a term, with the distortion at least "
    "twice that of the gap, and fewer neighbours lost with the gap than without. Autoencoders: DCI-D with the gap "
    "above the base in at least 5 of 6 pairs of seed and beta, and its mean at least that with distortion. Cost: the "
    "term takes at most twice the time of a step without it",
)
def run(scale: Scale) -> Evidence:
    """Solver, toy map, autoencoders, cost."""
    evidence, size = Evidence(), SIZES[scale.name]
    laws = [_exactness(evidence, seed, size) for seed in size.seeds]
    for seed in size.seeds:
        _toy(evidence, seed, size)
    wins, pairs = _autoencoders(evidence, size)
    ratio = _cost(evidence, size)
    mean = evidence.mean
    return evidence.accept(
        polished=statistics.fmean(mean(f"within 2%, polished, {cost}") for cost in COSTS) >= 0.95,
        unpolished=mean("within 2%, eps0 0.005, l2") >= 0.75,
        laws=all(laws),
        fit=all(mean(f"toy fit, gap, {cost}") <= 1.1 * mean("toy fit, no term") for cost in TOY_WEIGHTS),
        fit_distortion=all(
            mean(f"toy fit, distortion, {cost}") >= 2 * mean(f"toy fit, gap, {cost}") for cost in TOY_WEIGHTS
        ),
        neighbours=all(
            mean(f"toy neighbours lost, gap, {cost}") < mean("toy neighbours lost, no term") for cost in TOY_WEIGHTS
        ),
        above_base=wins >= 5 / 6 * pairs,
        above_distortion=mean("DCI-D, gap") >= mean("DCI-D, distortion"),
        cost=ratio <= 2,
    )


# --- the solver -------------------------------------------------------------------------------------------------------


def _exactness(evidence: Evidence, seed: int, size: Size) -> bool:
    """Cases against all permutations; whether the gap obeys its laws."""
    import torch

    from pippin.bayes.gromov import cost_matrix, gromov_wasserstein
    from pippin.bayes.gromov_plans import Solver

    generator = torch.Generator().manual_seed(seed)
    solvers = {
        "polished": Solver(eps0=0.1, max_iter=3, inner=10, restarts=12),
        "eps0 0.005": Solver(eps0=0.005, value="plain"),
    }
    for cost in COSTS:
        hits: dict[str, list[bool]] = {name: [] for name in solvers}
        for n in size.points:
            orders = torch.tensor(list(itertools.permutations(range(n))))
            for _ in range(size.cases):
                x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
                y = torch.randn(n, 2, generator=generator, dtype=torch.float64)
                a, b = cost_matrix(x, cost), cost_matrix(y, cost)  # type: ignore[arg-type]
                best = min(
                    float((a - b[part[:, :, None], part[:, None, :]]).square().mean((1, 2)).min()) / 2
                    for part in orders.split(5000)
                )
                for name, solver in solvers.items():
                    hits[name].append(gromov_wasserstein(a, b, solver).value <= 1.02 * best + 1e-12)
        for name, each in hits.items():
            evidence.add(f"within 2%, {name}, {cost}", statistics.fmean(each), seed=seed)
    return _laws(evidence, seed, generator)


def _laws(evidence: Evidence, seed: int, generator: torch.Generator) -> bool:
    """Isometry, scaling, a swap, and the gradient."""
    import torch

    from pippin.bayes.gromov import gromov_monge_gap

    x = torch.randn(24, 3, generator=generator, dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(3, 3, generator=generator, dtype=torch.float64))[0]
    still = max(
        float(gromov_monge_gap(x, y, cost))  # type: ignore[arg-type]
        for cost in COSTS
        for y in (x @ turn, 2 * x)
    )
    clusters = 0.1 * x + torch.tensor([[9.0, 0, 0]] * 12 + [[-3.0, 4, 0]] * 12, dtype=torch.float64)
    swapped = float(gromov_monge_gap(clusters, clusters[[23, *range(1, 23), 0]], "l2"))
    images = torch.randn(24, 2, generator=generator, dtype=torch.float64).requires_grad_()
    (slope,) = torch.autograd.grad(gromov_monge_gap(x, images, "cos"), images)
    step = torch.zeros_like(slope)
    step[3, 1] = 1e-6
    with torch.no_grad():
        numeric = float(gromov_monge_gap(x, images + step) - gromov_monge_gap(x, images - step)) / 2e-6
    apart = abs(numeric - float(slope[3, 1])) / abs(numeric)
    evidence.add("gap of an isometry and of 2x, largest", still, seed=seed)
    evidence.add("gap of a swap", swapped, seed=seed)
    evidence.add("gradient against finite differences", apart, seed=seed)
    return still < 1e-6 and swapped > 0 and apart < 1e-4


# --- the toy map ------------------------------------------------------------------------------------------------------


def _toy(evidence: Evidence, seed: int, size: Size) -> None:
    """A map of each kind, its fit on fresh points and the neighbours that it loses."""
    import torch

    from pippin.bayes.gromov import distortion, gromov_monge_gap

    terms: dict[str, Callable[[Tensor, Tensor], Tensor] | None] = {"no term": None}
    for cost, weight in TOY_WEIGHTS.items():
        for name, measure in (("distortion", distortion), ("gap", gromov_monge_gap)):
            terms[f"{name}, {cost}"] = partial(_weighted, measure, cost, weight)
    fresh = torch.Generator().manual_seed(1000 + seed)
    x, target = _four(size.toy_fresh, fresh), _square(size.toy_fresh, fresh)
    for name, term in terms.items():
        net = _toy_map(seed, term, size)
        with torch.no_grad():
            y = net(x)
        evidence.add(f"toy fit, {name}", _wasserstein(y, target), seed=seed)
        evidence.add(f"toy neighbours lost, {name}", _lost(x, y, size.toy_fresh // 10), seed=seed)
    evidence.add("toy fit, the square to itself", _wasserstein(_square(size.toy_fresh, fresh), target), seed=seed)


def _weighted(measure: Callable[..., Tensor], cost: str, weight: float, x: Tensor, y: Tensor) -> Tensor:
    return weight * measure(x, y, cost)


def _four(n: int, generator: torch.Generator) -> Tensor:
    import torch

    centres = torch.tensor([[2.0, 2.0], [2.0, -2.0], [-2.0, 2.0], [-2.0, -2.0]])
    chosen: Tensor = centres[torch.randint(4, (n,), generator=generator)]
    return chosen + 0.6 * torch.randn(n, 2, generator=generator)


def _square(n: int, generator: torch.Generator) -> Tensor:
    import torch

    return TOY_SIDE * (torch.rand(n, 2, generator=generator) - 0.5)


def _toy_map(seed: int, term: Callable[[Tensor, Tensor], Tensor] | None, size: Size) -> nn.Module:
    import torch
    from torch import nn

    from pippin.train import AdamW, Cosine, Loss, Trainer

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2))

    def objective(model: nn.Module, batch: tuple[Tensor, Tensor], generator: torch.Generator) -> Loss:
        x, target = batch
        y = model(x)
        loss = _sinkhorn_divergence(y, target)
        if term is not None:
            loss = loss + term(x, y)
        return Loss(loss, 1.0)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield _four(size.toy_points, generator), _square(size.toy_points, generator)

    how: dict[str, Any] = {"optimiser": AdamW(lr=3e-3, weight_decay=0.0), "schedule": Cosine(warmup=0.0)}
    Trainer(net, objective, batches(), steps=size.toy_steps, seed=seed, clip=None, show=False, **how).fit()
    return net.eval()


def _sinkhorn_divergence(y: Tensor, target: Tensor) -> Tensor:
    """Entropic transport between the two less half of that within each; its gradient is at fixed plans."""
    import torch

    from pippin.bayes.gromov_plans import sinkhorn_plans

    pairs = ((y, target), (y, y), (target, target))
    costs = torch.stack([(a[:, None] - b[None]).square().sum(2) for a, b in pairs])
    eps = torch.full((3,), 0.01 * TOY_SIDE**2, dtype=torch.float64)
    with torch.no_grad():
        plans, _ = sinkhorn_plans(costs.double(), eps, inner=50, tolerance=1e-3)
    parts = (costs * plans.to(costs)).sum((1, 2))
    divergence: Tensor = parts[0] - 0.5 * parts[1] - 0.5 * parts[2]
    return divergence


def _wasserstein(y: Tensor, target: Tensor) -> float:
    """Squared 2-Wasserstein distance of two samples of one size, exactly."""
    from scipy.optimize import linear_sum_assignment

    cost = (y[:, None] - target[None]).square().sum(2).double().numpy()
    return float(cost[linear_sum_assignment(cost)].mean())


def _lost(x: Tensor, y: Tensor, k: int) -> float:
    """The share of a point's k nearest neighbours that are not among the k nearest of its image."""
    import torch

    near = []
    for points in (x, y):
        apart = torch.cdist(points, points).fill_diagonal_(torch.inf)
        chosen = apart.topk(min(k, len(x) - 1), largest=False).indices
        near.append(torch.zeros_like(apart).scatter_(1, chosen, 1.0))
    return 1 - float((near[0] * near[1]).sum() / near[0].sum())


# --- autoencoders -----------------------------------------------------------------------------------------------------


def _autoencoders(evidence: Evidence, size: Size) -> tuple[int, int]:
    """All arms; in how many pairs of seed and beta the gap is above the base, and how many pairs there are."""

    from pippin.bayes.disentangle import Geometry

    arms: dict[str, Geometry | None] = {
        "base": None,
        "distortion": Geometry(WEIGHT, "distortion"),
        "gap": Geometry(WEIGHT),
    }
    if size.more:
        arms["gap on the encoder"] = Geometry(WEIGHT, apply="encoder")
        arms["gap of distances"] = Geometry(WEIGHT, cost="scl2")
    pictures, factors = _sprites(size)
    wins = pairs = 0
    for seed in size.seeds:
        found: dict[tuple[str, float], float] = {}
        for beta, (name, geometry) in itertools.product(size.betas, arms.items()):
            scores, missed = _autoencoder(pictures, factors, seed, beta, geometry, size)
            found[name, beta] = scores.disentanglement
            evidence.add(f"DCI-D, {name}, beta {beta:g}", scores.disentanglement, seed=seed)
            evidence.add(f"DCI-C, {name}, beta {beta:g}", scores.completeness, seed=seed)
            evidence.add(f"DCI-I, {name}, beta {beta:g}", scores.informativeness, seed=seed)
            evidence.add(f"reconstruction, {name}, beta {beta:g}", missed, seed=seed, unit="nats")
        for name in arms:
            evidence.add(f"DCI-D, {name}", statistics.fmean(found[name, beta] for beta in size.betas), seed=seed)
        wins += sum(found["gap", beta] > found["base", beta] for beta in size.betas)
        pairs += len(size.betas)
    evidence.add("pairs in which the gap is above the base", wins)
    return wins, pairs


def _sprites(size: Size) -> tuple[Tensor, Tensor]:
    import torch

    from pippin.data.sprites import Sprites, SpriteSpec

    many = SpriteSpec(64, scales=6, rotations=40, xs=32, ys=32)
    sprites = Sprites(many if size.pixels == 64 else SpriteSpec(size.pixels))
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(len(sprites), (size.pictures,), generator=generator)
    if size.pictures == len(sprites):
        numbers = torch.arange(len(sprites))
    return sprites.images(numbers), sprites.factors(numbers)


def _autoencoder(
    pictures: Tensor, factors: Tensor, seed: int, beta: float, geometry: Geometry | None, size: Size
) -> tuple[Any, float]:
    """DCI of one autoencoder's posterior means, and the nats that its reconstructions miss at the last step."""
    import torch

    from pippin.bayes.disentangle import DisentanglingElbo
    from pippin.bayes.vae import VAE, VAEConfig
    from pippin.data.sprites import FACTORS
    from pippin.evaluate.disentanglement import dci
    from pippin.train import AdamW, Cosine, Trainer

    device = _device(size)
    shape = (1, size.pixels, size.pixels)
    vae = VAE(VAEConfig(shape, LATENT, size.hidden, kind=size.kind), seed=seed).to(device)

    def batches() -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield pictures[torch.randint(len(pictures), (BATCH,), generator=generator)]

    how: dict[str, Any] = {"optimiser": AdamW(lr=RATE, weight_decay=0.0), "schedule": Cosine(warmup=0.02)}
    objective = DisentanglingElbo(beta=beta, geometry=geometry)
    training = Trainer(vae, objective, batches(), steps=size.steps, seed=seed, show=False, clip=None, **how).fit()
    with torch.no_grad():
        codes = torch.cat([vae.encode(part.to(device))[0].cpu() for part in pictures.split(1024)])
    rows = size.rows
    scores = dci(codes, factors, train=rows, test=rows // 2, trees=size.trees, seed=seed, names=FACTORS)
    return scores, float(training.steps[-1].metrics["reconstruction"])


def _device(size: Size) -> str:
    import torch

    return "cuda" if size.pixels == 64 and torch.cuda.is_available() else "cpu"


# --- cost -------------------------------------------------------------------------------------------------------------


def _cost(evidence: Evidence, size: Size) -> float:
    """What the gap adds to the time of a step, in units of the step without it; medians of steps in turn."""
    from pippin.bayes.disentangle import DisentanglingElbo, Geometry
    from pippin.bayes.vae import VAE, VAEConfig
    from pippin.train import AdamW, Trainer

    device, seconds = _device(size), dict[str, list[float]]()
    pictures = _sprites(size)[0][:2048].to(device)
    trainers = {}
    for name, geometry in (("without", None), ("with", Geometry(WEIGHT))):
        vae = VAE(VAEConfig(tuple(pictures.shape[1:]), LATENT, size.hidden, kind=size.kind)).to(device)
        cycle = itertools.cycle(list(pictures.split(BATCH))[: len(pictures) // BATCH])
        how: dict[str, Any] = {"optimiser": AdamW(lr=RATE, weight_decay=0.0), "show": False, "clip": None}
        trainers[name] = Trainer(vae, DisentanglingElbo(geometry=geometry), cycle, steps=10_000, **how)
        trainers[name].advance(3)
    for _ in range(size.timed):
        for name, trainer in trainers.items():
            began = time.perf_counter()
            trainer.advance(1)
            seconds.setdefault(name, []).append(time.perf_counter() - began)
    plain, regularised = (statistics.median(seconds[name]) for name in ("without", "with"))
    evidence.add("step without the gap", 1000 * plain, unit="ms")
    evidence.add("step with the gap", 1000 * regularised, unit="ms")
    return (regularised - plain) / plain
