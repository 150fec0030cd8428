"""`pippin evaluate tools`: how right a model calls tools."""

from __future__ import annotations

from pippin.cli.common.declared_options import with_options
from pippin.cli.common.results import AsJson, print_result
from pippin.recipes.evaluate import tools as recipe


@with_options
def tools(config: recipe.Config, as_json: AsJson = False) -> None:
    """Measure how many requests with tools are answered by the right call, or rightly without one.

    The tools are those that no adapter was trained on.

    pippin evaluate tools smollm2-135m --items 50
    """
    print_result(recipe.run(config, show_progress=not as_json), as_json=as_json)
