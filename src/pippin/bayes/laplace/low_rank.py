r"""Low-rank curvature: the largest eigenvalues and their eigenvectors, from passes over the data.

Notable here:
- subspace iteration: each pass multiplies a random block of vectors by the curvature and orthogonalizes it; the last
  pass gives the eigenvalues by the Rayleigh-Ritz method. It is exact if the rank suffices
- the posterior uses the Woodbury identity with the factor R [k, P] of $P = s R^\top R + D$: only k x k matrices are
  factorized; `pippin.bayes.laplace.functional` uses the same code
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge
from jaxtyping import Float
from torch import Tensor

from pippin.bayes.laplace import memory_check
from pippin.bayes.laplace.structure import (
    CurvatureBatch,
    Product,
    check_finite,
    check_positive,
    is_scalar,
    to_float64,
    weighted_gram,
)
from pippin.bayes.weight_subset import Selection
from pippin.core.checks import NonNegativeInt, PositiveInt, checked
from pippin.core.errors import SingularPosterior


@checked
@dataclass(frozen=True)
class LowRank:
    """The largest eigenvalues of the curvature; all other directions have the prior's precision.

    Args:
        rank: largest number of eigenvalues.
        oversample: additional vectors in the subspace iteration, for accuracy.
        passes: number of passes over the data, at least 2; each reduces the error of an eigenvalue by the square of the
            ratio of the largest discarded eigenvalue to it.
        seed: seed of the random block.
    """

    rank: PositiveInt = 50
    oversample: NonNegativeInt = 10
    passes: Annotated[int, Ge(2)] = 4
    seed: int = 0
    name = "lowrank"
    hessian = True

    def start(self, selection: Selection, like: Tensor) -> LowRankState:
        """A random block of vectors.

        Raises:
            NotEnoughMemory: three blocks of (rank + oversample) x P elements do not fit.
        """
        columns = min(selection.size, self.rank + self.oversample)
        need = 3 * columns * selection.size * like.element_size()
        memory_check.require_memory(
            need, like.device, f"rank {self.rank} over {selection.size:,} weights", "lower the rank"
        )
        return LowRankState(self, selection.size, columns, like)


class LowRankState:
    """The factor R [k, P] of the curvature so far, H = R^T R, and the block that is being multiplied."""

    def __init__(self, structure: LowRank, size: int, columns: int, like: Tensor) -> None:
        self._structure, self._size, self._columns, self._like = structure, size, columns, like.new_empty(0)
        self.factor = like.new_zeros(0, size)
        self._old = self.factor
        self._values: Tensor | None = None
        self._restart()

    def _restart(self) -> None:
        """Sample a new random block and start over."""
        generator = torch.Generator().manual_seed(self._structure.seed)
        block = torch.randn(self._size, self._columns, generator=generator).to(self._like)
        self._block: Tensor = torch.linalg.qr(block)[0]
        self._product = torch.zeros_like(self._block)
        self._passes = 0

    def add(self, batch: CurvatureBatch, root: Float[Tensor, "n c r"]) -> None:
        """Add the product of a batch's curvature with the block."""
        rows = batch.rows(root).flatten(0, 1)
        self._product += rows.T @ (rows @ self._block)

    def add_product(self, product: Product) -> None:
        """Add the product of the block with a curvature that is given by its products with vectors."""
        self._product += product(self._block.T.contiguous()).T

    def finish(self) -> None:
        """End a pass: orthogonalize the block or, after the last pass, compute the eigenvalues."""
        check_finite(self._product)
        self._product += self._old.T @ (self._old @ self._block)
        self._passes += 1
        if self._passes < self._structure.passes:
            self._block = torch.linalg.qr(self._product)[0]
            self._product = torch.zeros_like(self._block)
            return
        small = (self._block.T @ self._product).double()
        values, vectors = torch.linalg.eigh(0.5 * (small + small.T))
        order = values.argsort(descending=True)[: self._structure.rank]
        order = order[values[order] > 1e-10 * values[order[0]].clamp_min(1e-30)]
        basis = self._block.double() @ vectors[:, order]
        self.factor = (basis * values[order].sqrt()).T.to(self._block.dtype)
        self._old, self._values = self.factor, None
        self._restart()

    @property
    def values(self) -> Tensor:
        """The eigenvalues of R R^T, computed once."""
        if self._values is None:
            factor = self.factor.double()
            self._values = torch.linalg.eigvalsh(factor @ factor.T).clamp_min(0)
        return self._values

    def posterior(self, prior: Float[Tensor, " p"], scale: Float[Tensor, ""]) -> Woodbury:
        """The Gaussian with precision scale * R^T R + diag(prior)."""
        return Woodbury(self.factor, to_float64(prior), scale.double(), self)

    def tensors(self) -> dict[str, Tensor]:
        """The factor, by name."""
        return {"factor": self.factor}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Restore the factor."""
        self.factor = self._old = tensors["factor"].to(self.factor)
        self._values = None


class Woodbury:
    r"""A Gaussian with precision $P = s R^\top R + D$, D diagonal and R [k, P].

    $P^{-1} = D^{-1} - D^{-1} R^\top M^{-1} R D^{-1}$ and $\log|P| = \log|D| + k \log s + \log|M|$ with $M = I / s + R
    D^{-1} R^\top$. A sample of N(0, D^-1) is corrected for the data, which needs no root of P.
    """

    dense = True

    def __init__(self, factor: Tensor, prior: Tensor, scale: Tensor, state: object) -> None:
        check_positive(prior.detach(), "prior precision")
        self._factor, self._prior, self._scale, self._state = factor, prior, scale, state
        self._cholesky_of_m: Tensor | None = None

    @property
    def log_det(self) -> Float[Tensor, ""]:
        """Log-determinant of the precision."""
        prior = self._prior.log().sum()
        if is_scalar(self._prior):
            values: Tensor = self._state.values  # type: ignore[attr-defined]
            return prior + (self._scale * values / self._prior[0]).log1p().sum()
        return prior + len(self._factor) * self._scale.log() + 2 * self._root().diagonal().log().sum()

    def _root(self) -> Tensor:
        """Cholesky factor of M."""
        if self._cholesky_of_m is None:
            factor = self._factor.double()
            m = (factor / self._prior) @ factor.T
            m = m + torch.eye(len(m), dtype=m.dtype, device=m.device) / self._scale
            root, info = torch.linalg.cholesky_ex(m)
            if info.item():
                raise SingularPosterior("the posterior cannot be factorized in float64; raise the prior precision")
            self._cholesky_of_m = root
        return self._cholesky_of_m

    def sample(self, n: int, generator: torch.Generator | None = None) -> Float[Tensor, "n p"]:
        """Independent samples."""
        prior, factor = self._prior.detach(), self._factor.double()
        wide, narrow = prior.new_empty(n, len(prior)), prior.new_empty(n, len(factor))
        w = wide.normal_(generator=generator) * prior.rsqrt()
        noise = narrow.normal_(generator=generator) * self._scale.detach().rsqrt()
        gap = torch.cholesky_solve((w @ factor.T + noise).T, self._root().detach())
        return (w - (gap.T @ factor) / prior).to(self._factor.dtype)

    def covariance(self, batch: CurvatureBatch, joint: bool = False) -> Float[Tensor, ...]:
        """J P^-1 J^T: the prior's covariance minus the reduction by the data."""
        prior = self._prior.detach().to(self._factor.dtype)
        across = batch.jacobian() @ (self._factor / prior).T  # J D^-1 R^T
        count = across.shape[:2]
        flat = across.double().flatten(0, 1).T
        inverse: Tensor = torch.linalg.solve_triangular(self._root().detach(), flat, upper=False).T
        inverse = inverse.to(across.dtype)
        taken = inverse @ inverse.T if joint else inverse.view(*count, -1) @ inverse.view(*count, -1).mT
        return weighted_gram(batch, prior.reciprocal().contiguous(), joint) - taken

    def variances(self) -> Float[Tensor, " p"]:
        """Diagonal of P^-1."""
        white: Tensor = torch.linalg.solve_triangular(self._root(), self._factor.double() / self._prior, upper=False)
        return self._prior.reciprocal() - white.square().sum(0)

    def solve(self, vectors: Float[Tensor, "k p"]) -> Float[Tensor, "k p"]:
        """P^-1 times each vector."""
        factor, v = self._factor.double(), vectors.double() / self._prior
        inner = torch.cholesky_solve((v @ factor.T).T, self._root()).T
        return (v - (inner @ factor) / self._prior).to(vectors.dtype)

    def quadratic(self, vectors: Float[Tensor, "k p"]) -> Float[Tensor, " k"]:
        """v^T P v of each vector."""
        v = vectors.double()
        return self._scale * (v @ self._factor.double().T).square().sum(-1) + (self._prior * v.square()).sum(-1)
