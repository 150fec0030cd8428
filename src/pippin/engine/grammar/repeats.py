"""The mask of a grammar without the tokens that would repeat a name of an object or an item of a distinct list.

Notable here:
- brackets after which something must not repeat have rules of their own in the grammar; a second matcher, over bytes,
  follows the text, in whose grammar a probe may follow such a bracket: so the engine's parser says which alternatives
  of the schema are being written
- a token is taken away if it completes a repeat, or if every way to go on after it would (a list of distinct digits has
  no eleventh item), which the second matcher finds out
- tokens that complete a repeat are found from the earlier items, as ranges of the sorted vocabulary; those that hold a
  comma between two items are read one by one
"""

from __future__ import annotations

import copy
import functools
import re
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from jaxtyping import Int32
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from pippin.core.errors import UnsupportedGuide
from pippin.engine.grammar import regex as regular
from pippin.engine.grammar.distinct import IN_KEY, IN_STRING, LIST, OUTSIDE, SET, VALUE, Frame, State
from pippin.engine.grammar.stack import with_stack

NAMES: Final = "opening_of_names"
SCARCE_NAMES: Final = "opening_of_scarce_names"
ITEMS: Final = "opening_of_items"
SCARCE_ITEMS: Final = "opening_of_scarce_items"
COMMA: Final = "comma_of_items"
"""Rules of the brackets of objects and of lists of distinct items, and of the comma in such lists. They are scarce
where the beginning of a name or an item may leave only repeats to go on with."""

_OPENING: Final = re.compile(r'^(\w*opening_of_(scarce_)?(names|items)): "[{[]"$', re.MULTILINE)
_JSON: Final = re.compile(r"start: v0(::0x0)?\n")
_CONTROL: Final = re.compile(r"<\[(\d+)\]>")
_COMMA: Final = re.compile(r"^(\w*comma_of_items): ", re.MULTILINE)
_PROBES: Final = {"names": 257, "items": 258, "comma": 259}
_BRACKETS, _COMMA_BYTE = b"[{", ord(",")
_KEPT: Final = 64  # states that are kept for steps back; further back, the text is read again
_LOOKS: Final = 400  # bytes that are tried to find a way to go on
_AFTER_STRING: Final = re.compile(rb'".*,', re.DOTALL)
_WHOLE: Final = re.compile(rb"[\[{].*,", re.DOTALL)


def is_needed(source: str) -> bool:
    """Whether a grammar has names or items that must not repeat.

    >>> is_needed("start: /a+/")
    False
    """
    return _OPENING.search(source) is not None


class _Words:
    """The tokens of a vocabulary as bytes, in order."""

    def __init__(self, vocabulary: LLTokenizer) -> None:
        size = vocabulary.vocab_size
        self.by_id = [
            b"" if vocabulary.is_special_token(token) else vocabulary.decode_bytes([token]) for token in range(size)
        ]
        order = sorted(range(size), key=self.by_id.__getitem__)
        self.sorted, self.ids = [self.by_id[token] for token in order], np.array(order)
        commas = [token for token in range(size) if b"," in self.by_id[token]]
        self.among_items = np.array(commas, dtype=np.int64)
        self.after_string, self.whole = (
            np.array([token for token in commas if form.search(self.by_id[token])], dtype=np.int64)
            for form in (_AFTER_STRING, _WHOLE)
        )

    def range(self, prefix: bytes, first: int, last: int) -> tuple[int, int]:
        """Where the tokens that begin with some bytes stand in a part of the order."""
        first = bisect_left(self.sorted, prefix, first, last)
        return first, bisect_left(self.sorted, prefix + b"\xff" * 8, first, last)


words_of = functools.lru_cache(maxsize=4)(_Words)
"""The tokens of a vocabulary."""


