r"""Structures: how the curvature over all weights is represented, and the Gaussian that it gives with a prior.

Notable here:
- a structure adds up batch after batch, given the square root S of the curvature in the outputs; no Jacobian is stored
  beyond its batch
- the posterior's precision is $P = s H + \mathrm{diag}(\lambda)$; its log-determinant is differentiable in s and
  $\lambda$, and for one common $\lambda$ it is a sum over eigenvalues that are computed once
- the full matrix is in float64 whatever the model's dtype, as its Cholesky factorization often fails in float32
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from pippin.bayes.laplace import memory_check
from pippin.bayes.weight_subset import Selection
from pippin.core.checks import checked
from pippin.core.errors import InvalidArgument, SingularPosterior

Product = Callable[[Tensor], Tensor]
"""Maps vectors [k, P] to the products of a batch's curvature with each of them."""


@runtime_checkable
class CurvatureBatch(Protocol):
    """One forward pass, and products with its Jacobian J; see `pippin.bayes.laplace.jacobians.backend`."""

    outputs: Tensor

    def jacobian(self) -> Float[Tensor, "n c p"]:
        """The Jacobian J of the outputs in the selected weights."""

    def rows(self, root: Float[Tensor, "n c r"]) -> Float[Tensor, "n r p"]:
        """S^T J for each example."""

    def diagonal(self, root: Float[Tensor, "n c r"]) -> Float[Tensor, " p"]:
        """Diagonal of the sum of J^T S S^T J."""

    def gram(self, root: Float[Tensor, "n c r"]) -> Float[Tensor, "p p"]:
        """Sum of J^T S S^T J."""


@runtime_checkable
class WeightGaussian(Protocol):
    """A Gaussian over weights around 0, with precision P, whose log-determinant is the property ``log_det``."""

    if TYPE_CHECKING:  # isinstance would compute it

        @property
        def log_det(self) -> Float[Tensor, ""]:
            """Log-determinant of the precision; differentiable in prior and scale."""

    def sample(self, n: int, generator: torch.Generator | None = None) -> Float[Tensor, "n p"]:
        """Independent samples."""

    def covariance(self, batch: Any, joint: bool = False) -> Float[Tensor, ...]:
        """J P^-1 J^T, the covariance of a batch's outputs: [n, C, C], or jointly over the batch [n C, n C]."""

    def variances(self) -> Float[Tensor, " p"]:
        """Diagonal of P^-1."""

    def solve(self, vectors: Float[Tensor, "k p"]) -> Float[Tensor, "k p"]:
        """P^-1 times each vector."""

    def quadratic(self, vectors: Float[Tensor, "k p"]) -> Float[Tensor, " k"]:
        """v^T P v of each vector."""


@runtime_checkable
class CurvatureState(Protocol):
    """The accumulated curvature of the data so far."""

    def add(self, batch: Any, root: Float[Tensor, "n c r"]) -> None:
        """Add the curvature of a batch."""

    def finish(self) -> None:
        """End a pass over the data.

        Raises:
            SingularPosterior: the curvature is not finite.
        """

    def posterior(self, prior: Float[Tensor, " p"], scale: Float[Tensor, ""]) -> WeightGaussian:
        """The Gaussian with precision scale * H + diag(prior).

        Args:
            prior: precision of each weight; a common precision is recognized by a stride of 0.
            scale: factor of the curvature.

        Raises:
            SingularPosterior: that precision is not positive definite.
        """

    def tensors(self) -> dict[str, Tensor]:
        """The tensors to save."""

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Restore the tensors that `tensors` returned."""


@runtime_checkable
class Structure(Protocol):
    """A representation of the curvature; ``hessian`` says whether it can represent the true Hessian."""

    name: str
    hessian: bool

    def start(self, selection: Selection, like: Tensor) -> CurvatureState:
        """An empty state for these weights, in the precision and on the device of ``like``.

        Raises:
            NotEnoughMemory: it would not fit.
        """


def is_scalar(prior: Float[Tensor, " p"]) -> bool:
    """Whether all weights have one common prior precision, expanded from a single element."""
    return len(prior) == 1 or prior.stride(0) == 0


def to_float64(prior: Float[Tensor, " p"]) -> Float[Tensor, " p"]:
    """The prior in float64; an expanded scalar stays one."""
    return prior[:1].double().expand(len(prior)) if is_scalar(prior) else prior.double()


def check_positive(values: Tensor, what: str) -> None:
    """Check that all eigenvalues or diagonal elements of a precision are positive.

    Raises:
        SingularPosterior: the smallest is not.
    """
    smallest = values.min().item()
    if not smallest > 0:
        raise SingularPosterior(
            f"the posterior precision is not positive definite: its least {what} is {smallest:g}; raise the prior "
            "precision, or use the curvature ggn, which cannot be negative"
        )


def check_finite(curvature: Tensor) -> None:
    """Check that a curvature is finite.

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
    """The whole P x P matrix in float64: exact, for up to some thousands of weights.

    For n examples with r columns of S, fitting costs n r P^2 operations and a posterior P^3 / 3.
    """

    name = "full"
    hessian = True

    def start(self, selection: Selection, like: Tensor) -> FullState:
        """An empty matrix.

        Raises:
            NotEnoughMemory: three P x P matrices do not fit (the sum, its factor, and a temporary).
        """
        need = 3 * 8 * selection.size**2
        instead = (
            "use hessian_structure='kron', 'diag' or LowRank(rank), subset_of_weights='last_layer', or a Subnetwork of "
            "fewer weights"
        )
        memory_check.require_memory(need, like.device, f"a full structure over {selection.size:,} weights", instead)
        return FullState(selection.size, like)


