"""Rewriting: what is protected comes back byte for byte, whatever the model says."""

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from pippin.core.errors import InvalidArgument
from pippin.engine.grammar.constraint import Grammar
from pippin.kits.text import TextTasks, protected_spans
from pippin.kits.text.prompts import TONES
from pippin.kits.text.rewrite import grammar

TEXT = """Hello there, you all.

```
keep   this
```

See https://x.org/a?b=1 and run `ls  -l` today.

> as you wrote

Mail me@x.org or call “the  boss” soon."""
PARTS = st.lists(
    st.sampled_from(
        ["Some words here.", "`a  b`", "“q  r”", "me@x.org", "https://x.org/a", "```\nx  y\n```", "> z  z", "{n}"]
    ),
    min_size=1,
    max_size=6,
)


@given(PARTS, st.sampled_from([" ", "\n", "\n\n"]), st.text(alphabet="ab `“”>@.\n{}", max_size=30), st.booleans())
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_protected_ranges_come_back_byte_for_byte(scripted, parts, between, answer, repeats):
    text = between.join(parts)
    tasks = TextTasks(scripted(lambda prompt: prompt.removeprefix("Rewrite: ") + answer if repeats else answer))
    done = tasks.rewrite(text, tone="friendly", protect=["code", "quotes", "links", "emails", "placeholders"]).text
    at = 0
    for one in protected_spans(text, ["code", "quotes", "links", "emails", "placeholders"]):
        at = done.index(one.of(text), at) + len(one.of(text))


def test_blocks_are_never_shown_and_the_rest_is_rewritten(scripted):
    provider = scripted(lambda prompt: prompt.removeprefix("Rewrite: ").upper().replace("HTTPS://X.ORG/A?B=1", "?"))
    done = TextTasks(provider).rewrite(TEXT, tone="formal")
    assert provider.prompts[0] == "Rewrite: Hello there, you all."
    assert not any("keep" in prompt or "as you wrote" in prompt for prompt in provider.prompts)
    assert done.text == TEXT.replace("Hello there, you all.", "HELLO THERE, YOU ALL.")
    assert [one.of(TEXT).split()[0] for one in done.unchanged] == [
        "See",
        "Mail",
    ]  # their links and quotes did not survive


def test_a_grammar_holds_what_is_protected(tiny):
    done = TextTasks(tiny).rewrite("Run `ls -l` now please.", tone="concise")
    assert "`ls -l`" in done.text


@pytest.mark.parametrize("literals", [["a/b"], ["`x`", "“y”"], ["(.*)", "a\\n", "[1]"]])
def test_the_grammar_allows_exactly_the_texts_with_the_literals(literals):
    held = Grammar.lark(grammar(literals))
    assert held.allows("Say " + " and ".join(literals) + " now.")
    assert held.allows("".join(literals))
    assert not held.allows("Say nothing.")
    if len(literals) > 1:
        assert not held.allows("Say " + " and ".join(reversed(literals)) + " now.")


def test_an_answer_out_of_the_worked_examples_is_asked_for_again_without_them(scripted):
    leaked = TONES["concise"][0][1]
    answers = iter([leaked, "We wait."])
    provider = scripted(lambda prompt: next(answers))
    assert TextTasks(provider).rewrite("We are waiting here.", tone="concise").text == "We wait."
    assert [len(turn.transcript.entries) for turn in provider.turns] == [6, 2]


def test_tones_and_lengths_reach_the_model(scripted):
    for tone in TONES:
        provider = scripted(lambda prompt: "Fine.")
        TextTasks(provider).rewrite("It is fine.", tone=tone, length="longer")
        told = provider.turns[0].transcript.instructions[0].text
        assert tone in told
        assert "Make it longer" in told


def test_names_from_nowhere_are_reported(scripted):
    done = TextTasks(scripted(lambda prompt: "Then Bob paid 7 euros.")).rewrite("Then Ann paid here.", tone="casual")
    assert set(done.unverified) == {"Bob", "7"}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"tone": "rude"}, "tone must be 'friendly', .* got 'rude'"),
        ({}, "needs a tone"),
        ({"tone": "formal", "protect": ["names"]}, r"protect\[0\] must be 'code'"),
    ],
)
def test_what_cannot_be_asked(scripted, more, message):
    with pytest.raises(InvalidArgument, match=message):
        TextTasks(scripted(str)).rewrite("It is fine.", **more)
