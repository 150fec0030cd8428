"""The measurement of labels: sets that no adapter saw, the same for every model."""

import numpy as np
import pytest

from pippin.core.errors import InvalidArgument
from pippin.data.text.language import language_of
from pippin.recipes.evaluate import classification
from pippin.recipes.train.task_data.classification import LabeledText, is_held_out
from pippin.session.providers.local import LocalModel


def test_texts_are_a_function_of_the_seed_and_of_sets_that_are_held_out():
    found = classification.texts(20, seed=2)
    assert found == classification.texts(20, seed=2)
    assert found != classification.texts(20, seed=3)
    assert all(is_held_out(text.name) for text in found)
    assert all(text.label in text.labels for text in found)


def test_languages_are_those_that_are_asked_for():
    found = classification.texts(40, seed=1, languages=("de",))
    written = [text.text for text in found if text.name not in ("kind", "language")]
    assert {language_of(text) for text in written if len(text) > 80} <= {"de", None}
    with pytest.raises(InvalidArgument, match="klingon"):
        classification.run(classification.Config(model="x", languages=("klingon",)))


def test_probabilities_are_those_of_whole_answers(tiny):
    provider = LocalModel(tiny)
    text = LabeledText("mood", "What a day", ("good", "good enough", "bad"), "good")
    found = classification.probabilities(provider, text, None)
    assert found.shape == (3,)
    assert found.sum() == pytest.approx(1)
    assert np.allclose(found, classification.probabilities(provider, text, None))


def test_a_model_is_measured(default_model_path):
    result = classification.run(
        classification.Config(model=str(default_model_path), items=3, seed=1), show_progress=False
    )
    summary = result.summary()
    assert summary["texts"] == 3
    assert summary["right"] == pytest.approx(sum(result.right) / 3)
    assert summary["log_loss"] > 0
    assert len(result.report().rows) == 4


def test_the_first_label_is_what_guessing_scores():
    found = classification.texts(300, seed=4)
    share = np.mean([text.labels[0] == text.label for text in found])
    expected = np.mean([1 / len(text.labels) for text in found])
    assert share == pytest.approx(expected, abs=0.08)
