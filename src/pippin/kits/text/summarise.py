"""Summaries: written by the model and checked against the text, or chosen among its sentences.

Notable here:
- a long text is summarised in parts, cut between sentences, at 70 % of the context each, and the parts together
- every number and name of a summary must occur in the text; if one does not, the summary is written once more, and if
  it still does not, it says so: `Passage.unverified`
- `select` writes nothing: it takes the sentences that tell the model most about the rest of the text, which is their
  mutual information under the model
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pippin.core.errors import AnswerTruncated, InvalidArgument
from pippin.kits.text import presets
from pippin.kits.text.desk import Desk, Preset
from pippin.kits.text.facts import language_of, unverified
from pippin.kits.text.spans import Range, chunks, sentences
from pippin.session.schema import Regex

SHARE = 0.7  # of the context, for one part of a text
TOKENS_PER_SENTENCE = 60
_SELECT_TOKENS = 700  # longer parts would make `select` slow: its cost grows with the square


@dataclass(frozen=True)
class Passage:
    """Text that a model wrote from another text; ``unverified`` lists its numbers and names that do not occur there."""

    text: str
    unverified: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Draft:
    """A summary on its way: part ``part`` of ``parts``, what of it is written; ``done`` is the summary at the end."""

    part: int
    parts: int
    text: str
    done: Passage | None = None


def write(desk: Desk, text: str, count: int, language: str | None) -> Iterator[Draft]:
    """Summarise in ``count`` sentences; the last draft holds the result."""
    most = count * TOKENS_PER_SENTENCE + 20
    request = (
        f"\n\nSummarise this text in {presets.in_sentences(count)}.{presets.in_language(language or language_of(text))}"
    )
    parts = split(desk, presets.SUMMARY, text, most, request)
    if len(parts) == 1:
        yield from _checked(desk, presets.SUMMARY, text, request, count, most, 0, 1)
        return
    summaries: list[str] = []
    for index, part in enumerate(parts):
        draft = Draft(index, len(parts), "")
        for draft in _checked(desk, presets.SUMMARY, part.of(text), request, count, most, index, len(parts) + 1):
            if draft.done is None:
                yield draft
        assert draft.done is not None
        summaries.append(draft.done.text)
    joined = " ".join(summaries)
    last = Draft(len(parts), len(parts) + 1, "")
    if len(joined) < 0.8 * len(text):
        for last in write(desk, joined, count, language):
            if last.done is None:
                yield Draft(len(parts), len(parts) + 1, last.text)
    done = last.done.text if last.done is not None else joined
    yield Draft(len(parts), len(parts) + 1, done, Passage(done, check(desk, done, text)))


def split(desk: Desk, preset: Preset, text: str, most: int, request: str = "") -> list[Range]:
    """The parts of a text that a preset reads one by one: each at most 70 % of the context."""
    size = desk.provider.context_size or 8192
    room = min(int(SHARE * size), desk.room(preset, most, request))
    if room < 16:
        raise InvalidArgument(
            f"the context of {desk.provider.name} holds {size:,} tokens; instructions and an answer of {most:,} leave "
            "no room for a text; ask for a shorter answer or take another model"
        )
    fits: Callable[[str], bool] = lambda part: len(part) < room // 2 or desk.tokens(part) <= room  # noqa: E731
    return [part for part in chunks(text, fits) if part.of(text).strip()]


def check(desk: Desk, written: str, source: str) -> tuple[str, ...]:
    """Names and numbers of what was written that the source does not hold."""
    if not desk.can_score:
        return unverified(written, source)
    lexicon = desk.lexicon
    return unverified(
        written, source, is_word=lambda word: lexicon.familiarity(word) != "unknown" and not lexicon.is_name(word)
    )


def _checked(
    desk: Desk, preset: Preset, text: str, request: str, count: int, most: int, part: int, parts: int
) -> Iterator[Draft]:
    """Write, check, write once more if need be; the last draft is done."""
    best: Passage | None = None
    for again in ({}, {"temperature": 0.7, "top_p": 0.9, "seed": 1, "frequency_penalty": 0.2}):
        written = ""
        with desk.stream(preset, text.strip() + request, most=most, **again) as stream:
            for snapshot in stream:
                written = first_sentences(snapshot.content, count)
                yield Draft(part, parts, written)
                if len(sentences(snapshot.content)) > count:
                    break
        found = check(desk, written, text)
        whole = is_whole(written)
        if best is None or (whole, -len(found)) > (is_whole(best.text), -len(best.unverified)):
            best = Passage(written, found)
        if whole and not found:
            break
    assert best is not None
    yield Draft(part, parts, best.text, best)


def is_whole(text: str) -> bool:
    """Whether a text ends like a sentence."""
    return bool(re.search(r"[.!?…。][\"'”’»)]*$", text))


def first_sentences(text: str, count: int) -> str:
    """The first different sentences of an answer, in one paragraph; an unfinished one only if there is no other.

    >>> first_sentences("One. One. Two. Thr", 3)
    'One. Two.'
    """
    found = list(dict.fromkeys(" ".join(one.of(text).split()) for one in sentences(text.strip())))
    if len(found) > 1 and not is_whole(found[-1]):
        found.pop()
    return " ".join(found[:count])


# --- chosen, not written ----------------------------------------------------------------------------------------------


def select(desk: Desk, text: str, count: int) -> Passage:
    """The ``count`` sentences of a text that tell most about the rest of it, in their order.

    A sentence s is worth Σ (log P(other | s) - log P(other)) / √(tokens of s), over the other sentences.
    """
    parts = chunks(text, lambda part: desk.tokens(part) <= _SELECT_TOKENS)
    share = max(1, math.ceil(2 * count / len(parts))) if len(parts) > 1 else count
    kept = [one for part in parts for one in _best(desk, part.of(text), share)]
    chosen = list(dict.fromkeys(kept))
    if len(parts) > 1 and len(chosen) > count:
        return (
            select(desk, " ".join(chosen), count)
            if len(" ".join(chosen)) < 0.8 * len(text)
            else Passage(" ".join(chosen[:count]))
        )
    return Passage(" ".join(chosen))


def _best(desk: Desk, text: str, count: int) -> list[str]:
    said = [" ".join(one.of(text).split()) for one in sentences(text)]
    whole = [one for one in said if is_whole(one) and len(one.split()) > 3]
    candidates = list(dict.fromkeys(whole if len(whole) >= count else said))
    if len(candidates) <= count:
        return candidates
    values = _values(desk, candidates)
    ranked = sorted(range(len(candidates)), key=lambda index: -values[index])[:count]
    return [candidates[index] for index in sorted(ranked)]


def _values(desk: Desk, said: Sequence[str]) -> list[float]:
    """What each sentence tells about the others, for its length."""
    alone = desk.score_text("\n\n", said)
    found = []
    for index, one in enumerate(said):
        given = desk.score_text(f"{one}\n\n", said)
        gain = sum(given[other] - alone[other] for other in range(len(said)) if other != index)
        found.append(gain / math.sqrt(desk.tokens(one)))
    return found


# --- points and lists -------------------------------------------------------------------------------------------------

_BULLET = re.compile(r"^\s*(?:[-*+•]|\d+[.)])\s+")


def listed(desk: Desk, preset: Preset, text: str, request: str, count: int, *, first: bool = False) -> list[Passage]:
    """The items of a list that the model writes about a text, part by part, each once and checked.

    With ``first``, only the first sentence of each.
    """
    most = count * TOKENS_PER_SENTENCE
    parts = split(desk, preset, text, most, request)
    items: list[str] = []
    for part in parts:
        answer = _bulleted(desk, preset, part.of(text).strip() + request, count, most, min(3, count) if first else 1)
        written = bullets(answer)[:count]
        if first:
            written = [first_sentences(item, 1) for item in written]
        items += [item for item in written if not presets.leaks(preset, item, text)]
    found: dict[str, str] = {}
    for item in items:
        found.setdefault(re.sub(r"\W+", " ", item).strip().casefold(), item)
    return [Passage(item, check(desk, item, text)) for key, item in found.items() if key]


def _bulleted(desk: Desk, preset: Preset, prompt: str, count: int, most: int, least: int) -> str:
    """A list in Markdown, by a grammar where the provider has them; cut off behind the last item that is wanted."""
    form = Regex(rf"- [^\n]+(\n- [^\n]+){{{least - 1},}}") if desk.provider.capabilities.grammars else None
    answer = ""
    try:
        with desk.stream(preset, prompt, generating=form, most=most, include_schema_in_prompt=False) as stream:
            for snapshot in stream:
                answer = str(snapshot.content)
                if len(bullets(answer)) > count:
                    break
    except AnswerTruncated as error:
        answer = error.partial
    return answer


def bullets(answer: str) -> Sequence[str]:
    """The items of a list in Markdown; lines, if there are no bullets.

    >>> bullets("Here:\\n- one\\n- two"), bullets("one\\n\\ntwo")
    (['one', 'two'], ['one', 'two'])
    """
    lines = [line for line in answer.splitlines() if line.strip()]
    marked = [line for line in lines if _BULLET.match(line)]
    return [_BULLET.sub("", line).strip() for line in marked or lines]
