"""`pippin evaluate perplexity`: how well a language model predicts text."""

from __future__ import annotations

from pippin.cli.common.declared_options import with_options
from pippin.cli.common.results import AsJson, print_result
from pippin.recipes.evaluate import perplexity as recipe


@with_options
def perplexity(config: recipe.Config, as_json: AsJson = False) -> None:
    """Measure the perplexity of a language model on text files, with its standard error.

    Compare models of one tokenizer by perplexity, and other models by nats per byte.

    pippin evaluate perplexity smollm2-135m notes.txt --bits 4
    """
    print_result(recipe.run(config, show_progress=not as_json), as_json=as_json)
