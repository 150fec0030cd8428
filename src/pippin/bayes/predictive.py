r"""Predictives: what a Gaussian over outputs says of a class, and the object that every posterior answers with.

Notable here:
- covariances are of the model's function alone; the noise of a regression is added by `Prediction.variance`, once
- draws are independent between examples and come from the caller's generator, so a call with a seed can be repeated
- the bridge without normalisation is kept for comparison with the literature; probit is the default
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from pippin.bayes.likelihood import Likelihood
from pippin.core.errors import InvalidArgument, SingularPosterior

LINKS = ("probit", "mc", "bridge", "bridge_norm")


@dataclass(frozen=True)
class Prediction:
    """What a posterior predicts for some inputs.

    Attributes:
        mean: outputs (logits, rewards, real targets), [n, C].
        covariance: of the function, without the noise of a regression: [n, C, C]; [n C, n C] for a joint prediction,
            with index n C + c; None where there is none.
        probs: of classes or labels, [n, C]; None for a regression.
        noise: variance of the noise, in squared units of the targets; 0 for anything but a regression.
    """

    mean: Float[Tensor, "n c"]
    covariance: Float[Tensor, ...] | None = None
    probs: Float[Tensor, "n c"] | None = None
    noise: float = 0.0

    @property
    def variance(self) -> Float[Tensor, "n c"]:
        """Of a new target, [n, C]: the function's variance and the noise."""
        return self.function_variance + self.noise

    @property
    def function_variance(self) -> Float[Tensor, "n c"]:
        """Of the function alone, [n, C]; zero where there is no covariance."""
        if self.covariance is None:
            return torch.zeros_like(self.mean)
        if self.covariance.ndim == 2:
            return self.covariance.diagonal().reshape(self.mean.shape)
        return self.covariance.diagonal(dim1=-2, dim2=-1)


def link(
    likelihood: Likelihood,
    mean: Float[Tensor, "n c"],
    covariance: Float[Tensor, "n c c"],
    how: str = "probit",
    *,
    samples: int = 100,
    generator: torch.Generator | None = None,
) -> Float[Tensor, "n c"]:
    r"""Probabilities of classes or labels under Gaussian outputs $f \sim N(\mu, \Sigma)$.

    - "probit": softmax of $\mu_c / \sqrt{1 + \pi \Sigma_{cc} / 8}$; for a pair the sigmoid of
      the difference, and for a label of its logit, over the same root with its variance.
    - "mc": the mean over draws of f.
    - "bridge": the Laplace bridge to a Dirichlet, $\alpha_c = (1 - 2/C + e^{\mu_c} C^{-2} \sum_l e^{-\mu_l}) /
      \Sigma_{cc}$ after conditioning on outputs that sum to 0.
    - "bridge_norm": the same after dividing $\mu$ by $\sqrt k$ and $\Sigma$ by k, the mean variance over $\sqrt{C/2}$.

    Args:
        likelihood: of classes, labels or pairs.
        mean: outputs.
        covariance: theirs.
        how: the rule.
        samples: of the rule "mc".
        generator: of those; None takes one with seed 0.

    Raises:
        InvalidArgument: an unknown rule, fewer than one sample, or a rule that the likelihood does not have.

    Source: MacKay 1992 (probit); Hobbhahn et al. 2022, arXiv:2003.01227 (bridge); Daxberger et al. 2021, appendix B.
    """
    check_link(likelihood, how, samples)
    labels = likelihood.name == "multi_label"
    if how == "mc":
        return _monte_carlo(mean, covariance, labels, samples, generator)
    if how == "probit":
        return _probit(mean, covariance, likelihood.name)
    return _bridge(mean, covariance, normalise=how == "bridge_norm")


def check_link(likelihood: Likelihood, how: str, samples: int) -> None:
    """See that a rule exists for a likelihood.

    Raises:
        InvalidArgument: it does not, or fewer than one sample is asked for.
    """
    if how not in LINKS:
        raise InvalidArgument(f"link is {how!r}; choose one of {', '.join(LINKS)}")
    if samples < 1:
        raise InvalidArgument(f"samples is {samples}; give 1 or more")
    if likelihood.name == "multi_label" and how.startswith("bridge"):
        raise InvalidArgument("the bridge is for classes, not for labels; use link='probit' or 'mc'")


def draws(
    mean: Float[Tensor, "n c"],
    covariance: Float[Tensor, ...],
    samples: int,
    generator: torch.Generator | None = None,
) -> Float[Tensor, "samples n c"]:
    """Draws of outputs from their Gaussian, joint over the batch where the covariance is.

    Args:
        mean: outputs.
        covariance: [n, C, C], independent examples, or [n C, n C], joint ones.
        samples: how many.
        generator: None takes one with seed 0.

    Raises:
        SingularPosterior: the covariance is not positive semi-definite, or not finite.
    """
    generator = torch.Generator(mean.device).manual_seed(0) if generator is None else generator
    root = semidefinite_root(covariance)
    noise = torch.randn(samples, *mean.shape, generator=generator, dtype=mean.dtype, device=mean.device)
    if covariance.ndim == 2:
        return mean + (noise.flatten(1) @ root.T).view(samples, *mean.shape)
    return mean + torch.einsum("ncd,snd->snc", root, noise)


def semidefinite_root(covariance: Float[Tensor, "*n c c"]) -> Float[Tensor, "*n c c"]:
    """R with R R^T the covariance, which may be singular: Cholesky where it goes, else from the eigenvectors.

    Raises:
        SingularPosterior: it is not finite, or has an eigenvalue that is clearly negative.
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


def _monte_carlo(
    mean: Tensor, covariance: Tensor, labels: bool, samples: int, generator: torch.Generator | None
) -> Tensor:
    f = draws(mean, covariance, samples, generator)
    return (f.sigmoid() if labels else f.softmax(-1)).mean(0)


def _probit(mean: Tensor, covariance: Tensor, name: str) -> Tensor:
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    if name == "multi_label":
        return (mean / (1 + math.pi / 8 * variance).sqrt()).sigmoid()
    if name == "reward_model":
        spread = variance.sum(-1) - 2 * covariance[:, 0, 1]
        p = ((mean[:, 0] - mean[:, 1]) / (1 + math.pi / 8 * spread).sqrt()).sigmoid()
        return torch.stack([p, 1 - p], -1)
    return (mean / (1 + math.pi / 8 * variance).sqrt()).softmax(-1)


def _bridge(mean: Tensor, covariance: Tensor, normalise: bool) -> Tensor:
    row = covariance.sum(-1)
    total = row.sum(-1, keepdim=True)
    mean = mean - row * mean.sum(-1, keepdim=True) / total
    variance = (covariance - row[:, :, None] * row[:, None, :] / total[..., None]).diagonal(dim1=-2, dim2=-1)
    classes = mean.shape[1]
    if normalise:
        scale = variance.mean(-1, keepdim=True) / math.sqrt(classes / 2)
        mean, variance = mean / scale.sqrt(), variance / scale
    alpha = (1 - 2 / classes + mean.exp() * (-mean).exp().sum(-1, keepdim=True) / classes**2) / variance
    return alpha / alpha.sum(-1, keepdim=True)
