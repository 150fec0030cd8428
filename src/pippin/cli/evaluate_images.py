"""`pippin evaluate images`: how near a set of pictures is to a set of real ones."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pippin.cli import documents, terminal
from pippin.core.errors import InvalidArgument, InvalidInput

if TYPE_CHECKING:
    from pippin.data.images import ImageSet
    from pippin.evaluate.features import Features

_ENOUGH = 1000


class Extractor(StrEnum):
    """What pictures are compared in, as words of the command line."""

    small = "small"
    inception = "inception"
    pixels = "pixels"


def images(
    samples: Annotated[str, typer.Argument(help="Pictures to judge: a folder, or a .npz file with 'images'.")],
    real: Annotated[str, typer.Argument(help="What they are to be like: a folder, a .npz, fashion-mnist or cifar-10.")],
    features: Annotated[
        Extractor,
        typer.Option(
            help="Compare in the features of a small network trained on REAL now, in those of Inception "
            "(pippin pull inception-fid; about half a second a picture), or in pixels."
        ),
    ] = Extractor.small,
    size: Annotated[
        int | None, typer.Option(help="Cut all pictures to squares and resize them to so many pixels.")
    ] = None,
    limit: Annotated[int, typer.Option(help="At most so many pictures of each set.")] = 5000,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave out files that cannot be read.")] = False,
    seed: Annotated[int, typer.Option(help="Of the small network and of the parts that are drawn.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the figures into this file (.png, .svg).")] = None,
) -> None:
    """Frechet and kernel distance, precision, recall, and fine detail of pictures against real ones.

    Distances depend on the features and on the number of pictures: compare figures of equal ones only.

    pippin evaluate images drawn fashion-mnist --limit 1000
    """
    from pippin.data import images as sets
    from pippin.evaluate.sample_quality import compare

    if limit < 16 or seed < 0:
        raise InvalidArgument(
            f"--limit is {limit} and --seed {seed}; give 16 pictures or more, and a seed of 0 or more"
        )
    documents.check_plot(plot)
    show = not as_json
    wanted = sets.load(real, size=size, limit=limit, skip_bad=skip_bad, show=show)
    # the channels of the real pictures, as files of grey pictures are read in colour otherwise
    judged = sets.load(
        samples, size=size, channels=_channels(samples, wanted), limit=limit, skip_bad=skip_bad, show=show
    )
    if judged.shape != wanted.shape:
        raise InvalidInput(
            f"{samples} holds pictures of {judged.shape} (channels, height, width), {real} of {wanted.shape}; "
            "give --size to make them equal"
        )
    for name, found in ((samples, judged), (real, wanted)):
        if len(found) < 16:
            raise InvalidInput(f"{name} holds {len(found)} pictures; give 16 or more")
        if found.skipped and show:
            terminal.note(f"{name}: left out {len(found.skipped)} files that cannot be read")
    report = compare(judged.x, wanted.x, _extractor(features, wanted, seed, show), seed=seed)
    if plot is not None:
        with documents.writing(plot):
            report.plot(plot)
    if as_json:
        terminal.write(report.to_json() + "\n")
        return
    report.print()
    if min(len(judged), len(wanted)) < _ENOUGH:
        terminal.note(f"fewer than {_ENOUGH} pictures: the Frechet distance is much too large; see that at infinite n")


def _channels(samples: str, wanted: ImageSet) -> int | None:
    """A .npz keeps its channels unless it is resized; files take those of the real pictures."""
    return None if Path(samples).suffix == ".npz" else wanted.shape[0]


def _extractor(which: Extractor, real: ImageSet, seed: int, show: bool) -> Features:
    from pippin.evaluate.features import Pixels, learn_features
    from pippin.evaluate.inception import inception

    if which is Extractor.inception:
        return inception()
    if which is Extractor.pixels:
        return Pixels(real.shape)
    if show:
        terminal.note("training the small network on the real pictures")
    told = "classes" if real.labels is not None else "turns"
    return learn_features(real.x, real.labels, name=f"small network, {told} of {real.name}, seed {seed}", seed=seed)
