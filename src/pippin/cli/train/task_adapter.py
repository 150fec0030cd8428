"""`pippin train task-adapter`: train an adapter of a model for one task."""

from __future__ import annotations

from pippin.cli.common.declared_options import with_options
from pippin.cli.common.results import AsJson, print_result, saved
from pippin.recipes.train import task_adapter as recipe


@with_options
def task_adapter(config: recipe.Config, as_json: AsJson = False) -> None:
    """Train an adapter for one task, such as `pippin extract`, on generated data, in PEFT's format.

    pippin train task-adapter smollm2-135m --task extraction --out extractor --steps 2000
    pippin extract letter.txt --adapter extractor --field sender --field date:date
    """
    result = recipe.run(config, show_progress=not as_json)
    print_result(result, as_json=as_json, hints=(saved(config.out),))
