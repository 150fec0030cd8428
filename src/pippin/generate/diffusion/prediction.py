r"""Prediction types of diffusion networks, and their conversion to data, noise, score and velocity.

Notable here:
- each prediction type determines both data and noise of a noised sample, which is all that samplers use
- the velocity is $u = dx_t/dt = \dot a\,x_0 + \dot s\,\epsilon$, which points from data to noise
- targets are linear in data and noise, so the optimal network predicts a conditional mean
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from pippin.core.checks import checked
from pippin.core.errors import InvalidArgument
from pippin.generate.diffusion.schedules import NoiseSchedule

PredictionType = Literal["x0", "eps", "v", "flow"]
"""What a network predicts: data, noise, v = a eps - s x0, or the velocity da x0 + ds eps of flow matching."""


class Estimate:
    r"""Estimated data and noise of noised samples.

    Data and noise are stored as linear combinations of two tensors, usually the network's input and output, so that a
    sampler's step, which is linear in both, is one combination of these, whatever the prediction type.

    Args:
        x0: the data.
        eps: the noise, of unit variance.

    >>> estimate = Estimate(torch.tensor([2.0]), torch.tensor([-1.0]))
    >>> estimate.mix(0.5, 3.0), estimate.score(0.5)
    (tensor([-2.]), tensor([2.]))
    """

    __slots__ = ("_data", "_first", "_noise", "_second")

    def __init__(self, x0: Tensor, eps: Tensor) -> None:
        self._first, self._second = x0, eps
        self._data: tuple[Any, Any] = (1.0, 0.0)
        self._noise: tuple[Any, Any] = (0.0, 1.0)

    @classmethod
    def of(cls, first: Tensor, second: Tensor, data: tuple[Any, Any], noise: tuple[Any, Any]) -> Estimate:
        """An estimate from two tensors: ``data`` and ``noise`` are the factors on (first, second) of either."""
        estimate = cls(first, second)
        estimate._data, estimate._noise = data, noise
        return estimate

    @property
    def x0(self) -> Tensor:
        """The data."""
        return self.mix(1.0, 0.0)

    @property
    def eps(self) -> Tensor:
        """The noise, of unit variance."""
        return self.mix(0.0, 1.0)

    @property
    def dtype(self) -> torch.dtype:
        """Data type of data and noise."""
        return torch.promote_types(self._first.dtype, self._second.dtype)

    def __iter__(self) -> Iterator[Tensor]:
        """Iterate over data and noise."""
        return iter((self.x0, self.eps))

    def mix(self, x0: float, eps: float) -> Tensor:
        """``x0`` times the data plus ``eps`` times the noise; may share memory, so do not write to it."""
        a, b = (x0 * self._data[k] + eps * self._noise[k] for k in (0, 1))  # factors on the two tensors
        if isinstance(a, Tensor) or isinstance(b, Tensor):
            mixed: Tensor = a * self._first + b * self._second
            return mixed
        if not a or not b:
            factor, part = (b, self._second) if not a else (a, self._first)
            return part if abs(factor - 1) < 1e-12 else factor * part
        return torch.add(self._first if a == 1 else a * self._first, self._second, alpha=b)

    def score(self, s: float | Tensor) -> Tensor:
        """The score, the gradient of the log density of noised samples: -eps / s."""
        return -self.eps / s


@checked
def check_prediction(kind: PredictionType, schedule: NoiseSchedule) -> None:
    """Refuse a prediction type that is not defined for the schedule.

    Raises:
        InvalidArgument: an unknown type, or "v" where a² + s² is not 1.
    """
    if kind == "v" and not schedule.preserves_variance:
        raise InvalidArgument(f"prediction 'v' needs a² + s² = 1, which {schedule.kind} has not; choose 'flow' or 'x0'")


def estimate(
    output: Float[Tensor, "n ..."],
    x: Float[Tensor, "n ..."],
    t: float | Float[Tensor, n],
    kind: PredictionType,
    schedule: NoiseSchedule,
) -> Estimate:
    r"""Convert a network's output to estimates of data and noise.

    With a, s at time t: $x_0 = (x - s\epsilon)/a$; $\epsilon = (x - a x_0)/s$; $v = a\epsilon - s x_0$;
    $u = \dot a x_0 + \dot s\epsilon$.

    Args:
        output: output of the network.
        x: the noised samples that it read.
        t: time of all samples, or of each.
        kind: prediction type of the output.
        schedule: noise schedule of the samples.

    Raises:
        InvalidArgument: an output of another shape than x, "v" with a schedule that does not preserve variance, "eps"
            where there is no signal (a = 0), or "x0" where there is no noise (s = 0).

    Source: Ho et al. 2020, arXiv:2006.11239 (eps); Salimans and Ho 2022, arXiv:2202.00512, appendix D (v).
    """
    check_prediction(kind, schedule)
    if output.shape != x.shape:
        raise InvalidArgument(
            f"the network's output has shape {tuple(output.shape)}, its samples {tuple(x.shape)}; they must be equal"
        )
    a, s = _factors(t, x, schedule)
    output = output.to(x.dtype)
    if kind == "v":
        return Estimate.of(x, output, (a, -s), (s, a))
    if kind == "flow":
        if schedule.kind == "flow":
            return Estimate.of(x, output, (1.0, -s), (1.0, a))
        da, ds = _derivatives(t, x, schedule)
        det = a * ds - da * s  # of the linear system x = a x0 + s eps, u = da x0 + ds eps
        return Estimate.of(x, output, (ds / det, -s / det), (-da / det, a / det))
    if kind == "eps":
        _refuse_zero(
            a, f"prediction 'eps' at time {t}, where no signal is left; lower max_time, or choose 'v' or 'flow'"
        )
        return Estimate.of(x, output, (1 / a, -s / a), (0.0, 1.0))
    _refuse_zero(s, f"prediction 'x0' at time {t}, where there is no noise; end the grid's last step there instead")
    return Estimate.of(x, output, (0.0, 1.0), (1 / s, -a / s))


def target(
    x0: Float[Tensor, "n ..."],
    eps: Float[Tensor, "n ..."],
    t: float | Float[Tensor, n],
    kind: PredictionType,
    schedule: NoiseSchedule,
) -> Float[Tensor, "n ..."]:
    """The training target of a prediction type for the sample ``a x0 + s eps``.

    Raises:
        InvalidArgument: as `check_prediction`.
    """
    check_prediction(kind, schedule)
    if kind in ("x0", "eps"):
        return x0 if kind == "x0" else eps
    a, s = _factors(t, x0, schedule)
    if kind == "v":
        v: Tensor = a * eps - s * x0
        return v
    da, ds = _derivatives(t, x0, schedule)
    velocity: Tensor = da * x0 + ds * eps
    return velocity


def add_noise(
    x0: Float[Tensor, "n ..."], eps: Float[Tensor, "n ..."], t: float | Float[Tensor, n], schedule: NoiseSchedule
) -> Float[Tensor, "n ..."]:
    """The noised sample at time t, ``a x0 + s eps``."""
    a, s = _factors(t, x0, schedule)
    noised: Tensor = a * x0 + s * eps
    return noised


def _factors(t: float | Tensor, like: Tensor, schedule: NoiseSchedule) -> tuple[Any, Any]:
    """a and s: numbers, or tensors that broadcast to samples."""
    times: Any = _broadcastable(t, like) if isinstance(t, Tensor) else t
    return schedule.a(times), schedule.s(times)


def _derivatives(t: float | Tensor, like: Tensor, schedule: NoiseSchedule) -> tuple[Any, Any]:
    """Derivatives of a and s: numbers, or tensors that broadcast to samples."""
    times: Any = _broadcastable(t, like) if isinstance(t, Tensor) else t
    return schedule.da(times), schedule.ds(times)


def _broadcastable(t: Tensor, like: Tensor) -> Tensor:
    """Times (n,) as (n, 1, ...), in the data type of samples."""
    if t.shape != like.shape[:1]:
        raise InvalidArgument(
            f"times of shape {tuple(t.shape)} for {len(like)} samples; give one for each, or a number"
        )
    return t.to(like.dtype).view(-1, *[1] * (like.ndim - 1))


def _refuse_zero(factor: Any, message: str) -> None:
    """Refuse a factor that is 0; the values of tensors are not checked."""
    if not isinstance(factor, Tensor) and factor < 1e-12:
        raise InvalidArgument(message)
