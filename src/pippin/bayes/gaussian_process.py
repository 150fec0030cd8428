r"""Gaussian-process regression with one length scale for each input: exact, or through inducing points.

Notable here:
- targets are standardised inside, so that the prior is right for any unit; what comes out is in the user's
- with every input an inducing point the sparse bound is the exact evidence, which is how it is tested
- `conditioned` takes further points at fixed hyper-parameters: what a search does after each query

Source: Rasmussen and Williams, "Gaussian Processes for Machine Learning", algorithm 2.1 (exact); Titsias, "Variational
learning of inducing variables in sparse Gaussian processes", AISTATS 2009, eq. 9 (sparse).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from pippin.core.errors import InvalidArgument, InvalidInput, MissingDependency, NotFitted, SingularPosterior

_FLOOR = 1e-6  # of the noise variance, in units of the targets' variance
_JITTER = (0.0, 1e-10, 1e-8, 1e-6, 1e-4)  # of the kernel's variance, tried in turn
_BOUND = 8.0  # of the logarithms of hyper-parameters


@dataclass(frozen=True)
class Kernel:
    r"""$s^2 \exp(-\frac12 \sum_d (x_d - x'_d)^2 / \ell_d^2)$, and the variance of the noise.

    Attributes:
        lengthscale: $\ell$, in units of the inputs.
        variance: $s^2$, in units of the standardised targets.
        noise: variance of the noise, likewise.
    """

    lengthscale: Float[Tensor, " d"]
    variance: Float[Tensor, ""]
    noise: Float[Tensor, ""]

    def __call__(self, a: Float[Tensor, "n d"], b: Float[Tensor, "m d"]) -> Float[Tensor, "n m"]:
        """Covariances of noiseless values."""
        a, b = a / self.lengthscale, b / self.lengthscale
        # from the products, and not torch.cdist: its square root has no second derivative where two points agree
        squares = a.square().sum(-1)[:, None] + b.square().sum(-1) - 2 * a @ b.T
        return self.variance * (-0.5 * squares.clamp(min=0.0)).exp()


class GaussianProcess:
    """A zero-mean process over standardised targets.

    Args:
        inducing: points that stand for the data; None for the exact process, whose cost is cubic in the data.
        seed: of the choice of inducing points.

    Attributes:
        kernel: its hyper-parameters, after `fit`.
        evidence: log marginal likelihood of the standardised targets in nats (sparse: its lower bound).

    Raises:
        InvalidArgument: fewer than 1 inducing point.

    >>> x = torch.linspace(0, 6, 30)[:, None]
    >>> process = GaussianProcess().fit(x, x[:, 0].sin())
    >>> mean, variance = process.predict(torch.tensor([[1.5]]))
    >>> abs(float(mean) - math.sin(1.5)) < 0.01
    True
    """

    def __init__(self, inducing: int | None = None, *, seed: int = 0) -> None:
        if inducing is not None and inducing < 1:
            raise InvalidArgument(f"inducing is {inducing}; give 1 point or more, or None for the exact process")
        self.inducing, self.seed = inducing, seed
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
        iterations: int = 100,
    ) -> GaussianProcess:
        """Choose hyper-parameters by the evidence; inducing points are moved along in a second pass.

        Args:
            x: inputs.
            y: targets, in any unit.
            kernel: where to begin; None begins at the spread of the inputs.
            tune: False keeps ``kernel`` as it is.
            iterations: of L-BFGS at most, in each pass.

        Raises:
            InvalidInput: no points, lengths that differ, or numbers that are not finite; the row is named.
            SingularPosterior: a covariance that no jitter makes positive definite.
            MissingDependency: scikit-learn, which chooses inducing points, is not installed.
        """
        _check(x, y)
        self.x, raw = x.detach().double(), y.detach().double()
        self.shift = raw.mean()
        spread = raw.std(correction=0)
        self.scale = spread if float(spread) > 0 else torch.ones_like(spread)
        self.y = (raw - self.shift) / self.scale
        start = kernel or _initial(self.x)
        self._points = None if self.inducing is None else _centres(self.x, self.inducing, self.seed)
        passes = [False] if self._points is None else [False, True]
        for moving in passes if tune else []:
            start = self._tune(start, moving, iterations)
        self._factor(start)
        return self

    def _tune(self, start: Kernel, moving: bool, iterations: int) -> Kernel:
        """L-BFGS on the logarithms of the hyper-parameters, and on the inducing points where they move."""
        begun = [start.lengthscale.log(), start.variance.log(), (start.noise - _FLOOR).clamp(min=_FLOOR).log()]
        variables = [value.detach().clone().requires_grad_() for value in begun]
        if moving:
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
        if moving:
            assert self._points is not None
            self._points = self._points.detach()
        found = _kernel_of([value.detach() for value in variables])
        if not all(bool(value.isfinite().all()) for value in (found.lengthscale, found.variance, found.noise)):
            return start
        return found

    def _evidence(self, kernel: Kernel, points: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Log evidence (its bound, where points stand for the data), and the factors that predictions need."""
        n, y = len(self.x), self.y
        constant = -0.5 * n * math.log(2 * math.pi)
        if points is None:
            covariance = kernel(self.x, self.x) + kernel.noise * torch.eye(n, dtype=y.dtype)
            factor = _cholesky(covariance, kernel.variance)
            whitened = torch.linalg.solve_triangular(factor, y[:, None], upper=False)[:, 0]
            value = constant - 0.5 * whitened.square().sum() - factor.diagonal().log().sum()
            return value, (factor, whitened)
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

    def predict(self, x: Float[Tensor, "m d"]) -> tuple[Float[Tensor, " m"], Float[Tensor, " m"]]:
        """Mean and variance of the noiseless function, in the units of the targets; differentiable in ``x``.

        Raises:
            NotFitted: before `fit`.
            InvalidInput: inputs of another width.
        """
        if self.kernel is None:
            raise NotFitted("the process has seen no data; call fit first")
        if x.shape[1] != self.x.shape[1]:
            raise InvalidInput(f"inputs of {x.shape[1]} numbers; the process was fitted on {self.x.shape[1]}")
        kernel = self.kernel
        points = self.x if self._points is None else self._points
        cross = kernel(points, x.double())
        low = torch.linalg.solve_triangular(self._factors[0], cross, upper=False)
        if self._points is None:
            mean, variance = self._factors[1] @ low, kernel.variance - low.square().sum(0)
        else:
            _, outer, image = self._factors
            lower = torch.linalg.solve_triangular(outer, low, upper=False)
            mean = image @ lower
            variance = kernel.variance - low.square().sum(0) + lower.square().sum(0)
        return self.shift + self.scale * mean, self.scale.square() * variance.clamp(min=1e-12)

    @property
    def noise(self) -> float:
        """Variance of the noise in the squared units of the targets.

        Raises:
            NotFitted: before `fit`.
        """
        if self.kernel is None:
            raise NotFitted("the process has seen no data; call fit first")
        return float(self.kernel.noise * self.scale.square())

    def conditioned(self, x: Float[Tensor, "m d"], y: Float[Tensor, " m"]) -> GaussianProcess:
        """A process that has seen these points too; hyper-parameters, units and inducing points stay.

        Raises:
            NotFitted: before `fit`.
            InvalidInput: as `fit`.
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
    r"""How far $f \sim N(\mu, \sigma^2)$ is expected to exceed b: $\sigma\,(u \Phi(u) + \phi(u))$.

    Here $u = (\mu - b) / \sigma$.

    Source: Jones, Schonlau and Welch, "Efficient global optimization of expensive black-box functions", 1998, eq. 15.

    >>> round(float(expected_improvement(torch.zeros(1), torch.ones(1), 0.0)), 4)
    0.3989
    """
    spread = variance.sqrt()
    u = (mean - best) / spread
    density = (-0.5 * u.square()).exp() / math.sqrt(2 * math.pi)
    found: Tensor = spread * (u * torch.special.ndtr(u) + density)
    return found


def _kernel_of(variables: list[Tensor]) -> Kernel:
    lengthscale, variance, noise = (value.clamp(-_BOUND, _BOUND).exp() for value in variables[:3])
    return Kernel(lengthscale, variance, noise.clamp(max=1e3) + _FLOOR)


def _initial(x: Tensor) -> Kernel:
    spread = x.std(0, correction=0)
    lengthscale = torch.where(spread > 0, spread, torch.ones_like(spread)) * math.sqrt(x.shape[1])
    return Kernel(lengthscale, torch.tensor(1.0, dtype=x.dtype), torch.tensor(0.1, dtype=x.dtype))


def _centres(x: Tensor, count: int, seed: int) -> Tensor:
    """Inducing points to begin with: all the data, or the centres of k-means."""
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
    """A factor of the matrix with the least jitter that gives one.

    Raises:
        SingularPosterior: none does.
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
        raise InvalidInput(f"{len(x)} inputs for {len(y)} targets; give at least one, and as many of either")
    wrong = ~(x.isfinite().all(1) & y.isfinite())
    if wrong.any():
        raise InvalidInput(f"row {int(wrong.nonzero()[0, 0])} holds numbers that are not finite; leave it out")
