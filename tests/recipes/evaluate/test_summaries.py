"""The measurement of summaries and short answers."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from pippin.data.synthetic import documents
from pippin.recipes.evaluate import summaries
from pippin.recipes.evaluate.summaries import SummaryCounts, facts_in, is_right
from pippin.recipes.train.task_data import ExampleSplit
from pippin.recipes.train.task_data.fact_sentences import phrase_file, plain_text

SPLIT = ExampleSplit(kinds=("invoice", "receipt"))


def test_tasks_are_a_function_of_the_seed():
    found = summaries.tasks(6, seed=2, split=SPLIT)
    assert found == summaries.tasks(6, seed=2, split=SPLIT)
    assert found != summaries.tasks(6, seed=3, split=SPLIT)
    assert {question.document.kind for question, _ in found} <= {"invoice", "receipt"}


def test_the_known_answers_are_right_and_those_of_others_are_not():
    found = [question for question, _ in summaries.tasks(60, seed=0, split=ExampleSplit())]
    asked = [question for question in found if question.path is not None]
    assert all(is_right(question, question.answer) for question in found)
    others = [is_right(a, b.answer) for a, b in pairwise(asked)]
    assert sum(others) < 0.2 * len(others)
    assert sum(is_right(question, question.document.text) for question in found) < 0.1 * len(found)
    assert not any(is_right(question, "") for question in found)


@pytest.mark.parametrize("language", documents.LANGUAGES)
def test_every_phrase_for_what_a_text_does_not_say_is_understood(language):
    question = next(question for question, _ in summaries.tasks(40, seed=1, split=SPLIT) if question.path is None)
    for phrase in phrase_file("questions")["absent"][language]:
        assert is_right(question, plain_text(phrase, random.Random(0)))
    assert not is_right(question, "12.05.2024")
    assert not is_right(
        question, "Der Betrag ist nicht klein, und bezahlt wurde er von einer Firma, die man kennt. " * 2
    )
    assert is_right(replace(question, path="total", answer="12,50 €"), "Es sind 12,50 €.")
    assert not is_right(replace(question, path="total", answer="12,50 €"), "Es sind 112,50 €.")


def test_a_good_summary_has_facts_and_no_foreign_figure():
    counts = SummaryCounts()
    for _, task in summaries.tasks(30, seed=5, split=ExampleSplit()):
        counts.add(task.document, task.answer, task.count)
    assert counts.stated / counts.summaries > 1.5
    assert counts.unsupported <= 0.03 * counts.figures  # a month's name may be a number in another language's sentence
    assert counts.length_right >= 0.5 * counts.summaries  # short documents have fewer facts


def test_unsupported_figures_are_counted():
    document = documents.sample("invoice", language="en", seed=0)
    counts = SummaryCounts()
    counts.add(document, "It costs 987654321 and 123456789. Nothing else.", 2)
    assert (counts.figures, counts.unsupported, counts.length_right) == (2, 2, 1)
    assert facts_in(document, "") == set()
    assert "total" in facts_in(document, f"Total: {document.values['total'].text}")


def test_a_model_is_measured(default_model_path):
    config = summaries.Config(model=str(default_model_path), items=2, seed=1, kinds=("receipt",))
    result = summaries.run(config, show_progress=False)
    summary = result.summary()
    assert summary["documents"] == 2
    assert summary["questions"] + summary["absent"] == 2
    assert summary["failed"] == 0
    assert len(result.report().rows) == 10
