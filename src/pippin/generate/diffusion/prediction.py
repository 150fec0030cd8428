r"""Prediction types of a network, and what follows from its output: data, noise, score and velocity.

Notable here:
- each kind of output determines both the data and the noise in it; samplers know nothing else
- one sign of the velocity: $u = dx_t/dt = \dot a\,x_0 + \dot s\,\epsilon$, which points from the data to the noise
- the target of each kind is linear in the data and the noise, so the best network says a conditional mean
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


class Estimate:
    r"""What a noised sample is taken to consist of.

    Held as two tensors of which data and noise are linear combinations, so that a sampler's step, linear itself, is one
    combination of the two tensors that a network read and said, however it was trained.

    Args:
        x0: the data.
        eps: the noise, of unit variance.

    >>> found = Estimate(torch.tensor([2.0]), torch.tensor([-1.0]))
    >>> found.mix(0.5, 3.0), found.score(0.5)
    (tensor([-2.]), tensor([2.]))
    """

    __slots__ = ("_data", "_first", "_noise", "_second")

    def __init__(self, x0: Tensor, eps: Tensor) -> None:
        self._first, self._second = x0, eps
        self._data: tuple[Any, Any] = (1.0, 0.0)
        self._noise: tuple[Any, Any] = (0.0, 1.0)

    @classmethod
    def of(cls, first: Tensor, second: Tensor, data: tuple[Any, Any], noise: tuple[Any, Any]) -> Estimate:
        """By two tensors, and the factors on both that make the data, and the noise."""
        made = cls(first, second)
        made._data, made._noise = data, noise
        return made

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
        """Data, then noise."""
        return iter((self.x0, self.eps))

    def mix(self, x0: float, eps: float) -> Tensor:
        """``x0`` times the data and ``eps`` times the noise; not to be written to."""
        one, other = (x0 * self._data[k] + eps * self._noise[k] for k in (0, 1))
        if isinstance(one, Tensor) or isinstance(other, Tensor):
            both: Tensor = one * self._first + other * self._second
            return both
        if not one or not other:
            factor, part = (other, self._second) if not one else (one, self._first)
            return part if abs(factor - 1) < 1e-12 else factor * part
        return torch.add(self._first if one == 1 else one * self._first, self._second, alpha=other)

    def score(self, s: float | Tensor) -> Tensor:
        """The gradient of the log-density of the noised samples, -eps / s."""
        return -self.eps / s


@checked
def check_prediction(kind: PredictionType, schedule: NoiseSchedule) -> None:
    """Refuse a kind of prediction that the schedule has no meaning for."""
    if kind == "v" and not schedule.preserves_variance:
        raise InvalidArgument(f"prediction 'v' needs a² + s² = 1, which {schedule.kind} has not; choose 'flow' or 'x0'")


def estimate(
    output: Float[Tensor, "n ..."],
    x: Float[Tensor, "n ..."],
    t: float | Float[Tensor, n],
    kind: PredictionType,
    schedule: NoiseSchedule,
) -> Estimate:
    r"""Data and noise by a network's output.

    With a, s at time t: $x_0 = (x - s\epsilon)/a$; $\epsilon = (x - a x_0)/s$; $v = a\epsilon - s x_0$;
    $u = \dot a x_0 + \dot s\epsilon$.

    Args:
        output: of the network.
        x: what it saw.
        t: its time, one for all or one for each sample.
        kind: what the output is.
        schedule: by which the sample was noised.

    Raises:
        InvalidArgument: an output of another shape than x, "v" without preserved variance, "eps" where no signal is
            left (a = 0) or "x0" where there is no noise (s = 0).

    Source: Ho et al. 2020, arXiv:2006.11239 (eps); Salimans and Ho 2022, arXiv:2202.00512, appendix D (v).
    """
    check_prediction(kind, schedule)
    if output.shape != x.shape:
        raise InvalidArgument(f"the network says {tuple(output.shape)} of samples of shape {tuple(x.shape)}")
    a, s = _factors(t, x, schedule)
    output = output.to(x.dtype)
    if kind == "v":
        return Estimate.of(x, output, (a, -s), (s, a))
    if kind == "flow":
        if schedule.kind == "flow":
            return Estimate.of(x, output, (1.0, -s), (1.0, a))
        da, ds = _slopes(t, x, schedule)
        det = a * ds - da * s
        return Estimate.of(x, output, (ds / det, -s / det), (-da / det, a / det))
    if kind == "eps":
        _refuse_zero(
            a, f"prediction 'eps' at time {t}, where no signal is left; begin earlier, or choose 'v' or 'flow'"
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
    """What a network of this kind is to say of ``a x0 + s eps``.

    Raises:
        InvalidArgument: as `check_prediction`.
    """
    check_prediction(kind, schedule)
    if kind in ("x0", "eps"):
        return x0 if kind == "x0" else eps
    a, s = _factors(t, x0, schedule)
    if kind == "v":
        made: Tensor = a * eps - s * x0
        return made
    da, ds = _slopes(t, x0, schedule)
    made = da * x0 + ds * eps
    return made


def add_noise(
    x0: Float[Tensor, "n ..."], eps: Float[Tensor, "n ..."], t: float | Float[Tensor, n], schedule: NoiseSchedule
) -> Float[Tensor, "n ..."]:
    """The sample at time t, ``a x0 + s eps``."""
    a, s = _factors(t, x0, schedule)
    made: Tensor = a * x0 + s * eps
    return made


def _factors(t: float | Tensor, like: Tensor, schedule: NoiseSchedule) -> tuple[Any, Any]:
    """a and s: numbers, or tensors that multiply samples."""
    at: Any = _column(t, like) if isinstance(t, Tensor) else t
    return schedule.a(at), schedule.s(at)


def _slopes(t: float | Tensor, like: Tensor, schedule: NoiseSchedule) -> tuple[Any, Any]:
    """The slopes of both."""
    at: Any = _column(t, like) if isinstance(t, Tensor) else t
    return schedule.da(at), schedule.ds(at)


def _column(t: Tensor, like: Tensor) -> Tensor:
    if t.shape != like.shape[:1]:
        raise InvalidArgument(
            f"times of shape {tuple(t.shape)} for {len(like)} samples; give one for each, or a number"
        )
    return t.to(like.dtype).view(-1, *[1] * (like.ndim - 1))


def _refuse_zero(factor: Any, message: str) -> None:
    if not isinstance(factor, Tensor) and factor < 1e-12:
        raise InvalidArgument(message)
