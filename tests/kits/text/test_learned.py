"""The learnt classifier against scikit-learn's logistic regression, and what it makes of its own certainty."""

import json

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from pippin.bayes import metrics
from pippin.core.errors import CorruptedFile, InferenceAtRisk, InvalidArgument, InvalidInput
from pippin.kits.text import LearnedClassifier, TextTasks
from pippin.kits.text.learned import _fit, _folds

WIDTH = 12
CENTRES = {"cat": 0, "dog": 1, "emu": 2}


class Made:
    """An encoder of texts such as "cat 17": a direction for the word, and noise that the number fixes."""

    name = "made"

    def embed(self, texts):
        rows = []
        for text in texts:
            word, number = text.split()
            noise = torch.randn(WIDTH, generator=torch.Generator().manual_seed(int(number)))
            centre = torch.zeros(WIDTH)
            if word in CENTRES:
                centre[CENTRES[word]] = 2.0
            rows.append(centre + noise if word in CENTRES else 3 * noise)
        return torch.nn.functional.normalize(torch.stack(rows), dim=-1)


def texts(count, first=0):
    return [(f"{word} {first + 10 * i + k}", word) for i in range(count) for k, word in enumerate(CENTRES)]


@pytest.fixture(scope="module")
def learned():
    return LearnedClassifier(texts(40), Made())


def test_the_layer_is_scikit_learns():
    x = Made().embed([text for text, _ in texts(40)]).double()
    y = torch.tensor([CENTRES[word] for _, word in texts(40)])
    ours = _fit(x, y, 3, 0.5).model
    # the bias of a layer has a prior here, so it is one more input there
    both = np.hstack([x.numpy(), np.ones((120, 1))])
    other = LogisticRegression(C=2.0, fit_intercept=False, tol=1e-10, max_iter=1000).fit(both, y.numpy())
    expected = other.predict_proba(both)
    np.testing.assert_allclose(ours(x).softmax(-1).detach().numpy(), expected, atol=1e-5)


def test_its_probabilities_mean_what_they_say(learned):
    found = learned.measure(texts(200, 5000))
    plain = learned.posterior.model(Made().embed([text for text, _ in texts(200, 5000)]).double()).softmax(-1)
    assert metrics.accuracy(found.probs, found.labels) > 0.75
    assert metrics.ece(found.probs, found.labels) < 0.07
    assert metrics.nll(found.probs, found.labels) < metrics.nll(plain, found.labels) + 0.01
    names = [row.name for row in found.report().rows]
    assert "expected calibration error" in names
    assert found.classes == ("cat", "dog", "emu")


def test_what_it_never_saw_looks_foreign(learned):
    own = learned.foreignness([text for text, _ in texts(50, 5000)])
    foreign = learned.foreignness([f"rock {i}" for i in range(9000, 9150)])
    assert metrics.auroc(foreign, own) > 0.6


def test_one_by_one_or_together_is_the_same(learned):
    some = [text for text, _ in texts(2, 7000)]
    together = learned.classify_all(some)
    for text, result in zip(some, together, strict=True):
        assert learned.classify(text).probabilities == pytest.approx(result.probabilities)
        assert sum(result.probabilities.values()) == pytest.approx(1.0)
        assert list(result.probabilities.values()) == sorted(result.probabilities.values(), reverse=True)
    assert learned.classify_all([]) == []


def test_every_example_is_left_out_once_and_never_a_whole_label():
    y = torch.tensor([0] * 7 + [1] * 2 + [2] * 30)
    parts = _folds(y)
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(39))
    for part in parts:
        kept = torch.ones(39, dtype=torch.bool)
        kept[part] = False
        assert y[kept].unique().tolist() == [0, 1, 2]


def test_saved_and_loaded_it_says_the_same(learned, tmp_path):
    learned.save(tmp_path / "kept")
    again = LearnedClassifier.load(tmp_path / "kept", Made())
    assert again.classify("cat 8001").probabilities == pytest.approx(learned.classify("cat 8001").probabilities)
    other = Made()
    other.name = "other"
    with pytest.raises(InvalidArgument, match="encoder 'made', not 'other'"):
        LearnedClassifier.load(tmp_path / "kept", other)
    fields = json.loads((tmp_path / "kept" / "learned.json").read_text())
    (tmp_path / "kept" / "learned.json").write_text(json.dumps(fields | {"labels": ["cat"]}))
    with pytest.raises(CorruptedFile, match="no learnt classifier"):
        LearnedClassifier.load(tmp_path / "kept", Made())


def test_examples_that_are_too_easy_are_named():
    easy = [(f"{word} 1", word) for word in ("cat", "dog") for _ in range(6)]
    with pytest.warns(InferenceAtRisk, match="all 12 examples"):
        assert LearnedClassifier(easy, Made()).temperature == 1.0


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
        LearnedClassifier(examples, Made())


def test_texts_that_are_none(learned):
    for text in ("", "  ", 5):
        with pytest.raises(InvalidInput):
            learned.classify(text)
    with pytest.raises(InvalidArgument, match="examples need labels"):
        learned.measure([("cat 1", "cow")])
    with pytest.raises(InvalidArgument, match="examples need labels"):
        learned.measure([])


def test_a_models_classifier_is_measured_the_same_way(tiny):
    classifier = TextTasks(tiny).classifier(["good", "bad"], calibrate="off")
    pairs = [("It rained.", "bad"), ("What a day!", "good"), ("Fog.", "bad")]
    found = classifier.measure(pairs)
    for row, (text, label) in enumerate(pairs):
        chances = classifier.classify(text).probabilities
        assert found.probs[row].tolist() == pytest.approx([chances["good"], chances["bad"]], abs=1e-5)
        assert found.classes[int(found.labels[row])] == label
    with pytest.raises(InvalidArgument, match="examples need labels out of good, bad"):
        classifier.measure([("Fog.", "grey")])
