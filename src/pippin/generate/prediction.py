r"""What a network says of a noised sample, and what follows from it: the data, the noise, the score, the velocity.

Notable here:
- each kind of output determines both the data and the noise in it; samplers know nothing else
- one sign of the velocity: $u = dx_t/dt = \dot a\,x_0 + \dot s\,\epsilon$, which points from the data to the noise
- the target of each kind is linear in the data and the noise, so the best network says a conditional mean
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

from jaxtyping import Float
from torch import Tensor

from pippin.core.errors import InvalidArgument
from pippin.generate.schedules import NoiseSchedule

Kind = Literal["x0", "eps", "v", "flow"]


class Estimate(NamedTuple):
    """What a noised sample is taken to consist of.

    Attributes:
        x0: the data.
        eps: the noise, of unit variance.
    """

    x0: Tensor
    eps: Tensor

    def score(self, s: float | Tensor) -> Tensor:
        """The gradient of the log-density of the noised samples, -eps / s."""
        return -self.eps / s


def check_kind(kind: str, schedule: NoiseSchedule) -> None:
    """Refuse a kind of prediction that is unknown, or that the schedule has no meaning for.

    Raises:
        InvalidArgument: either.
    """
    if kind not in get_args(Kind):
        raise InvalidArgument(f"prediction {kind!r}; choose x0, eps, v or flow")
    if kind == "v" and not schedule.preserves_variance:
        raise InvalidArgument(f"prediction 'v' needs a² + s² = 1, which {schedule.kind} has not; choose 'flow' or 'x0'")


def estimate(
    output: Float[Tensor, "n ..."],
    x: Float[Tensor, "n ..."],
    t: float | Float[Tensor, n],
    kind: Kind,
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
    check_kind(kind, schedule)
    if output.shape != x.shape:
        raise InvalidArgument(f"the network says {tuple(output.shape)} of samples of shape {tuple(x.shape)}")
    a, s, da, ds = _factors(t, x, schedule)
    output = output.to(x.dtype)
    if kind == "v":
        return Estimate(a * x - s * output, s * x + a * output)
    if kind == "flow":
        if schedule.kind == "flow":
            return Estimate(x - s * output, x + a * output)
        det = a * ds - da * s
        return Estimate((ds * x - s * output) / det, (a * output - da * x) / det)
    if kind == "eps":
        _refuse_zero(
            a, f"prediction 'eps' at time {t}, where no signal is left; begin earlier, or choose 'v' or 'flow'"
        )
        return Estimate((x - s * output) / a, output)
    _refuse_zero(s, f"prediction 'x0' at time {t}, where there is no noise; end the grid's last step there instead")
    return Estimate(output, (x - a * output) / s)


def target(
    x0: Float[Tensor, "n ..."],
    eps: Float[Tensor, "n ..."],
    t: float | Float[Tensor, n],
    kind: Kind,
    schedule: NoiseSchedule,
) -> Float[Tensor, "n ..."]:
    """What a network of this kind is to say of ``a x0 + s eps``.

    Raises:
        InvalidArgument: as `check_kind`.
    """
    check_kind(kind, schedule)
    if kind in ("x0", "eps"):
        return x0 if kind == "x0" else eps
    a, s, da, ds = _factors(t, x0, schedule)
    made: Tensor = a * eps - s * x0 if kind == "v" else da * x0 + ds * eps
    return made


def noised(
    x0: Float[Tensor, "n ..."], eps: Float[Tensor, "n ..."], t: float | Float[Tensor, n], schedule: NoiseSchedule
) -> Float[Tensor, "n ..."]:
    """The sample at time t, ``a x0 + s eps``."""
    a, s, _, _ = _factors(t, x0, schedule)
    made: Tensor = a * x0 + s * eps
    return made


def _factors(t: float | Tensor, like: Tensor, schedule: NoiseSchedule) -> tuple[Any, Any, Any, Any]:
    """a, s and their slopes, numbers or tensors that multiply samples."""
    if not isinstance(t, Tensor):
        return schedule.a(t), schedule.s(t), schedule.da(t), schedule.ds(t) if t > 0 else 0.0
    if t.shape != like.shape[:1]:
        raise InvalidArgument(
            f"times of shape {tuple(t.shape)} for {len(like)} samples; give one for each, or a number"
        )
    t = t.to(like.dtype).view(-1, *[1] * (like.ndim - 1))
    return schedule.a(t), schedule.s(t), schedule.da(t), schedule.ds(t)


def _refuse_zero(factor: Any, message: str) -> None:
    if not isinstance(factor, Tensor) and factor < 1e-12:
        raise InvalidArgument(message)
