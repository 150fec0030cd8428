"""Calibration against closed forms, an independent minimizer and scikit-learn; the error against its formula."""

import numpy as np
import pytest
from hypothesis import given, strategies as st
from scipy.optimize import minimize
from scipy.special import log_softmax, softmax

from pippin.core.errors import CorruptedFile, InvalidArgument
from pippin.kits.text.calibration import LabelCalibration
from pippin.metrics import ReliabilityDiagram

LABELS = ("a", "b", "c")


def sample(seed=0, texts=200, sharpness=3.0):
    """Scores of a model that is too sure of itself by ``sharpness``, with labels drawn from the true probabilities."""
    random = np.random.default_rng(seed)
    true = random.normal(size=(texts, 3)) + np.array([0.5, 0.0, -0.5])
    targets = np.array([random.choice(3, p=softmax(row)) for row in true])
    return sharpness * true, targets


def test_without_anything_it_is_the_softmax():
    scores, _ = sample()
    assert np.allclose(LabelCalibration(LABELS).probabilities(scores), softmax(scores, 1))


def test_an_offset_divides_the_probabilities_as_contextual_calibration_does():
    scores, _ = sample()
    prior = np.array([0.7, 0.2, 0.1])
    corrected = softmax(scores, 1) / prior  # diag(p_cf)^-1 p, equation 1 of arXiv:2102.09690 with b = 0
    found = LabelCalibration(LABELS, tuple(np.log(prior))).probabilities(scores)
    assert np.allclose(found, corrected / corrected.sum(1, keepdims=True))


@given(st.lists(st.lists(st.floats(-300, 0), min_size=3, max_size=3), min_size=1, max_size=5), st.floats(0.01, 50))
def test_probabilities_add_up_to_one_and_keep_the_order(rows, temperature):
    found = LabelCalibration(LABELS, temperature=temperature).probabilities(np.array(rows))
    assert np.allclose(found.sum(1), 1)
    assert all(chances[np.argmax(row)] == chances.max() for chances, row in zip(found, rows, strict=True))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("ridge", [0.5, 5.0])
def test_the_fit_is_the_minimum_that_another_minimizer_finds(bias, ridge):
    scores, targets = sample()
    centered = scores - scores.mean(1, keepdims=True)

    def loss(parameters):
        slope, biases = parameters[0], np.append(parameters[1:], []) if bias else np.zeros(3)
        likelihood = log_softmax(slope * centered + biases, 1)[range(len(targets)), targets].sum()
        return (0.5 * ridge * ((slope - 1) ** 2 + (biases**2).sum()) - likelihood) / len(targets)

    expected = minimize(loss, np.array([1.0, 0, 0, 0] if bias else [1.0]), tol=1e-12)
    fitted = LabelCalibration(LABELS).fit(scores, targets, bias=bias, ridge=ridge)
    found = np.array([1 / fitted.temperature, *(fitted.bias if bias else [])])
    assert np.allclose(found, expected.x, atol=2e-4)
    assert loss(found) <= expected.fun + 1e-12


def test_overconfidence_is_found_and_taken_back():
    scores, targets = sample(texts=3000)
    assert LabelCalibration(LABELS).fit(scores, targets).temperature == pytest.approx(3.0, rel=0.15)
    fresh, answers = sample(seed=1, texts=3000)

    def error(calibration):
        chances = calibration.probabilities(fresh)
        diagram = ReliabilityDiagram.from_confidence(chances.max(1), chances.argmax(1) == answers, 10)
        return diagram.expected_calibration_error

    assert error(LabelCalibration(LABELS).fit(scores, targets)) < 0.25 * error(LabelCalibration(LABELS))


def test_examples_of_one_label_alone_do_not_make_it_certain():
    fitted = LabelCalibration(LABELS).fit(np.zeros((2, 3)) - 1, np.array([0, 0]))
    assert np.isfinite(fitted.probabilities(np.zeros((1, 3)))).all()
    assert 1 / 3 < fitted.probabilities(np.zeros((1, 3)))[0, 0] < 0.9


def test_a_calibration_survives_json():
    calibration = LabelCalibration(LABELS, (-1.0, -2.0, -0.5), 1.7, (0.1, -0.2, 0.0))
    assert LabelCalibration.from_json(calibration.to_json()) == calibration
    for text in ("", "[]", '{"labels": ["a"]}', calibration.to_json().replace("1.7", "-1")):
        with pytest.raises(CorruptedFile, match="not a calibration"):
            LabelCalibration.from_json(text)


def test_what_cannot_be_fitted_is_refused():
    with pytest.raises(InvalidArgument, match="temperature must be"):
        LabelCalibration(LABELS, temperature=0)
    with pytest.raises(InvalidArgument, match="offset must be 3 finite numbers"):
        LabelCalibration(LABELS, offset=(1.0,))
    for scores, targets in ((np.zeros((0, 3)), []), (np.zeros((2, 3)), [0, 3]), (np.full((1, 3), np.nan), [0])):
        with pytest.raises(InvalidArgument):
            LabelCalibration(LABELS).fit(scores, np.array(targets, int))
