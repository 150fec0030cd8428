"""Guardrail rules: terms and patterns of a locale, a classifier over windows, and custom functions.

Notable here:
- a term or pattern starts and ends at word boundaries, in every script: "Scunthorpe" and "assess" do not match
- whether a rule matches at a position depends on at most `limit()` characters from there on, so a stream is held back
  exactly that far and no further, and only after one of the rule's first words
- a rule returns a score and never decides: the policy maps scores to actions
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Final, Protocol

from annotated_types import Ge, Le

from pippin.core.checks import PositiveInt, Probability, checked
from pippin.core.errors import InvalidArgument
from pippin.session.guardrails.normalization import is_boundary, normalize

WINDOW: Final = 128  # characters that a classifier reads at once, about 32 tokens
STRIDE: Final = 64  # from one window to the next, about 16 tokens

Found = tuple[int, int, float]  # start, end, score; positions in the given text


@checked
@dataclass(frozen=True, kw_only=True)
class SpanRule(ABC):
    """Base class of term and pattern rules.

    Args:
        id: name of the rule in reports.
        category: of the taxonomy, "violence" or "violence/threats".
        score: confidence of a match, 0 to 1.
        locales: languages of the rule; "*" for all.
        replacement: replaces a matched span if the policy's threshold is reached; None means it is blocked.
        explanation: reason for the match, in a few words.
    """

    id: str
    category: str
    score: Probability = 0.95
    locales: tuple[str, ...] = ("*",)
    replacement: str | None = None
    explanation: str = ""

    def __post_init__(self) -> None:
        _check(self.id, self.category, self.locales)

    @abstractmethod
    def begins(self) -> tuple[str, ...]:
        """The normalized texts that a match may start with."""

    @abstractmethod
    def limit(self) -> int:
        """The longest match, in normalized characters."""

    @abstractmethod
    def end(self, text: str, at: int) -> int | None:
        """The end of the match that starts at ``at``; None without one. Reads ``limit() + 1`` characters."""


@checked
@dataclass(frozen=True, kw_only=True)
class TermRule(SpanRule):
    """Matches any of these words or phrases, as whole words, in any case and any spelling that looks the same.

    >>> rule = TermRule(id="own.project", category="privacy", terms=("Project Ocelot",))
    >>> rule.end("the project ocelot files", 4)
    18
    """

    terms: tuple[str, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if _is_text(self.terms) or not self.terms or not all(normalize(t).text.strip() for t in self.terms):
            raise InvalidArgument(f"rule {self.id!r} needs a list of terms that are not empty, got {self.terms!r}")

    @cached_property
    def _folded(self) -> tuple[str, ...]:
        # the longest first, so that a term that starts like another is matched whole
        return tuple(sorted({" ".join(normalize(t).text.split()) for t in self.terms}, key=lambda t: (-len(t), t)))

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self._folded)))

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._folded))

    def begins(self) -> tuple[str, ...]:
        """The first word of each term."""
        return tuple(dict.fromkeys(term.split()[0] for term in self._folded))

    def limit(self) -> int:
        """The longest term."""
        return self._longest

    def end(self, text: str, at: int) -> int | None:
        """The end of the term that starts at ``at``; None without one."""
        return _match(self._pattern, text, at, self._longest)


@checked
@dataclass(frozen=True, kw_only=True)
class PatternRule(SpanRule):
    r"""Matches a regular expression on normalized text, at word boundaries.

    Args:
        pattern: regular expression in lower case, for normalized text.
        starts: the texts that a match may start with; the pattern is tried nowhere else.
        max_length: maximum length of a match in characters; longer matches do not count.
        valid: a final check of the matched text, such as a checksum.

    >>> rule = PatternRule(id="own.badge", category="privacy", pattern=r"badge \d{4}", starts=("badge",), max_length=10)
    >>> rule.end("my badge 1234", 3), rule.end("my badge 12345", 3)
    (13, None)
    """

    pattern: str
    starts: tuple[str, ...]
    max_length: Annotated[int, Ge(1), Le(512)]
    valid: Callable[[str], bool] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if _is_text(self.starts) or not self.starts or any(s != normalize(s).text or not s for s in self.starts):
            raise InvalidArgument(
                f"rule {self.id!r}: starts must be texts as normalizing leaves them, got {self.starts!r}"
            )
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise InvalidArgument(f"rule {self.id!r}: {self.pattern!r} is no regular expression: {error}") from error

    @cached_property
    def _compiled(self) -> re.Pattern[str]:
        return re.compile(self.pattern)

    def begins(self) -> tuple[str, ...]:
        """``starts``."""
        return self.starts

    def limit(self) -> int:
        """``longest``."""
        return self.max_length

    def end(self, text: str, at: int) -> int | None:
        """The end of the match that starts at ``at``; None without one."""
        end = _match(self._compiled, text, at, self.max_length)
        return None if end is None or (self.valid and not self.valid(text[at:end])) else end


class TextScorer(Protocol):
    """Anything that scores a text: a probability for each category that is not zero."""

    def scores(self, text: str) -> dict[str, float]:
        """Category to score, 0 to 1."""


@checked
@dataclass(frozen=True, kw_only=True)
class ClassifierRule:
    """Scores windows of text, half of each shared with the next.

    Args:
        classifier: the scorer; `pippin.session.guardrails.classifier.load()` is the packaged one.
        window: characters that are read at once; a stream is held back by between ``window - stride`` and ``window`` of
            them.
        stride: distance of two windows.
    """

    classifier: TextScorer
    id: str = "classifier"
    locales: tuple[str, ...] = ("*",)
    window: PositiveInt = WINDOW
    stride: PositiveInt = STRIDE

    def __post_init__(self) -> None:
        _check(self.id, "any", self.locales)
        if self.stride > self.window:
            raise InvalidArgument(
                f"rule {self.id!r}: stride must be at most the window of {self.window} characters, got {self.stride}"
            )

    def scan(self, text: str) -> list[tuple[str, int, int, float]]:
        """Category, start, end and score in one window."""
        return [(category, 0, len(text), score) for category, score in self.classifier.scores(text).items()]


@checked
@dataclass(frozen=True, kw_only=True)
class FunctionRule:
    """A custom function as a rule.

    Args:
        function: takes text, returns a score from 0 to 1, or a list of (start, end, score), or None.
        window: characters that it reads at once, half of them shared with the next call. None: it reads the whole text,
            and a streamed answer is held back to its end.

    >>> rule = FunctionRule(id="own.shouting", category="hate", function=lambda text: float(text.isupper()))
    >>> rule.scan("HEY YOU")
    [('hate', 0, 7, 1.0)]
    """

    id: str
    category: str
    function: Callable[[str], float | Iterable[Found] | None]
    locales: tuple[str, ...] = ("*",)
    window: Annotated[int, Ge(2)] | None = None

    def __post_init__(self) -> None:
        _check(self.id, self.category, self.locales)

    @property
    def stride(self) -> int | None:
        """Characters from one call to the next; None if there is only one."""
        return None if self.window is None else self.window // 2

    def scan(self, text: str) -> list[tuple[str, int, int, float]]:
        """Category, start, end and score in one window.

        Raises:
            InvalidArgument: the function returned a value of another type.
        """
        result = self.function(text)
        found = [(0, len(text), result)] if isinstance(result, int | float) else list(result or ())
        for item in found:
            if len(item) != 3 or not 0 <= item[0] <= item[1] <= len(text) or not 0 <= item[2] <= 1:
                raise InvalidArgument(
                    f"rule {self.id!r} returned {item!r}; it must return a score from 0 to 1, or (start, end, score) "
                    f"within the {len(text)} characters that it was given"
                )
        return [(self.category, start, end, float(score)) for start, end, score in found]


WindowRule = ClassifierRule | FunctionRule
Rule = SpanRule | ClassifierRule | FunctionRule


class SpanIndex:
    """Index of the rules that may start at a position, by the first characters there."""

    def __init__(self, rules: Sequence[SpanRule]) -> None:
        pairs = [(start, rule) for rule in rules for start in rule.begins()]
        self._longest_start = max((len(start) for start, _ in pairs), default=1)
        self._first = {start[0] for start, _ in pairs}
        self._by_two: dict[str, list[tuple[str, SpanRule]]] = {}
        for start, rule in pairs:
            for key in {start[:1], start[:2]}:  # the first alone is looked up at the end of the text
                self._by_two.setdefault(key, []).append((start, rule))
        self._single = {start for start, _ in pairs if len(start) == 1}

    def matches(self, text: str, at: int) -> list[tuple[SpanRule, int]]:
        """The rules that match at a position of a text that is complete from there on, and the end of each match."""
        found: list[tuple[SpanRule, int]] = []
        tried: list[SpanRule] = []
        for start, rule in self._here(text, at):
            if rule not in tried and text.startswith(start, at):
                tried.append(rule)
                end = rule.end(text, at)
                if end is not None:
                    found.append((rule, end))
        return found

    def reach(self, text: str, at: int) -> int:
        """How many characters from ``at`` on must be known before every rule is decided there; 0 if none can start."""
        rest = text[at : at + self._longest_start] if text[at] in self._first else ""
        return max(
            (
                rule.limit() + 1
                for start, rule in self._here(text, at)
                if start.startswith(rest) or rest.startswith(start)
            ),
            default=0,
        )

    def _here(self, text: str, at: int) -> list[tuple[str, SpanRule]]:
        """Rules with a start of the same first characters; none inside a word."""
        if text[at] not in self._first or not is_boundary(text, at):
            return []
        exact = self._by_two.get(text[at : at + 2], [])
        if at + 1 < len(text) and text[at] in self._single:
            exact = exact + [pair for pair in self._by_two[text[at]] if len(pair[0]) == 1]
        return exact


def _match(pattern: re.Pattern[str], text: str, at: int, longest: int) -> int | None:
    """The end of a match of whole words; one more character is read, so that a longer match is recognized."""
    match = pattern.match(text, at, at + longest + 1)
    if match is None or match.end() == at or match.end() - at > longest or not is_boundary(text, match.end()):
        return None
    return match.end()


def _is_text(value: object) -> bool:
    """Whether one text was given instead of a list of texts."""
    return isinstance(value, str)


def _check(id: str, category: str, locales: tuple[str, ...]) -> None:
    if not id or not category:
        raise InvalidArgument(f"a rule needs an id and a category, got {id!r} and {category!r}")
    if _is_text(locales) or not locales:
        raise InvalidArgument(f"rule {id!r}: locales must be a list of languages, or ('*',), got {locales!r}")