class FullState:
    """The curvature H as a matrix, [P, P] float64."""

    def __init__(self, size: int, like: Tensor) -> None:
        self.dtype = like.dtype
        self.curvature = torch.zeros(size, size, dtype=torch.float64, device=like.device)
        self._values: Tensor | None = None
        self.semidefinite = True

    def add(self, batch: CurvatureBatch, root: Float[Tensor, "n c r"]) -> None:
        """Add a batch's J^T S S^T J, computed in float64, as float32 loses the smallest eigenvalues."""
        rows = batch.rows(root).flatten(0, 1).double()
        self.curvature.addmm_(rows.T, rows)

    def add_product(self, product: Product) -> None:
        """Add a curvature that is given by its products with vectors."""
        self.semidefinite = False
        size, step = len(self.curvature), 64
        for first in range(0, size, step):
            count = min(step, size - first)
            block = torch.zeros(count, size, dtype=self.dtype, device=self.curvature.device)
            block[torch.arange(count), torch.arange(first, first + count)] = 1
            self.curvature[first : first + count] += product(block)

    def finish(self) -> None:
        """Check the matrix and make it exactly symmetric."""
        check_finite(self.curvature)
        self.curvature = 0.5 * (self.curvature + self.curvature.mT)
        self._values = None

    @property
    def values(self) -> Tensor:
        """The eigenvalues of H, cached."""
        if self._values is None:
            values = torch.linalg.eigvalsh(self.curvature)
            self._values = values.clamp_min(0) if self.semidefinite else values  # below 0 by rounding only
        return self._values

    def rounded(self) -> Tensor:
        """H with negative eigenvalues, which come from rounding, set to zero."""
        values, vectors = torch.linalg.eigh(self.curvature)
        clamped: Tensor = (vectors * values.clamp_min(0)) @ vectors.T
        return clamped

    def posterior(self, prior: Float[Tensor, " p"], scale: Float[Tensor, ""]) -> FullGaussian:
        """The Gaussian with precision scale * H + diag(prior)."""
        return FullGaussian(self, to_float64(prior), scale.double())

    def tensors(self) -> dict[str, Tensor]:
        """The matrix, and whether it is positive semi-definite."""
        return {"curvature": self.curvature, "semidefinite": torch.tensor(self.semidefinite)}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Restore the matrix."""
        self.curvature = tensors["curvature"].to(self.curvature)
        self.semidefinite, self._values = bool(tensors["semidefinite"]), None


class FullGaussian:
    """A Gaussian with a dense precision matrix, whose Cholesky factor is computed when first needed."""

    dense = True

    def __init__(self, state: FullState, prior: Tensor, scale: Tensor) -> None:
        self._state, self._prior, self._scale = state, prior, scale
        self._factor: Tensor | None = None
        self._root: Tensor | None = None

    @property
    def log_det(self) -> Float[Tensor, ""]:
        """Log-determinant of the precision."""
        if is_scalar(self._prior):
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
                clamped = self._scale * self._state.rounded() + torch.diag(self._prior)
                factor, info = torch.linalg.cholesky_ex(clamped)
            if info.item():
                check_positive(torch.linalg.eigvalsh(self._precision().detach()), "eigenvalue")
                raise SingularPosterior(
                    "the posterior precision cannot be factorized in float64: its eigenvalues differ too much; raise "
                    f"the prior precision, {self._prior.min().item():g} at the least"
                )
            self._factor = factor
        result: Tensor = self._factor
        return result

    def sample(self, n: int, generator: torch.Generator | None = None) -> Float[Tensor, "n p"]:
        """Independent samples L^-T eps, with P = L L^T and standard normal eps."""
        factor = self._cholesky().detach()
        noise = torch.randn(len(factor), n, generator=generator, dtype=factor.dtype, device=factor.device)
        samples: Tensor = torch.linalg.solve_triangular(factor.mT, noise, upper=True)
        return samples.T.to(self._state.dtype)

    def covariance(self, batch: CurvatureBatch, joint: bool = False) -> Float[Tensor, ...]:
        """J P^-1 J^T, from J and the inverse of the Cholesky factor."""
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


# --- a diagonal -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Diag:
    """The diagonal of the curvature, for models of any size; correlations between weights are ignored."""

    name = "diag"
    hessian = False

    def start(self, selection: Selection, like: Tensor) -> DiagState:
        """A diagonal of zeros."""
        return DiagState(selection.size, like)


class DiagState:
    """The diagonal of the curvature, [P]."""

    def __init__(self, size: int, like: Tensor) -> None:
        self.dtype = like.dtype
        self.curvature = torch.zeros(size, dtype=torch.float64, device=like.device)

    def add(self, batch: CurvatureBatch, root: Float[Tensor, "n c r"]) -> None:
        """Add the diagonal of a batch's J^T S S^T J."""
        self.curvature += batch.diagonal(root)

    def finish(self) -> None:
        """Check that the diagonal is finite."""
        check_finite(self.curvature)

    def posterior(self, prior: Float[Tensor, " p"], scale: Float[Tensor, ""]) -> DiagGaussian:
        """The Gaussian with precision scale * H + prior."""
        precision = scale.double() * self.curvature + prior.double()
        check_positive(precision.detach(), "value")
        return DiagGaussian(precision, self.dtype)

    def tensors(self) -> dict[str, Tensor]:
        """The diagonal, by name."""
        return {"curvature": self.curvature}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Restore the diagonal."""
        self.curvature = tensors["curvature"].to(self.curvature)


class DiagGaussian:
    """A Gaussian over independent weights, given by their precisions."""

    dense = False

    def __init__(self, precision: Tensor, dtype: torch.dtype) -> None:
        self._precision, self._dtype = precision, dtype

    @property
    def log_det(self) -> Float[Tensor, ""]:
        """Log-determinant of the precision."""
        return self._precision.log().sum()

    def sample(self, n: int, generator: torch.Generator | None = None) -> Float[Tensor, "n p"]:
        """Independent samples."""
        std = self._precision.detach().rsqrt().to(self._dtype)
        return std * torch.randn(n, len(std), generator=generator, dtype=std.dtype, device=std.device)

    def covariance(self, batch: CurvatureBatch, joint: bool = False) -> Float[Tensor, ...]:
        """J diag(v) J^T with the variances v of the weights."""
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
    """X X^T for each example, [n, C, C], or jointly over the batch, [n C, n C]."""
    if joint:
        flat = white.flatten(0, 1)
        return flat @ flat.T
    return white @ white.mT


def blocks(joint: Tensor, n: int, c: int) -> Float[Tensor, "n c c"]:
    """The diagonal blocks of a joint covariance [n C, n C], one for each example."""
    return joint.view(n, c, n, c).diagonal(dim1=0, dim2=2).permute(2, 0, 1)


def weighted_gram(batch: CurvatureBatch, weights: Float[Tensor, " p"], joint: bool = False) -> Float[Tensor, ...]:
    """J diag(weights) J^T; layer by layer, without storing the Jacobian, if the batch supports it."""
    if hasattr(batch, "weighted_gram"):
        result: Tensor = batch.weighted_gram(weights, joint)
        return result
    return gram(batch.jacobian() * weights.sqrt(), joint)


StructureName = Literal["full", "kron", "diag", "lowrank", "functional"]
_CLASSES: dict[StructureName, str] = {
    "full": "structure.Full",
    "kron": "kron.Kron",
    "diag": "structure.Diag",
    "lowrank": "low_rank.LowRank",
    "functional": "functional.Functional",
}


@checked
def to_structure(structure: StructureName | Structure) -> Structure:
    """A structure by its name, with default arguments; an object is returned unchanged.

    Raises:
        InvalidArgument: an unknown name, or an object that is not a structure.

    >>> to_structure("diag")
    Diag()
    """
    found = structure_class(structure)() if isinstance(structure, str) else structure
    if not isinstance(found, Structure):
        raise InvalidArgument(f"structure must be a name or a Structure, got {type(found).__name__}")
    return found


def structure_class(name: StructureName) -> Any:
    """The class of a structure, imported when it is needed."""
    module, class_name = _CLASSES[name].split(".")
    return getattr(import_module(f"pippin.bayes.laplace.{module}"), class_name)


def structure_classes() -> dict[str, Any]:
    """The classes of all structures, by name."""
    return {name: structure_class(name) for name in _CLASSES}
