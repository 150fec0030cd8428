"""Scores of class probabilities: accuracy, log loss, Brier score, entropy.

Notable here:
- everything is computed in float64 on the CPU
- probabilities and labels are checked in `checked_probs`, whose errors name the first wrong row
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pippin.core.errors import InvalidInput

MIN_PROBABILITY = 1e-12
"""Probabilities are clamped to this in a logarithm, so that a probability of 0 for the label gives a finite mean."""


def accuracy(probs: Float[Tensor, "n classes"], labels: Int[Tensor, " n"]) -> float:
    """Share of rows whose most probable class is the label; in 0..1.

    Raises:
        InvalidInput: see `checked_probs`.
    """
    probs, labels = checked_probs(probs, labels)
    return float((probs.argmax(-1) == labels).double().mean())


def log_loss(probs: Float[Tensor, "n classes"], labels: Int[Tensor, " n"]) -> float:
    """Mean negative log-likelihood of the labels, in nats; probabilities below 1e-12 count as 1e-12.

    Raises:
        InvalidInput: see `checked_probs`.

    >>> round(log_loss(torch.tensor([[0.5, 0.5], [0.25, 0.75]]), torch.tensor([0, 1])), 4)
    0.4904
    """
    probs, labels = checked_probs(probs, labels)
    return float(-probs.gather(-1, labels[:, None]).clamp(min=MIN_PROBABILITY).log().mean())


def brier_score(probs: Float[Tensor, "n classes"], labels: Int[Tensor, " n"]) -> float:
    """Mean squared distance of the probabilities from the one-hot label, summed over the classes; in 0..2.

    For two classes this is twice the value of `sklearn.metrics.brier_score_loss`.

    Raises:
        InvalidInput: see `checked_probs`.
    """
    probs, labels = checked_probs(probs, labels)
    one_hot = torch.nn.functional.one_hot(labels, probs.shape[1])
    return float((probs - one_hot).square().sum(-1).mean())


def entropy(probs: Float[Tensor, "*shape classes"]) -> Float[Tensor, "*shape"]:
    """Entropy of each distribution, in nats; 0 log 0 counts as 0."""
    terms: Tensor = torch.special.entr(probs)
    return terms.sum(-1)


def checked_probs(probs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Check probabilities and labels, and convert them to float64 and int64 on the CPU.

    Raises:
        InvalidInput: no rows, fewer than two classes, a row that does not sum to 1, or labels that are not integers, of
            another number than the rows, or out of range.
    """
    if probs.ndim != 2 or not len(probs) or probs.shape[1] < 2:
        raise InvalidInput(f"probs must be (n, classes) with n >= 1 and classes >= 2, got {tuple(probs.shape)}")
    if labels.shape != probs.shape[:1]:
        raise InvalidInput(f"labels of shape {tuple(labels.shape)} for {len(probs)} rows of probabilities")
    if labels.is_floating_point() or labels.is_complex():
        raise InvalidInput(f"labels must be whole numbers, got {labels.dtype}")
    probs, labels = probs.detach().double().cpu(), labels.detach().long().cpu()
    wrong = ~((probs.sum(-1) - 1).abs() <= 1e-3) | ~(probs >= -1e-6).all(-1)
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise InvalidInput(
            f"row {row} is not a distribution (its sum is {float(probs[row].sum()):.4g}); give probabilities, not "
            "logits: logits.softmax(-1)"
        )
    if int(labels.min()) < 0 or int(labels.max()) >= probs.shape[1]:
        raise InvalidInput(f"labels from {int(labels.min())} to {int(labels.max())} for {probs.shape[1]} classes")
    return probs, labels
