"""`pippin shape share`: layers of a checkpoint read the cache of an earlier layer, and a distillation mends it.

Notable here:
- a model that was trained with routed caches needs no mending: without data, it is cut and saved as it is
"""

from __future__ import annotations

import dataclasses
import statistics
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from pippin.cli import options, terminal, training
from pippin.core.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from pippin.core.report import Report

PROMPT, RUNS = 512, 3
"""Tokens of the prompt whose time is compared, and how often."""


@training.planned(data=None)
def share(
    model: Annotated[
        str, typer.Argument(help="Catalogue name, hub repository or folder.", autocompletion=options.complete_model)
    ],
    plan: training.Plan,
    shared: Annotated[
        int | None, typer.Option(metavar="N", help="The last N layers read the last layer before them.")
    ] = None,
    group: Annotated[
        int | None, typer.Option(metavar="N", help="Or: of every N neighbours, all read the first.")
    ] = None,
    retention: options.Retention = None,
    leaders: Annotated[
        str | None,
        typer.Option(metavar="N,N", help="Or: which layers keep a cache, from 0; each other reads the last before it."),
    ] = None,
    start: Annotated[
        str, typer.Option(help="Projections of a layer that is read: mean of all that read it, or its own.")
    ] = "mean",
    weight: Annotated[float, typer.Option(help="Of the teacher, from 0 to 1; the rest is the data's.")] = 0.9,
    top: Annotated[int | None, typer.Option(help="Learn only the teacher's likeliest so many tokens.")] = None,
    device: options.Device = None,
    as_json: training.AsJson = False,
) -> None:
    """Let layers share caches, learn from the original what that broke, and save a model that opens like any other.

    pippin shape share smollm2-135m --shared 11 --data notes.txt --steps 200 --out shared
    pippin shape share routed --retention 0.25 --out quarter
    """
    if start not in ("mean", "own"):
        raise InvalidArgument(f"--start is {start!r}; choose mean or own")
    led = retention is not None or leaders is not None
    if led and (shared is not None or group is not None):
        raise InvalidArgument("--retention and --leaders say which layers share; leave --shared and --group out")
    if not (led or plan.data):
        raise InvalidArgument("sharing that a model was not trained for must be learnt: give --data")
    chosen = _layers(leaders)
    import pippin
    from pippin.language.distillation import Distillation
    from pippin.language.objectives import held_out as measure_of
    from pippin.shape import share as sharing

    loaded = pippin.load(model, device=device, dtype="float32", pack=False)
    if led:
        student = sharing.share(loaded.module, retention, leaders=chosen)
    else:
        student = sharing.share_caches(loaded.module, shared, group=group, start=cast(Any, start))
    student.requires_grad_(True)
    result = dataclasses.replace(loaded, name=f"{loaded.name} sharing caches", module=student, source=None, adapters={})
    if not plan.data:
        result.save(plan.out)
        _tell(loaded.name, plan.out, _report(model, plan.out, device), as_json=as_json)
        return
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
    losses = {}
    if original is not None and outcome.before is not None and outcome.after is not None:
        losses = {"of the original": original, "untrained": outcome.before["loss"], "trained": outcome.after["loss"]}
    made = _report(model, plan.out, device, losses)
    if show:
        made.print()
    facts = {row.name: row.value for row in made.rows}
    training.conclude(plan, outcome, as_json=as_json, facts={"model": loaded.name, **facts})


def _layers(text: str | None) -> list[int] | None:
    """The layers that an option names."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and part.isascii() for part in parts):
        raise InvalidArgument(f"--leaders must be numbers of layers with commas between them, got {text!r}")
    return [int(part) for part in parts]


def _tell(name: str, out: Path, made: Report, *, as_json: bool) -> None:
    """Say what was cut without training: a table, or one JSON object."""
    if as_json:
        facts = {"out": str(out), "model": name, **{row.name: row.value for row in made.rows}}
        terminal.write(terminal.to_json(facts) + "\n")
    else:
        made.print()
        terminal.note(f"saved in {out}")


def _report(model: str, out: Path, device: str | None, losses: Mapping[str, float] = MappingProxyType({})) -> Report:
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
        *(Row(f"held-out loss {which}", loss, "nats/token") for which, loss in losses.items()),
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
