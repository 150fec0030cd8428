"""The training loop.

Notable here:
- the loss of a step is the sum over its micro-batches and processes divided by the number of their units, and so is its
  gradient: the split into micro-batches changes nothing
- random numbers are a function of seed, step and micro-batch, so there is no random state to save: a resumed run has
  the same losses, bit-identical on a CPU; the caller's global generators are not changed
- a loss or gradient that is not finite raises before the parameters are updated, and the batch is saved to a file
- `advance` trains for some steps and returns, so two trainers can alternate, as in adversarial training
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
    """An evaluation during training.

    Attributes:
        measure: returns metrics by name; called with the model (with averaged weights if there is an EMA) in
            evaluation mode, under `torch.no_grad()`.
        eval_every: steps between evaluations; there is always one after the last step.
        best: the metric that selects the best checkpoint, lower is better; None selects none.
    """

    measure: Callable[[nn.Module], Mapping[str, float]]
    eval_every: PositiveInt
    best: str | None = "loss"


class Trainer:
    """A training run: `fit` trains to the end, `advance` for some steps.

    Args:
        model: the model; parameters with ``requires_grad=False`` are not trained and not saved.
        objective: computes the loss of a batch: a scalar tensor, the mean, or a `Loss`; see `pippin.train.objective`.
        data: batches, possibly nested; their tensors are moved to the model's device. If it has `state_dict` and
            `load_state_dict`, its position is saved; otherwise a resumed run reads the data again up to its position.
        steps: total number of steps (updates of the parameters).
        optimizer: `AdamW` or `Muon`.
        schedule: factor of the learning rate by step.
        gradient_accumulation_steps: micro-batches per step, for each process.
        max_grad_norm: the gradient is clipped to this 2-norm; None does not clip.
        precision: "bfloat16" computes under autocast; parameters and sums keep their dtype.
        ema: decay of an exponential moving average of the weights; None has none.
        evaluation: an evaluation during training.
        checkpoints: where the run is saved and logged; None writes nothing.
        seed: of all random numbers.
        device: moves the model there; None leaves it on its device.
        title: for the progress bar, the plot and the report.
        show_progress: whether to show a progress bar.
        processes: the processes of a distributed run; None is this process only.

    Attributes:
        step: number of completed steps.
        config: the config of the whole model; None if it has none.
        ema: the moving averages; None if not requested.
        result: the history so far.
        best: "step" and "value" of the best evaluation; None before the first.

    Raises:
        InvalidArgument: an argument is outside its range, or the model has no trainable parameter.
        InvalidInput: weights of the model are not finite; the message names all of them.

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
        self.config = getattr(model, "config", None)
        self.model = self.processes.prepare(model)
        self.objective, self.data = objective, data
        self.steps, self.step = steps, 0
        self.optimizer, self.schedule = optimizer, schedule
        self.gradient_accumulation_steps, self.max_grad_norm, self.precision = (
            gradient_accumulation_steps,
            max_grad_norm,
            precision,
        )
        if isinstance(optimizer, torch.optim.Optimizer):
            name = type(optimizer).__name__
            raise InvalidArgument(
                f"optimizer must be the settings of one, such as AdamW(lr=0.001), and not torch's {name}; another one "
                "is a class with build(model), which returns a list of torch's"
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
        """Train to the end, resuming from the newest checkpoint if there is one.

        On SIGINT or SIGTERM it completes the step, saves and returns; a second signal ends the process.

        Returns:
            The history; ``stopped`` says whether and why training ended before its last step.

        Raises:
            InvalidInput: the data has no batch, or the objective's loss has no gradient.
            NonFiniteLoss: a loss or gradient is not finite; the weights are those before the step.
            ResumeMismatch: the checkpoint was written by another run; the message lists the differences.
            DiskFull: a checkpoint could not be written; the previous one is complete.
        """
        self._begin()
        self.result.stopped = None
        show = self.show_progress and self._first
        saves = " and saves" if self.checkpoints else ""
        advice = f"{'evaluations not counted; ' if self.evaluation else ''}Ctrl-C ends after a step{saves}"
        shown = progress.bar(
            self.steps, self.result.title, unit="steps", done=self.step, advice=advice, show_progress=show
        )
        with Interruption(show_progress=show) as interruption, shown as bar, self._running():
            while self.step < self.steps and self.result.stopped is None:
                if not self._update(interruption):
                    self.result.stopped = "exhausted"
                    break
                bar.say(f"loss {self.result.steps[-1].loss:.4g}, {self._rate():,.0f} {self.result.unit}/s")
                bar.advance(1)
                if self._evaluation_is_due:
                    bar.say("evaluating")
                    bar.advance(0)
                self._evaluate_and_save(last=self.step == self.steps or self.result.stopped is not None)
            self._finish()
        return self.result

    def advance(self, steps: int) -> list[float]:
        """Train for ``steps`` more steps, or fewer if the run or its data ends earlier. Signals are not handled.

        Returns:
            The loss of each step.

        Raises:
            As `fit`.
        """
        self._begin()
        first = len(self.result.steps)
        with self._running():
            for _ in range(min(steps, self.steps - self.step)):
                if not self._update(None):
                    break
                self._evaluate_and_save(last=self.step == self.steps)
        if self.step == self.steps:
            self._finish()
        return [step.loss for step in self.result.steps[first:]]

    def skip(self, steps: int) -> None:
        """Read and discard the batches of the first ``steps`` steps, for data without `state_dict`.

        Raises:
            ResumeMismatch: the data ends earlier.
        """
        with self._fork_rng():
            for step in range(steps):
                if not self._read_batches(step):
                    raise ResumeMismatch(
                        f"the data ends after {step} steps, and the checkpoint was written after {steps}"
                    )

    @property
    def _first(self) -> bool:
        return self.processes.rank == 0

    def _begin(self) -> None:
        """Resume from the newest checkpoint and open the log; only at the first call."""
        if self._log is None:
            self._saved = run_state.resume(self)
            folder = self.checkpoints.path if self.checkpoints and self._first else None
            self._log = RunLog(folder, self.step, self.result)

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Enable training mode and gradients in the block; restore modes and random generators afterwards."""
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.train()
        try:
            with self._fork_rng(), torch.enable_grad():
                yield
        finally:
            for module, mode in modes:
                module.training = mode

    def _fork_rng(self) -> AbstractContextManager[None]:
        """Restore the caller's global random generators after the block; dropout samples from them."""
        kind = self.device.type
        return torch.random.fork_rng(
            [] if kind == "cpu" else [self.device], device_type="cuda" if kind == "cpu" else kind
        )

    def _reseed(self, what: str, step: int, index: int) -> None:
        """Seed the random generators for micro-batch ``index`` of ``step``, independently of earlier steps."""
        digest = hashlib.blake2b(f"{self.seed}/{what}/{step}/{index}".encode(), digest_size=16).digest()
        for generator in self._global:
            generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        self._generator.manual_seed(int.from_bytes(digest[8:], "little") >> 1)

    def _update(self, interruption: Interruption | None) -> bool:
        """Train one step; False if the data has ended."""
        start = time.perf_counter()
        batches = self._read_batches(self.step)
        if not batches:
            return False
        self._zero()
        sums = self._accumulate(batches)
        interrupted = float(interruption is not None and interruption.requested)
        keys = sorted(sums)
        # one all-reduce for all sums; any interrupted process stops all of them
        reduced = self.processes.all_reduce(_stack([*(sums[key] for key in keys), interrupted], self.device)).tolist()
        *values, stop = reduced
        totals = dict(zip(keys, values, strict=True))
        total, count = totals.pop("total"), totals.pop("count")
        norm, lr = self._apply(total, count, batches)
        self.step += 1
        self._after_update()
        loss = total / count if count else math.nan
        metrics = {key.removeprefix("metric."): value / count for key, value in totals.items()} if count else {}
        step = TrainingStep(self.step, loss, lr, norm, count, time.perf_counter() - start, metrics)
        self.result.steps.append(step)
        assert self._log is not None
        self._log.step(step)
        if stop:
            self.result.stopped = "interrupted"
        return True

    def _read_batches(self, step: int) -> list[tuple[int, Any]]:
        """This process's micro-batches of a step, each with its index in the step; fewer at the end of the data.

        Every process reads the micro-batches of all processes, so that all have the same position in the data.
        """
        size = self.processes.size
        batches, first = [], 0
        while first < self.gradient_accumulation_steps * size:
            group = []
            for index in range(first, first + size):
                self._reseed("data", step, index)
                if self._batches is None:
                    self._batches = iter(self.data)
                try:
                    group.append(next(self._batches))
                except StopIteration:
                    break
            if len(group) < size:
                break
            batches.append((first + self.processes.replica, group[self.processes.replica]))
            first += size
        if not batches and step == 0:
            raise InvalidInput("the data has no batch; nothing was trained")
        return batches

    def _accumulate(self, batches: list[tuple[int, Any]]) -> dict[str, Tensor | float]:
        """Accumulate the gradients of a step's micro-batches; returns the sums of losses, counts and metrics."""
        sums: dict[str, Tensor | float] = {"total": 0.0, "count": 0.0}
        autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bfloat16")
        for number, (index, batch) in enumerate(batches):
            self._reseed("loss", self.step, index)
            with self.processes.micro_batch(self.model, last=number == len(batches) - 1):
                with autocast:
                    loss = as_loss(self.objective(self.model, to_device(batch, self.device), self._generator))
                _check_loss(loss, self.step + 1)
                loss.total.backward()
            metrics = {f"metric.{name}": value for name, value in loss.metrics.items()}
            terms: dict[str, Tensor | float] = {"total": loss.total, "count": float(loss.count), **metrics}
            for key, value in terms.items():
                sums[key] = sums.get(key, 0.0) + (_accurate(value) if isinstance(value, Tensor) else value)
        return sums

    def _apply(self, total: float, count: float, batches: list[tuple[int, Any]]) -> tuple[float, float]:
        """Divide the gradients by ``count``, clip them and update the weights; returns gradient norm and lr."""
        factor = self.schedule(self.step, self.steps)
        for group in self._groups():
            group["lr"] = group["base_lr"] * factor
        lr = self._groups()[0]["lr"]
        trained = [p for p in self._parameters if p.grad is not None]
        gradients = [p.grad for p in trained if p.grad is not None]
        sum_norm = self.processes.total_norm(trained) if trained else torch.zeros(())
        norm = sum_norm.item()
        if not (math.isfinite(total) and math.isfinite(norm) and math.isfinite(count)):
            self._zero()
            run_state.raise_non_finite(self, total, norm, batches)
        if count == 0:
            # no unit counts in the loss: no update, and no weight decay either
            self._zero()
            return 0.0, lr
        # bit-identical to torch's clip_grad_norm_, with division and clipping in one pass over the gradients
        max_norm = math.inf if self.max_grad_norm is None else self.max_grad_norm
        norm, clip = torch.stack([sum_norm / count, max_norm / (sum_norm / count + 1e-6)]).tolist()
        scale = min(clip, 1.0) / count
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

    @property
    def _evaluation_is_due(self) -> bool:
        evaluation = self.evaluation
        return evaluation is not None and (self.step % evaluation.eval_every == 0 or self.step == self.steps)

    def _evaluate_and_save(self, *, last: bool) -> None:
        """Evaluate and save after a step, if due."""
        best = False
        if self.evaluation is not None and self._evaluation_is_due:
            best = self._evaluate(self.evaluation)
        checkpoints = self.checkpoints
        if checkpoints and (last or self.step % checkpoints.save_every == 0 or (best and checkpoints.best)):
            self._save()

    def _evaluate(self, evaluation: Evaluation) -> bool:
        """Evaluate the model; returns whether it is the best so far."""
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        averages = self.ema.applied(self.model) if self.ema else nullcontext()
        self._reseed("evaluation", self.step, 0)
        try:
            with averages, torch.no_grad():
                metrics = {name: float(value) for name, value in evaluation.measure(self.model).items()}
        finally:
            for module, mode in modes:
                module.training = mode
        self.result.evaluations.append((self.step, metrics))
        assert self._log is not None
        self._log.evaluation(self.step, metrics)
        if evaluation.best is None:
            return False
        if evaluation.best not in metrics:
            raise InvalidArgument(
                f"the evaluation measures {sorted(metrics)}, and best={evaluation.best!r} is not among them"
            )
        # one replica decides for all processes, since all of them take part in writing a checkpoint
        value = metrics[evaluation.best] if self.processes.replica == 0 else 0.0
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
        """Write the last checkpoint, the log and the plot of the losses."""
        self._save()
        self.processes.finish()
        if self._log is not None:
            self._log.close()
        if self.checkpoints and self._first and self.result.steps:
            try:
                self.result.plot(self.checkpoints.path / "loss.png")
            except MissingDependency:
                progress.note("no plot of the loss: pip install 'pippin[plot]'", show_progress=self.show_progress)

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
    """torch's global generators; seeding them directly avoids `torch.manual_seed`, which takes a millisecond."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index or 0])
    elif device.type == "mps":
        generators.append(torch.mps._get_default_mps_generator())
    return generators


def _accurate(value: Tensor) -> Tensor:
    return value.detach().to(_sum_dtype(value.device))


def _sum_dtype(device: torch.device) -> torch.dtype:
    """The dtype of sums over a step; Apple's GPUs have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def _stack(values: list[Tensor | float], device: torch.device) -> Tensor:
    dtype = _sum_dtype(device)
    return torch.stack([torch.as_tensor(value, dtype=dtype, device=device) for value in values])


def _check_loss(loss: Loss, step: int) -> None:
    if loss.total.ndim or not loss.count >= 0:
        raise InvalidInput(
            f"step {step}: a loss must be a scalar sum over 0 or more units, got shape {tuple(loss.total.shape)} and "
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
