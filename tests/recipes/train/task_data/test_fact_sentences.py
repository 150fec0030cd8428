"""Sentences that state facts: every kind has some in every language, and they say no more than the document."""

import random
import re

import pytest

from pippin.data.synthetic import documents
from pippin.data.synthetic.documents import kind_files
from pippin.data.synthetic.documents.grammar import draws, slots, variants
from pippin.recipes.train.task_data import summaries
from pippin.recipes.train.task_data.fact_sentences import FactWriter, phrase_file, plain_text

SUMMARIES = phrase_file("summaries")
FIRST_PERSON = {
    "en": r"\b(I|my|me|we|our|us|you|your)\b",
    "de": r"\b([Ii]ch|[Mm]eine?[mnrs]?|mir|mich|[Ww]ir|[Uu]ns(ere?[mnrs]?)?|Sie|Ihre?[mnrs]?|Ihnen)\b",
    "fr": r"\b([Jj]e|[Jj]'|[Mm]on|[Mm]es|[Nn]ous|[Nn]otre|(?<!-)[Vv]ous|[Vv]otre|[Vv]euillez)\b",
    "es": r"\b([Mm]i|[Mm]is|[Tt]engo|[Ss]oy|[Pp]uedo|[Nn]uestr[ao]s?)\b",
    "it": r"\b([Mm]io|[Mm]ia|[Mm]iei|[Mm]ie|[Hh]o|[Vv]ostr[aoi]|[Nn]ostr[aoi])\b",
}

FURTHER = [kind for kind in documents.KINDS if f"{kind} more" in SUMMARIES]


def _writers(kind, language, count, *, written_in=None):
    rng = random.Random(f"{kind} {language}")
    sampled = (documents.sample(kind, language=written_in or language, seed=rng) for _ in range(count))
    return [FactWriter(document, language, rng) for document in sampled]


def _paths(kind):
    fields = kind_files.load(kind).fields
    return {path for form in fields for path in (
        [f"{form.name}.{each.name}" for each in form.fields] if form.kind == "record" else [form.name])}  # fmt: skip


def _blank(writer, text):
    """A sentence with an ellipsis in place of every value."""
    for value in sorted(filter(None, map(writer.value, writer.forms)), key=len, reverse=True):
        own = r"(?:\.(?!$))?" if value.endswith(".") else ""  # a dot of the value, not that of the sentence
        text = re.sub(rf"(?<!\w){re.escape(value.rstrip('.'))}(?!\w){own}", "…", text, flags=re.IGNORECASE)
    return text


@pytest.mark.parametrize("kind", documents.KINDS)
def test_every_kind_has_summaries_in_every_language(kind):
    for language in documents.LANGUAGES:
        phrases = SUMMARIES[kind][language]
        assert len(set(phrases)) == len(phrases)
        assert len({frozenset(slots(phrase)) for phrase in phrases}) >= 3
        written = [writer.filled(phrase) for writer in _writers(kind, language, 12) for phrase in phrases]
        assert len({each.paths for each in written if each is not None}) >= 3


@pytest.mark.parametrize("name", SUMMARIES)
def test_phrases_of_summaries_name_facts_of_their_kind_alone(name):
    kind = name.removesuffix(" more")
    for language in documents.LANGUAGES:
        for phrase in SUMMARIES[name][language]:
            assert slots(phrase) <= _paths(kind), phrase
            assert slots(phrase)
            assert not draws(phrase)


@pytest.mark.parametrize("name", [name for name in SUMMARIES if name.endswith(" more")])
def test_every_language_has_a_sentence_for_the_same_facts(name):
    for language in documents.LANGUAGES:
        assert [slots(phrase) for phrase in SUMMARIES[name][language]] == [
            slots(each) for each in SUMMARIES[name]["en"]
        ]


@pytest.mark.parametrize("kind", FURTHER)
def test_no_person_speaks_in_summaries_of_kinds_with_further_sentences(kind):
    for language in documents.LANGUAGES:
        for writer in _writers(kind, language, 6):
            tasks = [summaries.sample_summary(writer.document, writer.rng) for _ in range(3)]
            answers = [task.answer for task in tasks if task and task.language == language]
            labels = [label for form in writer.forms.values() for label in form.labels[language]]
            for text in [_blank(writer, text) for text in answers]:
                for sentence in re.split(r"(?<=[^.]\.) ", text):
                    labeled = any(sentence.startswith(label) for phrase in labels for label in variants(phrase))
                    assert labeled or not re.search(FIRST_PERSON[language], sentence), text


@pytest.mark.parametrize("kind", FURTHER)
def test_sentences_are_punctuated_as_their_language_has_it(kind):
    for language in documents.LANGUAGES:
        for writer in _writers(kind, language, 6):
            for sentence in filter(None, [*map(writer.filled, SUMMARIES[kind][language]), *writer.statements()]):
                text = _blank(writer, sentence.text)
                assert re.search(r"[^.:;,\s]\.$", text), text
                assert not re.search(r"\s[.,;]|[.,;:]{2}|\(\s|\s\)|  ", text), text
                assert (" :" in text) == (":" in text and language == "fr"), text


def test_a_flag_is_said_as_the_document_says_it():
    """Either with its own words, or as yes or no: a neighbor who was injured is not what "Injuries: yes" says."""
    flags = 0
    for kind in documents.KINDS:
        for language in documents.LANGUAGES:
            for writer in _writers(kind, language, 2):
                for path in (path for path, form in writer.forms.items() if form.kind == "flag"):
                    sentence = writer.labeled(path)
                    if sentence is None:
                        continue
                    flags += 1
                    answer = "yes" if writer.facts[path].value else "no"
                    said = plain_text(phrase_file("questions")[answer][language][0], random.Random(0)).lower()
                    own = sentence.text.removesuffix(".").casefold() in writer.text.casefold()
                    assert own or sentence.text.endswith(f": {said}."), sentence.text
    assert flags > 50


def test_a_choice_is_translated_only_where_one_phrase_stands_for_it():
    values = set()
    for writer in _writers("lab_report", "de", 40, written_in="en"):
        if "specimen" in writer.facts:
            value = writer.value("specimen")
            values.add((writer.facts["specimen"].value, value))
    assert ("swab", None) in values  # of the throat or of the nose: the document says which, the choice does not
    assert any(value for _, value in values)
