"""Proofreading with a noisy-channel model: rules propose corrections, the model's probabilities choose.

Notable here:
- the model never writes: it only scores which of a few texts is more likely, which even a model of 135 million
  parameters does well; so nothing is invented, and text without a proposal does not change
- a change must be more likely by a margin, the larger the more common the original word is: the prior of the noisy
  channel
- protected ranges are read as context and never changed

Source: Kernighan, Church and Gale, "A spelling correction program based on a noisy channel model", COLING 1990;
Bryant and Briscoe, "Language model based grammatical error correction without annotated training data", BEA 2018.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from pippin.kits.text.edits import Edit, edit_distance, make
from pippin.kits.text.english_words import AGREEMENT, CAPITALIZED, CONFUSIONS, CONTRACTIONS, MAY_REPEAT
from pippin.kits.text.lexicon import Lexicon
from pippin.kits.text.spans import TextSpan, is_touched, sentences

Score = Callable[[str, Sequence[str]], Sequence[float]]


@dataclass(frozen=True)
class Margins:
    """Margins in log-probability (natural logarithm) by which the corrected text must be more likely.

    Args:
        unknown: the original word is in no list.
        derived: it is a known word with another ending.
        name: it is capitalized inside a sentence.
        name_small: the word is only known with a capital letter, and is written without.
        confused: both words are known, and often confused.
        agreement: both are forms of one word.
        edit: penalty of a second mistyped letter.
        rule: a rule of punctuation or capitals proposes the change, and is mostly right.
    """

    unknown: float = 0.5
    derived: float = 6.0
    name: float = 9.0
    name_small: float = 2.0
    confused: float = 3.0
    agreement: float = 4.5
    rule: float = 0.0
    edit: float = 2.5


MARGINS = Margins()


@dataclass(frozen=True)
class Proposal:
    """A possible replacement of ``where``; ``margin`` is the required margin, None if the model is not asked.

    ``costs`` are subtracted from the log-probabilities of the options, ``base`` replaces the original in the
    comparison: the same word with the capital letter that it needs in any case.
    """

    where: TextSpan
    options: tuple[str, ...]
    margin: float | None
    costs: tuple[float, ...] = ()
    base: str | None = None


_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*")
_SPACING = re.compile(
    r"(?<=\w)(?P<run>[^\S\n]{2,3})(?=\w)|(?P<before>[^\S\n]+)(?=[,;:!?](?=\s|$)|\.(?=\s|$))"
    r"|(?<=[a-z])(?P<after>[^\S\n]*,)(?=[A-Za-z])"
)
_CONTEXT = 240  # characters that the model reads before a change
_TAIL = 60  # and after it


class Proofreader:
    """Corrects English text by choosing among proposals.

    Args:
        lexicon: the words that exist.
        score: log-probabilities of continuations of a text.
        margins: required margins.
    """

    def __init__(self, lexicon: Lexicon, score: Score, margins: Margins = MARGINS) -> None:
        self.lexicon, self.score, self.margins = lexicon, score, margins

    def edits(
        self,
        text: str,
        protected: Sequence[TextSpan] = (),
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Iterator[Edit]:
        """The corrections of a text, in order; ``on_progress`` is called with the characters read, and their number."""
        changed = _Changed(text)
        for sentence in sentences(text, protected):
            on_progress(sentence.start, len(text))
            proposals = sorted(self.proposals(text, sentence), key=lambda p: (p.where.start, -p.where.end))
            for proposal in proposals:
                where = proposal.where
                if is_touched(protected, where.start, where.end) or changed.passed(where.start, where.end):
                    continue
                best = self._best(changed.before(where.start), text, proposal, sentence)
                if best is not None:
                    yield make(where, where.of(text), best, text[max(0, where.start - 60) : where.start])
                    changed.put(where, best)

    def _best(self, before: str, text: str, proposal: Proposal, sentence: TextSpan) -> str | None:
        """The option that the model prefers by its margin; None to leave the text unchanged."""
        if proposal.margin is None:
            return proposal.options[0]
        where = proposal.where
        stop = min(sentence.end, where.end + _TAIL)
        if stop < sentence.end:
            stop = where.end + len(re.sub(r"\s\S*$", "", text[where.end : stop]))
        tail = text[where.end : stop].rstrip() or text[where.end : where.end + 1].strip()
        context = before[-_CONTEXT:]
        context, gap = context.rstrip(" "), context[len(context.rstrip(" ")) :]
        options = [proposal.base or where.of(text), *proposal.options]
        costs = (0.0, *(proposal.costs or (0.0,) * len(proposal.options)))
        found = self.score(context, [gap + option + tail for option in options])
        scores = [score - cost for score, cost in zip(found, costs, strict=True)]
        best = max(range(1, len(options)), key=lambda index: scores[index])
        return options[best] if scores[best] - scores[0] > proposal.margin else None

    # --- proposals
    # --------------------------------------------------------------------------------------------------------

    def proposals(self, text: str, sentence: TextSpan) -> Iterator[Proposal]:
        """The changes that the rules propose in a sentence, not yet scored."""
        yield from _spacing(text, sentence)
        words = [TextSpan(m.start(), m.end()) for m in _WORD.finditer(text, sentence.start, sentence.end)]
        words = [word for word in words if not _is_part(text, word)]
        for index, where in enumerate(words):
            word = where.of(text)
            if index and _is_doubled(text, words[index - 1], where):
                yield Proposal(TextSpan(words[index - 1].start, where.end), (words[index - 1].of(text),), -2.0)
            first = index == 0 and text[sentence.start : where.start].strip(" \n\t\"'“‘(*_-#>•") == ""
            small = first and word.islower() and "-" not in word and _is_running(text, sentence)
            if not small:
                yield from self._word(where, word, first)
            else:
                for proposal in self._word(where, word.capitalize(), first):
                    yield replace(proposal, base=word.capitalize())
                yield Proposal(where, (word[0].upper() + word[1:],), None)

    def _word(self, where: TextSpan, word: str, first: bool) -> Iterator[Proposal]:
        small, lexicon, margins = word.lower().replace("’", "'"), self.lexicon, self.margins
        if small == "i" and word == "i":
            yield Proposal(where, ("I",), None)
        elif small in CAPITALIZED and word.islower():
            yield Proposal(where, (CAPITALIZED[small],), margins.rule)
        elif small in CONTRACTIONS:
            yield Proposal(where, (_like(word, CONTRACTIONS[small]),), margins.rule)
        elif others := [
            other for group in (*CONFUSIONS, *AGREEMENT) if small in group for other in sorted(group - {small})
        ]:
            agree = any(small in group for group in AGREEMENT)
            margin = max(margins.confused, margins.agreement) if agree else margins.confused
            yield Proposal(where, tuple(dict.fromkeys(_like(word, other) for other in others)), margin)
        elif word.islower() and lexicon.is_name(word):
            yield Proposal(where, (word.capitalize(), *lexicon.nearest(word, max_distance=1)[:8]), margins.name_small)
        elif len(word) > 2 and (word.islower() or word.istitle()):
            yield from self._spelling(where, word, first)

    def _spelling(self, where: TextSpan, word: str, first: bool) -> Iterator[Proposal]:
        familiarity = self.lexicon.familiarity(word)
        if familiarity == "known" or not word.replace("’", "'").isascii():  # no list of English words knows "naïve"
            return
        margin = self.margins.unknown if familiarity == "unknown" else self.margins.derived
        if word.istitle() and not first:
            margin = max(margin, self.margins.name)
        near = self.lexicon.nearest(word, max_distance=1 if len(word) < 5 else 2)[:10]
        costs = [self.margins.edit * (edit_distance(word.lower(), other.lower()) - 1) for other in near]
        halves = list(self.lexicon.splits(word))
        if near or halves:
            options = (*(_like(word, other) for other in near), *halves)
            yield Proposal(where, options, margin, (*costs, *(0.0 for _ in halves)))


class _Changed:
    """A text during correction from left to right."""

    def __init__(self, text: str) -> None:
        self.text, self.done, self.end = text, "", 0

    def passed(self, start: int, end: int) -> bool:
        """Whether that range was changed already."""
        return start < self.end

    def before(self, start: int) -> str:
        """The corrected text up to a position."""
        return self.done + self.text[self.end : start]

    def put(self, where: TextSpan, replacement: str) -> None:
        """Change the text at that range."""
        self.done = (self.before(where.start) + replacement)[-2 * _CONTEXT :]
        self.end = where.end


def _spacing(text: str, sentence: TextSpan) -> Iterator[Proposal]:
    for match in _SPACING.finditer(text, sentence.start, sentence.end):
        where = TextSpan(match.start(), match.end())
        if match["run"]:
            yield Proposal(where, (" ",), None)
        elif match["before"] and match.start() > sentence.start and text[match.start() - 1] != "\n":
            yield Proposal(where, ("",), None)
        elif match["after"]:
            yield Proposal(where, (", ",), None)


def _is_part(text: str, word: TextSpan) -> bool:
    """Whether letters are part of a longer string that is not a word, such as a file name."""
    around = text[max(0, word.start - 1) : word.start] + text[word.end : word.end + 1]
    glued = any(char.isdigit() or char in "_/\\@#=<>|~^" for char in around)
    inside = re.match(r"[.:]\w", text[word.end : word.end + 2]) or re.search(
        r"\w[.:]$", text[max(0, word.start - 2) : word.start]
    )
    return glued or bool(inside)


def _is_doubled(text: str, one: TextSpan, other: TextSpan) -> bool:
    same = one.of(text).lower() == other.of(text).lower() and one.of(text).lower() not in MAY_REPEAT
    return same and text[one.end : other.start].strip(" \n") == "" and len(text[one.end : other.start]) == 1


def _is_running(text: str, sentence: TextSpan) -> bool:
    """Whether this is a sentence rather than a heading, a cell or an item: it ends with a punctuation mark."""
    return bool(re.search(r"[.!?…][\"'”’)\]]*\s*$", sentence.of(text)))


def _like(word: str, other: str) -> str:
    """Another word with the capitalization of this one.

    >>> _like("Teh", "the"), _like("TEH", "the"), _like("teh", "The")
    ('The', 'THE', 'The')
    """
    if len(word) > 1 and word.isupper():
        return other.upper()
    return other[:1].upper() + other[1:] if word[:1].isupper() else other
