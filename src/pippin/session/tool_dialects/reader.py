"""Reading an answer with tools while it is written: its text, its reasoning, and the calls that are whole.

Notable here:
- what may be the beginning of a call is withheld until it is known, so that no part of a call is shown as text
- a call is whole once its JSON is: one that the budget cuts within its closing marker is not lost
- the same call again (name and arguments) is not a second call; it shows that the model repeats itself
- what begins like a call and is none of a declared tool is text
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Final

from pippin.engine.grammar.arguments import ArgumentReader
from pippin.session.tool_dialects.dialect import ARGUMENTS, INDEX, NAME, PYTHON_TAGS, ToolDialect
from pippin.session.tool_dialects.grammar import SPACE, opening, pythonic_opening

_STRUCTURE: Final = re.compile(r'\\.|["{}\[\]]', re.DOTALL)
_FENCE: Final = "```(?:json)?"
_HEADER: Final = re.compile(
    r"(?:<\|start\|>assistant)?(?: to=functions\.(?P<to>[\w-]+))?<\|channel\|>(?P<channel>\w+)"
    r"(?: to=functions\.(?P<name>[\w-]+))?[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>"
)
_GAP: Final = re.compile(r"\s+|(?<=\[TOOL_CALLS\])")
_END_OF_MESSAGE: Final = "<|end|>"


def call_reader(dialect: ToolDialect, schemas: Mapping[str, Any], *, typed: bool = False) -> CallReader:
    """A reader of one answer.

    Args:
        dialect: how the model writes calls; its control tokens are spelled in the text.
        schemas: JSON Schemas of the arguments, by the names of the declared tools.
        typed: the answer is no free text: calls stand at its start only, and in the dialect's own form.
    """
    return _Channels(schemas, typed) if dialect.channels else _Calls(dialect, schemas, typed)


class CallReader(ABC):
    """Reads one answer, piece by piece.

    Attributes:
        calls: name and arguments of the calls that are whole, without repetitions.
        repeated: whether a call was written again; what follows is not read.
        partial: after `finish`, the text of a call that was cut; empty if none was.
        reasoning: reasoning that has not been taken yet.
    """

    def __init__(self, schemas: Mapping[str, Any]) -> None:
        self.schemas = schemas
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.repeated = False
        self.partial = self.reasoning = ""
        self._seen: set[str] = set()
        self._buffer = ""

    @property
    @abstractmethod
    def begun(self) -> bool:
        """Whether a call has begun."""

    @abstractmethod
    def push(self, text: str) -> str:
        """Add the next piece of the answer; return the text that can be shown now."""

    @abstractmethod
    def finish(self, *, cut: bool) -> str:
        """End the answer, which the budget cut or not; return the rest of the text."""

    def take_reasoning(self) -> str:
        """The reasoning since the last time."""
        taken, self.reasoning = self.reasoning, ""
        return taken

    def _add(self, name: str | None, text: str) -> bool:
        """Add the call whose JSON this is; with its name inside if ``name`` is None. False if it is none."""
        try:
            values = json.loads(text)
        except (ValueError, RecursionError):
            return False
        if name is None and isinstance(values, dict):
            name = values.get("name")
            values = next((values[key] for key in ARGUMENTS if key in values), None)
        return self._add_values(name, values)

    def _add_values(self, name: Any, values: Any) -> bool:
        """Add a call; False if it is of no declared tool."""
        if not isinstance(name, str) or name not in self.schemas or not isinstance(values, dict):
            return False
        key = json.dumps([name, values], sort_keys=True)
        self.repeated = key in self._seen
        if not self.repeated:
            self._seen.add(key)
            self.calls.append((name, values))
        return True


class _Calls(CallReader):
    """Text, then calls; the buffer is the text that is withheld, or what follows the last whole call."""

    def __init__(self, dialect: ToolDialect, schemas: Mapping[str, Any], typed: bool) -> None:
        super().__init__(schemas)
        self._dialect, self._typed = dialect, typed
        self._calling = self._malformed = self._shown = False
        self._extent: _Extent | _ArgumentExtent | None = None
        self._name: str | None = None
        names, pythonic = sorted(schemas), dialect.bare and dialect.notation is not None
        any_name = f"(?:{'|'.join(map(re.escape, names)) or '(?!)'})"
        heads = [f'{{"name":"{name}","{key}":' for name in names for key in ARGUMENTS]
        markers = [dialect.marker] if dialect.marker else [*PYTHON_TAGS]
        self._openings, self._prefixes = [*map(re.escape, markers)], [*map(_squeezed, markers)]
        first, following = [], []
        tag = rf"(?:{'|'.join(map(re.escape, PYTHON_TAGS))})?\s*" if dialect.bare else ""
        if dialect.bare and not pythonic:
            first.append(tag)
        else:
            first.append(tag + _flexible(dialect.begin + dialect.before))
            following.append(_flexible(dialect.after + dialect.between + dialect.before))
        if dialect.fenced and not typed:
            self._openings.append(opening(_FENCE, any_name))
            self._prefixes += [fence + head for fence in ("```json", "```") for head in heads]
            first.append(rf"{_FENCE}\s*")
            following.append(rf"\s*```\s*{_FENCE}\s*")
        self._opening = re.compile("|".join(self._openings))
        bare = pythonic_opening(any_name) if pythonic else opening(SPACE, any_name)
        self._bare = re.compile(bare) if dialect.bare else None
        self._bare_prefixes = [f"[{name}(" for name in names] if pythonic else heads if dialect.bare else []
        begun = "" if dialect.notation is not None else "(?={)"
        self._first, self._following = (
            re.compile(f"(?:{'|'.join(each) or '(?!)'}){begun}") for each in (first, following)
        )

    @property
    def begun(self) -> bool:
        return self._calling

    def push(self, text: str) -> str:
        self._buffer += text
        if self._calling:
            self._read()
            return ""
        start = self._start()
        if start is None:
            return self._release(self._withheld())
        shown = self._release(start)
        self._calling = True
        self._read()
        return shown

    def finish(self, *, cut: bool) -> str:
        if self._calling and (self.repeated or self._is_closing()):
            return ""
        if cut and not self._malformed and (self._calling or self._has_begun()):
            rest = self._buffer.lstrip()
            self.partial = rest.removeprefix(self._dialect.after.strip()).lstrip() if self.calls else rest
            return ""
        return self._release(len(self._buffer))

    def _start(self) -> int | None:
        """Where a call begins in the buffer."""
        if self._bare is not None and not self._shown and self._bare.match(self._buffer):
            return 0
        match = self._opening.match(self._buffer) if self._typed else self._opening.search(self._buffer)
        return None if match is None or (self._typed and self._shown) else match.start()

    def _withheld(self) -> int:
        """The first position from which on the buffer may be the beginning of a call."""
        if self._typed and self._shown:
            return len(self._buffer)
        for at, character in enumerate(self._buffer):
            if at and self._typed:
                break
            at_start = at == 0 and not self._shown and self._bare_prefixes
            if not at_start and not any(prefix[0] == character for prefix in self._prefixes):
                continue
            rest = _squeezed(self._buffer[at:])
            prefixes = [*self._prefixes, *self._bare_prefixes] if at_start else self._prefixes
            if any(prefix.startswith(rest) for prefix in prefixes):
                return at
        return len(self._buffer)

    def _has_begun(self) -> bool:
        """Whether more than half of what begins a call is withheld."""
        rest = _squeezed(self._buffer)
        prefixes = self._prefixes if self._shown else [*self._prefixes, *self._bare_prefixes]
        return any(each.startswith(rest) and 2 * len(rest) > len(each) for each in prefixes)

    def _release(self, count: int) -> str:
        shown, self._buffer = self._buffer[:count], self._buffer[count:]
        self._shown = self._shown or bool(shown)
        return shown

    def _read(self) -> None:
        """Take the calls that are whole from the buffer."""
        while not self.repeated and not self._malformed:
            if self._extent is None:
                match = (self._following if self.calls else self._first).match(self._buffer)
                if match is None:
                    return
                self._name = match.groupdict().get("name")
                self._extent = self._begin(match.end())
                if self._extent is None:
                    self._malformed = True
                    return
            end = self._extent.end(self._buffer)
            if end is None:
                self._malformed = isinstance(self._extent, _ArgumentExtent) and self._extent.reader.malformed
                return
            if self._is_call(self._extent, end):
                self._buffer, self._extent = self._buffer[end:], None
            else:
                self._malformed = True

    def _begin(self, start: int) -> _Extent | _ArgumentExtent | None:
        """The extent of the arguments that begin there; None for those of no declared tool, if they need its schema."""
        notation = self._dialect.notation
        if notation is None:
            return _Extent(start)
        if self._name is None or self._name not in self.schemas:
            return None
        return _ArgumentExtent(start, ArgumentReader(self.schemas[self._name], notation, self._dialect.after))

    def _is_call(self, extent: _Extent | _ArgumentExtent, end: int) -> bool:
        """Add the call that ends there; False if it is none."""
        if isinstance(extent, _ArgumentExtent):
            return self._add_values(self._name, extent.reader.values)
        return self._add(self._name, self._buffer[extent.start : end])

    def _is_closing(self) -> bool:
        """Whether what follows the last call only closes it."""
        rest = _squeezed(self._buffer)
        closings = (_squeezed(self._dialect.after + self._dialect.end), "```")
        return bool(self.calls) and not self._malformed and any(each.startswith(rest) for each in closings)


class _Channels(CallReader):
    """Messages on channels: reasoning, comments, the answer, or a call to a function."""

    def __init__(self, schemas: Mapping[str, Any], typed: bool) -> None:
        super().__init__(schemas)
        self._hidden = {"analysis", "commentary"} if typed else {"analysis"}
        self._channel = ""
        self._name: str | None = None
        self._extent: _Extent | None = None

    @property
    def begun(self) -> bool:
        return self._name is not None

    def push(self, text: str) -> str:
        self._buffer += text
        shown = ""
        while self._buffer:
            if not self._channel:
                match = _HEADER.match(self._buffer)
                if match is None:
                    break
                self._channel, self._name = match["channel"], match["to"] or match["name"]
                self._buffer = self._buffer[match.end() :]
                self._extent = _Extent(0)
            if self._name is not None:
                end = self._extent.end(self._buffer) if self._extent is not None else None
                if end is not None and self._add(self._name, self._buffer[:end]):
                    self._buffer, self._extent = self._buffer[end:], None
                break
            end = self._buffer.find(_END_OF_MESSAGE)
            part = self._buffer[: end if end >= 0 else self._withheld()]
            if self._channel in self._hidden:
                self.reasoning += part
            else:
                shown += part
            self._buffer = self._buffer[len(part) :]
            if end < 0:
                break
            self._buffer, self._channel = self._buffer[len(_END_OF_MESSAGE) :], ""
        return shown

    def finish(self, *, cut: bool) -> str:
        if self._name is not None and self._extent is None:
            return ""
        rest, self._buffer = self._buffer, ""
        if cut and (self._name is not None or not self._channel):
            self.partial = rest if self._name is not None else ""
            return ""
        if self._channel in self._hidden:
            self.reasoning += rest
            return ""
        return rest

    def _withheld(self) -> int:
        at = self._buffer.rfind("<")
        return at if at >= 0 and _END_OF_MESSAGE.startswith(self._buffer[at:]) else len(self._buffer)


class _Extent:
    """Finds the end of a JSON object that is being written, in one pass over its characters."""

    def __init__(self, start: int) -> None:
        self.start = self._at = start
        self._depth, self._in_string = 0, False

    def end(self, text: str) -> int | None:
        """The position after the object; None if it goes on. From one call to the next, text is only appended."""
        while match := _STRUCTURE.search(text, self._at):
            self._at, found = match.end(), match.group()
            if found == '"':
                self._in_string = not self._in_string
            elif self._in_string or len(found) == 2:
                continue
            elif found in "{[":
                self._depth += 1
            else:
                self._depth -= 1
                if self._depth <= 0:
                    return self._at
        self._at = len(text) - text[self._at :].endswith("\\")  # half an escape is looked at again
        return None


class _ArgumentExtent:
    """Finds the end of arguments that are written one by one, and reads them."""

    def __init__(self, start: int, reader: ArgumentReader) -> None:
        self._at, self.reader = start, reader

    def end(self, text: str) -> int | None:
        """The position after the arguments; None if they go on. From one call to the next, text is only appended."""
        end = self.reader.read(text, self._at)
        self._at = self.reader.at
        return end


def _squeezed(text: str) -> str:
    """The text without white space."""
    return "".join(text.split())


def _flexible(text: str) -> str:
    """A fixed text as a regular expression, with any white space where it has some, and the name as a group."""
    words = (
        re.escape(word).replace(re.escape(NAME), r"(?P<name>[\w-]+)(?=[^\w-])").replace(re.escape(INDEX), r"\d+")
        for word in re.split(_GAP, text)
    )
    return r"\s*" + r"\s*".join(words) + r"\s*"
