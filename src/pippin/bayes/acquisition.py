"""Where to look next in a latent space: expected improvement under a Gaussian process, a grid, or draws of the prior.

Notable here:
- a search sees codes and scores, and never decodes or evaluates anything on its own, except the grid: it stands for a
  perfect optimiser, for studying everything else
- the improvement is measured against a high percentile of the scores and not their maximum, where its gradients vanish
- a region of trust is a function of codes: candidates outside of it are passed over
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from pippin.bayes.gaussian_process import GaussianProcess, expected_improvement
from pippin.core.errors import InvalidArgument, MissingDependency, NotFitted

Decode = Callable[[Tensor], Tensor]
Trust = Callable[[Tensor], Tensor]
"""Codes [n, latent] to margins [n]; 0 and above is trusted."""
_DRAWS = 512


@runtime_checkable
class Search(Protocol):
    """Proposes codes; higher scores are better."""

    batch: int | None
    """How many are proposed at once; None for as many as are asked for."""

    def begin(self, z: Tensor, y: Tensor, seed: int) -> None:
        """All data [n, latent], [n], after the model has changed."""

    def told(self, z: Tensor, y: Tensor) -> None:
        """Some more data, while the model is the same."""

    def propose(self, decode: Decode, count: int, seed: int, trust: Trust | None) -> Tensor:
        """Codes [up to count, latent] to evaluate next."""


@dataclass
class ExpectedImprovement:
    """The code where a Gaussian process expects to be improved upon most.

    Args:
        inducing: points of the sparse process; with fewer data than that the process is exact.
        best: how many of the best examples the process sees.
        random: how many of the others.
        starts: of L-BFGS-B, half from N(0, I) and half from the best fifth of the data.
        percentile: of the scores, that is to be improved upon.
        iterations: of the fit of hyper-parameters.

    Raises:
        InvalidArgument: a number outside its range.

    Source: Tripp et al., arXiv:2006.09191, appendix; the code cambridge-mlg/weighted-retraining for the percentile,
    the starts and the box.
    """

    inducing: int = 500
    best: int = 2000
    random: int = 8000
    starts: int = 20
    percentile: float = 90.0
    iterations: int = 50
    batch: int | None = 1

    def __post_init__(self) -> None:
        if min(self.inducing, self.best, self.starts, self.iterations) < 1 or self.random < 0:
            raise InvalidArgument(
                f"inducing {self.inducing}, best {self.best}, random {self.random}, starts {self.starts}, iterations "
                f"{self.iterations}: each is 1 or more, random 0 or more"
            )
        if not 0 < self.percentile < 100:
            raise InvalidArgument(f"percentile is {self.percentile}; give a number between 0 and 100")
        self.process: GaussianProcess | None = None

    def begin(self, z: Tensor, y: Tensor, seed: int) -> None:
        """Fit the process to the best and to some of the rest."""
        order = y.argsort(descending=True, stable=True)
        rest = order[self.best :]
        chosen = rest[torch.randperm(len(rest), generator=torch.Generator().manual_seed(seed))[: self.random]]
        kept = torch.cat([order[: self.best], chosen])
        z, y = z[kept].double(), y[kept].double()
        self.process = GaussianProcess(self.inducing if len(z) > self.inducing else None, seed=seed)
        self.process.fit(z, y, iterations=self.iterations)
        self._z, self._y = z, y

    def told(self, z: Tensor, y: Tensor) -> None:
        """Condition the process on them."""
        if self.process is None:
            raise NotFitted("the search has seen no data; call begin first")
        self.process = self.process.conditioned(z.double(), y.double())
        self._z, self._y = torch.cat([self._z, z.double()]), torch.cat([self._y, y.double()])

    def propose(self, decode: Decode, count: int, seed: int, trust: Trust | None = None) -> Tensor:
        """The maximisers; each after the first believes that the ones before it came out as expected."""
        if self.process is None:
            raise NotFitted("the search has seen no data; call begin first")
        process, found, taken = self.process, list[Tensor](), list[Tensor]()

        def margins(z: Tensor) -> Tensor:
            inside = torch.zeros(len(z)) if trust is None else trust(z)
            decoded = decode(z).flatten(1)
            for other in taken:
                inside = torch.where((decoded == other).all(1), -math.inf, inside)
            return inside

        for index in range(count):
            code = self._maximise(process, seed + index, margins)
            found.append(code)
            if index + 1 < count:
                taken.append(decode(code[None].float()).flatten(1))
                process = process.conditioned(code[None], process.predict(code[None])[0])
        return torch.stack(found).float()

    def _maximise(self, process: GaussianProcess, seed: int, margins: Trust) -> Tensor:
        try:
            from scipy.optimize import minimize
        except ImportError as error:
            raise MissingDependency("expected improvement needs SciPy: pip install 'pippin[bayes]'") from error
        incumbent = float(self._y.quantile(self.percentile / 100))
        unit = float(process.scale)
        bound = 1.1 * float(self._z.abs().flatten().sort().values[math.ceil(0.999 * self._z.numel()) - 1])

        def loss(flat: Any) -> tuple[float, Any]:
            code = torch.as_tensor(flat).view(1, -1).requires_grad_()
            value = -expected_improvement(*process.predict(code), incumbent).sum() / unit
            (slope,) = torch.autograd.grad(value, code)
            return float(value.detach()), slope.view(-1).numpy()

        ends = []
        for start in self._starts(seed).clamp(-bound, bound):
            found = minimize(loss, start.numpy(), jac=True, method="L-BFGS-B", bounds=[(-bound, bound)] * len(start))
            ends.append((float(found.fun), torch.as_tensor(found.x)))
        ends.sort(key=lambda end: end[0])
        codes = torch.stack([code for _, code in ends])
        inside = (margins(codes.float()) >= 0).nonzero()
        if not len(inside):  # no maximum may be taken: the best of many draws that may, or that nearly may
            generator = torch.Generator().manual_seed(seed + 1)
            codes = torch.randn(_DRAWS, codes.shape[1], generator=generator, dtype=torch.float64).clamp(-bound, bound)
            with torch.no_grad():
                gain = expected_improvement(*process.predict(codes), incumbent)
            codes = codes[gain.argsort(descending=True)]
            found_margins = margins(codes.float())
            inside = (found_margins >= min(0.0, float(found_margins.max()))).nonzero()
        return codes[int(inside[0, 0])]

    def _starts(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        half = self.starts // 2
        drawn = torch.randn(self.starts - half, self._z.shape[1], generator=generator, dtype=torch.float64)
        good = self._y.argsort(descending=True, stable=True)[: max(1, len(self._y) // 5)]
        return torch.cat([drawn, self._z[good[torch.randint(len(good), (half,), generator=generator)]]])


@dataclass
class Grid:
    """All codes of a grid, decoded, without duplicates, those of the highest score first: a perfect optimiser.

    Args:
        score: of decoded examples [n]; the objective itself, or what stands for it. It is called on the whole grid, and
            nobody counts these calls.
        side: codes along each axis.
        bound: the grid goes from minus this to this.
        latent: axes.

    Raises:
        InvalidArgument: fewer than 2 codes along an axis, or more than a million in all.
    """

    score: Callable[[Tensor], Tensor]
    side: int = 50
    bound: float = 3.0
    latent: int = 2
    batch: int | None = None

    def __post_init__(self) -> None:
        if self.side < 2 or self.latent < 1 or self.side**self.latent > 1_000_000 or not 0 < self.bound < math.inf:
            raise InvalidArgument(
                f"a grid of {self.side} codes along {self.latent} axes to ±{self.bound}: give 2 or more, a million at "
                "most in all"
            )

    def begin(self, z: Tensor, y: Tensor, seed: int) -> None:
        """Nothing is learnt."""

    def told(self, z: Tensor, y: Tensor) -> None:
        """Nothing is learnt."""

    def propose(self, decode: Decode, count: int, seed: int, trust: Trust | None = None) -> Tensor:
        """The best of the grid; fewer where it decodes to fewer different examples."""
        axis = torch.linspace(-self.bound, self.bound, self.side)
        codes = torch.cartesian_prod(*[axis] * self.latent).view(-1, self.latent)
        if trust is not None:
            codes = codes[trust(codes) >= 0]
        if not len(codes):
            return codes
        decoded = decode(codes)
        _, group = decoded.flatten(1).unique(dim=0, return_inverse=True)
        first = torch.full((int(group.max()) + 1,), len(codes)).scatter_reduce_(
            0, group, torch.arange(len(codes)), "amin"
        )
        scores = torch.as_tensor(self.score(decoded[first])).double().nan_to_num(nan=-math.inf)
        return codes[first[scores.argsort(descending=True, stable=True)[:count]]]


@dataclass
class Prior:
    """Codes drawn from N(0, I), whatever the scores: what sampling-based search does.

    Args:
        latent: axes of the code.
    """

    latent: int
    batch: int | None = None

    def begin(self, z: Tensor, y: Tensor, seed: int) -> None:
        """Nothing is learnt."""

    def told(self, z: Tensor, y: Tensor) -> None:
        """Nothing is learnt."""

    def propose(self, decode: Decode, count: int, seed: int, trust: Trust | None = None) -> Tensor:
        """As many draws; with a region of trust, those of a hundred times as many that have the largest margins."""
        generator = torch.Generator().manual_seed(seed)
        if trust is None:
            return torch.randn(count, self.latent, generator=generator)
        drawn = torch.randn(100 * count, self.latent, generator=generator)
        margins = trust(drawn)
        inside = (margins >= 0).nonzero()[:, 0]
        return drawn[inside[:count]] if len(inside) >= count else drawn[margins.argsort(descending=True)[:count]]
