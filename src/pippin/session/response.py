"""Results of a session: a response with usage and timing, or a stream of snapshots that ends with a response."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, dataclass_transform, overload

from pippin.core.errors import ConcurrentRequests, InvalidArgument
from pippin.engine.request import FinishReason, Token

T = TypeVar("T")
C = TypeVar("C")
Scalar = TypeVar("Scalar", int, float, bool)

_SECONDS_TO_END = (
    5.0  # a provider ends a cancelled request before its next token; one that hears nothing may take forever
)


@dataclass(frozen=True)
class Usage:
    """Token counts of a request, over all of its rounds: input, cached input, output, and reasoning.

    ``drafted_tokens`` were drafted by speculation, ``accepted_tokens`` of them became part of the answer.
    """

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(*(one + more for one, more in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class Timing:
    """Seconds for the prompt, for the answer, and until its first token."""

    prompt_seconds: float = 0.0
    answer_seconds: float = 0.0
    first_token_seconds: float = 0.0

    def __add__(self, other: Timing) -> Timing:
        return Timing(
            self.prompt_seconds + other.prompt_seconds,
            self.answer_seconds + other.answer_seconds,
            self.first_token_seconds or other.first_token_seconds,
        )


@dataclass(frozen=True)
class Response(Generic[T]):
    """A complete answer.

    ``content`` is a value of the requested type (text, if there was none), ``raw_content`` the text that the model
    wrote, ``finish_reason`` "stop" or "length", ``transcript_entries`` what the request added to the transcript, and
    ``tokens`` the answer's tokens, with log-probabilities if they were requested. ``exact`` is "group" if speculation
    preserved the model's distribution of groups of tokens only, and not of every token. ``notes`` say what of the
    requested schema was not enforced, and which lists end by default (see `Schema.notes`).
    """

    content: T
    raw_content: str
    usage: Usage
    finish_reason: FinishReason
    transcript_entries: tuple[Any, ...]
    timing: Timing
    tokens: tuple[Token, ...] = ()
    exact: Literal["token", "group"] = "token"
    notes: tuple[str, ...] = ()

    @property
    def reasoning(self) -> str:
        """The model's reasoning before the answer and its calls of tools; empty without any."""
        thoughts = (entry.text for entry in self.transcript_entries if entry.kind == "reasoning")
        return "\n\n".join(text for text in thoughts if text)


class PartialOf(Generic[T]):
    """The type of a partial value for type checkers: the fields of ``T``, each of which may be None.

    The value itself is of another class (see `Schema.partial_type`) with the same fields. Type checkers see their types
    as Any; mypy sees the real ones, with ``plugins = ["pippin.mypy_plugin"]``.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...
        def __getitem__(self, name: str) -> Any: ...


if TYPE_CHECKING:

    class Content:
        """The type of a snapshot's content, which depends on that of the answer."""

        @overload
        def __get__(self, snapshot: Snapshot[str], owner: object) -> str: ...
        @overload
        def __get__(self, snapshot: Snapshot[Scalar], owner: object) -> Scalar | None: ...
        @overload
        def __get__(self, snapshot: Snapshot[list[str]], owner: object) -> list[str] | None: ...
        @overload
        def __get__(self, snapshot: Snapshot[list[Scalar]], owner: object) -> list[Scalar] | None: ...
        @overload
        def __get__(self, snapshot: Snapshot[list[T]], owner: object) -> list[PartialOf[T]] | None: ...
        @overload
        def __get__(self, snapshot: Snapshot[dict[str, T]], owner: object) -> dict[str, Any] | None: ...
        @overload
        def __get__(self, snapshot: Snapshot[T], owner: object) -> PartialOf[T] | None: ...
        def __get__(self, snapshot: Any, owner: object) -> Any: ...
        def __set__(self, snapshot: Any, value: Any) -> None: ...

else:
    Content = Any


@dataclass_transform()
def _frozen(cls: type[C]) -> type[C]:
    """A frozen dataclass whose fields type checkers treat as descriptors (`Content`)."""
    return dataclass(frozen=True)(cls)


