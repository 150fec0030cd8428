"""`pippin train soup`: train a soup of experts, which holds a small model for any mixture of domains."""

from __future__ import annotations

from pippin.cli.common.declared_options import with_options
from pippin.cli.common.results import AsJson, print_result, saved
from pippin.recipes.train import soup as recipe


@with_options
def soup(config: recipe.Config, as_json: AsJson = False) -> None:
    """Train shared weights and experts on mixtures of domains; `pippin shape specialize` extracts small models.

    pippin train soup smollm2-135m --preset nano --data notes --domains 16 --experts 8 --out soup
    pippin shape specialize soup --documents mine.txt --out specialist
    """
    result = recipe.run(config, show_progress=not as_json)
    small = f"a small model of it: pippin shape specialize {config.out} --documents FILE --out PATH"
    print_result(result, as_json=as_json, hints=(saved(config.out), small))
