"""What the verbs of `pippin train` share: their options, the data they read, the run, and what they say at its end."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from pippin.cli import INTERRUPTED, injection, terminal
from pippin.core.errors import InvalidArgument

if TYPE_CHECKING:
    from pippin.data.streams import Packed
    from pippin.language.load import LanguageModel
    from pippin.train import Training
    from pippin.train.optimisers import Optimiser
    from pippin.train.parallel import Parallel

_DATA = "Data"
_RUN = "Run"

Data = Annotated[
    list[Path],
    typer.Option(
        metavar="FILE",
        help="Text, JSON lines, Parquet, a folder of those, or one of Hugging Face datasets; may be repeated.",
        rich_help_panel=_DATA,
    ),
]
Field = Annotated[
    list[str] | None,
    typer.Option(
        metavar="OURS=THEIRS",
        help="What the data calls text, messages, prompt or completion: prompt=question.",
        rich_help_panel=_DATA,
    ),
]
Learn = Annotated[
    str,
    typer.Option(
        help="assistant learns texts, completions and the assistant's turns; all prompts too.", rich_help_panel=_DATA
    ),
]
HeldOut = Annotated[
    str,
    typer.Option(
        metavar="SHARE|FILE",
        help="What the loss is measured on: a share of the data that is not learnt, or a file; 0 for nothing.",
        rich_help_panel=_DATA,
    ),
]
Length = Annotated[int, typer.Option(help="Tokens of a row; documents are packed into rows.", rich_help_panel=_DATA)]
Out = Annotated[Path, typer.Option(metavar="FOLDER", help="Where the result goes; the run's files in FOLDER/run.")]
Steps = Annotated[
    int | None, typer.Option(help="Updates; without it, as many as --epochs takes.", rich_help_panel=_RUN)
]
Epochs = Annotated[float, typer.Option(help="How often to go through the data.", rich_help_panel=_RUN)]
LR = Annotated[float, typer.Option("--lr", help="Highest learning rate.", rich_help_panel=_RUN)]
Rows = Annotated[int, typer.Option(help="Rows computed together.", rich_help_panel=_RUN)]
Accumulate = Annotated[int, typer.Option(help="So many times --rows make one update.", rich_help_panel=_RUN)]
Precision = Annotated[
    str, typer.Option(help="float32, or bfloat16 (computes in it, keeps float32 weights).", rich_help_panel=_RUN)
]
Every = Annotated[
    int | None,
    typer.Option(
        help="Updates between evaluations and checkpoints; a tenth of the run without it.", rich_help_panel=_RUN
    ),
]
Seed = Annotated[int, typer.Option(help="The same seed gives the same run.", rich_help_panel=_RUN)]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in FOLDER/run.", rich_help_panel=_RUN)]
Ray = Annotated[bool, typer.Option("--ray", help="Train on workers of a Ray cluster.", rich_help_panel=_RUN)]
Workers = Annotated[
    int | None, typer.Option(help="With --ray: how many; one for each core without it.", rich_help_panel=_RUN)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@dataclass(frozen=True)
class Plan:
    """One run, as the options describe it."""

    data: Sequence[Path]
    out: Path
    length: int
    rows: int
    lr: float
    steps: int | None = None
    epochs: float = 1.0
    accumulate: int = 1
    precision: str = "float32"
    every: int | None = None
    seed: int = 0
    resume: bool = False
    held_out: str = "0.05"
    learn: str = "assistant"
    fields: Sequence[str] = field(default_factory=tuple)
    inject: float = 0.0
    pretrain: Sequence[Path] = field(default_factory=tuple)

    def __post_init__(self) -> None:
        least = {"--length": self.length, "--rows": self.rows, "--accumulate": self.accumulate}
        least |= {n: v for n, v in (("--steps", self.steps), ("--every", self.every)) if v is not None}
        for name, value in least.items():
            if value < 1:
                raise InvalidArgument(f"{name} must be at least 1, got {value}")
        for name, number in (("--lr", self.lr), ("--epochs", self.epochs)):
            if not 0 < number < math.inf:
                raise InvalidArgument(f"{name} must be above 0, got {number}")
        if not 0 <= self.inject < 1:
            raise InvalidArgument(f"--inject is {self.inject}; give a share from 0 to below 1")
        if self.inject and not self.pretrain:
            raise InvalidArgument("--inject needs the text to inject: give --pretrain-data FILE")
        if self.pretrain and not self.inject and share_of(self.held_out) == 0:
            raise InvalidArgument("--pretrain-data is neither learnt (--inject) nor measured on (--held-out is 0)")
        if self.learn not in ("assistant", "all"):
            raise InvalidArgument(f"--learn is {self.learn!r}; choose assistant or all")
        if self.precision not in ("float32", "bfloat16"):
            raise InvalidArgument(f"--precision is {self.precision!r}; choose float32 or bfloat16")
        if not self.resume and any(self.run_folder.glob("step-*")):
            raise InvalidArgument(f"{self.run_folder} holds a run; go on with it with --resume, or give another --out")

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values, for another process."""
        values = asdict(self)
        paths = {name: [str(path) for path in getattr(self, name)] for name in ("data", "pretrain")}
        return values | paths | {"out": str(self.out), "fields": list(self.fields)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Plan:
        """The plan that `to_json` described."""
        paths = {name: [Path(path) for path in values[name]] for name in ("data", "pretrain")}
        return cls(**{**values, **paths, "out": Path(values["out"])})

    @property
    def run_folder(self) -> Path:
        """Checkpoints, logs and the plot."""
        return self.out / "run"

    @property
    def names(self) -> dict[str, str]:
        """What the data calls its fields.

        Raises:
            InvalidArgument: an option that is not OURS=THEIRS.
        """
        for pair in self.fields:
            if "=" not in pair:
                raise InvalidArgument(f"--field is {pair!r}; write it as prompt=question")
        return dict(pair.split("=", 1) for pair in self.fields)


_OPTIONS: dict[str, tuple[Any, Any]] = {
    "data": (Data, inspect.Parameter.empty),
    "out": (Out, inspect.Parameter.empty),
    "field": (Field, None),
    "learn": (Learn, "assistant"),
    "held_out": (HeldOut, "0.05"),
    "length": (Length, 512),
    "steps": (Steps, None),
    "epochs": (Epochs, 1.0),
    "lr": (LR, 3e-4),
    "rows": (Rows, 8),
    "accumulate": (Accumulate, 1),
    "precision": (Precision, "float32"),
    "every": (Every, None),
    "seed": (Seed, 0),
    "resume": (Resume, False),
}
"""The options that make a `Plan`, each with its default."""


def planned(*, injects: bool = False, **defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a verb all options of a `Plan`, which it receives as its argument ``plan``.

    Args:
        injects: whether old data may be mixed in, and forgetting measured.
        defaults: of options that are not those of other verbs; a default for ``data`` makes it optional.
    """

    chosen = _OPTIONS | (injection.OPTIONS if injects else {})

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(verb)
        def command(**given: Any) -> None:
            values = {name: given.pop(name) for name in _OPTIONS}
            values["data"], values["fields"] = values["data"] or (), values.pop("field") or ()
            if injects:
                values["inject"], values["pretrain"] = given.pop("inject"), given.pop("pretrain_data") or ()
            verb(plan=Plan(**values), **given)

        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(verb, eval_str=True).parameters.values():
            own = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)]
            parameters += _plan_parameters(chosen, defaults) if parameter.name == "plan" else own
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


def _plan_parameters(chosen: Mapping[str, tuple[Any, Any]], defaults: Mapping[str, Any]) -> list[inspect.Parameter]:
    kind = inspect.Parameter.KEYWORD_ONLY
    return [
        inspect.Parameter(name, kind, annotation=annotation, default=defaults.get(name, default))
        for name, (annotation, default) in chosen.items()
    ]


@dataclass(frozen=True)
class Batches:
    """What a run learns from and is measured on."""

    learnt: Packed
    steps: int
    measured: list[Any] | None
    remembered: list[Any] | None = None
    """What the model should not forget; None where no old data was given, or nothing is measured."""


def read(plan: Plan, model: LanguageModel, *, processes: int = 1, show: bool = True) -> Batches:
    """Tokenise the data of a plan and divide it; ``processes`` share each step.

    Raises:
        InvalidRecord, InvalidInput, InvalidArgument, MissingDependency: as `pippin.data.streams.token_batches`.
    """
    from pippin.data import streams
    from pippin.data.tokens import hold_out

    if plan.length > model.context_size:
        raise InvalidArgument(f"--length is {plan.length}; {model.name} was made for {model.context_size} tokens")

    def tokenised(data: Sequence[Path]) -> Any:
        how = {"template": model.template, "length": plan.length, "learn": cast(Any, plan.learn), "fields": plan.names}
        return streams.tokenised(data, model.tokenizer, **how, show=show)

    share = share_of(plan.held_out)
    learnt = tokenised(plan.data)
    measured = None
    if share is None:
        measured = tokenised([Path(plan.held_out)])
    elif share > 0:
        learnt, measured = hold_out(learnt, share, seed=plan.seed)
    one = {"length": plan.length, "rows": plan.rows}
    remembered = None
    old: Any = None
    if plan.pretrain:
        old = tokenised(plan.pretrain)
        if measured is not None:
            old, remembered = hold_out(old, share or 0.05, seed=plan.seed)
            remembered = injection.at_most(remembered, max(measured.tokens, 16 * plan.length))
    tokens = learnt.tokens / (1 - plan.inject)
    step = plan.length * plan.rows * plan.accumulate * processes
    steps = plan.steps or max(1, round(plan.epochs * tokens / step))
    if plan.inject:
        batches = injection.injected(learnt, old, model.tokenizer, plan.inject, seed=plan.seed, **one)
    else:
        batches = streams.packed(learnt, model.tokenizer, seed=plan.seed, **one)
    held, kept = (
        None if pieces is None else list(streams.packed(pieces, model.tokenizer, epochs=1, **one))
        for pieces in (measured, remembered)
    )
    return Batches(batches, steps, held, kept)


def share_of(text: str) -> float | None:
    """A share between 0 and 1; None for the name of a file."""
    try:
        share = float(text)
    except ValueError:
        return None
    if not 0 <= share < 1:
        raise InvalidArgument(f"--held-out is {text}; give a share from 0 to below 1, or a file")
    return share


@dataclass(frozen=True)
class Outcome:
    """A run that is over, and the held-out figures around it."""

    training: Training
    before: dict[str, float] | None
    after: dict[str, float] | None
    best: int | None
    """The step whose weights were taken, where they are not the last."""

    @property
    def forgetting(self) -> float | None:
        """By how many nats a token the loss on old data rose; None where it was not measured."""
        name = "pretraining loss"
        if self.before is None or self.after is None or name not in self.before:
            return None
        return self.after[name] - self.before[name]


def run(
    plan: Plan,
    module: Any,
    batches: Batches,
    *,
    title: str,
    optimiser: Optimiser | None = None,
    objective: Any = None,
    measured: Any = None,
    measure: Any = None,
    parallel: Parallel | None = None,
    show: bool = True,
) -> Outcome:
    """Train a module on the batches, and leave it with the weights that were best on what was held out.

    ``measured`` is the objective of the held-out batches; None for the likelihood of the next token. ``measure`` takes
    the place of both: a function from the module to figures, "loss" among them.

    Raises:
        TrainingError: the loss is not finite, or the run in the folder is another one.
        DiskFull: a checkpoint could not be written.
    """
    from pippin.language.objectives import NextToken, held_out
    from pippin.train import AdamW, Checkpoints, Cosine, Evaluation, Trainer, load_weights
    from pippin.train.forgetting import watch

    objective = NextToken() if objective is None else objective
    every = plan.every or max(1, batches.steps // 10)
    evaluation = before = None
    if measure is not None or batches.measured is not None:
        measure = measure or held_out(batches.measured or (), measured)
        evaluation = Evaluation(measure, every)
        if batches.remembered is not None:
            evaluation = watch(measure, held_out(batches.remembered, measured), every)
        before = dict(evaluation.measure(module))
    checkpoints = Checkpoints(plan.run_folder, every, resume=plan.resume)
    trainer = Trainer(
        module,
        objective,
        batches.learnt,
        steps=batches.steps,
        optimiser=AdamW(lr=plan.lr) if optimiser is None else optimiser,
        schedule=Cosine(warmup=0.05),
        accumulate=plan.accumulate,
        precision=cast(Any, plan.precision),
        evaluation=evaluation,
        checkpoints=checkpoints,
        seed=plan.seed,
        title=title,
        parallel=parallel,
        show=show,
    )
    training = trainer.fit()
    best = None
    if trainer.best is not None and trainer.best["step"] != trainer.step:
        folder = checkpoints.best_folder()
        if folder is not None:
            load_weights(folder, module)
            best = int(trainer.best["step"])
        if parallel is not None:
            parallel.wait()  # nobody goes on while another still reads
    after = None
    if training.evaluations:
        after = dict(next(figures for step, figures in reversed(training.evaluations) if best in (None, step)))
    return Outcome(training, before, after, best)


def summary(plan: Plan, outcome: Outcome, facts: dict[str, Any]) -> dict[str, Any]:
    """A run as JSON values, beside further facts."""
    training = outcome.training
    return {
        "out": str(plan.out),
        **facts,
        "title": training.title,
        "steps": len(training.steps),
        "first_loss": training.losses[0] if training.losses else None,
        "last_loss": training.losses[-1] if training.losses else None,
        "held_out_before": outcome.before,
        "held_out_after": outcome.after,
        "forgetting": outcome.forgetting,
        "best_step": outcome.best,
        "seconds": training.seconds,
        "tokens_per_second": training.units_per_second,
        "stopped": training.stopped,
    }


def conclude(plan: Plan, outcome: Outcome, *, as_json: bool, facts: dict[str, Any]) -> None:
    """Say how a run went: a table, or one JSON object with these further facts."""
    tell(summary(plan, outcome, facts), as_json=as_json)


def tell(made: dict[str, Any], *, as_json: bool) -> None:
    """Print a `summary`: a table and where things are, or the JSON object itself.

    Raises:
        typer.Exit: the run was stopped with Ctrl-C; with the exit code that says so.
    """
    if as_json:
        terminal.write(terminal.to_json(made) + "\n")
    else:
        _show(made)
    if made["stopped"] == "interrupted":
        terminal.note("interrupted; the same command with --resume goes on")
        raise typer.Exit(INTERRUPTED)


def _show(made: dict[str, Any]) -> None:
    from pippin.core.report import Report, Row

    rows = [Row("steps", made["steps"])]
    rows += [Row(f"{which} loss", made[f"{which}_loss"], "nats/token") for which in ("first", "last")]
    for when in ("before", "after"):
        for name, value in (made[f"held_out_{when}"] or {}).items():
            rows.append(Row(f"held-out {name} {when}", value, "nats/token" if name.endswith("loss") else ""))
    if made["forgetting"] is not None:
        rows.append(Row("forgetting", made["forgetting"], "nats/token"))
    rows += [Row("time", made["seconds"], "s"), Row("speed", made["tokens_per_second"], "tokens/s")]
    Report(made["title"], [row for row in rows if row.value is not None]).print()
    if made["best_step"] is not None:
        terminal.note(f"the weights are those of step {made['best_step']}, the best on what was held out")
    terminal.note(f"saved in {made['out']}; log, checkpoints and plot in {Path(made['out']) / 'run'}")


def launch(
    function: Callable[[dict[str, Any], Parallel | None], dict[str, Any]],
    settings: dict[str, Any],
    *,
    ray: bool,
    workers: int | None,
) -> dict[str, Any] | None:
    """Call a training function here, in each process that `torchrun` started, or on workers of Ray.

    Args:
        function: of a module, so that workers can import it; trains, saves on the first process, gives a `summary`.
        settings: JSON values.
        ray: whether on Ray.
        workers: of Ray; None for one on each core.

    Returns:
        What the function gave on the first process; None on any other, which has nothing to say.

    Raises:
        InvalidArgument: workers without Ray.
        MissingDependency: Ray is not installed.
    """
    if workers is not None and not ray:
        raise InvalidArgument("--workers is for --ray; without it, start the command with torchrun")
    if ray:
        from pippin.core.device import threads
        from pippin.train.ray import on_ray

        done: dict[str, Any] = on_ray(function, settings, workers=threads() if workers is None else workers)
        return done
    from pippin.train.parallel import Parallel, started_together

    if not started_together():
        return function(settings, None)
    parallel = Parallel("copies")
    try:
        made = function(settings, parallel)
        return made if parallel.rank == 0 else None
    finally:
        parallel.close()
