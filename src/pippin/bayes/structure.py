r"""Structures: in which form the curvature over all weights is kept, and the Gaussian that it makes with a prior.

Notable here:
- a structure is fed batch by batch with S, the square root of the curvature in the outputs, and keeps sums only: no
  Jacobian outlives its batch
- the posterior's precision is $P = s H + \mathrm{diag}(\lambda)$; its log-determinant is differentiable in s and
  $\lambda$, and for one common $\lambda$ it is a sum over eigenvalues that are computed once
- the full matrix is kept in float64, whatever the model computes in: a Cholesky factor in float32 fails first
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from pippin.bayes import memory
from pippin.bayes.subset import Selection
from pippin.core.errors import InvalidArgument, SingularPosterior

Product = Callable[[Tensor], Tensor]
"""From vectors [k, P] to the curvature of a batch times each of them."""


@runtime_checkable
class Batch(Protocol):
    """One forward pass and what can be asked of its Jacobian J; see `pippin.bayes.rows`."""

    outputs: Tensor

    def jacobian(self) -> Float[Tensor, "n c p"]:
        """J."""

    def rows(self, root: Float[Tensor, "n c r"]) -> Float[Tensor, "n r p"]:
        """S^T J."""

    def diagonal(self, root: Float[Tensor, "n c r"]) -> Float[Tensor, " p"]:
        """Diagonal of the sum of J^T S S^T J."""

    def gram(self, root: Float[Tensor, "n c r"]) -> Float[Tensor, "p p"]:
        """Sum of J^T S S^T J."""


@runtime_checkable
class Gaussian(Protocol):
    """A Gaussian over weights around 0, with precision P, whose log-determinant is the property ``log_det``."""

    if TYPE_CHECKING:  # isinstance would compute it

        @property
        def log_det(self) -> Float[Tensor, ""]:
            """Log-determinant of the precision; differentiable in prior and scale."""

    def sample(self, n: int, generator: torch.Generator | None = None) -> Float[Tensor, "n p"]:
        """Independent draws."""

    def covariance(self, batch: Any, joint: bool = False) -> Float[Tensor, ...]:
        """J P^-1 J^T of a batch's outputs: [n, C, C], or for all of them together [n C, n C]."""

    def variances(self) -> Float[Tensor, " p"]:
        """Diagonal of P^-1."""

    def solve(self, vectors: Float[Tensor, "k p"]) -> Float[Tensor, "k p"]:
        """P^-1 times each vector."""

    def quadratic(self, vectors: Float[Tensor, "k p"]) -> Float[Tensor, " k"]:
        """v^T P v of each vector."""


