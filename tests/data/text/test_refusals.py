"""Rules for refusals: every packaged example and counterexample, places, errors."""

import pytest

from pippin.core.errors import UnsupportedLanguage
from pippin.data.text import refusals

CASES = [(locale, text) for locale in refusals.locales() for text in refusals.data()[locale]["examples"]]
OTHERS = [(locale, text) for locale in refusals.locales() for text in refusals.data()[locale]["counterexamples"]]


@pytest.mark.parametrize(("locale", "text"), CASES)
def test_a_refusal_is_found_with_its_sentence(locale, text):
    assert refusals.find(text, locale) == text
    assert refusals.find(text + "\nMore.", f"{locale}-XX") == text


@pytest.mark.parametrize(("locale", "text"), OTHERS)
def test_what_only_sounds_like_one_is_not(locale, text):
    assert refusals.find(text, locale) is None


def test_only_the_beginning_of_an_answer_can_refuse():
    helpful = "Boil the rice in twice as much water. " * 10
    assert refusals.find(helpful + "I cannot help with the sauce.") is None
    assert refusals.find("Hm. I cannot help with that. Sorry.") == "I cannot help with that."


def test_a_language_without_rules_is_an_error():
    with pytest.raises(UnsupportedLanguage, match="'it'") as error:
        refusals.find("Non posso.", "it")
    assert error.value.language == "it"
