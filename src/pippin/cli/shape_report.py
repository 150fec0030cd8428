"""`pippin shape report`: size, latency and quality of a model, as a whole, per layer and per operator.

Notable here:
- every back end that is asked for is a row, also one that is not installed: it says what it lacks
- layers are sums over the modules of a language model's layers; the quality is that of the model itself, in nats
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from pippin.cli import documents, terminal
from pippin.cli.shape_export import Context, Model, open_asset
from pippin.core.errors import InvalidArgument

if TYPE_CHECKING:
    from pippin.shape.export import PerformanceReport

By = Literal["op", "module", "layer", "device"]


WINDOW = 1024
"""Tokens that a prediction of the quality figures may look back on, where the model's context holds as many."""


def report(
    model: Model,
    backends: Annotated[
        str, typer.Option(metavar="NAME,…", help="torch, onnxruntime, openvino, coreai, executorch.")
    ] = "torch,onnxruntime",
    by: Annotated[By, typer.Option("--by", help="What the time is split by.")] = "layer",
    context: Context = 1024,
    length: Annotated[int, typer.Option(metavar="N", help="Tokens of the sequence that is timed.")] = 128,
    batch: Annotated[int, typer.Option(metavar="N", help="Rows that are timed.")] = 1,
    runs: Annotated[int, typer.Option(metavar="N", help="Runs that are timed.")] = 10,
    data: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Text that the model has not seen, to measure its quality on.")
    ] = None,
    limit: Annotated[int, typer.Option(metavar="N", help="Rows for each back end.")] = 40,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it (.png, .svg, .pdf).")] = None,
    as_json: documents.Json = False,
) -> None:
    """Measure size, latency and quality of a language model or of an exported program.

    pippin shape report smollm2-135m --backends torch,onnxruntime --by layer
    """
    from pippin.shape.export import profile
    from pippin.shape.export.backends import NAMES

    names = [name.strip() for name in backends.split(",")]
    if unknown := [name for name in names if name not in NAMES]:
        raise InvalidArgument(f"--backends knows {', '.join(NAMES)}, not {unknown[0]!r}")
    for option, value in (("--runs", runs), ("--batch", batch), ("--length", length), ("--limit", limit)):
        if value < 1:
            raise InvalidArgument(f"{option} must be at least 1, got {value}")
    quality = None if data is None else _quality(model, data)
    asset = open_asset(model, context)
    known = asset.signature().ranges
    sizes = {name: size for name, size in (("batch", batch), ("length", length)) if name in known}
    found = profile(asset, names, sizes=sizes, runs=runs)
    if plot is not None:
        found.plot(plot, by="op" if by == "op" else "module")
        terminal.note(f"drawn in {plot}")
    if as_json:
        rows = _layers(found) if by == "layer" else found.rows(by)
        terminal.write(
            terminal.to_json(json.loads(found.to_json()) | {"by": by, "rows": rows, "quality": quality}) + "\n"
        )
        return
    terminal.write(f"{model}: {asset.nbytes / 1e6:.1f} MB of weights, sizes {sizes or 'as captured'}\n\n")
    terminal.write((_table(found, limit) if by == "layer" else found.to_table(by, limit=limit)) + "\n")
    if quality is not None:
        terminal.write("\n" + "".join(f"{name}: {value:.4g}\n" for name, value in quality.items()))


def _quality(ref: str, data: Path) -> dict[str, float]:
    """How well a language model predicts a text."""
    import pippin
    from pippin.cli import inputs
    from pippin.language.likelihood import likelihood

    if (Path(ref) / "asset.json").is_file():
        raise InvalidArgument("--data measures language models; an exported program has no tokenizer")
    text = inputs.read_file(data)
    model = pippin.load(ref, device="cpu")
    found = likelihood(model, text, length=min(WINDOW, model.context_size))
    return {
        "nats per token": found.per_token,
        "nats per byte": found.per_byte,
        "perplexity": found.perplexity,
        "tokens": found.tokens,
    }


def _layers(found: PerformanceReport) -> list[dict[str, Any]]:
    """The rows of modules, added up by layer, in the order of the model."""
    sums: dict[tuple[str, str], dict[str, Any]] = {}
    for row in found.rows("module"):
        layer = _layer(row["module"])
        entry = sums.setdefault(
            (row["label"], layer), {"label": row["label"], "layer": layer, "p50_ms": 0.0, "share": 0.0, "flops": 0}
        )
        for figure in ("p50_ms", "share", "flops"):
            entry[figure] += row[figure]
    return sorted(sums.values(), key=lambda row: (row["label"], *_order(row["layer"])))


def _layer(module: str) -> str:
    """ "decoder.layers.3.mlp.up_proj" is layer "layers.3"; a module outside of layers is its own first part."""
    parts = module.removeprefix("decoder.").split(".")
    for index, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[: index + 1])
    return parts[0] or "(the model itself)"


def _order(layer: str) -> tuple[int, int, str]:
    number = layer.rpartition(".")[2]
    return (1, int(number), layer) if number.isdecimal() else (0 if "embed" in layer else 2, 0, layer)


def _table(found: PerformanceReport, limit: int) -> str:
    whole = found.to_table("module", limit=0).split("\n\n")[0]
    lines = [f"{'back end':14}{'layer':24}{'p50 ms':>10}{'share':>9}{'MFLOP':>12}"]
    seen: dict[str, int] = {}
    for row in _layers(found):
        seen[row["label"]] = seen.get(row["label"], 0) + 1
        if seen[row["label"]] <= limit:
            figures = f"{row['p50_ms']:10.4f}{100 * row['share']:7.1f} %{row['flops'] / 1e6:12.2f}"
            lines.append(f"{row['label']:14}{row['layer']:24}{figures}")
    return whole + "\n\n" + "\n".join(lines)
