"""Latent reasoning (LaDiR): train a language model that reasons in blocks of latent vectors before it answers.

Notable here:
- three runs, each with its own log and checkpoints: the autoencoder of sentences, stage 1 (teacher forcing) and stage 2
  (rollouts on sampled latents)
- at the end, held-out problems are answered from their questions, with several numbers of denoising steps
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pippin.core.checks import NonNegativeInt, PositiveInt, checked
from pippin.core.errors import InvalidArgument
from pippin.core.options import Option
from pippin.engine.options import Device
from pippin.recipes import options
from pippin.recipes.options import paths

if TYPE_CHECKING:
    from pippin.core.report import Report
    from pippin.language.methods.ladir import LatentReasoner, Problem, RolloutTraining, TeacherForcing
    from pippin.train import AdamW, Checkpoints, TrainingResult

_THOUGHT = "Thought"
SAMPLING_STEPS = (1, 4, 16)
"""Numbers of denoising steps for the evaluation."""
MAX_EVALUATED = 64
"""Maximum number of held-out problems in the evaluation."""


@checked
@dataclass(frozen=True, kw_only=True)
class Config:
    """The settings of a run; records have a prompt, and a completion of sentences that ends with the answer."""

    model: options.Model
    data: options.Data
    out: options.Out
    fields: options.Fields = field(default_factory=dict)
    held_out: options.HeldOut = 0.05
    max_length: Annotated[PositiveInt, Option("Tokens of a sentence of a solution.", options.DATA)] = 64
    steps: options.Steps = None
    epochs: options.Epochs = 1.0
    lr: options.LearningRate = 1e-3
    batch_size: options.BatchSize = 32
    gradient_accumulation_steps: options.GradientAccumulationSteps = 1
    precision: options.Precision = "float32"
    save_every: Annotated[
        PositiveInt | None, Option("Steps between checkpoints; a tenth of each run without it.", options.RUN)
    ] = None
    seed: options.Seed = 0
    resume: options.Resume = False
    device: Device = None
    block_size: Annotated[PositiveInt, Option("Vectors of a block of thought.", _THOUGHT)] = 3
    latent_size: Annotated[PositiveInt, Option("Dimensions of a vector.", _THOUGHT)] = 128
    max_blocks: Annotated[
        PositiveInt | None,
        Option("Blocks of a thought; as many as the longest solution has without it.", _THOUGHT),
    ] = None
    num_noise_samples: Annotated[PositiveInt, Option("Noisy copies of each block in a training pass.", _THOUGHT)] = 8
    vae_steps: Annotated[
        PositiveInt | None, Option("Optimizer steps of the autoencoder; as many as --steps without it.", _THOUGHT)
    ] = None
    rollout_steps: Annotated[
        NonNegativeInt | None,
        Option("Optimizer steps of stage 2; a tenth of --steps without it, 0 for none.", _THOUGHT),
    ] = None

    @property
    def run_path(self) -> Path:
        """The folder of checkpoints, logs and loss curves, one folder for each of the three runs."""
        return Path(self.out) / "run"


@dataclass(frozen=True)
class LatentReasoningResult:
    """The result of a run.

    Attributes:
        out: folder of the reasoner; empty if the run was interrupted.
        runs: the started ones of "autoencoder", "stage 1" and "stage 2".
        reconstructed: fraction of sentences that the autoencoder reconstructs exactly.
        solved: exact-match accuracy on the held-out problems, by denoising steps.
    """

    out: Path
    runs: Mapping[str, TrainingResult] = field(repr=False)
    reconstructed: float | None = None
    solved: Mapping[int, float] = field(default_factory=dict)

    @property
    def stopped(self) -> str | None:
        """The value "interrupted" if a signal ended one of the runs; None otherwise."""
        return next((run.stopped for run in self.runs.values() if run.stopped == "interrupted"), None)

    def _figures(self) -> dict[str, float]:
        known = {} if self.reconstructed is None else {"sentences given back": self.reconstructed}
        return known | {f"answers as written, {steps} steps": share for steps, share in self.solved.items()}

    def summary(self) -> dict[str, Any]:
        """The result as JSON values; of the steps only the first and the last loss."""
        return {
            "out": str(self.out),
            "steps": {name: len(run.steps) for name, run in self.runs.items()},
            "losses": {name: [run.losses[0], run.losses[-1]] for name, run in self.runs.items()},
            "held_out": self._figures(),
            "seconds": sum(run.seconds for run in self.runs.values()),
            "stopped": self.stopped,
        }

    def report(self) -> Report:
        """Report first and last losses of each run, and the accuracies."""
        from pippin.core.report import Report, Row

        rows = [
            Row(f"{name}, {when} loss", run.losses[place])
            for name, run in self.runs.items()
            for when, place in (("first", 0), ("last", -1))
        ]
        rows += [Row(name, 100 * share, "%") for name, share in self._figures().items()]
        return Report("reasoner", [*rows, Row("time", sum(run.seconds for run in self.runs.values()), "s")])


def run(config: Config, *, show_progress: bool = True) -> LatentReasoningResult:
    """Train a latent reasoner and save it for `pippin reason` and `LatentReasoner.load`.

    Args:
        config: the settings.
        show_progress: whether progress is shown on stderr.

    Raises:
        InvalidArgument: settings that are incompatible with each other, the model or the data.
        ModelNotFound, InvalidRecord, InvalidInput: the model or the data cannot be read.
        TrainingError: the loss is not finite, or the checkpoints in the folder are of another run.
    """
    import pippin
    from pippin.language.methods import ladir
    from pippin.language.methods.ladir.train import reconstruction_accuracy

    options.refuse_existing_run(config.out, config.resume)
    training, held_out = _problems(config)
    steps_per_epoch = len(training) / (config.batch_size * config.gradient_accumulation_steps)
    steps = config.steps or max(1, round(config.epochs * steps_per_epoch))
    blocks = max(len(problem.steps) for problem in training)
    if config.max_blocks is not None and config.max_blocks < blocks:
        raise InvalidArgument(f"max_blocks is {config.max_blocks}, and a solution has {blocks} sentences")
    base = pippin.load(config.model, device=config.device, dtype="float32", pack=False)
    sentences = list(dict.fromkeys(step for problem in training for step in problem.steps))
    vae = ladir.ThoughtVAE.from_language_model(
        base,
        block_size=config.block_size,
        latent_size=config.latent_size,
        max_sentence_length=config.max_length,
        seed=config.seed,
    )
    vae_steps = config.vae_steps or steps
    runs: dict[str, TrainingResult] = {}
    runs["autoencoder"] = ladir.fit_vae(
        vae,
        sentences,
        steps=vae_steps,
        batch_size=config.batch_size,
        optimizer=_optimizer(config.lr),
        checkpoints=_checkpoints(config, "autoencoder", vae_steps),
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        precision=config.precision,
        seed=config.seed,
        show_progress=show_progress,
    )
    if runs["autoencoder"].stopped == "interrupted":
        return LatentReasoningResult(Path(config.out), runs)
    longest = max(len(base.tokenizer.encode(problem.answer)) for problem in training) + 1
    reasoner = ladir.LatentReasoner.from_language_model(
        base, vae, max_blocks=config.max_blocks or blocks, max_answer_length=max(16, 2 * longest), seed=config.seed
    )
    examples = ladir.training_examples(reasoner, training)
    rollout_steps = max(1, steps // 10) if config.rollout_steps is None else config.rollout_steps
    stages: list[tuple[str, TeacherForcing | RolloutTraining, int, float]] = [
        ("stage 1", ladir.TeacherForcing(num_noise_samples=config.num_noise_samples), steps, config.lr),
        ("stage 2", ladir.RolloutTraining(num_noise_samples=config.num_noise_samples), rollout_steps, config.lr / 10),
    ]
    for name, objective, count, lr in stages[: 2 if rollout_steps else 1]:
        runs[name] = _train_stage(config, reasoner, examples, name, objective, count, lr, show_progress=show_progress)
        if runs[name].stopped == "interrupted":
            return LatentReasoningResult(Path(config.out), runs)
    reasoner.eval().save(Path(config.out))
    reconstructed = reconstruction_accuracy(vae, sentences[:1024])
    return LatentReasoningResult(Path(config.out), runs, reconstructed, _solved(reasoner, held_out))


def _problems(config: Config) -> tuple[list[Problem], list[Problem]]:
    """Read the training problems and the held-out problems."""
    from pippin.language.methods.ladir import read_problems

    training = read_problems(paths(config.data), fields=config.fields)
    if not isinstance(config.held_out, float | int):
        return training, read_problems([config.held_out], fields=config.fields)
    random.Random(config.seed).shuffle(training)
    count = math.ceil(config.held_out * len(training)) if len(training) > 1 else 0
    return training[count:], training[:count]


def _optimizer(lr: float) -> AdamW:
    from pippin.train import AdamW

    return AdamW(lr=lr, weight_decay=0.03)


def _checkpoints(config: Config, name: str, steps: int) -> Checkpoints:
    from pippin.train import Checkpoints

    save_every = config.save_every or max(1, steps // 10)
    return Checkpoints(config.run_path / name.replace(" ", "-"), save_every, keep=1, resume=config.resume)


def _train_stage(
    config: Config,
    reasoner: LatentReasoner,
    examples: Sequence[Any],
    name: str,
    objective: TeacherForcing | RolloutTraining,
    steps: int,
    lr: float,
    *,
    show_progress: bool,
) -> TrainingResult:
    """Train stage 1 or stage 2."""
    from pippin.language.methods.ladir import fit_reasoner

    return fit_reasoner(
        reasoner,
        examples,
        objective,
        steps=steps,
        batch_size=config.batch_size,
        optimizer=_optimizer(lr),
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        precision=config.precision,
        checkpoints=_checkpoints(config, name, steps),
        seed=config.seed,
        show_progress=show_progress,
    )


def _solved(reasoner: LatentReasoner, held_out: Sequence[Problem]) -> dict[int, float]:
    """Exact-match accuracy on held-out problems, by denoising steps."""
    problems = held_out[:MAX_EVALUATED]
    accuracy = {}
    for steps in SAMPLING_STEPS if problems else ():
        answers = reasoner.generate([problem.question for problem in problems], steps=steps, seed=0)
        correct = sum(answer.text.strip() == problem.answer for answer, problem in zip(answers, problems, strict=True))
        accuracy[steps] = correct / len(problems)
    return accuracy
