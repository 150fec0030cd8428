"""A model for one task of the server: several calls, all of which end when the task is cancelled, with their tokens
counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from threading import Event
from typing import Any

from pippin.core.errors import Cancelled
from pippin.session.providers.local import LocalModel
from pippin.session.providers.provider import (
    Done,
    Provider,
    ProviderEvent,
    ProviderRequest,
    ReasoningDelta,
    TextDelta,
)
from pippin.session.response import Usage
from pippin.session.transcript import Transcript

RequestChange = Callable[[ProviderRequest], ProviderRequest]


class TaskModel(LocalModel):
    """A local model for one task, on the engine of another.

    Args:
        inner: the model, which continues to serve others.
        change: called with each request before it is sent, and with an empty one before texts are scored; returns the
            request to send.
        on_tokens: called with the number of tokens of each part of an answer.

    ``usage`` counts the tokens of all calls so far, and those of scored texts.
    """

    def __init__(
        self, inner: LocalModel, change: RequestChange, on_tokens: Callable[[int], None] | None = None
    ) -> None:
        engine: Any = _Scoring(inner.engine, self)
        super().__init__(inner.model, engine=engine, speculation=inner.speculation)
        self.usage = Usage()
        self._change, self._on_tokens = change, on_tokens

    def stream(self, request: ProviderRequest) -> Iterator[ProviderEvent]:
        """Answer one request; see `Provider.stream`."""
        return self._counted(super().stream(self._change(request)))

    def score(self, engine: Any, prompt: Sequence[int], continuations: Sequence[Sequence[int]], **more: Any) -> Any:
        """Score texts on an engine as a request of this task: with its owner and its adapter, and not after its end.

        Raises:
            Cancelled: the task was cancelled.
        """
        request = self._change(ProviderRequest(Transcript()))
        if request.cancel.is_set():
            raise Cancelled("the task was cancelled before all of its texts were scored")
        adapter = request.adapter or more.pop("adapter", None)
        found = engine.score(prompt, continuations, adapter=adapter, owner=request.owner, **more)
        self.usage += Usage(input_tokens=len(prompt) + sum(map(len, continuations)))
        return found

    def _counted(self, events: Iterator[ProviderEvent]) -> Iterator[ProviderEvent]:
        for event in events:
            if isinstance(event, Done):
                self.usage += event.usage
            yield _told(event, self._on_tokens)


class _Scoring:
    """An engine that scores as part of a task."""

    def __init__(self, inner: Any, task: TaskModel) -> None:
        self._inner, self._task = inner, task

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def score(self, prompt: Sequence[int], continuations: Sequence[Sequence[int]], **more: Any) -> Any:
        """See `TaskModel.score`."""
        return self._task.score(self._inner, prompt, continuations, **more)


class TaskProvider(Provider):
    """A provider other than a local model, for one task; arguments as for `TaskModel`."""

    def __init__(self, inner: Provider, change: RequestChange, on_tokens: Callable[[int], None] | None = None) -> None:
        self.name, self.capabilities, self.context_size = inner.name, inner.capabilities, inner.context_size
        self._inner, self._change, self._on_tokens = inner, change, on_tokens

    def stream(self, request: ProviderRequest) -> Iterator[ProviderEvent]:
        """Answer one request; see `Provider.stream`."""
        events = self._inner.stream(self._change(request))
        return (_told(event, self._on_tokens) for event in events)

    def token_count(self, item: str | ProviderRequest) -> int:
        """Tokens of a text or of a request; see `Provider.token_count`."""
        return self._inner.token_count(item)


def _told(event: ProviderEvent, on_tokens: Callable[[int], None] | None) -> ProviderEvent:
    """The event, after its tokens are reported; a part without tokens of a provider that knows none counts as one."""
    if on_tokens is not None and isinstance(event, TextDelta | ReasoningDelta):
        count = len(event.tokens) if isinstance(event, TextDelta) else 0
        on_tokens(count or bool(event.text))
    return event


class TaskCancellation:
    """Cancels the requests of a task; as a `RequestChange` it changes nothing."""

    def __init__(self) -> None:
        self._cancel: Event | None = None
        self._cancelled = False

    def __call__(self, request: ProviderRequest) -> ProviderRequest:
        """Register a request; it ends at once if the task was cancelled before."""
        self._cancel = request.cancel
        if self._cancelled:
            request.cancel.set()
        return request

    def cancel(self) -> None:
        """Cancel the running request, and every later one."""
        self._cancelled = True
        if self._cancel is not None:
            self._cancel.set()
