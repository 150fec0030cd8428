"""`pippin shape merge`: adapters into the weights of their model, or several adapters into one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pippin.cli import options, terminal
from pippin.core.errors import InvalidArgument


def merge(
    model: Annotated[
        str,
        typer.Argument(
            help="Catalogue name, hub repository, folder or .gguf file.", autocompletion=options.complete_model
        ),
    ],
    adapter: Annotated[list[Path], typer.Option(metavar="FOLDER", help="An adapter of this model; may be repeated.")],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the result goes.")],
    weight: Annotated[
        list[float] | None, typer.Option(help="How much of each adapter, in their order; 1 without it.")
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(help="Leave the model alone and write one adapter of this rank, the nearest to the sum."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16: of the merged weights.")] = "float32",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Merge adapters into a model that needs none any more, or several into one adapter.

    pippin shape merge smollm2-135m --adapter mine --out merged
    """
    import pippin
    from pippin.shape import lora

    if rank is not None and rank < 1:
        raise InvalidArgument(f"--rank must be at least 1, got {rank}")
    loaded = pippin.load(model, device="cpu", dtype=dtype, pack=False)
    whole = options.add_adapters(loaded, "sum", adapter, weight)
    if rank is None:
        lora.merge(loaded, whole)
        loaded.save(out)
        done = f"{loaded.name} with {len(adapter)} adapter{'s' * (len(adapter) > 1)} in its weights"
    else:
        lora.save_sum(out, loaded, whole, rank)
        done = f"one adapter of rank {rank}"
    if as_json:
        facts = {"out": str(out), "model": loaded.name, "adapters": [path.name for path in adapter], "rank": rank}
        terminal.write(terminal.to_json(facts) + "\n")
    else:
        terminal.note(f"{out}: {done}")
