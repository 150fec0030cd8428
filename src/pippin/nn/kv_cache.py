"""The interface between attention and key-value caches, and caches for a single forward pass.

Notable here:
- a model does not know which cache it has: it appends keys and values and gets back all that it may attend to
- `length` changes once per forward pass, at its end, so that an interrupted pass changes nothing
- sequences of different lengths need no padding: their new tokens are packed into one row, each with its own keys
- layers after the last layer with its own keys change no cache, so they may compute selected tokens only
- for training, whole documents are packed into one row in the same way, and nothing is cached
- attention that is not causal (denoising, infilling) has an explicit mask
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from pippin.core.errors import InvalidArgument
from pippin.nn.expert_mask import ExpertMaskSlices
from pippin.nn.lora import AdapterSlices
from pippin.nn.steering import SteeringSlices

# Keys or values of the new tokens.
New = Float[Tensor, "batch kv_heads new head_dim"]

# All visible keys, values, and the mask: boolean, true where a query may attend, broadcastable to (batch, heads, new,
# seen). None means causal order: each new token attends to itself and all earlier tokens.
KeyValues = tuple[Tensor, Tensor, Tensor | None]


@runtime_checkable
class AttentionObserver(Protocol):
    """Is shown the attention of one sequence in each layer."""

    def __call__(
        self,
        q: Float[Tensor, "1 heads new head_dim"],
        keys: Float[Tensor, "1 kv_heads seen head_dim"],
        mask: Bool[Tensor, "1 1 new seen"] | None,
        *,
        scale: float,
        softcap: float | None,
    ) -> None:
        """Observe queries, the keys that they may attend to, and the mask (None for causal order)."""


class PackedKeyValues(NamedTuple):
    """Keys and values of several sequences whose new tokens are packed into one row of the batch."""

    counts: list[int]
    """New tokens of each sequence."""
    reads: list[KeyValues]
    """Keys, values and mask of each sequence."""
    observers: list[AttentionObserver | None] | None = None
    """For each sequence, what is shown its queries, keys and mask; None for nothing."""


@runtime_checkable
class CacheReader(Protocol):
    """A cache that computes attention itself, for instance by a kernel that reads paged keys and values in place."""

    def attend(
        self, q: Float[Tensor, "batch heads new head_dim"], scale: float | None
    ) -> Float[Tensor, "batch new all_heads"]:
        """Attention output, heads concatenated; ``scale`` multiplies the scores, None for ``head_dim ** -0.5``."""


# Everything that the queries of a layer may attend to.
VisibleKeyValues = KeyValues | PackedKeyValues | CacheReader


class QuerySelection(NamedTuple):
    """A selection of the new tokens that are computed from the queries of one layer on."""

    layer: int
    """The layer; its keys and values are still computed for all new tokens."""
    rows: Int[Tensor, wanted]
    """Indices of the selected tokens among all packed new tokens; may be empty."""
    adapters: AdapterSlices | None = None
    """Low-rank adapters, each with the tokens among ``rows`` that it applies to."""
    steerings: SteeringSlices | None = None
    """Changes of hidden states, likewise."""
    experts: ExpertMaskSlices | None = None
    """Masks of experts, likewise."""


@runtime_checkable
class KVCache(Protocol):
    """The keys and values of all tokens so far, for each layer."""

    @property
    def length(self) -> int:
        """Number of cached tokens: the position of the next one (in a batch: of the longest row)."""

    @property
    def positions(self) -> Int[Tensor, "*rows new"] | None:
        """The position of each new token; None if positions are consecutive from `length` on.

        (batch, new) if the rows of the batch differ, and (axes, batch, new) for rotations over several axes; `length`
        plus the new tokens is above every position.
        """

    def append(self, layer: int, k: New, v: New, window: int | None) -> VisibleKeyValues:
        """Add keys and values of the new tokens of one layer; returns all that these tokens may attend to."""

    def advance(self, new: int) -> None:
        """Commit the tokens that were appended to every layer."""


@runtime_checkable
class ResumableCache(KVCache, Protocol):
    """A cache for passes that start after the first layer, or that compute only selected tokens from some layer on."""

    def view(self, layer: int, window: int | None) -> VisibleKeyValues:
        """All that the tokens of this pass may attend to in a layer whose keys and values are already cached."""

    def narrow(self) -> None:
        """From now on, `append` and `view` return masks for the selected tokens only."""


class NoCache:
    """A cache for whole sequences in one pass, which stores nothing.

    Args:
        padding: number of padding tokens on the left of each row; None for none.
    """

    def __init__(self, padding: Int[Tensor, batch] | None = None) -> None:
        self.padding = padding
        self.masks: dict[int | None, Tensor | None] = {}

    @property
    def length(self) -> int:
        """Always 0."""
        return 0

    @property
    def positions(self) -> None:
        """None: positions are consecutive."""
        return None

    def append(self, layer: int, k: New, v: New, window: int | None) -> KeyValues:
        """Return the new keys and values with the mask for causal order, window and padding."""
        if window not in self.masks:
            self.masks[window] = causal_mask(0, k.shape[2], window, self.padding, k.device)
        return k, v, self.masks[window]

    def advance(self, new: int) -> None:
        """Do nothing, as nothing is cached."""


class PackedDocuments:
    """Whole documents packed into one row of the batch, none attending to another; nothing is cached.

    Positions start at 0 in each document, so logits and gradients are those of each document alone.

    Args:
        counts: number of tokens of each document, in order; they sum to the tokens of the pass.

    Raises:
        InvalidArgument: no documents, or a document without tokens; in `append`, another number of tokens or rows.

    >>> PackedDocuments([2, 3]).positions.tolist()
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

    def append(self, layer: int, k: New, v: New, window: int | None) -> PackedKeyValues:
        """Split the new keys and values by document."""
        if k.shape[0] != 1 or k.shape[2] != sum(self.counts):
            raise InvalidArgument(
                f"documents of {sum(self.counts)} tokens were given {k.shape[0]} rows of {k.shape[2]}; "
                "pack the rows into one: ids.view(1, -1)"
            )
        parts = zip(self.counts, k.split(self.counts, dim=2), v.split(self.counts, dim=2), strict=True)
        return PackedKeyValues(
            self.counts, [(keys, values, self._mask(n, window, k.device)) for n, keys, values in parts]
        )

    def advance(self, new: int) -> None:
        """Do nothing, as nothing is cached."""

    def _mask(self, count: int, window: int | None, device: torch.device) -> Tensor | None:
        if window is None or count <= window:
            return None
        if (count, window) not in self.masks:
            self.masks[count, window] = causal_mask(0, count, window, None, device)
        return self.masks[count, window]


