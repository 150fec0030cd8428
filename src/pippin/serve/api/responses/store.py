"""In-memory store of responses, so that a later request can continue from one of them.

Notable here:
- bounded in number and in bytes, the least recently used is evicted first; nothing is written to disk
- a response is available only to the key that created it
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from pippin.core.checks import NonNegativeInt, checked
from pippin.core.errors import ResponseNotFound


@dataclass(frozen=True)
class StoredResponse:
    """One response.

    ``response`` is the object in the format of the API, ``items`` the input that it answered, ``entries`` the whole
    conversation up to its end, without instructions of the request.
    """

    owner: str
    response: dict[str, Any]
    items: list[dict[str, Any]]
    entries: tuple[Any, ...]
    nbytes: int


class ResponseStore:
    """Responses by id; to be used from one event loop.

    Args:
        max_responses: maximum number of responses.
        max_bytes: maximum text in bytes; a larger response is not stored at all.
    """

    @checked
    def __init__(self, max_responses: NonNegativeInt = 1000, max_bytes: NonNegativeInt = 64 * 2**20) -> None:
        self._most, self._limit = max_responses, max_bytes
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._responses)

    def put(self, stored: StoredResponse) -> None:
        """Store a response."""
        self._responses[stored.response["id"]] = stored
        self.nbytes += stored.nbytes
        while self._responses and (len(self._responses) > self._most or self.nbytes > self._limit):
            self.nbytes -= self._responses.popitem(last=False)[1].nbytes

    def get(self, id: str, owner: str) -> StoredResponse:
        """A response of this owner.

        Raises:
            ResponseNotFound: no response has this id.
        """
        stored = self._responses.get(id)
        if stored is None or stored.owner != owner:
            raise ResponseNotFound(
                f"no response {id[:100]!r} is stored for this key; it was never stored, was deleted, or was evicted"
            )
        self._responses.move_to_end(id)
        return stored

    def delete(self, id: str, owner: str) -> None:
        """Delete a response.

        Raises:
            ResponseNotFound: no response has this id.
        """
        self.nbytes -= self.get(id, owner).nbytes
        del self._responses[id]
