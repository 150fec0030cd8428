"""Conversion of chat messages to a transcript."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pippin.core.errors import InvalidRequest
from pippin.serve.api.chat import types
from pippin.serve.api.common import fields, provider_requests
from pippin.serve.api.common.calls import call, output
from pippin.session.transcript import (
    Answer,
    Attachment,
    Instructions,
    Prompt,
    Reasoning,
    Segment,
    TextSegment,
    ToolCalls,
    Transcript,
)

_AUDIO = {"wav": "audio/wav", "mp3": "audio/mpeg"}


def transcript(messages: Sequence[types.Message]) -> Transcript:
    """The transcript of a conversation.

    Raises:
        InvalidRequest: an output of a call that does not exist, arguments that are not a JSON object, an empty
            assistant message, an attachment that is not in the request.

    >>> transcript([types.UserMessage(role="user", content="Hi")]).entries[0].text
    'Hi'
    """
    entries: list[Any] = []
    called: dict[str, str] = {}
    for index, message in enumerate(messages):
        param = f"messages[{index}]"
        match message:
            case types.SystemMessage():
                entries.append(Instructions(segments=segments(message.content, param)))
            case types.UserMessage():
                entries.append(Prompt(segments=segments(message.content, param)))
            case types.AssistantMessage():
                said = _assistant(message, param)
                entries += said
                called |= {call.id: call.name for entry in said if isinstance(entry, ToolCalls) for call in entry.calls}
            case types.ToolMessage():
                entries.append(output(message.tool_call_id, segments(message.content, param), called, param))
    return Transcript(entries=tuple(entries))


def segments(content: str | Sequence[Any] | None, param: str) -> tuple[Segment, ...]:
    """Text or parts as segments.

    Raises:
        InvalidRequest: an attachment that is not in the request.
    """
    if content is None or isinstance(content, str):
        return (TextSegment(text=content or ""),)
    return tuple(_segment(part, f"{param}.content[{index}]") for index, part in enumerate(content))


def _segment(part: Any, param: str) -> Segment:
    match part:
        case fields.TextPart():
            return TextSegment(text=part.text)
        case fields.RefusalPart():
            return TextSegment(text=part.refusal)
        case fields.ImagePart():
            return provider_requests.attachment(part.image_url.url, f"{param}.image_url.url")
        case fields.AudioPart():
            sound = part.input_audio
            return provider_requests.encoded(sound.data, _AUDIO[sound.format], f"{param}.input_audio.data")
    return file(part.file, f"{param}.file")


def file(given: fields.FileData, param: str) -> Attachment:
    """A file that was sent with the request.

    Raises:
        InvalidRequest: it is not in the request.
    """
    if given.file_data is None:
        raise InvalidRequest(f"{param}: this server keeps no files; give file_data", param=param, code="invalid_value")
    return provider_requests.attachment(given.file_data, f"{param}.file_data", label=given.filename or "")


def _assistant(message: types.AssistantMessage, param: str) -> list[Any]:
    """The model's reasoning, and its text or tool calls."""
    entries: list[Any] = [Reasoning(text=message.reasoning_content)] if message.reasoning_content else []
    said = segments(message.content, param) if message.content else ()
    text = "\n\n".join(segment.text for segment in said) or message.refusal or ""
    if message.tool_calls:
        calls = [
            call(one.id, one.function.name, one.function.arguments, f"{param}.tool_calls[{index}].function.arguments")
            for index, one in enumerate(message.tool_calls)
        ]
        return [*entries, ToolCalls(calls=tuple(calls), text=text)]
    if message.content is None and not text:
        raise InvalidRequest(
            f"{param}.content: an assistant's message has content or tool_calls", param=f"{param}.content"
        )
    return [*entries, Answer(text)]
