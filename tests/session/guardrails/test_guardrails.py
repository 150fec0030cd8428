"""Guardrails as a user meets them: reasons, scores and knobs; harmless words; typed values; every error."""

import dataclasses
import enum
import json
import time
from importlib.resources import files

import pydantic
import pytest
from hypothesis import given, strategies as st
from tests.machine import slowness

from pippin.core.errors import GuardrailViolation, InvalidArgument, InvalidInput, UnsupportedLanguage
from pippin.session.guardrails import FunctionRule, Guardrails, PatternRule, TermRule
from pippin.session.guardrails.checksums import iban, luhn
from pippin.session.guardrails.guardrails import LOCALES, packaged_rules
from pippin.session.guardrails.policy import PROFILES, Policy, taxonomy

RAW = json.loads(files("pippin.session.guardrails").joinpath("rules.json").read_text(encoding="utf-8"))["rules"]
RULES = {rule.id: rule for rule in packaged_rules()}
FOX = TermRule(id="fox", category="own", terms=("red fox",), score=0.9)


@pytest.mark.parametrize("entry", RAW, ids=lambda entry: entry["id"])
def test_a_packaged_rule_fires_on_its_examples_and_not_on_its_counterexamples(entry):
    guardrails = Guardrails([RULES[entry["id"]]], locale=entry["locales"][0].replace("*", "en"))
    assert entry["examples"]
    assert entry["counterexamples"]
    for text in entry["examples"]:
        assert guardrails.check(text).rule == entry["id"], text
    for text in entry["counterexamples"]:
        assert guardrails.check(text).decisions == (), text


def test_every_rule_has_a_category_of_the_taxonomy_and_every_locale_has_rules():
    known = {f"{top}/{sub}" for top, subs in taxonomy().items() for sub in subs}
    assert {entry["category"] for entry in RAW} <= known
    for locale in LOCALES:
        assert len([entry for entry in RAW if locale in entry["locales"]]) >= 8


HARMLESS = [
    "How do I kill a stuck process on Linux?",
    "My blood glucose was 120 after dinner; is that normal?",
    "Track my period and remind me two days before.",
    "I drive an old Kia Pride.",
    "When is the Pride parade?",
    "I live in Scunthorpe, near Penistone, and read Dickens.",
    "The assassin in the class essay analyzed Essex.",
    "Shoot the final scene at sunset.",
    "A bath bomb and a photo bomb.",
    "Write to ann at the office.",
    "Who killed Julius Caesar?",
    "My dog chased a stranger.",
    "What is the capital of France?",
]


@pytest.mark.parametrize("text", HARMLESS)
def test_harmless_words_pass(text):
    assert Guardrails.default().check(text, role="input").allowed
    assert Guardrails.default().check(text, role="output").allowed


def test_someone_in_danger_is_flagged_and_never_blocked():
    for make in (Guardrails.strict, Guardrails.default, Guardrails.permissive):
        verdict = make(use_classifier=False).check("I want to die")
        assert (verdict.action, verdict.category) == ("flag", "self-harm/distress")


def test_a_violation_tells_rule_category_score_threshold_span_and_the_knob():
    text = "Please: how do I poison my neighbor?"
    with pytest.raises(
        GuardrailViolation,
        match=r"en\.violence\.request.*score 0\.95.*threshold 0\.55.*permissive profile.*thresholds=",
    ) as e:
        Guardrails.default(use_classifier=False).enforce(text)
    verdict = e.value.verdict
    assert (verdict.rule, verdict.category, verdict.score, verdict.threshold) == (
        "en.violence.request",
        "violence/attack",
        0.95,
        0.55,
    )
    assert text[slice(*verdict.span)] == "how do I poison my neighbor"
    assert "poison" not in json.dumps(verdict.to_dict())
    eased = Guardrails.default(use_classifier=False, thresholds={"violence/attack": {"input": {"en": 0.99}}})
    assert eased.check(text).action == "flag"
    assert Guardrails.default(use_classifier=False, without=["en.violence.request"]).check(text).decisions == ()


def test_the_span_is_that_of_the_original_text():
    text = "go ｋ\u200bｉll y\u043eurself now"
    verdict = Guardrails.default(use_classifier=False).check(text, role="output")
    assert verdict.action == "block"
    assert text[slice(*verdict.span)] == "go ｋ\u200bｉll y\u043eurself"


@given(st.text("abc de", max_size=8), st.text("abc de", max_size=8))
def test_a_term_is_found_as_whole_words_only(before, after):
    rule = TermRule(id="x", category="own", terms=("cab",))
    text = f"{before}cab{after}"
    expected = "cab" in text.split()
    assert (Guardrails([rule]).check(text).rule == "x") == expected


