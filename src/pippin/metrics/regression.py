"""Metrics of Gaussian predictions: log-likelihood, CRPS and coverage of intervals; computed in float64."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from pippin.core.checks import OpenFraction, checked
from pippin.core.errors import InvalidInput


def gaussian_nll(mean: Float[Tensor, "*shape"], variance: Float[Tensor, "*shape"], y: Float[Tensor, "*shape"]) -> float:
    """Mean negative log density of ``y`` under independent Gaussians, in nats for each element.

    Args:
        mean: predicted means.
        variance: predicted variances of the observations, noise included; above 0.
        y: observations.

    Raises:
        InvalidInput: different shapes, no elements, values that are not finite, or a variance that is not above 0.
    """
    mean, variance, y = _moments(mean, variance, y)
    return float(0.5 * ((y - mean).square() / variance + variance.log() + math.log(2 * math.pi)).mean())


def gaussian_crps(
    mean: Float[Tensor, "*shape"], variance: Float[Tensor, "*shape"], y: Float[Tensor, "*shape"]
) -> float:
    """Mean continuous ranked probability score (CRPS) of Gaussians, in the units of ``y``; lower is better.

    Raises:
        InvalidInput: see `gaussian_nll`.

    Source: Gneiting and Raftery (2007), equation 21.
    """
    mean, variance, y = _moments(mean, variance, y)
    sd = variance.sqrt()
    z = (y - mean) / sd
    density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
    return float((sd * (z * (2 * torch.special.ndtr(z) - 1) + 2 * density - 1 / math.sqrt(math.pi))).mean())


@checked
def interval_coverage(
    mean: Float[Tensor, "*shape"],
    variance: Float[Tensor, "*shape"],
    y: Float[Tensor, "*shape"],
    level: OpenFraction = 0.95,
) -> float:
    """Share of ``y`` inside the central Gaussian interval of probability ``level``.

    Raises:
        InvalidInput: see `gaussian_nll`.
    """
    mean, variance, y = _moments(mean, variance, y)
    half = torch.special.ndtri(torch.tensor((1 + level) / 2, dtype=torch.float64))
    return float(((y - mean).abs() <= half * variance.sqrt()).double().mean())


def _moments(mean: Tensor, variance: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if not mean.shape == variance.shape == y.shape or not mean.numel():
        raise InvalidInput(
            f"mean, variance and y must have the same shape and at least one element, got {tuple(mean.shape)}, "
            f"{tuple(variance.shape)} and {tuple(y.shape)}"
        )
    mean, variance, y = (part.detach().double().cpu() for part in (mean, variance, y))
    if not bool((variance > 0).all()) or not bool(torch.stack([mean, variance, y]).isfinite().all()):
        raise InvalidInput("mean and y must be finite, variances finite and above 0; at least one value is not")
    return mean, variance, y
