r"""Stochastic-gradient Hamiltonian Monte Carlo as a torch optimizer: a chain whose states are posterior samples.

Notable here:
- gradients are those of the *mean* potential U/N, as training loops compute them, so the variance of the injected noise
  is divided by N
- the preconditioner is a running mean of squared gradients, which must be frozen while samples are taken: one that
  changes with the state has another stationary distribution
- it is a torch optimizer, so it runs in the `Trainer`, with AdamW for weights that are not sampled

Source: Chen, Fox and Guestrin, arXiv:1402.4102 (SGHMC); Springenberg et al., "Bayesian optimization with robust
Bayesian neural networks", NeurIPS 2016, eq. 10 (the scale-adapted form).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge
from torch import Tensor

from pippin.core.checks import (
    NonNegativeFloat,
    NonNegativeInt,
    OpenFraction,
    PositiveFloat,
    PositiveInt,
    checked,
)
from pippin.core.errors import ChainDiverged, InvalidArgument

_DIVERGED = 1e8
"""A chain with a parameter of at least this magnitude has diverged."""
_STREAM = 0x5347_484D
"""Changes the seed of the noise, so that it differs from a caller's generator with the same seed."""


class SGHMC(torch.optim.Optimizer):
    r"""One step of the chain for each `step()`, from gradients of the mean potential $g \approx \nabla U / N$.

    With $e = \eta / \sqrt{V + \epsilon + \rho \bar V}$ for each element, $\bar V$ being the mean of V over its tensor,

    $$m \leftarrow (1 - \alpha) m - e g + \mathcal N(0, 2 \alpha e / N - e^2 \hat B), \qquad
      \theta \leftarrow \theta + m .$$

    On a quadratic U the stationary variance is the posterior's divided by $1 - e a / (2 (2 - \alpha))$, with a the
    curvature of U/N; this discretization error does not vanish with the friction.

    Args:
        params: parameters to sample, or parameter groups.
        lr: step size $\eta$.
        num_data: N, the number of examples that U sums over.
        friction: $\alpha$, above 0 and below 1; 0.01 to 0.1 is usual.
        preconditioner: "rmsprop" scales by a running mean V of squared gradients, updated until `freeze`; None sets
            e = lr.
        prior_precision: $\lambda$ of a Gaussian prior; adds $\lambda \theta / N$ to the gradient.
        decay: decay of the running mean.
        eps: $\epsilon$, in units of squared gradients.
        floor: $\rho$; bounds the step of weights whose gradients were near zero while V was measured.
        gradient_noise: $\hat B$, the variance of g due to mini-batches.
        temperature: multiplies the noise; 0 gives gradient descent with momentum.
        seed: seed of the noise.

    >>> theta = torch.nn.Parameter(torch.zeros(2000))
    >>> chain = SGHMC([theta], lr=0.1, num_data=4, preconditioner=None, seed=1)
    >>> for _ in range(200):
    ...     theta.grad = theta.detach()  # U = 4 theta^2 / 2: a Gaussian of variance 1/4
    ...     chain.step()
    >>> 0.23 < float(theta.detach().var()) < 0.27
    True
    """

    @checked
    def __init__(
        self,
        params: Iterable[Any],
        lr: PositiveFloat = 1e-2,
        *,
        num_data: PositiveInt,
        friction: OpenFraction = 0.05,
        preconditioner: Literal["rmsprop"] | None = "rmsprop",
        prior_precision: NonNegativeFloat = 0.0,
        decay: OpenFraction = 0.99,
        eps: PositiveFloat = 1e-8,
        floor: NonNegativeFloat = 1e-2,
        gradient_noise: NonNegativeFloat = 0.0,
        temperature: NonNegativeFloat = 1.0,
        seed: int = 0,
    ) -> None:
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
        self.num_data, self.preconditioner = num_data, preconditioner
        self.frozen = preconditioner is None
        self.steps = 0
        self._generators: dict[torch.device, torch.Generator] = {}
        self._seed = seed

    def freeze(self) -> None:
        """Freeze the preconditioner at the end of burn-in, so that the chain has a stationary distribution.

        Raises:
            InvalidArgument: no step was made, so that there is no preconditioner yet.
        """
        if self.preconditioner and not self.steps:
            raise InvalidArgument("the preconditioner has no gradients yet; make burn-in steps before freeze")
        self.frozen = True

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step of the chain for every parameter that has a gradient.

        Raises:
            ChainDiverged: an element of a parameter is not finite or beyond 1e8; the message names the step.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.steps += 1
        updated = []
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
                    updated.append(parameter)
        if updated:
            largest = max(torch._foreach_norm(updated, math.inf), key=_nan_is_largest)
            if not float(largest) < _DIVERGED:
                raise ChainDiverged(
                    f"the chain diverged at step {self.steps}: a parameter reached {float(largest):.3g}; use a smaller "
                    "lr",
                    step=self.steps,
                )
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Update the preconditioner, momentum and value of a parameter."""
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
            if self.preconditioner:
                state["square"], state["count"] = torch.zeros_like(parameter), 0
        gradient = parameter.grad + (group["prior_precision"] / self.num_data) * parameter
        rate: float | Tensor = group["lr"]
        if self.preconditioner:
            if not self.frozen:
                state["square"].lerp_(gradient.square(), 1 - group["decay"])
                state["count"] += 1
            unbiased = state["square"] / (1 - group["decay"] ** max(state["count"], 1))
            rate = group["lr"] * (unbiased + group["eps"] + group["floor"] * unbiased.mean()).rsqrt()
        variance = 2 * group["friction"] * group["temperature"] / self.num_data * rate
        if group["gradient_noise"]:
            variance = variance - group["gradient_noise"] * rate * rate
        std = torch.as_tensor(variance, dtype=parameter.dtype, device=parameter.device).clamp(min=0.0).sqrt()
        noise = torch.randn(
            parameter.shape, generator=self._generator(parameter.device), dtype=parameter.dtype, device=parameter.device
        )
        state["momentum"].mul_(1 - group["friction"]).sub_(rate * gradient).add_(std * noise)
        parameter.add_(state["momentum"])

    def _generator(self, device: torch.device) -> torch.Generator:
        """The generator of a device."""
        if device not in self._generators:
            # a caller's generator with this seed may have sampled the batches, which would correlate with the noise
            self._generators[device] = torch.Generator(device).manual_seed(self._seed ^ _STREAM)
        return self._generators[device]


@checked
@dataclass(frozen=True)
class SGHMCConfig:
    """The settings and length of a chain of `SGHMC`.

    Attributes:
        lr: step size of the sampler.
        friction: see `SGHMC`; above 0 and below 1.
        warmup_steps: updates of AdamW before the chain.
        warmup_lr: learning rate of AdamW in warm-up, and of weights that are trained, not sampled, in burn-in.
        burn_in_steps: discarded steps, in which the preconditioner converges; it needs a few hundred.
        num_samples: number of samples, at least 2.
        thinning: steps between samples; should exceed the autocorrelation time.
        batch_size: examples per step.
        temperature: multiplies the noise; 1 samples the posterior.
    """

    lr: PositiveFloat = 1e-3
    friction: OpenFraction = 0.05
    warmup_steps: NonNegativeInt = 2000
    warmup_lr: PositiveFloat = 1e-3
    burn_in_steps: PositiveInt = 1000
    num_samples: Annotated[int, Ge(2)] = 20
    thinning: PositiveInt = 100
    batch_size: PositiveInt = 64
    temperature: NonNegativeFloat = 1.0


def _nan_is_largest(value: Tensor) -> float:
    """A key for `max` that orders NaN as infinity."""
    return math.inf if value.isnan() else float(value)
