"""The word list of a vocabulary: near words against brute force, and the real model's vocabulary."""

import pytest
from hypothesis import given, strategies as st

from pippin.kits.text.edits import edit_distance
from pippin.kits.text.english_words import FUNCTION_WORDS
from pippin.kits.text.lexicon import Lexicon

WORDS = ["receive", "recipe", "lamp", "lamps", "London", "stop", "try", "use", "happy"]


@pytest.fixture(scope="module")
def lexicon():
    return Lexicon(WORDS)


@given(st.sampled_from(WORDS), st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["", "x", "e"])), max_size=1))
def test_a_word_with_one_mistake_is_found_again(word, mistakes):
    lexicon, wrong = Lexicon(WORDS), word.lower()
    for at, letter in mistakes:
        wrong = wrong[:at] + letter + wrong[at + 1 :]
    if wrong != word and len(wrong) > 1:
        assert word in lexicon.nearest(wrong)


@given(st.text("aelmprst", min_size=2, max_size=6), st.integers(1, 2))
def test_what_is_found_is_near_and_sorted(word, most):
    lexicon = Lexicon(WORDS)
    found = lexicon.nearest(word, max_distance=most)
    gaps = [edit_distance(word, other.lower()) for other in found]
    assert gaps == sorted(gaps)
    assert all(gap <= most for gap in gaps)
    everything = {
        other for other in (*WORDS, *FUNCTION_WORDS) if 0 < edit_distance(word, other.lower()) <= 1 and len(other) > 1
    }
    assert everything <= set(found)


@pytest.mark.parametrize(
    ("word", "familiarity"),
    [
        ("lamp", "known"),
        ("Lamp", "known"),
        ("london", "known"),
        ("lamp's", "known"),
        ("don't", "known"),
        ("stopped", "derived"),
        ("tries", "derived"),
        ("using", "derived"),
        ("unhappy", "derived"),
        ("lapm", "unknown"),
    ],
)
def test_familiarity(lexicon, word, familiarity):
    assert lexicon.familiarity(word) == familiarity


def test_names_are_words_that_are_never_small(lexicon):
    assert lexicon.is_name("london")
    assert lexicon.is_name("monday")
    assert not lexicon.is_name("lamp")
    assert not lexicon.is_name("xyz")


def test_the_vocabulary_of_the_model_is_a_word_list(model):
    lexicon = Lexicon.of(model.tokenizer, model.config.vocab_size)
    assert len(lexicon.ranks) > 20_000
    assert [lexicon.familiarity(word) for word in ("because", "harbour", "Paris")] == ["known"] * 3
    assert [lexicon.familiarity(word) for word in ("becuase", "definately", "recieve")] == ["unknown"] * 3
    assert lexicon.nearest("definately")[0] == "definitely"
    assert lexicon.ranks["people"] < lexicon.ranks["magnetic"]
