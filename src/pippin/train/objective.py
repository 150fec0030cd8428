"""The interface of training objectives: a function from a model and a batch to a loss.

Notable here:
- a loss is a sum and the number of units summed over, so that micro-batches and processes of unequal sizes add up to
  exactly the loss of one large batch; a mean of means would not
- an objective may have `after_step`, for updates between steps (a moving target network), and `state_dict`, for state
  that checkpoints must store; there are no other callbacks
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from pippin.core.errors import InvalidInput


@dataclass(frozen=True)
class Loss:
    """The summed loss of one micro-batch.

    Attributes:
        total: scalar with autograd graph: the sum over the units (tokens, images, moves) of this micro-batch.
        count: the number of units; 0 if nothing in the batch counts in the loss.
        metrics: further sums over the same units, without autograd graph, with the same names for every batch; they are
            logged divided by the step's count.
    """

    total: Tensor
    count: float
    metrics: Mapping[str, Tensor | float] = field(default_factory=dict)


def as_loss(loss: Loss | Tensor) -> Loss:
    """Convert an objective's result to a `Loss`; a scalar tensor is the mean of a batch, weighted equally per batch.

    Raises:
        InvalidInput: it is neither of them.
    """
    if isinstance(loss, Tensor):
        return Loss(loss, 1.0)
    if not isinstance(loss, Loss):
        raise InvalidInput(
            f"an objective returns a scalar tensor or a Loss, got {type(loss).__name__}; return loss.mean(), say"
        )
    return loss


@runtime_checkable
class Objective(Protocol):
    """A callable that computes the loss of a batch; a plain function is enough.

    It may return a scalar tensor, the mean loss of the batch; all batches then have the same weight. A `Loss` has the
    number of units too, so that batches of unequal sizes add up exactly, and optional metrics.

    Optional members, found by name: `after_step(model, step)` is called after every step, with the number of completed
    steps. `state_dict()` and `load_state_dict(state)` store state in checkpoints, as tensors by name. `unit: str` names
    the counted units ("tokens") for the progress bar and the report.
    """

    def __call__(self, model: nn.Module, batch: Any, generator: torch.Generator) -> Loss | Tensor:
        """The loss of a batch; random numbers are sampled from ``generator``, which is on the model's device."""


@runtime_checkable
class AfterStep(Protocol):
    """An objective with a hook that runs after every step."""

    def after_step(self, model: nn.Module, step: int) -> None:
        """Called under `torch.no_grad()` after step number ``step``, counted from 1."""


class CountsSteps:
    """Base of objectives that depend on how many steps were taken, which checkpoints store.

    Attributes:
        step: completed steps.
    """

    step: int = 0

    def after_step(self, model: nn.Module, step: int) -> None:
        """Store the number of completed steps."""
        self.step = step

    def state_dict(self) -> dict[str, Tensor]:
        """The number of completed steps."""
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from what `state_dict` returned."""
        self.step = int(state["step"])


@runtime_checkable
class Stateful(Protocol):
    """A data set with a position (JSON values), or an objective with state (tensors by name)."""

    def state_dict(self) -> dict[str, Any]:
        """The state to save."""

    def load_state_dict(self, state: dict[str, Any], /) -> Any:
        """Restore a saved state."""
