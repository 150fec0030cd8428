"""One HTTP request's answers: one or several turns, run side by side, told apart by their number.

Notable here:
- whoever stops reading ends the work, before the first token too, and frees every slot of the request
- the first event is awaited before anything is sent, so that an error can still be a status
- what ends an answer early without being an error of the request (a guardrail, a tool call cut by max_tokens) becomes
  a finish reason, with the text that was safe until then
"""

from __future__ import annotations

import asyncio
import hashlib
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
from pippin.serve.api import turns
from pippin.session.provider import CallsMade, Done, ReasoningDelta, Refused, TextDelta, Turn, TurnEvent
from pippin.session.response import Usage
from pippin.session.transcript import ToolCall

if TYPE_CHECKING:
    from pippin.serve.service import Caller, Service
    from pippin.session.local import LocalModel

T = TypeVar("T")

AT_ONCE: Final = 4  # answers of one request that run at a time; the others of its answers wait, not other requests


@dataclass(frozen=True)
class Cut:
    """An answer that a guardrail ended."""

    reason: Literal["content_filter"]
    usage: Usage = Usage()


Event = TurnEvent | Cut


class Job:
    """One answer.

    Args:
        service: runs it.
        model: "NAME" or "NAME:ADAPTER"; empty for the server's default.
        caller: who asks.
        make: from the loaded model to the turn; called in a worker thread.
        prompt_field: what the request calls the conversation, for errors about it.
        format_field: and the format of the answer.
        priority: -10 to 10; higher ones go before lower ones.
    """

    def __init__(
        self,
        service: Service,
        model: str,
        caller: Caller,
        make: Callable[[LocalModel], Turn],
        *,
        prompt_field: str = "messages",
        format_field: str = "response_format",
        priority: int = 0,
    ) -> None:
        self._service, self._model, self._caller, self._make = service, model, caller, make
        self._prompt_field, self._format_field, self._priority = prompt_field, format_field, priority
        self._local: LocalModel | None = None
        self.turn: Turn | None = None

    @property
    def local(self) -> LocalModel:
        """The model; known once the first event is there."""
        assert self._local is not None
        return self._local

    def _build(self, local: LocalModel) -> Turn:
        self._local = local
        self.turn = self._make(local)
        return self.turn

    async def _used(self, written: int) -> Usage:
        """What an answer cost that ended before it could say so."""
        assert self.turn is not None
        return Usage(await asyncio.to_thread(self.local.token_count, self.turn), 0, written)

    async def events(self) -> AsyncGenerator[Event]:
        """What the service says, with early ends as events.

        Raises:
            InvalidRequest: the model's chat template cannot write this conversation.
            PippinError: whatever the service raises.
        """
        begun, written = False, 0
        made = self._service.run(self._model, self._build, self._caller, priority=self._priority)
        running = cast("AsyncGenerator[TurnEvent]", made)
        try:
            async with aclosing(running):
                async for event in running:
                    if isinstance(event, Done) and event.reason == "cancelled":
                        raise Cancelled("the answer was cancelled by the server")
                    begun = True
                    if isinstance(event, CallsMade):
                        event = CallsMade(tuple(_named(call) for call in event.calls))
                    written += len(event.tokens) if isinstance(event, TextDelta) else 0
                    yield event
        except GuardrailViolation:
            if not begun:
                raise
            yield Cut("content_filter", await self._used(written))
        except Refusal as error:
            yield Refused(error.explanation)
        except (SchemaError, RecursionError) as error:
            if self.turn is None or hasattr(error, "param"):
                raise
            # found only by the engine, which compiles tools and format into one grammar
            param = "tools" if self.turn.tools else self._format_field
            with turns.about(param):
                raise
        except CheckpointError as error:
            if self.turn is None:
                raise
            raise InvalidRequest(str(error), param=self._prompt_field, code="invalid_conversation") from error
        except (ContextOverflow, UnsupportedContent) as error:
            error.param = self._prompt_field  # type: ignore[union-attr]
            raise


