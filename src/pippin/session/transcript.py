"""Transcripts: typed entries made of typed segments, with a lossless JSON form.

Notable here:
- an entry is instructions, a prompt, the model's reasoning, its tool calls, a tool's output, or the answer
- a segment is text, a structure (JSON exactly as the model wrote it), or an attachment (bytes)
- most programs need only text segments: ``Prompt("Hello").text``
"""

from __future__ import annotations

import base64
import json
import mimetypes
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Base64Bytes, BaseModel, ConfigDict, Field, ValidationError

from pippin.core.errors import CorruptedFile, InvalidInput


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


# --- segments ---------------------------------------------------------------------------------------------------------


class TextSegment(_Frozen):
    """Text."""

    type: Literal["text"] = "text"
    text: str


class StructuredSegment(_Frozen):
    """A value as JSON, stored as it was written; ``schema_name`` is its type."""

    type: Literal["structure"] = "structure"
    text: str
    schema_name: str = ""

    @property
    def value(self) -> Any:
        """The JSON as Python values."""
        return json.loads(self.text)


class Attachment(_Frozen):
    """Bytes with a media type, such as an image; ``label`` is a name that prompt and answer can refer to.

    >>> Attachment(media_type="text/plain", data="SGk=", label="note").text
    'note:\\nHi'
    """

    type: Literal["attachment"] = "attachment"
    media_type: str = Field(pattern=r"^[\w.+-]+/[\w.+-]+$")
    data: Base64Bytes
    label: str = ""

    @classmethod
    def from_file(cls, path: str | Path, *, label: str | None = None) -> Attachment:
        """A file with the media type of its suffix; labeled with its name.

        Raises:
            InvalidInput: the file cannot be read, or its suffix has no known media type.
        """
        path = Path(path)
        kind = mimetypes.guess_type(path.name)[0]
        if kind is None:
            raise InvalidInput(f"the ending of {path.name!r} tells no media type; use Attachment(media_type=…, data=…)")
        try:
            data = path.read_bytes()
        except OSError as error:
            raise InvalidInput(f"cannot read {path}: {error.strerror}") from error
        return cls(media_type=kind, data=base64.b64encode(data), label=path.name if label is None else label)

    @property
    def is_text(self) -> bool:
        """Whether every model can read it."""
        return self.media_type.startswith("text/") or self.media_type == "application/json"

    @property
    def text(self) -> str:
        """The attached text after its label; empty for other media."""
        if not self.is_text:
            return ""
        text = self.data.decode("utf-8", "replace")
        return f"{self.label}:\n{text}" if self.label else text


Segment = Annotated[TextSegment | StructuredSegment | Attachment, Field(discriminator="type")]


# --- entries ----------------------------------------------------------------------------------------------------------


class _Segmented(_Frozen):
    segments: tuple[Segment, ...]

    def __init__(self, text: str | None = None, /, **fields: Any) -> None:
        if text is not None:
            fields["segments"] = (TextSegment(text=text),)
        super().__init__(**fields)

    @property
    def text(self) -> str:
        """All text in it, with empty lines between segments."""
        return "\n\n".join(text for segment in self.segments if (text := segment.text))

    @property
    def attachments(self) -> tuple[Attachment, ...]:
        """The segments that are attachments."""
        return tuple(segment for segment in self.segments if isinstance(segment, Attachment))


class Instructions(_Segmented):
    """Instructions of the developer; they take precedence over prompts."""

    kind: Literal["instructions"] = "instructions"

    def __init__(self, text: str | None = None, /, **fields: Any) -> None:  # type checkers do not look at the base's
        super().__init__(text, **fields)


class Prompt(_Segmented):
    """A message of the user.

    >>> Prompt("Hello").text
    'Hello'
    """

    kind: Literal["prompt"] = "prompt"

    def __init__(self, text: str | None = None, /, **fields: Any) -> None:  # type checkers do not look at the base's
        super().__init__(text, **fields)

    @classmethod
    def of(cls, prompt: str | Prompt | Sequence[str | Segment]) -> Prompt:
        """A prompt from text, from segments and texts, or the prompt itself.

        Raises:
            InvalidInput: something else.
        """
        if isinstance(prompt, Prompt):
            return prompt
        parts = [prompt] if isinstance(prompt, str | TextSegment | StructuredSegment | Attachment) else prompt
        if not isinstance(parts, Sequence):
            raise InvalidInput(f"a prompt is text, a Prompt or a list of segments, got {prompt!r:.80}")
        segments = [TextSegment(text=part) if isinstance(part, str) else part for part in parts]
        for part in segments:
            if not isinstance(part, TextSegment | StructuredSegment | Attachment):
                raise InvalidInput(f"a segment of a prompt is text, Structure or Attachment, got {part!r:.80}")
        return cls(segments=tuple(segments))


class Reasoning(_Frozen):
    """The model's reasoning; ``signature`` is the provider's signature of it, if there is one."""

    kind: Literal["reasoning"] = "reasoning"
    text: str
    signature: Base64Bytes | None = None


class ToolCall(_Frozen):
    """One tool call; ``arguments`` is the model's output before validation."""

    id: str
    name: str
    arguments: dict[str, Any]


class ToolCalls(_Frozen):
    """The tool calls of one round, with the model's text before them.

    ``partial`` is a further call, as far as it was written when ``max_tokens`` cut it; it was not run.
    """

    kind: Literal["tool_calls"] = "tool_calls"
    calls: tuple[ToolCall, ...]
    text: str = ""
    partial: str = ""


class ToolOutput(_Segmented):
    """The output of one call, as the model reads it."""

    kind: Literal["tool_output"] = "tool_output"
    call_id: str
    name: str

    def __init__(self, text: str | None = None, /, **fields: Any) -> None:  # type checkers do not look at the base's
        super().__init__(text, **fields)


class Answer(_Segmented):
    """The model's answer: text, or a structure if a type was requested."""

    kind: Literal["response"] = "response"

    def __init__(self, text: str | None = None, /, **fields: Any) -> None:  # type checkers do not look at the base's
        super().__init__(text, **fields)


Entry = Annotated[
    Instructions | Prompt | Reasoning | ToolCalls | ToolOutput | Answer,
    Field(discriminator="kind"),
]


class Transcript(BaseModel):
    """A conversation, oldest entry first. Immutable: a session replaces its transcript, it never edits it.

    >>> transcript = Transcript(entries=(Prompt("Hi"), Answer("Hello.")))
    >>> Transcript.from_json(transcript.to_json()) == transcript
    True
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[2] = 2
    entries: tuple[Entry, ...] = ()

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return iter(self.entries)

    @property
    def history(self) -> tuple[Any, ...]:
        """All entries except the instructions."""
        return tuple(entry for entry in self.entries if not isinstance(entry, Instructions))

    @property
    def instructions(self) -> tuple[Instructions, ...]:
        """The instructions."""
        return tuple(entry for entry in self.entries if isinstance(entry, Instructions))

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
