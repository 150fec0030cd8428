"""`pippin imagine`: generate images from a description, a class or another image."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pippin.cli.common import documents, terminal
from pippin.cli.common.declared_options import with_options
from pippin.core.errors import InvalidArgument, InvalidInput
from pippin.core.files import check_folder
from pippin.core.options import Option, parse_bytes
from pippin.engine.options import Device
from pippin.recipes.options import refuse_existing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pippin.kits.image import CreatedImage, ImageCreator, Progress

_ENDINGS = (".png", ".webp", ".jpg", ".jpeg", ".gif", ".mp4")
_BEGIN = "Start from an image"
_MEASURE = "Capabilities and costs"


@with_options
def imagine(
    descriptions: Annotated[
        list[str] | None, typer.Argument(help="Description of the image; several are joined, or composed.")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option("--model", "-m", help="Folder that `pippin train images` saved.", show_default=False),
    ] = None,
    style: Annotated[str, typer.Option(help="Name of a style; --styles lists them.")] = "plain",
    limit: Annotated[int, typer.Option("-n", help="Number of images.")] = 1,
    seed: Annotated[int, typer.Option(help="Image i depends on seed + i alone.")] = 0,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder for the images, or the file of a single one.")
    ] = Path("images"),
    label: Annotated[str | None, typer.Option("--class", help="A class of the model, by name or number.")] = None,
    size: Annotated[str | None, typer.Option(help="HEIGHTxWIDTH, a whole multiple of the model's.")] = None,
    quality: Annotated[str, typer.Option(help="draft, normal or best.")] = "normal",
    steps: Annotated[int | None, typer.Option(help="Sampling steps; they override the quality.")] = None,
    guidance: Annotated[float | None, typer.Option(help="Guidance scale; 1 for none.")] = None,
    variety: Annotated[float, typer.Option(help="0 to 1: higher follows the description less closely.")] = 0.5,
    compose: Annotated[
        str | None,
        typer.Option(help="Compose the descriptions over this background (nothing, or null) instead of joining them."),
    ] = None,
    edit: Annotated[Path | None, typer.Option(help="Start from this image.", rich_help_panel=_BEGIN)] = None,
    mask: Annotated[
        Path | None, typer.Option(help="With --edit: regenerate where this image is white.", rich_help_panel=_BEGIN)
    ] = None,
    strength: Annotated[
        float | None,
        typer.Option(help="With --edit: 0 keeps the image, 1 nothing of it.", rich_help_panel=_BEGIN),
    ] = None,
    animate: Annotated[
        Path | None, typer.Option(help="Generate a video that begins with this image.", rich_help_panel=_BEGIN)
    ] = None,
    kind: Annotated[str, typer.Option("--format", help="png, webp or jpg; for videos gif, webp or mp4.")] = "",
    preview: Annotated[Path | None, typer.Option(help="Write the intermediate image to this file.")] = None,
    batch_size: Annotated[int, typer.Option(help="Images sampled in one batch.", rich_help_panel=_MEASURE)] = 1,
    memory_budget: Annotated[
        int | None,
        Option("Memory limit, such as 8GB; a request that needs more is refused.", _MEASURE, "SIZE", parse=parse_bytes),
    ] = None,
    estimate: Annotated[
        bool,
        typer.Option("--estimate", help="Print the estimated memory and time only.", rich_help_panel=_MEASURE),
    ] = False,
    styles: Annotated[
        bool,
        typer.Option(
            "--styles",
            help="List styles and capabilities only.",
            rich_help_panel=_MEASURE,
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    device: Device = None,
) -> None:
    """Generate images from a description.

    pippin imagine "two white squares" --model painter -n 4 --seed 7 --out images
    """
    if model is None:
        raise InvalidArgument("give the model's folder: --model FOLDER; `pippin train images` makes one")
    if mask is not None and edit is None:
        raise InvalidArgument("--mask marks a part of an image; give the image with --edit")
    if edit is not None and animate is not None:
        raise InvalidArgument("--edit and --animate exclude each other")
    if strength is not None and edit is None:
        raise InvalidArgument("--strength needs an image; give it with --edit")
    file = out if out.suffix.lower() in _ENDINGS and not out.is_dir() else None
    if file is not None:
        kind = _kind_of(file, kind, limit)
    check_folder(out if file is None else file.parent)
    _check_preview(preview)
    suffix = _suffix(kind, video=animate is not None)
    if not (styles or estimate):
        for target in [out / f"{seed + index:04d}{suffix}" for index in range(limit)] if file is None else [file]:
            refuse_existing(target)
    settings: dict[str, Any] = {
        "style": style,
        "limit": limit,
        "seed": seed,
        "size": _size(size),
        "quality": quality,
        "steps": steps,
        "guidance": guidance,
        "variety": variety,
        "strength": strength,
        "batch_size": batch_size,
    }
    from pippin.kits.image import ImageCreator, ImageRef, Label, Mask

    creator = ImageCreator.load(model, device=device, memory_budget=memory_budget, compose=compose)
    if styles:
        _print_capabilities(creator, as_json)
        return
    concepts: list[Any] = list(descriptions or [])
    if label is not None:
        concepts.append(Label(int(label) if label.isdecimal() else label))
    marked = None if mask is None else Mask(mask)
    if estimate:
        begun = animate if edit is None else edit
        given = [*concepts, ImageRef(begun)] if begun is not None else concepts
        plan = creator.plan(given, mask=marked, animate=animate is not None, measure=True, **settings)
        _cost(plan.cost, as_json)
        return

    def sample(on_progress: Callable[[Progress], None]) -> Iterator[CreatedImage]:
        if animate is not None:
            return creator.animate(animate, concepts, on_progress=on_progress, **settings)
        if edit is not None:
            return creator.edit(edit, marked, concepts, on_progress=on_progress, **settings)
        return creator.images(concepts, on_progress=on_progress, **settings)

    _save(sample, out if file is None else file.parent, suffix if file is None else file, preview, as_json)


def _kind_of(file: Path, kind: str, limit: int) -> str:
    """The format of a single image that has a name.

    Raises:
        InvalidArgument: several images cannot have one name, or the name ends as another format does.
    """
    if limit != 1:
        raise InvalidArgument(f"--out {str(file)!r} is one file, and -n asks for {limit} images; give a folder")
    ending = file.suffix.lower().lstrip(".").replace("jpeg", "jpg")
    if kind and kind.lower().lstrip(".").replace("jpeg", "jpg") != ending:
        raise InvalidArgument(f"--out {str(file)!r} ends as {ending} files do, and --format is {kind}; leave one out")
    return ending


def _save(
    sample: Callable[[Callable[[Progress], None]], Iterator[CreatedImage]],
    out: Path,
    name: str | Path,
    preview: Path | None,
    as_json: bool,
) -> None:
    """Write each image as soon as it is finished, with a progress bar.

    Args:
        sample: samples the images.
        out: the folder.
        name: the file of a single image, or what the names of files, which are their seeds, end with.
        preview: the file of intermediate images.
        as_json: whether one JSON object is printed.
    """
    from pippin.core import progress
    from pippin.data import image_files

    begun, shown, done = time.perf_counter(), 0.0, 0
    made: list[dict[str, Any]] = []
    with progress.bar(None, "sampling", unit="steps") as bar:

        def on_progress(step: Progress) -> None:
            nonlocal shown, done
            bar.advance(step.done - done)
            bar.say(f"of {step.total}")
            done = step.done
            if preview is not None and time.perf_counter() - shown > 0.3:
                shown = time.perf_counter()
                x = step.preview()
                with documents.writing(preview):
                    image_files.write_image(preview, image_files.image_grid(x if x.ndim == 4 else x[:, -1]))

        images = sample(on_progress)  # checks its arguments before the folder is made
        with documents.writing(out):
            out.mkdir(parents=True, exist_ok=True)
        for image in images:
            path = out / f"{image.seed:04d}{name}" if isinstance(name, str) else name
            with documents.writing(path):
                image.save(path)
            made.append({"path": str(path), **image.details})
            if not as_json:
                terminal.write(f"{path}\n")
    seconds = time.perf_counter() - begun
    if as_json:
        terminal.write(terminal.to_json({"seconds": round(seconds, 3), "images": made}) + "\n")
    else:
        terminal.note(f"{len(made)} in {seconds:.1f} s")
        for message in dict.fromkeys(note for one in made for note in one["notes"]):
            terminal.note(message)


def _print_capabilities(creator: ImageCreator, as_json: bool) -> None:
    from dataclasses import asdict

    capabilities = asdict(creator.capabilities)
    if as_json:
        terminal.write(terminal.to_json({"styles": creator.available_styles, **capabilities}) + "\n")
        return
    terminal.write(f"styles: {', '.join(creator.available_styles)}\n")
    for name, value in capabilities.items():
        shown = ", ".join(map(str, value)) if isinstance(value, tuple) else value
        if shown not in ("", 0):
            terminal.write(f"{name}: {shown}\n")


def _cost(cost: Any, as_json: bool) -> None:
    from dataclasses import asdict

    terminal.write((terminal.to_json(asdict(cost)) if as_json else str(cost)) + "\n")


def _check_preview(path: Path | None) -> None:
    """Refuse a preview that could not be written, before anything is sampled."""
    if path is None:
        return
    from pippin.data.image_files import PICTURES

    if path.suffix.lower() not in PICTURES:
        raise InvalidArgument(f"--preview writes {', '.join(PICTURES)}, got {str(path)!r}")
    if not path.resolve().parent.is_dir():
        raise InvalidInput(f"{str(path)!r} cannot be written: there is no folder {str(path.parent)!r}")


def _suffix(kind: str, *, video: bool) -> str:
    known = ("gif", "webp", "png", "mp4") if video else ("png", "webp", "jpg")
    chosen = kind.lower().lstrip(".") or known[0]
    if chosen not in known:
        raise InvalidArgument(f"--format {kind!r}; {'videos' if video else 'images'} are written as {', '.join(known)}")
    return f".{chosen}"


def _size(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts):
        raise InvalidArgument(f"--size {text!r}; write HEIGHTxWIDTH, such as 64x64")
    return int(parts[0]), int(parts[1])
