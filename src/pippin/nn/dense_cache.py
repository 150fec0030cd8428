"""A key-value cache in memory taken beforehand, that can be wound back: for generators that know how long they get.

Notable here:
- nothing is copied but the new keys and values; a pass over several tokens may be repeated until it is settled
"""

from __future__ import annotations

from torch import Tensor

from pippin.core.errors import InvalidArgument
from pippin.nn.cache import New, Read, causal_mask


class DenseCache:
    """Keys and values of a batch of equally long sequences.

    Args:
        layers: layers with keys of their own.
        capacity: tokens at most.

    Raises:
        InvalidArgument: later, more tokens than there is room for.
    """

    def __init__(self, layers: int, capacity: int) -> None:
        self.capacity = capacity
        self.positions: None = None
        self._length = 0
        self._keys: list[Tensor | None] = [None] * layers
        self._values: list[Tensor | None] = [None] * layers
        self._masks: dict[tuple[int, int, int | None], Tensor | None] = {}

    @property
    def length(self) -> int:
        """Tokens kept."""
        return self._length

    def append(self, layer: int, k: New, v: New, window: int | None) -> Read:
        """Put the new keys and values behind those that were kept; causal order among the new ones."""
        start, new = self._length, k.shape[2]
        if start + new > self.capacity:
            raise InvalidArgument(f"a cache for {self.capacity} tokens holds {start} and was given {new} more")
        keys, values = self._keys[layer], self._values[layer]
        if keys is None or values is None:
            shape = (k.shape[0], k.shape[1], self.capacity)
            keys = self._keys[layer] = k.new_empty(*shape, k.shape[3])
            values = self._values[layer] = v.new_empty(*shape, v.shape[3])
        keys[:, :, start : start + new] = k
        values[:, :, start : start + new] = v
        key = (start, new, window)
        if key not in self._masks:
            self._masks[key] = causal_mask(start, new, window, None, k.device)
        return keys[:, :, : start + new], values[:, :, : start + new], self._masks[key]

    def advance(self, new: int) -> None:
        """Keep the new tokens."""
        self._length += new

    def rewind(self, length: int) -> None:
        """Forget the tokens from place ``length`` on.

        Raises:
            InvalidArgument: there are fewer.
        """
        if not 0 <= length <= self._length:
            raise InvalidArgument(f"a cache of {self._length} tokens cannot be wound back to {length}")
        self._length = length