@runtime_checkable
class State(Protocol):
    """The curvature of the data so far."""

    def add(self, batch: Any, root: Float[Tensor, "n c r"]) -> None:
        """Add the curvature of a batch."""

    def finish(self) -> None:
        """A pass over the data has ended.

        Raises:
            SingularPosterior: the curvature is not finite.
        """

    def posterior(self, prior: Float[Tensor, " p"], scale: Float[Tensor, ""]) -> Gaussian:
        """The Gaussian with precision scale * H + diag(prior).

        Args:
            prior: precision of each weight; one number that was expanded is known by its stride of 0.
            scale: of the curvature.

        Raises:
            SingularPosterior: that precision is not positive definite.
        """

    def tensors(self) -> dict[str, Tensor]:
        """What is to be saved."""

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take up what was saved."""


@runtime_checkable
class Structure(Protocol):
    """A form of the curvature; ``name`` is its word, ``hessian`` says whether it can hold the true Hessian."""

    name: str
    hessian: bool

    def start(self, selection: Selection, like: Tensor) -> State:
        """An empty state for these weights, in the precision and on the device of ``like``.

        Raises:
            NotEnoughMemory: it would not fit.
        """


def single(prior: Float[Tensor, " p"]) -> bool:
    """Whether a prior is one number for all weights."""
    return len(prior) == 1 or prior.stride(0) == 0


def precise(prior: Float[Tensor, " p"]) -> Float[Tensor, " p"]:
    """The prior in float64, still known to be one number where it was."""
    return prior[:1].double().expand(len(prior)) if single(prior) else prior.double()


def check_positive(values: Tensor, what: str) -> None:
    """See that all eigenvalues or pivots of a precision are positive.

    Raises:
        SingularPosterior: the least is not.
    """
    least = values.min().item()
    if not least > 0:
        raise SingularPosterior(
            f"the posterior precision is not positive definite: its least {what} is {least:g}; raise the prior "
            "precision, or use the curvature ggn, which cannot be negative"
        )


def check_finite(curvature: Tensor) -> None:
    """See that a curvature is finite.

    Raises:
        SingularPosterior: it is not.
    """
    if not curvature.isfinite().all():
        raise SingularPosterior(
            "the curvature is infinite or NaN: a Jacobian of the model is; look for roots, logarithms and divisions at "
            "0 in its forward pass, or compute in float64"
        )


# --- one matrix over all weights --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Full:
    """The whole matrix, P x P in float64: exact, for up to some thousands of weights.

    Fitting costs n r P^2, a posterior P^3 / 3.
    """

    name = "full"
    hessian = True

    def start(self, selection: Selection, like: Tensor) -> FullState:
        """An empty matrix.

        Raises:
            NotEnoughMemory: three matrices of P^2 numbers do not fit (the sum, its factor, and one to work in).
        """
        need = 3 * 8 * selection.size**2
        instead = "use structure='kron', 'diag' or LowRank(rank), subset='last_layer', or a Subnetwork of fewer weights"
        memory.require(need, like.device, f"a full structure over {selection.size:,} weights", instead)
        return FullState(selection.size, like)


class FullState:
    """The curvature H as a matrix, [P, P] float64."""

    def __init__(self, size: int, like: Tensor) -> None:
        self.dtype = like.dtype
        self.curvature = torch.zeros(size, size, dtype=torch.float64, device=like.device)
        self._values: Tensor | None = None
        self.semidefinite = True

    def add(self, batch: Batch, root: Float[Tensor, "n c r"]) -> None:
        """Add a batch's J^T S S^T J, multiplied in float64: the least eigenvalues are lost in float32."""
        rows = batch.rows(root).flatten(0, 1).double()
        self.curvature.addmm_(rows.T, rows)

    def add_product(self, product: Product) -> None:
        """Add a curvature that is known by its products with vectors."""
        self.semidefinite = False
        size, step = len(self.curvature), 64
        for first in range(0, size, step):
            count = min(step, size - first)
            block = torch.zeros(count, size, dtype=self.dtype, device=self.curvature.device)
            block[torch.arange(count), torch.arange(first, first + count)] = 1
            self.curvature[first : first + count] += product(block)

    def finish(self) -> None:
        """Make it symmetric to the last bit."""
        check_finite(self.curvature)
        self.curvature = 0.5 * (self.curvature + self.curvature.mT)
        self._values = None

    @property
    def values(self) -> Tensor:
        """The eigenvalues of H, computed once."""
        if self._values is None:
            values = torch.linalg.eigvalsh(self.curvature)
            self._values = values.clamp_min(0) if self.semidefinite else values  # below 0 by rounding only
        return self._values

    def rounded(self) -> Tensor:
        """The matrix without the negative eigenvalues that rounding gave it."""
        values, vectors = torch.linalg.eigh(self.curvature)
        mended: Tensor = (vectors * values.clamp_min(0)) @ vectors.T
        return mended

    def posterior(self, prior: Float[Tensor, " p"], scale: Float[Tensor, ""]) -> FullGaussian:
        """The Gaussian with precision scale * H + diag(prior)."""
        return FullGaussian(self, precise(prior), scale.double())

    def tensors(self) -> dict[str, Tensor]:
        """The matrix, and whether it is positive semi-definite."""
        return {"curvature": self.curvature, "semidefinite": torch.tensor(self.semidefinite)}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """The matrix."""
        self.curvature = tensors["curvature"].to(self.curvature)
        self.semidefinite, self._values = bool(tensors["semidefinite"]), None


