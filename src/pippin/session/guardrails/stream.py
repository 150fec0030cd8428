"""Streaming guardrails: decided text is released, text that may still be part of a match is held back.

Notable here:
- a whole text is checked by the same code as a stream, so both decide the same, however the stream was split
- held back: after a word that may start a rule's match, as far as that rule reaches; for a classifier or a function
  over windows, the characters of its next window. Rules that cannot act under the policy hold nothing back.
- a character of a blocked span is never released: a span begins where text is still held
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pippin.core.errors import GuardrailViolation, InvalidArgument
from pippin.session.guardrails.normalization import Normalizer, is_boundary
from pippin.session.guardrails.policy import GuardrailDecision, Policy, Role, Verdict, taxonomy, verdict_of
from pippin.session.guardrails.rules import ClassifierRule, Rule, SpanIndex, SpanRule, WindowRule


class StreamPlan:
    """The rules of a role and locale: those that can act under the policy, and those that only report.

    Created once and shared by every text; `StreamChecker` has the state of one text.
    """

    def __init__(self, rules: Sequence[Rule], policy: Policy, role: Role, locale: str) -> None:
        self.policy, self.role, self.locale = policy, role, locale
        acting = [rule for rule in rules if self._can_act(rule)]
        self.acting = _Rules(acting)
        self.watching = _Rules([rule for rule in rules if rule not in acting])
        self.windowed = frozenset(rule.id for rule in rules if not isinstance(rule, SpanRule))

    def _can_act(self, rule: Rule) -> bool:
        if isinstance(rule, SpanRule):
            limit = self.policy.threshold(rule.category, self.role, self.locale)
            return limit is not None and rule.score >= limit
        if isinstance(rule, ClassifierRule):
            limits = (self.policy.threshold(category, self.role, self.locale) for category in taxonomy())
            return any(limit is not None for limit in limits)
        return self.policy.threshold(rule.category, self.role, self.locale) is not None


class _Rules:
    """Rules by the way in which they read text."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.index = SpanIndex([rule for rule in rules if isinstance(rule, SpanRule)])
        self.windows: list[WindowRule] = [rule for rule in rules if not isinstance(rule, SpanRule)]


class StreamChecker:
    """Checks one text in pieces.

    ``push`` returns the text that may be shown, ``finish`` the rest. Once something is blocked, both raise.

    >>> from pippin.session.guardrails import Guardrails
    >>> checker = Guardrails.default().stream(role="output")
    >>> checker.push("The kettle ") + checker.finish()
    'The kettle '
    """

    def __init__(self, plan: StreamPlan, *, path: str = "", collect: bool = False) -> None:
        self._plan, self._path, self._collect = plan, path, collect
        self._reader = Normalizer()
        self._text: list[str] = []
        self._released = 0
        self._done = False
        self._decisions: list[GuardrailDecision] = []
        self._replacements: list[tuple[int, int, str]] = []
        self._violation: GuardrailViolation | None = None
        self._acting, self._watching = _Scan(plan.acting), _Scan(plan.watching)

    @property
    def verdict(self) -> Verdict:
        """The decisions so far."""
        return verdict_of(_strongest(self._decisions, self._plan.windowed), self._text_now())

    @property
    def released(self) -> int:
        """How many characters of the original text have been released."""
        return self._released

    @property
    def finished(self) -> bool:
        """Whether the text is complete."""
        return self._done

    @property
    def held(self) -> int:
        """How many characters are held back now."""
        return sum(map(len, self._text)) - self._released

    def push(self, text: str) -> str:
        """Add text; return the text that may now be shown.

        Raises:
            GuardrailViolation: something is blocked. InvalidArgument: the text was finished before.
        """
        return self._go(text, last=False)

    def finish(self) -> str:
        """Mark the text as complete; return the rest of it.

        Raises:
            GuardrailViolation: something is blocked. InvalidArgument: the text was finished before.
        """
        return self._go("", last=True)

    def _go(self, text: str, *, last: bool) -> str:
        if self._violation is not None and not self._collect:
            raise self._violation
        if self._done:
            raise InvalidArgument("this text is finished; ask the guardrails for another stream")
        self._done = last
        self._text.append(text)
        self._reader.push(text, last=last)
        for scan in (self._acting, self._watching):
            for rule, category, start, end, score in scan.advance(self._reader.text, self._original, last):
                self._decide(rule, category, start, end, score)
                if self._violation is not None and not self._collect:
                    raise self._violation
        return self._release(last)

    def _original(self, start: int, end: int) -> tuple[str, int]:
        """The original text of a normalized span, and its offset."""
        first, last = self._reader.starts[start], self._reader.ends[end - 1]
        return self._text_so_far()[first:last], first

    def _text_so_far(self) -> str:
        if len(self._text) > 1:
            self._text = ["".join(self._text)]
        return self._text[0] if self._text else ""

    def _decide(self, rule: Rule, category: str, start: int, end: int, score: float) -> None:
        """Record one finding; positions are in the original text."""
        limit = self._plan.policy.threshold(category, self._plan.role, self._plan.locale)
        replacement = getattr(rule, "replacement", None)
        action = self._plan.policy.action(score, limit, transforms=replacement is not None)
        decision = GuardrailDecision(
            rule=rule.id,
            category=category,
            score=score,
            threshold=limit,
            span=(start, end),
            action=action,
            role=self._plan.role,
            locale=self._plan.locale,
            path=self._path,
            explanation=getattr(rule, "explanation", ""),
        )
        self._decisions.append(decision)
        if action == "transform":
            self._replacements.append((start, end, replacement or ""))
        elif action == "block" and self._violation is None:
            self._violation = violation(self.verdict, safe_prefix=self._released)

    def _release(self, last: bool) -> str:
        text = self._text_so_far()
        until = len(text) if last else self._reader.place(self._acting.frontier(len(self._reader.text)))
        for start, end, _ in self._replacements:
            if start < until < end:
                until = start
        out = _replaced(text, self._replacements, self._released, until)
        self._released = max(self._released, until)
        return out

    def _text_now(self) -> str:
        text = self._text_so_far()
        return _replaced(text, self._replacements, 0, len(text))


