r"""Stochastic-gradient Hamiltonian Monte Carlo as a torch optimiser: a chain whose states are posterior samples.

Notable here:
- gradients are of the *mean* potential U/N, as training loops have them, so the injected noise carries 1/N; with the
  noise of a summed potential the model is destroyed, without any it is SGD with momentum
- the scale of each step comes from a running mean of squared gradients, which must stand still while samples are
  taken: a metric that moves with the state has another stationary law
- it is an optimiser like others, so it runs in the one `Trainer`, beside an AdamW for what is not sampled

Source: Chen, Fox and Guestrin, arXiv:1402.4102 (SGHMC); Springenberg et al., "Bayesian optimization with robust
Bayesian neural networks", NeurIPS 2016, eq. 10 (the scale-adapted form).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from pippin.core.errors import ChainDiverged, InvalidArgument

_FAR = 1e8
"""A state with an element beyond this has left every target of interest."""
_STREAM = 0x5347_484D


class SGHMC(torch.optim.Optimizer):
    r"""One step of the chain for each `step()`, from gradients of the mean potential $g \approx \nabla U / N$.

    With $e = \eta / \sqrt{V + \epsilon + \rho \bar V}$ for each element, $\bar V$ being the mean of V over its tensor,

    $$m \leftarrow (1 - \alpha) m - e g + \mathcal N(0, 2 \alpha e / N - e^2 \hat B), \qquad
      \theta \leftarrow \theta + m .$$

    On a quadratic U the stationary variance is the posterior's divided by $1 - e a / (2 (2 - \alpha))$, with a the
    curvature of U/N: the error is that of a finite step, whatever the friction.

    Args:
        params: what is sampled: parameters, or groups of them.
        lr: $\eta$.
        n_data: N, the number of examples that U sums over.
        friction: $\alpha$, above 0 and below 1; 0.01 to 0.1 is usual.
        preconditioner: "rmsprop" scales by a running mean V of squared gradients until `freeze`; None has e = lr.
        prior_precision: $\lambda$ of a Gaussian prior; adds $\lambda \theta / N$ to the gradient.
        decay: of the running mean.
        eps: $\epsilon$, in units of squared gradients.
        floor: $\rho$; a unit that was silent while V was measured would take steps without bound once it wakes.
        gradient_noise: $\hat B$, the variance of g that sampling mini-batches causes.
        temperature: multiplies the noise; 0 gives momentum descent.
        seed: of the noise.

    Raises:
        InvalidArgument: a value outside its range.

    >>> theta = torch.nn.Parameter(torch.zeros(2000))
    >>> chain = SGHMC([theta], lr=0.1, n_data=4, preconditioner=None, seed=1)
    >>> for _ in range(200):
    ...     theta.grad = theta.detach()  # U = 4 theta^2 / 2: a Gaussian of variance 1/4
    ...     chain.step()
    >>> 0.23 < float(theta.detach().var()) < 0.27
    True
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        *,
        n_data: int,
        friction: float = 0.05,
        preconditioner: Literal["rmsprop"] | None = "rmsprop",
        prior_precision: float = 0.0,
        decay: float = 0.99,
        eps: float = 1e-8,
        floor: float = 1e-2,
        gradient_noise: float = 0.0,
        temperature: float = 1.0,
        seed: int = 0,
    ) -> None:
        _above_zero(lr=lr, n_data=n_data, eps=eps)
        _not_negative(
            prior_precision=prior_precision, gradient_noise=gradient_noise, temperature=temperature, floor=floor
        )
        _inside(friction=friction, decay=decay)
        if preconditioner not in ("rmsprop", None):
            raise InvalidArgument(f"preconditioner is {preconditioner!r}; choose 'rmsprop' or None")
        groups: dict[str, Any] = {
            "lr": lr,
            "base_lr": lr,
            "friction": friction,
            "prior_precision": prior_precision,
            "decay": decay,
            "eps": eps,
            "floor": floor,
            "gradient_noise": gradient_noise,
            "temperature": temperature,
        }
        super().__init__(params, groups)
        self.n_data, self.preconditioner = n_data, preconditioner
        self.frozen = preconditioner is None
        self.steps = 0
        self._generators: dict[torch.device, torch.Generator] = {}
        self._seed = seed

    def freeze(self) -> None:
        """End of burn-in: the metric stands still from here on, so that the chain's law does too.

        Raises:
            InvalidArgument: no step was made, so that there is no metric yet.
        """
        if self.preconditioner and not self.steps:
            raise InvalidArgument("the metric has seen no gradient yet; make some steps of burn-in before freeze")
        self.frozen = True

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move every parameter that has a gradient.

        Raises:
            ChainDiverged: a parameter is no longer finite, or has left every reasonable range; it names the step.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.steps += 1
        moved = []
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, group)
                    moved.append(parameter)
        if moved:
            largest = max(torch._foreach_norm(moved, math.inf), key=_nan_is_largest)
            if not float(largest) < _FAR:
                raise ChainDiverged(
                    f"the chain left at step {self.steps}: a parameter reached {float(largest):.3g}; take a smaller lr",
                    step=self.steps,
                )
        return loss

    def _move(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
            if self.preconditioner:
                state["square"], state["seen"] = torch.zeros_like(parameter), 0
        gradient = parameter.grad + (group["prior_precision"] / self.n_data) * parameter
        rate: float | Tensor = group["lr"]
        if self.preconditioner:
            if not self.frozen:
                state["square"].lerp_(gradient.square(), 1 - group["decay"])
                state["seen"] += 1
            unbiased = state["square"] / (1 - group["decay"] ** max(state["seen"], 1))
            rate = group["lr"] * (unbiased + group["eps"] + group["floor"] * unbiased.mean()).rsqrt()
        variance = 2 * group["friction"] * group["temperature"] / self.n_data * rate
        if group["gradient_noise"]:
            variance = variance - group["gradient_noise"] * rate * rate
        spread = torch.as_tensor(variance, dtype=parameter.dtype, device=parameter.device).clamp(min=0.0).sqrt()
        noise = torch.randn(
            parameter.shape, generator=self._generator(parameter.device), dtype=parameter.dtype, device=parameter.device
        )
        state["momentum"].mul_(1 - group["friction"]).sub_(rate * gradient).add_(spread * noise)
        parameter.add_(state["momentum"])

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            # another stream than that of a caller's generator with the same seed, which would correlate with gradients
            self._generators[device] = torch.Generator(device).manual_seed(self._seed ^ _STREAM)
        return self._generators[device]


@dataclass(frozen=True)
class Chain:
    """How a chain is run: what `SGHMC` is told, and for how long.

    Attributes:
        lr: of the sampler.
        friction: above 0 and below 1.
        warm_up: updates of AdamW before any noise.
        warm_up_lr: their rate, and that of the weights that are trained beside the chain during burn-in.
        burn_in: steps with noise that are thrown away; the metric settles in them, which takes a few hundred.
        samples: states that are kept, at least 2.
        thin: steps between two of them; above the autocorrelation time, or the samples agree too much.
        batch: examples of a step.
        temperature: 1 for the posterior.

    Raises:
        InvalidArgument: a value outside its range.
    """

    lr: float = 1e-3
    friction: float = 0.05
    warm_up: int = 2000
    warm_up_lr: float = 1e-3
    burn_in: int = 1000
    samples: int = 20
    thin: int = 100
    batch: int = 64
    temperature: float = 1.0

    def __post_init__(self) -> None:
        _above_zero(lr=self.lr, warm_up_lr=self.warm_up_lr, thin=self.thin, batch=self.batch, burn_in=self.burn_in)
        _not_negative(warm_up=self.warm_up, temperature=self.temperature)
        _inside(friction=self.friction)
        if self.samples < 2:
            raise InvalidArgument(f"samples is {self.samples}; scores compare at least 2 samples")


def _nan_is_largest(value: Tensor) -> float:
    return math.inf if value.isnan() else float(value)


def _above_zero(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise InvalidArgument(f"{name} is {value}; it must be above 0")


def _not_negative(**values: float) -> None:
    for name, value in values.items():
        if not 0 <= value < math.inf:
            raise InvalidArgument(f"{name} is {value}; it must be 0 or more")


def _inside(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < 1:
            raise InvalidArgument(f"{name} is {value}; it must be above 0 and below 1")