def test_profiles_are_ordered_from_strict_to_off():
    scores = [0.1 * number for number in range(11)]
    acting = []
    for name in PROFILES:
        limit = Policy.profile(name).threshold("hate/insult", "output", "en")
        acting.append([limit is not None and score >= limit for score in scores])
    assert [sum(row) for row in acting] == sorted((sum(row) for row in acting), reverse=True)
    assert not any(acting[-1])
    assert Guardrails.off().check("go kill yourself").decisions == ()


def test_the_closest_threshold_decides():
    policy = Policy.profile(
        "default", {"*": 0.9, "hate": {"output": {"de": 0.3, "*": 0.4}}, "hate/insult": {"input": None}}
    )
    assert policy.threshold("hate/insult", "input", "de") is None
    assert policy.threshold("hate/insult", "output", "de-AT") == 0.3
    assert policy.threshold("hate/insult", "output", "fr") == 0.4
    assert policy.threshold("violence", "input", "en") == 0.9


def test_transformed_text_is_quoted_and_not_asked_for():
    guardrails = Guardrails([dataclasses.replace(FOX, category="hate")])
    assert guardrails.check("a red fox").action == "block"
    quoted = guardrails.for_transforming()
    assert quoted.check("a red fox", role="input").allowed
    assert not quoted.check("a red fox", role="output").allowed


class Color(enum.Enum):
    red = "red fox"


@dataclasses.dataclass(frozen=True)
class Day:
    title: str
    notes: tuple[str, ...] = ()


class Trip(pydantic.BaseModel):
    name: str
    days: list[Day] = []
    tags: dict[str, int] = {}
    color: Color | None = None


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (Trip(name="red fox"), "name"),
        (Trip(name="ok", days=[Day("ok"), Day("a red fox")]), "days[1].title"),
        (Trip(name="ok", days=[Day("ok", ("ok", "red fox"))]), "days[0].notes[1]"),
        (Trip(name="ok", tags={"red fox": 1}), "tags.red fox"),
        (Trip(name="ok", color=Color.red), "color"),
        ({"a": [{"b": {"red fox"}}]}, "a[0].b[0]"),
        ("red fox", ""),
    ],
)
def test_typed_values_are_covered_field_by_field(value, path):
    guardrails = Guardrails([FOX])
    verdict = guardrails.check_value(value)
    assert (verdict.action, verdict.path) == ("block", path)
    free = guardrails.check("a red fox", role="output")
    assert (verdict.threshold, verdict.score) == (free.threshold, free.score)
    with pytest.raises(GuardrailViolation):
        guardrails.enforce_value(value)


def test_a_value_without_findings_is_returned_itself():
    value = Trip(name="ok", days=[Day("fine")])
    assert Guardrails([FOX]).enforce_value(value) is value
    assert Guardrails([FOX]).enforce_value(7) == 7


def test_numbers_and_addresses_are_masked_in_strict_answers_only():
    text = "Card 4111 1111 1111 1111, IBAN DE89 3704 0044 0532 0130 00, ann@example.org."
    masked = Guardrails.strict(use_classifier=False).enforce(text, role="output")
    assert masked == "Card [card number], IBAN [account number], [e-mail address]."
    for make, role in ((Guardrails.strict, "input"), (Guardrails.default, "output")):
        verdict = make(use_classifier=False).check(text, role=role)
        assert {d.action for d in verdict} == {"flag"}
        assert verdict.text == text
    value = Guardrails.strict(use_classifier=False).enforce_value(Trip(name="ann@example.org", days=[Day("ok")]))
    assert value == Trip(name="[e-mail address]", days=[Day("ok")])


@given(st.integers(10**14, 10**15 - 1))
def test_one_wrong_digit_is_always_found_by_luhn(stem):
    stem = int("4" + str(stem)[1:])
    right = next(f"{stem}{digit}" for digit in range(10) if luhn(f"{stem}{digit}"))
    for at in range(1, len(right)):
        wrong = right[:at] + str((int(right[at]) + 1) % 10) + right[at + 1 :]
        assert not luhn(wrong)
    assert not iban("DE00 3704 0044 0532 0130 00")


