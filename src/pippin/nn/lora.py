r"""Low-rank adapters (LoRA), applied to the tokens of single requests.

Notable here:
- an adapter is an object beside the model and does not modify it: layers look up their updates in it, so that packed
  and fused weights need no special case, and a batch may use several adapters
- without adapters the only cost is one comparison with None per layer
- adapters can be added: a task adapter and one that recovers quantization error form one adapter (`combine`)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from pippin.core.checks import PositiveInt, checked
from pippin.core.errors import AdapterMismatch, InvalidArgument

_ALL = slice(None)


@dataclass(frozen=True)
class LowRankUpdate:
    r"""The change of one weight matrix: $\Delta W = B A$, with the scale already in $B$.

    Args:
        down: $A$.
        up: $B$, multiplied by the adapter's scale.
        start: index of the first output that it changes, in a fused layer.
        dropout: dropout rate of the inputs of $A$ in training.

    Source: Hu et al. 2021, arXiv:2106.09685, section 4.1.
    """

    down: Float[Tensor, "rank inputs"]
    up: Float[Tensor, "outputs rank"]
    start: int = 0
    dropout: float = 0.0

    def inner(self, x: Float[Tensor, "tokens inputs"]) -> Float[Tensor, "tokens rank"]:
        """The inner product $A x$, after dropout of x."""
        return (F.dropout(x, self.dropout) if self.dropout else x) @ self.down.T

    def add(self, x: Float[Tensor, "tokens inputs"], y: Float[Tensor, "tokens all_outputs"]) -> None:
        """Add the update for inputs ``x`` to the layer's outputs ``y``, in place."""
        y[:, self.start : self.start + self.up.shape[0]].add_(self.inner(x) @ self.up.T)


@dataclass(frozen=True, eq=False)
class Adapter:
    """The low-rank updates of a model's layers. Two adapters are equal only if they are the same object.

    Args:
        name: the adapter's name in requests.
        changes: the update of each layer (several for a fused layer).
        nbytes: memory of all updates in bytes.
    """

    name: str
    changes: Mapping[nn.Module, tuple[LowRankUpdate, ...]]
    nbytes: int = 0

    def check(self, module: nn.Module) -> None:
        """Check that all of its layers belong to a model.

        Raises:
            AdapterMismatch: some belong to another model, or to this one before its layers were packed or fused.
        """
        if unknown := len(self.changes.keys() - set(module.modules())):
            raise AdapterMismatch(
                f"the adapter {self.name!r} changes {unknown} layers that are not of this model; adapters are loaded "
                "for the model that they are used with, and after it was packed"
            )


# Adapters, each with the tokens that it applies to: a slice of all tokens of the flattened batch.
AdapterSlices = Sequence[tuple[Adapter, slice]]


def apply_adapters(layer: nn.Module, x: Tensor, y: Tensor, adapters: AdapterSlices) -> Tensor:
    """Add the updates of adapters to a layer's output, and return it.

    This happens in place, except for an update of all outputs of all tokens with gradients, which needs no copies.

    >>> layer, x = nn.Linear(2, 2, bias=False), torch.ones(1, 3, 2)
    >>> double = Adapter("double", {layer: (LowRankUpdate(torch.eye(2), torch.eye(2)),)})
    >>> apply_adapters(layer, x, torch.zeros(1, 3, 2), [(double, slice(1, 3))])[0, :, 0]
    tensor([0., 1., 1.])
    """
    flat_x, flat_y = x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1])
    for adapter, tokens in adapters:
        for change in adapter.changes.get(layer, ()):
            whole = tokens == _ALL and change.up.shape[0] == flat_y.shape[1]
            if whole and torch.is_grad_enabled() and (flat_y.requires_grad or change.up.requires_grad):
                flat_y = torch.addmm(flat_y, change.inner(flat_x), change.up.T)
            else:
                change.add(flat_x[tokens], flat_y[tokens])
    return flat_y.view_as(y)


@checked
def combine(name: str, parts: Sequence[tuple[Adapter, float]], *, rank: PositiveInt | None = None) -> Adapter:
    r"""One adapter whose change is the weighted sum of several: $\Delta W = \sum_i w_i B_i A_i$.

    Args:
        name: what requests call it.
        parts: adapters of one model, with their weights.
        rank: of each change. None keeps the sum as it is, of the sum of the ranks; a smaller number takes the nearest
            matrix of that rank (in the sum of squares), from a singular value decomposition of the factors.

    Raises:
        InvalidArgument: no parts, or a weight that is not finite.

    Source: Eckart and Young 1936, for the nearest matrix.

    >>> layer = nn.Linear(2, 2)
    >>> first, second = torch.eye(2).split(1)
    >>> one = Adapter("one", {layer: (LowRankUpdate(first, first.T),)})
    >>> two = Adapter("two", {layer: (LowRankUpdate(first, second.T),)})
    >>> (change,) = combine("both", [(one, 1.0), (two, 0.5)]).changes[layer]
    >>> change.up @ change.down
    tensor([[1.0000, 0.0000],
            [0.5000, 0.0000]])
    """
    if not parts or not all(math.isfinite(weight) for _, weight in parts):
        weights = ", ".join(f"{weight}" for _, weight in parts)
        raise InvalidArgument(f"adapters are combined with finite weights, at least one; got {weights or 'none'}")
    found: dict[nn.Module, dict[int, list[tuple[Tensor, Tensor]]]] = {}
    for adapter, weight in parts:
        for layer, changes in adapter.changes.items():
            for change in changes:
                found.setdefault(layer, {}).setdefault(change.start, []).append((change.down, change.up * weight))
    changes_of: dict[nn.Module, tuple[LowRankUpdate, ...]] = {}
    nbytes = 0
    for layer, starts in found.items():
        sums = []
        for start, pairs in starts.items():
            down, up = torch.cat([down for down, _ in pairs]), torch.cat([up for _, up in pairs], 1)
            if rank is not None and rank < len(down):
                down, up = truncate(down, up, rank)
            sums.append(LowRankUpdate(down, up, start))
            nbytes += down.nbytes + up.nbytes
        changes_of[layer] = tuple(sums)
    return Adapter(name, changes_of, nbytes)


def truncate(
    down: Float[Tensor, "rank inputs"], up: Float[Tensor, "outputs rank"], rank: int
) -> tuple[Float[Tensor, "kept inputs"], Float[Tensor, "outputs kept"]]:
    """The nearest product of a smaller rank, both factors carrying the roots of its singular values.

    The matrix itself is never formed: the decomposition is that of the product of two small triangular factors.
    """
    left, inner_left = torch.linalg.qr(up.double())
    right, inner_right = torch.linalg.qr(down.double().T)
    u, sizes, v = torch.linalg.svd(inner_left @ inner_right.T, full_matrices=False)
    roots = sizes[:rank].sqrt()
    smaller_down, smaller_up = roots[:, None] * (v[:rank] @ right.T), (left @ u[:, :rank]) * roots
    return smaller_down.to(down.dtype), smaller_up.to(up.dtype)
