"""Answers of one HTTP request: one or several generation jobs, run in parallel and identified by their index.

Notable here:
- a client that stops reading cancels the work, before the first token too, and frees all resources of the request
- the first event is awaited before anything is sent, so that an error can still set the HTTP status
- an early end that is not an error of the request (a guardrail, a tool call cut by max_tokens) becomes a finish reason,
  with the text that was safe until then
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Literal, TypeVar, cast

import pippin
from pippin.core.errors import (
    Cancelled,
    CheckpointError,
    ContextOverflow,
    GuardrailViolation,
    InvalidRequest,
    Refusal,
    SchemaError,
    UnsupportedContent,
)
from pippin.engine.request import Token
from pippin.serve.api.common import provider_requests
from pippin.session.providers.provider import (
    Done,
    ProviderEvent,
    ProviderRequest,
    ReasoningDelta,
    Refused,
    TextDelta,
    ToolCallsMade,
)
from pippin.session.response import Usage
from pippin.session.transcript import ToolCall

if TYPE_CHECKING:
    from pippin.serve.service import Caller, Service
    from pippin.session.providers.local import LocalModel

T = TypeVar("T")

AT_ONCE: Final = 4  # answers of one request that run at a time; the others wait, but other requests do not


@dataclass(frozen=True)
class StoppedEarly:
    """An answer that a guardrail stopped."""

    reason: Literal["content_filter"]
    usage: Usage = Usage()


Event = ProviderEvent | StoppedEarly


MAX_NOTES: Final = 4000
"""Bytes of the header of notes; proxies allow about 8,000 for all headers."""


class GenerationJob:
    """One answer.

    Args:
        service: runs the job.
        model: "NAME" or "NAME:ADAPTER"; empty for the server's default.
        caller: who sent the request.
        make: builds the provider request from the loaded model; called in a worker thread.
        prompt_field: the name of the conversation in the request, for errors about it.
        format_field: the name of the response format in the request.
        priority: -10 to 10; higher priorities run first.
    """

    def __init__(
        self,
        service: Service,
        model: str,
        caller: Caller,
        make: Callable[[LocalModel], ProviderRequest],
        *,
        prompt_field: str = "messages",
        format_field: str = "response_format",
        priority: int = 0,
    ) -> None:
        self._service, self._model, self._caller, self._make = service, model, caller, make
        self._prompt_field, self._format_field, self._priority = prompt_field, format_field, priority
        self._local: LocalModel | None = None
        self.provider_request: ProviderRequest | None = None

    @property
    def local(self) -> LocalModel:
        """The model; set once the first event has arrived."""
        assert self._local is not None
        return self._local

    def _build(self, local: LocalModel) -> ProviderRequest:
        self._local = local
        self.provider_request = self._make(local)
        return self.provider_request

    async def _used(self, written: int) -> Usage:
        """The usage of an answer that ended before it could report it."""
        assert self.provider_request is not None
        return Usage(await asyncio.to_thread(self.local.token_count, self.provider_request), 0, written)

    async def events(self) -> AsyncGenerator[Event]:
        """The events of the service, with early ends as events.

        Raises:
            InvalidRequest: the model's chat template cannot render this conversation.
            PippinError: whatever the service raises.
        """
        begun, written = False, 0
        events = self._service.run(self._model, self._build, self._caller, priority=self._priority)
        running = cast("AsyncGenerator[ProviderEvent]", events)
        try:
            async with aclosing(running):
                async for event in running:
                    if isinstance(event, Done) and event.finish_reason == "cancelled":
                        raise Cancelled("the answer was cancelled by the server")
                    begun = True
                    if isinstance(event, ToolCallsMade):
                        event = ToolCallsMade(tuple(_named(call) for call in event.calls))
                    written += len(event.tokens) if isinstance(event, TextDelta) else 0
                    yield event
        except GuardrailViolation:
            if not begun:
                raise
            yield StoppedEarly("content_filter", await self._used(written))
        except Refusal as error:
            yield Refused(error.explanation)
        except (SchemaError, RecursionError) as error:
            if self.provider_request is None or hasattr(error, "param"):
                raise
            # found only by the engine, which compiles tools and format into one grammar
            param = "tools" if self.provider_request.tools else self._format_field
            with provider_requests.about(param):
                raise
        except CheckpointError as error:
            if self.provider_request is None:
                raise
            raise InvalidRequest(str(error), param=self._prompt_field, code="invalid_conversation") from error
        except (ContextOverflow, UnsupportedContent) as error:
            error.param = self._prompt_field  # type: ignore[union-attr]
            raise


def _named(call: ToolCall) -> ToolCall:
    """The call with a unique id: the model's own ids repeat, and a client may hold many conversations."""
    return call.model_copy(update={"id": f"call_{secrets.token_hex(12)}"})


