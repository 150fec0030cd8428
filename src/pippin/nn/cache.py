"""What attention asks of a key-value cache, and the pass without one.

Notable here:
- a model never knows which cache it has: it appends keys and values and gets back all that it may look at
- `length` moves once per forward pass, at its end, so that a pass that is interrupted leaves no trace
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

# Keys or values of the new tokens, and of all that they may look at.
New = Float[Tensor, "batch kv_heads new head_dim"]
Seen = Float[Tensor, "batch kv_heads seen head_dim"]


@runtime_checkable
class KVCache(Protocol):
    """Keys and values of the tokens so far, one store per layer."""

    @property
    def length(self) -> int:
        """Tokens held; the position of the next one (in a batch: of the longest row)."""

    def append(self, layer: int, k: New, v: New, window: int | None) -> tuple[Seen, Seen, Tensor | None]:
        """Add the new tokens of one layer; return all visible keys, values, and the mask.

        The mask is boolean, true where a query may look, broadcastable to (batch, heads, new, seen). None means
        plain causal order: each new token sees everything older than itself.
        """

    def advance(self, new: int) -> None:
        """Make the tokens that were appended to every layer permanent."""


class NoCache:
    """A whole sequence at once: nothing is kept. ``padding`` holds the number of pad tokens on the left of each row."""

    def __init__(self, padding: Int[Tensor, batch] | None = None) -> None:
        self.padding = padding
        self.masks: dict[int | None, Tensor | None] = {}

    @property
    def length(self) -> int:
        """Always 0."""
        return 0

    def append(self, layer: int, k: New, v: New, window: int | None) -> tuple[Seen, Seen, Tensor | None]:
        """Return what came in, with the mask that causal order, window and padding ask for."""
        if window not in self.masks:
            self.masks[window] = causal_mask(0, k.shape[2], window, self.padding, k.device)
        return k, v, self.masks[window]

    def advance(self, new: int) -> None:
        """Nothing is kept."""


def causal_mask(
    start: int, new: int, window: int | None, padding: Int[Tensor, batch] | None, device: torch.device
) -> Bool[Tensor, "#batch 1 new seen"] | None:
    """Who may look at whom: ``new`` queries after ``start`` older tokens, over all ``start + new`` keys.

    Key j is visible to query i iff j <= i, i - j < window, and j is not padding. None where causal order says it all.
    """
    seen = start + new
    fits = window is None or seen <= window
    if padding is None and fits and (start == 0 or new == 1):
        return None
    query = torch.arange(start, seen, device=device)[:, None]
    key = torch.arange(seen, device=device)[None, :]
    mask = key <= query
    if window is not None:
        mask &= query - key < window
    if padding is None:
        return mask[None, None]
    # a row that is all padding sees itself, so that no softmax is taken over nothing
    real = (key[None] >= padding[:, None, None]) | (key == query)[None]
    return (mask[None] & real)[:, None]
