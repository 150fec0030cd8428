"""Responses kept in memory, so that the next request can go on from one of them.

Notable here:
- bounded in number and in bytes, the one used longest ago goes first; nothing is written to disk
- a response is found only by the key that made it
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from pippin.core.errors import InvalidArgument, ResponseNotFound


@dataclass(frozen=True)
class Kept:
    """One response.

    ``response`` is the object as the interface shows it, ``items`` the input that it answered, ``entries`` the whole
    conversation up to its end, without instructions of the request.
    """

    owner: str
    response: dict[str, Any]
    items: list[dict[str, Any]]
    entries: tuple[Any, ...]
    nbytes: int


class Store:
    """Responses by id; to be used from one event loop.

    Args:
        most: how many are kept.
        nbytes: how much text, in bytes; one response larger than that is not kept at all.

    Raises:
        InvalidArgument: a bound below 0.
    """

    def __init__(self, most: int = 1000, nbytes: int = 64 * 2**20) -> None:
        if most < 0 or nbytes < 0:
            raise InvalidArgument(f"a store keeps 0 responses and bytes or more, got {most} and {nbytes}")
        self._most, self._limit = most, nbytes
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, kept: Kept) -> None:
        """Keep a response."""
        self._kept[kept.response["id"]] = kept
        self.nbytes += kept.nbytes
        while self._kept and (len(self._kept) > self._most or self.nbytes > self._limit):
            self.nbytes -= self._kept.popitem(last=False)[1].nbytes

    def get(self, id: str, owner: str) -> Kept:
        """A response that this owner made.

        Raises:
            ResponseNotFound: there is none of this id.
        """
        kept = self._kept.get(id)
        if kept is None or kept.owner != owner:
            raise ResponseNotFound(
                f"no response {id[:100]!r} is kept for this key; it was never stored, was deleted, or had to make room"
            )
        self._kept.move_to_end(id)
        return kept

    def delete(self, id: str, owner: str) -> None:
        """Forget a response.

        Raises:
            ResponseNotFound: there is none of this id.
        """
        self.nbytes -= self.get(id, owner).nbytes
        del self._kept[id]
