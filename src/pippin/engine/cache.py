"""The dense key-value cache: memory for the whole request is taken once, and a decode step takes none.

Notable here:
- layers that share keys and values cost nothing: only layers with their own have a store
- a layer with a window keeps all its keys but shows only those in reach, as a view
- `truncate` forgets the newest tokens, so that a cache can be used again from any common prefix
"""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from pippin.core.errors import InvalidArgument
from pippin.language.transformer import DecoderConfig
from pippin.nn.cache import New, Seen, causal_mask


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
    def nbytes(self) -> int:
        """Size of the store."""
        return self.store.nbytes

    def append(self, layer: int, k: New, v: New, window: int | None) -> tuple[Seen, Seen, Tensor | None]:
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

    def copy_prefix(self, other: DenseCache, length: int) -> None:
        """Begin with the first ``length`` tokens of another cache of the same decoder."""
        self.store[:, :, :, :, :length] = other.store[:, :, :, :, :length]
        self._length = length
        self._masks.clear()
