"""`pippin train reasoner`: teach a language model to think in vectors and to write only the answer.

Notable here:
- three runs in one command, each with its log and its checkpoints: the autoencoder, stage 1 and stage 2
- what is held out is answered at the end, from the questions alone, with few steps of thought and with many
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from pippin.cli import INTERRUPTED, options, terminal, training
from pippin.core.errors import InvalidArgument

if TYPE_CHECKING:
    from pippin.language.ladir import LatentReasoner
    from pippin.language.ladir_training import Problem
    from pippin.train import Checkpoints, Training

_THOUGHT = "Thought"
STEPS = (1, 4, 16)
ASKED = 64
"""Held-out problems that are answered at the end, at most."""


@training.planned(lr=1e-3, length=64, rows=32)
def reasoner(
    model: Annotated[
        str,
        typer.Argument(
            help="Catalogue name, hub repository or folder; best trained on the same data with `train full` before.",
            autocompletion=options.complete_model,
        ),
    ],
    plan: training.Plan,
    latents: Annotated[int, typer.Option(help="Vectors of a block of thought.", rich_help_panel=_THOUGHT)] = 3,
    latent_width: Annotated[int, typer.Option(help="Numbers of a vector.", rich_help_panel=_THOUGHT)] = 128,
    max_blocks: Annotated[
        int | None,
        typer.Option(
            help="Blocks of a thought; as many as the longest solution has without it.", rich_help_panel=_THOUGHT
        ),
    ] = None,
    draws: Annotated[int, typer.Option(help="Noisy copies of each block in a pass.", rich_help_panel=_THOUGHT)] = 8,
    vae_steps: Annotated[
        int | None,
        typer.Option(help="Updates of the autoencoder; as many as --steps without it.", rich_help_panel=_THOUGHT),
    ] = None,
    rollout_steps: Annotated[
        int | None,
        typer.Option(
            help="Updates of stage 2, after the model's own thoughts; a tenth of --steps without it, 0 for none.",
            rich_help_panel=_THOUGHT,
        ),
    ] = None,
    device: options.Device = None,
    as_json: training.AsJson = False,
) -> None:
    """Teach a model to think in blocks of vectors, from questions with written solutions.

    A record has a prompt and a completion: sentences, then "The answer is …" or "#### …". --length is of a sentence.

    pippin train reasoner smollm2-135m --data sums.jsonl --out thinker --steps 2000
    pippin reason thinker "3,8,5=6" --steps 16
    """
    _check(plan, vae_steps, rollout_steps)
    from pippin.language import ladir_training
    from pippin.language.ladir import LatentReasoner
    from pippin.language.thoughts import ThoughtVAE

    show = not as_json
    learnt, held = _problems(plan)
    steps = plan.steps or max(1, round(plan.epochs * len(learnt) / (plan.rows * plan.accumulate)))
    stages: list[tuple[str, Any, int, float]] = [("stage 1", ladir_training.Teacher(draws=draws), steps, plan.lr)]
    if own := max(1, steps // 10) if rollout_steps is None else rollout_steps:
        stages.append(("stage 2", ladir_training.Rollout(draws=draws), own, plan.lr / 10))
    blocks = max(len(problem.steps) for problem in learnt)
    if max_blocks is not None and max_blocks < blocks:
        raise InvalidArgument(f"--max-blocks is {max_blocks}, and a solution has {blocks} sentences")
    base = _load(model, device)
    sentences = list(dict.fromkeys(step for problem in learnt for step in problem.steps))
    vae = ThoughtVAE(base, tokens=latents, width=latent_width, longest=plan.length, seed=plan.seed)
    runs: dict[str, Training] = {}
    runs["autoencoder"] = ladir_training.fit_vae(
        vae,
        sentences,
        steps=vae_steps or steps,
        rows=plan.rows,
        optimiser=_optimiser(plan.lr),
        checkpoints=_checkpoints(plan, "autoencoder", vae_steps or steps),
        accumulate=plan.accumulate,
        precision=cast(Any, plan.precision),
        seed=plan.seed,
        show=show,
    )
    _go_on(runs)
    longest = max(len(base.tokenizer.encode(problem.answer)) for problem in learnt) + 1
    made = LatentReasoner(base, vae, max_blocks=max_blocks or blocks, max_answer=max(16, 2 * longest), seed=plan.seed)
    lessons = ladir_training.lessons(made, learnt)
    for name, objective, count, rate in stages:
        runs[name] = _stage(plan, made, lessons, name, objective, count, rate, show=show)
        _go_on(runs)
    made.eval().save(plan.out)
    facts = {"sentences given back": ladir_training.reconstruction(vae, sentences[:1024]), **_solved(made, held)}
    _tell(plan, runs, facts, as_json=as_json)


def _check(plan: training.Plan, vae_steps: int | None, rollout_steps: int | None) -> None:
    """Refuse options that this verb has no use for, before anything is read."""
    if plan.learn != "assistant" or plan.inject or plan.pretrain:
        raise InvalidArgument(
            "a reasoner learns the answers of problems: --learn, --inject and --pretrain-data are not for it"
        )
    if (vae_steps is not None and vae_steps < 1) or (rollout_steps is not None and rollout_steps < 0):
        raise InvalidArgument(
            f"--vae-steps ({vae_steps}) must be at least 1, --rollout-steps ({rollout_steps}) 0 or more"
        )
    if not plan.resume and any(plan.run_folder.glob("*/step-*")):
        raise InvalidArgument(f"{plan.run_folder} holds a run; go on with it with --resume, or give another --out")


def _problems(plan: training.Plan) -> tuple[list[Problem], list[Problem]]:
    """Problems to learn from, and those that are held out."""
    import random

    from pippin.language.ladir_training import read_problems

    learnt = read_problems(plan.data, fields=plan.names)
    try:
        share = float(plan.held_out)
    except ValueError:
        return learnt, read_problems([Path(plan.held_out)], fields=plan.names)
    if not 0 <= share < 1:
        raise InvalidArgument(f"--held-out is {plan.held_out}; give a share from 0 to below 1, or a file")
    random.Random(plan.seed).shuffle(learnt)
    count = math.ceil(share * len(learnt)) if len(learnt) > 1 else 0
    return learnt[count:], learnt[:count]


def _load(ref: str, device: str | None) -> Any:
    import pippin

    return pippin.load(ref, device=device, dtype="float32", pack=False)


def _optimiser(rate: float) -> Any:
    from pippin.train import AdamW

    return AdamW(lr=rate, weight_decay=0.03)


def _checkpoints(plan: training.Plan, name: str, steps: int) -> Checkpoints:
    from pippin.train import Checkpoints

    every = plan.every or max(1, steps // 10)
    return Checkpoints(plan.run_folder / name.replace(" ", "-"), every, keep=1, resume=plan.resume)


def _stage(
    plan: training.Plan,
    made: LatentReasoner,
    lessons: Sequence[Any],
    name: str,
    objective: Any,
    steps: int,
    rate: float,
    *,
    show: bool,
) -> Training:
    """One of the two stages."""
    from pippin.language.ladir_training import lesson_batches
    from pippin.train import Cosine, Trainer

    return Trainer(
        made,
        objective,
        lesson_batches(made, lessons, plan.rows, seed=plan.seed),
        steps=steps,
        optimiser=_optimiser(rate),
        schedule=Cosine(warmup=0.05),
        accumulate=plan.accumulate,
        precision=cast(Any, plan.precision),
        checkpoints=_checkpoints(plan, name, steps),
        seed=plan.seed,
        title=name,
        show=show,
    ).fit()


def _go_on(runs: Mapping[str, Training]) -> None:
    """Leave, where Ctrl-C ended a run; it is saved."""
    if any(run.stopped == "interrupted" for run in runs.values()):
        terminal.note("interrupted; the same command with --resume goes on")
        raise typer.Exit(INTERRUPTED)


def _solved(made: LatentReasoner, held: Sequence[Problem]) -> dict[str, float]:
    """Share of held-out problems with exactly the written answer, by steps of thought."""
    asked = held[:ASKED]
    solved = {}
    for steps in STEPS if asked else ():
        answers = made.generate([problem.question for problem in asked], steps=steps, seed=0)
        right = sum(answer.text.strip() == problem.answer for answer, problem in zip(answers, asked, strict=True))
        solved[f"answers as written, {steps} steps"] = right / len(asked)
    return solved


def _tell(plan: training.Plan, runs: Mapping[str, Training], facts: Mapping[str, float], *, as_json: bool) -> None:
    """Say how it went."""
    from pippin.core.report import Report, Row

    losses = {name: [run.losses[0], run.losses[-1]] for name, run in runs.items()}
    seconds = sum(run.seconds for run in runs.values())
    if as_json:
        steps = {name: len(run.steps) for name, run in runs.items()}
        value = {"out": str(plan.out), "steps": steps, "losses": losses, "held_out": dict(facts), "seconds": seconds}
        terminal.write(terminal.to_json(value) + "\n")
        return
    rows = [
        Row(f"{name}, {when} loss", loss)
        for name, pair in losses.items()
        for when, loss in zip(("first", "last"), pair, strict=True)
    ]
    rows += [Row(name, 100 * value, "%") for name, value in facts.items()]
    Report("reasoner", [*rows, Row("time", seconds, "s")]).print()
    terminal.note(
        f"saved in {plan.out}; logs, checkpoints and plots in {plan.run_folder}; ask it with: pippin reason {plan.out}"
    )
