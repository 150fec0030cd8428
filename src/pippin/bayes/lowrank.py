r"""Low-rank curvature: the largest eigenvalues and their vectors, found by passes over the data.

Notable here:
- a random block of vectors is multiplied by the curvature once a pass and made orthogonal (subspace iteration); the
  last pass gives the eigenvalues by Rayleigh and Ritz. It is exact where the rank suffices
- everything after it is Woodbury's identity with the factor R [k, P], $P = s R^\top R + D$: a posterior from k x k
  matrices, draws without a factor of P, and the same code for `pippin.bayes.functional`
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from pippin.bayes import memory
from pippin.bayes.structure import Batch, Product, check_finite, check_positive, precise, single, weighted_gram
from pippin.bayes.subset import Selection
from pippin.core.errors import InvalidArgument, SingularPosterior


@dataclass(frozen=True)
class LowRank:
    """The largest eigenvalues of the curvature; all other directions keep the prior's precision.

    Args:
        rank: how many are kept, at most.
        oversample: vectors beyond the rank that are carried along, for accuracy.
        passes: over the data; each multiplies the error of an eigenvalue by the square of its ratio to the first that
            is left out. The least is 2.
        seed: of the random block.

    Raises:
        InvalidArgument: a number outside its range.
    """

    rank: int = 50
    oversample: int = 10
    passes: int = 4
    seed: int = 0
    name = "lowrank"
    hessian = True

    def __post_init__(self) -> None:
        if self.rank < 1 or self.oversample < 0 or self.passes < 2:
            raise InvalidArgument(
                f"a rank of {self.rank} with oversample {self.oversample} and {self.passes} passes: give a rank of at "
                "least 1, an oversample of at least 0 and 2 passes or more"
            )

    def start(self, selection: Selection, like: Tensor) -> LowRankState:
        """A random block of vectors.

        Raises:
            NotEnoughMemory: three blocks of (rank + oversample) P numbers do not fit.
        """
        columns = min(selection.size, self.rank + self.oversample)
        need = 3 * columns * selection.size * like.element_size()
        memory.require(need, like.device, f"rank {self.rank} over {selection.size:,} weights", "lower the rank")
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
        """Draw the block anew."""
        generator = torch.Generator().manual_seed(self._structure.seed)
        block = torch.randn(self._size, self._columns, generator=generator).to(self._like)
        self._block: Tensor = torch.linalg.qr(block)[0]
        self._product = torch.zeros_like(self._block)
        self._passes = 0

    def add(self, batch: Batch, root: Float[Tensor, "n c r"]) -> None:
        """Multiply a batch's curvature with the block."""
        rows = batch.rows(root).flatten(0, 1)
        self._product += rows.T @ (rows @ self._block)

    def add_product(self, product: Product) -> None:
        """Multiply a curvature that is known by its products with vectors."""
        self._product += product(self._block.T.contiguous()).T

    def finish(self) -> None:
        """End a pass: a new block, or after the last pass the eigenvalues."""
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
        kept = self._block.double() @ vectors[:, order]
        self.factor = (kept * values[order].sqrt()).T.to(self._block.dtype)
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
        return Woodbury(self.factor, precise(prior), scale.double(), self)

    def tensors(self) -> dict[str, Tensor]:
        """The factor."""
        return {"factor": self.factor}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """The factor."""
        self.factor = self._old = tensors["factor"].to(self.factor)
        self._values = None


class Woodbury:
    r"""A Gaussian with precision $P = s R^\top R + D$, D diagonal and R [k, P].

    $P^{-1} = D^{-1} - D^{-1} R^\top M^{-1} R D^{-1}$ and $\log|P| = \log|D| + k \log s + \log|M|$ with $M = I / s + R
    D^{-1} R^\top$. A draw is one of N(0, D^-1) corrected for the data, which needs no root of P.
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
        if single(self._prior):
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
                raise SingularPosterior("the posterior cannot be factorised in float64; raise the prior precision")
            self._cholesky_of_m = root
        return self._cholesky_of_m

    def sample(self, n: int, generator: torch.Generator | None = None) -> Float[Tensor, "n p"]:
        """Independent draws."""
        prior, factor = self._prior.detach(), self._factor.double()
        wide, narrow = prior.new_empty(n, len(prior)), prior.new_empty(n, len(factor))
        w = wide.normal_(generator=generator) * prior.rsqrt()
        noise = narrow.normal_(generator=generator) * self._scale.detach().rsqrt()
        gap = torch.cholesky_solve((w @ factor.T + noise).T, self._root().detach())
        return (w - (gap.T @ factor) / prior).to(self._factor.dtype)

    def covariance(self, batch: Batch, joint: bool = False) -> Float[Tensor, ...]:
        """J P^-1 J^T as the prior's part less what the data took away."""
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
