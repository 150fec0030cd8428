"""`pippin evaluate classification`: how often a model picks the right label."""

from __future__ import annotations

from pippin.cli.common.declared_options import with_options
from pippin.cli.common.results import AsJson, print_result
from pippin.recipes.evaluate import classification as recipe


@with_options
def classification(config: recipe.Config, as_json: AsJson = False) -> None:
    """Measure how often a model picks the right label, for labels that no adapter was trained on.

    pippin evaluate classification smollm2-135m --items 50
    """
    print_result(recipe.run(config, show_progress=not as_json), as_json=as_json)
