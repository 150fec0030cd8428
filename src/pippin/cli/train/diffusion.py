"""`pippin train diffusion`: make a masked diffusion model of one that continues text, or train such a model further."""

from __future__ import annotations

from pippin.cli.common.declared_options import with_options
from pippin.cli.common.results import AsJson, print_result, saved
from pippin.recipes.train import diffusion as recipe


@with_options
def diffusion(config: recipe.Config, as_json: AsJson = False) -> None:
    """Train a model to fill masked tokens in any order, and save it for `pippin infill`.

    The losses are bounds on nats per token: they do not compare with those of `pippin train full`.

    pippin train diffusion smollm2-135m --data notes.txt --out filler --steps 200
    """
    result = recipe.run(config, show_progress=not as_json)
    print_result(result, as_json=as_json, hints=(saved(config.out),))
