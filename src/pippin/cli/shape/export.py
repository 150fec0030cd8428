"""`pippin shape export`: export a model for another runtime."""

from __future__ import annotations

from pathlib import Path

from pippin.cli.common import documents, terminal
from pippin.cli.common.declared_options import with_options
from pippin.cli.common.results import AsJson
from pippin.recipes.shape import export as recipe


@with_options
def export(config: recipe.Config, as_json: AsJson = False) -> None:
    """Export a model for another runtime: ONNX, Core AI, Core ML, OpenVINO, ExecuTorch, GGUF, safetensors.

    pippin shape export smollm2-135m --to onnx --out smollm2.onnx
    """
    with documents.writing(Path(config.out)):
        result = recipe.run(config, show_progress=not as_json)
    terminal.write((terminal.to_json(result.summary()) if as_json else str(result)) + "\n")
