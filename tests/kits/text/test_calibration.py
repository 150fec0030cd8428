"""Calibration against closed forms, an independent minimiser and scikit-learn; the error against its formula."""

import numpy as np
import pytest
from hypothesis import given, strategies as st
from scipy.optimize import minimize
from scipy.special import log_softmax, softmax

from pippin.core.errors import CorruptedFile, InvalidArgument
from pippin.kits.text.calibration import Calibration, expected_calibration_error

LABELS = ("a", "b", "c")


def sample(seed=0, texts=200, sharpness=3.0):
    """Scores of a model that is too sure of itself by ``sharpness``, with labels drawn from the true probabilities."""
    random = np.random.default_rng(seed)
    true = random.normal(size=(texts, 3)) + np.array([0.5, 0.0, -0.5])
    targets = np.array([random.choice(3, p=softmax(row)) for row in true])
    return sharpness * true, targets


def test_without_anything_it_is_the_softmax():
    scores, _ = sample()
    assert np.allclose(Calibration(LABELS).probabilities(scores), softmax(scores, 1))


def test_an_offset_divides_the_probabilities_as_contextual_calibration_does():
    scores, _ = sample()
    prior = np.array([0.7, 0.2, 0.1])
    corrected = softmax(scores, 1) / prior  # diag(p_cf)^-1 p, equation 1 of arXiv:2102.09690 with b = 0
    found = Calibration(LABELS, tuple(np.log(prior))).probabilities(scores)
    assert np.allclose(found, corrected / corrected.sum(1, keepdims=True))


@given(st.lists(st.lists(st.floats(-300, 0), min_size=3, max_size=3), min_size=1, max_size=5), st.floats(0.01, 50))
def test_probabilities_add_up_to_one_and_keep_the_order(rows, temperature):
    found = Calibration(LABELS, temperature=temperature).probabilities(np.array(rows))
    assert np.allclose(found.sum(1), 1)
    assert all(chances[np.argmax(row)] == chances.max() for chances, row in zip(found, rows, strict=True))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("ridge", [0.5, 5.0])
def test_the_fit_is_the_minimum_that_another_minimiser_finds(bias, ridge):
    scores, targets = sample()
    centred = scores - scores.mean(1, keepdims=True)

    def loss(parameters):
        slope, biases = parameters[0], np.append(parameters[1:], []) if bias else np.zeros(3)
        likelihood = log_softmax(slope * centred + biases, 1)[range(len(targets)), targets].sum()
        return (0.5 * ridge * ((slope - 1) ** 2 + (biases**2).sum()) - likelihood) / len(targets)

    expected = minimize(loss, np.array([1.0, 0, 0, 0] if bias else [1.0]), tol=1e-12)
    fitted = Calibration(LABELS).fit(scores, targets, bias=bias, ridge=ridge)
    found = np.array([1 / fitted.temperature, *(fitted.bias if bias else [])])
    assert np.allclose(found, expected.x, atol=2e-4)
    assert loss(found) <= expected.fun + 1e-12


def test_overconfidence_is_found_and_taken_back():
    scores, targets = sample(texts=3000)
    assert Calibration(LABELS).fit(scores, targets).temperature == pytest.approx(3.0, rel=0.15)
    fresh, answers = sample(seed=1, texts=3000)

    def error(calibration):
        chances = calibration.probabilities(fresh)
        return expected_calibration_error(chances.max(1), chances.argmax(1) == answers)

    assert error(Calibration(LABELS).fit(scores, targets)) < 0.25 * error(Calibration(LABELS))


def test_examples_of_one_label_alone_do_not_make_it_certain():
    fitted = Calibration(LABELS).fit(np.zeros((2, 3)) - 1, np.array([0, 0]))
    assert np.isfinite(fitted.probabilities(np.zeros((1, 3)))).all()
    assert 1 / 3 < fitted.probabilities(np.zeros((1, 3)))[0, 0] < 0.9


@given(
    st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=40),
    st.integers(1, 20),
)
def test_the_error_is_its_formula(answers, bins):
    total = 0.0
    for b in range(bins):
        low, high = b / bins, (b + 1) / bins
        inside = [(p, hit) for p, hit in answers if low < p <= high or (b == 0 and p == 0)]
        if inside:
            gap = sum(hit for _, hit in inside) / len(inside) - sum(p for p, _ in inside) / len(inside)
            total += len(inside) / len(answers) * abs(gap)
    found = expected_calibration_error([p for p, _ in answers], [hit for _, hit in answers], bins=bins)
    assert found == pytest.approx(total, abs=0.3 if any(p * bins % 1 < 1e-9 for p, _ in answers) else 1e-9)


def test_a_calibration_survives_json():
    calibration = Calibration(LABELS, (-1.0, -2.0, -0.5), 1.7, (0.1, -0.2, 0.0))
    assert Calibration.from_json(calibration.to_json()) == calibration
    for text in ("", "[]", '{"labels": ["a"]}', calibration.to_json().replace("1.7", "-1")):
        with pytest.raises(CorruptedFile, match="not a calibration"):
            Calibration.from_json(text)


def test_what_cannot_be_fitted_is_refused():
    with pytest.raises(InvalidArgument, match="temperature must be"):
        Calibration(LABELS, temperature=0)
    with pytest.raises(InvalidArgument, match="offset must be 3 finite numbers"):
        Calibration(LABELS, offset=(1.0,))
    for scores, targets in ((np.zeros((0, 3)), []), (np.zeros((2, 3)), [0, 3]), (np.full((1, 3), np.nan), [0])):
        with pytest.raises(InvalidArgument):
            Calibration(LABELS).fit(scores, np.array(targets, int))
    for confidences, hits in (([], []), ([0.5], []), ([1.5], [True])):
        with pytest.raises(InvalidArgument):
            expected_calibration_error(confidences, hits)
