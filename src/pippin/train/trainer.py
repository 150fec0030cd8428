"""The one training loop: a model, an objective, data, and nothing that calls back.

Notable here:
- the loss of a step is the sum over its micro-batches and processes divided by the number of units of all of them, and
  so is its gradient: how a batch is cut changes nothing
- randomness is a function of seed, step and micro-batch, so there is no random state to save: a run that was killed
  goes on with the same losses, bit for bit on a CPU, and it leaves the caller's global generators alone
- a loss or a gradient that is not finite stops before the parameters are touched, with the batch written to a file
- `advance` makes some steps and returns, so two trainers can take turns: adversarial training needs no other loop
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pippin.core import device as devices, progress
from pippin.core.errors import InvalidArgument, InvalidInput, NonFiniteLoss
from pippin.train.batch import to_device
from pippin.train.checkpoints import Checkpoints, Keeper
from pippin.train.ema import EMA
from pippin.train.interruption import Interruption
from pippin.train.log import Log
from pippin.train.objective import Loss, Objective, Stateful, Steps
from pippin.train.optimisers import AdamW, Optimiser
from pippin.train.processes import Alone, Processes
from pippin.train.schedules import Cosine, Schedule
from pippin.train.training import Step, Training


@dataclass(frozen=True)
class Evaluation:
    """A measurement during the run.

    Attributes:
        measure: called with the model (its averages, where there is an EMA) in evaluation mode, without gradients.
        every: steps between measurements; the last step is always measured.
        best: the measure that decides which checkpoint is the best, lower is better; None decides nothing.
    """

    measure: Callable[[nn.Module], Mapping[str, float]]
    every: int
    best: str | None = "loss"

    def __post_init__(self) -> None:
        if self.every < 1:
            raise InvalidArgument(f"an evaluation every {self.every} steps; give 1 or more")


class Trainer:
    """A run: made once, then `fit` for all of it, or `advance` for some steps of it.

    Args:
        model: what is trained; parameters that want no gradient stay as they are and are not saved.
        objective: the loss of a batch; see `pippin.train.objective`.
        data: batches of any form; tensors in it go to the model's device. With `state_dict` and `load_state_dict` its
            cursor is saved; without, a resumed run reads it again from the start up to its place.
        steps: updates in all.
        optimiser: `AdamW` or `Muon`.
        schedule: factor of the learning rate over the run.
        accumulate: micro-batches a step, over all processes a multiple of it.
        clip: bound of the gradient's 2-norm; None for no bound.
        precision: "bfloat16" computes under autocast; parameters and sums stay as they are.
        ema: decay of a moving average of the weights; None keeps none.
        evaluation: a measurement during the run.
        checkpoints: where the run is saved and logged; None writes nothing.
        seed: of everything random.
        device: where to; None leaves the model where it is.
        title: for the bar, the plot and the report.
        show: whether a bar is drawn, where there is a terminal.
        parallel: the processes that share the run; None is this one alone.

    Attributes:
        step: updates made so far.
        ema: the moving averages, where they were asked for.
        training: what has happened so far.

    Raises:
        InvalidArgument: an argument is outside its range, or the model has nothing to train.
        InvalidInput: the model's weights are not finite; all of them are named.

    >>> layer = nn.Linear(1, 1)
    >>> def square(model, batch, generator):
    ...     return Loss((model(batch) - 3 * batch).square().sum(), count=len(batch))
    >>> batches = [torch.linspace(-1, 1, 8).view(-1, 1)] * 100
    >>> training = Trainer(layer, square, batches, steps=100, optimiser=AdamW(lr=0.1, weight_decay=0.0)).fit()
    >>> training.losses[-1] < 1e-2
    True
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        data: Iterable[Any],
        *,
        steps: int,
        optimiser: Optimiser = AdamW(),
        schedule: Schedule = Cosine(),
        accumulate: int = 1,
        clip: float | None = 1.0,
        precision: Literal["float32", "bfloat16"] = "float32",
        ema: float | None = None,
        evaluation: Evaluation | None = None,
        checkpoints: Checkpoints | None = None,
        seed: int = 0,
        device: str | None = None,
        title: str = "training",
        show: bool = True,
        parallel: Processes | None = None,
    ) -> None:
        _check(steps=steps, accumulate=accumulate, clip=clip, precision=precision)
        _check_weights(model)
        self.processes: Processes = parallel or Alone()
        if device is not None:
            model.to(devices.choose(device))
        self.model = self.processes.prepare(model)
        self.objective, self.data = objective, data
        self.steps, self.step = steps, 0
        self.optimiser, self.schedule = optimiser, schedule
        self.accumulate, self.clip, self.precision = accumulate, clip, precision
        self.optimisers = optimiser.build(self.model)
        self.ema = None if ema is None else EMA(self.model, ema)
        self.evaluation, self.checkpoints = evaluation, checkpoints
        self.seed, self.show = seed, show
        self.device = next(self.model.parameters()).device
        self.training = Training(title, getattr(objective, "unit", "units"))
        self._generator = torch.Generator(self.device)
        self._keeper = Keeper(self)
        self._batches: Iterator[Any] | None = None
        self._log: Log | None = None
        self._bar = progress.Bar(lambda n: None, lambda text: None)
        self._stop = False

    def fit(self) -> Training:
        """The whole run, from its newest checkpoint if there is one.

        Returns:
            What happened; ``stopped`` says whether and why it ended before its last step. SIGINT or SIGTERM finish the
            step, save and return; a second one ends at once.

        Raises:
            InvalidInput: the data holds no batch, or the objective's loss has no gradient.
            NonFiniteLoss: a loss or a gradient is not finite; the weights are those before the step.
            ResumeMismatch: the checkpoint was written by another run; everything that differs is listed.
            DiskFull: a checkpoint could not be written; the one before it is whole.
        """
        self._begin()
        with (
            Interruption(show=self.show) as interruption,
            progress.bar(
                self.steps, self.training.title, unit="steps", done=self.step, show=self.show and self._first
            ) as self._bar,
            self._running(),
        ):
            self.training.stopped = None
            while self.step < self.steps:
                if not self._update(interruption):
                    self.training.stopped = "exhausted"
                elif self._stop:
                    self.training.stopped = "interrupted"
                if self.training.stopped:
                    break
            self._finish()
        return self.training

    def advance(self, steps: int) -> list[float]:
        """Make up to ``steps`` more updates: fewer where the run or its data ends first.

        Returns:
            The loss of each.
        """
        self._begin()
        done = len(self.training.steps)
        with self._running():
            for _ in range(min(steps, self.steps - self.step)):
                if not self._update(None):
                    break
        return self.training.losses[done:]

    @property
    def _first(self) -> bool:
        return self.processes.rank == 0

    def _begin(self) -> None:
        """Go on from the newest checkpoint and open the log, once."""
        if self._log is None:
            self._keeper.resume()
            folder = self.checkpoints.folder if self.checkpoints and self._first else None
            self._log = Log(folder, self.step, self.training)

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Every module in training mode, gradients on; afterwards modes and random generators are as they were."""
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.train()
        try:
            with self._own_randomness(), torch.enable_grad():
                yield
        finally:
            for module, mode in modes:
                module.training = mode

    def _update(self, interruption: Interruption | None) -> bool:
        """One step and what is due after it; False where the data has ended."""
        began = time.perf_counter()
        batches = self._draw()
        if not batches:
            return False
        self._zero()
        totals, count, metrics = self._losses(batches)
        self._stop = interruption is not None and interruption.asked
        loss, norm = 0.0, 0.0
        ...
        return True
