"""Edits of a text: found by comparing words, and explained by rules.

Notable here:
- an edit refers to characters of the original, so a list of edits can be shown, rejected one by one, and applied
- applying all edits of a comparison to the original gives the other text, character by character
- kinds and explanations are derived from the edit; no model is asked why it changed something
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Literal

from pippin.core.errors import InvalidArgument
from pippin.kits.text.english_words import AGREEMENT, CONFUSIONS, FUNCTION_WORDS
from pippin.kits.text.spans import TextSpan, is_touched, pieces

EditKind = Literal[
    "spelling", "grammar", "word choice", "punctuation", "capitalization", "spacing", "repetition", "wording"
]


@dataclass(frozen=True)
class Edit:
    """Replace ``span`` of the original, which reads ``original``, by ``replacement``."""

    span: TextSpan
    original: str
    replacement: str
    kind: EditKind
    explanation: str


@dataclass(frozen=True)
class Revision:
    """A text after its edits; ``text`` is `apply_edits` of ``edits`` to ``original``."""

    original: str
    edits: tuple[Edit, ...]

    @property
    def text(self) -> str:
        """The text with all edits applied."""
        return apply_edits(self.original, self.edits)


def apply_edits(original: str, edits: Iterable[Edit]) -> str:
    """The text after these edits; they may be any selection, in any order.

    Raises:
        InvalidArgument: two edits overlap, or one does not belong to this text.

    >>> edit = Edit(TextSpan(0, 3), "teh", "the", "spelling", "")
    >>> apply_edits("teh end", [edit])
    'the end'
    """
    parts, end = [], 0
    for edit in sorted(edits, key=lambda edit: (edit.span.start, edit.span.end)):
        start = edit.span.start
        if start < end:
            raise InvalidArgument(f"two edits change the same characters, at {start}")
        if edit.span.of(original) != edit.original:
            raise InvalidArgument(
                f"the text reads {edit.span.of(original)!r} at {start}, but the edit replaces {edit.original!r}"
            )
        parts += [original[end:start], edit.replacement]
        end = edit.span.end
    return "".join([*parts, original[end:]])


def compare(original: str, revised: str, *, offset: int = 0, protected: Sequence[TextSpan] = ()) -> list[Edit]:
    """The edits that transform one text into the other, word by word.

    Args:
        original: the original text.
        revised: the revised text.
        offset: offset of ``original`` in the whole text; the ranges of the edits count from its beginning.
        protected: ranges of the whole text; edits that would change them are left out.

    >>> [(edit.original, edit.replacement, edit.kind) for edit in compare("i recieve it", "I receive it")]
    [('i', 'I', 'capitalization'), ('recieve', 'receive', 'spelling')]
    """
    old, new = pieces(original), pieces(revised)
    matcher = SequenceMatcher(None, [r.of(original) for r in old], [r.of(revised) for r in new], autojunk=False)
    edits = []
    for tag, i, j, k, m in matcher.get_opcodes():
        if tag == "equal":
            continue
        pairs = [(i + n, i + n + 1, k + n, k + n + 1) for n in range(j - i)] if j - i == m - k else [(i, j, k, m)]
        for a, b, c, d in pairs:
            start = old[a].start if a < len(old) else len(original)
            end = old[b - 1].end if b > a else start
            before, after = original[start:end], "".join(r.of(revised) for r in new[c:d])
            if before != after and not is_touched(protected, offset + start, offset + end):
                context = original[:start]
                edits.append(make(TextSpan(offset + start, offset + end), before, after, context))
    return edits


def make(where: TextSpan, original: str, replacement: str, before: str = "") -> Edit:
    """An edit with its kind and explanation; ``before`` is the preceding text."""
    kind, explanation = explain(original, replacement, before)
    return Edit(TextSpan(where.start, where.end, "edit"), original, replacement, kind, explanation)


def explain(original: str, replacement: str, before: str = "") -> tuple[EditKind, str]:
    """Kind and explanation of an edit, by rules.

    >>> explain("dont", "don't")
    ('punctuation', "the apostrophe is missing: “don't”")
    >>> explain("the the", "the")[0], explain("is", "are")[0], explain("there", "their")[0]
    ('repetition', 'grammar', 'word choice')
    """
    old, new = original.strip(), replacement.strip()
    if old == new:
        return "spacing", "the space is wrong here" if new else "this space is not needed"
    if re.sub(r"\s+", "", old) == re.sub(r"\s+", "", new):
        return ("spelling", f"written as two words: “{new}”") if old.isalpha() else ("spacing", f"spaced like “{new}”")
    one, other = old.casefold().replace("’", "'"), new.casefold().replace("’", "'")
    if one != other and any(one in group and other in group for group in CONFUSIONS):
        return _words(old, new)
    if _letters(old) == _letters(new):
        return _marks(old, new)
    if _letters(old).casefold() == _letters(new).casefold():
        return "capitalization", _capitals(new)
    if not new:
        return _removed(old, before)
    words = old.casefold().split()
    if len(words) == 2 and words[0] == words[1] == new.casefold():
        return "repetition", f"“{new}” is written twice"
    return _words(old, new)


def _words(old: str, new: str) -> tuple[EditKind, str]:
    one, other = old.casefold().replace("’", "'"), new.casefold().replace("’", "'")
    if {one, other} <= {"a", "an"}:
        return "grammar", f"“{new}” before this sound"
    if any(one in group and other in group for group in AGREEMENT):
        return "grammar", f"“{new}” agrees with the rest of the sentence"
    if any(one in group and other in group for group in CONFUSIONS):
        return "word choice", f"“{old}” and “{new}” are easily confused; here it is “{new}”"
    near = edit_distance(one, other) <= max(2, len(one) // 3)
    if ({one, other} & FUNCTION_WORDS and not (near and one.isalpha() and one not in FUNCTION_WORDS)) or not one:
        return "grammar", f"the sentence needs “{new}” here"
    if near and old.replace("'", "").replace("-", "").isalpha() and " " not in new:
        return "spelling", f"spelled “{new}”"
    return "wording", f"“{new}” instead of “{old}”"


def _marks(old: str, new: str) -> tuple[EditKind, str]:
    """Edits with the same letters and other marks."""
    if ("'" in new or "’" in new) and not ("'" in old or "’" in old):
        return "punctuation", f"the apostrophe is missing: “{new}”"
    if not old:
        return "punctuation", f"“{new}” is missing"
    if not new:
        return "punctuation", f"“{old}” is not needed"
    return "punctuation", f"“{new}” instead of “{old}”"


def _capitals(new: str) -> str:
    if new == "I":
        return "the pronoun “I” is a capital letter"
    return f"with a capital letter: “{new}”" if new[:1].isupper() else f"in small letters: “{new}”"


def _removed(old: str, before: str) -> tuple[EditKind, str]:
    last = re.search(r"(\w+)\W*$", before)
    if last and last[1].casefold() == old.casefold():
        return "repetition", f"“{old}” is written twice"
    return ("grammar" if old.casefold() in FUNCTION_WORDS else "wording"), f"“{old}” is not needed"


def _letters(text: str) -> str:
    return "".join(char for char in text if char.isalnum())


def edit_distance(one: str, other: str, *, max_distance: int | None = None) -> int:
    """Edit distance: insertions, deletions, substitutions and swaps of neighbors (optimal string alignment).

    Args:
        one: a text. other: a text.
        max_distance: stop counting beyond this; the result is then ``max_distance + 1``.

    >>> edit_distance("teh", "the"), edit_distance("abc", ""), edit_distance("kitten", "sitting")
    (1, 3, 3)
    """
    if max_distance is not None and abs(len(one) - len(other)) > max_distance:
        return max_distance + 1
    last: list[int] = []
    row = list(range(len(other) + 1))
    for i, a in enumerate(one):
        before, last, row = last, row, [i + 1]
        for j, b in enumerate(other):
            cost = min(last[j] + (a != b), last[j + 1] + 1, row[j] + 1)
            if i and j and a == other[j - 1] and one[i - 1] == b:
                cost = min(cost, before[j - 1] + 1)
            row.append(cost)
        if max_distance is not None and min(row) > max_distance:
            return max_distance + 1
    return row[-1] if max_distance is None else min(row[-1], max_distance + 1)
