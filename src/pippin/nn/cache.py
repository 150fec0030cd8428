"""What attention asks of a key-value cache, and the pass without one.

Notable here:
- a model never knows which cache it has: it appends keys and values and gets back all that it may look at
- `length` moves once per forward pass, at its end, so that a pass that is interrupted leaves no trace
- sequences of different length need no padding: their new tokens lie end to end in one row, and each has its own keys
- layers after the last one with keys of its own leave no trace, so they may compute the wanted tokens only
- whole documents packed into one row for training are the same case: end to end, told apart, nothing kept
- what is not read from left to right (denoising, infilling) brings a mask of its own
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from pippin.core.errors import InvalidArgument
from pippin.nn.lora import Shares

# Keys or values of the new tokens.
New = Float[Tensor, "batch kv_heads new head_dim"]

# All visible keys, values, and the mask: boolean, true where a query may look, broadcastable to (batch, heads, new,
# seen). None means plain causal order: each new token sees everything older than itself.
Read = tuple[Tensor, Tensor, Tensor | None]


class EndToEnd(NamedTuple):
    """What several sequences see whose new tokens lie one after another in a single row of the batch."""

    counts: list[int]
    """New tokens of each sequence."""
    reads: list[Read]
    """Keys, values and mask of each sequence."""


@runtime_checkable
class Reader(Protocol):
    """What looks at keys and values where they lie, in place of showing them."""

    def attend(
        self, q: Float[Tensor, "batch heads new head_dim"], scale: float | None
    ) -> Float[Tensor, "batch new all_heads"]:
        """What the queries read, the heads side by side; ``scale``: of the scores, None for ``head_dim ** -0.5``."""


# What a layer's queries look at.
Seen = Read | EndToEnd | Reader


class Cut(NamedTuple):
    """From the queries of one layer on, only some of the new tokens are computed."""

    layer: int
    """The layer; its keys and values are still those of all new tokens."""
    rows: Int[Tensor, wanted]
    """Which tokens, among all new ones laid end to end; may be empty."""
    adapters: Shares | None = None
    """Low-rank changes, each with the tokens among ``rows`` that it works on."""


@runtime_checkable
class KVCache(Protocol):
    """Keys and values of the tokens so far, one store per layer."""

    @property
    def length(self) -> int:
        """Tokens held; the position of the next one (in a batch: of the longest row)."""

    @property
    def positions(self) -> Int[Tensor, new] | None:
        """The position of each new token, where they do not simply follow each other from `length` on; else None."""

    def append(self, layer: int, k: New, v: New, window: int | None) -> Seen:
        """Add the new tokens of one layer; return all that they may look at."""

    def advance(self, new: int) -> None:
        """Make the tokens that were appended to every layer permanent."""


@runtime_checkable
class Resumable(KVCache, Protocol):
    """A cache for passes that begin after the first layer, or compute only some tokens from some layer on."""

    def view(self, layer: int, window: int | None) -> Seen:
        """What the tokens of this pass may look at in a layer whose keys and values are there already."""

    def narrow(self) -> None:
        """From now on, `append` and `view` tell what the wanted tokens may look at, rather than all new ones."""


class NoCache:
    """A whole sequence at once: nothing is kept. ``padding`` holds the number of pad tokens on the left of each row."""

    def __init__(self, padding: Int[Tensor, batch] | None = None) -> None:
        self.padding = padding
        self.masks: dict[int | None, Tensor | None] = {}

    @property
    def length(self) -> int:
        """Always 0."""
        return 0

    @property
    def positions(self) -> None:
        """None: tokens follow each other."""
        return None

    def append(self, layer: int, k: New, v: New, window: int | None) -> Read:
        """Return what came in, with the mask that causal order, window and padding ask for."""
        if window not in self.masks:
            self.masks[window] = causal_mask(0, k.shape[2], window, self.padding, k.device)
        return k, v, self.masks[window]

    def advance(self, new: int) -> None:
        """Nothing is kept."""


class Documents:
    """Whole documents end to end in one row of the batch: nothing is kept, and none sees another.

    Positions begin at 0 in each document, so logits and gradients are those of each document alone.

    Args:
        counts: tokens of each document, in order; they add up to the tokens of the pass.

    Raises:
        InvalidArgument: no documents, or one without tokens; later, a pass over another number of tokens or rows.

    >>> Documents([2, 3]).positions.tolist()
    [0, 1, 0, 1, 2]
    """

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = list(counts)
        if not self.counts or min(self.counts) < 1:
            raise InvalidArgument(f"documents need at least one token each, got {self.counts}")
        self.positions = torch.cat([torch.arange(count) for count in self.counts])
        self.masks: dict[tuple[int, int], Tensor | None] = {}

    @property
    def length(self) -> int:
        """Always 0."""
        return 0

    def append(self, layer: int, k: New, v: New, window: int | None) -> EndToEnd:
        """Cut what came in at the ends of the documents."""
        if k.shape[0] != 1 or k.shape[2] != sum(self.counts):
            raise InvalidArgument(
                f"documents of {sum(self.counts)} tokens were given {k.shape[0]} rows of {k.shape[2]}; "
                "lay the rows end to end: ids.view(1, -1)"
            )
        parts = zip(self.counts, k.split(self.counts, dim=2), v.split(self.counts, dim=2), strict=True)
        return EndToEnd(self.counts, [(keys, values, self._mask(n, window, k.device)) for n, keys, values in parts])

    def advance(self, new: int) -> None:
        """Nothing is kept."""

    def _mask(self, count: int, window: int | None, device: torch.device) -> Tensor | None:
        if window is None or count <= window:
            return None
        if (count, window) not in self.masks:
            self.masks[count, window] = causal_mask(0, count, window, None, device)
        return self.masks[count, window]


class Visible:
    """New tokens that see what a mask says, behind tokens whose keys and values were kept, if there are any.

    For passes that are not causal: blocks whose tokens see each other, masked text, trees. Windows are the mask's
    matter.

    Args:
        mask: true where a new token (third dimension) may look at a token, kept ones first, then the new ones; batch
            and heads may be 1.
        past: keys and values that stand before the new tokens; None for none.
        positions: of each new token of each row, for padding on the left or several tokens at one place; None where
            they follow each other.
        keep: whether the new ones join ``past`` at the end of the pass; False leaves it as it is.

    Raises:
        InvalidArgument: a mask over another number of tokens than there are, a token that sees nothing, ``keep``
            without ``past``.

    >>> Visible(torch.ones(1, 1, 2, 2, dtype=torch.bool)).length
    0
    """

    def __init__(
        self,
        mask: Bool[Tensor, "#batch #heads new seen"],
        past: Past | None = None,
        *,
        positions: Int[Tensor, "batch new"] | None = None,
        keep: bool = False,
    ) -> None:
        if keep and past is None:
            raise InvalidArgument("keep=True needs a past that the new keys and values can join")
        self.past, self.mask, self.keep = Past() if past is None else past, mask, keep
        if mask.shape[-1] != mask.shape[-2] + self.past.length:
            raise InvalidArgument(
                f"a mask of {mask.shape[-2]} new tokens behind {self.past.length} must have "
                f"{mask.shape[-2] + self.past.length} columns, got {mask.shape[-1]}"
            )
        if not bool(mask.any(-1).all()):
            raise InvalidArgument("the mask leaves a token that sees nothing, not even itself")
        self.positions = positions
        self._new: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def length(self) -> int:
        """Tokens kept before this pass."""
        return self.past.length

    def append(self, layer: int, k: New, v: New, window: int | None) -> Read:
        """Put the new keys and values behind those that were kept."""
        if k.shape[2] != self.mask.shape[-2]:
            raise InvalidArgument(f"the mask is of {self.mask.shape[-2]} tokens, the pass of {k.shape[2]}")
        if layer in self.past.layers:
            keys, values = self.past.layers[layer]
            k, v = torch.cat([keys, k], 2), torch.cat([values, v], 2)
        if self.keep:
            self._new[layer] = (k, v)
        return k, v, self.mask

    def advance(self, new: int) -> None:
        """Keep the new keys and values, where that was asked for."""
        if self.keep:
            self.past.layers, self.past.length = self._new, self.past.length + new


class Past:
    """Keys and values of each layer with its own, (batch, kv_heads, length, head_dim), for passes behind `Visible`."""

    def __init__(self) -> None:
        self.length = 0
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}


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
