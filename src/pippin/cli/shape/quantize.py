"""`pippin shape quantize`: quantize a model by rounding, by calibration on text, or by training."""

from __future__ import annotations

from pippin.cli.common.declared_options import with_options
from pippin.cli.common.results import AsJson, print_result
from pippin.recipes.shape import quantize as recipe


@with_options
def quantize(config: recipe.Config, as_json: AsJson = False) -> None:
    """Quantize a model, measure the loss in quality, and save it.

    pippin shape quantize smollm2-135m --bits 4 --data notes.txt --out small
    """
    result = recipe.run(config, show_progress=not as_json)
    print_result(result, as_json=as_json, hints=(f"saved in {config.out}",))
