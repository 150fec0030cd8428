"""The mask of a grammar without the tokens that go on with a list whose last item came too often.

Notable here:
- a small model that has read a list to its end may write its items again until the grammar's maximum; here the list
  ends instead, where an item came more often than a limit says
- the text is followed byte by byte as JSON: which lists are open, and where their items begin
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Int32
from llguidance import LLTokenizer

from pippin.engine.grammar.repeats import words_of

Limit = Callable[[str], int]
"""From the JSON text of an item to how often it may come."""


@dataclass(frozen=True)
class _Open:
    """A list or an object that is open: where its present item begins, and the items before it; None in an object."""

    start: int
    items: tuple[bytes, ...] | None


@dataclass(frozen=True)
class _State:
    """Where a text stands."""

    open: tuple[_Open, ...] = ()
    in_string: bool = False
    escaped: bool = False


class ItemLimits:
    """Follows one answer; an interface of `pippin.engine.grammar.constraint.Constraint`.

    Args:
        vocabulary: the tokens.
        limit: how often an item may come.
    """

    def __init__(self, vocabulary: LLTokenizer, limit: Limit) -> None:
        self.vocabulary, self.limit = vocabulary, limit
        self._data = b""
        self._states = [(0, _State())]
        self._must_go_on = False  # whether the grammar has nothing else than to go on, as for a list with minItems

    def accept(self, token: int) -> bool:
        """Read a token that the grammar allows.

        Returns:
            Whether it may come; if not, the state does not change.
        """
        data, (_, state) = self._bytes(token), self._states[-1]
        if b"," in data and not self._must_go_on and self._goes_on(data):
            return False
        text, self._must_go_on = self._data + data, False
        for at in range(len(self._data), len(text)):
            state = self._after(text, at, state)[0]
        self._data = text
        self._states.append((len(text), state))
        return True

    def reach(self, tokens: Sequence[int]) -> int:
        """How many tokens may come."""
        following = self.fork()
        return next((count for count, token in enumerate(tokens) if not following.accept(token)), len(tokens))

    def rollback(self, count: int) -> None:
        """Forget the last tokens."""
        del self._states[len(self._states) - count :]
        self._data, self._must_go_on = self._data[: self._states[-1][0]], False

    def fork(self) -> ItemLimits:
        """A copy that goes its own way."""
        other = copy.copy(self)
        other._states = list(self._states)
        return other

    def restrict(self, mask: Int32[np.ndarray, " words"]) -> None:
        """Take tokens out of the grammar's mask, in place, unless none would be left."""
        commas = words_of(self.vocabulary).among_items
        tried = commas[(mask[commas >> 5] >> (commas & 31)) & 1 == 1].tolist()
        banned = [token for token in tried if self._goes_on(self._bytes(token))]
        if not banned:
            return
        before = mask.copy()
        bits = mask.view(np.uint32)
        for token in banned:
            bits[token >> 5] &= np.uint32(0xFFFFFFFF ^ 1 << (token & 31))
        if not mask.any():
            mask[:] = before
            self._must_go_on = True

    def _bytes(self, token: int) -> bytes:
        return b"" if self.vocabulary.is_special_token(token) else self.vocabulary.decode_bytes([token])

    def _goes_on(self, data: bytes) -> bool:
        """Whether these bytes go on with a list after an item that came too often."""
        state, text = self._states[-1][1], self._data + data
        for at in range(len(self._data), len(text)):
            state, too_often = self._after(text, at, state)
            if too_often:
                return True
        return False

    def _after(self, text: bytes, at: int, state: _State) -> tuple[_State, bool]:
        """The state after the byte at an index, and whether it is a comma after an item that came too often."""
        byte = text[at : at + 1]
        if state.in_string:
            ends = byte == b'"' and not state.escaped
            return replace(state, in_string=not ends, escaped=byte == b"\\" and not state.escaped), False
        if byte == b'"':
            return replace(state, in_string=True), False
        if byte in (b"[", b"{"):
            opened = _Open(at + 1, () if byte == b"[" else None)
            return replace(state, open=(*state.open, opened)), False
        if byte in (b"]", b"}"):
            return replace(state, open=state.open[:-1]), False
        if byte != b"," or not state.open or state.open[-1].items is None:
            return state, False
        last = state.open[-1]
        assert last.items is not None
        item = text[last.start : at].strip()
        too_often = item in last.items and last.items.count(item) + 1 > self.limit(item.decode(errors="replace"))
        return replace(state, open=(*state.open[:-1], _Open(at + 1, (*last.items, item)))), too_often