@dataclass
class GeneratedAnswer:
    """The state of one answer so far."""

    index: int = 0
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    refusal: str | None = None
    finish_reason: str | None = None
    usage: Usage = Usage()

    def add(self, event: Event) -> None:
        """Process one event."""
        match event:
            case TextDelta():
                self.texts.append(event.text)
                self.tokens.extend(event.tokens)
            case ReasoningDelta():
                self.thoughts.append(event.text)
            case ToolCallsMade():
                self.calls.extend(event.calls)
            case Refused():
                self.refusal = event.explanation
                self.finish_reason = self.finish_reason or "stop"
            case StoppedEarly():
                self.finish_reason, self.usage = event.reason, event.usage
            case Done():
                self.usage = event.usage
                # a model that calls a tool and then stops has finished with tool_calls; one that was cut off with
                # length
                called = bool(self.calls) and event.finish_reason == "stop"
                self.finish_reason = self.finish_reason or ("tool_calls" if called else event.finish_reason)

    @property
    def text(self) -> str:
        """The answer's text."""
        return "".join(self.texts)

    @property
    def reasoning(self) -> str:
        """The model's reasoning."""
        return "".join(self.thoughts)


def total(answers: Sequence[GeneratedAnswer]) -> Usage:
    """The usage of several answers to one prompt, whose tokens count once."""
    most = max(answers, key=lambda answer: answer.usage.input_tokens, default=GeneratedAnswer()).usage
    whole = sum((answer.usage for answer in answers), Usage())
    return replace(whole, input_tokens=most.input_tokens, cached_tokens=most.cached_tokens)


def noted(jobs: Sequence[GenerationJob]) -> dict[str, str]:
    """The header that says what of the response format is not enforced, as a JSON list; none where all is."""
    request = jobs[0].provider_request
    schema = None if request is None else request.schema
    notes: list[str] = []
    for note in () if schema is None else schema.notes:
        if len(json.dumps([*notes, note])) > MAX_NOTES:
            break
        notes.append(note.replace("\x7f", "?"))
    return {"x-pippin-notes": json.dumps(notes)} if notes else {}


async def merged(jobs: Sequence[GenerationJob]) -> AsyncGenerator[tuple[int, Event]]:
    """The events of all jobs with the job's index, as they arrive; the first error ends all jobs."""
    if len(jobs) == 1:
        async with aclosing(jobs[0].events()) as only:
            async for event in only:
                yield 0, event
        return
    queue: asyncio.Queue[tuple[int, Event] | None] = asyncio.Queue(maxsize=AT_ONCE)
    gate = asyncio.Semaphore(AT_ONCE)

    async def pump(index: int, job: GenerationJob) -> None:
        async with gate, aclosing(job.events()) as events:
            async for event in events:
                await queue.put((index, event))

    async def pump_all() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for index, job in enumerate(jobs):
                    group.create_task(pump(index, job))
        finally:
            await queue.put(None)

    task = asyncio.create_task(pump_all())
    try:
        while (item := await queue.get()) is not None:
            yield item
        try:
            await task
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
    finally:
        task.cancel()
        while not task.done():  # its last put may wait for space in a queue that nobody reads any more
            while not queue.empty():
                queue.get_nowait()
            await asyncio.wait({task}, timeout=0.01)
        _ = task.cancelled() or task.exception()  # retrieved, whatever it was


class OpenStream(AsyncIterator[T]):
    """A stream whose first item has arrived; `aclose` closes it whether or not anybody has read on."""

    def __init__(self, first: T, rest: AsyncGenerator[T]) -> None:
        self._first: list[T] = [first]
        self._rest = rest

    async def __anext__(self) -> T:
        return self._first.pop() if self._first else await anext(self._rest)

    async def aclose(self) -> None:
        """End the stream."""
        await self._rest.aclose()


async def opened(stream: AsyncGenerator[T]) -> OpenStream[T]:
    """Wait for the first item of a stream.

    Raises:
        PippinError: what the stream raises first.
    """
    try:
        return OpenStream(await anext(stream), stream)
    except BaseException:
        await stream.aclose()
        raise


async def collect(jobs: Sequence[GenerationJob]) -> list[GeneratedAnswer]:
    """All answers, complete."""
    answers = [GeneratedAnswer(index) for index in range(len(jobs))]
    async with aclosing(merged(jobs)) as events:
        async for index, event in events:
            answers[index].add(event)
    return answers


def fingerprint(local: LocalModel) -> str:
    """A fingerprint of what a seeded answer depends on: the software, the model, its precision and its device."""
    model = local.model
    parts = (pippin.__version__, model.name, str(model.dtype), model.device.type)
    return "fp_" + hashlib.sha256(" ".join(parts).encode()).hexdigest()[:10]
