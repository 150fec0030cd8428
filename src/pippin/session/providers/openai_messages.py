"""OpenAI's chat-completions format: requests from a session, events and errors from responses.

Notable here:
- only the options of a request are sent: a server gets no field that it need not know
- the parts of parallel tool calls may be interleaved; they are joined by index and parsed when the answer ends
- an answer is complete when it has a finish reason; a stream that just ends is a broken one
"""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pippin.core.errors import (
    AnswerTruncated,
    AuthenticationFailed,
    ContextOverflow,
    InvalidProviderAnswer,
    ModelNotFound,
    NetworkFailure,
    PippinError,
    ProviderError,
    QuotaExceeded,
    RateLimited,
    Refusal,
    ServiceUnavailable,
    UnsupportedCapability,
    UnsupportedContent,
)
from pippin.engine.request import Token
from pippin.session.options import BUDGETS, GenerationOptions
from pippin.session.providers.provider import (
    Done,
    ProviderEvent,
    ProviderRequest,
    Reason,
    ReasoningDelta,
    Refused,
    TextDelta,
    ToolCallsMade,
)
from pippin.session.response import Timing, Usage
from pippin.session.transcript import (
    Answer,
    Attachment,
    Instructions,
    Prompt,
    ToolCall,
    ToolCalls,
    ToolOutput,
    Transcript,
)
from pippin.session.types.schema import Schema

_EFFORTS: Final = {"low": BUDGETS["light"], "medium": BUDGETS["moderate"]}
_REASONS: Final[dict[str, Reason]] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
}
_EXTENSIONS: Final = {"top_k": None, "min_p": 0.0, "repetition_penalty": 1.0}  # with what leaves all as it is
_UNKNOWN_ID: Final = -1
_MOST_CALLS: Final = 64
_CONTEXT_SIZE: Final = re.compile(
    r"(?:maximum context length|context (?:length|size|window)|context of \S+ holds|n_ctx)\D{0,24}(\d[\d,]*)", re.I
)
_NUMBER: Final = re.compile(r"\d[\d,]*")


# --- the request ------------------------------------------------------------------------------------------------------


def request_body(request: ProviderRequest, model: str, *, extensions: bool) -> dict[str, Any]:
    """The body of a request.

    Args:
        request: the provider request.
        model: the server's name of the model.
        extensions: the server also supports top_k, min_p and repetition_penalty.

    Raises:
        UnsupportedContent: an attachment that is neither text nor an image.
        UnsupportedCapability: an option that the server does not support.
    """
    options, schema = request.options, request.schema
    hint = schema.prompt_text() if schema is not None and options.include_schema_in_prompt else ""
    body: dict[str, Any] = {
        "model": f"{model}:{request.adapter}" if request.adapter else model,
        "messages": messages(request.transcript, hint),
        "stream": True,
        "stream_options": {"include_usage": True},
        **_options(options, extensions=extensions),
    }
    if request.tools:
        body["tools"] = [tool.definition() for tool in request.tools]
        for tool in body["tools"]:
            tool["function"]["parameters"] = _shown(tool["function"]["parameters"])
        body["tool_choice"] = "required" if options.tool_calling == "required" else "auto"
        body["parallel_tool_calls"] = options.parallel_tool_calls
    if schema is not None:
        body["response_format"] = {"type": "json_schema", "json_schema": _named(schema)}
    return body


def _options(options: GenerationOptions, *, extensions: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "temperature": options.temperature,
        "top_p": options.top_p,
        "seed": options.seed,
        "max_tokens": options.max_tokens,
        "stop": list(options.stop) or None,
        "frequency_penalty": options.frequency_penalty or None,
        "presence_penalty": options.presence_penalty or None,
        "logit_bias": {str(id): by for id, by in (options.logit_bias or {}).items()} or None,
    }
    if options.logprobs is not None:
        found.update(logprobs=True, top_logprobs=options.logprobs or None)
    if budget := options.reasoning_budget:
        found["reasoning_effort"] = next((name for name, most in _EFFORTS.items() if budget <= most), "high")
    for name, neutral in _EXTENSIONS.items():
        value = getattr(options, name)
        if value is not None and (extensions or value != neutral):
            if not extensions:
                raise UnsupportedCapability(
                    f"{name} is not part of this interface; leave it out, or say OpenAIProvider(…, extensions=True) "
                    "if this server knows it"
                )
            found[name] = value
    if extensions and options.max_tool_calls != GenerationOptions().max_tool_calls:
        found["max_tool_calls"] = options.max_tool_calls
    return {name: value for name, value in found.items() if value is not None}


