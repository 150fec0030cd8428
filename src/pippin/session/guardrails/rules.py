"""The kinds of rules: terms and patterns of a locale, a classifier over windows, and a user's own function.

Notable here:
- a term or pattern begins and ends at word boundaries, in every script: "Scunthorpe" and "assess" are just words
- whether a rule fires at a place depends on at most `limit()` characters from there on, so a stream of text needs to
  be held back exactly that far and no further, and only behind one of the rule's first words
- a rule gives a score and never decides: what becomes of a score is the policy's matter
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, Protocol

from pippin.core.errors import InvalidArgument
from pippin.session.guardrails.normalise import is_boundary, normalise

WINDOW: Final = 128  # characters that a classifier reads at once, about 32 tokens
STRIDE: Final = 64  # from one window to the next, about 16 tokens

Found = tuple[int, int, float]  # start, end, score; places in the text that was given


@dataclass(frozen=True, kw_only=True)
class SpanRule(ABC):
    """What term and pattern rules have in common.

    Args:
        id: its name in every report.
        category: of the taxonomy, "violence" or "violence/threats".
        score: how sure it is where it matches, 0 to 1.
        locales: languages it is for; "*" for all.
        replacement: what a matched span becomes where the policy's threshold is reached; None means it is blocked.
        explanation: why it fires, in a few words.
    """

    id: str
    category: str
    score: float = 0.95
    locales: tuple[str, ...] = ("*",)
    replacement: str | None = None
    explanation: str = ""

    def __post_init__(self) -> None:
        _check(self.id, self.category, self.locales)
        if not 0 <= self.score <= 1:
            raise InvalidArgument(f"rule {self.id!r}: score must be between 0 and 1, got {self.score}")

    @abstractmethod
    def begins(self) -> tuple[str, ...]:
        """The texts that a match may begin with, normalised."""

    @abstractmethod
    def limit(self) -> int:
        """The longest match, in normalised characters."""

    @abstractmethod
    def end(self, text: str, at: int) -> int | None:
        """Where the match that begins at ``at`` ends; None without one. Reads ``limit() + 1`` characters."""


@dataclass(frozen=True, kw_only=True)
class TermRule(SpanRule):
    """Fires on any of these words or phrases, as whole words, in any case and spelling that looks the same.

    >>> rule = TermRule(id="own.project", category="privacy", terms=("Project Ocelot",))
    >>> rule.end("the project ocelot files", 4)
    18
    """

    terms: tuple[str, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if _is_text(self.terms) or not self.terms or not all(normalise(t).text.strip() for t in self.terms):
            raise InvalidArgument(f"rule {self.id!r} needs a list of terms that are not empty, got {self.terms!r}")

    @cached_property
    def _folded(self) -> tuple[str, ...]:
        # the longest first, so that a term that begins like another is found whole
        return tuple(sorted({" ".join(normalise(t).text.split()) for t in self.terms}, key=lambda t: (-len(t), t)))

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
        """Where the term that begins at ``at`` ends; None without one."""
        return _match(self._pattern, text, at, self._longest)


@dataclass(frozen=True, kw_only=True)
class PatternRule(SpanRule):
    r"""Fires where a regular expression matches normalised text, from a word's begin to a word's end.

    Args:
        pattern: in lower case, as it reads normalised text.
        starts: the texts that a match may begin with; the pattern is tried nowhere else.
        longest: no match is longer than this, in characters; one that would be does not count.
        valid: a last check of the matched text, such as a checksum.

    >>> rule = PatternRule(id="own.badge", category="privacy", pattern=r"badge \d{4}", starts=("badge",), longest=10)
    >>> rule.end("my badge 1234", 3), rule.end("my badge 12345", 3)
    (13, None)
    """

    pattern: str
    starts: tuple[str, ...]
    longest: int
    valid: Callable[[str], bool] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if _is_text(self.starts) or not self.starts or any(s != normalise(s).text or not s for s in self.starts):
            raise InvalidArgument(
                f"rule {self.id!r}: starts must be texts as normalising leaves them, got {self.starts!r}"
            )
        if not 1 <= self.longest <= 512:
            raise InvalidArgument(f"rule {self.id!r}: longest must be 1 to 512 characters, got {self.longest}")
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
        return self.longest

    def end(self, text: str, at: int) -> int | None:
        """Where the match that begins at ``at`` ends; None without one."""
        end = _match(self._compiled, text, at, self.longest)
        return None if end is None or (self.valid and not self.valid(text[at:end])) else end


class Classifier(Protocol):
    """Anything that scores a text: a probability for each category that is not zero."""

    def scores(self, text: str) -> dict[str, float]:
        """Category to score, 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class ClassifierRule:
    """Scores windows of text, half of each shared with the next.

    Args:
        classifier: what scores; `pippin.session.guardrails.classifier.load()` is the packaged one.
        window: characters that are read at once; a stream is held back by between ``window - stride``
            and ``window`` of them.
        stride: from one window to the next.
    """

    classifier: Classifier
    id: str = "classifier"
    locales: tuple[str, ...] = ("*",)
    window: int = WINDOW
    stride: int = STRIDE

    def __post_init__(self) -> None:
        _check(self.id, "any", self.locales)
        if not 1 <= self.stride <= self.window:
            raise InvalidArgument(
                f"rule {self.id!r}: stride must be 1 to the window of {self.window} characters, got {self.stride}"
            )

    def scan(self, text: str) -> list[tuple[str, int, int, float]]:
        """Category, start, end and score in one window."""
        return [(category, 0, len(text), score) for category, score in self.classifier.scores(text).items()]


