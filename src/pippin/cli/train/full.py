"""`pippin train full`: train all weights of a model, from its own or from random ones."""

from __future__ import annotations

from pippin.cli.common.declared_options import with_options
from pippin.cli.common.results import AsJson, print_result, saved
from pippin.cli.train.workers import Ray, Workers, launch
from pippin.recipes.train import full as recipe


@with_options
def full(config: recipe.Config, ray: Ray = False, workers: Workers = None, as_json: AsJson = False) -> None:
    """Train all weights of a model on your data, and save it.

    pippin train full smollm2-135m --data notes.txt --out mine --steps 100
    """
    result = launch(recipe, config, ray=ray, workers=workers, show_progress=not as_json)
    if result is not None:
        print_result(result, as_json=as_json, hints=(saved(config.out),))
