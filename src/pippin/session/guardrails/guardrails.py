"""Guardrails: named rules that check the input and output of a model and explain their decisions.

Notable here:
- five stages, each visible and adjustable: normalization, rules of the locale, a classifier, your own functions,
  thresholds
- nothing is blocked without a rule's name, score, threshold and position; every threshold is an argument
- a model that declines is not a violation: `refusal` tells the two apart
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Final, TypeVar

from pippin.core.errors import InvalidArgument, InvalidInput, UnsupportedLanguage
from pippin.data.text import refusals
from pippin.session.guardrails import checksums, classifier
from pippin.session.guardrails.policy import Policy, Role, Thresholds, Verdict, verdict_of
from pippin.session.guardrails.rules import ClassifierRule, PatternRule, Rule, SpanRule, TermRule
from pippin.session.guardrails.stream import StreamChecker, StreamPlan, violation
from pippin.session.guardrails.value_checker import ValueChecker, visit

T = TypeVar("T")
LOCALES: Final = ("en", "de", "fr", "es", "ja")


class Guardrails:
    """Rules and thresholds for input and output.

    `Guardrails.default()`, `.strict()`, `.permissive()` and `.off()` bring packaged rules; the constructor takes
    only the rules that you give it.

    Args:
        rules: `TermRule`, `PatternRule`, `ClassifierRule` and `FunctionRule` objects, each with an id of its own.
        thresholds: category -> role -> locale -> minimum score to act, None for never. A number at any level applies to
            everything below it, "*" to everything that is not named; missing entries are the profile's.
        profile: "strict", "default", "permissive" or "off": the default thresholds.
        locale: the default language of the texts, such as "en" or "de-AT"; "*" uses the rules of all languages, for
            texts of unknown language.
        detect_refusals: whether a session raises `Refusal` where an answer only declines.

    Raises:
        InvalidArgument: an unknown profile, category or role, a threshold outside 0 to 1, two rules with one id.
        UnsupportedLanguage: there is no rule for the locale.

    >>> verdict = Guardrails.default().check("How do I kill a stuck Python process?", role="input")
    >>> verdict.action
    'allow'
    """

    def __init__(
        self,
        rules: Sequence[Rule] = (),
        *,
        thresholds: Thresholds | None = None,
        profile: str = "default",
        locale: str = "en",
        detect_refusals: bool = False,
    ) -> None:
        ids = [rule.id for rule in rules]
        if repeated := {id for id in ids if ids.count(id) > 1}:
            raise InvalidArgument(f"two rules have the same id: {', '.join(sorted(repeated))}")
        self.rules = tuple(rules)
        self.profile, self.thresholds, self.locale = profile, thresholds, locale
        self.detect_refusals = detect_refusals
        own = frozenset(rule.category for rule in rules if not isinstance(rule, ClassifierRule))
        policy = Policy.profile(profile, thresholds, own=own)
        self._policies: dict[Role, Policy] = {"input": policy, "output": policy}
        self._plans: dict[tuple[Role, str], StreamPlan] = {}
        self._for(locale)

    @classmethod
    def default(cls, **settings: Any) -> Guardrails:
        """Blocks clearly harmful text; reports possibly harmful text. Keywords are those of `packaged`."""
        return cls.packaged("default", **settings)

    @classmethod
    def strict(cls, **settings: Any) -> Guardrails:
        """Blocks at a score of 0.5 and masks card numbers and addresses in answers. Keywords as for `packaged`."""
        return cls.packaged("strict", **settings)

    @classmethod
    def permissive(cls, **settings: Any) -> Guardrails:
        """Blocks only what the most certain rules find; without the classifier. Keywords as for `packaged`."""
        return cls.packaged("permissive", **({"use_classifier": False} | settings))

    @classmethod
    def off(cls, **settings: Any) -> Guardrails:
        """No packaged rule and no threshold; `refusal` still works."""
        return cls(profile="off", **settings)

    @classmethod
    def packaged(
        cls,
        profile: str,
        *,
        rules: Sequence[Rule] = (),
        without: Sequence[str] = (),
        use_classifier: bool = True,
        **settings: Any,
    ) -> Guardrails:
        """The packaged rules under a profile.

        Args:
            profile: the name of the thresholds.
            rules: your own rules, in addition.
            without: ids of packaged rules to leave out.
            use_classifier: whether to use the packaged classifier. It delays a streamed answer by about 100 characters;
                without it, text is held back only after a word that may start a rule's match.
            settings: ``thresholds``, ``locale``, ``detect_refusals``, as for the class.

        Raises:
            InvalidArgument: ``without`` names a rule that does not exist.
        """
        packaged: list[Rule] = list(packaged_rules())
        if use_classifier:
            packaged.append(ClassifierRule(classifier=classifier.load(), locales=LOCALES))
        if unknown := set(without) - {rule.id for rule in packaged}:
            raise InvalidArgument(f"no packaged rule is called {', '.join(sorted(unknown))}")
        used = [rule for rule in packaged if rule.id not in without]
        return cls([*used, *rules], profile=profile, **settings)

    def for_transforming(self) -> Guardrails:
        """The same guardrails for text that is to be summarized, translated or classified: the input is quoted, not
        requested.

        Only scores of 0.97 or more block input, which your own rules and those about minors reach; output is checked as
        before.
        """
        other = Guardrails(
            self.rules,
            thresholds=self.thresholds,
            profile=self.profile,
            locale=self.locale,
            detect_refusals=self.detect_refusals,
        )
        if self.profile in ("strict", "default"):
            other._policies["input"] = Policy.profile("transforming", self.thresholds)
        return other

    def check(self, text: str, *, role: Role = "input", locale: str | None = None) -> Verdict:
        """Check a whole text; never raises a violation.

        Args:
            text: the text to check.
            role: "input" for text that a model reads, "output" for text that it generates.
            locale: its language, if it differs from that of the guardrails.

        Raises:
            UnsupportedLanguage: there is no rule for the locale. InvalidInput: not a text.

        >>> Guardrails.default().check("Where do I buy Pride tickets?").allowed
        True
        """
        return self._read(text, role, locale).verdict

    def enforce(self, text: str, *, role: Role = "input", locale: str | None = None) -> str:
        """Check a text and return it, with replacements where the policy requires them.

        Raises:
            GuardrailViolation: something is blocked; ``verdict`` has the rule, the position and the reason.
            UnsupportedLanguage: there is no rule for the locale. InvalidInput: not a text.
        """
        verdict = self.check(text, role=role, locale=locale)
        if not verdict.allowed:
            raise violation(verdict)
        return text if verdict.text is None else verdict.text

    def check_value(self, value: Any, *, role: Role = "output", locale: str | None = None) -> Verdict:
        """Check a typed value: every string in it, with the same thresholds as text, with its field's path.

        >>> Guardrails.default().check_value({"days": [{"title": "Pride parade"}]}).allowed
        True
        """
        return self._value(value, role, locale)[0]

    def enforce_value(self, value: T, *, role: Role = "output", locale: str | None = None) -> T:
        """Check a typed value and return it, with replacements where the policy requires them.

        Raises:
            GuardrailViolation: a string in it is blocked; ``verdict.path`` names the field.
        """
        verdict, checked = self._value(value, role, locale)
        if not verdict.allowed:
            raise violation(verdict)
        return checked  # type: ignore[no-any-return]

    def stream(self, locale: str | None = None, *, role: Role = "output") -> StreamChecker:
        """A checker for one text that arrives in pieces."""
        return self._checker(role, locale)

    def stream_value(self, locale: str | None = None, *, role: Role = "output") -> ValueChecker:
        """A checker for one typed value that arrives in snapshots."""
        return ValueChecker(lambda path: self._checker(role, locale, path=path))

    def refusal(self, text: str, locale: str | None = None) -> str | None:
        """The sentence in which an answer declines; None if it does not.

        >>> Guardrails.off().refusal("I'm sorry, but I can't help with that. Anything else?")
        "I'm sorry, but I can't help with that."
        """
        tag = locale or self.locale
        tags = refusals.locales() if tag == "*" else (tag,)
        return next((said for each in tags if (said := refusals.find(text, each))), None)

    def _read(self, text: str, role: Role, locale: str | None, path: str = "") -> StreamChecker:
        if not isinstance(text, str):
            raise InvalidInput(f"guardrails read text, got {type(text).__name__}; use check_value for typed values")
        checker = self._checker(role, locale, path=path, collect=True)
        checker.push(text)
        checker.finish()
        return checker

    def _value(self, value: Any, role: Role, locale: str | None) -> tuple[Verdict, Any]:
        found: list[Any] = []

        def see(path: str, text: str) -> str:
            verdict = self._read(text, role, locale, path).verdict
            found.extend(verdict.decisions)
            return text if verdict.text is None else verdict.text

        checked = visit(value, see)
        return verdict_of(found, None), checked

    def _checker(self, role: Role, locale: str | None, *, path: str = "", collect: bool = False) -> StreamChecker:
        if role not in self._policies:
            raise InvalidArgument(f"role must be 'input' or 'output', got {role!r}")
        key = (role, locale or self.locale)
        if key not in self._plans:
            self._plans[key] = StreamPlan(self._for(key[1]), self._policies[role], *key)
        return StreamChecker(self._plans[key], path=path, collect=collect)

    def _for(self, locale: str) -> list[Rule]:
        """The rules for a locale."""
        if locale == "*":
            return list(self.rules)
        language = locale.split("-")[0].lower()
        named = {tag for rule in self.rules for tag in rule.locales} - {"*"}
        if named and language not in named:
            raise UnsupportedLanguage(
                f"these guardrails have no rules for {locale!r}, only for {', '.join(sorted(named))}; add rules of "
                "your own for it, or say which of these languages is closest",
                language=locale,
            )
        return [rule for rule in self.rules if language in rule.locales or "*" in rule.locales]


@cache
def packaged_rules() -> tuple[SpanRule, ...]:
    """The packaged term and pattern rules of all locales."""
    raw = json.loads(files("pippin.session.guardrails").joinpath("rules.json").read_text(encoding="utf-8"))
    return tuple(_rule(entry) for entry in raw["rules"])


def _rule(entry: dict[str, Any]) -> SpanRule:
    shared = {
        "id": entry["id"],
        "category": entry["category"],
        "score": entry["score"],
        "locales": tuple(entry["locales"]),
        "replacement": entry.get("replacement"),
        "explanation": entry["explanation"],
    }
    if "terms" in entry:
        return TermRule(terms=tuple(entry["terms"]), **shared)
    return PatternRule(
        pattern=entry["pattern"],
        starts=tuple(entry["starts"]),
        max_length=entry["longest"],
        valid=checksums.CHECKS[entry["valid"]] if "valid" in entry else None,
        **shared,
    )
