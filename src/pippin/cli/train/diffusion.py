"""`pippin train diffusion`: adapt a causal language model to masked diffusion, or continue such training."""

from __future__ import annotations

from pippin.cli.common.declared_options import with_options
from pippin.cli.common.results import AsJson, print_result, saved
from pippin.recipes.train import diffusion as recipe


@with_options
def diffusion(config: recipe.Config, as_json: AsJson = False) -> None:
    """Train a model to fill masked tokens in any order, and save it for `pippin infill`.

    The losses are upper bounds in nats per token, and not comparable with those of `pippin train full`.

    pippin train diffusion smollm2-135m --data notes.txt --out filler --steps 200
    """
    result = recipe.run(config, show_progress=not as_json)
    print_result(result, as_json=as_json, hints=(saved(config.out),))
