"""`pippin shape palettize`: a model whose matrices are indices into small tables of values."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from pippin.cli import options, terminal
from pippin.core.errors import InvalidArgument

if TYPE_CHECKING:
    from pippin.shape.quantise.palette import PaletteSettings


def palettize(
    model: Annotated[
        str,
        typer.Argument(
            help="Catalogue name, hub repository, folder or .gguf file.", autocompletion=options.complete_model
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the model goes.")],
    bits: Annotated[int | None, typer.Option(help="Of an index: 2, 3, 4 or 8; 4 by itself.")] = None,
    average_bits: Annotated[
        float | None,
        typer.Option(metavar="BITS", help="In place of --bits: 2 or 4 for each matrix, so many on average (3.5, say)."),
    ] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Text on which weights are weighed by their gradients; may be repeated."),
    ] = None,
    axis: Annotated[str, typer.Option(help="What shares a table: rows or columns.")] = "rows",
    group: Annotated[int, typer.Option(help="How many of them share one.")] = 16,
    embedding_bits: Annotated[int, typer.Option(help="2, 3, 4, 8, or 16 for exact.")] = 4,
    tokens: Annotated[int, typer.Option(help="Of the text that gradients are taken on.")] = 4096,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Turn matrices into indices and tables, and save a folder that opens like any other.

    The file is as small as the indices and tables are. There are no kernels for tables: loaded, the weights are
    ordinary ones, so that the folder saves room and not time; `pippin shape quantize` saves both.

    pippin shape palettize smollm2-135m --average-bits 3.5 --data notes.txt --out small
    """
    if bits is not None and average_bits is not None:
        raise InvalidArgument("give --bits or --average-bits, not both")
    if average_bits is not None and not data:
        raise InvalidArgument("--average-bits chooses widths by what a text feels; give some with --data FILE")
    if out.exists() and not out.is_dir():
        raise InvalidArgument(f"--out is {out}, which is a file; give a folder")
    from pippin.shape.quantise.palette import PaletteSettings

    outer = None if embedding_bits == 16 else embedding_bits
    settings = PaletteSettings(bits or 4, average_bits, cast(Any, axis), group, outer)
    facts = _run(model, settings, data or [], tokens, out, show=not as_json)
    if as_json:
        terminal.write(terminal.to_json(facts) + "\n")
        return
    from pippin.core.report import Report, Row

    rows = [Row(f"weights {when}", facts[f"bytes_{when}"] / 1e6, "MB") for when in ("before", "after")]
    rows.append(Row("bits per weight, with tables", facts["bits_per_weight"]))
    rows += [Row(f"matrices of {width} bits", count) for width, count in facts["widths"].items() if count]
    rows.append(Row("squared error of the weights", 100 * facts["squared_error"], "%"))
    Report(f"{facts['model']}, palettised", rows).print()
    terminal.note(f"saved in {out}")


def _run(
    ref: str, settings: PaletteSettings, data: list[Path], tokens: int, out: Path, *, show: bool
) -> dict[str, Any]:
    """Palettise and save; what was found, as JSON values."""
    import pippin
    from pippin.core import progress
    from pippin.data.records import read_records
    from pippin.language.quantised import matrix_shapes, save_quantised
    from pippin.shape.quantise.calibration import calibration_ids
    from pippin.shape.quantise.palette import palettise

    model = pippin.load(ref, device="cpu", dtype="float32", pack=False)
    texts = (record.text for record in read_records(data)) if data else None
    ids = None if texts is None else calibration_ids(model, texts, tokens=tokens)
    with progress.bar(len(matrix_shapes(model)), "palettising", unit="matrices", show=show) as bar:
        found = palettise(model, settings, ids, on_matrix=lambda name: bar.advance(1))
    save_quantised(out, model, found, note={"method": "palette", "settings": dataclasses.asdict(settings)})
    wrong = square = 0.0
    for name, palette in found.items():
        weight = model.module.get_submodule(name).dense_weight().float()  # type: ignore[operator]
        wrong += float((palette.dense() - weight).square().sum())
        square += float(weight.square().sum())
    source = model.source
    files = [] if source is None else [source] if source.is_file() else list(source.glob("*.safetensors"))
    weights = sum(palette.indices.numel() for palette in found.values())
    return {
        "model": model.name,
        "out": str(out),
        "bytes_before": sum(path.stat().st_size for path in files),
        "bytes_after": sum(path.stat().st_size for path in out.glob("*.safetensors")),
        "bits_per_weight": 8 * sum(palette.nbytes for palette in found.values()) / weights,
        "widths": {width: sum(palette.bits == width for palette in found.values()) for width in (2, 3, 4, 8)},
        "squared_error": wrong / square,
    }
