"""What an answer may be: a Python type, a JSON Schema, a regular expression, a list of choices or a grammar.

Notable here:
- every constraint is enforced while the answer is written, whatever the model would like to say; one that cannot be is
  refused when the schema is made, with the names of field and guide
- `snapshot` reads an unfinished answer: what has not begun is None, what is growing holds its beginning
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

from pydantic import ValidationError
from pydantic_core import CoreSchema, core_schema

from pippin.core.errors import EmptySchema, InvalidArgument, InvalidInput
from pippin.engine import json_grammar
from pippin.engine.constraint import Grammar
from pippin.session import dialect, partial

T = TypeVar("T")


@dataclass(frozen=True)
class Regex:
    """Texts that a regular expression matches from end to end; also a guide: ``Annotated[str, Regex("[A-Z]{3}")]``."""

    pattern: str

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return core_schema.str_schema(pattern=f"^(?:{self.pattern})$")


@dataclass(frozen=True, init=False)
class Choice:
    """One of some texts; also a guide: ``Annotated[str, Choice(["Rome", "Oslo"])]``.

    Raises:
        EmptySchema: no texts. InvalidArgument: one text instead of a list.
    """

    texts: tuple[str, ...]

    def __init__(self, texts: Sequence[str]) -> None:
        if isinstance(texts, str):
            raise InvalidArgument(f"a choice is a list of texts, got the text {texts!r}")
        if not texts:
            raise EmptySchema("a choice needs at least one text to choose")
        object.__setattr__(self, "texts", tuple(dict.fromkeys(texts)))

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return core_schema.literal_schema(list(self.texts))


AnyOf = Choice


@dataclass(frozen=True)
class Lark:
    """Texts of a Lark grammar in llguidance's dialect; its first rule is ``start``."""

    source: str


class Schema(Generic[T]):
    """A kind of answer.

    Args:
        target: a Pydantic model, dataclass, TypedDict, Enum, Literal, ``list[T]``, ``dict[str, T]``, tuple, set, union
            or anything else that Pydantic validates; a JSON Schema as a dict; `Regex`, `Choice` or `Lark`.

    Raises:
        UnsupportedGuide: a constraint that cannot be enforced; it names field and guide. Validators written in Python
            are such: a grammar cannot follow them.
        EmptySchema: nothing satisfies it. UndefinedReference: a ``$ref`` points at nothing.
        SchemaError: it cannot describe an answer for another reason.

    >>> from typing import Literal
    >>> Schema(Literal["red", "green"]).parse('"red"')
    'red'
    >>> Schema(list[int]).snapshot("[1, 2, 3")
    [1, 2]
    """

    def __init__(self, target: type[T] | dict[str, Any] | Regex | Choice | Lark | Any) -> None:
        self.target: Any = target
        self.json_schema: dict[str, Any] | None = None
        self._adapter = None
        if isinstance(target, Regex):
            self.grammar = Grammar.regex(target.pattern)
        elif isinstance(target, Choice):
            self.grammar = Grammar.choice(target.texts)
        elif isinstance(target, Lark):
            self.grammar = Grammar.lark(target.source)
        elif isinstance(target, dict):
            self.json_schema = target
            self.grammar = Grammar.json_schema(target)
        else:
            self._adapter, self.json_schema = dialect.describe(target)
            self.grammar = Grammar(json_grammar.write(self.json_schema, strict=True))

    @classmethod
    def of(cls, target: Any) -> Schema[Any]:
        """``target`` itself if it is a schema, else a schema of it."""
        return target if isinstance(target, Schema) else cls(target)

    def __repr__(self) -> str:
        return f"Schema({self.target!r})"

    @cached_property
    def partial_type(self) -> Any:
        """The type of unfinished answers: every field optional."""
        return str if self.json_schema is None else Any if self._adapter is None else partial.partial_type(self.target)

    def parse(self, text: str) -> T:
        """The answer as a value.

        Raises:
            InvalidInput: the text is not an answer of this kind; what was written under `grammar` always is.
        """
        result: Any = text
        if self._adapter is not None:
            try:
                result = self._adapter.validate_json(text)
            except ValidationError as error:
                raise InvalidInput(f"{text[:200]!r} does not fit {self!r}: {error}") from error
        elif self.json_schema is not None:
            try:
                result = json.loads(text)
            except ValueError as error:
                raise InvalidInput(f"{text[:200]!r} is not JSON: {error}") from error
            if not any(map(self.fits, (text, json.dumps(result, ensure_ascii=False)))):
                raise InvalidInput(f"{text[:200]!r} does not fit the JSON Schema")
        elif not self.fits(text):
            raise InvalidInput(f"{text[:200]!r} does not fit {self!r}")
        return result  # type: ignore[no-any-return]

    def fits(self, text: str) -> bool:
        """Whether the grammar allows exactly this text."""
        return self.grammar.allows(text)

    def snapshot(self, text: str, *, complete: bool = False) -> Any:
        """The value of an answer that is still being written.

        Args:
            text: what has been written so far.
            complete: it is the whole answer (the last snapshot); only a number by itself does not show that.

        Returns:
            The parsed answer once it is whole; before, a value of `partial_type`: fields that have not begun are None,
            growing strings and lists hold their beginning, and numbers, dates and other values that cannot be used
            in part appear when they are complete.
        """
        if self.json_schema is None:
            return self.parse(text) if complete else text
        value, whole = partial.parse_partial(text)
        if complete or whole:
            return self.parse(text)
        return value if self._adapter is None else partial.fill(self.target, value)

    def prompt_text(self) -> str:
        """What to tell the model about the answer; advice only, the grammar holds without it."""
        if isinstance(self.target, Regex):
            return f"Answer with a text that matches the regular expression {self.target.pattern}"
        if isinstance(self.target, Choice):
            return "Answer with one of: " + ", ".join(self.target.texts)
        if isinstance(self.target, Lark):
            return "Answer with a text of this grammar:\n" + self.target.source
        return "Answer with JSON that fits this JSON Schema:\n" + json.dumps(
            _advice(self.json_schema), ensure_ascii=False
        )


def _advice(schema: Any) -> Any:
    """The schema without what only the grammar needs: a prompt costs tokens."""
    if isinstance(schema, list):
        return [_advice(item) for item in schema]
    if isinstance(schema, dict):
        hidden = [
            key
            for key, value in schema.items()
            if key == "x-order" or (key == "additionalProperties" and value is False)
        ]
        return {key: _advice(value) for key, value in schema.items() if key not in hidden}
    return schema
