"""Questions in plain words: every kind has some in every language, and none of them asks for two fields."""

import random
import re

import pytest

from pippin.data.synthetic import documents
from pippin.data.synthetic.documents import kind_files
from pippin.data.synthetic.documents.grammar import variants
from pippin.recipes.train.task_data import ExampleSplit, summaries
from pippin.recipes.train.task_data.fact_sentences import phrase_file
from pippin.recipes.train.task_data.questions import sample_question

ABOUT = {name.removeprefix("about "): asked for name, asked in phrase_file("questions").items() if "about " in name}
WHOLLY = (
    "insurance_claim",
    "job_application",
    "prescription",
    "product_specification",
    "real_estate_listing",
    "resume",
)


def _fields(kind):
    """The path of every field that can be asked for, and whether each document of the kind has it."""
    fields = {}
    for form in kind_files.load(kind).fields:
        within = [(f"{form.name}.{each.name}", each) for each in form.fields]
        fields |= {path: each.required for path, each in (within if form.kind == "record" else [(form.name, form)])}
    return fields


def _asked(kind, language):
    """The questions in plain words about the fields of a kind, by path."""
    found = {path: ABOUT.get(f"{kind}.{path}") or ABOUT.get(path) for path in _fields(kind)}
    return {
        path: [text for each in asked[language] for text in variants(each)] for path, asked in found.items() if asked
    }


@pytest.mark.parametrize("kind", documents.KINDS)
@pytest.mark.parametrize("language", documents.LANGUAGES)
def test_every_kind_has_questions_in_every_language(kind, language):
    asked = _asked(kind, language)
    assert all(len(set(texts)) >= 2 for texts in asked.values())
    assert {path for path, required in _fields(kind).items() if required} <= set(asked)
    assert len(asked) >= (len(_fields(kind)) if kind in WHOLLY else 5)


@pytest.mark.parametrize("kind", documents.KINDS)
@pytest.mark.parametrize("language", documents.LANGUAGES)
def test_a_question_asks_for_one_field_of_its_kind(kind, language):
    asked = [text for texts in _asked(kind, language).values() for text in texts]
    assert len(set(asked)) == len(asked), sorted(text for text in asked if asked.count(text) > 1)


def test_questions_are_about_fields_that_there_are():
    paths = {kind: set(_fields(kind)) for kind in documents.KINDS}
    known = {f"{kind}.{path}" for kind in paths for path in paths[kind]} | set().union(*paths.values())
    assert set(ABOUT) <= known


@pytest.mark.parametrize("language", documents.LANGUAGES)
def test_questions_are_punctuated_as_their_language_has_it(language):
    for asked in ABOUT.values():
        for text in (text for each in asked[language] for text in variants(each)):
            assert text.endswith(" ?" if language == "fr" else "?")
            assert (text[-2] == " ") == (language == "fr")
            assert text.startswith("¿") == (language == "es")
            assert text.lstrip("¿")[0].isupper()


def test_the_questions_of_a_kind_go_before_those_for_all_kinds():
    """Nobody is wanted where a person has a position, and nobody invites where a server is the host."""
    rng = random.Random(0)
    for kind, path in (("contact_card", "position"), ("incident_report", "host")):
        found = [sample_question(documents.sample(kind, language="en", seed=rng), rng) for _ in range(300)]
        prompts = [task.prompt for task in found if task and task.path == path and task.language == "en"]
        general = [text for each in ABOUT[path]["en"] for text in variants(each)]
        own = [text for each in ABOUT[f"{kind}.{path}"]["en"] for text in variants(each)]
        assert not any(text in prompt for prompt in prompts for text in general)
        assert any(text in prompt for prompt in prompts for text in own)


@pytest.mark.parametrize(
    ("kind", "language", "right", "wrong"),
    [
        ("shipping_notification", "en", "when (on )?the courier .*\\.", "the (from|by) when"),
        ("product_specification", "en", '"in the box"', "(Which|the) in the box"),
        ("product_specification", "de", "-Nr\\.(?!\\.)", "\\.\\."),
    ],
)
def test_questions_are_sentences_where_what_they_ask_for_is_no_noun(kind, language, right, wrong):
    rng = random.Random(1)
    split = ExampleSplit(kinds=(kind,), languages=(language,))
    found = (summaries.sample_document(rng, split) for _ in range(300))
    tasks = [task for document in found if (task := sample_question(document, rng)) and task.language == language]
    prompts = [task.prompt.replace(task.document.text, "…") for task in tasks]
    assert any(re.search(right, prompt) for prompt in prompts)
    assert not [prompt for prompt in prompts if re.search(wrong, prompt)]
