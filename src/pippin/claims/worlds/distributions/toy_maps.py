"""A map from four Gaussians to a square, learned with a Sinkhorn divergence and a further term on pairs.

Notable here:
- the fit of a map is the exact Wasserstein distance on fresh points, not the divergence that it was trained with
- beside the fit stands what the map does to neighborhoods
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

Term = Callable[["Tensor", "Tensor"], "Tensor"]
"""Of points and their images."""
SIDE = 2.0
"""Of the square that is mapped to."""


def four_gaussians(n: int, generator: torch.Generator) -> Tensor:
    """Points around the corners of a square."""
    import torch

    centers = torch.tensor([[2.0, 2.0], [2.0, -2.0], [-2.0, 2.0], [-2.0, -2.0]])
    chosen: Tensor = centers[torch.randint(4, (n,), generator=generator)]
    return chosen + 0.6 * torch.randn(n, 2, generator=generator)


def square(n: int, generator: torch.Generator) -> Tensor:
    """Points spread evenly over a square."""
    import torch

    return SIDE * (torch.rand(n, 2, generator=generator) - 0.5)


def trained_map(seed: int, term: Term | None, *, steps: int, points: int) -> nn.Module:
    """A small network, trained for so many steps on so many points each."""
    import torch
    from torch import nn

    from pippin.train import AdamW, CosineSchedule, Loss, Trainer

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
            yield four_gaussians(points, generator), square(points, generator)

    options: dict[str, Any] = {
        "optimizer": AdamW(lr=3e-3, weight_decay=0.0),
        "schedule": CosineSchedule(warmup_steps=0.0),
    }
    Trainer(net, objective, batches(), steps=steps, seed=seed, max_grad_norm=None, show_progress=False, **options).fit()
    return net.eval()


def _sinkhorn_divergence(y: Tensor, target: Tensor) -> Tensor:
    """Sinkhorn divergence: entropic transport cost between the two, less half of that within each, at fixed plans."""
    import torch

    from pippin.bayes.transport.gromov_solver import sinkhorn_plans

    pairs = ((y, target), (y, y), (target, target))
    costs = torch.stack([(a[:, None] - b[None]).square().sum(2) for a, b in pairs])
    eps = torch.full((3,), 0.01 * SIDE**2, dtype=torch.float64)
    with torch.no_grad():
        plans, _ = sinkhorn_plans(costs.double(), eps, max_iterations=50, tolerance=1e-3)
    parts = (costs * plans.to(costs)).sum((1, 2))
    divergence: Tensor = parts[0] - 0.5 * parts[1] - 0.5 * parts[2]
    return divergence


def wasserstein(y: Tensor, target: Tensor) -> float:
    """Exact squared 2-Wasserstein distance of two samples of equal size."""
    from scipy.optimize import linear_sum_assignment

    cost = (y[:, None] - target[None]).square().sum(2).double().numpy()
    return float(cost[linear_sum_assignment(cost)].mean())


def neighbors_lost(x: Tensor, y: Tensor, k: int) -> float:
    """The share of a point's k nearest neighbors that are not among the k nearest of its image."""
    import torch

    near = []
    for points in (x, y):
        apart = torch.cdist(points, points).fill_diagonal_(torch.inf)
        chosen = apart.topk(min(k, len(x) - 1), largest=False).indices
        near.append(torch.zeros_like(apart).scatter_(1, chosen, 1.0))
    return 1 - float((near[0] * near[1]).sum() / near[0].sum())
