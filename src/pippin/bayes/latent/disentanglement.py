r"""Objectives that train a variational autoencoder towards codes whose dimensions represent separate factors.

Notable here:
- two bases: beta-VAE weights the whole divergence from the prior, beta-TCVAE only its total correlation
- either can be combined with a geometric term on the encoder or the decoder: the Gromov-Monge gap, which is zero for
  the map that preserves distances or angles as well as both distributions allow, or the plain distortion, which is
  zero only if they are preserved exactly
- a term on the decoder compares sampled codes with decoded images, so both networks get gradients from it

Source: beta-VAE Higgins et al., ICLR 2017; beta-TCVAE Chen et al., arXiv:1802.04942, eq. 4; the gap arXiv:2407.07829.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pippin.bayes.latent.vae import VAE
from pippin.bayes.transport.gromov import Cost, distortion, gromov_monge_gap
from pippin.bayes.transport.gromov_solver import QUICK, GromovSolver
from pippin.core.checks import NonNegativeFloat, checked
from pippin.core.errors import InvalidArgument, InvalidInput
from pippin.train.objective import Loss


@checked
@dataclass(frozen=True)
class GeometricRegularizer:
    """A geometric regularization term beside the ELBO.

    Attributes:
        weight: weight of the term, in nats for each example and unit of squared cost.
        kind: "gap" for `gromov_monge_gap`, "distortion" for `distortion`, both of `pippin.bayes.transport.gromov`.
        apply: "decoder" compares sampled codes with decoded means, "encoder" compares examples with their mean codes.
        cost: angles ("cos"), distances up to scale ("scl2"), squared distances ("l2"), or a function for each side.
        solver: solver of the optimal-transport problem in the gap.
    """

    weight: NonNegativeFloat
    kind: Literal["gap", "distortion"] = "gap"
    apply: Literal["decoder", "encoder"] = "decoder"
    cost: Cost = "cos"
    solver: GromovSolver = QUICK

    def __call__(self, x: Float[Tensor, "n ..."], y: Float[Tensor, "n ..."]) -> Float[Tensor, ""]:
        """The unweighted term for points x and their images y under the map."""
        if self.kind == "distortion":
            return distortion(x, y, self.cost)
        return gromov_monge_gap(x, y, self.cost, solver=self.solver)


class DisentanglingElbo:
    r"""The negative ELBO of a `VAE` with a weighted divergence and a geometric term; an objective for the `Trainer`.

    With base "beta" the loss is $-\log p(x \mid z) + \beta\, \mathrm{KL} + \lambda\, G$; with base "tc" the divergence
    is split and only the total correlation is weighted: $\mathrm{MI} + \beta\, \mathrm{TC} + \sum_j \mathrm{KL}_j$.
    A batch is a tensor of examples, or a tuple that begins with it. Metrics per example: "reconstruction", "kl", and
    "total correlation" and "geometry" where they are used.

    Args:
        base: "beta" or "tc".
        beta: weight of the divergence, or of the total correlation.
        num_examples: size of the training set; required by "tc".
        geometry: the geometric term; None for none.

    Raises:
        InvalidArgument: "tc" without the number of examples.

    >>> from pippin.bayes.latent.vae import VAEConfig
    >>> vae = VAE(VAEConfig((4,), latent_dim=2, hidden_sizes=(8,)))
    >>> objective = DisentanglingElbo("tc", beta=4.0, num_examples=100, geometry=GeometricRegularizer(weight=1.0))
    >>> loss = objective(vae, torch.rand(6, 4), torch.Generator().manual_seed(0))
    >>> sorted(loss.metrics), loss.count
    (['geometry', 'kl', 'reconstruction', 'total correlation'], 6.0)
    """

    unit = "examples"

    @checked
    def __init__(
        self,
        base: Literal["beta", "tc"] = "beta",
        *,
        beta: NonNegativeFloat = 4.0,
        num_examples: int | None = None,
        geometry: GeometricRegularizer | None = None,
    ) -> None:
        if base == "tc" and (num_examples is None or num_examples < 1):
            raise InvalidArgument(f"num_examples is {num_examples}; base 'tc' needs the size of the training set")
        self.base, self.beta, self.examples, self.geometry = base, beta, num_examples, geometry

    def __call__(self, model: nn.Module, batch: Any, generator: torch.Generator) -> Loss:
        """The loss of a batch.

        Raises:
            InvalidInput: a batch of one example, where geometry or total correlation is asked for.
        """
        assert isinstance(model, VAE)
        x = batch[0] if isinstance(batch, tuple | list) else batch
        if len(x) < 2 and (self.base == "tc" or self.geometry is not None):
            raise InvalidInput(f"total correlation and geometry need at least 2 examples in a batch, got {len(x)}")
        mean, log_var = model.encode(x)
        noise = torch.randn(mean.shape, generator=generator, device=mean.device, dtype=mean.dtype)
        z = mean + (0.5 * log_var).exp() * noise
        logits = model.logits(z)
        reconstruction = -model.log_likelihood(x, logits)
        kl = 0.5 * (mean.square() + log_var.exp() - 1 - log_var).sum(-1)
        metrics = {"reconstruction": reconstruction.detach().sum(), "kl": kl.detach().sum()}
        if self.base == "beta":
            divergence = self.beta * kl
        else:
            assert self.examples is not None
            information, correlation, single = divergence_parts(z, mean, log_var, self.examples)
            divergence = information + self.beta * correlation + single
            metrics["total correlation"] = correlation.detach().sum()
        total = (reconstruction + divergence).sum()
        if self.geometry is not None:
            pair = (z, model.mean_of(logits)) if self.geometry.apply == "decoder" else (x, mean)
            term = self.geometry(*pair) * len(x)
            total = total + self.geometry.weight * term
            metrics["geometry"] = term.detach()
        return Loss(total, float(len(x)), metrics)


def divergence_parts(
    z: Float[Tensor, "n latent"],
    mean: Float[Tensor, "n latent"],
    log_var: Float[Tensor, "n latent"],
    examples: int,
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"], Float[Tensor, " n"]]:
    r"""Estimate mutual information, total correlation and dimension-wise KL divergence from one batch, in nats.

    $\log q(z_i)$ is estimated by $\log \sum_j q(z_i \mid x_j) - \log(n N)$ (minibatch-weighted sampling), and each
    dimension's marginal in the same way. The three sum to $\log q(z \mid x) - \log p(z)$ for each row.

    Args:
        z: sampled codes.
        mean: means of the Gaussians that they were sampled from.
        log_var: log variances of these Gaussians.
        examples: the size N of the training set.

    Source: arXiv:1802.04942, eq. 3 and its estimator (minibatch-weighted sampling, appendix C.1).
    """
    each = _log_density(z[:, None], mean[None], log_var[None])  # [n, n, latent]
    offset = math.log(len(z) * examples)
    own = _log_density(z, mean, log_var).sum(1)
    joint = each.sum(2).logsumexp(1) - offset
    product = (each.logsumexp(1) - offset).sum(1)
    prior = _log_density(z, torch.zeros_like(z), torch.zeros_like(z)).sum(1)
    return own - joint, joint - product, product - prior


def _log_density(z: Tensor, mean: Tensor, log_var: Tensor) -> Tensor:
    return -0.5 * (math.log(2 * math.pi) + log_var + (z - mean).square() * (-log_var).exp())
