"""`pippin evaluate summaries`: how true answers about a text and summaries are."""

from __future__ import annotations

from pippin.cli.common.declared_options import with_options
from pippin.cli.common.results import AsJson, print_result
from pippin.recipes.evaluate import summaries as recipe


@with_options
def summaries(config: recipe.Config, as_json: AsJson = False) -> None:
    """Measure how true answers to questions about documents and summaries of them are.

    The documents are generated, so that their facts are known.

    pippin evaluate summaries smollm2-135m --items 50
    """
    print_result(recipe.run(config, show_progress=not as_json), as_json=as_json)
