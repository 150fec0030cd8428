"""`pippin train images`: a generator of pictures of your own, from a folder or a set of the catalogue."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from pippin.cli import INTERRUPTED, documents, options, terminal, training
from pippin.core.errors import InvalidArgument

if TYPE_CHECKING:
    from pippin.data.images import ImageSet
    from pippin.generate.condition import Condition, Samples
    from pippin.generate.recipes import Recipe
    from pippin.kits.image.text import TextEncoder

_DATA = "Data"
_MODEL = "Model"
_RUN = "Run"
_READS = ("class", "text", "nothing")


def images(
    source: Annotated[
        str,
        typer.Argument(
            help="fashion-mnist, cifar-10, a folder of pictures (each folder in it one class; NAME.txt beside NAME.png "
            "is its caption), a .npz file, or scenes (made pictures with captions)."
        ),
    ],
    out: training.Out,
    method: Annotated[
        str, typer.Option(help="unet, dit, ec-dit, tarflow, itarflow, starflow or dart.", rich_help_panel=_MODEL)
    ] = "unet",
    reads: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="WHAT",
            help="What it draws from: class, text or nothing; without it, what the pictures come with.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    width: Annotated[int | None, typer.Option(help="Of the hidden states.", rich_help_panel=_MODEL)] = None,
    layers: Annotated[
        int | None, typer.Option(help="In all (flows: of each block; unet: levels).", rich_help_panel=_MODEL)
    ] = None,
    patch: Annotated[int | None, typer.Option(help="Side of a token in pixels.", rich_help_panel=_MODEL)] = None,
    size: Annotated[
        int | None,
        typer.Option(help="Cut pictures to squares and resize them to so many pixels.", rich_help_panel=_DATA),
    ] = None,
    channels: Annotated[int | None, typer.Option(help="1 for grey, 3 for colour.", rich_help_panel=_DATA)] = None,
    limit: Annotated[int | None, typer.Option(help="At most so many pictures.", rich_help_panel=_DATA)] = None,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave out files that cannot be read.", rich_help_panel=_DATA)
    ] = False,
    flip: Annotated[
        bool, typer.Option("--flip", help="Show half of the pictures mirrored, left to right.", rich_help_panel=_DATA)
    ] = False,
    held_out: Annotated[
        float, typer.Option(help="Share of the pictures that the loss is measured on.", rich_help_panel=_DATA)
    ] = 0.02,
    steps: training.Steps = None,
    epochs: training.Epochs = 1.0,
    batch: Annotated[int, typer.Option(help="Pictures of one update.", rich_help_panel=_RUN)] = 32,
    lr: Annotated[float | None, typer.Option("--lr", help="Highest learning rate.", rich_help_panel=_RUN)] = None,
    precision: training.Precision = "float32",
    every: training.Every = None,
    seed: training.Seed = 0,
    resume: training.Resume = False,
    device: options.Device = None,
    as_json: training.AsJson = False,
) -> None:
    """Train a generator of pictures, and save it for `pippin imagine`.

    The folder holds the model, samples.png with some of its pictures, and run/ with checkpoints, log and loss.

    pippin train images fashion-mnist --out clothes --steps 2000
    """
    from pippin.data.ordering import Shuffled
    from pippin.generate import folder
    from pippin.generate.recipes import recipe
    from pippin.train import AdamW, Checkpoints, Cosine, Evaluation, Trainer

    _check(reads, held_out, batch, lr, steps, epochs, every, seed)
    _check_data(size, channels, limit)
    _check_out(out, resume)
    show = not as_json
    found = _pictures(source, size, channels, limit, skip_bad, show)
    if found.skipped and show:
        terminal.note(f"left out {len(found.skipped)} files that cannot be read: {', '.join(found.skipped[:3])}")
    kind = _kind(found, reads)
    encoder = _encoder(device) if kind == "text" else None
    spec = _spec(found, kind, encoder)
    made = recipe(method, found.shape, spec, width=width, layers=layers, patch=patch, seed=seed)
    facts: Any = made.model
    facts.facts = {"data": found.name, "method": method}
    facts.facts |= {"classes": list(found.classes)} if kind == "class" else {}
    facts.facts |= {"text_encoder": encoder.facts} if encoder is not None else {}
    learnt, measured = _divided(len(found), held_out, seed)
    batches = Shuffled(learnt, batch, seed=seed, collate=_Collate(found, kind, encoder, flip, seed))
    count = steps or max(1, round(epochs * len(learnt) / batch))
    parameters = sum(p.numel() for p in made.model.parameters())
    if show:
        terminal.note(
            f"{method} from {kind}, {parameters:,} parameters, {len(learnt):,} pictures of {found.shape}, {count} steps"
        )
    due = every or max(1, count // 10)
    with documents.writing(out):
        (out / "run").mkdir(parents=True, exist_ok=True)
    trainer = Trainer(
        made.model,
        made.objective,
        batches,
        steps=count,
        optimiser=AdamW(lr=lr or made.lr, weight_decay=0.01),
        schedule=Cosine(warmup=0.05),
        precision=cast(Any, precision),
        ema=min(made.ema, 1 - 10 / max(count, 20)),  # of about the last tenth of a short run
        evaluation=Evaluation(_measure(made, found, kind, encoder, measured), due) if measured else None,
        checkpoints=Checkpoints(out / "run", due, resume=resume),
        seed=seed,
        device=device,
        title=f"{method} on {found.name}",
        show=show,
    )
    result = trainer.fit()
    assert trainer.ema is not None
    with trainer.ema.applied(made.model):
        made.model.eval()
        folder.save(made.model, out)
        _sheet(made, found, encoder, out / "samples.png", show)
    _tell(result, made, out, parameters, as_json)


def _check(
    reads: str | None,
    held_out: float,
    batch: int,
    lr: float | None,
    steps: int | None,
    epochs: float,
    every: int | None,
    seed: int,
) -> None:
    if reads is not None and reads not in _READS:
        raise InvalidArgument(f"--from is {reads!r}; choose {', '.join(_READS)}")
    if not 0 <= held_out < 1:
        raise InvalidArgument(f"--held-out is {held_out}; give a share from 0 to below 1")
    for name, value in (("--batch", batch), ("--steps", steps), ("--every", every)):
        if value is not None and value < 1:
            raise InvalidArgument(f"{name} must be at least 1, got {value}")
    for name, number in (("--epochs", epochs), ("--lr", lr)):
        if number is not None and not 0 < number < math.inf:
            raise InvalidArgument(f"{name} must be above 0, got {number}")
    if seed < 0:
        raise InvalidArgument(f"--seed must be at least 0, got {seed}")


def _check_data(size: int | None, channels: int | None, limit: int | None) -> None:
    for name, value in (("--size", size), ("--limit", limit)):
        if value is not None and value < 1:
            raise InvalidArgument(f"{name} must be at least 1, got {value}")
    if channels not in (None, 1, 3):
        raise InvalidArgument(f"--channels is {channels}; give 1 (grey) or 3 (colour)")


def _check_out(out: Path, resume: bool) -> None:
    """Refuse a folder that holds another run, or that cannot be written."""
    if not resume and any((out / "run").glob("step-*")):
        raise InvalidArgument(f"{out / 'run'} holds a run; go on with it with --resume, or give another --out")
    documents.check_folder(out / "run")


def _pictures(
    source: str, size: int | None, channels: int | None, limit: int | None, skip_bad: bool, show: bool
) -> ImageSet:
    from pippin.data import images
    from pippin.data.scenes import SceneSpec, scenes

    if source != "scenes":
        return images.load(source, size=size, channels=channels, limit=limit, skip_bad=skip_bad, show=show)
    side, colours = size or 16, ("white",) if channels == 1 else ("red", "green", "blue", "white")
    spec = SceneSpec(size=side, colours=colours, radius=(side * 0.1125, side * 0.175), objects=(1, 3))
    drawn = scenes(spec, limit or 4000)
    return images.ImageSet(drawn.images, captions=tuple(drawn.captions), name="scenes")


def _kind(found: ImageSet, reads: str | None) -> str:
    """What is drawn from: as asked for, or what there is."""
    kind = reads or ("text" if found.captions else "class" if found.labels is not None else "nothing")
    if kind == "class" and found.labels is None:
        raise InvalidArgument(f"{found.name} has no classes; put the pictures of each class into a folder of its own")
    if kind == "text" and found.captions is None:
        raise InvalidArgument(f"{found.name} has no captions; put NAME.txt beside each NAME.png")
    return kind


def _encoder(device: str | None) -> TextEncoder:
    from pippin.kits.image.text import TextEncoder

    return TextEncoder.load(device=device)


def _spec(found: ImageSet, kind: str, encoder: TextEncoder | None) -> Any:
    from pippin.generate.condition import ConditionSpec

    if kind == "nothing":
        return ConditionSpec()
    if encoder is not None:
        return ConditionSpec(text=encoder.width, null=True)
    return ConditionSpec(classes=len(found.classes), null=True)


def _divided(count: int, share: float, seed: int) -> tuple[list[int], list[int]]:
    """The pictures that are learnt, and those that the loss is measured on (at most 512)."""
    import numpy as np

    held = min(512, round(share * count))
    if held and count - held < 1:
        raise InvalidArgument(f"{count} pictures with {held} of them held out leave none to learn; lower --held-out")
    order = np.random.default_rng((seed, 1)).permutation(count).tolist()
    return order[held:], order[:held]


class _Collate:
    """Makes batches of numbers of pictures."""

    def __init__(self, found: ImageSet, kind: str, encoder: TextEncoder | None, flip: bool, seed: int) -> None:
        self.found, self.kind, self.encoder, self.flip, self.seed = found, kind, encoder, flip, seed

    def __call__(self, chosen: list[int]) -> Samples:
        """The pictures and what they show; which are mirrored follows from their numbers."""
        import torch

        from pippin.generate.condition import Samples

        rows = self.found.rows(torch.tensor(chosen))
        x = rows.x
        if self.flip:
            turned = torch.rand(len(x), generator=torch.Generator().manual_seed(self.seed + sum(chosen))) < 0.5
            x = torch.where(turned.view(-1, 1, 1, 1), x.flip(3), x)
        return Samples(x, _condition(rows, self.kind, self.encoder))


def _condition(rows: ImageSet, kind: str, encoder: TextEncoder | None) -> Condition | None:
    from pippin.generate.condition import Condition

    if encoder is not None and rows.captions is not None:
        return encoder.condition(list(rows.captions))
    return Condition(labels=rows.labels) if kind == "class" else None


def _measure(made: Recipe, found: ImageSet, kind: str, encoder: TextEncoder | None, measured: list[int]) -> Any:
    """The loss on what is held out, under noise that stays the same."""
    collate = _Collate(found, kind, encoder, False, 0)

    def measure(model: Any) -> dict[str, float]:
        import torch

        from pippin.train.batch import to_device

        device = next(model.parameters()).device
        generator, total, count = torch.Generator(device).manual_seed(0), 0.0, 0.0
        for start in range(0, len(measured), 64):
            loss = made.objective(model, to_device(collate(measured[start : start + 64]), device), generator)
            total, count = total + float(loss.total), count + loss.count
        return {"loss": total / count}

    return measure


def _sheet(made: Recipe, found: ImageSet, encoder: TextEncoder | None, path: Path, show: bool) -> None:
    """Some samples as one picture."""
    import torch

    from pippin.data import image_files
    from pippin.generate.condition import Condition
    from pippin.generate.contract import shown
    from pippin.generate.iterative import IterativeTarFlow

    model: Any = made.model
    if getattr(model.config, "noise_range", None):
        model = IterativeTarFlow(model)
    condition, n = None, 16
    if encoder is not None and found.captions is not None:
        condition = encoder.condition([found.captions[i % len(found)] for i in range(n)])
    elif "classes" in model.facts:
        condition = Condition(labels=torch.arange(min(len(found.classes), 32)).repeat_interleave(2))
        n = len(condition)
    with shown("drawing samples", show=show) as on_step:
        drawn = model.sample(condition, n, on_step=on_step)
    columns = n // 2 if "classes" in model.facts and n <= 20 else None
    if columns:
        drawn = torch.cat([drawn[::2], drawn[1::2]])
    image_files.write(path, image_files.sheet(drawn.cpu(), columns=columns, zoom=2))


def _tell(result: Any, made: Recipe, out: Path, parameters: int, as_json: bool) -> None:
    from pippin.core.report import Report, Row

    values = {
        "out": str(out),
        "parameters": parameters,
        "steps": len(result.steps),
        "first_loss": result.losses[0] if result.losses else None,
        "last_loss": result.losses[-1] if result.losses else None,
        "held_out_loss": result.evaluations[-1][1]["loss"] if result.evaluations else None,
        "unit": made.unit,
        "seconds": result.seconds,
        "pictures_per_second": result.units_per_second,
        "stopped": result.stopped,
    }
    if as_json:
        terminal.write(terminal.to_json(values) + "\n")
    else:
        losses = [(name.replace("_", " "), values[name]) for name in ("first_loss", "last_loss", "held_out_loss")]
        rows = [Row(name, value, made.unit) for name, value in losses if value is not None]
        rows += [Row("time", result.seconds, "s"), Row("speed", result.units_per_second, "pictures/s")]
        Report(result.title, rows).print()
        terminal.note(f"{out}: the model, samples.png, and run/ with the checkpoints; pippin imagine draws from it")
    if result.stopped == "interrupted":
        terminal.note("interrupted; the same command with --resume goes on")
        raise typer.Exit(INTERRUPTED)
