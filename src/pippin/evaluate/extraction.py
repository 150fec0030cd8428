"""How right extracted values are: field by field, what is missing, and what the text does not say.

Notable here:
- values are compared leaf by leaf, items of lists with those that they are most like in the same order, as ANLS* does
  (arXiv:2402.03848): one item too few costs that item and none of those after it, and an item too many is wrong
- texts are equal if they differ in blanks, case and marks at their ends only; numbers if they are the same number
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pippin.session.extraction import SourceSpan

_GROUPED: Final = re.compile(r"(?<=\d)[.,'’ \u00a0\u202f](?=\d)")
_MARKS: Final = " \t\n\r.,;:!?\"'()[]{}«»„“”‚‘’*_|"


@dataclass(frozen=True)
class ExtractionScore:
    """Counts over one or several extractions; they add up.

    Attributes:
        fields: leaves that have a value.
        right: those that were found.
        nulls: leaves that have none.
        nulls_right: those that were left empty.
        written: leaves that were filled in, but for flags and choices.
        invented: those that are nowhere in the source. Numbers below 13, which texts spell in words, are not checked,
            nor are flags and choices.
        whole: extractions.
        whole_right: those in which everything is right.
    """

    fields: int = 0
    right: int = 0
    nulls: int = 0
    nulls_right: int = 0
    written: int = 0
    invented: int = 0
    whole: int = 0
    whole_right: int = 0

    def __add__(self, other: ExtractionScore) -> ExtractionScore:
        return ExtractionScore(*(a + b for a, b in zip(self._counts, other._counts, strict=True)))

    @property
    def _counts(self) -> tuple[int, ...]:
        return tuple(vars(self).values())

    @property
    def accuracy(self) -> float:
        """Share of the fields with a value that are right; NaN without any."""
        return self.right / self.fields if self.fields else float("nan")

    @property
    def null_accuracy(self) -> float:
        """Share of the fields without a value that were left empty; NaN without any."""
        return self.nulls_right / self.nulls if self.nulls else float("nan")

    @property
    def invented_share(self) -> float:
        """Share of the written values that are not in the source; 0 if nothing was written."""
        return self.invented / self.written if self.written else 0.0


def score(expected: Any, found: Any, source: str, *, choices: Collection[str] = ()) -> ExtractionScore:
    """Compare what was found with what is true.

    Args:
        expected: JSON values, as the schema has them.
        found: the same, of a model; None if it gave no answer.
        source: the text.
        choices: the values of enumerations (`choices_of`), which a text need not have.

    >>> result = score({"to": "Ann Roe", "day": None, "sum": 3.5}, {"to": "ann roe.", "day": "Monday"}, "Dear Ann Roe")
    >>> result.right, result.fields, result.nulls_right, result.invented
    (1, 2, 0, 1)
    """
    wanted, got = dict(_leaves(expected)), dict(_leaves(_aligned(expected, found)))
    values = {path: value for path, value in wanted.items() if value is not None}
    extra = [path for path, value in got.items() if path not in wanted and value is not None and any(map(_index, path))]
    right = sum(_same(value, got.get(path)) for path, value in values.items())
    nulls = [path for path, value in wanted.items() if value is None]
    nulls_right = sum(got.get(path) is None for path in nulls)
    written = [
        value for value in got.values() if value is not None and not isinstance(value, bool) and value not in choices
    ]
    plain, digits = _plain(source), _GROUPED.sub("", source)
    said = [_says(source, plain, each) if isinstance(each, str) else _says_number(digits, each) for each in written]
    whole = right == len(values) and nulls_right == len(nulls) and not extra
    fields = len(values) + len(extra)
    return ExtractionScore(fields, right, len(nulls), nulls_right, len(written), said.count(False), 1, int(whole))


def by_confidence(expected: Any, spans: Iterable[SourceSpan]) -> list[tuple[float, bool]]:
    """The confidence of values and whether they are right; without those in lists, whose places may be others.

    Args:
        expected: JSON values, as the schema has them.
        spans: of an extraction.
    """
    wanted = dict(_leaves(expected))
    return [
        (span.confidence, _same(wanted.get(span.path), span.value))
        for span in spans
        if span.confidence is not None and not any(map(_index, span.path))
    ]


def choices_of(schema: Any) -> frozenset[str]:
    """All texts that enumerations of a JSON Schema name.

    >>> sorted(choices_of({"properties": {"state": {"enum": ["open", "closed", None]}}}))
    ['closed', 'open']
    """
    if isinstance(schema, list):
        return frozenset().union(*map(choices_of, schema))
    if not isinstance(schema, dict):
        return frozenset()
    named = [*schema.get("enum", ()), schema.get("const")]
    own = frozenset(each for each in named if isinstance(each, str))
    return own.union(*(choices_of(each) for key, each in schema.items() if key not in ("enum", "const")))


def _aligned(expected: Any, found: Any) -> Any:
    """What was found, with items of lists at the places of the items that they are most like; others at the end.

    >>> _aligned(["a", "b", "c"], ["b", "x", "c"])
    [None, 'b', 'c', 'x']
    """
    if isinstance(expected, dict) and isinstance(found, dict):
        return {key: _aligned(expected.get(key), value) for key, value in found.items()}
    if not isinstance(expected, list) or not isinstance(found, list):
        return found
    items = [[_aligned(wanted, each) for each in found] for wanted in expected]
    # best[i][j]: right leaves and pairs of the first i expected and j found items, and the pairs
    best: list[list[tuple[int, int, tuple[tuple[int, int], ...]]]]
    best = [[(0, 0, ()) for _ in range(len(found) + 1)] for _ in range(len(expected) + 1)]
    for i, wanted in enumerate(expected):
        values = dict(_leaves(wanted))
        for j in range(len(found)):
            got = dict(_leaves(items[i][j]))
            right = sum(value is not None and _same(value, got.get(path)) for path, value in values.items())
            before, pairs = best[i][j], best[i][j][2]
            best[i + 1][j + 1] = max(
                best[i][j + 1], best[i + 1][j], (before[0] + right, before[1] + 1, (*pairs, (i, j)))
            )
    pairs = best[-1][-1][2]
    placed = dict(pairs)
    left = [each for j, each in enumerate(found) if j not in placed.values()]
    return [items[i][placed[i]] if i in placed else None for i in range(len(expected))] + left


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, dict):
        for name, each in value.items():
            yield from _leaves(each, (*path, name))
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from _leaves(each, (*path, index))
    else:
        yield path, value


def _index(part: Any) -> bool:
    return isinstance(part, int)


def _same(expected: Any, found: Any) -> bool:
    if isinstance(expected, bool) or isinstance(found, bool):
        return expected is found
    if isinstance(expected, int | float) and isinstance(found, int | float):
        return abs(expected - found) <= 1e-9 * max(1.0, abs(expected))
    if isinstance(expected, str) and isinstance(found, str):
        return _plain(expected) == _plain(found)
    return bool(expected == found)


def _plain(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip(_MARKS).casefold()


def _says_number(digits: str, value: Any) -> bool:
    """Whether a text, without the separators in its numbers, has the digits of a number."""
    if abs(value) < 13:
        return True
    spelled = f"{abs(value):.10f}".replace(".", "").rstrip("0")
    return spelled in digits or str(int(abs(value))) in digits


def _says(source: str, plain: str, value: str) -> bool:
    """Whether the source has a text, or an ISO date whose parts it has."""
    if _plain(value) in plain:
        return True
    date = re.fullmatch(r"(\d{4})-(\d\d)-(\d\d)(?:T.*)?", value)
    clock = re.fullmatch(r"(\d\d):(\d\d)(?::\d\d)?", value)
    if date:
        return (date[1] in source or date[1][2:] in source) and str(int(date[3])) in source
    if clock is None:
        return False
    return bool(re.search(rf"(?<!\d)0?(?:{int(clock[1])}|{int(clock[1]) % 12 or 12})(?!\d)", source))