def messages(transcript: Transcript, hint: str = "") -> list[dict[str, Any]]:
    """A conversation as messages; ``hint`` is added to the last prompt.

    Reasoning is not sent back. An image that a tool returned follows as a message of the user, since a tool's message
    holds text only.

    Raises:
        UnsupportedContent: an attachment that is neither text nor an image.
    """
    entries = list(transcript)
    last = max((index for index, entry in enumerate(entries) if isinstance(entry, Prompt)), default=-1)
    found: list[dict[str, Any]] = []
    images: list[dict[str, Any]] = []
    for index, entry in enumerate(entries):
        if images and not isinstance(entry, ToolOutput):
            found.append({"role": "user", "content": images})
            images = []
        if isinstance(entry, Instructions):
            found.append({"role": "system", "content": entry.text})
        elif isinstance(entry, Prompt):
            text = "\n\n".join(part for part in (entry.text, hint if index == last else "") if part)
            pictures = [_image(each) for each in entry.attachments if not each.is_text]
            parts = [{"type": "text", "text": text}] if text else []
            found.append({"role": "user", "content": [*parts, *pictures] if pictures else text})
        elif isinstance(entry, Answer):
            found.append({"role": "assistant", "content": entry.text})
        elif isinstance(entry, ToolCalls):
            found.append(_calls_message(entry))
        elif isinstance(entry, ToolOutput):
            found.append({"role": "tool", "tool_call_id": entry.call_id, "content": entry.text})
            images += [_image(each) for each in entry.attachments if not each.is_text]
    return [*found, {"role": "user", "content": images}] if images else found


def _calls_message(entry: ToolCalls) -> dict[str, Any]:
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for call in entry.calls
    ]
    return {"role": "assistant", "content": entry.text or None, "tool_calls": calls}


def _image(attachment: Attachment) -> dict[str, Any]:
    if not attachment.media_type.startswith("image/"):
        raise UnsupportedContent(
            f"only text and images can be sent, got {attachment.media_type} ({attachment.label or 'an attachment'})"
        )
    data = base64.b64encode(attachment.data).decode()
    return {"type": "image_url", "image_url": {"url": f"data:{attachment.media_type};base64,{data}"}}


def _named(schema: Schema[Any]) -> dict[str, Any]:
    shown = _shown(schema.json_schema)
    name = re.sub(r"[^\w-]+", "_", str(shown.get("title", "") if isinstance(shown, dict) else ""))[:64]
    return {"name": name or "answer", "schema": shown, "strict": _is_strict(shown, root=True)}


