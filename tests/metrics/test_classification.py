"""Scores of class probabilities against scikit-learn."""

import numpy as np
import pytest
import torch
from jaxtyping import TypeCheckError
from sklearn import metrics as oracle

from pippin import metrics
from pippin.core.errors import InvalidInput


def predictions(seed=0, n=400, classes=4):
    generator = torch.Generator().manual_seed(seed)
    probs = (2 * torch.randn(n, classes, generator=generator, dtype=torch.float64)).softmax(-1)
    return probs, torch.randint(classes, (n,), generator=generator)


def test_proper_scores_are_scikit_learns():
    probs, labels = predictions()
    assert metrics.log_loss(probs, labels) == pytest.approx(oracle.log_loss(labels, probs.numpy()), abs=1e-6)
    assert metrics.accuracy(probs, labels) == oracle.accuracy_score(labels, probs.argmax(-1))
    two, which = predictions(classes=2)
    assert metrics.brier_score(two, which) == pytest.approx(2 * oracle.brier_score_loss(which, two[:, 1]), abs=1e-6)


def test_a_certainty_that_is_wrong_stays_finite():
    assert metrics.log_loss(torch.tensor([[1.0, 0.0]]), torch.tensor([1])) == pytest.approx(-np.log(1e-12))


def test_entropy_of_certainty_and_of_ignorance():
    assert metrics.entropy(torch.tensor([[1.0, 0.0], [0.5, 0.5]])).tolist() == pytest.approx([0, np.log(2)])


def test_what_is_no_prediction_is_refused_by_its_row():
    probs, labels = predictions(n=5)
    with pytest.raises(InvalidInput, match=r"row 3 is not a distribution .*softmax"):
        metrics.log_loss(torch.cat([probs[:3], 3 * probs[3:]]), labels)
    with pytest.raises(InvalidInput, match="row 0"):
        metrics.log_loss(probs * torch.nan, labels)
    with pytest.raises(InvalidInput, match="labels from 4 to 4"):
        metrics.accuracy(probs, torch.full((5,), 4))
    with pytest.raises((InvalidInput, TypeCheckError), match=r"whole numbers|Type-check"):
        metrics.brier_score(probs, labels.float())
    with pytest.raises((InvalidInput, TypeCheckError), match=r"5 rows|Type-check"):
        metrics.brier_score(probs, labels[:4])
    with pytest.raises((InvalidInput, TypeCheckError), match=r"n >= 1|Type-check"):
        metrics.accuracy(probs[:0], labels[:0])
