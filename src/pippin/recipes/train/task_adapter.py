"""Train the adapter of a task: a low-rank update of a model that does one thing better, such as to fill in forms.

Notable here:
- the data is generated while it is trained on (`task_data`), so that no example is seen twice
- the loss is that of constrained decoding: among the tokens that the grammar of inference allows, where it leaves a
  choice
- what is saved is a moving average of the factors: single steps see few documents, and their noise does not stay in it
- kinds, layouts and languages can be held out; the loss on examples that have one of them is evaluated
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pippin.core import progress
from pippin.core.checks import Fraction, PositiveFloat, PositiveInt, checked
from pippin.core.errors import InvalidArgument
from pippin.core.options import Option
from pippin.engine.options import Device
from pippin.recipes import options

if TYPE_CHECKING:
    from pippin.core.report import Report
    from pippin.language.constrained_objective import ConstrainedBatch, ConstrainedExample
    from pippin.language.language_model import LanguageModel
    from pippin.recipes.train.task_data import ExampleSampler, ExampleSplit
    from pippin.shape.lora import LowRankModel
    from pippin.train import Trainer, TrainingResult

    MakeSampler = Callable[[LanguageModel, ExampleSplit, int], ExampleSampler]

_DATA, _ADAPTER = "Data", "Adapter"
Task = Literal["extraction", "summaries", "classification", "tools"]


@checked
@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of a run."""

    model: options.Model
    task: Annotated[Task, Option("What the adapter is for.")]
    out: options.Out
    init_adapter: Annotated[
        str | None, Option("Folder of an earlier adapter, whose training goes on with new data.", _ADAPTER, "PATH")
    ] = None
    steps: Annotated[PositiveInt, Option("Optimizer steps.", options.RUN)] = 2000
    lr: options.LearningRate = 5e-4
    batch_tokens: Annotated[PositiveInt, Option("Tokens of a step, prompts included.", options.RUN)] = 4096
    max_length: Annotated[PositiveInt, Option("Most tokens of an example.", _DATA)] = 1024
    rank: Annotated[PositiveInt, Option("Rank of each pair of matrices.", _ADAPTER)] = 16
    alpha: Annotated[PositiveFloat | None, Option("Scaled by alpha / rank; the rank without it.", _ADAPTER)] = None
    ema: Annotated[Fraction, Option("Decay of the average of the factors that is saved.", _ADAPTER)] = 0.995
    held_out_kinds: Annotated[
        tuple[str, ...],
        Option("Kinds of documents to evaluate on and not to train on.", _DATA, "NAMES", parse=options.names),
    ] = ()
    held_out_layouts: Annotated[
        tuple[str, ...], Option("Layouts to evaluate on and not to train on.", _DATA, "NAMES", parse=options.names)
    ] = ()
    held_out_languages: Annotated[
        tuple[str, ...], Option("Languages to evaluate on and not to train on.", _DATA, "TAGS", parse=options.names)
    ] = ()
    eval_every: options.EvalEvery = None
    save_every: options.SaveEvery = None
    seed: options.Seed = 0
    resume: options.Resume = False
    device: Device = None

    @property
    def out_path(self) -> Path:
        """The folder of the adapter."""
        return Path(self.out)

    @property
    def decay(self) -> float:
        """`ema`, or less for a short run: the average is then over about its last tenth."""
        return min(self.ema, 1 - 10 / max(self.steps, 20))


@dataclass(frozen=True, kw_only=True)
class TaskAdapterResult:
    """The result of a run; `out` is the folder of the adapter.

    Attributes:
        model: name of the base model.
        out: the folder.
        training: every step and evaluation.
    """

    model: str
    out: Path
    training: TrainingResult

    def summary(self) -> dict[str, Any]:
        """The result as JSON values."""
        training = self.training
        return {
            "model": self.model,
            "out": str(self.out),
            "steps": len(training.steps),
            "first_loss": training.losses[0] if training.losses else None,
            "last_loss": training.losses[-1] if training.losses else None,
            "held_out": dict(training.evaluations[-1][1]) if training.evaluations else None,
            "seconds": training.seconds,
            "stopped": training.stopped,
        }

    def report(self) -> Report:
        """A report of steps, losses, the last evaluation and speed."""
        return self.training.report()


