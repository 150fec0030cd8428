r"""Gaussian-process regression with one length scale per input dimension: exact, or sparse with inducing points.

Notable here:
- targets are standardized internally, so that the prior fits any unit; predictions are in the original units
- with an inducing point at every input the sparse bound equals the exact evidence, which is how it is tested
- `condition_on_observations` adds data at fixed hyperparameters, as a search does after each query

Source: Rasmussen and Williams, "Gaussian Processes for Machine Learning", algorithm 2.1 (exact); Titsias, "Variational
learning of inducing variables in sparse Gaussian processes", AISTATS 2009, eq. 9 (sparse).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from pippin.bayes.prediction import Prediction
from pippin.core.checks import PositiveInt, checked
from pippin.core.errors import InvalidInput, MissingDependency, NotFitted, SingularPosterior

_FLOOR = 1e-6  # smallest noise variance, in units of the targets' variance
_JITTER = (0.0, 1e-10, 1e-8, 1e-6, 1e-4)  # added to the diagonal in units of the kernel's variance, tried in turn
_BOUND = 8.0  # largest magnitude of the logarithms of hyperparameters


@dataclass(frozen=True)
class Kernel:
    r"""The squared-exponential kernel $s^2 \exp(-\frac12 \sum_d (x_d - x'_d)^2 / \ell_d^2)$, and the noise variance.

    Attributes:
        lengthscale: $\ell$, in units of the inputs.
        variance: $s^2$, in squared units of the standardized targets.
        noise: variance of the noise, in squared units of the standardized targets.
    """

    lengthscale: Float[Tensor, " d"]
    variance: Float[Tensor, ""]
    noise: Float[Tensor, ""]

    def __call__(self, a: Float[Tensor, "n d"], b: Float[Tensor, "m d"]) -> Float[Tensor, "n m"]:
        """Covariances of the noiseless function between two sets of points."""
        a, b = a / self.lengthscale, b / self.lengthscale
        # not torch.cdist: its square root has no second derivative where two points coincide
        squares = a.square().sum(-1)[:, None] + b.square().sum(-1) - 2 * a @ b.T
        return self.variance * (-0.5 * squares.clamp(min=0.0)).exp()


class GaussianProcess:
    """A zero-mean Gaussian process over standardized targets.

    Args:
        num_inducing: number of inducing points; None for the exact process, whose cost is cubic in the data.
        seed: seed of the choice of inducing points.

    Attributes:
        kernel: the hyperparameters; None before `fit`.
        evidence: log marginal likelihood of the standardized targets in nats (sparse: its lower bound).

    >>> x = torch.linspace(0, 6, 30)[:, None]
    >>> process = GaussianProcess().fit(x, x[:, 0].sin())
    >>> prediction = process.predict(torch.tensor([[1.5]]))
    >>> abs(float(prediction.mean) - math.sin(1.5)) < 0.01
    True
    """

    @checked
    def __init__(self, num_inducing: PositiveInt | None = None, *, seed: int = 0) -> None:
        self.inducing, self.seed = num_inducing, seed
        self.kernel: Kernel | None = None
        self.evidence = math.nan
        self._points: Tensor | None = None

    def fit(
        self,
        x: Float[Tensor, "n d"],
        y: Float[Tensor, " n"],
        *,
        kernel: Kernel | None = None,
        tune: bool = True,
        max_iterations: int = 100,
    ) -> GaussianProcess:
        """Fit hyperparameters by maximizing the evidence; a second pass also optimizes the inducing points.

        Args:
            x: inputs.
            y: targets, in any unit.
            kernel: initial hyperparameters; None initializes from the standard deviation of the inputs.
            tune: whether to optimize the hyperparameters.
            max_iterations: largest number of L-BFGS iterations in each pass.

        Returns:
            The process itself.

        Raises:
            InvalidInput: no points, different lengths, or values that are not finite; the message names the row.
            SingularPosterior: a covariance that no jitter makes positive definite.
            MissingDependency: scikit-learn, which chooses inducing points, is not installed.
        """
        _check(x, y)
        self.x, raw = x.detach().double(), y.detach().double()
        self.shift = raw.mean()
        std = raw.std(correction=0)
        self.scale = std if float(std) > 0 else torch.ones_like(std)
        self.y = (raw - self.shift) / self.scale
        start = kernel or _initial(self.x)
        self._points = None if self.inducing is None else _centers(self.x, self.inducing, self.seed)
        passes = [False] if self._points is None else [False, True]
        for with_points in passes if tune else []:
            start = self._tune(start, with_points, max_iterations)
        self._factor(start)
        return self

    def _tune(self, start: Kernel, with_points: bool, iterations: int) -> Kernel:
        """L-BFGS on the logarithms of the hyperparameters and, where asked, on the inducing points."""
        logs = [start.lengthscale.log(), start.variance.log(), (start.noise - _FLOOR).clamp(min=_FLOOR).log()]
        variables = [value.detach().clone().requires_grad_() for value in logs]
        if with_points:
            assert self._points is not None
            self._points = self._points.clone().requires_grad_()
            variables.append(self._points)
        search = torch.optim.LBFGS(variables, max_iter=iterations, history_size=20, line_search_fn="strong_wolfe")

        def closure() -> Tensor:
            search.zero_grad()
            loss = -self._evidence(_kernel_of(variables), self._points)[0]
            if not bool(loss.isfinite()):
                return loss.detach() * 0 + 1e10
            loss.backward()
            return loss

        with torch.enable_grad():
            search.step(closure)
        if with_points:
            assert self._points is not None
            self._points = self._points.detach()
        found = _kernel_of([value.detach() for value in variables])
        if not all(bool(value.isfinite().all()) for value in (found.lengthscale, found.variance, found.noise)):
            return start
        return found

    def _evidence(self, kernel: Kernel, points: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Log evidence (or its lower bound, with inducing points), and the factors that predictions need."""
        n, y = len(self.x), self.y
        constant = -0.5 * n * math.log(2 * math.pi)
        if points is None:
            covariance = kernel(self.x, self.x) + kernel.noise * torch.eye(n, dtype=y.dtype)
            factor = _cholesky(covariance, kernel.variance)  # L, [n, n]
            whitened = torch.linalg.solve_triangular(factor, y[:, None], upper=False)[:, 0]  # L^-1 y
            value = constant - 0.5 * whitened.square().sum() - factor.diagonal().log().sum()
            return value, (factor, whitened)
        # with L_m L_m^T = K_mm: A = L_m^-1 K_mn / sigma, [m, n]; L_B L_B^T = I + A A^T; c = L_B^-1 A y / sigma
        inner = _cholesky(kernel(points, points), kernel.variance)
        cross = torch.linalg.solve_triangular(inner, kernel(points, self.x), upper=False) / kernel.noise.sqrt()
        outer = _cholesky(torch.eye(len(points), dtype=y.dtype) + cross @ cross.T, kernel.variance)
        image = torch.linalg.solve_triangular(outer, (cross @ y)[:, None], upper=False)[:, 0] / kernel.noise.sqrt()
        value = constant - outer.diagonal().log().sum() - 0.5 * n * kernel.noise.log()
        value = value - 0.5 * y.square().sum() / kernel.noise + 0.5 * image.square().sum()
        value = value - 0.5 * n * kernel.variance / kernel.noise + 0.5 * cross.square().sum()
        return value, (inner, outer, image)

    def _factor(self, kernel: Kernel) -> None:
        with torch.no_grad():
            value, self._factors = self._evidence(kernel, self._points)
        self.kernel, self.evidence = kernel, float(value)

    def predict(self, x: Float[Tensor, "m d"]) -> Prediction:
        """Predict each input by itself, in the units of the targets; differentiable in ``x``.

        Returns:
            Mean [m, 1] and covariance [m, 1, 1] of the noiseless function, and the variance of the noise.

        Raises:
            NotFitted: before `fit`.
            InvalidInput: another number of input dimensions than in `fit`.
        """
        if self.kernel is None:
            raise NotFitted("the process has seen no data; call fit first")
        if x.shape[1] != self.x.shape[1]:
            raise InvalidInput(f"inputs of {x.shape[1]} dimensions; the process was fitted on {self.x.shape[1]}")
        kernel = self.kernel
        points = self.x if self._points is None else self._points
        cross = kernel(points, x.double())  # [n or inducing points, m]
        low = torch.linalg.solve_triangular(self._factors[0], cross, upper=False)
        if self._points is None:
            mean, variance = self._factors[1] @ low, kernel.variance - low.square().sum(0)
        else:
            _, outer, image = self._factors
            lower = torch.linalg.solve_triangular(outer, low, upper=False)
            mean = image @ lower
            variance = kernel.variance - low.square().sum(0) + lower.square().sum(0)
        mean, variance = self.shift + self.scale * mean, self.scale.square() * variance.clamp(min=1e-12)
        return Prediction(mean[:, None], variance[:, None, None], noise=self.noise)

    @property
    def noise(self) -> float:
        """Variance of the noise in the squared units of the targets.

        Raises:
            NotFitted: before `fit`.
        """
        if self.kernel is None:
            raise NotFitted("the process has seen no data; call fit first")
        return float(self.kernel.noise * self.scale.square())

    def condition_on_observations(self, x: Float[Tensor, "m d"], y: Float[Tensor, " m"]) -> GaussianProcess:
        """A new process with these points added; hyperparameters, standardization and inducing points stay the same.

        Raises:
            NotFitted: before `fit`.
            InvalidInput: see `fit`.
        """
        if self.kernel is None:
            raise NotFitted("the process has seen no data; call fit first")
        _check(x, y)
        more = GaussianProcess(self.inducing, seed=self.seed)
        more.x = torch.cat([self.x, x.detach().double()])
        more.shift, more.scale = self.shift, self.scale
        more.y = torch.cat([self.y, (y.detach().double() - self.shift) / self.scale])
        more._points = self._points
        more._factor(self.kernel)
        return more


def expected_improvement(mean: Float[Tensor, " n"], variance: Float[Tensor, " n"], best: float) -> Float[Tensor, " n"]:
    r"""The expected improvement of $f \sim N(\mu, \sigma^2)$ over b.

    It is $\sigma\,(u \Phi(u) + \phi(u))$ with $u = (\mu - b) / \sigma$.

    Args:
        mean: $\mu$.
        variance: $\sigma^2$, above 0.
        best: b, in units of the mean.

    Source: Jones, Schonlau and Welch, "Efficient global optimization of expensive black-box functions", 1998, eq. 15.

    >>> round(float(expected_improvement(torch.zeros(1), torch.ones(1), 0.0)), 4)
    0.3989
    """
    std = variance.sqrt()
    u = (mean - best) / std
    density = (-0.5 * u.square()).exp() / math.sqrt(2 * math.pi)
    found: Tensor = std * (u * torch.special.ndtr(u) + density)
    return found


def _kernel_of(variables: list[Tensor]) -> Kernel:
    lengthscale, variance, noise = (value.clamp(-_BOUND, _BOUND).exp() for value in variables[:3])
    return Kernel(lengthscale, variance, noise.clamp(max=1e3) + _FLOOR)


def _initial(x: Tensor) -> Kernel:
    std = x.std(0, correction=0)
    lengthscale = torch.where(std > 0, std, torch.ones_like(std)) * math.sqrt(x.shape[1])
    return Kernel(lengthscale, torch.tensor(1.0, dtype=x.dtype), torch.tensor(0.1, dtype=x.dtype))


def _centers(x: Tensor, count: int, seed: int) -> Tensor:
    """Initial inducing points: all distinct inputs, or the centers of k-means."""
    distinct: Tensor = x.unique(dim=0)
    if count >= len(distinct):
        return distinct
    try:
        from sklearn.cluster import KMeans
    except ImportError as error:
        raise MissingDependency("inducing points need scikit-learn: pip install 'pippin[bayes]'") from error
    found = KMeans(count, n_init=1, max_iter=30, random_state=seed).fit(distinct.numpy())
    return torch.as_tensor(found.cluster_centers_, dtype=x.dtype)


def _cholesky(matrix: Tensor, size: Tensor) -> Tensor:
    """The Cholesky factor with the least jitter that makes the matrix positive definite.

    Raises:
        SingularPosterior: no jitter does.
    """
    for jitter in _JITTER:
        step = jitter * size.detach() * torch.eye(len(matrix), dtype=matrix.dtype)
        factor, failed = torch.linalg.cholesky_ex(matrix + step)
        if not int(failed):
            break
    else:
        raise SingularPosterior(
            f"a covariance of {len(matrix)} points is not positive definite even with a jitter of {_JITTER[-1]:g}; "
            "leave duplicates out, or begin with more noise"
        )
    found: Tensor = factor
    return found


def _check(x: Tensor, y: Tensor) -> None:
    if not len(x) or len(x) != len(y):
        raise InvalidInput(f"{len(x)} inputs for {len(y)} targets; give at least one, and equally many of both")
    wrong = ~(x.isfinite().all(1) & y.isfinite())
    if wrong.any():
        raise InvalidInput(f"row {int(wrong.nonzero()[0, 0])} holds values that are not finite; leave it out")
