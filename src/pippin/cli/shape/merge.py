"""`pippin shape merge`: merge adapters into the weights of their model, or into one adapter."""

from __future__ import annotations

from pippin.cli.common import terminal
from pippin.cli.common.declared_options import with_options
from pippin.cli.common.results import AsJson
from pippin.recipes.shape import merge as recipe


@with_options
def merge(config: recipe.Config, as_json: AsJson = False) -> None:
    """Merge adapters into the weights of a model, or several adapters into one.

    pippin shape merge smollm2-135m --adapter mine --out merged
    """
    result = recipe.run(config, show_progress=not as_json)
    if as_json:
        terminal.write(terminal.to_json(result.summary()) + "\n")
        return
    count = len(result.adapters)
    merged = f"{result.model} with {count} adapter{'s' * (count > 1)} in its weights"
    terminal.note(f"{result.out}: {merged if result.rank is None else f'one adapter of rank {result.rank}'}")
