"""`pippin train lora`: train a LoRA adapter of a frozen model."""

from __future__ import annotations

from pippin.cli.common.declared_options import with_options
from pippin.cli.common.results import AsJson, print_result, saved
from pippin.cli.train.workers import Ray, Workers, launch
from pippin.recipes.train import lora as recipe


@with_options
def lora(config: recipe.Config, ray: Ray = False, workers: Workers = None, as_json: AsJson = False) -> None:
    """Train a LoRA adapter on your data, in PEFT's format, for `pippin ask --adapter`.

    pippin train lora smollm2-135m --data chats.jsonl --out mine --steps 200
    pippin ask --adapter mine "What is new?"
    """
    result = launch(recipe, config, ray=ray, workers=workers, show_progress=not as_json)
    if result is not None:
        print_result(result, as_json=as_json, hints=(saved(config.out),))
