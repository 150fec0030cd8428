"""The sets of labels: parallel in all languages, with enough different texts for each label."""

import random

import pytest

from pippin.core.errors import InvalidArgument, InvalidInput
from pippin.data.synthetic import label_sets
from pippin.data.synthetic.documents.grammar import variants


@pytest.mark.parametrize("language", label_sets.LANGUAGES)
def test_sets_are_parallel_and_have_many_texts(language):
    found, english = label_sets.label_sets(language), label_sets.label_sets("en")
    assert len(found) >= 25
    assert list(found) == list(english)
    for name, labels in found.items():
        assert len(labels.labels) == len(english[name].labels) >= 2
        names = [each for label in labels.labels for each in label.names]
        assert len(names) == len(set(names)), (name, names)
        texts = [{text for phrase in label.phrases for text in variants(phrase, 200)} for label in labels.labels]
        assert min(map(len, texts)) >= 20, name
        assert sum(map(len, texts)) == len(set().union(*texts)), f"{name}: a text has two labels"
        assert english[name].about
        assert all(label.description for label in english[name].labels)


def test_texts_are_drawn_from_the_phrases():
    label = label_sets.label_sets("en")["animal"].labels[0]
    texts = {label.text(random.Random(seed)) for seed in range(60)}
    assert texts <= set(variants(label.phrases[0], 100))
    assert len(texts) > 15


@pytest.mark.parametrize("text", ["a line before any set", "[set] about\nno label yet", "[set] x\n= a, b\n{slot} here"])
def test_a_file_of_another_form_is_refused(text):
    with pytest.raises(InvalidInput, match="line"):
        label_sets.read(text)


def test_an_unknown_language_is_refused():
    with pytest.raises(InvalidArgument, match="'xx' is none of en"):
        label_sets.label_sets("xx")
