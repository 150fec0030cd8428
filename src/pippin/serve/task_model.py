"""A model as one task sees it: several turns, all of which end when the task is given up, their tokens counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from threading import Event
from typing import Any

from pippin.core.errors import Cancelled
from pippin.session.local import LocalModel
from pippin.session.provider import Done, Provider, Turn, TurnEvent
from pippin.session.response import Usage
from pippin.session.transcript import Transcript

TurnChange = Callable[[Turn], Turn]


class TaskModel(LocalModel):
    """A local model for one task, on the engine of another.

    Args:
        inner: the model, which goes on serving others.
        change: called with each turn before it is asked, and with an empty one before texts are scored; its result is
            asked instead.

    ``usage`` counts the tokens of all turns so far, and those of scored texts.
    """

    def __init__(self, inner: LocalModel, change: TurnChange) -> None:
        engine: Any = _Scoring(inner.engine, self)
        super().__init__(inner.model, engine=engine, speculation=inner.speculation)
        self.usage = Usage()
        self._change = change

    def stream(self, turn: Turn) -> Iterator[TurnEvent]:
        """Answer one turn; see `Provider.stream`."""
        return self._counted(super().stream(self._change(turn)))

    def score(self, engine: Any, prompt: Sequence[int], continuations: Sequence[Sequence[int]], **more: Any) -> Any:
        """Score texts on an engine as a turn of this task: for its owner, with its adapter, and not after its end.

        Raises:
            Cancelled: the task was given up.
        """
        turn = self._change(Turn(Transcript()))
        if turn.cancel.is_set():
            raise Cancelled("the task was given up before all of its texts were scored")
        found = engine.score(prompt, continuations, adapter=turn.adapter, owner=turn.owner, **more)
        self.usage += Usage(input_tokens=len(prompt) + sum(map(len, continuations)))
        return found

    def _counted(self, events: Iterator[TurnEvent]) -> Iterator[TurnEvent]:
        for event in events:
            if isinstance(event, Done):
                self.usage += event.usage
            yield event


class _Scoring:
    """An engine whose scores go through a task."""

    def __init__(self, inner: Any, task: TaskModel) -> None:
        self._inner, self._task = inner, task

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def score(self, prompt: Sequence[int], continuations: Sequence[Sequence[int]], **more: Any) -> Any:
        """See `TaskModel.score`."""
        return self._task.score(self._inner, prompt, continuations, **more)


class TaskProvider(Provider):
    """The same for a provider of another kind."""

    def __init__(self, inner: Provider, change: TurnChange) -> None:
        self.name, self.capabilities, self.context_size = inner.name, inner.capabilities, inner.context_size
        self._inner, self._change = inner, change

    def stream(self, turn: Turn) -> Iterator[TurnEvent]:
        """Answer one turn; see `Provider.stream`."""
        return self._inner.stream(self._change(turn))

    def token_count(self, item: str | Turn) -> int:
        """Tokens of a text or of a turn; see `Provider.token_count`."""
        return self._inner.token_count(item)


class Leash:
    """Ends the turns of a task from outside; as a `TurnChange` it changes nothing."""

    def __init__(self) -> None:
        self._cancel: Event | None = None
        self._pulled = False

    def __call__(self, turn: Turn) -> Turn:
        """Note a turn; it ends at once if the task was given up before."""
        self._cancel = turn.cancel
        if self._pulled:
            turn.cancel.set()
        return turn

    def pull(self) -> None:
        """End the turn that runs, and every later one."""
        self._pulled = True
        if self._cancel is not None:
            self._cancel.set()
