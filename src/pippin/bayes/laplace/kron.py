r"""Kronecker-factored curvature (KFAC): for each weight matrix, a factor of its inputs and one of its gradients.

Notable here:
- the curvature of a weight is $B \otimes A$, with A the mean outer product of its inputs (patches, for a convolution)
  and B the summed outer product of the gradients at its outputs; biases, norms and other small parameters have exact
  blocks
- log-determinants are sums over products of eigenvalues, for any prior and scale; eigenvectors, which are needed for
  samples and covariances, are computed when first needed
- a predictive covariance transforms inputs and gradients into the eigenbasis, without forming the Jacobian of a matrix
  that has one input vector for each example
- the factor of an embedding's entries is diagonal, and is stored as a diagonal
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from pippin.bayes.laplace import memory_check
from pippin.bayes.laplace.jacobians.backend import JacobianPass, RowBlock
from pippin.bayes.laplace.jacobians.layer_rules import CHUNK, EmbeddingCall, MatrixCall
from pippin.bayes.weight_subset import Selection, listed
from pippin.core.errors import InvalidArgument, SingularPosterior, UnsupportedLayer

EXACT = 4096
"""The largest number of weights of a parameter that has an exact block."""
FLOAT64_SIZE = 512
"""Factors up to this size are decomposed in float64, where that costs little."""


@dataclass(frozen=True)
class Kron:
    r"""Kronecker factors, one block for each parameter.

    Each use of a weight within an example (positions of a convolution or a sequence, repeated calls) counts as another
    example (the "expand" setting).

    Args:
        damping: whether to add the prior to each factor, $(\sqrt{s}B + \sqrt\lambda I) \otimes (\sqrt{s}A +
            \sqrt\lambda I)$, as optimizers do, instead of to their product.

    Source: Martens and Grosse 2015, arXiv:1503.05671; Grosse and Martens 2016, arXiv:1602.01407 (convolutions);
    Ritter, Botev and Barber 2018, "A scalable Laplace approximation" (the posterior); Eschenhagen et al. 2023,
    arXiv:2311.00636 (weight sharing).
    """

    damping: bool = False

    name = "kron"
    hessian = False

    def start(self, selection: Selection, like: Tensor) -> KronState:
        """An empty state.

        Raises:
            InvalidArgument: the selection is a subnetwork, whose weights form no matrices.
        """
        if selection.indices is not None:
            raise InvalidArgument(
                "single weights of a subnetwork have no Kronecker factors; use hessian_structure='full' or 'diag' with "
                "it"
            )
        return KronState(self, selection, like)


class Block:
    """The curvature of one parameter: two factors (for each group), or one exact matrix as the right factor.

    A factor is a matrix for each group [groups, d, d], or its diagonal [groups, d] where it has no other entries. The
    parameter, flat, is [groups, left, right].
    """

    def __init__(self, left: Tensor | None, right: Tensor, count: int = 0, read_left: bool = False) -> None:
        self.left, self.right, self.count, self.read_left = left, right, count, read_left
        self.order: Tensor | None = None
        """The order of the right factor's entries during accumulation; see `MatrixCall.order`."""
        self.eigen: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
        """Eigenvalues and eigenvectors of both; eigenvectors of a diagonal factor are an empty tensor."""
        self._alone: tuple[Tensor, Tensor] | None = None

    def decompose(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Eigendecompose the factors, and free them; `compose` computes them again."""
        if self.eigen is None:
            left, right = self._factors()
            if self.order is not None:
                right = right[:, self.order[:, None], self.order]
            self.eigen = (*_eigen(left), *_eigen(right))
            self.left, self.right, self._alone = None, right.new_zeros(0), None
        return self.eigen

    def sides(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues of both factors, without computing eigenvectors."""
        if self.eigen is not None:
            return self.eigen[0], self.eigen[2]
        if self._alone is None:
            left, right = self._factors()
            self._alone = _eigen(left, vectors=False)[0], _eigen(right, vectors=False)[0]
        return self._alone

    def _factors(self) -> tuple[Tensor, Tensor]:
        """Both factors; that of the inputs as a mean over their number."""
        mean = 1 / self.count if self.count else 1.0
        if self.left is None:
            return self.right.new_ones(len(self.right), 1), self.right
        return (self.left * mean, self.right) if self.read_left else (self.left, self.right * mean)

    def compose(self) -> None:
        """Compute the factors from the eigendecomposition, so that more data can be added."""
        self._alone = None
        if self.eigen is None:
            return
        left_values, left, right_values, right = self.eigen
        exact = left_values.shape[1] == 1 and not self.count
        size = float(self.count or 1)
        self.left = None if exact else _composed(left_values, left) * (size if self.read_left else 1.0)
        self.right = _composed(right_values, right) * (1.0 if self.read_left or exact else size)
        if self.order is not None:
            back = self.order.argsort()
            self.right = self.right[:, back[:, None], back]
        self.eigen = None

    @property
    def values(self) -> Tensor:
        """Eigenvalues of the curvature: [groups, left, right]."""
        left, right = self.sides()
        return left[:, :, None] * right[:, None]

    def precision(self, prior: Tensor, scale: Tensor, damping: bool) -> Tensor:
        """Eigenvalues of the posterior precision: [groups, left, right]."""
        left, right = self.sides()
        if damping and self.count:
            root, add = scale.sqrt(), prior.sqrt()
            return (root * left + add)[:, :, None] * (root * right + add)[:, None]
        return scale * (left[:, :, None] * right[:, None]) + prior

    def to_eigenbasis(self, x: Tensor) -> Tensor:
        """Vectors of the parameter [..., groups, left, right] in the basis of the eigenvectors."""
        _, left, _, right = self.decompose()
        x = left.mT @ x if left.numel() else x
        return x @ right if right.numel() else x

    def from_eigenbasis(self, x: Tensor) -> Tensor:
        """The inverse of `to_eigenbasis`."""
        _, left, _, right = self.decompose()
        x = left @ x if left.numel() else x
        return x @ right.mT if right.numel() else x

    def diagonal(self, variances: Tensor) -> Tensor:
        """Diagonal of the covariance with these eigenvalues."""
        _, left, _, right = self.decompose()
        x = left.square() @ variances if left.numel() else variances
        return x @ right.square().mT if right.numel() else x


class KronState:
    """The factors of every selected parameter."""

    def __init__(self, structure: Kron, selection: Selection, like: Tensor) -> None:
        self.structure, self.selection = structure, selection
        self.dtype, self.device = like.dtype, like.device
        self.blocks: dict[str, Block] = {}

    @torch.no_grad()
    def add(self, batch: JacobianPass, root: Float[Tensor, "n c r"]) -> None:
        """Add the factors of a batch.

        Raises:
            UnsupportedLayer: a parameter that is used by an operation without factors and is too large for an exact
                block; the message names all of them.
            NotEnoughMemory: the factors would not fit.
        """
        counts: dict[str, int] = {}
        exact: dict[str, list[RowBlock]] = {}
        shared = batch.shared()
        self._check(batch)
        for piece in batch.layers(root):
            for name in piece.names:
                call = piece.call
                if name not in self.blocks:
                    self.blocks[name] = self._empty(name, piece)
                block = self.blocks[name]
                if isinstance(call, MatrixCall) and name == call.weight and block.order is None:
                    block.order = call.order()
                block.compose()
                if isinstance(call, MatrixCall | EmbeddingCall) and name == call.weight:
                    counts[name] = counts.get(name, 0) + _add(block, piece)
                elif name in shared:
                    exact.setdefault(name, []).append(piece)
                else:
                    _add_exact(block, piece.rows(name))
        for name, pieces in exact.items():
            for rows in _summed(name, pieces):
                _add_exact(self.blocks[name], rows)
        for name, count in counts.items():
            self.blocks[name].count += count

    def finish(self) -> None:
        """Check that all factors are finite; they are decomposed when first needed.

        Raises:
            SingularPosterior: a factor is not finite; the message names its parameter.
        """
        for name, shape in zip(self.selection.names, self.selection.shapes, strict=True):
            if name not in self.blocks:  # the outputs do not depend on it
                self.blocks[name] = Block(None, torch.zeros(1, math.prod(shape), dtype=self.dtype, device=self.device))
        self.blocks = {name: self.blocks[name] for name in self.selection.names}
        for name, block in self.blocks.items():
            factors = [] if block.eigen is not None else [block.right, *([] if block.left is None else [block.left])]
            if not all(bool(factor.sum().isfinite()) for factor in factors):
                raise SingularPosterior(
                    f"the curvature of {name} is not finite; a Jacobian overflows or divides by 0 there: look at the "
                    "inputs of that layer, or compute in float64"
                )

    def posterior(self, prior: Float[Tensor, " p"], scale: Float[Tensor, ""]) -> KronGaussian:
        """The Gaussian with precision scale * H + diag(prior).

        Raises:
            InvalidArgument: the prior differs within a parameter.
        """
        return KronGaussian(self, prior.to(self.dtype), scale.to(self.dtype))

    def tensors(self) -> dict[str, Tensor]:
        """Eigenvalues and eigenvectors by parameter; valid after `finish`."""
        words = ("left_values", "left", "right_values", "right")
        saved: dict[str, Tensor] = {}
        for name, block in self.blocks.items():
            saved |= {f"{name}.{word}": part for word, part in zip(words, block.decompose(), strict=True)}
            saved[f"{name}.count"] = torch.tensor([block.count, int(block.read_left)])
        return saved

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Restore what `tensors` returned."""
        words = ("left_values", "left", "right_values", "right")
        for name in self.selection.names:
            count, read_left = tensors[f"{name}.count"].tolist()
            block = Block(None, torch.zeros(0), int(count), bool(read_left))
            left_values, left, right_values, right = (
                tensors[f"{name}.{word}"].to(self.device, self.dtype) for word in words
            )
            block.eigen = left_values, left, right_values, right
            self.blocks[name] = block

    def _check(self, batch: JacobianPass) -> None:
        """Check before the first batch that all parameters have factors and that these fit into memory."""
        if self.blocks:
            return
        sizes = {name: math.prod(s) for name, s in zip(self.selection.names, self.selection.shapes, strict=True)}
        uses: dict[str, set[str]] = {}
        need = 0
        for name, kind, entries in batch.uses():
            uses.setdefault(name, set()).add(kind)
            need += entries
        large = [n for n, kinds in uses.items() if kinds != {"matrix"} and kinds != {"table"} and sizes[n] > EXACT]
        if large:
            raise UnsupportedLayer(
                f"there are no Kronecker factors for {listed(large)}: not a linear layer, a convolution or an "
                "embedding, or tied between such; leave them out with subset_of_weights=Named([...]), or use "
                "hessian_structure='diag'"
            )
        memory_check.require_memory(
            2 * need * torch.finfo(self.dtype).bits // 8,
            self.device,
            f"a kron structure over {self.selection.size:,} weights",
            "use hessian_structure='diag', or leave the largest layers out with subset_of_weights=Named([...])",
        )

    def _empty(self, name: str, piece: RowBlock) -> Block:
        call = piece.call
        if isinstance(call, MatrixCall) and name == call.weight:
            groups, b, a = call.matrices()
            return Block(self._zeros(groups, b, b), self._zeros(groups, a, a))
        if isinstance(call, EmbeddingCall):
            entries, width = call.shape
            return Block(self._zeros(1, entries), self._zeros(1, width, width), read_left=True)
        size = math.prod(self.selection.shapes[self.selection.names.index(name)])
        return Block(None, self._zeros(1, size, size))

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)


class KronGaussian:
    """A Gaussian over weights with a block-diagonal precision, in the eigenbases of the Kronecker factors."""

    dense = False

    def __init__(self, state: KronState, prior: Tensor, scale: Tensor) -> None:
        self._state, self._prior, self._scale = state, prior, scale
        self._selection = state.selection
        if len(prior) > 1 and prior.stride(0) != 0:
            for name in state.blocks:
                part = prior.detach()[self._selection.of(name)]
                if bool(part.min() != part.max()):
                    raise InvalidArgument(
                        f"the prior precision differs between weights of {name}, and Kronecker factors allow one "
                        "precision for each parameter; use hessian_structure='diag', 'full' or 'lowrank', or a prior "
                        "per layer"
                    )
        self._kept: dict[str, Tensor] = {}

    @property
    def log_det(self) -> Float[Tensor, ""]:
        """Log-determinant of the precision; differentiable in prior and scale."""
        total = self._scale.new_zeros((), dtype=torch.float64)
        for name, block in self._state.blocks.items():
            values = self._precision(name, block)
            if not bool(values.detach().min() > 0):
                raise SingularPosterior(
                    f"the posterior precision of {name} has the eigenvalue {values.min().item():g}; raise the prior's"
                )
            total = total + values.log().sum(dtype=torch.float64)
        return total

    @torch.no_grad()
    def sample(self, n: int, generator: torch.Generator | None = None) -> Float[Tensor, ...]:
        """Independent samples."""
        noise = torch.randn(
            n, self._selection.size, generator=generator, dtype=self._state.dtype, device=self._state.device
        )
        return self._apply(noise, lambda x, precision, block: block.from_eigenbasis(x * precision.rsqrt()))

    @torch.no_grad()
    def solve(self, vectors: Float[Tensor, "k p"]) -> Float[Tensor, ...]:
        """P^-1 times each vector."""
        return self._apply(
            vectors, lambda x, precision, block: block.from_eigenbasis(block.to_eigenbasis(x) / precision)
        )

    def quadratic(self, vectors: Float[Tensor, "k p"]) -> Float[Tensor, " k"]:
        """v^T P v of each vector."""
        total = vectors.new_zeros(len(vectors), dtype=torch.float64)
        for x, name, block in self._parts(vectors):
            weighted = block.to_eigenbasis(x).square() * self._precision(name, block)
            total = total + weighted.flatten(1).sum(1, dtype=torch.float64)
        return total

    @torch.no_grad()
    def variances(self) -> Float[Tensor, " p"]:
        """Diagonal of P^-1."""
        blocks = self._state.blocks.items()
        return torch.cat([block.diagonal(self._inverse(name, block)).flatten() for name, block in blocks])

    @torch.no_grad()
    def covariance(self, batch: JacobianPass, joint: bool = False) -> Float[Tensor, ...]:
        """J P^-1 J^T, the covariance of a batch's outputs: [n, C, C], or jointly over the batch [n C, n C]."""
        n, outputs = batch.outputs.shape
        size = (n * outputs, n * outputs) if joint else (n, outputs, outputs)
        total = batch.outputs.new_zeros(size)
        apart: dict[str, list[RowBlock]] = {}
        shared = batch.shared()
        for piece in batch.layers():
            for name in piece.names:
                if name in shared:
                    apart.setdefault(name, []).append(piece)
                    continue
                block = self._state.blocks[name]
                if not joint and (block.count or piece.call is not None):
                    total += _covariance(block, self._inverse(name, block), piece, name)
                else:
                    total += _from_rows(block, self._inverse(name, block), piece.rows(name), joint)
        for name, pieces in apart.items():
            block = self._state.blocks[name]
            rows = sum((piece.rows(name) for piece in pieces[1:]), pieces[0].rows(name))
            total += _from_rows(block, self._inverse(name, block), rows, joint)
        return total

    def _precision(self, name: str, block: Block) -> Tensor:
        prior = self._prior[self._selection.of(name).start]
        return block.precision(prior, self._scale, self._state.structure.damping)

    def _inverse(self, name: str, block: Block) -> Tensor:
        if name not in self._kept:
            block.decompose()  # so that eigenvalues and eigenvectors come from the same decomposition
            self._kept[name] = self._precision(name, block).detach().reciprocal()
        return self._kept[name]

    def _parts(self, vectors: Tensor) -> Iterator[tuple[Tensor, str, Block]]:
        for name, block in self._state.blocks.items():
            left, _, right, _ = block.decompose()
            part = vectors[:, self._selection.of(name)].to(self._state.dtype)
            yield part.view(len(vectors), len(left), left.shape[1], right.shape[1]), name, block

    def _apply(self, vectors: Tensor, change: Any) -> Tensor:
        parts = [change(x, self._precision(name, block), block).flatten(1) for x, name, block in self._parts(vectors)]
        return torch.cat(parts, 1)


def _eigen(factor: Tensor, vectors: bool = True) -> tuple[Tensor, Tensor]:
    """Eigenvalues, clamped to 0, and eigenvectors of each group's factor; an empty tensor for a diagonal factor."""
    if factor.ndim == 2:
        return factor.clamp(min=0), factor.new_zeros(0)
    wide = factor.double() if factor.shape[-1] <= FLOAT64_SIZE else factor
    if not vectors:
        return torch.linalg.eigvalsh(wide).clamp(min=0).to(factor.dtype), factor.new_zeros(0)
    values, found = torch.linalg.eigh(wide)
    return values.clamp(min=0).to(factor.dtype), found.to(factor.dtype)


def _composed(values: Tensor, vectors: Tensor) -> Tensor:
    return (vectors * values[:, None]) @ vectors.mT if vectors.numel() else values


def _add(block: Block, piece: RowBlock) -> int:
    """Add the factors of some columns to a block; returns the number of inputs that were added."""
    call, n = piece.call, piece.n
    if isinstance(call, EmbeddingCall):
        assert block.left is not None
        call.check()
        ids = call.x.flatten()
        flat = piece.g.reshape(len(piece.g), -1, piece.g.shape[-1])
        if call.options["padding"] is not None:
            ids = ids[ids != call.options["padding"]]
            flat = flat[:, call.x.flatten() != call.options["padding"]]
        flat = flat.flatten(0, 1)
        block.right[0].addmm_(flat.mT, flat)
        if not piece.first:
            return 0
        block.left[0] += torch.bincount(ids, minlength=call.shape[0])
        return call.x.numel()
    assert isinstance(call, MatrixCall)
    assert block.left is not None
    call.check()
    g = piece.g.transpose(1, 2) if call.second else piece.g
    block.left += call.output_factor(g, n)
    if not piece.first:
        return 0
    return call.add_inputs(block.right, n)


def _add_exact(block: Block, rows: Tensor) -> None:
    """Add rows [columns, n, *shape] to an exact block."""
    flat = rows.flatten(0, 1).flatten(1)
    block.right[0].addmm_(flat.mT, flat)


def _summed(name: str, pieces: list[RowBlock]) -> Iterator[Tensor]:
    """Rows of a parameter, summed over its uses, for some columns at a time."""
    by_start: dict[int, Tensor] = {}
    for piece in pieces:
        rows = piece.rows(name)
        by_start[piece.start] = by_start[piece.start] + rows if piece.start in by_start else rows
    yield from by_start.values()


def _covariance(block: Block, inverse: Tensor, piece: RowBlock, name: str) -> Tensor:
    """The contribution of one use of a parameter to J P^-1 J^T: [n, C, C]."""
    call, n = piece.call, piece.n
    if isinstance(call, MatrixCall) and name == call.weight:
        call.check()
        _, left, _, right = block.decompose()
        g = piece.g.transpose(1, 2) if call.second else piece.g
        columns, x = call.columns(g, n), right.mT @ call.inputs(n)
        columns = left.mT[:, None] @ columns
        _, groups, r, b, positions = columns.shape
        if positions == 1:
            strength = torch.einsum("nga,gba->ngb", x[..., 0].square(), inverse)
            columns = columns[..., 0]
            return ((columns * strength[:, :, None]) @ columns.mT).sum(1)
        width = groups * b * x.shape[2]
        step, parts = max(1, CHUNK // (r * width)), []
        for start in range(0, n, step):
            rows = columns[start : start + step].flatten(2, 3) @ x[start : start + step].mT
            rows = rows.view(-1, groups, r, b, x.shape[2]).transpose(1, 2)
            parts.append((rows * inverse).flatten(2) @ rows.flatten(2).mT)
        return torch.cat(parts)
    if isinstance(call, EmbeddingCall) and name == call.weight:
        g = piece.g.transpose(1, 2) if call.second else piece.g
        where, example, _, summed = call.compressed(g, n)
        summed = (summed @ block.decompose()[3][0]).transpose(0, 1)
        products = (summed * inverse[0, where, None]) @ summed.mT
        return products.new_zeros(n, *products.shape[1:]).index_add_(0, example, products)
    return _from_rows(block, inverse, piece.rows(name), joint=False)


def _from_rows(block: Block, inverse: Tensor, rows: Tensor, joint: bool) -> Tensor:
    """The contribution of a parameter's rows [C, n, *shape] to J P^-1 J^T."""
    rotated = block.to_eigenbasis(rows.transpose(0, 1).reshape(*rows.shape[1::-1], *inverse.shape))
    flat = (rotated * inverse.sqrt()).flatten(2)
    if joint:
        flat = flat.flatten(0, 1)
    return flat @ flat.mT
