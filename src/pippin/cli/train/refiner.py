"""`pippin train refiner`: refine simulated images toward real ones, keeping their labels."""

from __future__ import annotations

from pathlib import Path

from pippin.cli.common.declared_options import with_options
from pippin.cli.common.results import AsJson, print_result
from pippin.recipes.train import refiner as recipe


@with_options
def refiner(config: recipe.Config, as_json: AsJson = False) -> None:
    """Train a refiner on synthetic and real images, and refine the synthetic ones.

    The folder holds the refiner, refined.npz (8-bit images, with the labels they came with), samples.png (synthetic
    images above refined ones) and checks.json, which measures how far edges moved and whether labels are preserved.

    pippin train refiner rendered photographs --out refiner --image-size 32
    """
    result = recipe.run(config, show_progress=not as_json)
    hint = f"refined images with their labels: {Path(config.out) / 'refined.npz'}"
    print_result(result, as_json=as_json, hints=(hint,))
