"""Forms without a model: rules find what is labeled, and shuffled answers are still answers."""

import random

import pytest

from pippin.claims.worlds import forms
from pippin.core.errors import PippinError
from pippin.evaluate.extraction import ExtractionScore, score
from pippin.recipes.train.task_data import ExampleSplit
from pippin.recipes.train.task_data.extraction import FormItem, items, sample_task
from pippin.session.extraction import Form, SourceText
from pippin.session.extraction.answers import write

TEXT = "Invoice\nNumber: A-17\nDate: 3 May 2024\nTotal due: 12.50 EUR\nSkills: patience, good English and trust\n"


@pytest.mark.parametrize(
    ("name", "schema", "expected"),
    [
        ("number", {"type": "string"}, "A-17"),
        ("Total", {"type": "number"}, 12.5),
        ("date", {"type": "string", "format": "date"}, "2024-05-03"),
        ("issued", {"type": "string", "format": "date"}, "2024-05-03"),  # the only one
        ("skills", {"type": "array", "items": {"type": "string"}}, ["patience", "good English", "trust"]),
        ("customer", {"type": "string"}, None),
        ("paid", {"type": "boolean"}, None),
        ("kind", {"enum": ["receipt", "invoice"]}, "invoice"),
        ("due", {"anyOf": [{"type": "number"}, {"type": "null"}]}, 12.5),
    ],
)
def test_rules_find_what_is_labeled(name, schema, expected):
    item = FormItem(TEXT, "en", {"type": "object", "properties": {name: schema}}, {}, "invoice", "lines")
    assert forms.by_rules(item).get(name) == expected


def test_rules_do_better_than_nothing_and_worse_than_the_facts():
    total = ExtractionScore()
    for item in items(40, seed=0, split=ExampleSplit(languages=("en",))):
        total += score(item.expected, forms.by_rules(item), item.text)
    assert 0.05 < total.accuracy < 0.7


def test_shuffled_answers_fit_their_forms_and_are_others():
    rng, written, moved = random.Random(1), 0, 0
    for _ in range(60):
        task = sample_task(rng)
        other = forms.shuffled(task, rng)
        assert (other.document, other.schema) == (task.document, task.schema)
        try:
            form = Form(task.schema, SourceText(task.document.text, language=task.document.language))
            text, right = write(form, other.answers), write(form, task.answers)
        except PippinError:
            continue
        written += 1
        moved += text != right
        assert form.grammar.allows(text)
    assert written > 30
    assert moved > 0.7 * written