class Repeats:
    """What one answer has written in lists of distinct items and in objects.

    Args:
        source: the grammar.
        vocabulary: the tokens.
    """

    def __init__(self, source: str, vocabulary: LLTokenizer) -> None:
        self.source, self.vocabulary = source, vocabulary
        kinds = {(found[2], found[3]) for found in _OPENING.finditer(source)}
        self.scarce = any(scarce for scarce, _ in kinds)
        self.unknown_list = SET if any(kind == "items" for _, kind in kinds) else LIST
        self.is_json = _JSON.match(source) is not None
        self.tokens: list[int] = []
        self._states = [State()]  # after the last tokens
        self._reader: _Reader | None = None

    @property
    def state(self) -> State:
        """Where the text stands."""
        return self._states[-1]

    def accept(self, token: int) -> bool:
        """Read a token that the grammar allows.

        Returns:
            Whether it repeats nothing; if it does, the state does not change.
        """
        data, state = self.bytes_of(token), self.state
        following = state.after(data) if self._is_known(state, data) else self._read().after(data)
        if following is None:
            return False
        self.tokens.append(token)
        self._states = [*self._states[-_KEPT:], following]
        return True

    def _is_known(self, state: State, data: bytes) -> bool:
        """Whether no bracket in these bytes is of a kind that only the grammar knows."""
        if state.mode == OUTSIDE:
            first = self.is_json and not self.tokens and self.unknown_list == LIST
            return first or not any(byte in data for byte in _BRACKETS)
        return self.unknown_list == LIST or not (b"[" in data or (b"," in data and any(map(_is_set, state.frames))))

    def reach(self, tokens: Sequence[int]) -> int:
        """How many tokens repeat nothing, as far as can be said before they are written."""
        state: State | None = self.state
        for count, token in enumerate(tokens):
            assert state is not None
            state = self._guessed(state, self.bytes_of(token))
            if state is None:
                return count
        return len(tokens)

    def rollback(self, count: int) -> None:
        """Forget the last tokens."""
        kept = self.tokens[: len(self.tokens) - count]
        if self._reader is not None:
            self._reader.cut(len(kept))
        if count < len(self._states):
            self.tokens, self._states = kept, self._states[: len(self._states) - count]
            return
        self.tokens, self._states = [], [State()]
        for token in kept:
            self.accept(token)

    def fork(self) -> Repeats:
        """A copy that goes its own way."""
        other = copy.copy(self)
        other.tokens, other._states = list(self.tokens), list(self._states)
        needed = self.unknown_list == SET or not self.is_json
        other._reader = self._read().fork(other) if needed else None
        return other

    def restrict(self, mask: Int32[np.ndarray, " words"]) -> None:
        """Take tokens out of the grammar's mask, in place."""
        words, state = words_of(self.vocabulary), self.state
        in_string = state.mode in (IN_STRING, IN_KEY)
        tried = words.whole if state.mode == OUTSIDE else words.after_string if in_string else words.among_items
        ranges: list[tuple[int, int]] = []
        ends: list[int] = []
        if state.watched:
            self._walk(state, b"", (0, len(words.sorted)), ranges, ends)
        banned = [token for first, last in ranges for token in words.ids[first:last].tolist()]
        banned += [token for token in _allowed(mask, tried) if not self._may_come(token)]
        if self.scarce and ends:
            banned += [token for token in _allowed(mask, np.array(ends)) if not self._goes_on(token)]
        bits = mask.view(np.uint32)
        for token in banned:
            bits[token >> 5] &= np.uint32(0xFFFFFFFF ^ 1 << (token & 31))

    def bytes_of(self, token: int) -> bytes:
        """The text of a token; none of a control token."""
        return b"" if self.vocabulary.is_special_token(token) else self.vocabulary.decode_bytes([token])

    def _walk(
        self, state: State, prefix: bytes, span: tuple[int, int], ranges: list[tuple[int, int]], ends: list[int]
    ) -> None:
        """Collect ranges of tokens that complete a repeat, and tokens that end on the way to one."""
        words = words_of(self.vocabulary)
        for byte in state.dangers():
            longer = prefix + bytes((byte,))
            first, last = words.range(longer, *span)
            if first == last:
                continue
            following = state.after(longer[-1:], lists=self.unknown_list)
            if following is None:
                if byte != _COMMA_BYTE:  # tokens with a comma are read one by one
                    ranges.append((first, last))
            elif following.watched:
                self._walk(following, longer, (first, last), ranges, ends)
                while first < last and words.sorted[first] == longer:
                    ends.append(int(words.ids[first]))
                    first += 1

    def _may_come(self, token: int) -> bool:
        following = self._guessed(self.state, self.bytes_of(token))
        if following is None:
            following = self._read().after(self.bytes_of(token))
        return following is not None and not (self.scarce and following.watched and not self._goes_on(token))

    def _goes_on(self, token: int) -> bool:
        """Whether something can follow a token that repeats nothing."""
        return self._read().goes_on(self.bytes_of(token))

    def _guessed(self, state: State, data: bytes) -> State | None:
        """The state after bytes; lists that begin in them are taken for distinct ones, if there are such."""
        start = 0
        if state.mode == OUTSIDE:
            start = next((at for at, byte in enumerate(data) if byte in _BRACKETS), len(data))
        return state.after(data[start:], lists=self.unknown_list)

    def _read(self) -> _Reader:
        """The second matcher, at the present state."""
        if self._reader is None:
            self._reader = _Reader(self)
        self._reader.catch_up()
        return self._reader


def _is_set(frame: Frame) -> bool:
    return frame.kind == SET