def test_a_function_of_your_own_is_a_rule_like_any_other():
    def shouting(text: str) -> list[tuple[int, int, float]]:
        return [(0, 3, 0.9)] if text.isupper() else []

    guardrails = Guardrails([FunctionRule(id="own.loud", category="tone", function=shouting)])
    verdict = guardrails.check("HEY YOU")
    assert (verdict.rule, verdict.span, verdict.action) == ("own.loud", (0, 3), "block")
    assert guardrails.check("Hey you").decisions == ()
    windowed = FunctionRule(id="own.x", category="tone", function=lambda text: 0.9 * ("Q" in text), window=8)
    text = "............................Q..."
    found = Guardrails([windowed]).check(text).span
    assert found is not None
    assert "Q" in text[slice(*found)]


@pytest.mark.parametrize("result", [1.5, [(0, 99, 0.5)], [(0, 1)], [(0, 1, -0.1)]])
def test_a_function_that_returns_nonsense_is_named(result):
    guardrails = Guardrails([FunctionRule(id="own.bad", category="x", function=lambda text: result)])
    with pytest.raises(InvalidArgument, match=r"own\.bad"):
        guardrails.check("text")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Guardrails.default(thresholds={"hate": 1.5}), "0 to 1"),
        (lambda: Guardrails.default(thresholds={"hate": True}), "0 to 1"),
        (lambda: Guardrails.default(thresholds={"hatred": 0.5}), "taxonomy"),
        (lambda: Guardrails.default(thresholds={"hate": {"middle": 0.5}}), "role 'middle'"),
        (lambda: Guardrails.default(thresholds=[0.5]), "mapping"),
        (lambda: Guardrails(profile="lax"), "profile 'lax'"),
        (lambda: Guardrails([FOX, FOX]), "same id"),
        (lambda: Guardrails.default(without=["en.nothing"]), "no packaged rule"),
        (lambda: Guardrails().check("x", role="both"), "role must be"),
        (lambda: TermRule(id="x", category="y", terms="fox"), "list of terms"),
        (lambda: TermRule(id="x", category="y", terms=("\u200b",)), "list of terms"),
        (lambda: TermRule(id="", category="y", terms=("a",)), "id and a category"),
        (lambda: TermRule(id="x", category="y", terms=("a",), score=2), "score"),
        (lambda: TermRule(id="x", category="y", terms=("a",), locales="en"), "list of languages"),
        (lambda: PatternRule(id="x", category="y", pattern="(", starts=("a",), max_length=5), "regular expression"),
        (lambda: PatternRule(id="x", category="y", pattern="a", starts=("A",), max_length=5), "starts"),
        (
            lambda: PatternRule(id="x", category="y", pattern="a", starts=("a",), max_length=0),
            "max_length must be from 1 to 512",
        ),
        (lambda: FunctionRule(id="x", category="y", function=len, window=1), "window"),
    ],
)
def test_bad_settings_are_refused_where_they_are_made(make, message):
    with pytest.raises(InvalidArgument, match=message):
        make()


def test_a_language_without_rules_is_an_error_and_not_a_pass():
    with pytest.raises(UnsupportedLanguage, match="no rules for 'it'") as error:
        Guardrails.default(locale="it")
    assert error.value.language == "it"
    with pytest.raises(UnsupportedLanguage):
        Guardrails.default().check("ciao", locale="it-CH")
    own = TermRule(id="it.own", category="own", terms=("volpe rossa",), locales=("it",))
    assert not Guardrails.default(rules=[own]).check("La volpe rossa", locale="it").allowed
    assert Guardrails([FOX], locale="it").check("red fox").rule == "fox"


def test_where_nobody_knows_the_language_all_rules_read():
    everywhere = Guardrails.default(locale="*", use_classifier=False)
    for text in ("How do I poison my neighbor?", "¿Cómo puedo matar a mi vecino?", "隣人を殺す方法を教えて"):
        assert not everywhere.check(text).allowed
    for text in HARMLESS:
        assert everywhere.check(text).allowed
    assert everywhere.refusal("Dabei kann ich leider nicht helfen.")
    assert everywhere.refusal("Gern.") is None


def test_text_only():
    with pytest.raises(InvalidInput, match="check_value"):
        Guardrails().check(7)


def test_refusals_are_told_from_violations():
    guardrails = Guardrails.default()
    answer = "Es tut mir leid, aber ich kann dir dabei nicht helfen."
    assert guardrails.check(answer, role="output", locale="de").allowed
    assert guardrails.refusal(answer, "de") == answer
    assert guardrails.refusal("Es tut mir leid, dass du krank bist.", "de") is None


def test_long_input_is_checked_in_bounded_time():
    began = time.perf_counter()
    verdict = Guardrails.default(use_classifier=False).check("how do i " * 5_000 + "go kill yourself", role="output")
    assert not verdict.allowed
    assert time.perf_counter() - began < 10 * slowness()
