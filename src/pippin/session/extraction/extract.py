"""Extraction: a value of a type, filled in from a text, with the place in the text that each part of it came from.

Notable here:
- the model chooses among the parts of the text and can write nothing else (see `form`); so no value is invented
- a long text is read in parts; of each value the most confident reading is kept, and lists are put together
- a Python validator that does not accept the value is told to the model, which fills in the form again
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pippin.core.errors import InvalidAnswer, InvalidArgument, InvalidInput, TimedOut
from pippin.engine.request import Token
from pippin.session.extraction import merge, prompt, verify
from pippin.session.extraction.form import READINGS, Filled, Form
from pippin.session.extraction.locate import locate
from pippin.session.extraction.source import SourceText
from pippin.session.options import GenerationOptions
from pippin.session.response import Response, Timing, Usage
from pippin.session.transcript import Transcript
from pippin.session.types.schema import Schema

if TYPE_CHECKING:
    from pippin.session.guardrails import Guardrails
    from pippin.session.session import Session

T = TypeVar("T")
OnProgress = Callable[[int, int], None]
_RETRY_TEMPERATURE = 0.7


@dataclass(frozen=True)
class SourceSpan:
    """The part of the text that a value came from.

    Attributes:
        path: names and indices that lead to the value, such as ``("lines", 0, "price")``.
        text: the part, as the text has it.
        start: offset of its first character.
        end: offset after its last.
        value: what was read from it, as a JSON value.
        confidence: the model's probability of this part among all that the form allowed there, in [0, 1]; None of a
            model that does not report it.
        ambiguous: whether the part can be read in another way, such as 03/04/2024.
    """

    path: tuple[str | int, ...]
    text: str
    start: int
    end: int
    value: Any
    confidence: float | None
    ambiguous: bool = False

    @property
    def name(self) -> str:
        """The path as programs write it.

        >>> SourceSpan(("lines", 0, "price"), "3,50", 0, 4, 3.5, 0.9).name
        'lines[0].price'
        """
        parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in self.path]
        return "".join(parts).removeprefix(".")


@dataclass(frozen=True)
class Extraction(Response[T], Generic[T]):
    """A value that was filled in from a text, and ``spans``, where each part of it comes from."""

    spans: tuple[SourceSpan, ...] = ()

    def span(self, name: str) -> SourceSpan | None:
        """The span of a value by its name, such as "lines[0].price"; None where nothing was found."""
        return next((span for span in self.spans if span.name == name), None)


def extract(
    session: Session,
    text: str,
    schema: Schema[Any],
    *,
    question: str,
    options: GenerationOptions,
    language: str | None,
    region: str | None,
    adapter: str | None,
    part_tokens: int,
    on_progress: OnProgress,
) -> Extraction[Any]:
    """`Session.extract` with an adapter that is loaded; ``part_tokens`` is the length of the parts of a long text."""
    if schema.json_schema is None:
        raise InvalidArgument(f"a value is extracted into a type or a JSON Schema, not {schema.target!r}")
    text = SourceText(text).text  # which checks it
    guardrails = None if session.guardrails is None else session.guardrails.for_transforming()
    if guardrails is not None:
        text = guardrails.enforce(text, role="input")
    reader = _Reader(session, schema.json_schema, question, options, adapter, language, region)
    parts = list(_parts(session, text, part_tokens))
    for attempt in range(options.retries + 1):
        try:
            filled = reader.read(parts, attempt, on_progress)
            if guardrails is not None:
                filled = _allowed(filled, guardrails)
            content = _parsed(schema, filled.value)
        except InvalidAnswer as error:
            if attempt == options.retries:
                raise
            reader.objection = error.reason
        else:
            return reader.response(content, filled, schema.notes)
    raise AssertionError


def _allowed(found: _Read, guardrails: Guardrails) -> _Read:
    """What guardrails let pass; a value that they replaced has no place in the text."""
    value = guardrails.enforce_value(found.value, role="output")
    return _Read(value, tuple(span for span in found.spans if _at(value, span.path) == span.value))


def _at(value: Any, path: Sequence[str | int]) -> Any:
    for part in path:
        value = value[part]
    return value


def _parsed(schema: Schema[Any], value: Any) -> Any:
    text = json.dumps(value, ensure_ascii=False)
    try:
        if schema.partial_type is Any:  # not a Python type: times are read already, and need not have an offset
            Schema(_without_formats(schema.json_schema)).parse(text)
            return value
        return schema.parse(text)
    except InvalidInput as error:
        reason = str(error.__cause__ or error).splitlines()
        raise InvalidAnswer(
            f"what was found does not fit the type: {error}", value=value, text=text, reason=" ".join(reason[:3])
        ) from error


def _without_formats(schema: Any) -> Any:
    """A JSON Schema without the formats that readings hold to."""
    if isinstance(schema, list):
        return [_without_formats(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: each if key in ("enum", "const") else _without_formats(each)
        for key, each in schema.items()
        if key != "format" or each not in READINGS
    }


@dataclass(frozen=True)
class _Part:
    """A part of the text and where it begins."""

    text: str
    start: int


@dataclass(frozen=True)
class _Read:
    """What was found: a value, and its spans."""

    value: Any
    spans: tuple[SourceSpan, ...]


class _Reader:
    """Fills in the forms of one request, and counts what it costs."""

    def __init__(
        self,
        session: Session,
        schema: dict[str, Any],
        question: str,
        options: GenerationOptions,
        adapter: str | None,
        language: str | None,
        region: str | None,
    ) -> None:
        self.session, self.schema, self.question = session, schema, question
        self.options, self.adapter, self.language, self.region = options, adapter, language, region
        self.usage, self.timing, self.raw, self.objection = Usage(), Timing(), list[str](), ""
        self.deadline = None if options.timeout is None else time.monotonic() + options.timeout
        self.tokens: tuple[Token, ...] = ()

    def read(self, parts: Sequence[_Part], attempt: int, on_progress: OnProgress) -> _Read:
        """What the parts say."""
        total = sum(len(part.text) for part in parts)
        self.raw = []
        if len(parts) == 1:
            found = self._fill(parts[0], attempt, partial=False)[1]
            on_progress(total, total)
            return found
        readings = []
        for part in parts:
            readings.append(self._fill(part, attempt, partial=True))
            on_progress(part.start + len(part.text), total)
        slot = readings[0][0].slot
        value, spans = merge.merged(slot, [(found.value, found.spans) for _, found in readings])
        missing = merge.missing(self.schema, value)
        if not missing:
            return _Read(merge.ordered(slot, value), tuple(spans))
        # a value must be there and no part seems to have it: the part with most of the others is asked for it
        best = max(range(len(parts)), key=lambda index: len(readings[index][1].spans))
        strict = self._fill(parts[best], attempt, partial=False)[1]
        value, spans = merge.completed(value, list(spans), strict.value, strict.spans, missing)
        return _Read(merge.ordered(slot, value), tuple(spans))

    def _fill(self, part: _Part, attempt: int, *, partial: bool) -> tuple[Form, _Read]:
        """One form for one part."""
        source = SourceText(part.text, language=self.language, region=self.region)
        form = Form(self.schema, source, partial=partial)
        asked = self.question
        if self.objection:
            asked = f"{asked} This was not accepted before: {self.objection}".strip()
        before = prompt.transcript(part.text, asked)
        provider = self.session.provider
        holds = provider.capabilities.grammars
        inner = self.session._outside(Transcript(entries=before.entries[:1]), self.adapter)
        try:
            response: Response[Any] = inner.respond(
                before.entries[1].text,
                generating=Schema(form.grammar if holds else self.schema),
                options=self._options(attempt, holds=holds),
            )
        finally:
            self.usage += inner.usage
        self.timing += response.timing
        self.raw.append(response.raw_content)
        self.tokens += response.tokens
        if holds:
            filled = form.read(response.raw_content)
        else:
            filled, problems = verify.verified(form, json.loads(response.raw_content))
            if problems and not partial:
                raise InvalidAnswer(
                    f"{provider.name} wrote values that are not in the text: {', '.join(problems)}",
                    value=filled.value,
                    text=response.raw_content,
                    reason=f"the text does not have what was written for {', '.join(problems)}",
                )
        tokens = response.tokens if holds and provider.capabilities.logprobs else None
        return form, _Read(filled.value, tuple(_spans(filled, source, tokens, part.start)))

    def _options(self, attempt: int, *, holds: bool) -> GenerationOptions:
        """The options of one request; another attempt samples, so that it does not write the same again."""
        found = replace(
            self.options,
            temperature=_RETRY_TEMPERATURE if attempt else self.options.temperature or 0.0,
            seed=attempt if attempt else self.options.seed,
            timeout=self._seconds_left(),
            tool_calling="disallowed",
        )
        if not holds:
            return found
        found = replace(found, include_schema_in_prompt=False, repetition_penalty=1.0)
        if not self.session.provider.capabilities.logprobs:
            return found
        return replace(found, logprobs=0, logprobs_mode="constrained")

    def _seconds_left(self) -> float | None:
        """What is left of the timeout, which is that of all parts and attempts.

        Raises:
            TimedOut: nothing.
        """
        if self.deadline is None:
            return None
        if (left := self.deadline - time.monotonic()) <= 0:
            raise TimedOut(f"no complete answer within {self.options.timeout:g} seconds; raise timeout or ask for less")
        return left

    def response(self, content: Any, found: _Read, notes: tuple[str, ...]) -> Extraction[Any]:
        """The whole answer."""
        return Extraction(
            content, "\n".join(self.raw), self.usage, "stop", (), self.timing, self.tokens, notes=notes,
            spans=found.spans,
        )  # fmt: skip


def _spans(filled: Filled, source: SourceText, tokens: Sequence[Token] | None, offset: int) -> list[SourceSpan]:
    """The places of the marks in the whole text; ``tokens`` are those of the form, None where they are not known."""
    ends = list(accumulate(len(token.text) for token in tokens or ()))
    found = []
    for mark, (start, end) in zip(filled.marks, locate(filled.marks, source), strict=True):
        confidence = None
        if tokens is not None:
            confidence = math.exp(
                sum(
                    token.logprob or 0.0
                    for token, last in zip(tokens, ends, strict=True)
                    if last > mark.start and last - len(token.text) < mark.end
                )
            )
        text = source.text[start:end]
        found.append(SourceSpan(mark.path, text, start + offset, end + offset, mark.value, confidence, mark.ambiguous))
    return found


def _parts(session: Session, text: str, part_tokens: int) -> list[_Part]:
    """The text in parts of at most so many tokens, cut at blank lines, line ends, or blanks."""
    count = session.provider.token_count
    if len(text) < part_tokens or count(text) <= part_tokens:
        return [_Part(text, 0)]
    per_character = count(text[:20_000]) / len(text[:20_000])
    size = max(200, int(0.9 * part_tokens / per_character))
    parts, start = [], 0
    while start < len(text):
        end = min(start + size, len(text))
        if end < len(text):
            for mark in ("\n\n", "\n", ". ", " "):
                cut = text.rfind(mark, start + size // 2, end)
                if cut > 0:
                    end = cut + len(mark)
                    break
        if text[start:end].strip():
            parts.append(_Part(text[start:end], start))
        start = end
    return parts
