"""`pippin train route`: train the router that chooses a mixture's experts by the prompt."""

from __future__ import annotations

from pippin.cli.common.declared_options import with_options
from pippin.cli.common.results import AsJson, print_result, saved
from pippin.recipes.train import route as recipe


@with_options
def route(config: recipe.Config, as_json: AsJson = False) -> None:
    """Train a router that chooses a mixture's experts by the prompt, for `pippin ask --prompt-router`.

    pippin train route mixture.gguf --keep 16 --data notes.txt --out router
    pippin train route mixture --keep 16 --stage together --data notes.txt --out tuned
    """
    result = recipe.run(config, show_progress=not as_json)
    model = config.model if result.stage == "forecast" else config.out
    ask = f"ask with it: pippin ask -m {model} --prompt-router {result.router} PROMPT"
    print_result(result, as_json=as_json, hints=(saved(config.out), ask))
