"""`pippin shape report`: size, latency and quality of a model, as a whole, per layer and per operator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from pippin.cli.common import terminal
from pippin.cli.common.declared_options import with_options
from pippin.cli.common.results import AsJson
from pippin.recipes.shape import report as recipe

By = Annotated[Literal["op", "module", "layer", "device"], typer.Option("--by", help="Group the time by this.")]
Limit = Annotated[int, typer.Option(min=1, metavar="N", help="Most rows for each backend.")]
Plot = Annotated[Path | None, typer.Option(metavar="FILE", help="Plot the profile to this file (.png, .svg, .pdf).")]


@with_options
def report(
    config: recipe.Config, by: By = "layer", limit: Limit = 40, plot: Plot = None, as_json: AsJson = False
) -> None:
    """Measure size, latency and quality of a language model or of an exported program.

    pippin shape report smollm2-135m --backends torch,onnxruntime --by layer
    """
    found = recipe.run(config, show_progress=not as_json)
    performance = found.performance
    if plot is not None:
        performance.plot(plot, by="op" if by == "op" else "module")
        terminal.note(f"plotted to {plot}")
    if as_json:
        rows = found.layers() if by == "layer" else performance.rows(by)
        made = json.loads(performance.to_json()) | {"by": by, "rows": rows, "quality": found.quality}
        terminal.write(terminal.to_json(made) + "\n")
        return
    sizes = dict(found.sizes) or "as captured"
    terminal.write(f"{config.model}: {found.weight_bytes / 1e6:.1f} MB of weights, sizes {sizes}\n\n")
    terminal.write((_table(found, limit) if by == "layer" else performance.to_table(by, limit=limit)) + "\n")
    if found.quality is not None:
        terminal.write("\n" + "".join(f"{name}: {value:.4g}\n" for name, value in found.quality.items()))


def _table(found: recipe.ProfilingResult, limit: int) -> str:
    """The whole model, then the layers of each backend."""
    total = found.performance.to_table("module", limit=0).split("\n\n")[0]
    lines = [f"{'backend':14}{'layer':24}{'p50 ms':>10}{'share':>9}{'MFLOP':>12}"]
    seen: dict[str, int] = {}
    for row in found.layers():
        seen[row["label"]] = seen.get(row["label"], 0) + 1
        if seen[row["label"]] <= limit:
            figures = f"{row['p50_ms']:10.4f}{100 * row['share']:7.1f} %{row['flops'] / 1e6:12.2f}"
            lines.append(f"{row['label']:14}{row['layer']:24}{figures}")
    return total + "\n\n" + "\n".join(lines)
