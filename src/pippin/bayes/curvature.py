r"""Curvatures: which matrix stands for the bend of the loss in the weights.

Notable here:
- GGN, empirical Fisher and sampled Fisher differ only in S, the square root of the curvature in the outputs: everything
  after it, from the rows $S^\top J$ to the Kronecker factors, is the same code
- the true Hessian has no such root; it is applied to vectors (a gradient of a gradient) and never needs the rows
- for a regression, S is in units of noise 1, and `noise_power` says how the noise scales it
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from pippin.bayes.likelihood import Likelihood
from pippin.core.errors import InvalidArgument


@runtime_checkable
class Curvature(Protocol):
    """Where the square root of the curvature in the outputs comes from; ``name`` is its word."""

    name: str
    noise_power: int

    def root(
        self, likelihood: Likelihood, f: Float[Tensor, "n c"], y: Shaped[Tensor, "n ..."]
    ) -> Float[Tensor, "n c r"]:
        """S [n, c, r]; the curvature is the sum of J^T S S^T J over the examples."""


@dataclass(frozen=True)
class GGN:
    r"""The generalised Gauss-Newton matrix, $\sum_n J_n^\top A_n J_n$ with A the Hessian of the loss in the outputs.

    Args:
        samples: None for the exact one; a number draws so many targets from the model for each example instead (the
            Fisher matrix by Monte Carlo), which costs one backward pass a sample and not one an output.
        seed: of those draws.

    Raises:
        InvalidArgument: fewer than one sample.

    Source: Daxberger et al. 2021, arXiv:2106.14806, section 3.2.
    """

    samples: int | None = None
    seed: int = 0
    name = "ggn"
    noise_power = 2
    _generators: dict[str, torch.Generator] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.samples is not None and self.samples < 1:
            raise InvalidArgument(f"samples is {self.samples}; give 1 or more, or None for the exact curvature")

    def restart(self) -> None:
        """Draw the same targets again, from the first batch on."""
        self._generators.clear()

    def root(
        self, likelihood: Likelihood, f: Float[Tensor, "n c"], y: Shaped[Tensor, "n ..."]
    ) -> Float[Tensor, "n c r"]:
        """The root of the loss's Hessian, exact or from samples."""
        if self.samples is None:
            exact: Tensor = likelihood.root(f)
            return exact
        key = str(f.device)
        if key not in self._generators:
            self._generators[key] = torch.Generator(f.device).manual_seed(self.seed)
        sampled: Tensor = likelihood.sampled(f, self.samples, self._generators[key])
        return sampled / math.sqrt(self.samples)


@dataclass(frozen=True)
class EF:
    r"""The empirical Fisher, $\sum_n g_n g_n^\top$ with g the gradient of the log-likelihood of example n.

    A column per example, so it is the cheapest. For a regression the gradient holds the noise twice, $r_n J_n /
    \sigma^2$, so that this matrix scales with $\sigma^{-4}$ where the others scale with $\sigma^{-2}$.

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
    """The true Hessian of the loss in the weights; for the structures Full and LowRank only.

    It need not be positive: where it is not and the prior does not make up for it, the posterior is refused. LowRank
    keeps its positive eigenvalues.
    """

    name = "hessian"
    noise_power = 2

    def root(
        self, likelihood: Likelihood, f: Float[Tensor, "n c"], y: Shaped[Tensor, "n ..."]
    ) -> Float[Tensor, "n c r"]:
        """There is none.

        Raises:
            InvalidArgument: always.
        """
        raise InvalidArgument("the Hessian has no root in the outputs; use the structure Full or LowRank")


def curvature(choice: str | Curvature) -> Curvature:
    """The curvature that a word or an object stands for: "ggn", "mc" (one sample), "ef", "hessian".

    Raises:
        InvalidArgument: an unknown word, or something that is no curvature.

    >>> curvature("mc").samples
    1
    """
    if isinstance(choice, str):
        known: dict[str, Curvature] = {"ggn": GGN(), "mc": GGN(samples=1), "ef": EF(), "hessian": Hessian()}
        if choice not in known:
            raise InvalidArgument(f"curvature is {choice!r}; choose one of ggn, mc, ef, hessian")
        return known[choice]
    if not isinstance(choice, Curvature):
        raise InvalidArgument(f"curvature must be a word or a curvature, got {type(choice).__name__}")
    return choice
