"""Shared parts of the recipes that train language models: data, training with the best checkpoint, and results.

Notable here:
- a recipe's `Config` extends `TextTrainingConfig` with the settings of its method; `read_batches` and `train` do the
  rest
- after training, the model has the weights of the checkpoint with the lowest held-out loss
- pretraining data may be injected into the new data; the loss on a held-out part of it measures forgetting
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pippin.core import progress
from pippin.core.checks import checked
from pippin.core.errors import InvalidArgument
from pippin.engine.options import Device
from pippin.recipes import options
from pippin.recipes.options import paths

if TYPE_CHECKING:
    from pippin.core.report import Report
    from pippin.data.corpus import CorpusSubset, TokenizedPiece
    from pippin.data.packing import Packed
    from pippin.data.text.tokenizer import Tokenizer
    from pippin.data.token_batches import TokenBatch
    from pippin.language.language_model import LanguageModel
    from pippin.train import Objective, TrainingResult
    from pippin.train.distributed import DistributedProcesses
    from pippin.train.optimizers import Optimizer
    from pippin.train.trainer import Evaluation


@checked
@dataclass(frozen=True, kw_only=True)
class TextTrainingConfig:
    """Settings of all recipes that train a language model; `pippin.recipes.options` describes them."""

    model: options.Model
    data: options.Data
    out: options.Out
    fields: options.Fields = field(default_factory=dict)
    loss_on: options.LossOn = "assistant"
    held_out: options.HeldOut = 0.05
    max_length: options.MaxLength = 512
    steps: options.Steps = None
    epochs: options.Epochs = 1.0
    lr: options.LearningRate = 3e-4
    batch_size: options.BatchSize = 8
    gradient_accumulation_steps: options.GradientAccumulationSteps = 1
    precision: options.Precision = "float32"
    eval_every: options.EvalEvery = None
    save_every: options.SaveEvery = None
    seed: options.Seed = 0
    resume: options.Resume = False
    device: Device = None

    @property
    def out_path(self) -> Path:
        """The folder of the result."""
        return Path(self.out)

    @property
    def run_path(self) -> Path:
        """The folder of checkpoints, log and loss curve."""
        return self.out_path / "run"


@dataclass(frozen=True)
class TrainingOutcome:
    """The history of a training run, and the checkpoint that was selected.

    Attributes:
        training: every step and evaluation.
        held_out_before: held-out metrics before the first step; None if nothing is held out.
        held_out_after: the same for the selected weights.
        best_step: the step of the selected checkpoint; None if it is the last.
    """

    training: TrainingResult
    held_out_before: Mapping[str, float] | None
    held_out_after: Mapping[str, float] | None
    best_step: int | None


@dataclass(frozen=True, kw_only=True)
class TextTrainingResult:
    """The result of a run; recipes extend it with the results of their method.

    Attributes:
        model: name of the trained model.
        out: folder of the saved model.
        parameters: number of trained parameters.
        training: every step and evaluation.
        held_out_before: held-out metrics before the first step; None if nothing is held out.
        held_out_after: the same for the saved weights.
        best_step: the step of the saved weights; None if it is the last.
    """

    model: str
    out: Path
    parameters: int
    training: TrainingResult = field(repr=False)
    held_out_before: Mapping[str, float] | None
    held_out_after: Mapping[str, float] | None
    best_step: int | None

    loss_unit: ClassVar[str] = "nats/token"

    @property
    def stopped(self) -> str | None:
        """Why the run ended before its last step: "interrupted", "exhausted", or None."""
        return self.training.stopped

    @property
    def forgetting(self) -> float | None:
        """Increase of the loss on pretraining data, in nats per token; None if it was not measured."""
        name = "pretraining loss"
        if self.held_out_before is None or self.held_out_after is None or name not in self.held_out_before:
            return None
        return self.held_out_after[name] - self.held_out_before[name]

    def summary(self) -> dict[str, Any]:
        """The result as JSON values; of the steps only the first and the last loss."""
        training = self.training
        own = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self) if entry.name != "training"}
        return own | {
            "out": str(self.out),
            "title": training.title,
            "steps": len(training.steps),
            "first_loss": training.losses[0] if training.losses else None,
            "last_loss": training.losses[-1] if training.losses else None,
            "forgetting": self.forgetting,
            "seconds": training.seconds,
            "tokens_per_second": training.units_per_second,
            "stopped": training.stopped,
        }

    def report(self) -> Report:
        """Report losses before and after, forgetting, time and speed."""
        from pippin.core.report import Report, Row

        training = self.training
        rows = [Row("steps", len(training.steps))]
        if training.losses:
            rows += [
                Row("first loss", training.losses[0], self.loss_unit),
                Row("last loss", training.losses[-1], self.loss_unit),
            ]
        for when, measured in (("before", self.held_out_before), ("after", self.held_out_after)):
            for name, value in (measured or {}).items():
                rows.append(Row(f"held-out {name} {when}", value, self.loss_unit if name.endswith("loss") else ""))
        if self.forgetting is not None:
            rows.append(Row("forgetting", self.forgetting, self.loss_unit))
        rows += self.extra_rows()
        rows += [Row("time", training.seconds, "s"), Row("speed", training.units_per_second, "tokens/s")]
        return Report(training.title, rows)

    def extra_rows(self) -> list[Any]:
        """Further rows of the report, for subclasses."""
        return []


@dataclass(frozen=True)
class Injection:
    """Injection of pretraining data into the new data.

    Attributes:
        data: files of pretraining data; a held-out part measures forgetting.
        share: fraction of the training tokens that come from it; 0 only measures forgetting.
    """

    data: tuple[Path, ...]
    share: float

    @classmethod
    def of(cls, data: Sequence[options.StrPath], share: float, held_out: float | Path) -> Injection | None:
        """The injection that a config requests; None without pretraining data.

        Raises:
            InvalidArgument: a share without data, or data that is used neither for training nor for evaluation.
        """
        if share and not data:
            raise InvalidArgument("inject needs the text to inject: give pretrain_data (--pretrain-data FILE)")
        if data and not share and held_out == 0:
            raise InvalidArgument("pretrain_data is neither trained on (inject is 0) nor evaluated on (held_out is 0)")
        return cls(paths(tuple(data)), share) if data else None


@dataclass(frozen=True)
class TrainingBatches:
    """The data of a run.

    Attributes:
        training: an endless stream of batches.
        steps: optimizer steps of the run.
        held_out: batches that the loss is evaluated on; None if nothing is held out.
        pretraining: held-out batches of pretraining data, which measure forgetting.
    """

    training: Packed
    steps: int
    held_out: list[TokenBatch] | None
    pretraining: list[TokenBatch] | None = None


def read_batches(
    config: TextTrainingConfig,
    model: LanguageModel,
    injection: Injection | None = None,
    *,
    num_processes: int = 1,
    show_progress: bool = True,
) -> TrainingBatches:
    """Tokenize the data of a config and split off the held-out part; ``num_processes`` share each step.

    Raises:
        InvalidRecord, InvalidInput, InvalidArgument, MissingDependency: as `pippin.data.packing.tokenized`.
    """
    from pippin.data import packing
    from pippin.data.corpus import hold_out

    check_max_length(config, model)

    def tokenized(data: Sequence[Path]) -> Any:
        return packing.tokenized(
            data,
            model.tokenizer,
            template=model.template,
            max_length=config.max_length,
            loss_on=config.loss_on,
            fields=config.fields,
            show_progress=show_progress,
        )

    def packed(pieces: Any) -> list[TokenBatch]:
        return list(
            packing.packed(
                pieces, model.tokenizer, max_length=config.max_length, batch_size=config.batch_size, epochs=1
            )
        )

    training = tokenized(paths(config.data))
    held_out = None
    share = config.held_out if isinstance(config.held_out, float | int) else None
    if share is None:
        held_out = tokenized([Path(config.held_out)])  # type: ignore[arg-type]
    elif share > 0:
        training, held_out = hold_out(training, share, seed=config.seed)
    pretraining: Any = None
    pretraining_held_out = None
    if injection is not None:
        pretraining = tokenized(injection.data)
        if held_out is not None:
            pretraining, measured = hold_out(pretraining, share or 0.05, seed=config.seed)
            pretraining_held_out = _at_most(measured, max(held_out.tokens, 16 * config.max_length))
    injected = 0.0 if injection is None else injection.share
    # every epoch sees each new token once, and injected tokens come on top
    tokens = training.tokens / (1 - injected)
    tokens_per_step = config.max_length * config.batch_size * config.gradient_accumulation_steps * num_processes
    steps = config.steps or max(1, round(config.epochs * tokens / tokens_per_step))
    if injected:
        stream = _injected(training, pretraining, model.tokenizer, injected, config)
    else:
        stream = packing.packed(
            training, model.tokenizer, max_length=config.max_length, batch_size=config.batch_size, seed=config.seed
        )
    return TrainingBatches(
        stream,
        steps,
        None if held_out is None else packed(held_out),
        None if pretraining_held_out is None else packed(pretraining_held_out),
    )


def check_max_length(config: TextTrainingConfig, model: LanguageModel) -> None:
    """Check that the sequences fit into the model's context.

    Raises:
        InvalidArgument: they are longer.
    """
    if config.max_length > model.context_size:
        raise InvalidArgument(
            f"max_length is {config.max_length}, but the context of {model.name} is {model.context_size} tokens"
        )


def _at_most(pieces: CorpusSubset, tokens: int) -> CorpusSubset:
    """An evenly spaced subset of the pieces with about ``tokens`` tokens."""
    from pippin.data.corpus import CorpusSubset

    count = max(1, round(len(pieces) * min(1.0, tokens / pieces.tokens)))
    return CorpusSubset(pieces, [index * len(pieces) // count for index in range(count)])


def _injected(
    new: Sequence[TokenizedPiece],
    old: Sequence[TokenizedPiece],
    tokenizer: Tokenizer,
    share: float,
    config: TextTrainingConfig,
) -> Packed:
    """Batches of new pieces with injected old ones, by the share of tokens; both are shuffled every epoch."""
    from pippin.data.injection import Injected
    from pippin.data.packing import Packed
    from pippin.data.streams import Mapped, Shuffled

    def shuffled(pieces: Sequence[TokenizedPiece]) -> Mapped[list[TokenizedPiece], TokenizedPiece]:
        order: Shuffled[TokenizedPiece, list[TokenizedPiece]] = Shuffled(pieces, 1, seed=config.seed)
        return Mapped(order, iter)

    mixed = Injected(shuffled(new), shuffled(old), share, seed=config.seed, size=len)
    padding = tokenizer.eos_ids[0] if tokenizer.eos_ids else 0
    return Packed(mixed, config.max_length, config.batch_size, seed=config.seed, padding=padding)


def train(
    config: TextTrainingConfig,
    module: Any,
    batches: TrainingBatches,
    *,
    title: str,
    objective: Objective | None = None,
    measure: Callable[[Any], Mapping[str, float]] | None = None,
    optimizer: Optimizer | None = None,
    processes: DistributedProcesses | None = None,
    show_progress: bool = True,
) -> TrainingOutcome:
    """Train a module, then load the weights with the lowest held-out loss into it.

    Args:
        config: the settings of the run.
        module: the module to train.
        batches: the data.
        title: of the progress bar, the report and the loss curve.
        objective: the training objective; None for next-token cross-entropy.
        measure: a function from the module to metrics including "loss"; None for next-token cross-entropy on the
            held-out batches, if there are any.
        optimizer: the optimizer; None for AdamW with the config's learning rate.
        processes: the processes of a distributed run.
        show_progress: whether progress is shown.

    Raises:
        TrainingError: the loss is not finite, or the checkpoints are of another run.
        DiskFull: a checkpoint could not be written.
    """
    from pippin.language.objectives import NextToken
    from pippin.train import AdamW, Checkpoints, CosineSchedule, Trainer, load_weights

    options.refuse_existing_run(config.out, config.resume)
    eval_every = config.eval_every or max(1, batches.steps // 10)
    evaluation = _evaluation(batches, measure, eval_every)
    with progress.busy("loss before training", show_progress=show_progress):
        before = None if evaluation is None else dict(evaluation.measure(module))
    checkpoints = Checkpoints(config.run_path, config.save_every or eval_every, resume=config.resume)
    trainer = Trainer(
        module,
        NextToken() if objective is None else objective,
        batches.training,
        steps=batches.steps,
        optimizer=AdamW(lr=config.lr) if optimizer is None else optimizer,
        schedule=CosineSchedule(warmup_steps=0.05),
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        precision=config.precision,
        evaluation=evaluation,
        checkpoints=checkpoints,
        seed=config.seed,
        title=title,
        processes=processes,
        show_progress=show_progress,
    )
    training = trainer.fit()
    best_step = None
    if trainer.best is not None and trainer.best["step"] != trainer.step:
        path = checkpoints.best_path()
        if path is not None:
            load_weights(path, module)
            best_step = int(trainer.best["step"])
        if processes is not None:
            processes.barrier()  # no process may change the checkpoints while another still reads them
    after = None
    if training.evaluations:
        after = dict(next(figures for step, figures in reversed(training.evaluations) if best_step in (None, step)))
    return TrainingOutcome(training, before, after, best_step)


def _evaluation(batches: TrainingBatches, measure: Any, eval_every: int) -> Evaluation | None:
    from pippin.language.objectives import held_out
    from pippin.train import Evaluation
    from pippin.train.laws.forgetting import forgetting_evaluation

    if measure is None and batches.held_out is None:
        return None
    measure = measure or held_out(batches.held_out or ())
    if batches.pretraining is not None:
        return forgetting_evaluation(measure, held_out(batches.pretraining), eval_every)
    return Evaluation(measure, eval_every)
