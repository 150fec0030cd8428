r"""Arguments of a call that are written one by one instead of as one JSON object, and read back by their schema.

Notable here:
- a `Notation` says what surrounds each name and value; strings are bare text, JSON, or between marks of their own
- the schema is read and the rules are written by the same code as for JSON: only names, strings, constants and what
  stands between two entries differ
- bare text ends at the first closing tag, so a string that contains one is not in the grammar
- in Python's notation strings are written in double quotes, and read in single ones too
- bare text has no type: a text that is JSON of a type that the schema has there is that value, any other is a string
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from pippin.core.errors import EmptySchema, UnsupportedGuide
from pippin.engine.grammar import regex
from pippin.engine.grammar.constraint import Grammar
from pippin.engine.grammar.json_grammar import MAX_ITEMS, _Writer
from pippin.engine.grammar.json_keywords import check_size
from pippin.engine.grammar.json_recursion import ITEM
from pippin.engine.grammar.json_satisfiable import Satisfiable, about
from pippin.engine.grammar.json_schema import SchemaReader
from pippin.engine.grammar.json_values import Array, Boolean, Key, Names, Null, Number, Object, Shape, String
from pippin.engine.grammar.python_literal import read_literal
from pippin.engine.grammar.repeats import NAMES, SCARCE_NAMES

KEY: Final = "{key}"
"""Stands for the name of an argument."""
_ROOT: Final[Key] = (("schema", "#"),)
_ANY: Final = r"[\x{0}-\x{10FFFF}]"
_QUOTE: Final = r"\x{22}"
_FREE_NAME: Final = r"/[^\x{0}-\x{20}<>\x{22}'=:,(){}\[\]\x{5C}]{1,64}/"
_MARKED: Final = re.compile(r'"(?:\\.|[^"\\])*"|\b(?:True|False|None)\b')
_CONSTANTS: Final = {"True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True)
class Notation:
    """How arguments are written one by one.

    Args:
        before: before each value, with `KEY` for its name.
        after: after each value.
        between: between two arguments.
        strings: "text" for bare text up to ``after``; "json"; "quoted" for text between two ``quote``, also inside
            lists and objects, whose names are bare then.
        quote: the mark before and after a string.
        python: whether constants are spelled True, False and None.
    """

    before: str
    after: str = ""
    between: str = ""
    strings: Literal["text", "json", "quoted"] = "json"
    quote: str = ""
    python: bool = False

    def write(self, values: Mapping[str, Any]) -> str:
        """The arguments as text.

        >>> Notation("{key}=", between=", ", python=True).write({"a": True, "b": ["x"]})
        'a=True, b=["x"]'
        """
        entries = (self.before.replace(KEY, name) + self._value(value) + self.after for name, value in values.items())
        return self.between.join(entries)

    def _value(self, value: Any) -> str:
        if isinstance(value, str) and self.strings != "json":
            return f"{self.quote}{value}{self.quote}"
        if self.strings == "quoted" and isinstance(value, dict):
            return "{" + ",".join(f"{name}:{self._value(item)}" for name, item in value.items()) + "}"
        if self.strings == "quoted" and isinstance(value, list):
            return "[" + ",".join(map(self._value, value)) + "]"
        if self.python and isinstance(value, list):
            return "[" + ", ".join(map(self._value, value)) + "]"
        if self.python and isinstance(value, dict):
            return "{" + ", ".join(f"{json.dumps(name)}: {self._value(item)}" for name, item in value.items()) + "}"
        if self.python and (value is None or isinstance(value, bool)):
            return str(value)
        return json.dumps(value, ensure_ascii=False)


def argument_grammar(schema: Any, notation: Notation, fixed: Callable[[str], str]) -> Grammar:
    """The grammar of the arguments that are valid under a schema, in a notation.

    Args:
        schema: JSON Schema of the object of all arguments.
        notation: how they are written.
        fixed: writes a fixed text as a part of a rule; control tokens in it as tokens.

    Raises:
        SchemaError, UnsupportedGuide, UndefinedReference, EmptySchema: as `Grammar.json_schema`.
    """
    check_size(schema)
    reader = SchemaReader(schema)
    satisfiable = Satisfiable(reader, _ROOT)
    satisfiable.check_depth(_ROOT)
    writer = _ArgumentWriter(reader, satisfiable, notation, fixed)
    source = writer.write(_ROOT)
    return Grammar(source, (*reader.notes, *writer.shortened))


class _ArgumentWriter(_Writer):
    """Writes the entries of the outermost object in a notation, and everything inside them as JSON, or in it too."""

    def __init__(
        self, reader: SchemaReader, satisfiable: Satisfiable, notation: Notation, fixed: Callable[[str], str]
    ) -> None:
        super().__init__(reader, satisfiable, (",", ":") if notation.strings == "quoted" else (", ", ": "), MAX_ITEMS)
        self.notation, self.fixed = notation, fixed
        self.inner = self.comma
        self.outermost = False
        self.named: tuple[str, ...] = ()

    def write(self, root: Key) -> str:
        with about(root):
            shapes = [shape for shape in self.satisfiable.reached[root] if isinstance(shape, Object)]
            shapes = [shape for shape in shapes if self.satisfiable.has_values(shape)]
            if not shapes:
                raise EmptySchema(f"no arguments are valid under the schema: {self.satisfiable.reason(root)}")
            self.outermost, self.comma = True, self.fixed(self.notation.between) or '""'
            choices = [self.entries(shape) or '""' for shape in shapes]
            self.outermost, self.comma = False, self.inner
        return self.finish(self.rule(" | ".join(choices)))

    def watched(self, text: str, name: str) -> str:
        if self.notation.strings != "quoted":
            return super().watched(text, name)
        if name not in (NAMES, SCARCE_NAMES):  # what is written is not JSON, which alone can be followed
            raise UnsupportedGuide(
                "uniqueItems cannot be enforced in the notation of this model's tool calls", guide="uniqueItems"
            )
        return text

    def properties(self, shape: Object) -> tuple[str, str]:
        self.named = tuple(name for name, _ in shape.with_names(shape.required).properties)
        return super().properties(shape)

    def entry(self, name: str, key: Key) -> str:
        if self.outermost:
            return self.argument(json.dumps(name, ensure_ascii=False), key)
        if self.notation.strings == "quoted":
            return f"{json.dumps(name, ensure_ascii=False)} {self.colon} {self.value(key)}"
        return super().entry(name, key)

    def other(self, names: Names, taken: tuple[str, ...]) -> str:
        if not self.outermost and self.notation.strings != "quoted":
            return super().other(names, taken)
        parts = [_FREE_NAME, *(f"({_bare(each)})" for each in names.include)]
        parts += [f"~({_bare(each)})" for each in names.exclude]
        parts += [f"~(/{regex.alternatives(map(regex.literal, self.named))}/)"] if self.named else []
        name = self.terminal(" & ".join(parts))
        return (
            self.argument(name, names.key) if self.outermost else f"{name} {self.colon} {self.value(names.key, ITEM)}"
        )

    def argument(self, name: str, key: Key) -> str:
        """An argument of the call; ``name`` is a terminal."""
        before, _, rest = self.notation.before.partition(KEY)
        head = " ".join(part for part in (self.fixed(before), name, self.fixed(rest)) if part)
        after = self.fixed(self.notation.after)
        if self.notation.strings != "text":
            return f"{head} {self.value(key)} {after}"
        shapes = [shape for shape in self.satisfiable.reached[key] if self.satisfiable.has_values(shape)]
        nested = any(isinstance(shape, Array | Object) for shape in shapes)
        ends = [self.text(shape, nested) for shape in shapes if isinstance(shape, String)]
        ends += [f"({self.shape(shape)}) {after}" for shape in shapes if not isinstance(shape, String)]
        return f"{head} {self.rule(' | '.join(ends))}"

    def text(self, shape: String, nested: bool) -> str:
        """Bare text and what ends it; with ``nested``, it does not begin as a list or an object does."""
        after = self.notation.after
        end, tag = regex.literal(after), regex.literal(after.strip())
        contents = _contents(shape)
        if nested and shape.values is None:
            contents.append(rf"(?:[^\s\[{{]{_ANY}*)?")
        parts = [f"/{content}{end}/" for content in contents]
        parts += [f"~(/{_inside(each)}{end}/)" for each in shape.exclude]
        parts.append(f"~(/{_ANY}*{tag}{_ANY}*{tag}{_ANY}*/)")
        return self.terminal(" & ".join(parts))

    def shape(self, shape: Shape) -> str:
        """A value, in which the notation of the arguments themselves does not hold."""
        before = self.outermost, self.comma
        self.outermost, self.comma = False, self.inner
        try:
            return self.within(shape)
        finally:
            self.outermost, self.comma = before

    def within(self, shape: Shape) -> str:
        """The value of a shape."""
        match shape:
            case String() if self.notation.strings == "quoted":
                return self.quoted(shape)
            case Null() if self.notation.python:
                return self.terminal("/None/")
            case Boolean(values) if self.notation.python:
                return self.terminal(f"/{regex.alternatives(sorted(map(str, values)))}/")
        return super().shape(shape)

    def quoted(self, shape: String) -> str:
        """Text between two marks."""
        mark, literal = self.fixed(self.notation.quote), regex.literal(self.notation.quote)
        is_token = mark.startswith("<[")  # then it ends the text; otherwise the marks are part of one terminal
        around = "" if is_token else literal
        parts = [f"/{around}{content}{around}/" for content in _contents(shape)]
        parts += [f"~(/{around}{_inside(each)}{around}/)" for each in shape.exclude]
        if not is_token:
            parts.append(f"~(/{_ANY}*{literal}{_ANY}*{literal}{_ANY}*{literal}{_ANY}*/)")
        text = self.terminal(" & ".join(parts))
        return f"{mark} {text} {mark}" if is_token else text


def _contents(shape: String) -> list[str]:
    """Regular expressions that all match bare text; under a pattern or format it has no character that JSON escapes."""
    if shape.values is not None:
        return [regex.alternatives(map(regex.literal, shape.values))]
    constrained = shape.include or shape.exclude
    character = regex.PLAIN if constrained else _ANY
    length = f"{{{shape.low},{'' if shape.high is None else shape.high}}}"
    return [f"{character}{length}", *(part for each in shape.include for part in _parts(each))]


def _parts(terminal: str) -> list[str]:
    """The conjuncts of a terminal of JSON strings, as expressions of what is between the quotation marks."""
    return [_inside(each) for each in terminal.split(" & ")]


def _inside(terminal: str) -> str:
    assert terminal.startswith(f"/{_QUOTE}"), terminal
    return f"(?:{terminal[1 + len(_QUOTE) : -1 - len(_QUOTE)]})"


def _bare(terminal: str) -> str:
    return " & ".join(f"/{each}/" for each in _parts(terminal))


# --- reading ------------------------------------------------------------------------------------------------------


class ArgumentReader:
    """Reads the arguments of one call while it is written.

    Args:
        schema: JSON Schema of the object of all arguments.
        notation: how they are written.
        close: what follows the last argument; its first word tells it from another argument.
    """

    def __init__(self, schema: Any, notation: Notation, close: str) -> None:
        self.notation, self._reader = notation, SchemaReader(schema)
        head = close.split()[0] if close.split() else close
        self._close = re.compile(rf"\s*{re.escape(head)}")
        before = re.escape(notation.before).replace(re.escape(KEY), r"(?P<key>[^\n]+?)")
        self._before = re.compile(rf"\s*(?:{re.escape(notation.between.strip())}\s*)?{before}")
        self._tag = notation.after.strip()
        self._lead = notation.after[: len(notation.after) - len(notation.after.lstrip())]
        self.values: dict[str, Any] = {}
        self.malformed, self.at = False, 0

    def read(self, text: str, at: int) -> int | None:
        """Read arguments from a position on; return the position of what closes them, None if they go on.

        Arguments that are whole are in ``values``; the next call must begin after them (see `at`).
        """
        while not self.malformed:
            self.at = at
            if self._close.match(text, at):
                return at
            match = self._before.match(text, at)
            if match is None:
                return None
            end = self._end(text, match.end())
            if end is None:
                return None
            self._add(match["key"], text[match.end() : end])
            at = end + (len(self._tag) if self.notation.strings == "text" else 0)
        return None

    def _end(self, text: str, start: int) -> int | None:
        """Where a value ends, as far as it is known."""
        if self.notation.strings == "text":
            end = text.find(self._tag, start)
            return end if end >= 0 else None
        quote = re.escape(self.notation.quote) if self.notation.strings == "quoted" else ""
        string = f"{quote}(?s:.*?){quote}" if quote else r'"(?s:\\.|[^"\\])*"'
        begun = re.escape(self.notation.quote) if quote else '"'
        if self.notation.python:
            string, begun = rf"{string}|'(?s:\\.|[^'\\])*'", "[\"']"
        depth = 0
        for match in re.compile(rf"{string}|{begun}|[\[\]{{}}(),]").finditer(text, start):
            found = match.group()
            if found in ("[", "{", "("):
                depth += 1
            elif found in ("]", "}", ")", ",") and not depth:
                return match.start()
            elif found in ("]", "}", ")"):
                depth -= 1
            elif found in (self.notation.quote, '"', "'"):  # a string that goes on
                return None
        return None

    def _add(self, name: str, text: str) -> None:
        try:
            self.values[name] = self._typed(name, text)
        except (ValueError, RecursionError):
            self.malformed = True

    def _typed(self, name: str, text: str) -> Any:
        if self.notation.strings == "quoted":
            return json.loads(_from_quoted(text, self.notation.quote))
        if self.notation.strings == "json":
            if not self.notation.python:
                return json.loads(text)
            try:
                return json.loads(_MARKED.sub(lambda match: _CONSTANTS.get(match.group(), match.group()), text))
            except ValueError:
                return read_literal(text)
        return self._of_text(name, text.removesuffix(self._lead))

    def _of_text(self, name: str, text: str) -> Any:
        shapes = [
            shape
            for one in self._reader.shapes(_ROOT)
            if isinstance(one, Object)
            for shape in self._reader.shapes(one.key(name))
        ]
        is_text = any(isinstance(shape, String) for shape in shapes)
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            if is_text:
                return text
            raise
        return value if any(_holds(shape, value) for shape in shapes) or not is_text else text


def _holds(shape: Shape, value: Any) -> bool:
    """Whether a JSON value that is no string is of a shape; lists and objects by their kind."""
    match shape:
        case Null():
            return value is None
        case Boolean(values):
            return isinstance(value, bool) and value in values
        case Number():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            return number and (value in shape.values if shape.values is not None else shape.holds(value))
        case Array():
            return isinstance(value, list)
        case Object():
            return isinstance(value, dict)
    return False


def _from_quoted(text: str, quote: str) -> str:
    """JSON from a notation with bare names and strings between two marks."""
    pieces = text.split(quote)
    for at, piece in enumerate(pieces):
        pieces[at] = (
            json.dumps(piece, ensure_ascii=False)
            if at % 2
            else re.sub(r"([{,]\s*)([^\s{},:\[\]]+):", r'\1"\2":', piece)
        )
    return "".join(pieces)
