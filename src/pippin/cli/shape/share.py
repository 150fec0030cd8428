"""`pippin shape share`: share KV caches between layers, and restore quality by distillation."""

from __future__ import annotations

from pippin.cli.common.declared_options import with_options
from pippin.cli.common.results import AsJson, print_result
from pippin.recipes.shape import share as recipe


@with_options
def share(config: recipe.Config, as_json: AsJson = False) -> None:
    """Share KV caches between layers, distill the model from the original, and save it.

    pippin shape share smollm2-135m --shared-layers 11 --data notes.txt --steps 200 --out shared
    pippin shape share routed --kv-sharing-ratio 0.25 --out quarter
    """
    result = recipe.run(config, show_progress=not as_json)
    print_result(result, as_json=as_json, hints=(f"saved in {config.out}",))
