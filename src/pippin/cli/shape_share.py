"""`pippin shape share`: layers of a checkpoint read the cache of an earlier layer, and a distillation mends it."""

from __future__ import annotations

import dataclasses
import statistics
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from pippin.cli import options, training
from pippin.core.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pippin.core.report import Report

PROMPT, RUNS = 512, 3
"""Tokens of the prompt whose time is compared, and how often."""


def share(
    model: Annotated[
        str, typer.Argument(help="Catalogue name, hub repository or folder.", autocompletion=options.complete_model)
    ],
    data: training.Data,
    out: training.Out,
    shared: Annotated[
        int | None, typer.Option(metavar="N", help="The last N layers read the last layer before them.")
    ] = None,
    group: Annotated[
        int | None, typer.Option(metavar="N", help="Or: of every N neighbours, all read the first.")
    ] = None,
    start: Annotated[
        str, typer.Option(help="Projections of a layer that is read: mean of all that read it, or its own.")
    ] = "mean",
    weight: Annotated[float, typer.Option(help="Of the teacher, from 0 to 1; the rest is the data's.")] = 0.9,
    top: Annotated[int | None, typer.Option(help="Learn only the teacher's likeliest so many tokens.")] = None,
    field: training.Field = None,
    learn: training.Learn = "assistant",
    held_out: training.HeldOut = "0.05",
    length: training.Length = 512,
    steps: training.Steps = None,
    epochs: training.Epochs = 1.0,
    lr: training.LR = 3e-4,
    rows: training.Rows = 8,
    accumulate: training.Accumulate = 1,
    precision: training.Precision = "float32",
    every: training.Every = None,
    seed: training.Seed = 0,
    resume: training.Resume = False,
    device: options.Device = None,
    as_json: training.AsJson = False,
) -> None:
    """Let layers share caches, learn from the original what that broke, and save a model that opens like any other.

    pippin shape share smollm2-135m --shared 11 --data notes.txt --steps 200 --out shared
    """
    plan = training.Plan(
        data=data,
        out=out,
        length=length,
        rows=rows,
        lr=lr,
        steps=steps,
        epochs=epochs,
        accumulate=accumulate,
        precision=precision,
        every=every,
        seed=seed,
        resume=resume,
        held_out=held_out,
        learn=learn,
        fields=field or (),
    )
    if start not in ("mean", "own"):
        raise InvalidArgument(f"--start is {start!r}; choose mean or own")
    import pippin
    from pippin.language.distillation import Distillation
    from pippin.language.objectives import held_out as measure_of
    from pippin.shape.share import share_caches

    loaded = pippin.load(model, device=device, dtype="float32", pack=False)
    student = share_caches(loaded.module, shared, group=group, start=cast(Any, start)).requires_grad_(True)
    result = dataclasses.replace(loaded, name=f"{loaded.name} sharing caches", module=student, source=None, adapters={})
    teacher = loaded.module.pack()
    objective = Distillation(teacher, weight, top=top)
    show = not as_json
    batches = training.read(plan, result, show=show)
    original = None if batches.measured is None else measure_of(batches.measured)(teacher)["loss"]
    outcome = training.run(
        plan,
        student,
        batches,
        title=result.name,
        objective=objective,
        show=show,
    )
    result.save(plan.out)
    made = _report(model, plan.out, device, original, outcome)
    if show:
        made.print()
    facts = {row.name: row.value for row in made.rows}
    training.conclude(plan, outcome, as_json=as_json, facts={"model": loaded.name, **facts})


def _report(model: str, out: Path, device: str | None, original: float | None, outcome: training.Outcome) -> Report:
    """What sharing saves and costs; times are those of the engine, original and result in turn."""
    import pippin
    from pippin.core.report import Report, Row
    from pippin.engine import Engine
    from pippin.engine.measure import cache_bytes, prompt_ids

    pair = [pippin.load(ref, device=device) for ref in (model, out)]
    count = min(PROMPT, pair[0].context_size - 2)
    with (
        Engine(pair[0], slots=1, cache_tokens=count + 32) as before,
        Engine(pair[1], slots=1, cache_tokens=count + 32) as after,
    ):
        was, now = (cache_bytes(engine.model.config, engine.cache_type, 1) for engine in (before, after))
        first, second = _prefill([before, after], prompt_ids(pair[0], count))
    rows = [
        Row("cache of a token before", was, "bytes"),
        Row("cache of a token after", now, "bytes"),
        Row(f"first token after {count} before", first, "s"),
        Row(f"first token after {count} after", second, "s"),
        Row("time to first token, after / before", second / first, "x"),
    ]
    if original is not None and outcome.before is not None and outcome.after is not None:
        rows += [
            Row("held-out loss of the original", original, "nats/token"),
            Row("held-out loss untrained", outcome.before["loss"], "nats/token"),
            Row("held-out loss trained", outcome.after["loss"], "nats/token"),
        ]
    return Report("sharing caches", rows)


def _prefill(engines: Sequence[Any], prompt: Sequence[int]) -> list[float]:
    """Median seconds to the first token, for each engine; nothing is found in a cache."""
    from pippin.engine.measure import speed

    seconds: list[list[float]] = [[] for _ in engines]
    for turn in range(RUNS + 1):
        for engine, found in zip(engines, seconds, strict=True):
            stops = engine.model.tokenizer.eos_ids
            took = speed(engine, prompt, 2, stops=stops, owner=str(turn)).first_token
            if turn:  # the first is for warming up
                found.append(took)
    return [statistics.median(found) for found in seconds]
