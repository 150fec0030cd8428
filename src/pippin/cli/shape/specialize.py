"""`pippin shape specialize`: extract the small model for a task from a pruned model or a soup."""

from __future__ import annotations

from pippin.cli.common.declared_options import with_options
from pippin.cli.common.results import AsJson, print_result
from pippin.recipes.shape import specialize as recipe


@with_options
def specialize(config: recipe.Config, as_json: AsJson = False) -> None:
    """Extract a small dense model for one prompt, one task or one kind of text from a larger one.

    pippin shape specialize pruned --prompt "You are a math teacher." --out math
    """
    result = recipe.run(config, show_progress=not as_json)
    hint = f"saved in {config.out}; try it: pippin ask -m {config.out} QUESTION"
    print_result(result, as_json=as_json, hints=(hint,))
