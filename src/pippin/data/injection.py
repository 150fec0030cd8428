"""Injection of pretraining data: a stream of fine-tuning data with a fixed share of pretraining data.

Notable here:
- the share holds at every position and not only on average: the next item is an old one when, without it, the old ones
  would fall behind; so small shares are evenly spaced
- a share of tokens, not of items, where items differ in size: `size=len`
- the target data ends the stream; the pretraining data starts again when it ends
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import numpy as np

from pippin.core.checks import Fraction, checked
from pippin.core.errors import InvalidArgument, InvalidInput
from pippin.data.streams import DataStream

T = TypeVar("T")


class Injected(Generic[T]):
    """Items of the target data, mixed with a share of items of the pretraining data.

    To see the same target data takes 1 / (1 - share) times as many items.

    Args:
        target: when it ends, the stream ends.
        pretraining: starts again when it ends; not read at all if the share is 0.
        share: share of pretraining data in all items, from 0 to below 1. At 0 the stream is the target data.
        stratified: hold the share at every position; False samples each item independently, as the published runs do.
        seed: seed of the samples; with stratification, of the position of the first old item.
        size: size of an item; None counts items. Without stratification all items have size 1.

    Raises:
        InvalidArgument: sizes without stratification.
        InvalidInput: pretraining data without an item.

    Source: Bethune et al., arXiv:2502.06042, section 3 (independent sampling); the even spacing is our own.

    >>> import itertools
    >>> from pippin.data.streams import Shuffled
    >>> stream = Injected(Shuffled(["new"], 1), Shuffled(["old"], 1), 0.25)
    >>> [item for [item] in itertools.islice(stream, 400)].count("old")
    100
    """

    @checked
    def __init__(
        self,
        target: DataStream[T],
        pretraining: DataStream[T],
        share: Fraction,
        *,
        stratified: bool = True,
        seed: int = 0,
        size: Callable[[T], float] | None = None,
    ) -> None:
        if size is not None and not stratified:
            raise InvalidArgument("sizes are kept to by stratification; leave size out, or stratified=True")
        self.target, self.pretraining, self.share = target, pretraining, share
        self.stratified, self.seed, self.size = stratified, seed, size
        self._drawn, self._total, self._old = 0, 0.0, 0.0
        if share > 0:
            cursor = pretraining.state_dict()
            if next(iter(pretraining), None) is None:
                raise InvalidInput("the pretraining data is empty; there is nothing to inject")
            pretraining.load_state_dict(cursor)

    def __iter__(self) -> Iterator[T]:
        """The items from the cursor on."""
        drawn, total, old = self._drawn, self._total, self._old
        new_items, old_items = iter(self.target), iter(self.pretraining) if self.share else iter(())
        begin = float(np.random.default_rng(self.seed).random())
        while True:
            if self._is_old(drawn, total, old, begin):
                item = next(old_items, None)
                if item is None:
                    old_items = iter(self.pretraining)
                    item = next(old_items)
                weight = 1.0 if self.size is None else float(self.size(item))
                old += weight
            else:
                item = next(new_items, None)
                if item is None:
                    break
                weight = 1.0 if self.size is None else float(self.size(item))
            drawn, total = drawn + 1, total + weight
            self._drawn, self._total, self._old = drawn, total, old
            yield item
        self._drawn, self._total, self._old = 0, 0.0, 0.0

    def _is_old(self, drawn: int, total: float, old: float, begin: float) -> bool:
        """Whether the next item is an old one; ``begin`` is the initial offset of the old ones, in items."""
        if self.share == 0:
            return False
        if not self.stratified:
            return bool(np.random.default_rng((self.seed, drawn)).random() < self.share)
        mean = total / drawn if drawn else 1.0
        return old + (1 - begin) * mean <= self.share * (total + mean)

    def state_dict(self) -> dict[str, Any]:
        """Number and sizes of the items so far, and the cursors of both streams."""
        return {
            "drawn": self._drawn,
            "total": self._total,
            "old": self._old,
            "target": self.target.state_dict(),
            "pretraining": self.pretraining.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move the cursor."""
        self._drawn, self._total, self._old = int(state["drawn"]), float(state["total"]), float(state["old"])
        self.target.load_state_dict(state["target"])
        self.pretraining.load_state_dict(state["pretraining"])