class MaskedCache:
    """A cache with an explicit attention mask, optionally after tokens whose keys and values are cached.

    For passes that are not causal, such as bidirectional blocks, masked text or trees. The mask must include windows,
    if there are any.

    Args:
        mask: true where a new token (third dimension) may attend to a token (fourth): cached ones first, then new ones;
            batch and heads may be 1.
        past: cached keys and values before the new tokens; None for none.
        positions: position of each new token of each row, for padding on the left or several tokens at one position;
            None if they are consecutive.
        keep: whether to add the new keys and values to ``past`` at the end of the pass.

    Raises:
        InvalidArgument: a mask over another number of tokens, a token that attends to nothing, or ``keep`` without
            ``past``.

    >>> MaskedCache(torch.ones(1, 1, 2, 2, dtype=torch.bool)).length
    0
    """

    def __init__(
        self,
        mask: Bool[Tensor, "#batch #heads new seen"],
        past: PastKeyValues | None = None,
        *,
        positions: Int[Tensor, "batch new"] | None = None,
        keep: bool = False,
    ) -> None:
        if keep and past is None:
            raise InvalidArgument("keep=True needs a past that the new keys and values can join")
        self.past, self.mask, self.keep = PastKeyValues() if past is None else past, mask, keep
        if mask.shape[-1] != mask.shape[-2] + self.past.length:
            raise InvalidArgument(
                f"a mask of {mask.shape[-2]} new tokens after {self.past.length} must have "
                f"{mask.shape[-2] + self.past.length} columns, got {mask.shape[-1]}"
            )
        if not bool(mask.any(-1).all()):
            raise InvalidArgument("the mask lets a token attend to nothing, not even to itself")
        self.positions = positions
        self._new: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def length(self) -> int:
        """Number of tokens that were cached before this pass."""
        return self.past.length

    def append(self, layer: int, k: New, v: New, window: int | None) -> KeyValues:
        """Concatenate the new keys and values to the cached ones."""
        if k.shape[2] != self.mask.shape[-2]:
            raise InvalidArgument(f"the mask is for {self.mask.shape[-2]} new tokens, the pass has {k.shape[2]}")
        if layer in self.past.layers:
            keys, values = self.past.layers[layer]
            k, v = torch.cat([keys, k], 2), torch.cat([values, v], 2)
        if self.keep:
            self._new[layer] = (k, v)
        return k, v, self.mask

    def advance(self, new: int) -> None:
        """Cache the new keys and values, if ``keep`` was set."""
        if self.keep:
            self.past.layers, self.past.length = self._new, self.past.length + new


class PastKeyValues:
    """Cached keys and values of each layer with its own, (batch, kv_heads, length, head_dim); see `MaskedCache`."""

    def __init__(self) -> None:
        self.length = 0
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}


def causal_mask(
    start: int, new: int, window: int | None, padding: Int[Tensor, batch] | None, device: torch.device
) -> Bool[Tensor, "#batch 1 new seen"] | None:
    """The attention mask of ``new`` queries after ``start`` cached tokens, over all ``start + new`` keys.

    Key j is visible to query i if and only if j <= i, i - j < window, and j is not padding.

    Args:
        start: number of cached tokens.
        new: number of new tokens.
        window: size of the sliding window; None for none.
        padding: number of padding tokens on the left of each row; None for none.
        device: device of the mask.

    Returns:
        The mask; None if plain causal order suffices.
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
    # padding tokens attend to themselves, so that no softmax is over an empty set
    real = (key[None] >= padding[:, None, None]) | (key == query)[None]
    return (mask[None] & real)[:, None]
