r"""Gaussian mixtures, of which every noised density is known exactly: the oracle of samplers and of composition.

Notable here:
- a noised mixture is a mixture: means $a\mu_k$, covariances $a^2\Sigma_k + s^2 I$; the mean of the data given a noised
  sample is in closed form, and with it every estimate
- covariances are taken apart once, so a sampler's steps cost matrix products only
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from pippin.core.errors import InvalidArgument
from pippin.generate.diffusion.prediction import Estimate
from pippin.generate.diffusion.samplers import Denoiser
from pippin.generate.diffusion.schedules import NoiseSchedule


class GaussianMixture:
    """A mixture of k normal distributions in d dimensions, in float64.

    Args:
        weights: k positive numbers; divided by their sum.
        means: k rows of d.
        covariances: k matrices of d by d, positive semidefinite (0 for points); or k variances, the same in each
            direction.

    Raises:
        InvalidArgument: sizes that do not agree, weights that are not positive, a covariance that is none.

    >>> one = GaussianMixture([1.0], [[2.0]], [0.25])
    >>> one.sample(100_000, seed=0).std().round(decimals=2)
    tensor(0.5000)
    """

    def __init__(
        self,
        weights: Sequence[float] | Tensor,
        means: Sequence[Sequence[float]] | Tensor,
        covariances: Sequence[float] | Tensor,
    ) -> None:
        self.weights = torch.as_tensor(weights, dtype=torch.float64)
        self.means = torch.as_tensor(means, dtype=torch.float64)
        given = torch.as_tensor(covariances, dtype=torch.float64)
        if self.means.ndim != 2 or self.weights.shape != self.means.shape[:1]:
            raise InvalidArgument(f"{tuple(self.weights.shape)} weights for means of shape {tuple(self.means.shape)}")
        count, dims = self.means.shape
        if given.ndim == 1:
            given = given[:, None, None] * torch.eye(dims, dtype=torch.float64)
        if given.shape != (count, dims, dims) or not bool((self.weights > 0).all()):
            raise InvalidArgument(
                f"covariances of shape {tuple(given.shape)} and weights {self.weights.tolist()} for {count} means in "
                f"{dims} dimensions; give a matrix and a positive weight for each"
            )
        if not torch.allclose(given, given.mT):
            raise InvalidArgument("a covariance is not symmetric")
        self.weights = self.weights / self.weights.sum()
        self.covariances = given
        values, self._axes = torch.linalg.eigh(given)
        if bool((values < -1e-9 * (1 + values.abs().amax())).any()):
            raise InvalidArgument(f"a covariance has the negative eigenvalue {float(values.min()):.3g}")
        self._values = values.clamp(min=0)

    @property
    def dim(self) -> int:
        """Elements of a sample."""
        return self.means.shape[1]

    def sample(self, n: int, *, seed: int = 0) -> Float[Tensor, "n dims"]:
        """Exact samples, float32."""
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.multinomial(self.weights, n, True, generator=generator)
        z = torch.randn(n, self.dim, generator=generator, dtype=torch.float64) * self._values[chosen].sqrt()
        turned = torch.einsum("nij,nj->ni", self._axes[chosen], z) if self.dim > 1 else z * self._axes[chosen, 0]
        return (self.means[chosen] + turned).float()

    def log_prob(self, x: Float[Tensor, "n ..."], a: float = 1.0, s: float = 0.0) -> Float[Tensor, n]:
        """The log-density of ``a`` times a sample plus noise of standard deviation ``s``, in nats; float64."""
        _, quadratic, spread = self._apart(x, a, s)
        each = -0.5 * (quadratic + spread.log().sum(-1) + self.dim * math.log(2 * math.pi))
        return (each + self.weights.log()).logsumexp(-1)

    def estimate(self, x: Float[Tensor, "n ..."], a: float, s: float) -> Estimate:
        r"""The exact means of data and noise given ``x = a x0 + s eps``; s above 0.

        $E[\epsilon \mid x, k] = s\,(a^2\Sigma_k + s^2 I)^{-1}(x - a\mu_k)$ and
        $E[x_0 \mid x, k] = \mu_k + a\,\Sigma_k (a^2\Sigma_k + s^2 I)^{-1}(x - a\mu_k)$, averaged over k given x.
        """
        turned, quadratic, spread = self._apart(x, a, s)
        posterior = (-0.5 * (quadratic + spread.log().sum(-1)) + self.weights.log()).softmax(-1)
        whitened = turned / spread * posterior[..., None]
        eps = s * torch.einsum("kij,nkj->ni", self._axes, whitened)
        x0 = posterior @ self.means + a * torch.einsum("kij,nkj->ni", self._axes, whitened * self._values)
        return Estimate(x0.view(x.shape).to(x.dtype), eps.view(x.shape).to(x.dtype))

    def _apart(self, x: Tensor, a: float, s: float) -> tuple[Tensor, Tensor, Tensor]:
        """Distances from each mean along its axes [n, k, d], their squares in units of the variances, the variances."""
        flat = x.flatten(1).double()
        if flat.shape[1] != self.dim:
            raise InvalidArgument(f"samples of shape {tuple(x.shape[1:])}; the mixture has {self.dim} dimensions")
        spread = a * a * self._values + s * s
        turned = torch.einsum("kij,nki->nkj", self._axes, flat[:, None] - a * self.means)
        return turned, (turned.square() / spread).sum(-1), spread


def exact_denoiser(mixture: GaussianMixture, schedule: NoiseSchedule) -> Denoiser:
    """What a perfect network would say of samples of a mixture."""
    return lambda x, t: mixture.estimate(x, schedule.a(t), schedule.s(t))
