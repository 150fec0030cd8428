"""Text spans: sentences, words, and protected ranges.

Notable here:
- every range counts characters (code points) of the given text; nothing is normalized
- sentences, and the pieces of a diff, are partitions: joined, they are the text again
- code, quotes, links and e-mail addresses are found by rules, so that no model has to preserve them
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pippin.core.checks import checked
from pippin.core.errors import InvalidInput

Protection = Literal["code", "quotes", "links", "emails", "placeholders", "numbers"]

DEFAULT_PROTECTION: tuple[Protection, ...] = ("code", "quotes", "links", "emails")


@dataclass(frozen=True, order=True)
class TextSpan:
    """Characters ``start`` to ``end`` (exclusive) of a text; ``kind`` is the type of the content.

    >>> TextSpan(1, 3, "word").of("abcd")
    'bc'
    """

    start: int
    end: int
    kind: str = ""

    def of(self, text: str) -> str:
        """The characters of the span."""
        return text[self.start : self.end]

    def touches(self, start: int, end: int) -> bool:
        """Whether replacing characters ``start`` to ``end`` would change something in this range.

        An insertion at its very beginning or end would not.
        """
        if start == end:
            return self.start < start < self.end
        return self.start < end and start < self.end


def check_text(text: Any, what: str = "the text") -> str:
    """The text itself, if it is valid.

    Raises:
        InvalidInput: it is not a str, is empty or blank, or holds half a character (a lone surrogate).
    """
    if not isinstance(text, str):
        raise InvalidInput(f"{what} must be a str, got {type(text).__name__}")
    if not text.strip():
        raise InvalidInput(f"{what} is empty")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(f"{what} holds half a character (a lone surrogate) at {error.start}") from None
    return text


# --- protected ranges -------------------------------------------------------------------------------------------------

_URL = r"(?:https?://|ftp://|www\.)[^\s<>\"'`]*[^\s<>\"'`.,;:!?)\]}]"
_EMAIL = r"[\w.+%-]+@[\w-]+(?:\.[\w-]+)+"
_PATTERNS: dict[str, re.Pattern[str]] = {
    "code": re.compile(
        r"^[ ]{0,3}(?P<fence>```+|~~~+)[^\n]*\n(?:.*?\n)??[ ]{0,3}(?P=fence)[^\S\n]*$"  # a fenced block
        r"|^[ ]{0,3}(?:```+|~~~+)[^\n]*\n.*\Z"  # one that is never closed goes on to the end
        r"|(?<!`)(?P<tick>`+)(?!`)[^\n]*?(?<!`)(?P=tick)(?!`)",
        re.MULTILINE | re.DOTALL,
    ),
    "quotes": re.compile(
        r"^[ ]{0,3}>[^\n]*$"  # a quoted paragraph, as in an e-mail or Markdown
        r"|(?<!\w)\"(?=\S)[^\"\n]*\""
        r"|“[^“”\n]*”|„[^„“”\n]*[“”]|«[^«»\n]*»|‹[^‹›\n]*›|‘[^‘’\n]*’(?!\w)|「[^「」\n]*」",
        re.MULTILINE,
    ),
    "links": re.compile(rf"!?\[[^\[\]\n]*\]\([^()\s]*\)|<{_URL}>|{_URL}", re.IGNORECASE),
    "emails": re.compile(_EMAIL),
    "placeholders": re.compile(
        r"\{\{[^{}\n]*\}\}|\$?\{[\w.:!]*\}|%\(\w+\)[sdfrx]|%[sdfrx]\b|</?[A-Za-z][^<>\n]*>|\[\[[^\[\]\n]*\]\]"
    ),
    "numbers": re.compile(r"[€$£¥]?\d(?:[\d.,:/'’-]*\d)?(?:\s?%|[€$£¥])?"),
}


@checked
def protected_spans(text: str, kinds: Iterable[Protection] = DEFAULT_PROTECTION) -> list[TextSpan]:
    """The protected ranges of a text, in order and without overlap.

    Args:
        text: any text.
        kinds: "code" (fenced blocks and `inline`), "quotes" (marks of several languages, and lines that begin with
            ``>``), "links" (addresses and Markdown links), "emails", "placeholders" (``{name}``, ``%s``, tags) and
            "numbers" (with their signs of currency and percent).

    >>> [r.of("Mail me@x.org or run `ls -l`.") for r in protected_spans("Mail me@x.org or run `ls -l`.")]
    ['me@x.org', '`ls -l`']
    """
    found: list[TextSpan] = []
    for kind in kinds:
        found += [TextSpan(m.start(), m.end(), kind) for m in _PATTERNS[kind].finditer(text) if m.end() > m.start()]
    merged: list[TextSpan] = []
    for one in sorted(found):
        if merged and one.start < merged[-1].end:
            if one.end > merged[-1].end:
                merged[-1] = TextSpan(merged[-1].start, one.end, merged[-1].kind)
        else:
            merged.append(one)
    return merged


def is_touched(ranges: Sequence[TextSpan], start: int, end: int) -> bool:
    """Whether replacing characters ``start`` to ``end`` would change something in these ordered, disjoint ranges."""
    at = bisect_right(ranges, start, key=lambda one: one.end)
    return any(one.touches(start, end) for one in ranges[at : at + 1]) or (
        at > 0 and ranges[at - 1].touches(start, end)
    )


# --- sentences and pieces ---------------------------------------------------------------------------------------------

_ABBREVIATIONS = frozenset(
    [
        "mr",
        "mrs",
        "ms",
        "dr",
        "prof",
        "sr",
        "jr",
        "st",
        "vs",
        "etc",
        "eg",
        "ie",
        "cf",
        "fig",
        "no",
        "vol",
        "pp",
        "ca",
        "approx",
        "dept",
        "est",
        "inc",
        "ltd",
        "co",
        "corp",
        "gen",
        "rev",
        "hon",
        "jan",
        "feb",
        "mar",
        "apr",
        "jun",
        "jul",
        "aug",
        "sep",
        "sept",
        "oct",
        "nov",
        "dec",
        "mon",
        "tue",
        "wed",
        "thu",
        "fri",
        "sat",
        "sun",
        "bzw",
        "z.b",
        "d.h",
        "usw",
        "nr",
        "str",
        "abs",
    ]
)
_END = re.compile(
    r"(?:[.!?…]+[\"'”’»)\]]*|[。！？]+[」』）]*)(?=\s|$)\s*|\n[^\S\n]*(?:\n\s*)+|\n(?=[^\S\n]*(?:[-*+•]|\d+[.)])\s)|(?<=[。！？])"
)


def sentences(text: str, protected: Sequence[TextSpan] = ()) -> list[TextSpan]:
    """The sentences of a text, each with the space after it; together they are the whole text.

    An empty line ends a sentence, and so does the next item of a list. Abbreviations, initials and decimal points do
    not, nor does anything inside ``protected`` ranges.

    >>> text = "Dr. Ray paid 3.50 for it. Why? Nobody knows."
    >>> [r.of(text) for r in sentences(text)]
    ['Dr. Ray paid 3.50 for it. ', 'Why? ', 'Nobody knows.']
    """
    begin, found = 0, []
    for match in _END.finditer(text):
        if match.end() <= begin or is_touched(protected, match.start(), match.start() + 1):
            continue
        if text[match.start()] == "." and not _ends_sentence(text, match.start(), match.end()):
            continue
        found.append(TextSpan(begin, match.end(), "sentence"))
        begin = match.end()
    if begin < len(text):
        found.append(TextSpan(begin, len(text), "sentence"))
    return found


def _ends_sentence(text: str, dot: int, after: int) -> bool:
    """Whether a full stop ends a sentence, rather than an abbreviation or an initial."""
    if "\n\n" in text[dot:after] or after >= len(text):
        return True
    before = re.search(r"[\w.]*$", text[max(0, dot - 20) : dot])
    word = before[0] if before else ""
    if word.lower().strip(".") in _ABBREVIATIONS or re.fullmatch(r"[A-Z]|(?:\w\.)+\w", word):
        return False
    return not text[after].islower() or text[dot : dot + 1] != "."


_PIECE = re.compile(r"[^\W_]+(?:['’][^\W_]+)*|[^\S\n]+|\n+|[^\w\s]|_", re.UNICODE)


def pieces(text: str) -> list[TextSpan]:
    """Words, runs of space and single marks; together they are the whole text.

    >>> [r.of("Don't, now") for r in pieces("Don't, now")]
    ["Don't", ',', ' ', 'now']
    """
    return [TextSpan(m.start(), m.end(), "word" if m[0][0].isalnum() else "mark") for m in _PIECE.finditer(text)]


def chunks(text: str, fits: Callable[[str], bool], protected: Sequence[TextSpan] = ()) -> list[TextSpan]:
    """The text in as few pieces as possible that each fit, cut between sentences.

    A sentence that does not fit by itself is cut between words, and a word between characters.

    Args:
        text: any text.
        fits: whether a text is short enough; if a text fits, so do its parts.
        protected: ranges that a sentence does not end in.

    >>> text = "One two. Three. Four five six seven."
    >>> [r.of(text) for r in chunks(text, lambda part: len(part) <= 18)]
    ['One two. Three. ', 'Four five six ', 'seven.']
    """
    found: list[TextSpan] = []
    begin = end = 0
    for unit in _units(text, fits, protected):
        if end > begin and not fits(text[begin : unit.end]):
            found.append(TextSpan(begin, end, "chunk"))
            begin = end
        end = unit.end
    if end > begin:
        found.append(TextSpan(begin, end, "chunk"))
    return found


def _units(text: str, fits: Callable[[str], bool], protected: Sequence[TextSpan]) -> Iterator[TextSpan]:
    """Sentences, and parts of those that do not fit."""
    for sentence in sentences(text, protected):
        if fits(sentence.of(text)):
            yield sentence
            continue
        for word in re.finditer(r"\s*\S+\s*|\s+", sentence.of(text)):
            start, stop = sentence.start + word.start(), sentence.start + word.end()
            while start < stop:
                size = stop - start
                while size > 1 and not fits(text[start : start + size]):
                    size //= 2
                yield TextSpan(start, start + size)
                start += size
