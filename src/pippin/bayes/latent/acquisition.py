"""Search in a latent space: expected improvement under a Gaussian process, a grid, or samples of the prior.

Notable here:
- a search sees codes and scores only; the grid also evaluates decoded examples, as a perfect optimizer for experiments
- improvement is measured over a high percentile of the scores, as its gradients vanish at their maximum
- a trust region is a function of codes: candidates outside of it are skipped
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, runtime_checkable

import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor

from pippin.bayes.latent.gaussian_process import GaussianProcess, expected_improvement
from pippin.core.checks import NonNegativeInt, PositiveFloat, PositiveInt, checked
from pippin.core.errors import InvalidArgument, MissingDependency, NotFitted

Decode = Callable[[Tensor], Tensor]
Trust = Callable[[Tensor], Tensor]
"""A trust region: maps codes [n, latent] to margins [n]; codes with margins of 0 and above are trusted."""
_FALLBACK_SAMPLES = 512


@runtime_checkable
class Search(Protocol):
    """Proposes latent codes to evaluate; higher scores are better."""

    batch_size: int | None
    """The largest number of codes proposed at once; None for as many as requested."""

    def fit(self, z: Tensor, y: Tensor, seed: int) -> Search:
        """Fit to all codes [n, latent] and scores [n], after the generative model has changed; returns itself."""

    def update(self, z: Tensor, y: Tensor) -> None:
        """Add codes and scores, while the generative model is unchanged."""

    def propose(self, decode: Decode, count: int, seed: int, trust: Trust | None) -> Tensor:
        """At most ``count`` codes [n, latent] to evaluate next."""


@checked
@dataclass
class ExpectedImprovement:
    """Maximizes the expected improvement under a Gaussian process.

    Args:
        num_inducing: inducing points of the sparse process; with fewer data than that the process is exact.
        num_best: number of the best examples that the process is fitted to.
        num_random: number of randomly chosen other examples.
        num_starts: starts of L-BFGS-B, half from N(0, I) and half from the best fifth of the data.
        percentile: the percentile of the scores over which improvement is measured.
        max_iterations: iterations of the hyperparameter fit.
        batch_size: see `Search`.

    Source: Tripp et al., arXiv:2006.09191, appendix; the code cambridge-mlg/weighted-retraining for the percentile,
    the starts and the bounds.
    """

    num_inducing: PositiveInt = 500
    num_best: PositiveInt = 2000
    num_random: NonNegativeInt = 8000
    num_starts: PositiveInt = 20
    percentile: Annotated[float, Gt(0), Lt(100)] = 90.0
    max_iterations: PositiveInt = 50
    batch_size: PositiveInt | None = 1

    def __post_init__(self) -> None:
        self.process: GaussianProcess | None = None

    def fit(self, z: Tensor, y: Tensor, seed: int) -> ExpectedImprovement:
        """Fit the process to the best examples and to a random part of the rest."""
        order = y.argsort(descending=True, stable=True)
        rest = order[self.num_best :]
        chosen = rest[torch.randperm(len(rest), generator=torch.Generator().manual_seed(seed))[: self.num_random]]
        used = torch.cat([order[: self.num_best], chosen])
        z, y = z[used].double(), y[used].double()
        self.process = GaussianProcess(self.num_inducing if len(z) > self.num_inducing else None, seed=seed)
        self.process.fit(z, y, max_iterations=self.max_iterations)
        self._z, self._y = z, y
        return self

    def update(self, z: Tensor, y: Tensor) -> None:
        """Condition the process on more codes and scores."""
        if self.process is None:
            raise NotFitted("the search has seen no data; call fit first")
        self.process = self.process.condition_on_observations(z.double(), y.double())
        self._z, self._y = torch.cat([self._z, z.double()]), torch.cat([self._y, y.double()])

    def propose(self, decode: Decode, count: int, seed: int, trust: Trust | None = None) -> Tensor:
        """The codes of largest expected improvement, one after the other.

        For each further code the process is conditioned on its own mean prediction for the codes before ("kriging
        believer").
        """
        if self.process is None:
            raise NotFitted("the search has seen no data; call fit first")
        process, found, taken = self.process, list[Tensor](), list[Tensor]()

        def margins(z: Tensor) -> Tensor:
            inside = torch.zeros(len(z)) if trust is None else trust(z)
            decoded = decode(z).flatten(1)
            for other in taken:
                inside = torch.where((decoded == other).all(1), -math.inf, inside)
            return inside

        for index in range(count):
            code = self._maximize(process, seed + index, margins)
            found.append(code)
            if index + 1 < count:
                taken.append(decode(code[None].float()).flatten(1))
                process = process.condition_on_observations(code[None], process.predict(code[None]).mean[:, 0])
        return torch.stack(found).float()

    def _maximize(self, process: GaussianProcess, seed: int, margins: Trust) -> Tensor:
        try:
            from scipy.optimize import minimize
        except ImportError as error:
            raise MissingDependency("expected improvement needs SciPy: pip install 'pippin[bayes]'") from error
        incumbent = float(self._y.quantile(self.percentile / 100))
        unit = float(process.scale)
        bound = 1.1 * float(self._z.abs().flatten().sort().values[math.ceil(0.999 * self._z.numel()) - 1])

        def loss(flat: Any) -> tuple[float, Any]:
            code = torch.as_tensor(flat).view(1, -1).requires_grad_()
            value = -_improvement(process, code, incumbent).sum() / unit
            (slope,) = torch.autograd.grad(value, code)
            return float(value.detach()), slope.view(-1).numpy()

        ends = []
        for start in self._starts(seed).clamp(-bound, bound):
            found = minimize(loss, start.numpy(), jac=True, method="L-BFGS-B", bounds=[(-bound, bound)] * len(start))
            ends.append((float(found.fun), torch.as_tensor(found.x)))
        ends.sort(key=lambda end: end[0])
        codes = torch.stack([code for _, code in ends])
        inside = (margins(codes.float()) >= 0).nonzero()
        if not len(inside):  # no maximum is trusted: take the best of many random codes with the largest margin
            generator = torch.Generator().manual_seed(seed + 1)
            codes = torch.randn(_FALLBACK_SAMPLES, codes.shape[1], generator=generator, dtype=torch.float64)
            codes = codes.clamp(-bound, bound)
            with torch.no_grad():
                gain = _improvement(process, codes, incumbent)
            codes = codes[gain.argsort(descending=True)]
            found_margins = margins(codes.float())
            inside = (found_margins >= min(0.0, float(found_margins.max()))).nonzero()
        return codes[int(inside[0, 0])]

    def _starts(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        half = self.num_starts // 2
        random = torch.randn(self.num_starts - half, self._z.shape[1], generator=generator, dtype=torch.float64)
        good = self._y.argsort(descending=True, stable=True)[: max(1, len(self._y) // 5)]
        return torch.cat([random, self._z[good[torch.randint(len(good), (half,), generator=generator)]]])


def _improvement(process: GaussianProcess, codes: Tensor, incumbent: float) -> Tensor:
    """Expected improvement [n] of codes [n, latent]."""
    found = process.predict(codes)
    return expected_improvement(found.mean[:, 0], found.function_variance[:, 0], incumbent)


@checked
@dataclass
class GridSearch:
    """Proposes the codes of a grid whose decoded examples score best, without duplicates: a perfect optimizer.

    Args:
        score: maps decoded examples to scores [n]; the objective itself, or a stand-in. It is called on the whole grid,
            and these calls are not counted as queries.
        points_per_axis: codes along each axis.
        bound: the grid extends from ``-bound`` to ``bound``.
        latent_dim: dimensions of the latent space.
        batch_size: see `Search`.

    Raises:
        InvalidArgument: more than a million codes in all.
    """

    score: Callable[[Tensor], Tensor]
    points_per_axis: Annotated[int, Ge(2)] = 50
    bound: PositiveFloat = 3.0
    latent_dim: PositiveInt = 2
    batch_size: int | None = None

    def __post_init__(self) -> None:
        if self.points_per_axis**self.latent_dim > 1_000_000:
            raise InvalidArgument(
                f"a grid of {self.points_per_axis} codes along {self.latent_dim} axes has more than a million in all"
            )

    def fit(self, z: Tensor, y: Tensor, seed: int) -> GridSearch:
        """Do nothing: the search does not depend on the data."""
        return self

    def update(self, z: Tensor, y: Tensor) -> None:
        """Do nothing: the search does not depend on the data."""

    def propose(self, decode: Decode, count: int, seed: int, trust: Trust | None = None) -> Tensor:
        """The codes with the best scores; fewer than ``count`` where the grid decodes to fewer distinct examples."""
        axis = torch.linspace(-self.bound, self.bound, self.points_per_axis)
        codes = torch.cartesian_prod(*[axis] * self.latent_dim).view(-1, self.latent_dim)
        if trust is not None:
            codes = codes[trust(codes) >= 0]
        if not len(codes):
            return codes
        decoded = decode(codes)
        _, group = decoded.flatten(1).unique(dim=0, return_inverse=True)
        # the first code of each group of equal decoded examples
        first = torch.full((int(group.max()) + 1,), len(codes)).scatter_reduce_(
            0, group, torch.arange(len(codes)), "amin"
        )
        scores = torch.as_tensor(self.score(decoded[first])).double().nan_to_num(nan=-math.inf)
        return codes[first[scores.argsort(descending=True, stable=True)[:count]]]


@checked
@dataclass
class PriorSampling:
    """Samples codes from N(0, I) regardless of the scores, as sampling-based methods (DbAS, CEM-PI, RWR) do.

    Args:
        latent_dim: dimensions of the latent space.
        batch_size: see `Search`.
    """

    latent_dim: PositiveInt
    batch_size: int | None = None

    def fit(self, z: Tensor, y: Tensor, seed: int) -> PriorSampling:
        """Do nothing: the search does not depend on the data."""
        return self

    def update(self, z: Tensor, y: Tensor) -> None:
        """Do nothing: the search does not depend on the data."""

    def propose(self, decode: Decode, count: int, seed: int, trust: Trust | None = None) -> Tensor:
        """Random codes; with a trust region, those of a hundred times as many samples that lie in or closest to it."""
        generator = torch.Generator().manual_seed(seed)
        if trust is None:
            return torch.randn(count, self.latent_dim, generator=generator)
        codes = torch.randn(100 * count, self.latent_dim, generator=generator)
        margins = trust(codes)
        inside = (margins >= 0).nonzero()[:, 0]
        return codes[inside[:count]] if len(inside) >= count else codes[margins.argsort(descending=True)[:count]]
