"""`pippin evaluate composition`: whether several classes or texts of a model go together in one picture, beforehand."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pippin.cli import documents, options, terminal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pippin.generate.composition import Composability
    from pippin.generate.condition import Condition
    from pippin.generate.diffusion import Diffusion

NOTHING = "nothing"


def composition(
    model: Annotated[Path, typer.Argument(help="A folder with a diffusion model, as `pippin train images` makes it.")],
    part: Annotated[
        list[str],
        typer.Option("--part", metavar="WHAT", help="A class (name or number), or a text; repeat it for each part."),
    ],
    over: Annotated[
        str,
        typer.Option(
            metavar="WHAT",
            help="The background: what all parts have in common, and nothing of what they add. 'nothing' is the model "
            "without a condition.",
        ),
    ],
    weight: Annotated[
        list[float] | None, typer.Option(help="Of each part, in their order; 1 without it.", metavar="NUMBER")
    ] = None,
    n: Annotated[int, typer.Option(help="Pictures that it is measured on.")] = 16,
    draw: Annotated[Path | None, typer.Option(help="Draw so many pictures into this file, too (.png).")] = None,
    corrector: Annotated[int, typer.Option(help="Langevin steps near the end of the drawing.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the noise.")] = 0,
    device: options.Device = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say whether the scores of several parts may be added, and why not where they may not.

    pippin evaluate composition my-model --part disc --part square --over nothing --draw both.png
    """
    from pippin.core.errors import InvalidArgument
    from pippin.generate.composition import composability, compose
    from pippin.generate.diffusion import Diffusion
    from pippin.generate.folder import load

    if n < 1 or corrector < 0:
        raise InvalidArgument(f"--n is {n} and --corrector {corrector}; give at least 1 and 0")
    if draw is not None and draw.suffix != ".png":
        raise InvalidArgument(f"--draw writes .png, got {str(draw)!r}")
    found = load(model, device=device)
    if not isinstance(found, Diffusion):
        raise InvalidArgument(f"{model} holds a {type(found).__name__}; scores are added for diffusion models only")
    *parts, behind = _conditions(found, [*part, over])
    composed = compose(parts, behind, of=found, weights=weight)
    report = composability(composed, n=n, seed=seed)
    if draw is not None:
        _draw(composed, draw, n, corrector, seed)
    if as_json:
        terminal.write(terminal.to_json({"parts": part, "background": over, **report.to_dict()}) + "\n")
        return
    _print(report, part)


def _print(report: Composability, parts: Sequence[str]) -> None:
    """Names of the parts, then figures and advice."""
    names = ", ".join(f"{index} {name}" for index, name in enumerate(parts))
    terminal.write(f"{names}\n{report}\n")


def _conditions(model: Diffusion, words: Sequence[str]) -> list[Condition]:
    """What each word means to the model."""
    import torch

    from pippin.core.errors import InvalidArgument
    from pippin.generate.condition import Condition

    spec = model.condition
    if spec.map or spec.vector or bool(spec.classes) == bool(spec.text):
        raise InvalidArgument(
            "parts are classes or texts, and the model reads something else; use pippin.generate.compose"
        )
    if NOTHING in words and not spec.null:
        raise InvalidArgument("'nothing' is no background of this model: it was not trained without its condition")
    if spec.classes:
        names = [str(name) for name in model.facts.get("classes") or range(spec.classes)]
        labels = [-1 if word == NOTHING else _label(word, names) for word in words]
        return [Condition(labels=torch.tensor([label])) for label in labels]
    from pippin.kits.image.text import TextEncoder

    facts = model.facts.get("text_encoder") or {}
    encoder = TextEncoder.load(facts["name"], tokens=facts["tokens"]) if facts else TextEncoder.load()
    return [encoder.condition(["" if word == NOTHING else word]) for word in words]


def _label(word: str, names: Sequence[str]) -> int:
    from pippin.core.errors import InvalidArgument

    known = [name.lower() for name in names]
    if word.lower() in known:
        return known.index(word.lower())
    if word.isdigit() and int(word) < len(names):
        return int(word)
    raise InvalidArgument(f"{word!r} is no class of the model; it has {', '.join(names)}, and 'nothing'")


def _draw(composed: object, path: Path, n: int, corrector: int, seed: int) -> None:
    """A sheet of pictures."""
    import warnings

    from pippin.core.errors import CompositionAtRisk
    from pippin.data.image_files import sheet, write
    from pippin.generate.composition import Composed
    from pippin.generate.contract import shown
    from pippin.generate.samplers import Langevin

    assert isinstance(composed, Composed)
    at = composed.schedule.time(0.02)
    langevin = Langevin(corrector, 0.1 * composed.schedule.s(at) ** 2, at) if corrector else None
    with warnings.catch_warnings(), shown("drawing") as on_step:
        warnings.simplefilter("ignore", CompositionAtRisk)  # the report says the same
        x = composed.sample(n=n, seed=seed, on_step=on_step, corrector=langevin)
    with documents.writing(path):
        write(path, sheet(x, zoom=max(1, 128 // x.shape[-1])))
