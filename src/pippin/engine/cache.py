"""Key-value caches: a dense one, several of them side by side in one pass, and one with a tree of continuations.

Notable here:
- memory is taken ahead, so that a decode step takes none
- layers that share keys and values cost nothing: only layers with their own have a store
- a layer with a window keeps all its keys but shows only those in reach, as a view
- `truncate` forgets the newest tokens, so that a cache can be used again from any common prefix
- a batch of unequal requests is no tensor with holes: each has a `DenseCache` of its own, `SideBySide` passes each its
  part of the new tokens
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from pippin.core.errors import InvalidArgument
from pippin.language.transformer import DecoderConfig
from pippin.nn.cache import EndToEnd, New, Read, causal_mask


class DenseCache:
    """Preallocated keys and values.

    Args:
        config: the decoder whose layers are to be stored.
        capacity: tokens that fit.
        batch: rows.
        dtype: precision of the store.
        device: where it lies.
        padding: pad tokens at the left of each row.
    """

    def __init__(
        self,
        config: DecoderConfig,
        capacity: int,
        *,
        batch: int = 1,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        padding: Int[Tensor, batch] | None = None,
    ) -> None:
        if capacity < 1:
            raise InvalidArgument(f"a cache needs room for at least one token, got capacity {capacity}")
        self.config, self.capacity, self.padding = config, capacity, padding
        self._length = 0
        self._index = {layer: i for i, layer in enumerate(config.cached_layers)}
        shape = (len(self._index), 2, batch, config.kv_heads, capacity, config.head_dim)
        self.store = torch.empty(shape, dtype=dtype, device=device)
        self._layers = [(keys, values) for keys, values in self.store]
        self._masks: dict[int | None, Tensor | None] = {}

    @property
    def length(self) -> int:
        """Tokens held."""
        return self._length

    @property
    def positions(self) -> None:
        """None: tokens follow each other."""
        return None

    @property
    def nbytes(self) -> int:
        """Size of the store."""
        return self.store.nbytes

    def append(self, layer: int, k: New, v: New, window: int | None) -> Read:
        """Write the new tokens of one layer; return views of all that they may look at, and the mask.

        Raises:
            InvalidArgument: the tokens do not fit.
        """
        keys, values = self._layers[self._index[layer]]
        start, new = self._length, k.shape[2]
        end = start + new
        if end > self.capacity:
            raise InvalidArgument(f"the cache has room for {self.capacity} tokens, {end} were given")
        keys[:, :, start:end] = k
        values[:, :, start:end] = v
        # a single token of an unpadded row needs no mask: what lies outside its window is simply not shown
        first = max(0, end - window) if window is not None and new == 1 and self.padding is None else 0
        if window not in self._masks:
            self._masks[window] = None if first else causal_mask(start, new, window, self.padding, k.device)
        return keys[:, :, first:end], values[:, :, first:end], self._masks[window]

    def advance(self, new: int) -> None:
        """Make the appended tokens permanent."""
        self._length += new
        self._masks.clear()

    def truncate(self, length: int) -> None:
        """Forget all but the first ``length`` tokens.

        Raises:
            InvalidArgument: the cache does not hold so many.
        """
        if not 0 <= length <= self._length:
            raise InvalidArgument(f"cannot keep {length} tokens of {self._length}")
        self._length = length
        self._masks.clear()

    def grow(self, capacity: int) -> None:
        """Make room for ``capacity`` tokens; what is held stays."""
        *shape, old, head_dim = self.store.shape
        if capacity > old:
            store = self.store.new_empty((*shape, capacity, head_dim))
            store[..., : self._length, :] = self.store[..., : self._length, :]
            self.store, self.capacity = store, capacity
            self._layers = [(keys, values) for keys, values in store]
            self._masks.clear()

    def copy_prefix(self, other: DenseCache, length: int) -> None:
        """Begin with the first ``length`` tokens of another cache of the same decoder."""
        self.store[:, :, :, :, :length] = other.store[:, :, :, :, :length]
        self._length = length
        self._masks.clear()


class SideBySide:
    """Caches of different lengths in one pass: their new tokens lie end to end in the single row of a batch.

    Args:
        caches: one for each sequence.
        counts: new tokens of each.
    """

    def __init__(self, caches: Sequence[DenseCache], counts: Sequence[int]) -> None:
        self.caches, self.counts = list(caches), list(counts)
        self.length = max(cache.length for cache in caches)
        self.positions: Int[Tensor, new] = torch.cat(
            [torch.arange(c.length, c.length + n) for c, n in zip(self.caches, self.counts, strict=True)]
        ).to(caches[0].store.device)

    def append(self, layer: int, k: New, v: New, window: int | None) -> EndToEnd:
        """Give each cache its part."""
        parts = zip(self.caches, k.split(self.counts, 2), v.split(self.counts, 2), strict=True)
        return EndToEnd(self.counts, [cache.append(layer, keys, values, window) for cache, keys, values in parts])

    def advance(self, new: int) -> None:
        """Make the appended tokens permanent in every cache."""
        for cache, count in zip(self.caches, self.counts, strict=True):
            cache.advance(count)


class Branches:
    """Several continuations of what one cache holds, in one pass: each sees the trunk and itself, none sees another.

    What they append lies in the cache behind its last token and is forgotten with the pass.

    Args:
        trunk: holds the common beginning, and has room for all continuations.
        counts: tokens of each continuation; they lie end to end in the single row of a batch.
    """

    def __init__(self, trunk: DenseCache, counts: Sequence[int]) -> None:
        self.trunk, self.length = trunk, trunk.length
        start, device = trunk.length, trunk.store.device
        self.positions: Int[Tensor, new] = torch.cat([torch.arange(start, start + n) for n in counts]).to(device)
        branch = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)).to(device)
        key = torch.cat([torch.arange(start, device=device), self.positions])
        self._distance = self.positions[:, None] - key
        self._visible = torch.ones(self._distance.shape, dtype=torch.bool, device=device)
        self._visible[:, start:] = (branch[:, None] == branch) & (self._distance[:, start:] >= 0)

    def append(self, layer: int, k: New, v: New, window: int | None) -> Read:
        """Write all continuations behind the trunk."""
        keys, values, _ = self.trunk.append(layer, k, v, None)
        visible = self._visible if window is None else self._visible & (self._distance < window)
        return keys, values, visible[None, None]

    def advance(self, new: int) -> None:
        """Forget the continuations: the trunk is as it was."""
        self.trunk.truncate(self.length)
