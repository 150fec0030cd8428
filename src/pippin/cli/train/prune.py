"""`pippin train prune`: train a model whose feed-forward channels are selected by the prompt."""

from __future__ import annotations

from pippin.cli.common.declared_options import with_options
from pippin.cli.common.results import AsJson, print_result, saved
from pippin.recipes.train import prune as recipe


@with_options
def prune(config: recipe.Config, as_json: AsJson = False) -> None:
    """Train a model that selects its channels by prompt; `pippin shape specialize` extracts the small models.

    pippin train prune smollm2-135m --keep 512 --data notes.txt --out pruned
    pippin train prune pruned --stage instruct --data questions.jsonl --out tuned
    """
    result = recipe.run(config, show_progress=not as_json)
    small = f"a small model of it: pippin shape specialize {config.out} --prompt TEXT --out PATH"
    print_result(result, as_json=as_json, hints=(saved(config.out), small))