def _named(call: ToolCall) -> ToolCall:
    """The call under an id that no other has: the model's own repeat, and a client may hold many conversations."""
    return call.model_copy(update={"id": f"call_{secrets.token_hex(12)}"})


@dataclass
class Answer:
    """What is known of one answer so far."""

    index: int = 0
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    refusal: str | None = None
    finish_reason: str | None = None
    usage: Usage = Usage()

    def add(self, event: Event) -> None:
        """Take in one event."""
        match event:
            case TextDelta():
                self.texts.append(event.text)
                self.tokens.extend(event.tokens)
            case ReasoningDelta():
                self.thoughts.append(event.text)
            case CallsMade():
                self.calls.extend(event.calls)
            case Refused():
                self.refusal = event.explanation
                self.finish_reason = self.finish_reason or "stop"
            case Cut():
                self.finish_reason, self.usage = event.reason, event.usage
            case Done():
                self.usage = event.usage
                # a model that calls and then stops has called; one that was cut off has been cut off
                called = bool(self.calls) and event.reason == "stop"
                self.finish_reason = self.finish_reason or ("tool_calls" if called else event.reason)

    @property
    def text(self) -> str:
        """The answer's text."""
        return "".join(self.texts)

    @property
    def reasoning(self) -> str:
        """What the model thought."""
        return "".join(self.thoughts)


def total(answers: Sequence[Answer]) -> Usage:
    """The usage of several answers to one prompt, which counts once."""
    most = max(answers, key=lambda answer: answer.usage.input_tokens, default=Answer()).usage
    whole = sum((answer.usage for answer in answers), Usage())
    return replace(whole, input_tokens=most.input_tokens, cached_tokens=most.cached_tokens)


async def merged(jobs: Sequence[Job]) -> AsyncGenerator[tuple[int, Event]]:
    """The events of all jobs with the job's number, as they come; the first error ends them all."""
    if len(jobs) == 1:
        async with aclosing(jobs[0].events()) as only:
            async for event in only:
                yield 0, event
        return
    queue: asyncio.Queue[tuple[int, Event] | None] = asyncio.Queue(maxsize=AT_ONCE)
    gate = asyncio.Semaphore(AT_ONCE)

    async def pump(index: int, job: Job) -> None:
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
        while not task.done():  # its last put may wait for room that nobody makes any more
            while not queue.empty():
                queue.get_nowait()
            await asyncio.wait({task}, timeout=0.01)
        _ = task.cancelled() or task.exception()  # seen, whatever it was


class Opened(AsyncIterator[T]):
    """A stream whose first item has come; `aclose` closes it whether or not anybody has read on."""

    def __init__(self, first: T, rest: AsyncGenerator[T]) -> None:
        self._first: list[T] = [first]
        self._rest = rest

    async def __anext__(self) -> T:
        return self._first.pop() if self._first else await anext(self._rest)

    async def aclose(self) -> None:
        """End the stream."""
        await self._rest.aclose()


async def opened(stream: AsyncGenerator[T]) -> Opened[T]:
    """Wait for the first item of a stream.

    Raises:
        PippinError: what the stream raises first.
    """
    try:
        return Opened(await anext(stream), stream)
    except BaseException:
        await stream.aclose()
        raise


async def collect(jobs: Sequence[Job]) -> list[Answer]:
    """All answers, complete."""
    answers = [Answer(index) for index in range(len(jobs))]
    async with aclosing(merged(jobs)) as events:
        async for index, event in events:
            answers[index].add(event)
    return answers


def fingerprint(local: LocalModel) -> str:
    """Names what an answer with a seed depends on: the software, the model, its precision and its device."""
    model = local.model
    parts = (pippin.__version__, model.name, str(model.dtype), model.device.type)
    return "fp_" + hashlib.sha256(" ".join(parts).encode()).hexdigest()[:10]
