"""`pippin shape specialize`: the small model for a task, out of one that holds many."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from pippin.cli import options, terminal, training
from pippin.core.errors import InvalidArgument, PippinWarning


def specialize(
    folder: Annotated[Path, typer.Argument(help="What `pippin train prune` or `pippin train soup` made.")],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the small model goes; it opens like any other.")],
    prompt: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="For a pruned model: the task, or the first message of the user."),
    ] = None,
    documents: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="For a soup: texts of the kind that is wanted; may be repeated."),
    ] = None,
    weights: Annotated[
        str | None, typer.Option(metavar="A=X,B=Y", help="For a soup, instead: shares of its domains, which sum to 1.")
    ] = None,
    device: options.Device = None,
    as_json: training.AsJson = False,
) -> None:
    """Make a small, ordinary model of a large one, for one prompt, one task, or one kind of text.

    pippin shape specialize pruned --prompt "You are a maths tutor." --out maths
    """
    from pippin.language.pruned import is_pruned
    from pippin.language.soup import is_soup

    if is_pruned(folder):
        if documents or weights is not None:
            raise InvalidArgument(f"{folder} is pruned by its prompt: give --prompt, not --documents or --weights")
        made = _by_prompt(folder, prompt, out, device)
    elif is_soup(folder):
        if prompt is not None:
            raise InvalidArgument(f"{folder} is a soup of experts: give --documents or --weights, not --prompt")
        made = _by_domains(folder, documents, weights, out, device)
    else:
        raise InvalidArgument(
            f"{folder} is neither a model that `pippin train prune` made nor a soup of `pippin train soup`; to make "
            "any model smaller, see `pippin shape quantize`"
        )
    if as_json:
        terminal.write(terminal.to_json({"out": str(out), **made}) + "\n")
        return
    from pippin.core.report import Report, Row

    Report(f"{folder.name}, specialised", [Row(name, value) for name, value in made.items()]).print()
    terminal.note(f"saved in {out}; try it: pippin ask -m {out} QUESTION")


def _by_prompt(folder: Path, prompt: str | None, out: Path, device: str | None) -> dict[str, Any]:
    from pippin.engine.measure import weight_bytes
    from pippin.language.pruned import load_pruned

    large = load_pruned(folder, device=device)
    began = time.perf_counter()
    small = large.specialize(prompt)
    seconds = time.perf_counter() - began
    small.save(out)
    whole, part = (sum(p.numel() for p in module.parameters()) for module in (large.module.base, small.module))
    read, reads = weight_bytes(large.module.base), weight_bytes(small.module)
    return {
        "channels of a layer before": large.module.width,
        "channels of a layer after": large.module.keep,
        "parameters before": whole,
        "parameters after": part,
        "bytes read for a token, after / before": reads / read,
        "seconds to choose and gather": seconds,
    }


def _by_domains(
    folder: Path, documents: list[Path] | None, weights: str | None, out: Path, device: str | None
) -> dict[str, Any]:
    from pippin.language.soup import SoupOfExperts, domain_weights_of

    soup = SoupOfExperts.load(folder, device=device)
    shares = domain_weights_of(soup, documents=documents, weights=weights)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", PippinWarning)
        model = soup.instantiate(shares)
    for warning in said:
        terminal.note(str(warning.message))
    model.save(out)
    names = soup.domains.names
    rows = {f"share of {name}": share for name, share in zip(names, shares.tolist(), strict=True) if share > 0}
    rows |= {f"weight of expert {i}": value for i, value in enumerate(soup.coefficients(shares).tolist())}
    return rows | {"parameters": sum(p.numel() for p in model.module.parameters())}
