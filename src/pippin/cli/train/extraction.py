"""`pippin train extraction`: train the adapter that fills in forms from texts."""

from __future__ import annotations

from pippin.cli.common.declared_options import with_options
from pippin.cli.common.results import AsJson, print_result, saved
from pippin.recipes.train import extraction as recipe


@with_options
def extraction(config: recipe.Config, as_json: AsJson = False) -> None:
    """Train an adapter for `pippin extract` on generated documents, in PEFT's format.

    pippin train extraction smollm2-135m --out extractor --steps 2000
    pippin extract letter.txt --adapter extractor --field sender --field date:date
    """
    result = recipe.run(config, show_progress=not as_json)
    print_result(result, as_json=as_json, hints=(saved(config.out),))
