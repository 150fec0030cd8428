"""Shuffled answers are still answers, and others."""

import random

from pippin.claims.worlds import forms
from pippin.core.errors import PippinError
from pippin.recipes.train.task_data.extraction import sample_task
from pippin.session.extraction import Form, SourceText
from pippin.session.extraction.answers import write


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
