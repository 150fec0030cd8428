"""`pippin train reasoner`: train a language model to reason in latent vectors and to write only the answer."""

from __future__ import annotations

from pippin.cli.common.declared_options import with_options
from pippin.cli.common.results import AsJson, print_result, saved
from pippin.recipes.train import reasoner as recipe


@with_options
def reasoner(config: recipe.Config, as_json: AsJson = False) -> None:
    """Train a latent reasoner from questions with written solutions.

    A record has a prompt and a completion: the reasoning, then "The answer is …" or "#### …".

    pippin train reasoner smollm2-135m --data sums.jsonl --out thinker --steps 2000
    pippin reason thinker "3,8,5=6" --steps 16
    """
    result = recipe.run(config, show_progress=not as_json)
    print_result(result, as_json=as_json, hints=(saved(config.out), f"ask it with: pippin reason {config.out}"))
