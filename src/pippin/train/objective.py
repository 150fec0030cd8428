"""What a method brings to training: one function from a model and a batch to a loss.

Notable here:
- a loss is a sum and the number of units it is summed over, so that micro-batches and processes of unequal sizes
  add up to exactly the loss of one large batch; a mean of means would not
- whatever a method must do between steps (a moving target network) is one optional method, `after_step`, and whatever
  it must remember is its `state_dict`; nothing else calls back
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Loss:
    """The loss of one micro-batch, not yet divided.

    Attributes:
        total: scalar with its graph: the sum over the units (tokens, images, moves) of this micro-batch.
        count: how many units; may be 0, where nothing in the batch counts in the loss.
        metrics: sums over the same units, without a graph, under the same names for every batch; logged divided by the
            step's count.
    """

    total: Tensor
    count: float
    metrics: Mapping[str, Tensor | float] = field(default_factory=dict)


def as_loss(loss: Loss | Tensor) -> Loss:
    """What an objective returned, as a `Loss`; a scalar tensor is the mean of a batch, each batch counting as much."""
    return Loss(loss, 1.0) if isinstance(loss, Tensor) else loss


@runtime_checkable
class Objective(Protocol):
    """What computes the loss of a batch; a function will do.

    A scalar tensor is a loss too: the mean of the batch, each batch counting as much. A `Loss` also says how many units
    the batch has, so that batches of unequal sizes add up exactly, and may carry metrics.

    The three further methods below are optional and looked for by name.

    `after_step(model, step)` is called after every update, with the number of updates made so far: a moving target
    follows its model there. `state_dict()` and `load_state_dict(state)` hold what must survive a restart, as tensors by
    name. A `unit: str` names what is counted ("tokens"), for the progress bar and the report.
    """

    def __call__(self, model: nn.Module, batch: Any, generator: torch.Generator) -> Loss | Tensor:
        """The loss of a batch; all that is random in it is sampled from ``generator``, on the model's device."""


@runtime_checkable
class AfterStep(Protocol):
    """An objective that does something after every update."""

    def after_step(self, model: nn.Module, step: int) -> None:
        """Called without gradients, after update number ``step`` (counted from 1)."""


@runtime_checkable
class Stateful(Protocol):
    """Data with a cursor (JSON values), or an objective with memory (tensors by name)."""

    def state_dict(self) -> dict[str, Any]:
        """What must be saved."""

    def load_state_dict(self, state: dict[str, Any], /) -> Any:
        """Go on from what was saved."""
