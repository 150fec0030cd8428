"""Temperatures against scipy's minimizer, known worlds and laws."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from jaxtyping import TypeCheckError
from scipy import optimize, special

from pippin.bayes.prediction import Prediction
from pippin.bayes.predictors.map_network import MAPNetwork
from pippin.bayes.predictors.temperature_scaling import (
    BOUNDS,
    TemperatureScaling,
    apply_correction,
    fit_temperature,
    fit_variance_scale,
)
from pippin.core.errors import InferenceAtRisk, InvalidInput, NotFitted


def world(seed, n=300, classes=4, sharper=3.0):
    """Logits that are too sure by a known factor, and labels drawn from the honest ones."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, classes, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
    return sharper * logits, labels


def loss(logits, labels, temperature):
    z = logits.numpy() / temperature
    return -(special.log_softmax(z, 1)[np.arange(len(z)), labels.numpy()]).mean()


@pytest.mark.parametrize("seed", range(5))
def test_the_temperature_is_scipys_minimum(seed):
    logits, labels = world(seed)
    best = optimize.minimize_scalar(lambda t: loss(logits, labels, math.exp(t)), bounds=(-4, 4), method="bounded")
    assert fit_temperature(logits, labels) == pytest.approx(math.exp(best.x), rel=1e-3)


def test_a_known_overconfidence_is_found():
    assert fit_temperature(*world(0, n=200_000)) == pytest.approx(3.0, rel=0.02)


@settings(max_examples=30, deadline=None)
@given(st.floats(0.2, 5.0), st.integers(0, 1000))
def test_sharper_logits_have_a_temperature_that_is_higher_by_the_same_factor(factor, seed):
    logits, labels = world(seed, n=100, sharper=1.0)
    shifted = factor * logits + torch.arange(100.0)[:, None]  # a constant of each row says nothing
    assert fit_temperature(shifted, labels) == pytest.approx(factor * fit_temperature(logits, labels), rel=1e-6)


def test_where_every_label_is_the_likeliest_the_bound_is_given():
    logits, _ = world(1)
    assert fit_temperature(logits, logits.argmax(1)) == pytest.approx(BOUNDS[0])
    assert fit_temperature(logits, logits.argmin(1)) == pytest.approx(BOUNDS[1])


def test_the_variance_scale_is_scipys_minimum():
    generator = torch.Generator().manual_seed(0)
    mean, y = (torch.randn(50, 2, generator=generator, dtype=torch.float64) for _ in range(2))
    variance = torch.rand(50, 2, generator=generator, dtype=torch.float64) + 0.1

    def density(log_scale):
        v = variance * math.exp(log_scale)
        return float(((y - mean).square() / v + v.log()).sum())

    best = optimize.minimize_scalar(density, bounds=(-5, 8), method="bounded", options={"xatol": 1e-9})
    assert fit_variance_scale(mean, variance, y) == pytest.approx(math.exp(best.x), rel=1e-5)


def test_scaling_a_network_divides_its_logits_and_keeps_every_answer():
    model = torch.nn.Linear(4, 4, dtype=torch.float64).eval()
    torch.nn.init.eye_(model.weight), torch.nn.init.zeros_(model.bias)
    logits, labels = world(2)
    scaled = TemperatureScaling(MAPNetwork(model))
    with pytest.raises(NotFitted, match="call fit"):
        scaled(logits)
    batches = [(logits[:100], labels[:100]), (logits[100:], labels[100:])]
    assert scaled.fit(batches).value == pytest.approx(fit_temperature(logits, labels), rel=1e-6)
    probs = scaled(logits).probs
    torch.testing.assert_close(probs, (logits / scaled.value).softmax(-1))
    assert torch.equal(probs.argmax(-1), logits.argmax(-1))


def test_a_regressions_variances_are_multiplied():
    prediction = Prediction(torch.zeros(3, 1), torch.ones(3, 1, 1), None, noise=0.5)
    scaled = apply_correction(prediction, 2.0)
    torch.testing.assert_close(scaled.variance, torch.full((3, 1), 3.0))
    targets = torch.tensor([1.0, -2.0, 3.0])
    made = TemperatureScaling(lambda x: prediction).fit([(torch.zeros(3, 1), targets)])
    assert made.value == pytest.approx((1 + 4 + 9) / 3 / 1.5)
    torch.testing.assert_close(made(None).variance, torch.full((3, 1), 14 / 3))


BAD = [
    (torch.zeros(0, 2), torch.zeros(0).long(), "scores"),
    (torch.zeros(3, 2), torch.zeros(2).long(), "n labels"),
    (torch.zeros(3, 1), torch.zeros(3).long(), "one class"),
    (torch.tensor([[0.0, torch.nan]]), torch.tensor([0]), "row 0 are not finite"),
    (torch.zeros(2, 2), torch.tensor([0, 2]), "labels from 0 to 2"),
    (torch.zeros(2, 2), torch.tensor([1, 1]), "every label is 1"),
]


@pytest.mark.parametrize(("logits", "labels", "message"), BAD)
def test_what_cannot_be_fitted(logits, labels, message):
    with pytest.raises((InvalidInput, TypeCheckError)) as caught:
        fit_temperature(logits, labels)
    assert isinstance(caught.value, TypeCheckError) or message in str(caught.value)


def test_labels_are_whole_numbers():
    with pytest.raises((InvalidInput, TypeCheckError)):
        fit_temperature(torch.zeros(2, 2), torch.tensor([0.0, 1.0]))


def test_variances_that_cannot_be_scaled():
    one = torch.ones(2, 1)
    for mean, variance, y, message in (
        (one, one, torch.ones(3, 1), "one shape"),
        (one, one, torch.tensor([[torch.nan], [1.0]]), "finite"),
        (one, 0 * one, one, "above 0"),
        (one, one, one, "every residual is 0"),
    ):
        with pytest.raises((InvalidInput, TypeCheckError)) as caught:
            fit_variance_scale(mean, variance, y)
        assert isinstance(caught.value, TypeCheckError) or message in str(caught.value)


def test_independent_labels_have_no_temperature():
    prediction = Prediction(torch.zeros(2, 2), None, torch.full((2, 2), 0.9))
    with pytest.raises(InvalidInput, match="independent labels"):
        TemperatureScaling(lambda x: prediction).fit([(torch.zeros(2, 1), torch.tensor([0, 1]))])


def test_an_empty_loader_is_refused():
    with pytest.raises(InvalidInput, match="no batches"):
        TemperatureScaling(lambda x: None).fit([])


def test_labels_that_are_all_right_give_no_doubtless_predictions():
    probs = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.7, 0.3]])
    scaled = TemperatureScaling(lambda x: Prediction(probs.log(), probs=probs))
    with pytest.warns(InferenceAtRisk, match="no temperature is best and it stays 1"):
        scaled.fit([(torch.zeros(3, 1), torch.tensor([0, 1, 0]))])
    torch.testing.assert_close(scaled(None).probs, probs)
    scaled.fit([(torch.zeros(3, 1), torch.tensor([0, 1, 1]))])
    assert scaled.value > 1
