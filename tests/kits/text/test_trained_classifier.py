"""The trained classifier against scikit-learn's logistic regression, and what it makes of its own certainty."""

import json

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from pippin import metrics
from pippin.core.errors import CorruptedFile, InferenceAtRisk, InvalidArgument, InvalidInput
from pippin.kits.text import TextTasks, TrainedClassifier
from pippin.kits.text.trained_classifier import _fit, _folds

WIDTH = 12
CENTERS = {"cat": 0, "dog": 1, "emu": 2}


class Made:
    """An encoder of texts such as "cat 17": a direction for the word, and noise that the number fixes."""

    name = "made"

    def embed(self, texts):
        rows = []
        for text in texts:
            word, number = text.split()
            noise = torch.randn(WIDTH, generator=torch.Generator().manual_seed(int(number)))
            center = torch.zeros(WIDTH)
            if word in CENTERS:
                center[CENTERS[word]] = 2.0
            rows.append(center + noise if word in CENTERS else 3 * noise)
        return torch.nn.functional.normalize(torch.stack(rows), dim=-1)


def texts(count, first=0):
    return [(f"{word} {first + 10 * i + k}", word) for i in range(count) for k, word in enumerate(CENTERS)]


@pytest.fixture(scope="module")
def trained():
    return TrainedClassifier(texts(40), Made())


def test_the_layer_is_scikit_learns():
    x = Made().embed([text for text, _ in texts(40)]).double()
    y = torch.tensor([CENTERS[word] for _, word in texts(40)])
    ours = _fit(x, y, 3, 0.5).model
    # the bias of a layer has a prior here, so it is one more input there
    both = np.hstack([x.numpy(), np.ones((120, 1))])
    other = LogisticRegression(C=2.0, fit_intercept=False, tol=1e-10, max_iter=1000).fit(both, y.numpy())
    expected = other.predict_proba(both)
    np.testing.assert_allclose(ours(x).softmax(-1).detach().numpy(), expected, atol=1e-5)


def test_its_probabilities_mean_what_they_say(trained):
    found = trained.evaluate(texts(200, 5000))
    plain = trained.posterior.model(Made().embed([text for text, _ in texts(200, 5000)]).double()).softmax(-1)
    assert metrics.accuracy(found.probs, found.labels) > 0.75
    assert metrics.expected_calibration_error(found.probs, found.labels) < 0.07
    assert metrics.log_loss(found.probs, found.labels) < metrics.log_loss(plain, found.labels) + 0.01
    names = [row.name for row in found.report().rows]
    assert "expected calibration error" in names
    assert found.classes == ("cat", "dog", "emu")


def test_what_it_never_saw_looks_foreign(trained):
    own = trained.out_of_distribution_score([text for text, _ in texts(50, 5000)])
    foreign = trained.out_of_distribution_score([f"rock {i}" for i in range(9000, 9150)])
    assert metrics.roc_auc(foreign, own) > 0.6


def test_one_by_one_or_together_is_the_same(trained):
    some = [text for text, _ in texts(2, 7000)]
    together = trained.classify_all(some)
    for text, result in zip(some, together, strict=True):
        assert trained.classify(text).probabilities == pytest.approx(result.probabilities)
        assert sum(result.probabilities.values()) == pytest.approx(1.0)
        assert list(result.probabilities.values()) == sorted(result.probabilities.values(), reverse=True)
    assert trained.classify_all([]) == []


def test_every_example_is_left_out_once_and_never_a_whole_label():
    y = torch.tensor([0] * 7 + [1] * 2 + [2] * 30)
    parts = _folds(y)
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(39))
    for part in parts:
        kept = torch.ones(39, dtype=torch.bool)
        kept[part] = False
        assert y[kept].unique().tolist() == [0, 1, 2]


def test_saved_and_loaded_it_says_the_same(trained, tmp_path):
    trained.save(tmp_path / "kept")
    again = TrainedClassifier.load(tmp_path / "kept", Made())
    assert again.classify("cat 8001").probabilities == pytest.approx(trained.classify("cat 8001").probabilities)
    other = Made()
    other.name = "other"
    with pytest.raises(InvalidArgument, match="encoder 'made', not 'other'"):
        TrainedClassifier.load(tmp_path / "kept", other)
    fields = json.loads((tmp_path / "kept" / "config.json").read_text())
    (tmp_path / "kept" / "config.json").write_text(json.dumps(fields | {"labels": ["cat"]}))
    with pytest.raises(CorruptedFile, match="does not fit its config"):
        TrainedClassifier.load(tmp_path / "kept", Made())


def test_examples_that_are_too_easy_are_named():
    easy = [(f"{word} 1", word) for word in ("cat", "dog") for _ in range(6)]
    with pytest.warns(InferenceAtRisk, match="all 12 examples"):
        assert TrainedClassifier(easy, Made()).temperature == 1.0


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ([], "two labels or more"),
        ([("cat 1", "cat"), ("cat 2", "cat")], "two labels or more"),
        ([("cat 1", "cat"), ("cat 2", "cat"), ("dog 1", "dog")], "'dog' has a single example"),
    ],
)
def test_examples_that_teach_nothing(examples, message):
    with pytest.raises(InvalidArgument, match=message):
        TrainedClassifier(examples, Made())


def test_texts_that_are_none(trained):
    for text in ("", "  ", 5):
        with pytest.raises(InvalidInput):
            trained.classify(text)
    with pytest.raises(InvalidArgument, match="examples need labels"):
        trained.evaluate([("cat 1", "cow")])
    with pytest.raises(InvalidArgument, match="examples need labels"):
        trained.evaluate([])


def test_a_models_classifier_is_measured_the_same_way(tiny):
    classifier = TextTasks(tiny).classifier(["good", "bad"], calibrate="off")
    pairs = [("It rained.", "bad"), ("What a day!", "good"), ("Fog.", "bad")]
    found = classifier.evaluate(pairs)
    for row, (text, label) in enumerate(pairs):
        chances = classifier.classify(text).probabilities
        assert found.probs[row].tolist() == pytest.approx([chances["good"], chances["bad"]], abs=1e-5)
        assert found.classes[int(found.labels[row])] == label
    with pytest.raises(InvalidArgument, match="examples need labels out of good, bad"):
        classifier.evaluate([("Fog.", "gray")])
