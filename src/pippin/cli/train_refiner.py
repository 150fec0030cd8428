"""`pippin train refiner`: make pictures of a simulator look like real ones, and keep their labels."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pippin.cli import documents, options, terminal, training
from pippin.core.errors import InvalidArgument, InvalidInput

if TYPE_CHECKING:
    from torch import Tensor

    from pippin.data.images import ImageSet

_DATA, _MODEL, _RUN = "Data", "Model", "Run"
_PROBED = 20


class Keep(StrEnum):
    """What of a picture is to stay, as words of the command line."""

    identity = "identity"
    gradient = "gradient"
    channel_mean = "channel_mean"


def refiner(
    synthetic: Annotated[
        str, typer.Argument(help="Pictures of the simulator: a folder (each folder in it one class) or a .npz file.")
    ],
    real: Annotated[str, typer.Argument(help="Real pictures; labels are not looked at.")],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where refiner, refined pictures and checks go.")],
    rounds: Annotated[
        int, typer.Option(help="In each, the refiner makes its steps, then the judge.", rich_help_panel=_RUN)
    ] = 500,
    weight: Annotated[
        float,
        typer.Option(help="Of staying near the input: more keeps labels, less looks more real.", rich_help_panel=_RUN),
    ] = 5.0,
    keep: Annotated[
        Keep,
        typer.Option(
            help="What stays: the pixels, their gradients (brightness may change), or the mean of the channels.",
            rich_help_panel=_RUN,
        ),
    ] = Keep.identity,
    refiner_steps: Annotated[int, typer.Option(help="Steps of the refiner in a round.", rich_help_panel=_RUN)] = 2,
    batch: Annotated[int, typer.Option(help="Pictures of each kind in a step.", rich_help_panel=_RUN)] = 32,
    history: Annotated[
        int, typer.Option(help="Earlier refined pictures that the judge sees again; 0 for none.", rich_help_panel=_RUN)
    ] = 2048,
    lr: Annotated[float, typer.Option("--lr", help="Highest learning rate.", rich_help_panel=_RUN)] = 1e-3,
    every: Annotated[int, typer.Option(help="Rounds between checks of the labels.", rich_help_panel=_RUN)] = 50,
    width: Annotated[int, typer.Option(help="Channels inside of the refiner.", rich_help_panel=_MODEL)] = 64,
    blocks: Annotated[int, typer.Option(help="Residual blocks of the refiner.", rich_help_panel=_MODEL)] = 4,
    size: Annotated[
        int | None,
        typer.Option(help="Cut all pictures to squares and resize them to so many pixels.", rich_help_panel=_DATA),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="At most so many pictures of each kind.", rich_help_panel=_DATA)
    ] = None,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave out files that cannot be read.", rich_help_panel=_DATA)
    ] = False,
    seed: training.Seed = 0,
    device: options.Device = None,
    as_json: training.AsJson = False,
) -> None:
    """Train a refiner on simulated and real pictures, and refine the simulated ones.

    The folder holds the refiner, refined.npz (8-bit pictures, with the labels they came with), samples.png (simulated
    pictures above refined ones) and checks.json: how far edges moved and how well labels can still be read.

    pippin train refiner rendered photographs --out refiner --size 32
    """
    from pippin.core import device as devices
    from pippin.generate.refiner import RefinerConfig, SimRefiner
    from pippin.generate.refiner_training import Refining

    how = Refining(weight, keep.value, batch, refiner_steps, history=history, lr=lr, every=every)
    if rounds < 1:
        raise InvalidArgument(f"--rounds is {rounds}; give 1 or more")
    documents.check_folder(out)
    show = not as_json
    made, wanted = _sets(synthetic, real, size, limit, skip_bad, show)
    model = SimRefiner(RefinerConfig(made.shape, width, blocks), seed=seed).to(devices.choose(device))
    model.facts = {"synthetic": made.name, "real": wanted.name}
    if show:
        parameters = sum(p.numel() for p in model.parameters())
        terminal.note(
            f"{parameters:,} parameters, {len(made):,} simulated and {len(wanted):,} real pictures of {made.shape}, "
            f"{rounds} rounds"
        )
    result = model.fit(made.x, wanted.x, rounds, labels=_labels(made, show), how=how, seed=seed, show=show)
    model.save(out)
    refined = model.refine(made.x)
    _write(out, made, refined, result.checks)
    figures = dict(result.checks[-1][1])
    if made.labels is not None and len(made) >= _PROBED and "kept" not in figures:
        terminal.note("labels cannot be read off simulated pictures either: only how far edges moved is measured")
    if as_json:
        terminal.write(json.dumps({"folder": str(out), "pictures": len(made), "rounds": rounds, **figures}) + "\n")
        return
    result.report().print()
    terminal.note(f"refined pictures with their labels: {out / 'refined.npz'}")


def _sets(
    synthetic: str, real: str, size: int | None, limit: int | None, skip_bad: bool, show: bool
) -> tuple[ImageSet, ImageSet]:
    from pippin.data import images as sets

    made = sets.load(synthetic, size=size, limit=limit, skip_bad=skip_bad, show=show)
    wanted = sets.load(real, size=size, limit=limit, skip_bad=skip_bad, show=show)
    if made.shape != wanted.shape:
        raise InvalidInput(
            f"{synthetic} holds pictures of {made.shape} (channels, height, width), {real} of {wanted.shape}; give "
            "--size to make them equal, or both with as many channels"
        )
    for name, found in ((synthetic, made), (real, wanted)):
        if found.skipped and show:
            terminal.note(f"{name}: left out {len(found.skipped)} files that cannot be read")
    return made, wanted


def _labels(made: ImageSet, show: bool) -> Tensor | None:
    """The labels, where a probe can learn from them."""
    if made.labels is None or len(made) < _PROBED:
        if show:
            terminal.note("no labels to watch: only how far edges move is measured")
        return None
    return made.labels


def _write(out: Path, made: ImageSet, refined: Tensor, checks: list[tuple[int, dict[str, Any]]]) -> None:
    """The refined set, a picture of some, and the checks; each whole or not at all."""
    import numpy as np
    import torch

    from pippin.core.files import atomic_write
    from pippin.data import image_files
    from pippin.data.images import to_levels

    arrays = {"images": to_levels(refined).permute(0, 2, 3, 1).numpy()}
    if made.labels is not None:
        arrays |= {"labels": made.labels.numpy(), "classes": np.array(made.classes)}
    with atomic_write(out / "refined.npz") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    with atomic_write(out / "checks.json") as file:
        file.write(json.dumps([{"round": after, **found} for after, found in checks], indent=1).encode() + b"\n")
    n = min(10, len(made))
    image_files.write(out / "samples.png", image_files.sheet(torch.cat([made.x[:n], refined[:n]]), columns=n, zoom=3))
