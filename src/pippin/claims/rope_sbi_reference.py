"""Neural posterior estimation against sbibm's reference posteriors: can a classifier tell the draws apart?

Notable here:
- three tasks with what makes posteriors hard: ten truncated parameters, a crescent with two tips, four modes from an
  unidentified sign
- the classifier is calibrated by its controls: draws of the prior, which it must tell apart, and a second half of the
  reference, which it cannot
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pippin.claims import Evidence, Scale, claim

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Size:
    """Seeds, simulations with the steps on them, observations of each task, draws a classifier sees of each side."""

    seeds: tuple[int, ...]
    budgets: dict[int, int]
    observations: tuple[int, ...]
    draws: int


SIZES = {
    "smoke": Size((0,), {200: 5}, (1,), 30),
    "laptop": Size((0, 1, 2), {1000: 300, 10_000: 1500}, (1, 2, 3), 600),
    "gpu": Size((0, 1, 2), {1000: 600, 10_000: 5000, 100_000: 30_000}, tuple(range(1, 11)), 10_000),
}
BATCH, RATE = 128, 1e-3
BOUNDS = {"gaussian_linear_uniform": 0.65, "two_moons": 0.75, "slcp": 0.90}
"""What the mean accuracy must not pass at 10,000 simulations."""


@claim(
    id="rope-sbi-reference",
    source="arXiv:2101.04653",
    paper="neural posterior estimation comes close to the reference posteriors of the benchmark as simulations grow, "
    "on easy tasks at once, on those with several modes later",
    setting="sbibm's gaussian_linear_uniform (10 parameters), two_moons and slcp; spline flow in logit space on the "
    "observation itself, 1,000 and 10,000 stored simulations; observations 1 to 3, 600 draws of each side, accuracy of "
    "a perceptron in 5 folds (C2ST)",
    accept="means over observations and 3 seeds: at 10,000 simulations the accuracy is at most 0.65, 0.75 and 0.90 on "
    "the three tasks in the order above, and on each below that at 1,000; draws of the prior are told from the "
    "reference with at least 0.80, two halves of the reference with 0.44 to 0.56",
)
def run(scale: Scale) -> Evidence:
    """Every task, seed and budget."""
    from pippin.core import store

    evidence, size = Evidence(), SIZES[scale.name]
    folder = store.pull("sbibm", show_progress=False)
    most, least = max(size.budgets), min(size.budgets)
    checks = {}
    for task, bound in BOUNDS.items():
        _task(evidence, task, folder / task, size, "cuda" if scale.name == "gpu" else "cpu")
        found = {n: evidence.mean(f"C2ST, {task}, {n} simulations") for n in size.budgets}
        checks[f"close_{task}"] = found.get(10_000, 1.0) <= bound
        checks[f"better_{task}"] = found[most] < found[least]
        apart = evidence.mean(f"C2ST, {task}, prior") >= 0.80
        checks[f"controls_{task}"] = apart and 0.44 <= evidence.mean(f"C2ST, {task}, reference") <= 0.56
    return evidence.accept(**checks)


def _task(evidence: Evidence, name: str, folder: Path, size: Size, device: str) -> None:
    """One task: the controls of its observations, then a posterior for each seed and budget."""
    import torch

    from pippin.bayes.npe import NPE, FlowConfig
    from pippin.bayes.priors import Box
    from pippin.bayes.sbi_metrics import c2st

    device = device if torch.cuda.is_available() else "cpu"
    limit, count = (3.0, 5) if name == "slcp" else (1.0, 2 if name == "two_moons" else 10)
    prior = Box([-limit] * count, [limit] * count)
    seen = [_numbers(folder / f"num_observation_{i}" / "observation.csv") for i in size.observations]
    known = [
        _numbers(folder / f"num_observation_{i}" / "reference_posterior_samples.csv.bz2") for i in size.observations
    ]
    half = len(known[0]) // 2
    for seed in size.seeds:
        generator = torch.Generator().manual_seed(6_000 + seed)
        draws = prior.sample(size.draws, generator)

        def told(what: str, others: list[Tensor], seed: int = seed) -> None:
            scores = [c2st(k[:half], other, seed=seed, most=size.draws) for k, other in zip(known, others, strict=True)]
            evidence.add(f"C2ST, {name}, {what}", statistics.mean(scores), seed=seed)

        if seed == size.seeds[0]:
            told("prior", [draws] * len(known))
            told("reference", [k[half:] for k in known])
        theta = prior.sample(max(size.budgets), generator)
        x = SIMULATORS[name](theta, generator)
        for budget, steps in size.budgets.items():
            npe = NPE(prior, flow=FlowConfig("spline"), seed=seed).to(device)
            npe.fit((theta[:budget], x[:budget]), steps=steps, batch=BATCH, lr=RATE, seed=seed)
            told(f"{budget} simulations", [npe.sample(size.draws, o, generator)[:, 0].cpu() for o in seen])


def _numbers(path: Path) -> Tensor:
    """The rows of a CSV file with a line of names."""
    import bz2

    import numpy as np
    import torch

    data = path.read_bytes()
    lines = (bz2.decompress(data) if path.suffix == ".bz2" else data).decode().splitlines()
    return torch.tensor(np.loadtxt(lines[1:], delimiter=",", ndmin=2), dtype=torch.float32)


# --- the tasks, as the benchmark's appendix defines them --------------------------------------------------------------


def _linear(theta: Tensor, generator: torch.Generator) -> Tensor:
    """The parameters and noise of variance 0.1."""
    import torch

    noise: Tensor = 0.1**0.5 * torch.randn(theta.shape, generator=generator)
    return theta + noise


def _two_moons(theta: Tensor, generator: torch.Generator) -> Tensor:
    """A crescent of radius 0.1, moved by the absolute sum and the difference of both parameters."""
    import torch

    angle = math.pi * (torch.rand(len(theta), generator=generator) - 0.5)
    radius = 0.1 + 0.01 * torch.randn(len(theta), generator=generator)
    moon = torch.stack([radius * angle.cos() + 0.25, radius * angle.sin()], -1)
    moved = torch.stack([-theta.sum(1).abs(), theta[:, 1] - theta[:, 0]], -1) / 2**0.5
    return moon + moved


def _slcp(theta: Tensor, generator: torch.Generator) -> Tensor:
    """Four draws of a Gaussian whose deviations are squares and whose correlation is a tanh of the parameters."""
    import torch

    noise = torch.randn(len(theta), 4, 2, generator=generator)
    first, second, rho = theta[:, 2:3].square(), theta[:, 3:4].square(), theta[:, 4:5].tanh()
    left = theta[:, 0:1] + first * noise[..., 0]
    right = theta[:, 1:2] + second * (rho * noise[..., 0] + (1 - rho.square()).sqrt() * noise[..., 1])
    return torch.stack([left, right], -1).flatten(1)


SIMULATORS: dict[str, Callable[..., Any]] = {
    "gaussian_linear_uniform": _linear,
    "two_moons": _two_moons,
    "slcp": _slcp,
}
