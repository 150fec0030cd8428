"""`pippin evaluate composition`: predict whether several classes or texts of a model can be composed in one image."""

from __future__ import annotations

from pathlib import Path

from pippin.cli.common import documents, terminal
from pippin.cli.common.declared_options import with_options
from pippin.cli.common.results import AsJson
from pippin.recipes.evaluate import composition as recipe


@with_options
def composition(config: recipe.Config, as_json: AsJson = False) -> None:
    """Check whether the scores of several parts can be added, and if not, why.

    pippin evaluate composition my-model --part disc --part square --background nothing --draw both.png
    """
    with documents.writing(Path(config.draw or "the images")):
        report = recipe.run(config, show_progress=not as_json)
    if as_json:
        made = {"parts": list(config.part), "background": config.background, **report.to_dict()}
        terminal.write(terminal.to_json(made) + "\n")
        return
    names = ", ".join(f"{index} {name}" for index, name in enumerate(config.part))
    terminal.write(f"{names}\n{report}\n")
