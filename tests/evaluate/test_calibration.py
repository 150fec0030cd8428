"""Predictions out of files: the figures are those of scikit-learn and of the scores themselves."""

import numpy as np
import pytest
from sklearn.datasets import load_diabetes, load_digits
from sklearn.linear_model import BayesianRidge, LogisticRegression
from sklearn.metrics import brier_score_loss, log_loss

from pippin.core.errors import InvalidInput
from pippin.evaluate.calibration import ClassificationPredictions, RegressionPredictions, read_predictions


@pytest.fixture
def digits(tmp_path):
    """What a real classifier says of real digits, as a file."""
    x, y = load_digits(n_class=4, return_X_y=True)
    probs = LogisticRegression(max_iter=2000, C=1e-4).fit(x[:200], y[:200]).predict_proba(x[200:])
    lines = [",".join([*(f"{p:.12f}" for p in row), str(label)]) for row, label in zip(probs, y[200:], strict=True)]
    path = tmp_path / "digits.csv"
    path.write_text("\ufeff0,1,2,3,label\n" + "\n".join(lines), encoding="utf-8")
    return path, probs, y[200:]


def test_classes_of_a_real_classifier(digits):
    path, probs, labels = digits
    found = read_predictions(path)
    assert isinstance(found, ClassificationPredictions)
    figures = {row.name: row.value for row in found.report().rows}
    assert figures["negative log-likelihood"] == pytest.approx(log_loss(labels, probs), abs=1e-6)
    assert figures["Brier score"] == pytest.approx(brier_score_loss(labels, probs, scale_by_half=False), abs=1e-6)
    assert figures["accuracy"] == pytest.approx((probs.argmax(1) == labels).mean())
    assert figures["selective error at 80 % coverage"] <= figures["error at full coverage"]


def test_a_number_of_a_real_regression(tmp_path):
    x, y = load_diabetes(return_X_y=True)
    mean, sd = BayesianRidge().fit(x[:300], y[:300]).predict(x[300:], return_std=True)
    rows = "\n".join(f"{m};{s};{t}" for m, s, t in zip(mean, sd, y[300:], strict=True))
    (tmp_path / "number.csv").write_text("mean;sd;progress\n" + rows)
    found = read_predictions(tmp_path / "number.csv", label="progress")
    assert isinstance(found, RegressionPredictions)
    figures = {row.name: row.value for row in found.report().rows}
    assert figures["root mean square error"] == pytest.approx(np.sqrt(np.mean((mean - y[300:]) ** 2)))
    assert figures["share inside the 90% interval"] == pytest.approx(np.mean(np.abs(mean - y[300:]) < 1.6448536 * sd))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,b,label\n0.5,0.5,c\n", "label 'c' has no column"),
        ("a,b,label\n0.5,0.6,a\n", "line 2: the probabilities add up to 1.1"),
        ("a,b,label\n1.5,-0.5,a\n", "below 0"),
        ("a,b,label\n0.5,x,a\n", "'x' is not a finite number"),
        ("a,label\n1,a\n", "1 classes"),
        ("a,b\n1,0\n", "no column 'label'"),
        ("mean,sd,label\n1,0,1\n", "standard deviation is not above 0"),
        ("mean,sd,label\n1,nan,1\n", "not a finite number"),
        ("", "empty"),
    ],
)
def test_what_is_no_prediction_is_refused_by_its_line(tmp_path, text, words):
    (tmp_path / "file.csv").write_text(text)
    with pytest.raises(InvalidInput, match=words):
        read_predictions(tmp_path / "file.csv")


def test_plots(digits, tmp_path):
    found = read_predictions(digits[0])
    found.plot(tmp_path / "classes.png")
    assert (tmp_path / "classes.png").read_bytes().startswith(b"\x89PNG")
