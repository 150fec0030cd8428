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

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pippin.core import device as devices, progress
from pippin.core.checks import PositiveFloat, PositiveInt, checked
from pippin.core.errors import InvalidArgument, InvalidInput, MissingDependency, ResumeMismatch
from pippin.train import run_state
from pippin.train.batch import to_device
from pippin.train.checkpoints import Checkpoints
from pippin.train.ema import EMA
from pippin.train.interruption import Interruption
from pippin.train.objective import AfterStep, Loss, Objective, as_loss
from pippin.train.optimizers import AdamW, Optimizer
from pippin.train.processes import Processes, SingleProcess
from pippin.train.result import TrainingResult, TrainingStep
from pippin.train.run_log import RunLog
from pippin.train.schedules import CosineSchedule, Schedule


@checked
@dataclass(frozen=True)
class Evaluation:
    """A measurement during the run.

    Attributes:
        measure: called with the model (its averages, where there is an EMA) in evaluation mode, without gradients.
        eval_every: steps between measurements; the last step is always measured.
        best: the measure that decides which checkpoint is the best, lower is better; None decides nothing.
    """

    measure: Callable[[nn.Module], Mapping[str, float]]
    eval_every: PositiveInt
    best: str | None = "loss"


class Trainer:
    """A run: made once, then `fit` for all of it, or `advance` for some steps of it.

    Args:
        model: what is trained; parameters that want no gradient stay as they are and are not saved.
        objective: the loss of a batch: a scalar tensor, which is a mean, or a `Loss`; see `pippin.train.objective`.
        data: batches of any form; tensors in it go to the model's device. With `state_dict` and `load_state_dict` its
            cursor is saved; without, a resumed run reads the data again from the start up to its position.
        steps: updates in all.
        optimizer: `AdamW` or `Muon`.
        schedule: factor of the learning rate over the run.
        gradient_accumulation_steps: micro-batches a step, for each process.
        max_grad_norm: bound of the gradient's 2-norm; None for no bound.
        precision: "bfloat16" computes under autocast; parameters and sums stay as they are.
        ema: decay of a moving average of the weights; None keeps none.
        evaluation: a measurement during the run.
        checkpoints: where the run is saved and logged; None writes nothing.
        seed: of everything random.
        device: where to; None leaves the model where it is.
        title: for the bar, the plot and the report.
        show_progress: whether to show a progress bar, on a terminal.
        processes: the processes that share the run; None is this one alone.

    Attributes:
        step: updates made so far.
        ema: the moving averages, where they were asked for.
        result: what has happened so far.
        best: "step" and "value" of the best evaluation; None before the first.

    Raises:
        InvalidArgument: an argument is outside its range, or the model has nothing to train.
        InvalidInput: the model's weights are not finite; all of them are named.

    >>> layer = nn.Linear(1, 1)
    >>> def squared_error(model, batch, generator):
    ...     return (model(batch) - 3 * batch).square().mean()
    >>> batches = [torch.linspace(-1, 1, 8).view(-1, 1)] * 100
    >>> training = Trainer(layer, squared_error, batches, steps=100, optimizer=AdamW(lr=0.1, weight_decay=0.0)).fit()
    >>> training.losses[-1] < 1e-2
    True
    """

    @checked
    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        data: Iterable[Any],
        *,
        steps: PositiveInt,
        optimizer: Optimizer = AdamW(),
        schedule: Schedule = CosineSchedule(),
        gradient_accumulation_steps: PositiveInt = 1,
        max_grad_norm: PositiveFloat | None = 1.0,
        precision: Literal["float32", "bfloat16"] = "float32",
        ema: float | None = None,
        evaluation: Evaluation | None = None,
        checkpoints: Checkpoints | None = None,
        seed: int = 0,
        device: str | None = None,
        title: str = "training",
        show_progress: bool = True,
        processes: Processes | None = None,
    ) -> None:
        _check_weights(model)
        self.processes: Processes = processes or SingleProcess()
        if device is not None:
            model.to(devices.choose(device))
        self.model = self.processes.prepare(model)
        self.objective, self.data = objective, data
        self.steps, self.step = steps, 0
        self.optimizer, self.schedule = optimizer, schedule
        self.gradient_accumulation_steps, self.max_grad_norm, self.precision = (
            gradient_accumulation_steps,
            max_grad_norm,
            precision,
        )
        self.optimizers = optimizer.build(self.model)
        self.ema = None if ema is None else EMA(self.model, ema)
        self.evaluation, self.checkpoints = evaluation, checkpoints
        self.seed, self.show_progress = seed, show_progress
        self.device = next(self.model.parameters()).device
        self.result = TrainingResult(title, getattr(objective, "unit", "units"))
        self.best: dict[str, float] | None = None
        self._parameters = list(self.model.parameters())
        self._generator = torch.Generator(self.device)
        self._global = _global_generators(self.device)
        self._batches: Iterator[Any] | None = None
        self._log: RunLog | None = None
        self._saved: int | None = None

    def fit(self) -> TrainingResult:
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
        self.result.stopped = None
        show = self.show_progress and self._first
        shown = progress.bar(self.steps, self.result.title, unit="steps", done=self.step, show_progress=show)
        with Interruption(show_progress=show) as interruption, shown as bar, self._running():
            while self.step < self.steps and self.result.stopped is None:
                if not self._update(interruption):
                    self.result.stopped = "exhausted"
                    break
                bar.advance(1)
                bar.say(f"loss {self.result.steps[-1].loss:.4g}, {self._rate():,.0f} {self.result.unit}/s")
            self._finish()
        return self.result

    def advance(self, steps: int) -> list[float]:
        """Make up to ``steps`` more updates: fewer where the run or its data ends first. Signals are left alone.

        Returns:
            The loss of each.

        Raises:
            As `fit`.
        """
        self._begin()
        done = len(self.result.steps)
        with self._running():
            for _ in range(min(steps, self.steps - self.step)):
                if not self._update(None):
                    break
        if self.step == self.steps:
            self._finish()
        return [step.loss for step in self.result.steps[done:]]

    def skip(self, steps: int) -> None:
        """Read and discard the batches of the given number of first steps, for data without a cursor.

        Raises:
            ResumeMismatch: it ends before.
        """
        with self._own_randomness():
            for step in range(steps):
                if not self._draw(step):
                    raise ResumeMismatch(
                        f"the data ends after {step} steps, and the checkpoint was written after {steps}"
                    )

    @property
    def _first(self) -> bool:
        return self.processes.rank == 0

    def _begin(self) -> None:
        """Go on from the newest checkpoint and open the log, once."""
        if self._log is None:
            self._saved = run_state.resume(self)
            folder = self.checkpoints.path if self.checkpoints and self._first else None
            self._log = RunLog(folder, self.step, self.result)

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

    def _own_randomness(self) -> AbstractContextManager[None]:
        """Keep the caller's global generators as they are; dropout draws from them."""
        kind = self.device.type
        return torch.random.fork_rng(
            [] if kind == "cpu" else [self.device], device_type="cuda" if kind == "cpu" else kind
        )

    def _reseed(self, what: str, step: int, part: int) -> None:
        """Seed the random number generators for part ``part`` of ``step``, independently of earlier steps."""
        digest = hashlib.blake2b(f"{self.seed}/{what}/{step}/{part}".encode(), digest_size=16).digest()
        for generator in self._global:
            generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        self._generator.manual_seed(int.from_bytes(digest[8:], "little") >> 1)

    def _update(self, interruption: Interruption | None) -> bool:
        """One step and what is due after it; False where the data has ended."""
        began = time.perf_counter()
        batches = self._draw(self.step)
        if not batches:
            return False
        self._zero()
        sums = self._accumulate(batches)
        asked = float(interruption is not None and interruption.requested)
        keys = sorted(sums)
        added = self.processes.all_reduce(_stack([*(sums[key] for key in keys), asked], self.device)).tolist()
        *values, stop = added
        figures = dict(zip(keys, values, strict=True))
        total, count = figures.pop("total"), figures.pop("count")
        norm, lr = self._apply(total, count, batches)
        self.step += 1
        self._after_update()
        loss = total / count if count else math.nan
        metrics = {key.removeprefix("metric."): value / count for key, value in figures.items()} if count else {}
        step = TrainingStep(self.step, loss, lr, norm, count, time.perf_counter() - began, metrics)
        self.result.steps.append(step)
        assert self._log is not None
        self._log.step(step)
        if stop:
            self.result.stopped = "interrupted"
        self._evaluate_and_save(last=self.step == self.steps or bool(stop))
        return True

    def _draw(self, step: int) -> list[tuple[int, Any]]:
        """This process's micro-batches of a step, with their indices in it; fewer at the end of the data.

        Every process reads all of them, so that all have the same cursor and see the same end.
        """
        size = self.processes.size
        mine, first = [], 0
        while first < self.gradient_accumulation_steps * size:
            group = []
            for part in range(first, first + size):
                self._reseed("data", step, part)
                if self._batches is None:
                    self._batches = iter(self.data)
                try:
                    group.append(next(self._batches))
                except StopIteration:
                    break
            if len(group) < size:
                break
            mine.append((first + self.processes.rank, group[self.processes.rank]))
            first += size
        if not mine and step == 0:
            raise InvalidInput("the data holds no batch; nothing was trained")
        return mine

    def _accumulate(self, batches: list[tuple[int, Any]]) -> dict[str, Tensor | float]:
        """Gradients of the micro-batches of a step, summed in place; totals, counts and metrics, summed too."""
        sums: dict[str, Tensor | float] = {"total": 0.0, "count": 0.0}
        bfloat16 = torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bfloat16")
        for index, (part, batch) in enumerate(batches):
            self._reseed("loss", self.step, part)
            with self.processes.micro_batch(self.model, last=index == len(batches) - 1):
                with bfloat16:
                    loss = as_loss(self.objective(self.model, to_device(batch, self.device), self._generator))
                _check_loss(loss, self.step + 1)
                loss.total.backward()
            metrics = {f"metric.{name}": value for name, value in loss.metrics.items()}
            parts: dict[str, Tensor | float] = {"total": loss.total, "count": float(loss.count), **metrics}
            for key, value in parts.items():
                sums[key] = sums.get(key, 0.0) + (_precise(value) if isinstance(value, Tensor) else value)
        return sums

    def _apply(self, total: float, count: float, batches: list[tuple[int, Any]]) -> tuple[float, float]:
        """Divide the gradients, clip them, and update the weights; the norm before clipping, and the rate."""
        factor = self.schedule(self.step, self.steps)
        for group in self._groups():
            group["lr"] = group["base_lr"] * factor
        lr = self._groups()[0]["lr"]
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        summed = self.processes.total_norm(gradients) if gradients else torch.zeros(())
        norm = summed.item()
        if not (math.isfinite(total) and math.isfinite(norm) and math.isfinite(count)):
            self._zero()
            run_state.refuse_non_finite(self, total, norm, batches)
        if count == 0:
            # nothing to learn in this step: no gradient, and no weight decay without one
            self._zero()
            return 0.0, lr
        # as torch's clip_grad_norm_ has it, bit for bit, but with both divisions in one pass over the gradients
        bound = math.inf if self.max_grad_norm is None else self.max_grad_norm
        norm, clipped = torch.stack([summed / count, bound / (summed / count + 1e-6)]).tolist()
        scale = min(clipped, 1.0) / count
        if scale != 1.0:
            torch._foreach_mul_(gradients, scale)
        for optimizer in self.optimizers:
            optimizer.step()
        self._zero()
        return norm, lr

    def _after_update(self) -> None:
        if self.ema is not None:
            self.ema.update(self.model)
        if isinstance(self.objective, AfterStep):
            with torch.no_grad():
                self.objective.after_step(self.model, self.step)

    def _evaluate_and_save(self, *, last: bool) -> None:
        """What is due after a step."""
        best = False
        if self.evaluation is not None and (self.step % self.evaluation.eval_every == 0 or self.step == self.steps):
            best = self._evaluate(self.evaluation)
        checkpoints = self.checkpoints
        if checkpoints and (last or self.step % checkpoints.save_every == 0 or (best and checkpoints.best)):
            self._save()

    def _evaluate(self, evaluation: Evaluation) -> bool:
        """Measure; whether it is the best so far."""
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        averages = self.ema.applied(self.model) if self.ema else nullcontext()
        self._reseed("evaluation", self.step, 0)
        try:
            with averages, torch.no_grad():
                measures = {name: float(value) for name, value in evaluation.measure(self.model).items()}
        finally:
            for module, mode in modes:
                module.training = mode
        self.result.evaluations.append((self.step, measures))
        assert self._log is not None
        self._log.evaluation(self.step, measures)
        if evaluation.best is None:
            return False
        if evaluation.best not in measures:
            raise InvalidArgument(
                f"the evaluation measures {sorted(measures)}, and best={evaluation.best!r} is not among them"
            )
        # the first process decides for all of them, since a checkpoint needs all
        value = measures[evaluation.best] if self._first else 0.0
        value = self.processes.all_reduce(_stack([value], self.device)).item()
        if math.isfinite(value) and (self.best is None or value < self.best["value"]):
            self.best = {"step": self.step, "value": value}
            return True
        return False

    def _save(self) -> None:
        if self.checkpoints and self._saved != self.step:
            assert self._log is not None
            self._log.sync()
            run_state.save(self, self.checkpoints)
            self._saved = self.step

    def _finish(self) -> None:
        """The last checkpoint, the log on disk, and the plot of the losses beside it."""
        self._save()
        if self._log is not None:
            self._log.close()
        if self.checkpoints and self._first and self.result.steps:
            try:
                self.result.plot(self.checkpoints.path / "loss.png")
            except MissingDependency:
                progress.note("no plot of the losses: pip install 'pippin[plot]'", show_progress=self.show_progress)

    def _rate(self) -> float:
        """Units per second over the last twenty steps."""
        recent = self.result.steps[-20:]
        return sum(step.units for step in recent) / max(sum(step.seconds for step in recent), 1e-9)

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def _zero(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


def _global_generators(device: torch.device) -> list[torch.Generator]:
    """The default generators; `torch.manual_seed` would take a millisecond for each batch."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index or 0])
    elif device.type == "mps":
        generators.append(torch.mps._get_default_mps_generator())
    return generators


def _precise(value: Tensor) -> Tensor:
    return value.detach().to(_precision(value.device))


def _precision(device: torch.device) -> torch.dtype:
    """For sums over a step; Apple's GPUs have no 64-bit floats."""
    return torch.float32 if device.type == "mps" else torch.float64


def _stack(values: list[Tensor | float], device: torch.device) -> Tensor:
    precision = _precision(device)
    return torch.stack([torch.as_tensor(value, dtype=precision, device=device) for value in values])


def _check_loss(loss: Loss, step: int) -> None:
    if loss.total.ndim or not loss.count >= 0:
        raise InvalidInput(
            f"step {step}: a loss is a sum (a scalar) over 0 or more units, got shape {tuple(loss.total.shape)} and "
            f"count {loss.count}"
        )
    if not loss.total.requires_grad:
        raise InvalidInput(
            f"step {step}: the loss has no gradient; compute it from the model, and not under torch.no_grad() or "
            "torch.inference_mode()"
        )


def _check_weights(model: nn.Module) -> None:
    bad = [
        f"{name} ({int((~value.isfinite()).sum())} of {value.numel()})"
        for name, value in model.named_parameters()
        if value.is_floating_point() and not value.is_meta and not value.isfinite().all()
    ]
    if bad:
        raise InvalidInput(f"the model's weights are not finite before training: {', '.join(bad)}")
