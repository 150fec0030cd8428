"""Guardrails around the requests of a server.

Notable here:
- a prompt is checked before anything is computed, an answer before it is sent: text is held back just far enough
- tokens are held back with their text, so their log-probabilities reveal nothing ahead of it
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
from pippin.session.providers.provider import (
    Done,
    ProviderEvent,
    ProviderRequest,
    ReasoningDelta,
    TextDelta,
    ToolCallsMade,
)
from pippin.session.transcript import Prompt, TextSegment


def guardrails(level: GuardrailLevel) -> Any:
    """The guardrails of a level, with the rules of all languages; None for "off"."""
    if level == "off":
        return None
    from pippin.session.guardrails import Guardrails

    return getattr(Guardrails, level)(locale="*")


def checked_request(guard: Any, request: ProviderRequest) -> ProviderRequest:
    """The request after a check of every user prompt, since a client sends the whole conversation each time.

    Raises:
        GuardrailViolation: a rule blocks it.
    """
    entries = tuple(_checked(guard, entry) if isinstance(entry, Prompt) else entry for entry in request.transcript)
    return replace(request, transcript=request.transcript.model_copy(update={"entries": entries}))


def _checked(guard: Any, prompt: Prompt) -> Prompt:
    """The prompt, with masked text where a rule requires it."""
    text = guard.enforce(prompt.text, role="input")
    if text == prompt.text:
        return prompt
    others = tuple(one for one in prompt.attachments if not one.is_text)
    return Prompt(segments=(TextSegment(text=text), *others))


def guarded(guard: Any, request: ProviderRequest, events: Iterator[ProviderEvent]) -> Iterator[ProviderEvent]:
    """Pass on the events of an answer, with its text only as far as it was checked.

    Raises:
        GuardrailViolation: (while iterating) a rule blocks the answer, the reasoning or an argument of a call;
            ``safe_prefix`` characters of it were passed on.
    """
    answer, thought = _HeldText(guard), guard.stream()
    try:
        for event in events:
            match event:
                case TextDelta():
                    yield from answer.push(event)
                case ReasoningDelta():
                    if text := thought.push(event.text):
                        yield replace(event, text=text)
                case ToolCallsMade():
                    for call in event.calls:
                        guard.enforce_value(call.arguments, role="output")
                    yield event
                case Done():
                    if text := thought.finish():
                        yield ReasoningDelta(text)
                    if request.schema is not None and event.finish_reason == "stop":
                        answer.check_value()
                    yield from answer.finish()
                    yield event
                case _:
                    yield event
    finally:
        close = getattr(events, "close", None)
        if close is not None:
            close()


class TokenCounter:
    """Counts the tokens of an answer before they are checked; ``tokens`` are those so far."""

    def __init__(self) -> None:
        self.tokens = 0

    def counted(self, events: Iterator[ProviderEvent]) -> Iterator[ProviderEvent]:
        """Yield the events unchanged and count their tokens."""
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


class _HeldText:
    """The text of an answer that its checker holds back, and its tokens."""

    def __init__(self, guard: Any) -> None:
        self._guard, self._checker = guard, guard.stream()
        self._text: list[str] = []
        self._length = 0
        self._tokens: deque[tuple[int, Token]] = deque()  # with the characters that must be released before the token

    def push(self, delta: TextDelta) -> Iterator[TextDelta]:
        """Add text; yield what may be released."""
        self._text.append(delta.text)
        self._length += len(delta.text)
        self._tokens.extend((self._length, token) for token in delta.tokens)
        yield from self._pass_on(self._checker.push(delta.text), self._checker.released)

    def finish(self) -> Iterator[TextDelta]:
        """Release the rest."""
        yield from self._pass_on(self._checker.finish(), self._length)

    def check_value(self) -> None:
        """Check the complete answer as a JSON value, so that an escaped letter hides nothing."""
        with suppress(ValueError):  # not JSON: then the text is everything
            self._guard.enforce_value(json.loads("".join(self._text)), role="output")

    def _pass_on(self, text: str, released: int) -> Iterator[TextDelta]:
        ready = []
        while self._tokens and self._tokens[0][0] <= released:
            ready.append(self._tokens.popleft()[1])
        if text or ready:
            yield TextDelta(text, tuple(ready))
