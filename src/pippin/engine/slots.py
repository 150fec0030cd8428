"""Where the batching engine keeps keys and values: one dense cache per slot, grown as needed, under one bound.

Notable here:
- a slot keeps its contents when its request ends: the next request that begins like it does not compute them again
- what a request goes on from is taken over in place; what it merely shares (a system prompt) is copied, even from a
  busy slot, so that one conversation does not destroy another's memory
- memory is bounded in tokens: contents that nobody uses are dropped, the longest unused first, before room is denied
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pippin.core import device as devices
from pippin.core.errors import InvalidArgument
from pippin.engine.cache import DenseCache
from pippin.engine.engine import common_prefix
from pippin.language.load import LanguageModel
from pippin.nn.lora import Adapter

# Caches grow by this many tokens at a time.
BLOCK = 128


class Slot:
    """Room for one request. ``ids`` are the tokens that its cache holds, computed with ``adapter`` for ``owner``."""

    def __init__(self) -> None:
        self.cache: DenseCache | None = None
        self.ids: list[int] = []
        self.adapter: Adapter | None = None
        self.owner = ""
        self.busy = False
        self.used = 0

    @property
    def capacity(self) -> int:
        """Tokens that memory is held for."""
        cache = self.cache  # once: another thread may be counting
        return 0 if cache is None else cache.capacity

    def shared(self, ids: Sequence[int], adapter: Adapter | None, owner: str) -> int:
        """How many tokens of a prompt it holds; always fewer than all, because the last one gives the logits."""
        fits = self.adapter is adapter and self.owner == owner
        return min(common_prefix(self.ids, ids), len(ids) - 1) if fits else 0

    def drop(self) -> None:
        """Forget everything."""
        self.cache, self.ids, self.adapter = None, [], None


class Slots:
    """All slots of an engine. Used by one thread.

    Args:
        model: whose keys and values they hold.
        count: requests at the same time.
        capacity: tokens that all slots may hold together; rounded down to whole blocks.

    Raises:
        InvalidArgument: less than one slot or one block.
    """

    def __init__(self, model: LanguageModel, count: int, capacity: int) -> None:
        if count < 1:
            raise InvalidArgument(f"slots must be at least 1, got {count}")
        if capacity < BLOCK:
            raise InvalidArgument(f"cache_tokens must be at least {BLOCK}, got {capacity}")
        self.model, self.capacity = model, capacity // BLOCK * BLOCK
        self.slots = [Slot() for _ in range(count)]
        self._clock = 0

    @property
    def held(self) -> int:
        """Tokens that memory is held for, by requests and by what is kept of earlier ones."""
        return sum(slot.capacity for slot in self.slots)

    def acquire(self, ids: Sequence[int], adapter: Adapter | None, need: int, owner: str = "") -> Slot | None:
        """Take a slot with room for ``need`` tokens; it holds as much of ``ids`` already as any of this owner does.

        None if every slot is busy, or busy ones leave too little room.
        """
        free = [slot for slot in self.slots if not slot.busy]
        if not free or self._busy() + _blocks(need) > self.capacity:
            return None
        source = max(self.slots, key=lambda slot: slot.shared(ids, adapter, owner))
        keep = source.shared(ids, adapter, owner)
        goes_on = not source.busy and 2 * keep >= len(source.ids) > 0
        slot = source if goes_on else min(free, key=lambda slot: (slot.used, slot is source))
        self._take(slot)
        if slot is source and slot.cache is not None and keep:
            slot.cache.truncate(keep)
            del slot.ids[keep:]
        else:
            slot.drop()
        self._make_room(_blocks(need) - slot.capacity, source)
        self._allocate(slot, _blocks(need))
        if slot is not source and source.cache is not None and slot.cache is not None:
            slot.cache.copy_prefix(source.cache, keep)
            slot.ids = source.ids[:keep]
        slot.adapter, slot.owner = adapter, owner
        return slot

    def extend(self, slot: Slot, need: int) -> bool:
        """Make room for ``need`` tokens in a busy slot; False if the bound does not allow it."""
        if need <= slot.capacity:
            return True
        if self._busy() - slot.capacity + _blocks(need) > self.capacity:
            return False
        self._make_room(_blocks(need) - slot.capacity, slot)
        self._allocate(slot, _blocks(need))
        return True

    def release(self, slot: Slot, *, keep: bool) -> None:
        """Give a slot back; its contents stay for later requests if ``keep``."""
        slot.busy = False
        if not keep:
            slot.drop()

    def clear(self) -> None:
        """Free every slot and forget all contents."""
        for slot in self.slots:
            slot.busy = False
            slot.drop()

    def _busy(self) -> int:
        return sum(slot.capacity for slot in self.slots if slot.busy)

    def _take(self, slot: Slot) -> None:
        self._clock += 1
        slot.busy, slot.used = True, self._clock

    def _make_room(self, extra: int, last: Slot) -> None:
        """Drop what nobody uses until ``extra`` tokens fit; ``last`` goes last."""
        idle = [slot for slot in self.slots if not slot.busy]
        for slot in sorted(idle, key=lambda slot: (slot is last, slot.used)):
            if self.held + extra > self.capacity:
                slot.drop()

    def _allocate(self, slot: Slot, capacity: int) -> None:
        if slot.cache is None:
            model = self.model
            slot.cache = DenseCache(model.config, capacity, dtype=model.dtype, device=model.device)
        else:
            slot.cache.grow(capacity)


def _blocks(tokens: int) -> int:
    """Tokens of the blocks that hold so many.

    >>> _blocks(1), _blocks(128), _blocks(129)
    (128, 128, 256)
    """
    return -(-tokens // BLOCK) * BLOCK


def token_bytes(model: LanguageModel) -> int:
    """Memory of one token's keys and values."""
    config = model.config
    return 2 * len(config.cached_layers) * config.kv_heads * config.head_dim * model.dtype.itemsize


def affordable(model: LanguageModel, slots: int) -> int:
    """Tokens for the full context in every slot, or for a quarter of the free memory if that is less."""
    if model.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(model.device)
    else:
        free = devices.memory().available
    return max(BLOCK, min(slots * -(-model.context_size // BLOCK) * BLOCK, free // 4 // token_bytes(model)))