class ExampleStream:
    """Batches of generated examples, a function of the seed and their number.

    Args:
        sample: returns a random example; None to draw another.
        batch_tokens: most tokens of a batch.
        seed: of the examples.
    """

    def __init__(self, sample: ExampleSampler, *, batch_tokens: int, seed: int) -> None:
        self.sample, self.batch_tokens, self.seed = sample, batch_tokens, seed
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        """The number of batches so far."""
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a batch."""
        self.count = int(state["count"])

    def __iter__(self) -> Iterator[ConstrainedBatch]:
        while True:
            batch = self.batch(self.count)
            self.count += 1
            yield batch

    def batch(self, number: int) -> ConstrainedBatch:
        """The batch of a number."""
        from pippin.language.constrained_objective import ConstrainedBatch

        rng, size = random.Random(f"{self.seed}/{number}"), 0
        examples: list[ConstrainedExample] = []
        while True:
            example = self.sample(rng)
            if example is None:
                continue
            if examples and size + len(example.ids) > self.batch_tokens:
                return ConstrainedBatch.of(examples)
            examples.append(example)
            size += len(example.ids)


def samplers() -> dict[Task, MakeSampler]:
    """The data of each task: a function of the model, the split and the most tokens of an example."""
    from pippin.recipes.train import task_data

    return {
        "extraction": task_data.extraction.examples,
        "summaries": task_data.summaries.examples,
        "classification": task_data.classification.examples,
        "tools": task_data.tools.examples,
    }


def run(config: Config, *, examples: MakeSampler | None = None, show_progress: bool = True) -> TaskAdapterResult:
    """Train an adapter and save it in PEFT's layout.

    Args:
        config: the settings.
        examples: returns a sampler for a model, a split and the most tokens of an example; None for the task's own.
        show_progress: whether progress is shown on stderr.

    Raises:
        InvalidArgument: a kind, layout or language that there is not, or nothing is left to train on.
        ModelNotFound: the model cannot be loaded. TrainingError: the loss is not finite, or the run in the folder is
            another one.
    """
    from pippin.language.adapter_files import read_factors
    from pippin.language.language_model import load
    from pippin.shape.lora import LowRankModel

    options.refuse_existing_run(config.out, config.resume)
    seen, other = _splits(config)
    # gradients need dense weights: in bfloat16, they are as exact as the codes and twice as fast as float32
    base = load(config.model, device=config.device, pack=False, dtype="bfloat16")
    adapted = LowRankModel(
        base.module,
        rank=config.rank,
        alpha=float(config.alpha or config.rank),
        seed=config.seed,
        lr_ratio=4.0,
        init=None if config.init_adapter is None else read_factors(base, config.init_adapter),
    )
    examples = examples or samplers()[config.task]
    stream, unseen = (
        ExampleStream(examples(base, split, config.max_length), batch_tokens=config.batch_tokens, seed=seed)
        for split, seed in zip((seen, other), (config.seed, config.seed + 1), strict=True)
    )
    progress.note(
        f"{base.name}: an adapter of {sum(p.numel() for p in adapted.parameters()):,} parameters",
        show_progress=show_progress,
    )
    with progress.busy("examples to evaluate on", show_progress=show_progress):
        batches = [unseen.batch(number) for number in range(4)]
    trainer = _trainer(config, base.name, adapted, stream, batches, show_progress)
    training = trainer.fit()
    assert trainer.ema is not None
    with trainer.ema.applied(adapted):
        adapted.save(config.out_path, base, metadata=_provenance(config, training))
    return TaskAdapterResult(model=base.name, out=config.out_path, training=training)


def _trainer(
    config: Config,
    name: str,
    adapted: LowRankModel,
    stream: ExampleStream,
    batches: Sequence[ConstrainedBatch],
    show_progress: bool,
) -> Trainer:
    """The training of the factors, evaluated on some batches."""
    from pippin.language.constrained_objective import ConstrainedNextToken
    from pippin.train import AdamW, Checkpoints, Evaluation, Trainer, WSDSchedule

    eval_every = config.eval_every or max(1, config.steps // 10)
    return Trainer(
        adapted,
        ConstrainedNextToken(),
        stream,
        steps=config.steps,
        optimizer=AdamW(lr=config.lr, weight_decay=0.0),
        schedule=WSDSchedule(warmup_steps=0.02, decay_steps=0.2),
        ema=config.decay,
        evaluation=Evaluation(_measure(batches), eval_every),
        checkpoints=Checkpoints(config.out_path / "run", config.save_every or eval_every, resume=config.resume),
        seed=config.seed,
        title=f"{name}, adapter for {config.task}",
        show_progress=show_progress,
    )


def _measure(batches: Sequence[ConstrainedBatch]) -> Callable[[Any], Mapping[str, float]]:
    """Mean loss and accuracy over the choices of some batches."""
    from pippin.language.constrained_objective import ConstrainedNextToken

    def measure(model: Any) -> Mapping[str, float]:
        losses = [ConstrainedNextToken()(model, batch) for batch in batches]
        count = sum(each.count for each in losses)
        right = sum(float(each.metrics["accuracy"]) for each in losses)
        return {"loss": sum(float(each.total) for each in losses) / count, "accuracy": right / count}

    return measure


def _splits(config: Config) -> tuple[ExampleSplit, ExampleSplit]:
    """What is trained on, and what is evaluated on."""
    from pippin.data.synthetic import documents
    from pippin.recipes.train.task_data import ExampleSplit

    every = {
        "kind": (documents.KINDS, config.held_out_kinds),
        "layout": (
            tuple(dict.fromkeys(name for kind in documents.KINDS for name in documents.layouts(kind))),
            config.held_out_layouts,
        ),
        "language": (documents.LANGUAGES, config.held_out_languages),
    }
    found = []
    for what, (names, held) in every.items():
        if unknown := [name for name in held if name not in names]:
            raise InvalidArgument(f"there is no {what} {unknown[0]!r}; there are {', '.join(names)}")
        left = tuple(name for name in names if name not in held)
        if not left:
            raise InvalidArgument(f"every {what} is held out, so that none is left to train on")
        found.append((left, tuple(held)))
    kinds, layouts, languages = found
    return (
        ExampleSplit(kinds[0], layouts[0], languages[0]),
        ExampleSplit(kinds[1], layouts[1], languages[1] or languages[0], held_out=True),
    )


def _provenance(config: Config, training: TrainingResult) -> dict[str, Any]:
    from importlib.metadata import version

    return {
        "pippin": version("pippin"),
        "recipe": "task-adapter",
        "task": config.task,
        "continues": _earlier(config.init_adapter),
        "steps": len(training.steps),
        "batch_tokens": config.batch_tokens,
        "max_length": config.max_length,
        "learning_rate": config.lr,
        "ema": config.decay,
        "seed": config.seed,
        "held_out": {
            "kinds": list(config.held_out_kinds),
            "layouts": list(config.held_out_layouts),
            "languages": list(config.held_out_languages),
        },
        "evaluations": [[step, dict(figures)] for step, figures in training.evaluations],
    }


def _earlier(adapter: str | None) -> Any:
    """Where the adapter comes from that the training goes on with; None without one, or where it does not say so."""
    from pippin.core.formats.checkpoint import read_json
    from pippin.language.adapter_files import BASE

    if adapter is None or not (path := Path(adapter) / BASE).is_file():
        return None
    return read_json(path).get("made")