@dataclass(frozen=True, kw_only=True)
class FunctionRule:
    """A function of your own.

    Args:
        function: takes text, returns a score from 0 to 1, or a list of (start, end, score), or None.
        window: characters that it sees at once, half of them shared with the next call. None: it sees the whole
            text, and a streamed answer is held back to its end.

    >>> rule = FunctionRule(id="own.shouting", category="hate", function=lambda text: float(text.isupper()))
    >>> rule.scan("HEY YOU")
    [('hate', 0, 7, 1.0)]
    """

    id: str
    category: str
    function: Callable[[str], float | Iterable[Found] | None]
    locales: tuple[str, ...] = ("*",)
    window: int | None = None

    def __post_init__(self) -> None:
        _check(self.id, self.category, self.locales)
        if self.window is not None and self.window < 2:
            raise InvalidArgument(f"rule {self.id!r}: window must be at least 2 characters or None, got {self.window}")

    @property
    def stride(self) -> int | None:
        """Characters from one call to the next; None if there is only one."""
        return None if self.window is None else self.window // 2

    def scan(self, text: str) -> list[tuple[str, int, int, float]]:
        """Category, start, end and score in one window.

        Raises:
            InvalidArgument: the function returned something else than it may.
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
    """Finds which rules may begin at a place, by the first characters there."""

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
        """The rules that match at a place of a text that is whole from there on, and where each match ends."""
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
        """How many characters from ``at`` on must be known before every rule is decided there; 0 if none can begin."""
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
        """Rules that have a beginning with the same first characters; none inside a word."""
        if text[at] not in self._first or not is_boundary(text, at):
            return []
        exact = self._by_two.get(text[at : at + 2], [])
        if at + 1 < len(text) and text[at] in self._single:
            exact = exact + [pair for pair in self._by_two[text[at]] if len(pair[0]) == 1]
        return exact


def _match(pattern: re.Pattern[str], text: str, at: int, longest: int) -> int | None:
    """The end of a match of whole words; one character more is seen, so that a longer one is told apart."""
    match = pattern.match(text, at, at + longest + 1)
    if match is None or match.end() == at or match.end() - at > longest or not is_boundary(text, match.end()):
        return None
    return match.end()


def _is_text(value: object) -> bool:
    """Whether somebody gave one text where a list of texts belongs."""
    return isinstance(value, str)


def _check(id: str, category: str, locales: tuple[str, ...]) -> None:
    if not id or not category:
        raise InvalidArgument(f"a rule needs an id and a category, got {id!r} and {category!r}")
    if _is_text(locales) or not locales:
        raise InvalidArgument(f"rule {id!r}: locales must be a list of languages, or ('*',), got {locales!r}")
