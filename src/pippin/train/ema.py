"""An exponential moving average of a model's weights.

Notable here:
- only trainable parameters are copied, and only if an average is requested
- weights and averages are swapped one tensor at a time, without a third copy
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from pippin.core.checks import Fraction, checked


class EMA:
    r"""Averages $\bar w_t = d\, \bar w_{t-1} + (1 - d)\, w_t$ of the trainable parameters, starting at their values.

    Attributes:
        decay: d, from 0 to below 1; the average is over about the last $1 / (1 - d)$ steps.
        averages: the averages by parameter name, in the parameters' dtype and on their device.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> _ = nn.init.zeros_(model.weight)
    >>> ema = EMA(model, decay=0.75)
    >>> _ = nn.init.ones_(model.weight)
    >>> ema.update(model)
    >>> with ema.applied(model):
    ...     model.weight.item()
    0.25
    >>> model.weight.item()
    1.0
    """

    @checked
    def __init__(self, model: nn.Module, decay: Fraction = 0.999) -> None:
        self.decay = decay
        self.averages: dict[str, Tensor] = {name: p.detach().clone() for name, p in _trainable(model)}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Update the averages with the current weights; call it once after each step."""
        weights = dict(_trainable(model))
        torch._foreach_lerp_(
            list(self.averages.values()), [weights[name].detach() for name in self.averages], 1.0 - self.decay
        )

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Replace the model's weights by the averages while the block runs, and restore them afterwards."""
        self._exchange(model)
        try:
            yield
        finally:
            self._exchange(model)

    @torch.no_grad()
    def _exchange(self, model: nn.Module) -> None:
        for name, parameter in _trainable(model):
            weight = parameter.detach().clone()
            parameter.copy_(self.averages[name])
            self.averages[name].copy_(weight)


def _trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