@_frozen
class Snapshot(Generic[T]):
    """The whole answer so far; it replaces the previous snapshot.

    ``content`` is a partial value (fields that have not started are None) or the text so far; ``delta`` is the newest
    text; ``is_complete`` marks the last snapshot. ``reasoning_delta`` is the newest text of the reasoning, which comes
    before the answer.
    """

    content: Content
    raw_content: str
    delta: str
    is_complete: bool = False
    reasoning_delta: str = ""


class _Steps:
    """The generator of an answer; one thread at a time advances it, and it is closed when no reader is left."""

    def __init__(
        self,
        snapshots: Generator[Snapshot[Any], None, Response[Any]],
        cancel: threading.Event,
        release: Callable[[], None],
    ) -> None:
        self.snapshots, self.cancel, self.release = snapshots, cancel, release
        self.response: Response[Any] | None = None
        self.unwanted = False
        self.advancing = threading.Lock()

    def advance(self) -> Snapshot[Any] | None:
        """The next snapshot; None at the end, when `response` is available."""
        if not self.advancing.acquire(blocking=False):
            raise ConcurrentRequests("another thread is reading this answer; read it from one")
        try:
            return next(self.snapshots)
        except StopIteration as end:
            self.response = self.response if end.value is None else end.value
            self.release()
            return None
        except BaseException:
            self.release()
            raise
        finally:
            self.advancing.release()
            if self.unwanted:
                self.give_up()

    def give_up(self) -> None:
        """Close the generator and free the session; if a thread is advancing it, that thread does so afterwards."""
        self.unwanted = True
        self.cancel.set()
        if self.advancing.acquire(blocking=False):
            try:
                self.snapshots.close()
            finally:
                self.release()
                self.advancing.release()


async def run_to_end(work: Callable[[], C], give_up: Callable[[], None]) -> C:
    """Run ``work`` in a thread; when the task is cancelled, call ``give_up`` and wait for the thread to end.

    So what the thread held is free when the task learns that it is cancelled.
    """
    loop = asyncio.get_running_loop()
    thread = loop.run_in_executor(None, contextvars.copy_context().run, work)
    try:
        return await asyncio.shield(thread)
    except asyncio.CancelledError:
        give_up()
        thread.add_done_callback(lambda done: done.cancelled() or done.exception())  # retrieved: nobody else looks
        end = loop.time() + _SECONDS_TO_END
        while not thread.done() and loop.time() < end:
            with suppress(asyncio.CancelledError):  # cancelled again while it waits: it is told of the first time
                await asyncio.wait({thread}, timeout=end - loop.time())
        raise


class ResponseStream(Generic[T]):
    """A streamed answer: iterate over snapshots, with ``for`` or ``async for``; then `response` is the complete one.

    ``with`` and ``async with`` end it where the block is left.
    """

    def __init__(
        self, steps: Generator[Snapshot[Any], None, Response[T]], cancel: threading.Event, release: Callable[[], None]
    ) -> None:
        self._steps = _Steps(steps, cancel, release)

    def __iter__(self) -> ResponseStream[T]:
        return self

    def __next__(self) -> Snapshot[T]:
        snapshot = self._steps.advance()
        if snapshot is None:
            raise StopIteration
        return snapshot

    def __aiter__(self) -> ResponseStream[T]:
        return self

    async def __anext__(self) -> Snapshot[T]:
        steps = self._steps  # all that the thread refers to, so that an unreferenced stream ends at once
        snapshot = await run_to_end(steps.advance, steps.give_up)
        if snapshot is None:
            raise StopAsyncIteration
        return snapshot

    def cancel(self) -> None:
        """End the answer before its next token; from any thread. Iterating then raises `Cancelled`."""
        self._steps.cancel.set()

    def close(self) -> None:
        """Cancel the answer and free the session; ``on_error`` determines what the transcript keeps.

        While another thread computes the next snapshot, the session is free once that thread has done so.
        """
        self._steps.give_up()

    def __enter__(self) -> ResponseStream[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> ResponseStream[T]:
        return self

    async def __aexit__(self, *_: object) -> None:
        await run_to_end(self.close, self.cancel)

    def __del__(self) -> None:
        self._steps.give_up()

    @property
    def response(self) -> Response[T]:
        """The complete answer.

        Raises:
            InvalidArgument: the stream has not been read to its end.
        """
        response = self._steps.response
        if response is None:
            raise InvalidArgument("the answer is not complete; iterate the stream to its end first")
        return response
