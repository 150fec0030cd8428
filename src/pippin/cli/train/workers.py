"""Run a training recipe in this process, in processes of torchrun, or on Ray workers."""

from __future__ import annotations

from types import ModuleType
from typing import Annotated, Any

import typer

from pippin.core.errors import InvalidArgument
from pippin.recipes.train import distributed

_RUN = "Run"
Ray = Annotated[bool, typer.Option("--ray", help="Train on workers of a Ray cluster.", rich_help_panel=_RUN)]
Workers = Annotated[
    int | None,
    typer.Option(min=1, help="With --ray: number of workers; default: one per core.", rich_help_panel=_RUN),
]


def launch(recipe: ModuleType, config: Any, *, ray: bool, workers: int | None, show_progress: bool) -> Any:
    """Run a recipe; returns its result on the first process and None on the others.

    Raises:
        InvalidArgument: workers without Ray.
    """
    if workers is not None and not ray:
        raise InvalidArgument("--workers is for --ray; without it, start the command with torchrun")
    if ray:
        return distributed.run_on_ray(recipe, config, num_workers=workers, show_progress=show_progress)
    result = recipe.run(config, show_progress=show_progress)
    return result if distributed.is_first() else None
