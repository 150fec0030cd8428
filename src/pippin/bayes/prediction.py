r"""Predictive distributions: class probabilities under a Gaussian over outputs, and what every predictor returns.

Notable here:
- covariances are those of the function alone; `Prediction.variance` adds the noise of a regression
- samples are independent between examples and come from the caller's generator, so that they can be reproduced
- the Laplace bridge without normalization is there for comparison with the literature; probit is the default
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from pippin.bayes.likelihood import Likelihood
from pippin.core.checks import PositiveInt, checked
from pippin.core.errors import InvalidArgument, SingularPosterior

Link = Literal["probit", "mc", "bridge", "bridge_norm"]


@dataclass(frozen=True)
class Prediction:
    """The prediction for a batch of n inputs.

    Attributes:
        mean: mean outputs (logits, rewards, real targets), [n, C].
        covariance: covariance of the function, without the noise of a regression: [n, C, C], or for a joint prediction
            [n C, n C] with index n C + c; None for a predictor without a distribution over functions.
        probs: probabilities of classes or labels, [n, C]; None for a regression.
        noise: variance of the noise, in squared units of the targets; 0 for anything but a regression.
    """

    mean: Float[Tensor, "n c"]
    covariance: Float[Tensor, ...] | None = None
    probs: Float[Tensor, "n c"] | None = None
    noise: float = 0.0

    @property
    def variance(self) -> Float[Tensor, "n c"]:
        """Variance of a new target, [n, C]: the function's variance plus the noise."""
        return self.function_variance + self.noise

    @property
    def function_variance(self) -> Float[Tensor, "n c"]:
        """Variance of the function alone, [n, C]; zero where there is no covariance."""
        if self.covariance is None:
            return torch.zeros_like(self.mean)
        if self.covariance.ndim == 2:
            return self.covariance.diagonal().reshape(self.mean.shape)
        return self.covariance.diagonal(dim1=-2, dim2=-1)

    def interval(self, level: float = 0.95) -> tuple[Float[Tensor, "n c"], Float[Tensor, "n c"]]:
        """The central interval that has a new target of a regression with this probability, if it is Gaussian.

        For intervals that need no Gaussian, see `pippin.bayes.ConformalPredictor`.

        Args:
            level: the probability, above 0 and below 1.

        Returns:
            The lower and the upper ends, [n, C] each.

        Raises:
            InvalidArgument: a level outside (0, 1), or a prediction of classes.

        >>> low, high = Prediction(torch.zeros(1, 1), noise=1.0).interval(0.95)
        >>> round(high.item(), 2), low.item() == -high.item()
        (1.96, True)
        """
        check_level(level)
        if self.probs is not None:
            raise InvalidArgument("classes have probabilities, not intervals; intervals are for regressions")
        half = NormalDist().inv_cdf((1 + level) / 2) * self.variance.sqrt()
        return self.mean - half, self.mean + half


def check_level(level: float) -> None:
    """Check the probability of an interval.

    Raises:
        InvalidArgument: it is not above 0 and below 1.
    """
    if not 0 < level < 1:
        raise InvalidArgument(f"level must be above 0 and below 1, got {level}")


@checked
def apply_link(
    likelihood: Likelihood,
    mean: Float[Tensor, "n c"],
    covariance: Float[Tensor, "n c c"],
    link_approx: Link = "probit",
    *,
    num_samples: PositiveInt = 100,
    generator: torch.Generator | None = None,
) -> Float[Tensor, "n c"]:
    r"""Probabilities of classes or labels under Gaussian outputs $f \sim N(\mu, \Sigma)$.

    - "probit": softmax of $\mu_c / \sqrt{1 + \pi \Sigma_{cc} / 8}$; for a pair, the sigmoid of the difference with the
      variance of the difference; for a label, the sigmoid of its logit with its variance.
    - "mc": the mean over samples of f.
    - "bridge": the Laplace bridge to a Dirichlet, $\alpha_c = (1 - 2/C + e^{\mu_c} C^{-2} \sum_l e^{-\mu_l}) /
      \Sigma_{cc}$ after conditioning on outputs that sum to 0.
    - "bridge_norm": the same after dividing $\mu$ by $\sqrt k$ and $\Sigma$ by k, the mean variance over $\sqrt{C/2}$.

    Args:
        likelihood: a likelihood of classes, labels or pairs.
        mean: means $\mu$ of the outputs.
        covariance: covariances $\Sigma$ of the outputs.
        link_approx: the approximation.
        num_samples: number of samples for "mc".
        generator: source of randomness for "mc"; None takes one with seed 0.

    Raises:
        InvalidArgument: an approximation that does not exist for the likelihood.

    Source: MacKay 1992 (probit); Hobbhahn et al. 2022, arXiv:2003.01227 (bridge); Daxberger et al. 2021, appendix B.
    """
    check_link(likelihood, link_approx)
    if link_approx == "mc":
        f = sample_outputs(mean, covariance, num_samples, generator)
        return (f.sigmoid() if likelihood.name == "multi_label" else f.softmax(-1)).mean(0)
    if link_approx == "probit":
        return _probit(mean, covariance, likelihood.name)
    return _bridge(mean, covariance, normalize=link_approx == "bridge_norm")


