r"""Objectives that ask a variational autoencoder for codes whose dimensions stand for separate factors.

Notable here:
- two bases: beta-VAE weighs the whole divergence from the prior, beta-TCVAE only its total correlation
- beside either, a geometric term on the encoder or the decoder: the Gromov-Monge gap, which wants distances or angles
  kept as far as both distributions allow, or the plain distortion, which wants them kept at any cost
- a term on the decoder sees codes as they were drawn and pictures as they are decoded, so both halves learn from it

Source: beta-VAE Higgins et al., ICLR 2017; beta-TCVAE Chen et al., arXiv:1802.04942, eq. 4; the gap arXiv:2407.07829.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pippin.bayes.gromov import Cost, distortion, gromov_monge_gap
from pippin.bayes.gromov_plans import QUICK, Solver
from pippin.bayes.vae import VAE
from pippin.core.errors import InvalidArgument, InvalidInput
from pippin.train.objective import Loss


@dataclass(frozen=True)
class Geometry:
    """A geometric term beside the bound.

    Attributes:
        weight: of the term, in nats for each example and unit of cost squared.
        kind: "gap" for `pippin.bayes.gromov.gromov_monge_gap`, "distortion" for `pippin.bayes.gromov.distortion`.
        apply: "decoder" compares drawn codes with what is decoded from them, "encoder" examples with their mean codes.
        cost: angles ("cos"), distances up to scale ("scl2"), squared distances ("l2"), or a function for each side.
        solver: of the gap.

    Raises:
        InvalidArgument: a negative weight, or an unknown word.
    """

    weight: float
    kind: Literal["gap", "distortion"] = "gap"
    apply: Literal["decoder", "encoder"] = "decoder"
    cost: Cost = "cos"
    solver: Solver = QUICK

    def __post_init__(self) -> None:
        if not 0.0 <= self.weight < math.inf:
            raise InvalidArgument(f"weight is {self.weight}; give a number of 0 or more")
        if self.kind not in ("gap", "distortion") or self.apply not in ("decoder", "encoder"):
            raise InvalidArgument(
                f"kind {self.kind!r} and apply {self.apply!r}; choose gap or distortion, on decoder or encoder"
            )
        if isinstance(self.cost, str) and self.cost not in ("l2", "scl2", "cos"):
            raise InvalidArgument(f"cost {self.cost!r} is none of 'l2', 'scl2', 'cos'; or give two functions")

    def __call__(self, x: Float[Tensor, "n ..."], y: Float[Tensor, "n ..."]) -> Float[Tensor, ""]:
        """The unweighted term of points and their images."""
        if self.kind == "distortion":
            return distortion(x, y, self.cost)
        return gromov_monge_gap(x, y, self.cost, solver=self.solver)


class DisentanglingElbo:
    r"""The negative bound of a `VAE` with a heavier prior and a geometric term; an objective for the `Trainer`.

    With base "beta" the loss is $-\log p(x \mid z) + \beta\, \mathrm{KL} + \lambda\, G$; with base "tc" the divergence
    is split and only the total correlation is multiplied: $\mathrm{MI} + \beta\, \mathrm{TC} + \sum_j \mathrm{KL}_j$.
    A batch is a tensor of examples or a tuple that begins with it. Metrics, for each example: "reconstruction", "kl",
    and "total correlation" and "geometry" where there are such.

    Args:
        base: "beta" or "tc".
        beta: of the divergence, or of the total correlation.
        examples: how many the whole training set holds; needed by "tc".
        geometry: the further term.

    Raises:
        InvalidArgument: an unknown base, a negative beta, or "tc" without the number of examples.

    >>> from pippin.bayes.vae import VAEConfig
    >>> vae = VAE(VAEConfig((4,), latent=2, hidden=(8,)))
    >>> objective = DisentanglingElbo("tc", beta=4.0, examples=100, geometry=Geometry(weight=1.0))
    >>> loss = objective(vae, torch.rand(6, 4), torch.Generator().manual_seed(0))
    >>> sorted(loss.metrics), loss.count
    (['geometry', 'kl', 'reconstruction', 'total correlation'], 6.0)
    """

    unit = "examples"

    def __init__(
        self,
        base: Literal["beta", "tc"] = "beta",
        *,
        beta: float = 4.0,
        examples: int | None = None,
        geometry: Geometry | None = None,
    ) -> None:
        if base not in ("beta", "tc"):
            raise InvalidArgument(f"base {base!r} is neither 'beta' nor 'tc'")
        if not 0.0 <= beta < math.inf:
            raise InvalidArgument(f"beta is {beta}; give a number of 0 or more")
        if base == "tc" and (examples is None or examples < 1):
            raise InvalidArgument(f"examples is {examples}; base 'tc' needs the size of the training set")
        self.base, self.beta, self.examples, self.geometry = base, beta, examples, geometry

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
        missed = -model.log_likelihood(x, logits)
        kl = 0.5 * (mean.square() + log_var.exp() - 1 - log_var).sum(-1)
        metrics = {"reconstruction": missed.detach().sum(), "kl": kl.detach().sum()}
        if self.base == "beta":
            divergence = self.beta * kl
        else:
            assert self.examples is not None
            information, correlation, single = divergence_parts(z, mean, log_var, self.examples)
            divergence = information + self.beta * correlation + single
            metrics["total correlation"] = correlation.detach().sum()
        total = (missed + divergence).sum()
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
    r"""Mutual information, total correlation and dimension-wise divergence: estimates from one batch.

    $\log q(z_i)$ is estimated by $\log \sum_j q(z_i \mid x_j) - \log(n N)$ (minibatch-weighted sampling), and in each
    dimension alike. The three sum to $\log q(z \mid x) - \log p(z)$ for each row, whatever the batch.

    Args:
        z: drawn codes.
        mean: of the Gaussians they were drawn from.
        log_var: of those.
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
