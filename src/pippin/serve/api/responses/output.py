"""Conversion of generation events to the items of a response, and to the typed events of its stream.

Notable here:
- an answer that is not streamed uses the same code: its events are created and not sent
- items are in the order in which the model generated them: reasoning, message, calls
- a response with calls that were whole when max_output_tokens cut it is completed, and says in ``incomplete_details``
  that it was cut
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pippin.serve.api.common.calls import arguments
from pippin.serve.api.common.errors import ErrorResponse
from pippin.serve.api.common.generation import Event, GeneratedAnswer, GenerationJob
from pippin.serve.api.common.logprobs import chat_logprobs
from pippin.session.providers.provider import ReasoningDelta, Refused, TextDelta, ToolCallsMade
from pippin.session.response import Usage
from pippin.session.transcript import Answer as AnswerEntry, Reasoning, ToolCall, ToolCalls

if TYPE_CHECKING:
    from pippin.engine.request import Token

Out = tuple[str, dict[str, Any]]
_REASONS = {"length": "max_output_tokens", "content_filter": "content_filter"}


def usage(used: Usage) -> dict[str, Any]:
    """Token usage in the format of this API."""
    return {
        "input_tokens": used.input_tokens,
        "input_tokens_details": {"cached_tokens": used.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": used.output_tokens,
        "output_tokens_details": {"reasoning_tokens": used.reasoning_tokens},
        "total_tokens": used.input_tokens + used.output_tokens,
    }


class ResponseWriter:
    """Writes one response.

    Args:
        response: the object without output, status "in_progress".
        job: the generation job that answers it.
        with_logprobs: whether to report log-probabilities.
    """

    def __init__(self, response: dict[str, Any], job: GenerationJob, with_logprobs: bool) -> None:
        self.response, self._job, self._with_logprobs = response, job, with_logprobs
        self.answer = GeneratedAnswer()
        self._output: list[dict[str, Any]] = response["output"]
        self._open: dict[str, Any] | None = None  # the item that is being generated
        self._waiting: list[Token] = []
        self._sequence_number = 0

    def begin(self) -> Iterator[Out]:
        """The first events."""
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=self._snapshot())

    def push(self, event: Event) -> Iterator[Out]:
        """The stream events of a generation event."""
        self.answer.add(event)
        match event:
            case ReasoningDelta() if event.text:
                yield from self._grow("reasoning", "reasoning_text", event.text)
            case TextDelta():
                self._waiting += event.tokens
                if event.text:
                    yield from self._grow("message", "output_text", event.text)
            case Refused():
                yield from self._grow("message", "refusal", event.explanation)
            case ToolCallsMade():
                yield from self._close()
                for call in event.calls:
                    yield from self._call(call)

    def finish(self) -> Iterator[Out]:
        """The last events; after them `response` is complete."""
        if not self._output:
            yield from self._grow("message", "output_text", "")
        reason = _REASONS.get(self.answer.finish_reason or "")
        yield from self._close("incomplete" if reason else "completed")
        if reason:
            self.response["incomplete_details"] = {"reason": reason}
        if self.answer.calls and self.answer.finish_reason == "length":
            reason = None  # agents discard an incomplete response, and its calls can be run
        self.response["usage"] = usage(self.answer.usage)
        status = self.response["status"] = "incomplete" if reason else "completed"
        self.response["completed_at"] = None if reason else int(time.time())
        yield self._event(f"response.{status}", response=self._snapshot())

    def fail(self, failure: ErrorResponse) -> Iterator[Out]:
        """The last events of a failed response; OpenAI's clients raise on the second."""
        detail = failure.detail
        self.response["status"] = "failed"
        self.response["error"] = {"code": "server_error", "message": detail.message}
        yield self._event("response.failed", response=self._snapshot())
        yield self._event("error", code=detail.code, message=detail.message, param=detail.param, **failure.body)

    @property
    def entries(self) -> tuple[Any, ...]:
        """The model's output, for the next request of the conversation."""
        answer = self.answer
        thought = (Reasoning(text=answer.reasoning),) if answer.reasoning else ()
        if answer.calls:
            return (*thought, ToolCalls(calls=tuple(answer.calls), text=answer.text))
        return (*thought, AnswerEntry(answer.text or answer.refusal or ""))

    # --- items --------------------------------------------------------------------------------------------------------

    def _grow(self, kind: str, part_kind: str, text: str) -> Iterator[Out]:
        """Append text to the open item; opens a new item if it is of another kind."""
        if self._open is None or self._open["type"] != kind or self._open["content"][0]["type"] != part_kind:
            yield from self._close()
            yield from self._start(kind, part_kind)
        assert self._open is not None
        part = self._open["content"][0]
        part["refusal" if part_kind == "refusal" else "text"] += text
        if not text:
            return
        more = {}
        if part_kind == "output_text":
            more = {"logprobs": self._take()}
            part["logprobs"] += more["logprobs"]
        yield self._event(f"response.{part_kind}.delta", **self._location(), delta=text, **more)

    def _start(self, kind: str, part_kind: str) -> Iterator[Out]:
        part: dict[str, Any] = {"type": part_kind}
        part |= {"refusal": ""} if part_kind == "refusal" else {"text": ""}
        part |= {"annotations": [], "logprobs": []} if part_kind == "output_text" else {}
        item: dict[str, Any] = {"type": kind, "status": "in_progress", "content": []}
        if kind == "message":
            item |= {"id": f"msg_{secrets.token_hex(12)}", "role": "assistant"}
        else:
            item |= {"id": f"rs_{secrets.token_hex(12)}", "summary": []}
        self._output.append(item)
        self._open = item
        yield self._event("response.output_item.added", output_index=len(self._output) - 1, item=_copy(item))
        item["content"].append(part)
        yield self._event("response.content_part.added", **self._location(), part=dict(part))

    def _close(self, status: str = "completed") -> Iterator[Out]:
        """End the open item, if there is one."""
        item = self._open
        if item is None:
            return
        location, part = self._location(), item["content"][0]
        kind = part["type"]
        if kind == "output_text":
            part["logprobs"] += self._take()
            yield self._event(f"response.{kind}.done", **location, text=part["text"], logprobs=part["logprobs"])
        else:
            key = "refusal" if kind == "refusal" else "text"
            yield self._event(f"response.{kind}.done", **location, **{key: part[key]})
        yield self._event("response.content_part.done", **location, part=dict(part))
        item["status"], self._open = status, None
        yield self._event("response.output_item.done", output_index=location["output_index"], item=_copy(item))

    def _call(self, call: ToolCall) -> Iterator[Out]:
        """All events of one call."""
        item = {
            "type": "function_call",
            "id": f"fc_{secrets.token_hex(12)}",
            "call_id": call.id,
            "name": call.name,
            "arguments": "",
            "status": "in_progress",
        }
        self._output.append(item)
        location = {"item_id": item["id"], "output_index": len(self._output) - 1}
        yield self._event("response.output_item.added", output_index=location["output_index"], item=dict(item))
        text = arguments(call)
        yield self._event("response.function_call_arguments.delta", **location, delta=text)
        yield self._event("response.function_call_arguments.done", **location, name=call.name, arguments=text)
        item |= {"arguments": text, "status": "completed"}
        self._output[-1] = item
        yield self._event("response.output_item.done", output_index=location["output_index"], item=dict(item))

    # --- helpers
    # ----------------------------------------------------------------------------------------------------------

    def _location(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self._output) - 1, "content_index": 0}

    def _take(self) -> list[dict[str, Any]]:
        taken, self._waiting = self._waiting, []
        return chat_logprobs(self._job.local.model.tokenizer, taken) if self._with_logprobs else []

    def _snapshot(self) -> dict[str, Any]:
        return {**self.response, "output": [_copy(item) for item in self._output]}

    def _event(self, kind: str, **fields: Any) -> Out:
        number, self._sequence_number = self._sequence_number, self._sequence_number + 1
        return kind, {"type": kind, "sequence_number": number, **fields}


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    """A copy of an item that does not change when the open one grows."""
    if "content" not in item:
        return dict(item)
    return {**item, "content": [{**part} for part in item["content"]]}