class FullGaussian:
    """A Gaussian known by its precision matrix; its Cholesky factor is computed when first needed."""

    dense = True

    def __init__(self, state: FullState, prior: Tensor, scale: Tensor) -> None:
        self._state, self._prior, self._scale = state, prior, scale
        self._factor: Tensor | None = None
        self._root: Tensor | None = None

    @property
    def log_det(self) -> Float[Tensor, ""]:
        """Log-determinant of the precision."""
        if single(self._prior):
            values = self._scale * self._state.values + self._prior[0]
            check_positive(values.detach(), "eigenvalue")
            return values.log().sum()
        return 2 * self._cholesky().diagonal().log().sum()

    def _precision(self) -> Tensor:
        return self._scale * self._state.curvature + torch.diag(self._prior)

    def _cholesky(self) -> Tensor:
        if self._factor is None:
            factor, info = torch.linalg.cholesky_ex(self._precision())
            if info.item() and self._state.semidefinite:
                mended = self._scale * self._state.rounded() + torch.diag(self._prior)
                factor, info = torch.linalg.cholesky_ex(mended)
            if info.item():
                check_positive(torch.linalg.eigvalsh(self._precision().detach()), "eigenvalue")
                raise SingularPosterior(
                    "the posterior precision cannot be factorised in float64: its eigenvalues differ too much; raise "
                    f"the prior precision, {self._prior.min().item():g} at the least"
                )
            self._factor = factor
        result: Tensor = self._factor
        return result

    def sample(self, n: int, generator: torch.Generator | None = None) -> Float[Tensor, "n p"]:
        """Independent draws, L^-T eps with P = L L^T."""
        factor = self._cholesky().detach()
        noise = torch.randn(len(factor), n, generator=generator, dtype=factor.dtype, device=factor.device)
        drawn: Tensor = torch.linalg.solve_triangular(factor.mT, noise, upper=True)
        return drawn.T.to(self._state.dtype)

    def covariance(self, batch: Batch, joint: bool = False) -> Float[Tensor, ...]:
        """J P^-1 J^T, from the inverse factor times J."""
        if self._root is None:
            factor = self._cholesky().detach()
            eye = torch.eye(len(factor), dtype=factor.dtype, device=factor.device)
            self._root = torch.linalg.solve_triangular(factor, eye, upper=False).to(self._state.dtype)
        white = batch.jacobian() @ self._root.T
        return gram(white, joint)

    def variances(self) -> Float[Tensor, " p"]:
        """Diagonal of P^-1."""
        inverse: Tensor = torch.cholesky_inverse(self._cholesky())
        return inverse.diagonal()

    def solve(self, vectors: Float[Tensor, "k p"]) -> Float[Tensor, "k p"]:
        """P^-1 times each vector."""
        return torch.cholesky_solve(vectors.double().T, self._cholesky()).T.to(vectors.dtype)

    def quadratic(self, vectors: Float[Tensor, "k p"]) -> Float[Tensor, " k"]:
        """v^T P v of each vector."""
        v = vectors.double()
        return self._scale * ((v @ self._state.curvature) * v).sum(-1) + (self._prior * v.square()).sum(-1)


# --- one number for each weight ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Diag:
    """The diagonal: a number for each weight, for models of any size; correlations between weights are lost."""

    name = "diag"
    hessian = False

    def start(self, selection: Selection, like: Tensor) -> DiagState:
        """An empty diagonal."""
        return DiagState(selection.size, like)