def _allowed(mask: Int32[np.ndarray, " words"], tokens: Any) -> list[int]:
    found: list[int] = tokens[(mask[tokens >> 5] >> (tokens & 31)) & 1 == 1].tolist()
    return found


class _Bytes(regular.Bytes):
    """The bytes, an end, the probes, and control tokens."""

    def __init__(self, control: int) -> None:
        names = [*_PROBES, *(f"control {i}" for i in range(control))]
        tokens = [*regular.Bytes.tokens, *(f"<{name}>".encode() for name in names)]
        vars(self).update(tokens=tokens, special_token_ids=list(range(256, len(tokens))))


class _Reader:
    """A matcher over bytes that follows an answer."""

    def __init__(self, repeats: Repeats) -> None:
        self.repeats = repeats
        ids = dict.fromkeys(int(token) for token in _CONTROL.findall(repeats.source))
        self.control = {token: 257 + len(_PROBES) + at for at, token in enumerate(ids)}
        source = _CONTROL.sub(lambda found: f"<[{self.control[int(found[1])]}]>", repeats.source)
        source = _OPENING.sub(lambda found: f"{found[0]} <[{_PROBES[found[3]]}]>?", source)
        source = _COMMA.sub(lambda found: f"{found[0]}<[{_PROBES['comma']}]>? ", source)
        tokens = LLTokenizer(TokenizerWrapper(_Bytes(len(ids))), eos_token=256, slices=[])
        self.matcher = with_stack(source, lambda: LLMatcher(tokens, source, log_level=0, limits=regular.LIMITS))
        self.lengths: list[int] = []  # tokens of this matcher for each token of the answer

    def catch_up(self) -> None:
        """Read what the answer has more.

        Raises:
            UnsupportedGuide: a limit of the engine is reached.
        """
        for token in self.repeats.tokens[len(self.lengths) :]:
            read = [self.control[token]] if token in self.control else list(self.repeats.bytes_of(token))
            self.matcher.consume_tokens(read)
            self.lengths.append(len(read))
        if self.matcher.is_error():
            reason = regular.first_line(self.matcher)
            raise UnsupportedGuide(f"what repeats cannot be told within the engine's limits: {reason}")

    def fork(self, repeats: Repeats) -> _Reader:
        """A copy for a copy of the answer."""
        other = copy.copy(self)
        other.repeats, other.matcher, other.lengths = repeats, self.matcher.deep_copy(), list(self.lengths)
        return other

    def cut(self, count: int) -> None:
        """Go back to an earlier length of the answer."""
        if extra := self.lengths[count:]:
            self.matcher.rollback(sum(extra))
            del self.lengths[count:]

    def after(self, data: bytes) -> State | None:
        """The state after more bytes; None if they complete a repeat. The matcher stays where it is."""
        found: State | None = self._look(data, lambda state: state)
        return found

    def goes_on(self, data: bytes) -> bool:
        """Whether some text after more bytes repeats nothing; True where that cannot be decided within a bound."""
        self.left = _LOOKS
        return bool(self._look(data, self._leaves))

    def _look(self, data: bytes, ask: Any) -> Any:
        """The answer to a question about the state after more bytes; None if they complete a repeat."""
        state: State | None = self.repeats.state
        read = 0
        try:
            for byte in data:
                assert state is not None
                state = self._step(state, byte)
                read += 1
                if state is None:
                    return None
            return ask(state)
        finally:
            self.matcher.rollback(read)

    def _step(self, state: State, byte: int) -> State | None:
        """The state after one byte, which the matcher reads."""
        if byte == _COMMA_BYTE and state.in_set and not self._follows("comma"):
            state = state.without_set()  # the alternative in which the items must differ is out
        self.matcher.consume_token(byte)
        begins = byte in _BRACKETS and state.mode in (OUTSIDE, VALUE)
        if state.mode == OUTSIDE and not (begins and (self._follows("names") or self._follows("items"))):
            return state
        kind = SET if begins and self._follows("items") else LIST
        return state.after(bytes((byte,)), lists=kind)

    def _follows(self, probe: str) -> bool:
        return bool(self.matcher.validate_tokens([_PROBES[probe]]))

    def _leaves(self, state: State) -> bool:
        """Whether the text can leave the way to every repeat."""
        if not state.watched or self.left <= 0:
            return True
        bits = int.from_bytes(self.matcher.compute_bitmask(), "little")
        dangers = state.dangers()
        for byte in sorted((byte for byte in range(256) if bits >> byte & 1), key=dangers.__contains__):
            self.left -= 1
            following = self._step(state, byte)
            found = following is not None and self._leaves(following)
            self.matcher.rollback(1)
            if found:
                return True
        return False
