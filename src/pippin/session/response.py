"""What a session gives back: a response with its usage and timing, or a stream of snapshots that ends in one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, dataclass_transform, overload

from pippin.core.errors import ConcurrentRequests, InvalidArgument
from pippin.engine.request import FinishReason, Token

T = TypeVar("T")
C = TypeVar("C")
Scalar = TypeVar("Scalar", int, float, bool)


@dataclass(frozen=True)
class Usage:
    """Tokens of a request, all of its rounds together: read, of those not computed again, written, of those thought.

    ``drafted_tokens`` were guessed ahead by speculation, ``accepted_tokens`` of them became part of the answer.
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
    """Seconds: for reading the prompt, for writing the answer, and until its first token."""

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

    ``content`` is a value of the type that was asked for (text, if none was), ``raw_content`` the text that the model
    wrote, ``finish_reason`` "stop" or "length", ``transcript_entries`` what the request added to the transcript, and
    ``tokens`` the answer's tokens, with log-probabilities if they were asked for. ``exact`` is "group" where
    speculation kept the model's distribution of groups of tokens only, and not of every token.
    """

    content: T
    raw_content: str
    usage: Usage
    finish_reason: FinishReason
    transcript_entries: tuple[Any, ...]
    timing: Timing
    tokens: tuple[Token, ...] = ()
    exact: Literal["token", "group"] = "token"


class PartialOf(Generic[T]):
    """What type checkers take an unfinished value for: the fields of ``T``, each of which may be None.

    The value itself is of another class (see `Schema.partial_type`) and has just these fields. Checkers see their types
    as Any; mypy sees them as they are, with ``plugins = ["pippin.mypy_plugin"]``.
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
    """A frozen dataclass, of which checkers know that reading a field may be more than reading it (`Content`)."""
    return dataclass(frozen=True)(cls)


@_frozen
class Snapshot(Generic[T]):
    """An answer so far: a whole value to show, never something to append.

    ``content`` is a partial value (fields not yet begun are None) or the text so far; ``delta`` is the newest text;
    ``is_complete`` says that nothing more will come.
    """

    content: Content
    raw_content: str
    delta: str
    is_complete: bool = False


class _Steps:
    """The generator of an answer, which one thread at a time advances, and which is closed once nobody wants more."""

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
        """The next snapshot; None at the end, when `response` is there."""
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
        """Close the generator and free the session; where a thread is advancing it, that thread does so afterwards."""
        self.unwanted = True
        self.cancel.set()
        if self.advancing.acquire(blocking=False):
            try:
                self.snapshots.close()
            finally:
                self.release()
                self.advancing.release()


class Stream(Generic[T]):
    """An answer on its way: iterate for snapshots, with ``for`` or ``async for``; then `response` is the whole."""

    def __init__(
        self, steps: Generator[Snapshot[Any], None, Response[T]], cancel: threading.Event, release: Callable[[], None]
    ) -> None:
        self._steps = _Steps(steps, cancel, release)

    def __iter__(self) -> Stream[T]:
        return self

    def __next__(self) -> Snapshot[T]:
        snapshot = self._steps.advance()
        if snapshot is None:
            raise StopIteration
        return snapshot

    def __aiter__(self) -> Stream[T]:
        return self

    async def __anext__(self) -> Snapshot[T]:
        steps = self._steps  # the thread holds these alone, so that a stream that nobody holds is given up at once
        try:
            snapshot = await asyncio.to_thread(steps.advance)
        except asyncio.CancelledError:
            steps.give_up()
            raise
        if snapshot is None:
            raise StopAsyncIteration
        return snapshot

    def cancel(self) -> None:
        """End the answer before its next token; from any thread. Iterating then raises `Cancelled`."""
        self._steps.cancel.set()

    def close(self) -> None:
        """Give the answer up and free the session; what the transcript keeps, ``on_error`` says.

        While another thread computes the next snapshot, the session is free once that thread has done so.
        """
        self._steps.give_up()

    def __enter__(self) -> Stream[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
