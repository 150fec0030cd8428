r"""Curvatures: the matrix that approximates the Hessian of the loss in the weights.

Notable here:
- GGN, empirical Fisher and sampled Fisher differ only in S, the square root of the curvature in the outputs; everything
  after it, from the rows $S^\top J$ to the Kronecker factors, is the same code
- the true Hessian has no such root; it is only applied to vectors (a gradient of a gradient)
- for a regression, S is at noise 1, and the curvature scales with the noise to the power of ``-noise_power``
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from pippin.bayes.likelihood import Likelihood
from pippin.core.checks import PositiveInt, checked
from pippin.core.errors import InvalidArgument


@runtime_checkable
class Curvature(Protocol):
    """A choice of curvature, given by the square root S of the curvature in the outputs."""

    name: str
    noise_power: int

    def root(
        self, likelihood: Likelihood, f: Float[Tensor, "n c"], y: Shaped[Tensor, "n ..."]
    ) -> Float[Tensor, "n c r"]:
        """S [n, c, r]; the curvature is the sum of J^T S S^T J over the examples."""


@checked
@dataclass(frozen=True)
class GGN:
    r"""The generalized Gauss-Newton matrix, $\sum_n J_n^\top A_n J_n$ with A the Hessian of the loss in the outputs.

    Args:
        num_samples: None for the exact matrix; otherwise the number of targets sampled from the model for each example
            (the Fisher matrix by Monte Carlo), which costs one backward pass per sample instead of one per output.
        seed: seed of these samples.

    Source: Daxberger et al. 2021, arXiv:2106.14806, section 3.2.
    """

    num_samples: PositiveInt | None = None
    seed: int = 0
    name = "ggn"
    noise_power = 2
    _generators: dict[str, torch.Generator] = field(default_factory=dict, repr=False, compare=False)

    def restart(self) -> None:
        """Start over, so that the next pass over the data samples the same targets."""
        self._generators.clear()

    def root(
        self, likelihood: Likelihood, f: Float[Tensor, "n c"], y: Shaped[Tensor, "n ..."]
    ) -> Float[Tensor, "n c r"]:
        """The root of the loss's Hessian, exact or from samples."""
        if self.num_samples is None:
            exact: Tensor = likelihood.root(f)
            return exact
        key = str(f.device)
        if key not in self._generators:
            self._generators[key] = torch.Generator(f.device).manual_seed(self.seed)
        sampled: Tensor = likelihood.sampled(f, self.num_samples, self._generators[key])
        return sampled / math.sqrt(self.num_samples)


@dataclass(frozen=True)
class EF:
    r"""The empirical Fisher, $\sum_n g_n g_n^\top$ with g the gradient of the log-likelihood of example n.

    It has one column per example and is therefore the cheapest. For a regression the gradient is $r_n J_n / \sigma^2$,
    so this matrix scales with $\sigma^{-4}$ where the others scale with $\sigma^{-2}$.

    Source: Daxberger et al. 2021, arXiv:2106.14806, section 3.2; Kunstner et al. 2019, arXiv:1905.12558, eq. 3.
    """

    name = "ef"
    noise_power = 4

    def root(
        self, likelihood: Likelihood, f: Float[Tensor, "n c"], y: Shaped[Tensor, "n ..."]
    ) -> Float[Tensor, "n c r"]:
        """The residual, as one column."""
        return likelihood.residual(f, y)[..., None]


@dataclass(frozen=True)
class Hessian:
    """The true Hessian of the loss in the weights; only for the structures Full and LowRank.

    It may be indefinite: if the prior does not make the precision positive definite, the posterior raises
    SingularPosterior. LowRank uses the positive eigenvalues only.
    """

    name = "hessian"
    noise_power = 2

    def root(
        self, likelihood: Likelihood, f: Float[Tensor, "n c"], y: Shaped[Tensor, "n ..."]
    ) -> Float[Tensor, "n c r"]:
        """Not available: the Hessian in the weights has no root in the outputs.

        Raises:
            InvalidArgument: always.
        """
        raise InvalidArgument("the Hessian has no root in the outputs; use the structure Full or LowRank")


CurvatureName = Literal["ggn", "mc", "ef", "hessian"]


@checked
def to_curvature(curvature: CurvatureName | Curvature) -> Curvature:
    """A curvature by its name ("mc" is a GGN from one sample); an object is returned unchanged.

    Raises:
        InvalidArgument: an unknown name, or an object that is not a curvature.

    >>> to_curvature("mc").num_samples
    1
    """
    if isinstance(curvature, str):
        known: dict[str, Curvature] = {"ggn": GGN(), "mc": GGN(num_samples=1), "ef": EF(), "hessian": Hessian()}
        return known[curvature]
    if not isinstance(curvature, Curvature):
        raise InvalidArgument(f"curvature must be a name or a Curvature, got {type(curvature).__name__}")
    return curvature
