"""Calibration against a loop over the bins."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from tests.metrics.test_classification import predictions

from pippin import metrics
from pippin.core.errors import InvalidArgument, InvalidInput


def test_calibration_error_is_that_of_a_loop():
    probs, labels = predictions(n=900)
    confidence, answer = (part.numpy() for part in probs.max(-1))
    right = answer == labels.numpy()
    expected = 0.0
    for low in range(10):
        inside = (confidence > low / 10) & (confidence <= (low + 1) / 10)
        if inside.any():
            expected += inside.mean() * abs(confidence[inside].mean() - right[inside].mean())
    found = metrics.reliability_diagram(probs, labels, num_bins=10)
    assert found.expected_calibration_error == pytest.approx(expected, abs=1e-9)
    assert int(found.count.sum()) == 900
    error = metrics.expected_calibration_error(probs, labels, num_bins=10)
    assert error == found.expected_calibration_error <= found.max_calibration_error
    answers = metrics.ReliabilityDiagram.from_confidence(confidence, right.tolist(), 10)
    assert answers.expected_calibration_error == error


@given(
    st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=40),
    st.integers(1, 20),
)
def test_the_error_of_answers_is_its_formula(answers, bins):
    total = 0.0
    for b in range(bins):
        low, high = b / bins, (b + 1) / bins
        inside = [(p, hit) for p, hit in answers if low < p <= high or (b == 0 and p == 0)]
        if inside:
            gap = sum(hit for _, hit in inside) / len(inside) - sum(p for p, _ in inside) / len(inside)
            total += len(inside) / len(answers) * abs(gap)
    diagram = metrics.ReliabilityDiagram.from_confidence([p for p, _ in answers], [hit for _, hit in answers], bins)
    found = diagram.expected_calibration_error
    assert found == pytest.approx(total, abs=0.3 if any(p * bins % 1 < 1e-9 for p, _ in answers) else 1e-9)


def test_a_confidence_on_a_border_belongs_to_the_lower_bin():
    found = metrics.ReliabilityDiagram.from_confidence([0.0, 0.5, 1.0], [True, False, True], 2)
    assert found.count.tolist() == [2, 1]


def test_a_calibrated_forecaster_has_an_error_near_the_stated_bias():
    generator = torch.Generator().manual_seed(3)
    p = 0.5 + 0.5 * torch.rand(20_000, generator=generator)
    right = torch.rand(20_000, generator=generator) < p
    error = metrics.expected_calibration_error(torch.stack([p, 1 - p], -1), (~right).long())
    assert error < 2 * np.sqrt(15 / 20_000) / 3


@pytest.mark.parametrize(
    ("confidence", "correct", "message"),
    [([], [], "at least 1"), ([0.5], [True, False], "same length"), ([0.2, 1.5], [True, False], "confidence 1 is 1.5")],
)
def test_what_is_no_confidence_is_refused(confidence, correct, message):
    with pytest.raises(InvalidInput, match=message):
        metrics.ReliabilityDiagram.from_confidence(confidence, correct)


def test_a_diagram_needs_a_bin():
    with pytest.raises(InvalidArgument, match="num_bins must be at least 1, got 0"):
        metrics.expected_calibration_error(*predictions(n=5), num_bins=0)


def test_a_plot_is_an_image(tmp_path):
    metrics.reliability_diagram(*predictions()).plot(tmp_path / "reliability.png")
    assert (tmp_path / "reliability.png").read_bytes().startswith(b"\x89PNG")