class _Scan:
    """Applies rules to a growing normalized text, each position and each window once."""

    def __init__(self, rules: _Rules) -> None:
        self.index, self.windows = rules.index, rules.windows
        self.at = 0
        self.next = [0] * len(self.windows)
        self.covered: dict[str, int] = {}

    def frontier(self, length: int) -> int:
        """The normalized character up to which everything is decided."""
        return min([self.at, length, *(location for location in self.next)])

    def advance(self, text: str, original: Any, last: bool) -> list[tuple[Rule, str, int, int, float]]:
        """Findings that more text has made certain: rule, category, original start and end, score."""
        found: list[tuple[Rule, str, int, int, float]] = []
        while self.at < len(text):
            reach = self.index.reach(text, self.at)
            if reach and not last and self.at + reach > len(text):
                break
            for rule, end in self.index.matches(text, self.at) if reach else ():
                if end > self.covered.get(rule.id, 0):  # not inside a longer match of the same rule
                    self.covered[rule.id] = end
                    piece, first = original(self.at, end)
                    found.append((rule, rule.category, first, first + len(piece), rule.score))
            self.at += 1
        for number, window in enumerate(self.windows):
            found += self._windows(number, window, text, original, last)
        return found

    def _windows(
        self, number: int, rule: WindowRule, text: str, original: Any, last: bool
    ) -> list[tuple[Rule, str, int, int, float]]:
        found: list[tuple[Rule, str, int, int, float]] = []
        size, stride = rule.window or len(text), rule.stride or max(1, len(text))
        if rule.window is None and not last:
            return found
        while True:
            begin = self.next[number]
            whole = begin + size < len(text)  # one more character tells whether the last word is whole
            rest = last and begin < len(text) and (begin == 0 or begin - stride + size < len(text))
            if not (whole or rest):
                return found
            start, end = _whole_words(text, begin, min(begin + size, len(text)))
            piece, first = original(start, end)
            read = text[start:end] if isinstance(rule, ClassifierRule) else piece
            for category, a, b, score in rule.scan(read):
                span = (first, first + len(piece)) if isinstance(rule, ClassifierRule) else (first + a, first + b)
                found.append((rule, category, *span, score))
            self.next[number] = begin + stride


def violation(verdict: Verdict, *, safe_prefix: int = 0) -> GuardrailViolation:
    """The error for a blocking verdict; its message names the rule and the setting that would allow the text."""
    what = "value" if verdict.path else "text"
    location = f"characters {verdict.span[0]} to {verdict.span[1]}" if verdict.span else "it"
    role = verdict.decisions[0].role if verdict.decisions else "input"
    return GuardrailViolation(
        f"the {role} {what} was blocked by rule {verdict.rule!r} ({verdict.category}): score {verdict.score:.2f}, "
        f"threshold {verdict.threshold:g}, {location}{' of ' + verdict.path if verdict.path else ''}; if that "
        "is wrong, take a more permissive profile, or in Python "
        f"raise thresholds={{{verdict.category!r}: ...}} or leave the rule out",
        verdict=verdict,
        safe_prefix=safe_prefix,
    )


def _strongest(decisions: list[GuardrailDecision], windowed: frozenset[str]) -> list[GuardrailDecision]:
    """The decisions; of the windows of one rule and category only that with the highest score."""
    strongest: list[GuardrailDecision] = []
    best: dict[tuple[str, str], int] = {}
    for decision in decisions:
        key = (decision.rule, decision.category)
        if decision.rule in windowed and key in best:
            if decision.score > strongest[best[key]].score:
                strongest[best[key]] = decision
            continue
        best[key] = len(strongest)
        strongest.append(decision)
    return strongest


def _replaced(text: str, replacements: list[tuple[int, int, str]], start: int, until: int) -> str:
    pieces, at = [], start
    for first, end, new in sorted(replacements):
        if first >= at and end <= until:
            pieces += [text[at:first], new]
            at = end
    return "".join([*pieces, text[at:until]])


def _whole_words(text: str, start: int, end: int) -> tuple[int, int]:
    """The window without partial words; unchanged if that leaves nothing."""
    first, last = start, end
    while first < end and not is_boundary(text, first):
        first += 1
    while last > first and not is_boundary(text, last):
        last -= 1
    return (first, last) if last > first else (start, end)
