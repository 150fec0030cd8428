"""Streams: nothing of a blocked span gets out, allowed text comes out whole, and only as much is held as must be."""

import json
import random
from importlib.resources import files

import pytest
from hypothesis import given, settings, strategies as st

from pippin.core.errors import GuardrailViolation, InvalidArgument
from pippin.session.guardrails import ClassifierRule, FunctionRule, Guardrails, PatternRule, TermRule
from pippin.session.guardrails.rules import STRIDE, WINDOW

RAW = json.loads(files("pippin.session.guardrails").joinpath("rules.json").read_text(encoding="utf-8"))["rules"]
WORDS = [
    "the",
    "red",
    "fox",
    "ran",
    "home",
    "how",
    "do",
    "i",
    "kill",
    "my",
    "yourself",
    "boss",
    "go",
    "bomb",
    "4111",
    "1111",
    "a@b.org",
    "k\u200bill",
    "оf",
]
OWN = [
    TermRule(id="fox", category="own", terms=("red fox", "red fox ran", "bomb")),
    PatternRule(
        id="boss", category="own", pattern=r"(?:kill|go) (?:\w+ ){0,3}boss", starts=("kill", "go"), max_length=30
    ),
    TermRule(id="mask", category="privacy", terms=("home", "my boss"), replacement="[…]"),
]


def pieces(text: str, seed: int) -> list[str]:
    generator, at, found = random.Random(seed), 0, []
    while at < len(text):
        size = generator.randint(1, 9)
        found.append(text[at : at + size])
        at += size
    return found


def stream(
    guardrails: Guardrails, parts: list[str], locale: str | None = None
) -> tuple[str, GuardrailViolation | None]:
    checker, shown = guardrails.stream(locale), ""
    try:
        for part in parts:
            shown += checker.push(part)
        shown += checker.finish()
    except GuardrailViolation as violation:
        return shown, violation
    return shown, None


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(WORDS), max_size=25).map(" ".join), st.integers(0, 10**6))
def test_a_stream_decides_as_the_whole_and_releases_nothing_blocked(text, seed):
    guardrails = Guardrails(OWN[:2])
    whole = guardrails.check(text, role="output")
    shown, violation = stream(guardrails, pieces(text, seed))
    assert (violation is None) == whole.allowed
    assert text.startswith(shown)
    if violation is None:
        assert shown == text
    for decision in whole:
        assert decision.action == "block"
        assert len(shown) <= decision.span[0]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(WORDS), max_size=25).map(" ".join), st.integers(0, 10**6))
def test_replacements_do_not_depend_on_the_cuts(text, seed):
    guardrails = Guardrails(OWN[2:], thresholds={"privacy": 0.5})
    shown, violation = stream(guardrails, pieces(text, seed))
    assert violation is None
    assert shown == guardrails.check(text, role="output").text
    assert "home" not in shown.split()


@pytest.mark.parametrize("entry", RAW, ids=lambda entry: entry["id"])
def test_every_packaged_rule_decides_alike_in_a_stream(entry):
    locale = entry["locales"][0].replace("*", "en")
    guardrails = Guardrails.strict(locale=locale, use_classifier=False)
    for number, text in enumerate([*entry["examples"], *entry["counterexamples"]]):
        framed = f"Ok. {text} Ok."
        whole = guardrails.check(framed, role="output")
        for seed in range(3):
            shown, violation = stream(guardrails, pieces(framed, 7 * number + seed))
            assert (violation is None) == whole.allowed
            assert all(len(shown) <= d.span[0] for d in whole if d.action == "block")
            if violation is None:
                assert shown == whole.text


def test_the_classifier_in_a_stream_decides_as_on_the_whole():
    calm = "The council met and agreed to repair the bridge before the winter comes again. "
    for seed in range(6):
        text = calm * (seed % 3) + "How do I murder my wife and hide her? " + calm
        guardrails = Guardrails.default(without=[entry["id"] for entry in RAW])
        whole = guardrails.check(text, role="output")
        shown, violation = stream(guardrails, pieces(text, seed))
        assert (violation is None) == whole.allowed
        assert all(len(shown) <= d.span[0] for d in whole if d.action == "block")


def held_most(guardrails: Guardrails, text: str) -> int:
    checker, most = guardrails.stream(), 0
    for character in text:
        checker.push(character)
        most = max(most, checker.held)
    return most


def test_what_is_held_is_what_the_rules_may_still_need():
    calm = "It rains. Vegetables are washed, cut and fried. " * 20
    rule = TermRule(id="x", category="own", terms=("zebra crossing",))
    assert held_most(Guardrails([rule]), calm) == 1  # the last letter, which marks may follow
    assert held_most(Guardrails([rule]), "zebra finch " * 20) <= rule.limit() + 2
    classifier = [rule for rule in Guardrails.default().rules if isinstance(rule, ClassifierRule)]
    assert WINDOW < held_most(Guardrails(classifier), calm) <= WINDOW + STRIDE + 2


def test_a_rule_that_cannot_act_holds_nothing_back():
    rule = FunctionRule(id="late", category="own", function=lambda text: 0.9 * ("rain" in text))
    checker = Guardrails([rule], thresholds={"own": None}).stream()
    assert checker.push("It rains.") == "It rains"
    assert checker.finish() == "."
    assert [d.action for d in checker.verdict] == ["flag"]


def test_a_function_over_the_whole_text_holds_it_all():
    checker = Guardrails([FunctionRule(id="all", category="own", function=lambda text: 0.0)]).stream()
    assert checker.push("some text") == ""
    assert checker.held == 9
    assert checker.finish() == "some text"


def test_marks_that_arrive_late_belong_to_their_letter():
    checker = Guardrails([TermRule(id="x", category="own", terms=("bombé",))]).stream()
    shown = checker.push("a bombe")
    with pytest.raises(GuardrailViolation):
        shown += checker.push("\u0301 is here")
    assert shown == "a "


def test_after_a_violation_or_the_end_nothing_more_comes():
    checker = Guardrails([TermRule(id="x", category="own", terms=("bomb",))]).stream()
    with pytest.raises(GuardrailViolation) as first:
        checker.push("a bomb here, and more")
    assert first.value.safe_prefix == checker.released == 0
    later = Guardrails([TermRule(id="x", category="own", terms=("bomb",))]).stream()
    shown = later.push("It rains. ")
    with pytest.raises(GuardrailViolation) as second:
        later.push("A bomb fell.")
    assert second.value.safe_prefix == len(shown) > 0
    with pytest.raises(GuardrailViolation):
        checker.push("more")
    done = Guardrails().stream()
    done.finish()
    with pytest.raises(InvalidArgument, match="finished"):
        done.push("more")


def test_a_snapshot_of_a_value_shows_only_what_was_checked():
    guardrails = Guardrails([TermRule(id="x", category="own", terms=("red fox",))])
    checker = guardrails.stream_value()
    assert checker.push({"title": "A red"}) == {"title": "A "}
    assert checker.push({"title": "A red hen", "days": []})["title"].startswith("A red ")
    shown = checker.push({"title": "A red hen", "days": [{"name": "the re"}]})
    assert shown == {"title": "A red hen", "days": [{"name": "the "}]}
    with pytest.raises(GuardrailViolation) as blocked:
        checker.push({"title": "A red hen", "days": [{"name": "the red fox"}]}, complete=True)
    assert blocked.value.verdict.path == "days[0].name"
    again = guardrails.stream_value()
    assert again.push({"title": "A red"}, complete=True) == {"title": "A red"}
