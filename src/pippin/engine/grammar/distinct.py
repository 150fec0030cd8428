"""What is written so far in lists of distinct items and in objects, and what would repeat it.

Notable here:
- a context-free grammar cannot compare two parts of a text; so the text is read beside it, byte by byte, and an item
  or a name that was there before is refused at the byte that completes it
- items are compared by value: objects in any order of their names, strings and numbers in the only spelling that the
  grammar has for each
- a *track* is the rest of the text of one earlier item, as long as the item being written may still become equal to it;
  off all tracks nothing can repeat, and on them the next bytes to watch are known
- states are immutable, so that a look ahead or a step back costs nothing
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterable
from decimal import Decimal
from typing import Any, Final, NamedTuple

NAMES, LIST, SET = "names", "list", "set"
"""Kinds of containers: an object, a list, and a list of distinct items."""

Node = Any
"""A value that is compared: the bytes of a scalar, a tuple of nodes, or a frozenset of pairs of name and node."""
Track = tuple[bytes, Any]
"""The bytes up to the next choice, and what comes after them, in links; `_DONE` at the end."""
_DONE: Final[Track] = (b"", None)

OUTSIDE, VALUE, KEY, IN_KEY, COLON, IN_STRING, SCALAR, AFTER = range(8)
_QUOTE, _BACKSLASH, _COMMA, _BLANK = b'"\\, '
_OPEN_LIST, _CLOSE_LIST, _OPEN_OBJECT, _CLOSE_OBJECT = b"[]{}"
_ENDS: Final = b",]} "


class Frame(NamedTuple):
    """An open object or list.

    Attributes:
        kind: `NAMES`, `SET` or `LIST`.
        seen: names or items that were completed in it.
        tracks: of the name or item being written.
        text: what is written of it.
    """

    kind: str
    seen: tuple[Node, ...] = ()
    tracks: tuple[Track, ...] = ()
    text: bytes = b""


class State(NamedTuple):
    """Where a text stands.

    Attributes:
        mode: what comes next, one of the constants above.
        escaped: whether the character before was a backslash inside a string.
        frames: the open containers, from the outermost on.
    """

    mode: int = OUTSIDE
    escaped: bool = False
    frames: tuple[Frame, ...] = ()

    @property
    def watched(self) -> bool:
        """Whether a name or an item is begun, or about to begin, that may still become a repeat."""
        return any(frame.tracks for frame in self.frames)

    @property
    def in_set(self) -> bool:
        """Whether a comma would come between two items that must differ."""
        return self.mode in (SCALAR, AFTER) and bool(self.frames) and self.frames[-1].kind == SET

    def without_set(self) -> State:
        """The same state where the items of the last list need not differ any more."""
        return self._replace(frames=(*self.frames[:-1], Frame(LIST)))

    def dangers(self) -> set[int]:
        """The bytes after which the text is still on a track, or repeats."""
        found = {track[0][0] for frame in self.frames for track in frame.tracks if track[0]}
        if self.mode == SCALAR and self.frames and _DONE in self.frames[-1].tracks:
            found.update(_ENDS)
        if self.mode == SCALAR:
            found |= {_BLANK} if found & set(_ENDS) else set()
        elif self.mode not in (IN_STRING, IN_KEY) and self.watched:
            found.add(_BLANK)
        return found

    def after(self, data: bytes, *, lists: str = LIST) -> State | None:
        """The state after more bytes, up to the end of the outermost container; None if they complete a repeat.

        Args:
            data: bytes that the grammar allows; outside, they begin with a bracket or are not read.
            lists: the kind of the lists that begin in them.
        """
        state = self
        if self.mode == OUTSIDE and data[:1] not in (b"[", b"{"):
            return self
        for index, byte in enumerate(data):
            if state.mode == OUTSIDE and index:
                break
            is_list = byte == _OPEN_LIST and state.mode in (VALUE, OUTSIDE)
            following = state._step(byte, lists if is_list else NAMES)
            if following is None:
                return None
            state = following
        return state

    def _step(self, byte: int, kind: str) -> State | None:
        mode, frames = self.mode, self.frames
        if mode in (IN_STRING, IN_KEY):
            frames = _written(frames, byte, name=mode == IN_KEY)
            if self.escaped or byte != _QUOTE:
                return State(mode, byte == _BACKSLASH and not self.escaped, frames)
            return _with_name(frames) if mode == IN_KEY else _with_value(frames)
        if mode == SCALAR and byte in _ENDS:
            ended = _with_value(frames)
            return ended and ended._step(byte, kind)
        if byte == _BLANK:
            return self
        if mode in (AFTER, COLON) and byte in b",:":
            frames = _written(frames, byte, item=False)
            return State(VALUE, frames=frames) if mode == COLON else _next_item(frames)
        if byte in (_CLOSE_LIST, _CLOSE_OBJECT):
            return _with_value(_written(frames[:-1], byte))
        if mode == KEY:
            return State(IN_KEY, frames=_written(frames, byte, name=True))
        frames = _written(frames, byte)
        if byte in (_OPEN_LIST, _OPEN_OBJECT):
            return State(VALUE if byte == _OPEN_LIST else KEY, frames=(*frames, Frame(kind)))
        return State(IN_STRING if byte == _QUOTE else SCALAR, frames=frames)


def _next_item(frames: tuple[Frame, ...]) -> State:
    """The state after the comma between two items or properties of the last frame."""
    top = frames[-1]
    top = Frame(top.kind, top.seen, _tracks(top.seen))
    return State(KEY if top.kind == NAMES else VALUE, frames=(*frames[:-1], top))


def _written(frames: tuple[Frame, ...], byte: int, *, name: bool = False, item: bool = True) -> tuple[Frame, ...]:
    """The frames after one byte of the items that are open in them.

    Args:
        frames: from the outermost on.
        byte: what is written.
        name: whether it belongs to a name of the last frame.
        item: whether it belongs to an item of the last frame.
    """
    last = len(frames) - 1
    if not name and all(frame.kind != SET for frame in frames):
        return frames
    return tuple(
        Frame(frame.kind, frame.seen, _followed(frame.tracks, byte), frame.text + bytes((byte,)))
        if (frame.kind == SET and (at < last or item)) or (name and at == last)
        else frame
        for at, frame in enumerate(frames)
    )


def _with_name(frames: tuple[Frame, ...]) -> State | None:
    top = frames[-1]
    if top.text in top.seen:
        return None
    return State(COLON, frames=(*frames[:-1], Frame(top.kind, (*top.seen, top.text))))


def _with_value(frames: tuple[Frame, ...]) -> State | None:
    """The state after a value; it is an item of the last frame."""
    if not frames:
        return State()
    top = frames[-1]
    if top.kind == SET:
        item = node(top.text)
        if item in top.seen:
            return None
        top = Frame(SET, (*top.seen, item))
    elif top.kind == NAMES:
        top = Frame(NAMES, top.seen)
    return State(AFTER, frames=(*frames[:-1], top))


def node(text: bytes) -> Node:
    """What a JSON text is compared by.

    >>> node(b'{"a": 1, "b": [2.50]}') == node(b'{"b": [2.5], "a": 1.0}')
    True
    """
    try:
        return _node(json.loads(text, parse_float=Decimal, parse_int=Decimal))
    except ValueError:
        pass
    try:  # True, False and None, as some models write arguments
        return _node(ast.literal_eval(text.decode()), constant=repr)
    except (ValueError, SyntaxError, TypeError):  # no value: what was guessed to be an item is text
        return text


def _node(value: Any, constant: Callable[[Any], str] = json.dumps) -> Node:
    if isinstance(value, dict):
        return frozenset((_text(name), _node(item, constant)) for name, item in value.items())
    if isinstance(value, list):
        return tuple(_node(item, constant) for item in value)
    if value is None or isinstance(value, bool):
        return constant(value).encode()
    if isinstance(value, Decimal | int | float):
        plain = f"{Decimal(str(value)):f}"
        return ((plain.rstrip("0").rstrip(".") if "." in plain else plain) if value else "0").encode()
    return _text(value)


def _text(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


# --- tracks -----------------------------------------------------------------------------------------------------------


def _tracks(nodes: Iterable[Node]) -> tuple[Track, ...]:
    return tuple(_begun(b"", each, None) for each in nodes)


def _begun(before: bytes, each: Node, then: Any) -> Track:
    """The track of a node after some bytes, without blanks, which are no part of a value."""
    if isinstance(each, bytes):
        return before + each, then
    return before + (b"[" if isinstance(each, tuple) else b"{"), (each, b"", then)


def _next(then: Any) -> list[Track]:
    """The tracks at the end of a track's bytes: one for each item that an object may go on with."""
    if then is None:
        return [_DONE]
    rest, comma, outer = then
    if not rest:
        return [(b"]" if isinstance(rest, tuple) else b"}", outer)]
    if isinstance(rest, tuple):
        return [_begun(comma, rest[0], (rest[1:], b",", outer))]
    return [
        _begun(comma + name + b":", item, (rest - {(name, item)}, b",", outer))
        for name, item in sorted(rest, key=_name)
    ]


def _name(pair: tuple[bytes, Node]) -> bytes:
    return pair[0]


def _followed(tracks: tuple[Track, ...], byte: int) -> tuple[Track, ...]:
    found: list[Track] = []
    for text, then in tracks:
        if text and text[0] == byte:
            if len(text) > 1:
                found.append((text[1:], then))
            else:
                found.extend(_next(then))
    return tuple(found)
