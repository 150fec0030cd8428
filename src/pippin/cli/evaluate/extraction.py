"""`pippin evaluate extraction`: how right a model fills in forms."""

from __future__ import annotations

from pippin.cli.common.declared_options import with_options
from pippin.cli.common.results import AsJson, print_result
from pippin.recipes.evaluate import extraction as recipe


@with_options
def extraction(config: recipe.Config, as_json: AsJson = False) -> None:
    """Measure how many fields `pippin extract` fills in right, on generated documents whose facts are known.

    pippin evaluate extraction smollm2-135m --items 50
    pippin evaluate extraction smollm2-135m --adapter extractor --languages it --layouts thread
    """
    print_result(recipe.run(config, show_progress=not as_json), as_json=as_json)