class DiagState:
    """The diagonal of the curvature, [P]."""

    def __init__(self, size: int, like: Tensor) -> None:
        self.dtype = like.dtype
        self.curvature = torch.zeros(size, dtype=torch.float64, device=like.device)

    def add(self, batch: Batch, root: Float[Tensor, "n c r"]) -> None:
        """Add the diagonal of a batch's J^T S S^T J."""
        self.curvature += batch.diagonal(root)

    def finish(self) -> None:
        """See that it is finite."""
        check_finite(self.curvature)

    def posterior(self, prior: Float[Tensor, " p"], scale: Float[Tensor, ""]) -> DiagGaussian:
        """The Gaussian with precision scale * H + prior."""
        precision = scale.double() * self.curvature + prior.double()
        check_positive(precision.detach(), "value")
        return DiagGaussian(precision, self.dtype)

    def tensors(self) -> dict[str, Tensor]:
        """The diagonal."""
        return {"curvature": self.curvature}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """The diagonal."""
        self.curvature = tensors["curvature"].to(self.curvature)


class DiagGaussian:
    """Independent weights with these precisions."""

    dense = False

    def __init__(self, precision: Tensor, dtype: torch.dtype) -> None:
        self._precision, self._dtype = precision, dtype

    @property
    def log_det(self) -> Float[Tensor, ""]:
        """Log-determinant of the precision."""
        return self._precision.log().sum()

    def sample(self, n: int, generator: torch.Generator | None = None) -> Float[Tensor, "n p"]:
        """Independent draws."""
        sd = self._precision.detach().rsqrt().to(self._dtype)
        return sd * torch.randn(n, len(sd), generator=generator, dtype=sd.dtype, device=sd.device)

    def covariance(self, batch: Batch, joint: bool = False) -> Float[Tensor, ...]:
        """J diag(v) J^T."""
        return weighted_gram(batch, self.variances().detach().to(self._dtype), joint)

    def variances(self) -> Float[Tensor, " p"]:
        """One over the precisions."""
        return self._precision.reciprocal()

    def solve(self, vectors: Float[Tensor, "k p"]) -> Float[Tensor, "k p"]:
        """P^-1 times each vector."""
        return (vectors / self._precision).to(vectors.dtype)

    def quadratic(self, vectors: Float[Tensor, "k p"]) -> Float[Tensor, " k"]:
        """v^T P v of each vector."""
        return (self._precision * vectors.double().square()).sum(-1)


def gram(white: Float[Tensor, "n c p"], joint: bool) -> Float[Tensor, ...]:
    """X X^T for each example, [n, C, C], or for all of them together, [n C, n C]."""
    if joint:
        flat = white.flatten(0, 1)
        return flat @ flat.T
    return white @ white.mT


def blocks(joint: Tensor, n: int, c: int) -> Float[Tensor, "n c c"]:
    """The blocks of the single examples in a joint covariance."""
    return joint.view(n, c, n, c).diagonal(dim1=0, dim2=2).permute(2, 0, 1)


def weighted_gram(batch: Batch, weights: Float[Tensor, " p"], joint: bool = False) -> Float[Tensor, ...]:
    """J diag(weights) J^T, layer by layer where the batch can do that, which keeps no Jacobian."""
    if hasattr(batch, "weighted_gram"):
        result: Tensor = batch.weighted_gram(weights, joint)
        return result
    return gram(batch.jacobian() * weights.sqrt(), joint)


def structure(choice: str | Structure) -> Structure:
    """The structure that a word or an object stands for: "full", "kron", "diag", "lowrank" (rank 50), "functional".

    Raises:
        InvalidArgument: an unknown word, or something that is no structure.

    >>> structure("diag")
    Diag()
    """
    if isinstance(choice, str):
        made: Structure = named(choice)()
        return made
    if not isinstance(choice, Structure):
        raise InvalidArgument(f"structure must be a word or a structure, got {type(choice).__name__}")
    return choice


WORDS = {
    "full": "structure.Full",
    "kron": "kron.Kron",
    "diag": "structure.Diag",
    "lowrank": "lowrank.LowRank",
    "functional": "functional.Functional",
}


def named(word: str) -> Any:
    """The class of structures that a word stands for.

    Raises:
        InvalidArgument: there is none.
    """
    if word not in WORDS:
        raise InvalidArgument(f"structure is {word!r}; choose one of {', '.join(WORDS)}")
    module, name = WORDS[word].split(".")
    return getattr(import_module(f"pippin.bayes.{module}"), name)
