r"""Priors of a simulator's parameters, and the map between their support and unbounded space.

Notable here:
- a prior is any object with bounds, `sample` and `log_prob`; each bound may be infinite
- `Support` maps bounded parameters by a logit and half-bounded ones by a logarithm, and standardizes them; the density
  of a flow in that space never has mass outside the bounds, and the log-determinant of the map is exact
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from pippin.bayes.batches import refuse_rows
from pippin.core.errors import InvalidArgument, InvalidInput

EDGE = 1e-6
"""Margin at the bounds of a parameter, as a fraction of its range, since the logit is infinite at the bounds."""


@runtime_checkable
class SimulatorPrior(Protocol):
    """A distribution of k parameters.

    Attributes:
        low: lower bounds [k]; minus infinity for none.
        high: upper bounds [k]; infinity for none.
    """

    low: Tensor
    high: Tensor

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """``n`` samples [n, k], float32."""

    def log_prob(self, theta: Tensor) -> Tensor:
        """Log density [n] of ``theta`` [n, k], in nats; minus infinity outside the bounds."""


class BoxPrior:
    """Independent parameters, each uniform between two bounds.

    Args:
        low: lower bounds, one for each parameter.
        high: upper bounds.

    Raises:
        InvalidArgument: bounds of different lengths, no bounds, bounds that are not finite, or a lower bound that is
            not below the upper one.

    >>> BoxPrior([0.0, -1.0], [2.0, 1.0]).log_prob(torch.tensor([[1.0, 0.0], [3.0, 0.0]])).tolist()
    [-1.3862943649291992, -inf]
    """

    def __init__(self, low: Sequence[float] | Tensor, high: Sequence[float] | Tensor) -> None:
        self.low, self.high = _vector(low, "low"), _vector(high, "high")
        if len(self.low) != len(self.high):
            raise InvalidArgument(
                f"{len(self.low)} lower bounds and {len(self.high)} upper bounds; give both for each parameter"
            )
        for index, (low_, high_) in enumerate(zip(self.low.tolist(), self.high.tolist(), strict=True)):
            if not low_ < high_:
                raise InvalidArgument(f"parameter {index} lies between {low_} and {high_}; low must be below high")

    def __repr__(self) -> str:
        return f"BoxPrior({self.low.tolist()}, {self.high.tolist()})"

    def sample(self, n: int, generator: torch.Generator | None = None) -> Float[Tensor, "n k"]:
        """``n`` independent samples."""
        return self.low + (self.high - self.low) * torch.rand(n, len(self.low), generator=generator)

    def log_prob(self, theta: Float[Tensor, "n k"]) -> Float[Tensor, " n"]:
        """Log density: minus the log volume inside the box, minus infinity outside."""
        low, high = self.low.to(theta), self.high.to(theta)
        inside = ((theta >= low) & (theta <= high)).all(-1)
        return torch.where(inside, -(high - low).log().sum(), -torch.inf)


class GaussianPrior:
    """Independent normal parameters.

    Args:
        mean: mean of each parameter.
        sd: standard deviation of each parameter, above 0.

    Raises:
        InvalidArgument: lists of different lengths, empty or not finite, or a standard deviation that is not above 0.

    >>> round(GaussianPrior([0.0], [1.0]).log_prob(torch.zeros(1, 1)).item(), 4)
    -0.9189
    """

    def __init__(self, mean: Sequence[float] | Tensor, sd: Sequence[float] | Tensor) -> None:
        self.mean, self.sd = _vector(mean, "mean"), _vector(sd, "sd")
        if len(self.mean) != len(self.sd):
            raise InvalidArgument(
                f"{len(self.mean)} means and {len(self.sd)} standard deviations; give both for each parameter"
            )
        if not (self.sd > 0).all():
            raise InvalidArgument(f"standard deviations must be above 0, got {self.sd.tolist()}")
        self.low, self.high = torch.full_like(self.mean, -math.inf), torch.full_like(self.mean, math.inf)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Float[Tensor, "n k"]:
        """``n`` independent samples."""
        return self.mean + self.sd * torch.randn(n, len(self.mean), generator=generator)

    def log_prob(self, theta: Float[Tensor, "n k"]) -> Float[Tensor, " n"]:
        """Sum of the normal log densities."""
        z = (theta - self.mean.to(theta)) / self.sd.to(theta)
        return (-0.5 * z.square() - self.sd.to(theta).log() - 0.5 * math.log(2 * math.pi)).sum(-1)


class Support(nn.Module):
    r"""The map from parameters to unbounded space: logit or logarithm for bounded parameters, then standardization.

    $u = (s(\theta) - m) / \sigma$ with a function s for each parameter, and m, $\sigma$ estimated from samples of the
    prior, so that u is approximately standardized.

    Args:
        prior: the prior; its bounds are stored, and 4,096 samples estimate m and $\sigma$.
        seed: seed of the samples.

    Raises:
        InvalidArgument: ``prior`` is not a `SimulatorPrior`.
        InvalidInput: its samples are not [n, k], not finite, or outside its own bounds.
    """

    low: Tensor
    high: Tensor
    mean: Tensor
    sd: Tensor

    def __init__(self, prior: SimulatorPrior, seed: int = 0) -> None:
        super().__init__()
        if not isinstance(prior, SimulatorPrior):
            raise InvalidArgument(f"a prior has low, high, sample and log_prob; {type(prior).__name__} does not")
        self.register_buffer("low", prior.low.float().clone())
        self.register_buffer("high", prior.high.float().clone())
        count = len(self.low)
        self.register_buffer("mean", torch.zeros(count))
        self.register_buffer("sd", torch.ones(count))
        samples = prior.sample(4096, torch.Generator().manual_seed(seed))
        self.check(samples)
        free, _ = self.free(samples)
        self.mean.copy_(free.mean(0))
        self.sd.copy_(free.std(0).clamp_min(1e-8))

    def __len__(self) -> int:
        return len(self.low)

    def check_same(self, tensors: Mapping[str, Tensor]) -> None:
        """Check that this is the support that a saved posterior was trained with.

        Raises:
            InvalidArgument: other bounds, or another location or scale.
            KeyError: the tensors have no support.
        """
        for name, own in (("low", self.low), ("high", self.high), ("mean", self.mean), ("sd", self.sd)):
            saved = tensors[f"support.{name}"]
            # bounds are exact; mean and sd are estimates from samples
            tolerance = 0.1 * self.sd if name in ("mean", "sd") else torch.zeros_like(own)
            if saved.shape != own.shape or not bool(((saved == own) | ((saved - own).abs() <= tolerance)).all()):
                raise InvalidArgument(f"it was trained with the {name} {saved.tolist()}, the prior has {own.tolist()}")

    def inside(self, theta: Float[Tensor, "n k"]) -> Bool[Tensor, " n"]:
        """A mask of the rows within all bounds; the bounds are included."""
        return ((theta >= self.low) & (theta <= self.high)).all(-1)

    def check(self, theta: Tensor) -> None:
        """Check parameters.

        Raises:
            InvalidInput: another number of parameters, or values that are not finite or outside the bounds; the message
                names the first such rows.
        """
        if theta.ndim != 2 or theta.shape[1] != len(self):
            raise InvalidInput(
                f"theta is {list(theta.shape)}; the prior has {len(self)} parameters, so give [n, {len(self)}]"
            )
        refuse_rows(~theta.isfinite().all(-1), "theta is not finite")
        refuse_rows(~self.inside(theta.to(self.low)), "theta lies outside of the prior's bounds", theta)

    def free(self, theta: Float[Tensor, "n k"]) -> tuple[Float[Tensor, "n k"], Float[Tensor, " n"]]:
        """Map parameters to unbounded space; returns u and the log-determinant of du/dtheta."""
        low, high = self.low, self.high
        has_low, has_high = low.isfinite(), high.isfinite()
        width = torch.where(has_low & has_high, high - low, torch.ones_like(low))
        p = ((theta - torch.where(has_low, low, 0.0)) / width).clamp(EDGE, 1 - EDGE)
        above_low = (theta - torch.where(has_low, low, 0.0)).clamp_min(EDGE)
        below_high = (torch.where(has_high, high, 0.0) - theta).clamp_min(EDGE)
        logit, logit_log_det = p.log() - (-p).log1p(), -width.log() - p.log() - (-p).log1p()
        one_sided = torch.where(has_low, above_low.log(), torch.where(has_high, -below_high.log(), theta))
        u = torch.where(has_low & has_high, logit, one_sided)
        log_det = torch.where(has_low, -above_low.log(), torch.where(has_high, -below_high.log(), 0.0))
        log_det = torch.where(has_low & has_high, logit_log_det, log_det)
        return (u - self.mean) / self.sd, (log_det - self.sd.log()).sum(-1)

    def bound(self, u: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
        """Map points in unbounded space to parameters: the inverse of `free`."""
        low, high = self.low, self.high
        has_low, has_high = low.isfinite(), high.isfinite()
        s = u * self.sd + self.mean
        lower, upper = torch.where(has_low, low, 0.0), torch.where(has_high, high, 0.0)
        two_sided = torch.minimum(lower + (upper - lower) * s.sigmoid(), high)  # rounding may exceed the bound
        one_sided = torch.where(has_low, lower + s.exp(), torch.where(has_high, upper - (-s).exp(), s))
        return torch.where(has_low & has_high, two_sided, one_sided)


def _vector(values: Sequence[float] | Tensor, name: str) -> Tensor:
    """Finite numbers as a float32 vector, one for each parameter."""
    vector = torch.as_tensor(values, dtype=torch.float32)
    if vector.ndim != 1 or not len(vector) or not vector.isfinite().all():
        raise InvalidArgument(f"{name} must be a list of finite numbers, one for each parameter, got {values}")
    return vector
