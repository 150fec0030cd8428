r"""Low-rank adapters: what is added to a linear layer's output, for the tokens of one request and no others.

Notable here:
- an adapter is an object beside the model, not a change of it: layers are looked up in it, so that packed and fused
  weights need no special case, several adapters work in one batch, and removing one is dropping the object
- a layer without adapters pays for one comparison with None
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor, nn


@dataclass(frozen=True)
class LowRank:
    r"""The change of one weight matrix: $\Delta W = B A$, with the scale already in $B$.

    Args:
        down: $A$.
        up: $B$, times the adapter's scale.
        start: the first output that it changes, in a layer that several were fused into.

    Source: Hu et al. 2021, arXiv:2106.09685, section 4.1.
    """

    down: Float[Tensor, "rank inputs"]
    up: Float[Tensor, "outputs rank"]
    start: int = 0

    def add(self, x: Float[Tensor, "tokens inputs"], y: Float[Tensor, "tokens all_outputs"]) -> None:
        """Add the change's share to the outputs ``y`` that the layer gave for ``x``, in place."""
        y[:, self.start : self.start + self.up.shape[0]].add_((x @ self.down.T) @ self.up.T)


@dataclass(frozen=True, eq=False)
class Adapter:
    """The changes of a model's layers. Two adapters are equal only if they are the same object.

    Args:
        name: what requests call it.
        changes: for each layer that it changes, the change (or those of the layers that were fused into it).
        nbytes: memory of all changes.
    """

    name: str
    changes: Mapping[nn.Module, tuple[LowRank, ...]]
    nbytes: int = 0


# Which tokens an adapter works on: positions among all tokens of the batch, laid end to end.
Shares = Sequence[tuple[Adapter, slice]]


def adapt(layer: nn.Module, x: Tensor, y: Tensor, shares: Shares) -> Tensor:
    """Add to a layer's output what the adapters of its tokens say, in place; return it.

    >>> import torch
    >>> layer, x = nn.Linear(2, 2, bias=False), torch.ones(1, 3, 2)
    >>> double = Adapter("double", {layer: (LowRank(torch.eye(2), torch.eye(2)),)})
    >>> adapt(layer, x, torch.zeros(1, 3, 2), [(double, slice(1, 3))])[0, :, 0]
    tensor([0., 1., 1.])
    """
    flat_x, flat_y = x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1])
    for adapter, tokens in shares:
        for change in adapter.changes.get(layer, ()):
            change.add(flat_x[tokens], flat_y[tokens])
    return y
