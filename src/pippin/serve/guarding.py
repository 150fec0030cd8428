"""The guardrails of a session, around the turns of a server.

Notable here:
- a prompt is checked before anything is computed, an answer before it is sent: text is held back just far enough
- tokens are held back with the text that they belong to, so their log-probabilities tell nothing ahead of it
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from pippin.engine.request import Token
from pippin.serve.settings import GuardrailLevel
from pippin.session.provider import CallsMade, Done, ReasoningDelta, TextDelta, Turn, TurnEvent
from pippin.session.transcript import Prompt, Text


def guardrails(level: GuardrailLevel) -> Any:
    """The guardrails of a level, with the rules of all languages; None for "off"."""
    if level == "off":
        return None
    from pippin.session.guardrails import Guardrails

    return getattr(Guardrails, level)(locale="*")


def checked_turn(guard: Any, turn: Turn) -> Turn:
    """The turn after a look at what the user said, in every prompt: a client tells the whole conversation each time.

    Raises:
        GuardrailViolation: a rule blocks it.
    """
    entries = tuple(_checked(guard, entry) if isinstance(entry, Prompt) else entry for entry in turn.transcript)
    return replace(turn, transcript=turn.transcript.model_copy(update={"entries": entries}))


def _checked(guard: Any, prompt: Prompt) -> Prompt:
    """The prompt, with masks over its text where a rule asks for them."""
    text = guard.enforce(prompt.text, role="input")
    if text == prompt.text:
        return prompt
    others = tuple(one for one in prompt.attachments if not one.is_text)
    return Prompt(segments=(Text(text=text), *others))


def guarded(guard: Any, turn: Turn, events: Iterator[TurnEvent]) -> Iterator[TurnEvent]:
    """Pass on the events of a turn, its text only as far as it was checked.

    Raises:
        GuardrailViolation: (while iterating) a rule blocks the answer, a thought or an argument of a call;
            ``safe_prefix`` characters of it were passed on.
    """
    answer, thought = _Held(guard), guard.stream()
    try:
        for event in events:
            match event:
                case TextDelta():
                    yield from answer.push(event)
                case ReasoningDelta():
                    if text := thought.push(event.text):
                        yield replace(event, text=text)
                case CallsMade():
                    for call in event.calls:
                        guard.enforce_value(call.arguments, role="output")
                    yield event
                case Done():
                    if text := thought.finish():
                        yield ReasoningDelta(text)
                    if turn.schema is not None and event.reason == "stop":
                        answer.check_value()
                    yield from answer.finish()
                    yield event
                case _:
                    yield event
    finally:
        close = getattr(events, "close", None)
        if close is not None:
            close()


class Written:
    """Counts the tokens of a turn on their way to be checked; ``tokens`` are those so far."""

    def __init__(self) -> None:
        self.tokens = 0

    def counted(self, events: Iterator[TurnEvent]) -> Iterator[TurnEvent]:
        """The same events."""
        try:
            for event in events:
                if isinstance(event, TextDelta):
                    self.tokens += len(event.tokens)
                elif isinstance(event, ReasoningDelta):
                    self.tokens += 1
                yield event
        finally:
            close = getattr(events, "close", None)
            if close is not None:
                close()


class _Held:
    """The text of an answer, held back as far as its checker wants, and the tokens with it."""

    def __init__(self, guard: Any) -> None:
        self._guard, self._checker = guard, guard.stream()
        self._text: list[str] = []
        self._length = 0
        self._tokens: deque[tuple[int, Token]] = deque()  # with the characters that must be out before one may go

    def push(self, delta: TextDelta) -> Iterator[TextDelta]:
        """Take in more; pass on what may go."""
        self._text.append(delta.text)
        self._length += len(delta.text)
        self._tokens.extend((self._length, token) for token in delta.tokens)
        yield from self._pass_on(self._checker.push(delta.text), self._checker.released)

    def finish(self) -> Iterator[TextDelta]:
        """Pass on the rest."""
        yield from self._pass_on(self._checker.finish(), self._length)

    def check_value(self) -> None:
        """Check the complete answer as the value that it is, so that an escaped letter hides nothing."""
        with suppress(ValueError):  # not JSON: then the text is all there is
            self._guard.enforce_value(json.loads("".join(self._text)), role="output")

    def _pass_on(self, text: str, released: int) -> Iterator[TextDelta]:
        ready = []
        while self._tokens and self._tokens[0][0] <= released:
            ready.append(self._tokens.popleft()[1])
        if text or ready:
            yield TextDelta(text, tuple(ready))
