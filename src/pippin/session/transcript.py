"""What was said: typed entries that survive a round trip through JSON unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pippin.core.errors import CorruptedFile


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Instructions(_Entry):
    """What the developer told the model to be; outranks every prompt."""

    kind: Literal["instructions"] = "instructions"
    text: str


class Prompt(_Entry):
    """What the user said."""

    kind: Literal["prompt"] = "prompt"
    text: str


class ToolCall(_Entry):
    """One call that the model asked for; ``arguments`` is what it wrote, before validation."""

    id: str
    name: str
    arguments: dict[str, Any]


class ToolCalls(_Entry):
    """The calls of one turn, with what the model said before them."""

    kind: Literal["tool_calls"] = "tool_calls"
    calls: tuple[ToolCall, ...]
    text: str = ""


class ToolOutput(_Entry):
    """What one call returned, as the model reads it."""

    kind: Literal["tool_output"] = "tool_output"
    call_id: str
    name: str
    text: str


class Answer(_Entry):
    """What the model answered; JSON text if a type was asked for."""

    kind: Literal["answer"] = "answer"
    text: str


Entry = Annotated[Instructions | Prompt | ToolCalls | ToolOutput | Answer, Field(discriminator="kind")]


class Transcript(BaseModel):
    """A conversation, oldest entry first. Immutable: a session replaces its transcript, it never edits it.

    >>> transcript = Transcript(entries=(Prompt(text="Hi"), Answer(text="Hello.")))
    >>> Transcript.from_json(transcript.to_json()) == transcript
    True
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1] = 1
    entries: tuple[Entry, ...] = ()

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return iter(self.entries)

    def add(self, *entries: Any) -> Transcript:
        """A transcript with more entries at its end."""
        return Transcript(entries=(*self.entries, *entries))

    def to_json(self) -> str:
        """The transcript as JSON text."""
        return self.model_dump_json(indent=2)

    @classmethod
    def from_json(cls, text: str | bytes) -> Transcript:
        """Read what `to_json` wrote.

        Raises:
            CorruptedFile: the text is not a transcript; the message names the first field that is wrong.
        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "the text"
            raise CorruptedFile(f"not a transcript: {where}: {first['msg']}") from error