def check_link(likelihood: Likelihood, link_approx: str) -> None:
    """Check that a link approximation exists for a likelihood.

    Raises:
        InvalidArgument: it does not.
    """
    if likelihood.name == "multi_label" and link_approx.startswith("bridge"):
        raise InvalidArgument("the bridge is for classes, not for labels; use link_approx='probit' or 'mc'")


def sample_outputs(
    mean: Float[Tensor, "n c"],
    covariance: Float[Tensor, ...],
    num_samples: int,
    generator: torch.Generator | None = None,
) -> Float[Tensor, "samples n c"]:
    """Sample outputs from their Gaussian, jointly over the batch if the covariance is joint.

    Args:
        mean: means of the outputs.
        covariance: [n, C, C] for independent examples, or [n C, n C] for a joint distribution.
        num_samples: number of samples.
        generator: source of randomness; None takes one with seed 0.

    Raises:
        SingularPosterior: the covariance is not positive semi-definite, or not finite.
    """
    generator = torch.Generator(mean.device).manual_seed(0) if generator is None else generator
    root = semidefinite_root(covariance)
    noise = torch.randn(num_samples, *mean.shape, generator=generator, dtype=mean.dtype, device=mean.device)
    if covariance.ndim == 2:
        return mean + (noise.flatten(1) @ root.T).view(num_samples, *mean.shape)
    return mean + torch.einsum("ncd,snd->snc", root, noise)


def semidefinite_root(covariance: Float[Tensor, "*n c c"]) -> Float[Tensor, "*n c c"]:
    """A factor R with R R^T the covariance: the Cholesky factor, or one from eigenvectors if the matrix is singular.

    Raises:
        SingularPosterior: the covariance is not finite, or has an eigenvalue that is clearly negative.
    """
    if not covariance.isfinite().all():
        raise SingularPosterior("a predictive covariance is not finite; raise the prior precision")
    root, info = torch.linalg.cholesky_ex(covariance)
    if not info.any():
        result: Tensor = root
        return result
    values, vectors = torch.linalg.eigh(covariance)
    if (values[..., 0] < -1e-3 * values[..., -1].abs().clamp_min(1e-6)).any():
        raise SingularPosterior(f"a predictive covariance has the eigenvalue {values.min().item():g}")
    result = vectors * values.clamp_min(0).sqrt()[..., None, :]
    return result


def _probit(mean: Tensor, covariance: Tensor, name: str) -> Tensor:
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    if name == "multi_label":
        return (mean / (1 + math.pi / 8 * variance).sqrt()).sigmoid()
    if name == "reward_model":
        difference = variance.sum(-1) - 2 * covariance[:, 0, 1]  # variance of f_0 - f_1
        p = ((mean[:, 0] - mean[:, 1]) / (1 + math.pi / 8 * difference).sqrt()).sigmoid()
        return torch.stack([p, 1 - p], -1)
    return (mean / (1 + math.pi / 8 * variance).sqrt()).softmax(-1)


def _bridge(mean: Tensor, covariance: Tensor, normalize: bool) -> Tensor:
    # condition the Gaussian on outputs that sum to 0
    row = covariance.sum(-1)
    total = row.sum(-1, keepdim=True)
    mean = mean - row * mean.sum(-1, keepdim=True) / total
    variance = (covariance - row[:, :, None] * row[:, None, :] / total[..., None]).diagonal(dim1=-2, dim2=-1)
    classes = mean.shape[1]
    if normalize:
        scale = variance.mean(-1, keepdim=True) / math.sqrt(classes / 2)
        mean, variance = mean / scale.sqrt(), variance / scale
    alpha = (1 - 2 / classes + mean.exp() * (-mean).exp().sum(-1, keepdim=True) / classes**2) / variance
    return alpha / alpha.sum(-1, keepdim=True)
