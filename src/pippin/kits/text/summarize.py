"""Summarization: written by the model and checked against the text, or selected from its sentences.

Notable here:
- a long text is summarized in parts, cut between sentences, at 70 % of the context each, and the parts together
- every number and name of a summary must occur in the text; if one does not, the summary is written once more, and what
  still does not is reported in `Passage.unverified`
- `select` writes nothing: it selects the sentences that have the most mutual information with the rest of the text
  under the model
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from pippin.core.errors import AnswerTruncated, InvalidArgument
from pippin.kits.text import prompts
from pippin.kits.text.session_pool import SessionPool
from pippin.kits.text.spans import TextSpan, chunks, sentences
from pippin.kits.text.unsupported_facts import unverified
from pippin.session import text_prompts
from pippin.session.text_prompts import Preset
from pippin.session.types.schema import Regex

SHARE = 0.7  # of the context, for one part of a text
TOKENS_PER_SENTENCE = 60
_SELECT_TOKENS = 700  # longer parts would make `select` slow: its cost grows with the square
_SELECT_PARTS = 2  # of a longer text only the sentences with the most typical words are scored by the model


@dataclass(frozen=True)
class Passage:
    """Text that a model wrote from another text; ``unverified`` lists its numbers and names that are not in the
    source."""

    text: str
    unverified: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class SummaryDraft:
    """An unfinished summary.

    Attributes:
        part: index of the part of the text that is being summarized; of several, the last are the summaries together.
        parts: how many there are.
        text: the summary of the part so far, in whole sentences once there is one.
        tokens: how many tokens the model has written of it.
        done: the final summary; None before.
    """

    part: int
    parts: int
    text: str
    tokens: int = 0
    done: Passage | None = None


def write(pool: SessionPool, text: str, count: int, language: str | None) -> Iterator[SummaryDraft]:
    """Summarize in ``count`` sentences; the last draft holds the result."""
    max_tokens = count * TOKENS_PER_SENTENCE + 20
    request = text_prompts.summary_request(text, count, language)
    parts = split(pool, text_prompts.SUMMARY, text, max_tokens, request)
    if len(parts) == 1:
        yield from _checked(pool, text_prompts.SUMMARY, text, request, count, max_tokens, 0, 1)
        return
    summaries: list[str] = []
    for index, part in enumerate(parts):
        draft = SummaryDraft(index, len(parts), "")
        for draft in _checked(
            pool, text_prompts.SUMMARY, part.of(text), request, count, max_tokens, index, len(parts) + 1
        ):
            if draft.done is None:
                yield draft
        assert draft.done is not None
        summaries.append(draft.done.text)
    joined = " ".join(summaries)
    last = SummaryDraft(len(parts), len(parts) + 1, "")
    if len(joined) < 0.8 * len(text):
        for last in write(pool, joined, count, language):
            if last.done is None:
                yield SummaryDraft(len(parts), len(parts) + 1, last.text, last.tokens)
    done = last.done.text if last.done is not None else joined
    yield SummaryDraft(len(parts), len(parts) + 1, done, last.tokens, Passage(done, check(pool, done, text)))


def split(pool: SessionPool, preset: Preset, text: str, max_tokens: int, request: str = "") -> list[TextSpan]:
    """The parts of a text for a preset: each at most 70 % of the context."""
    size = pool.provider.context_size or 8192
    room = min(int(SHARE * size), pool.max_text_tokens(preset, max_tokens, request))
    if room < 16:
        raise InvalidArgument(
            f"the context of {pool.provider.name} holds {size:,} tokens; instructions and an answer of {max_tokens:,} "
            "leave "
            "no room for a text; ask for a shorter answer or take another model"
        )
    fits: Callable[[str], bool] = lambda part: len(part) < room // 2 or pool.token_count(part) <= room  # noqa: E731
    return [part for part in chunks(text, fits) if part.of(text).strip()]


def check(pool: SessionPool, written: str, source: str) -> tuple[str, ...]:
    """Names and numbers of the output that are not in the source."""
    if not pool.can_score:
        return unverified(written, source)
    lexicon = pool.lexicon
    return unverified(
        written, source, is_word=lambda word: lexicon.familiarity(word) != "unknown" and not lexicon.is_name(word)
    )


def _checked(
    pool: SessionPool, preset: Preset, text: str, request: str, count: int, max_tokens: int, part: int, parts: int
) -> Iterator[SummaryDraft]:
    """Write, check, write once more if necessary; the last draft is done."""
    best: Passage | None = None
    for again in ({}, {"temperature": 0.7, "top_p": 0.9, "seed": 1, "frequency_penalty": 0.2}):
        written, tokens = "", 0
        with pool.stream(preset, text.strip() + request, max_tokens=max_tokens, **again) as stream:
            for snapshot in stream:
                written = first_sentences(snapshot.content, count)
                tokens = pool.token_count(snapshot.content)
                yield SummaryDraft(part, parts, written, tokens)
                if len(sentences(snapshot.content)) > count:
                    break
        found = check(pool, written, text)
        whole = is_whole(written)
        if best is None or (whole, -len(found)) > (is_whole(best.text), -len(best.unverified)):
            best = Passage(written, found)
        if whole and not found:
            break
    assert best is not None
    yield SummaryDraft(part, parts, best.text, tokens, best)


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


# --- extractive summaries ---------------------------------------------------------------------------------------------


OnProgress = Callable[[int, int], None]
"""Called with how much is done, and how much there is."""


def ignore(done: int, total: int) -> None:
    """The `OnProgress` of who does not want to know."""


def select(pool: SessionPool, text: str, count: int, on_progress: OnProgress = ignore) -> Passage:
    """The ``count`` sentences of a text with the most information about the rest of it, in their order.

    The score of a sentence s is Σ (log P(other | s) - log P(other)) / √(tokens of s), over the other sentences. The
    sentences of a text of more than two parts are ranked by their words first, and only the best are scored, so that
    the time is bounded whatever the length. Progress is counted in sentences.
    """
    text = _typical(text, pool.token_count, _SELECT_PARTS * _SELECT_TOKENS)
    parts = chunks(text, lambda part: pool.token_count(part) <= _SELECT_TOKENS)
    share = max(1, math.ceil(2 * count / len(parts))) if len(parts) > 1 else count
    listed = [_candidates(part.of(text), share) for part in parts]
    total = sum(map(len, listed)) + (share * len(parts) if len(parts) > 1 else 0)  # the best of all come once more
    selected: list[str] = []
    done = 0
    for said in listed:
        selected += _best(pool, said, share, partial(_shifted, on_progress, done, total))
        done += len(said)
    chosen = list(dict.fromkeys(selected))
    if len(parts) == 1 or len(chosen) <= count:
        return Passage(" ".join(chosen))
    if len(" ".join(chosen)) >= 0.8 * len(text):
        return Passage(" ".join(chosen[:count]))
    return select(pool, " ".join(chosen), count, partial(_shifted, on_progress, done, total))


def _shifted(on_progress: OnProgress, before: int, total: int, done: int, part: int) -> None:
    on_progress(min(before + done, total), total)


def _typical(text: str, token_count: Callable[[str], int], budget: int) -> str:
    """The sentences with the most typical words, in their order, up to so many tokens; a shorter text as it is.

    A sentence's words are weighted by tf-idf; its score is the cosine with the sum over all sentences. Sentences of
    fewer than four words, or without an end, are left out.
    """
    if len(text) <= budget or token_count(text) <= budget:
        return text
    said = [" ".join(one.of(text).split()) for one in sentences(text)]
    said = list(dict.fromkeys(one for one in said if is_whole(one) and len(one.split()) > 3)) or said
    words = [Counter(re.findall(r"\w+", one.casefold())) for one in said]
    seen_in = Counter(word for each in words for word in each)
    weights = [{word: n * math.log(len(said) / seen_in[word]) for word, n in each.items()} for each in words]
    center: Counter[str] = Counter()
    for each in weights:
        center.update(each)
    scores = []
    for each in weights:
        length = math.sqrt(sum(weight * weight for weight in each.values()))
        scores.append(sum(weight * center[word] for word, weight in each.items()) / length if length else 0.0)
    kept, used = [], 0
    for index in sorted(range(len(said)), key=lambda index: -scores[index]):
        used += token_count(said[index])
        if used > budget:
            break
        kept.append(index)
    return " ".join(said[index] for index in sorted(kept))


def _candidates(text: str, count: int) -> list[str]:
    """The different sentences of a text, of which ``count`` can be chosen."""
    said = [" ".join(one.of(text).split()) for one in sentences(text)]
    whole = [one for one in said if is_whole(one) and len(one.split()) > 3]
    return list(dict.fromkeys(whole if len(whole) >= count else said))


def _best(pool: SessionPool, candidates: list[str], count: int, on_progress: OnProgress) -> list[str]:
    if len(candidates) <= count:
        return candidates
    values = _values(pool, candidates, on_progress)
    ranked = sorted(range(len(candidates)), key=lambda index: -values[index])[:count]
    return [candidates[index] for index in sorted(ranked)]


def _values(pool: SessionPool, said: Sequence[str], on_progress: OnProgress) -> list[float]:
    """The score of each sentence, normalized by its length."""
    alone = pool.score_text("\n\n", said)
    found = []
    for index, one in enumerate(said):
        others = [other for other in range(len(said)) if other != index]
        given = pool.score_text(f"{one}\n\n", [said[other] for other in others])
        gain = sum(score - alone[other] for other, score in zip(others, given, strict=True))
        found.append(gain / math.sqrt(pool.token_count(one)))
        on_progress(index + 1, len(said))
    return found


# --- points and lists -------------------------------------------------------------------------------------------------

_BULLET = re.compile(r"^\s*(?:[-*+•]|\d+[.)])\s+")


def listed(
    pool: SessionPool, preset: Preset, text: str, request: str, count: int, *, first: bool = False
) -> list[Passage]:
    """The items of a list that the model writes about a text, part by part, each once and checked.

    With ``first``, only the first sentence of each.
    """
    max_tokens = count * TOKENS_PER_SENTENCE
    parts = split(pool, preset, text, max_tokens, request)
    items: list[str] = []
    for part in parts:
        prompt = part.of(text).strip() + request
        answer = _bulleted(pool, preset, prompt, count, max_tokens, min(3, count) if first else 1)
        written = bullets(answer)[:count]
        if first:
            written = [first_sentences(item, 1) for item in written]
        items += [item for item in written if not prompts.leaks(preset, item, text)]
    found: dict[str, str] = {}
    for item in items:
        found.setdefault(re.sub(r"\W+", " ", item).strip().casefold(), item)
    return [Passage(item, check(pool, item, text)) for key, item in found.items() if key]


def _bulleted(pool: SessionPool, preset: Preset, prompt: str, count: int, max_tokens: int, least: int) -> str:
    """A Markdown list, with a grammar if the provider supports grammars; cut after the last requested item."""
    form = Regex(rf"- [^\n]+(\n- [^\n]+){{{least - 1},}}") if pool.provider.capabilities.grammars else None
    answer = ""
    try:
        with pool.stream(
            preset, prompt, generating=form, max_tokens=max_tokens, include_schema_in_prompt=False
        ) as stream:
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
