"""`pippin shape palettize`: a model whose matrices are indices into small tables of values."""

from __future__ import annotations

from pippin.cli.common.declared_options import with_options
from pippin.cli.common.results import AsJson, print_result
from pippin.recipes.shape import palettize as recipe


@with_options
def palettize(config: recipe.Config, as_json: AsJson = False) -> None:
    """Palettize a model: replace each matrix by indices into a lookup table, and save it.

    This saves disk space, not time: weights are expanded when the model is loaded. `pippin shape quantize` saves both.

    pippin shape palettize smollm2-135m --average-bits 3.5 --data notes.txt --out small
    """
    result = recipe.run(config, show_progress=not as_json)
    print_result(result, as_json=as_json, hints=(f"saved in {config.out}",))
