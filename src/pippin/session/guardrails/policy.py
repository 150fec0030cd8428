"""Guardrail policy: thresholds by category, role and locale, and the decisions made with them.

Notable here:
- the closest entry applies: category before role before locale, and your entries before the profile's
- a threshold of None never blocks, however high the score; such a rule still reports
- a decision records position and reason, never the text: reports and logs contain nothing of the conversation
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, Final, Literal

from pippin.core.errors import InvalidArgument

Role = Literal["input", "output"]
Action = Literal["allow", "flag", "transform", "block"]
Thresholds = Mapping[str, Any]

ACTIONS: Final[tuple[Action, ...]] = ("allow", "flag", "transform", "block")  # from the weakest to the strongest
ROLES: Final[tuple[Role, ...]] = ("input", "output")
PROFILES: Final = ("strict", "default", "permissive", "off")


@cache
def taxonomy() -> Mapping[str, tuple[str, ...]]:
    """Categories and their subcategories, from the packaged taxonomy.

    >>> "threats" in taxonomy()["violence"]
    True
    """
    raw = json.loads(files("pippin.session.guardrails").joinpath("taxonomy.json").read_text(encoding="utf-8"))
    return {c["id"]: tuple(s["id"] for s in c["subcategories"]) for c in raw["categories"]}


@dataclass(frozen=True)
class GuardrailDecision:
    """A finding of one rule, and the action of the policy.

    Attributes:
        rule: the rule's id.
        category: category of the taxonomy, as specific as the rule knows it.
        score: confidence of the rule, 0 to 1.
        threshold: minimum score at which the policy acts; None if it never does.
        span: first and last+1 character in the original text.
        action: "allow", "flag" (reported only), "transform" (the span is replaced) or "block".
        role, locale: the checked role, and its locale.
        path: the field of a typed value ("days[0].title"); empty for text.
        explanation: the rule's reason in a few words.
    """

    rule: str
    category: str
    score: float
    threshold: float | None
    span: tuple[int, int]
    action: Action
    role: Role
    locale: str
    path: str = ""
    explanation: str = ""

    def __str__(self) -> str:
        where = f"characters {self.span[0]} to {self.span[1]}" + (f" of {self.path}" if self.path else "")
        limit = "no threshold" if self.threshold is None else f"threshold {self.threshold:g}"
        why = f" ({self.explanation})" if self.explanation else ""
        return f"{self.action}: rule {self.rule!r}, {self.category}, score {self.score:.2f}, {limit}, {where}{why}"


@dataclass(frozen=True)
class Verdict:
    """All decisions about a text or value; the properties are those of the strongest decision.

    Attributes:
        action: the strongest action of all decisions; "allow" if no rule found anything.
        decisions: the finding of each rule, in order of position.
        text: the text after replacements; of a typed value, None.
    """

    action: Action
    decisions: tuple[GuardrailDecision, ...] = ()
    text: str | None = field(default=None, repr=False)

    @property
    def allowed(self) -> bool:
        """Whether nothing was blocked."""
        return self.action != "block"

    @property
    def _worst(self) -> GuardrailDecision | None:
        return max(self.decisions, key=lambda d: (ACTIONS.index(d.action), d.score), default=None)

    @property
    def rule(self) -> str | None:
        """The id of the deciding rule; None if no rule found anything."""
        return self._worst.rule if self._worst else None

    @property
    def category(self) -> str | None:
        """The category of the deciding rule."""
        return self._worst.category if self._worst else None

    @property
    def score(self) -> float:
        """The score of the deciding rule; 0 if no rule found anything."""
        return self._worst.score if self._worst else 0.0

    @property
    def threshold(self) -> float | None:
        """The threshold for the deciding score."""
        return self._worst.threshold if self._worst else None

    @property
    def span(self) -> tuple[int, int] | None:
        """The span in the original text."""
        return self._worst.span if self._worst else None

    @property
    def path(self) -> str:
        """The field of a typed value."""
        return self._worst.path if self._worst else ""

    def __iter__(self) -> Iterator[GuardrailDecision]:
        return iter(self.decisions)

    def to_dict(self) -> dict[str, Any]:
        """The action and the decisions as JSON values, without any of the text."""
        return {"action": self.action, "decisions": [asdict(decision) for decision in self.decisions]}


def verdict_of(decisions: list[GuardrailDecision], text: str | None) -> Verdict:
    """A verdict from its decisions: its action is the strongest one."""
    found: list[Action] = [decision.action for decision in decisions]
    action: Action = max(found, key=ACTIONS.index, default="allow")
    return Verdict(action, tuple(sorted(decisions, key=lambda d: (d.path, d.span, d.rule))), text)


class Policy:
    """Thresholds of a profile, overridden by those of a user.

    >>> policy = Policy.profile("default", {"hate": {"output": 0.4}})
    >>> policy.threshold("hate/insult", "output", "de"), policy.action(0.5, 0.4)
    (0.4, 'block')
    """

    def __init__(self, layers: tuple[Thresholds, ...], flag: float) -> None:
        self.layers, self.flag = layers, flag

    @classmethod
    def profile(cls, name: str, thresholds: Thresholds | None = None, *, own: frozenset[str] = frozenset()) -> Policy:
        """A packaged profile, overridden by your own thresholds.

        Args:
            name: "strict", "default", "permissive" or "off".
            thresholds: category -> role -> locale -> threshold; a number at any level applies to everything below it,
                and "*" to everything that is not named.
            own: categories of your own rules, allowed in addition to those of the taxonomy.

        Raises:
            InvalidArgument: an unknown profile, category or role, or a threshold outside 0 to 1.
        """
        raw = json.loads(files("pippin.session.guardrails").joinpath("policies.json").read_text(encoding="utf-8"))
        if name not in raw["profiles"]:
            raise InvalidArgument(f"profile {name!r} is not known; use one of: {', '.join(raw['profiles'])}")
        chosen = raw["profiles"][name]
        _check(thresholds or {}, own)
        return cls((thresholds or {}, chosen["block"]), chosen["flag"])

    def threshold(self, category: str, role: Role, locale: str) -> float | None:
        """Minimum score to act; None for never."""
        places = (
            (category, category.split("/")[0], "*"),
            (role, "*"),
            (locale, locale.split("-")[0], "*"),
        )
        for layer in self.layers:
            found, value = _look(layer, places)
            if found:
                return value
        return None

    def action(self, score: float, threshold: float | None, *, transforms: bool = False) -> Action:
        """The action for a score."""
        if threshold is not None and score >= threshold:
            return "transform" if transforms else "block"
        return "flag" if score >= self.flag else "allow"


def _look(table: Any, places: tuple[tuple[str, ...], ...]) -> tuple[bool, float | None]:
    """Look up nested tables by the first name found at each level, with backtracking."""
    if not isinstance(table, Mapping):
        return True, table
    for name in places[0] if places else ():
        if name in table:
            found, value = _look(table[name], places[1:])
            if found:
                return True, value
    return False, None


def _check(thresholds: Thresholds, own: frozenset[str]) -> None:
    if not isinstance(thresholds, Mapping):
        raise InvalidArgument(f"thresholds must be a mapping from category to number, got {thresholds!r}")
    known = {"*", *own, *taxonomy(), *(f"{top}/{sub}" for top, subs in taxonomy().items() for sub in subs)}
    for category, roles in thresholds.items():
        if category not in known:
            raise InvalidArgument(
                f"category {category!r} is not in the taxonomy; use one of {', '.join(taxonomy())}, a subcategory such "
                "as 'violence/threats', '*', or a category of your own rules"
            )
        for role, locales in roles.items() if isinstance(roles, Mapping) else [("*", roles)]:
            if role not in (*ROLES, "*"):
                raise InvalidArgument(f"thresholds[{category!r}]: role {role!r} is not 'input', 'output' or '*'")
            for locale, value in locales.items() if isinstance(locales, Mapping) else [("*", locales)]:
                number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1
                if value is not None and not number:
                    raise InvalidArgument(
                        f"thresholds[{category!r}][{role!r}][{locale!r}] must be 0 to 1, or None, got {value!r}"
                    )
