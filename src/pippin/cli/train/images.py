"""`pippin train images`: train an image generator on a folder or a dataset of the catalog."""

from __future__ import annotations

from pippin.cli.common.declared_options import with_options
from pippin.cli.common.results import AsJson, print_result
from pippin.recipes.train import images as recipe


@with_options
def images(config: recipe.Config, as_json: AsJson = False) -> None:
    """Train an image generator, and save it for `pippin imagine`.

    The folder holds the model, samples.png with some of its samples, and run/ with checkpoints, log and loss curve.

    pippin train images fashion-mnist --out garments --steps 2000
    """
    result = recipe.run(config, show_progress=not as_json)
    hint = f"{config.out}: the model, samples.png, and run/ with the checkpoints; pippin imagine samples from it"
    print_result(result, as_json=as_json, hints=(hint,))
