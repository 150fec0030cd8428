r"""Gaussian mixtures, whose noised densities and scores are exact: an oracle for samplers and composition.

Notable here:
- a noised mixture is a mixture with means $a\mu_k$ and covariances $a^2\Sigma_k + s^2 I$; the posterior means of data
  and noise given a noised sample have a closed form
- covariances are decomposed once, so a sampler's steps cost matrix products only
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
        weights: (k,), positive; divided by their sum.
        means: (k, d).
        covariances: (k, d, d), positive semidefinite (zero for points); or (k,), variances of isotropic components.

    Raises:
        InvalidArgument: shapes that do not agree, weights that are not positive, or covariances that are not symmetric
            and positive semidefinite.

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
        sigma = torch.as_tensor(covariances, dtype=torch.float64)
        if self.means.ndim != 2 or self.weights.shape != self.means.shape[:1]:
            raise InvalidArgument(
                f"{tuple(self.weights.shape)} weights for means of shape {tuple(self.means.shape)}; give (k,), (k, d)"
            )
        count, dims = self.means.shape
        if sigma.ndim == 1:  # isotropic: (k,) to (k, d, d)
            sigma = sigma[:, None, None] * torch.eye(dims, dtype=torch.float64)
        if sigma.shape != (count, dims, dims) or not bool((self.weights > 0).all()):
            raise InvalidArgument(
                f"covariances of shape {tuple(sigma.shape)} and weights {self.weights.tolist()} for {count} means in "
                f"{dims} dimensions; give a matrix and a positive weight for each"
            )
        if not torch.allclose(sigma, sigma.mT):
            raise InvalidArgument("a covariance is not symmetric")
        self.weights = self.weights / self.weights.sum()
        self.covariances = sigma
        eigenvalues, self._eigenvectors = torch.linalg.eigh(sigma)  # (k, d), (k, d, d)
        if bool((eigenvalues < -1e-9 * (1 + eigenvalues.abs().amax())).any()):
            raise InvalidArgument(f"a covariance has the negative eigenvalue {float(eigenvalues.min()):.3g}")
        self._eigenvalues = eigenvalues.clamp(min=0)

    @property
    def dim(self) -> int:
        """Dimension of a sample."""
        return self.means.shape[1]

    def sample(self, n: int, *, seed: int = 0) -> Float[Tensor, "n dims"]:
        """Exact samples, float32."""
        generator = torch.Generator().manual_seed(seed)
        k = torch.multinomial(self.weights, n, True, generator=generator)  # component of each sample
        z = torch.randn(n, self.dim, generator=generator, dtype=torch.float64) * self._eigenvalues[k].sqrt()
        deviation = (
            torch.einsum("nij,nj->ni", self._eigenvectors[k], z) if self.dim > 1 else z * self._eigenvectors[k, 0]
        )
        return (self.means[k] + deviation).float()

    def log_prob(self, x: Float[Tensor, "n ..."], a: float = 1.0, s: float = 0.0) -> Float[Tensor, n]:
        """Log density of ``a`` times a sample plus noise of standard deviation ``s``, in nats; float64."""
        _, quadratic, variance = self._decompose(x, a, s)
        log_density = -0.5 * (quadratic + variance.log().sum(-1) + self.dim * math.log(2 * math.pi))  # (n, k)
        return (log_density + self.weights.log()).logsumexp(-1)

    def estimate(self, x: Float[Tensor, "n ..."], a: float, s: float) -> Estimate:
        r"""The exact posterior means of data and noise given ``x = a x0 + s eps``; s above 0.

        $E[\epsilon \mid x, k] = s\,(a^2\Sigma_k + s^2 I)^{-1}(x - a\mu_k)$ and
        $E[x_0 \mid x, k] = \mu_k + a\,\Sigma_k (a^2\Sigma_k + s^2 I)^{-1}(x - a\mu_k)$, averaged over k given x.
        """
        deviation, quadratic, variance = self._decompose(x, a, s)
        posterior = (-0.5 * (quadratic + variance.log().sum(-1)) + self.weights.log()).softmax(-1)  # (n, k)
        weighted = deviation / variance * posterior[..., None]  # (n, k, d)
        eps = s * torch.einsum("kij,nkj->ni", self._eigenvectors, weighted)
        x0 = posterior @ self.means + a * torch.einsum("kij,nkj->ni", self._eigenvectors, weighted * self._eigenvalues)
        return Estimate(x0.view(x.shape).to(x.dtype), eps.view(x.shape).to(x.dtype))

    def _decompose(self, x: Tensor, a: float, s: float) -> tuple[Tensor, Tensor, Tensor]:
        """Samples in the eigenbasis of each noised component.

        Returns:
            Deviations from each mean (n, k, d), squared Mahalanobis distances (n, k), and variances (k, d).
        """
        flat = x.flatten(1).double()
        if flat.shape[1] != self.dim:
            raise InvalidArgument(f"samples of shape {tuple(x.shape[1:])}; the mixture has {self.dim} dimensions")
        variance = a * a * self._eigenvalues + s * s
        deviation = torch.einsum("kij,nki->nkj", self._eigenvectors, flat[:, None] - a * self.means)
        return deviation, (deviation.square() / variance).sum(-1), variance


def exact_denoiser(mixture: GaussianMixture, schedule: NoiseSchedule) -> Denoiser:
    """The optimal denoiser for samples of a mixture."""
    return lambda x, t: mixture.estimate(x, schedule.a(t), schedule.s(t))