def _shown(schema: Any) -> Any:
    """A schema without Pippin's own keywords, which a server may refuse."""
    if isinstance(schema, list):
        return [_shown(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {}
    for key, value in schema.items():
        if key in ("properties", "$defs") and isinstance(value, dict):
            found[key] = {name: _shown(item) for name, item in value.items()}
        elif not key.startswith("x-"):
            found[key] = value if key in ("enum", "const", "default", "examples") else _shown(value)
    return found


def _is_strict(schema: Any, *, root: bool = False) -> bool:
    """Whether OpenAI's strict mode accepts the schema: objects closed, every property required, an object at the
    root."""
    if isinstance(schema, list):
        return all(map(_is_strict, schema))
    if not isinstance(schema, dict):
        return True
    if root and "$ref" not in schema and schema.get("type") != "object":
        return False
    if schema.get("type") == "object" or "properties" in schema:
        closed = schema.get("additionalProperties") is False
        if not closed or set(schema.get("required", [])) != set(schema.get("properties", {})):
            return False
    return all(_is_strict(value) for key, value in schema.items() if key not in ("enum", "const", "default"))


# --- the answer -------------------------------------------------------------------------------------------------------


class EventReader:
    """Reads one answer, event by event.

    Args:
        name: name of the provider, for messages.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.reason: str | None = None
        self.usage = Usage()
        self.refusal = ""
        self.calls: dict[int, dict[str, str]] = {}
        self.started = time.perf_counter()
        self.first: float | None = None

    def read(self, data: str) -> list[ProviderEvent]:
        """The events of one message: a chunk of a stream, or a whole answer.

        Raises:
            InvalidProviderAnswer: it does not follow the API. ProviderError, GenerationError: it is an error.
        """
        try:
            message = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise self.junk(f"this is no JSON: {data[:120]!r}") from error
        if not isinstance(message, dict):
            raise self.junk(f"an object was due: {data[:120]!r}")
        if message.get("error"):
            raise failure(self.name, None, data, {})
        try:
            return self._message(message)
        except (AttributeError, KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
            raise self.junk(f"a field is not what it should be ({error}): {data[:120]!r}") from error

    def _message(self, message: dict[str, Any]) -> list[ProviderEvent]:
        if usage := message.get("usage"):
            self.usage = _usage(usage)
        choices = message.get("choices") or []
        if not choices:
            return []
        choice = choices[0]
        delta = choice.get("delta") or choice.get("message") or {}
        events: list[ProviderEvent] = []
        thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
        if thought:
            events.append(ReasoningDelta(_text(thought)))
        tokens = _tokens(choice.get("logprobs"))
        if (text := _text(delta.get("content") or "")) or tokens:
            events.append(TextDelta(text, tokens))
        self.refusal += _text(delta.get("refusal") or "")
        for position, part in enumerate(delta.get("tool_calls") or []):
            self._part(part, position)
        if self.first is None and (events or self.calls):
            self.first = time.perf_counter()
        if choice.get("finish_reason"):
            self.reason = _text(choice["finish_reason"])
        return events

    def _part(self, part: dict[str, Any], position: int) -> None:
        """Add a part of one tool call."""
        index = part.get("index", position)
        if not isinstance(index, int) or not 0 <= index < _MOST_CALLS:
            raise ValueError(f"index {index!r} of a tool call")
        call = self.calls.setdefault(index, {"id": "", "name": "", "arguments": ""})
        function = part.get("function") or {}
        call["id"] = _text(part.get("id") or call["id"])
        call["name"] += _text(function.get("name") or "")
        arguments = function.get("arguments") or ""
        call["arguments"] += json.dumps(arguments) if isinstance(arguments, dict) else _text(arguments)

    def finish(self, transcript: Transcript) -> list[ProviderEvent]:
        """The last events.

        Raises:
            NetworkFailure: the answer was not complete. InvalidProviderAnswer: an invalid tool call.
            AnswerTruncated: ``max_tokens`` cut the first tool call.
        """
        if self.reason is None:
            raise NetworkFailure(f"{self.name} broke off before its answer was complete; ask again")
        if self.refusal or self.reason == "content_filter":
            return [Refused(self.refusal or "The provider's content filter stopped the answer."), self._done("stop")]
        reason = _REASONS.get(self.reason, "stop")
        if self.calls:
            calls, partial = self._calls(transcript)
            return [ToolCallsMade(calls), self._done("length" if reason == "length" else "tool_calls", partial)]
        return [self._done(reason)]

    def _calls(self, transcript: Transcript) -> tuple[tuple[ToolCall, ...], str]:
        """The calls that are whole, and the arguments of one that was cut after them."""
        before = sum(len(entry.calls) for entry in transcript if isinstance(entry, ToolCalls))
        found: list[ToolCall] = []
        for index, (_, call) in enumerate(sorted(self.calls.items())):
            try:
                arguments = json.loads(call["arguments"] or "{}")
            except (ValueError, RecursionError) as error:
                if self.reason == "length" and found:
                    return tuple(found), call["arguments"]
                if self.reason == "length":
                    raise AnswerTruncated(
                        f"a call of {call['name']!r} was not complete when {self.name} ended its answer; raise "
                        "max_tokens or ask for less",
                        partial=call["arguments"],
                    ) from error
                raise self.junk(f"arguments of {call['name']!r} are no JSON: {call['arguments'][:120]!r}") from error
            if not isinstance(arguments, dict) or not call["name"]:
                raise self.junk(f"a tool call without name or arguments: {call!r:.120}")
            found.append(ToolCall(id=call["id"] or f"call_{before + index}", name=call["name"], arguments=arguments))
        return tuple(found), ""

    def _done(self, reason: Reason, partial: str = "") -> Done:
        return Done(reason, self.usage, self.timing(), partial)

    def timing(self) -> Timing:
        """Seconds so far."""
        total = time.perf_counter() - self.started
        first = total if self.first is None else self.first - self.started
        return Timing(first, total - first, first)

    def junk(self, what: str) -> InvalidProviderAnswer:
        """The error for an answer that violates the API."""
        return InvalidProviderAnswer(f"{self.name} sent what its interface does not promise; {what}")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a text was due, got {value!r:.40}")
    return value


def _usage(usage: dict[str, Any]) -> Usage:
    read, written = usage.get("prompt_tokens_details") or {}, usage.get("completion_tokens_details") or {}
    return Usage(
        int(usage.get("prompt_tokens") or 0),
        int(read.get("cached_tokens") or 0),
        int(usage.get("completion_tokens") or 0),
        int(written.get("reasoning_tokens") or 0),
    )


def _tokens(logprobs: Any) -> tuple[Token, ...]:
    """The tokens of a chunk; the API reports their texts, not their ids."""
    listed = (logprobs or {}).get("content") or []
    return tuple(Token(_UNKNOWN_ID, _text(each["token"]), float(each["logprob"])) for each in listed)


# --- errors -----------------------------------------------------------------------------------------------------------


def failure(name: str, status: int | None, text: str, headers: Mapping[str, str]) -> PippinError:
    """The error of a response.

    Args:
        name: name of the provider.
        status: HTTP status; None for an error in the middle of a stream.
        text: the body.
        headers: headers of the response, names in lower case.
    """
    message, code = _described(text)
    said = f"{name} answered{f' with status {status}' if status else ''}: {message}"
    wait = retry_after(headers)
    if code == "context_length_exceeded" and (numbers := context_numbers(message)) is not None:
        return ContextOverflow(said, context_size=numbers[0], token_count=numbers[1])
    if code in ("content_filter", "refusal"):
        return Refusal(said, explanation=message)
    if code in ("insufficient_quota", "quota_exceeded"):
        return QuotaExceeded(said, retry_after=wait)
    if status == 429 or code == "rate_limit_exceeded":
        return RateLimited(said, retry_after=wait)
    if status in (401, 403) or code == "invalid_api_key":
        return AuthenticationFailed(f"{said}; check api_key")
    if status == 404 or code == "model_not_found":
        return ModelNotFound(f"{said}; check model, base_url and path")
    if status is not None and (status >= 500 or status == 408):
        return ServiceUnavailable(f"{said}; try again later")
    if status is not None and status < 400:
        return InvalidProviderAnswer(f"{said}; a stream of events was due")
    return ProviderError(said)


def _described(text: str) -> tuple[str, str]:
    """Message and code of an error's body, in any format."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        return " ".join(text.split())[:300] or "nothing", ""
    error = body.get("error", body) if isinstance(body, dict) else body
    if not isinstance(error, dict):
        return str(error)[:300], ""
    message = error.get("message") or error.get("detail") or json.dumps(error)
    codes = [str(error.get(key) or "") for key in ("code", "type")]
    return str(message)[:1000], next((code for code in codes if code in _CODES), codes[0])


_CODES: Final[Sequence[str]] = (
    "context_length_exceeded",
    "content_filter",
    "refusal",
    "insufficient_quota",
    "quota_exceeded",
    "rate_limit_exceeded",
    "invalid_api_key",
    "model_not_found",
)


def context_numbers(message: str) -> tuple[int, int] | None:
    """Context size and token count in a server's message; None if it does not have both.

    >>> context_numbers("maximum context length is 4,096 tokens, but you requested 5000 tokens (4990 in the messages)")
    (4096, 5000)
    """
    found = _CONTEXT_SIZE.search(message)
    numbers = [int(number.replace(",", "")) for number in _NUMBER.findall(message)]
    if found is None:
        return None
    size = int(found[1].replace(",", ""))
    larger = [number for number in numbers if number > size]
    return (size, max(larger)) if larger else None


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds to wait, from the ``Retry-After`` header; None if it is missing or a date."""
    try:
        seconds = float(headers.get("retry-after", ""))
    except ValueError:
        return None
    return seconds if 0 <= seconds < 1e9 else None
