"""`pippin extract`: structured data from a text, with the place that each value comes from."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from pippin.cli.common import documents, inputs, options, terminal
from pippin.cli.common.declared_options import with_options
from pippin.core import progress
from pippin.core.errors import InvalidArgument
from pippin.core.store.catalog import DEFAULT_MODEL
from pippin.engine.options import Device, DType, ModelOptions

if TYPE_CHECKING:
    from rich.table import Table

    from pippin.session.extraction import Extraction

_TYPES: Final[dict[str, dict[str, Any]]] = {
    "text": {"type": "string"},
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "format": "time"},
    "datetime": {"type": "string", "format": "date-time"},
    "duration": {"type": "string", "format": "duration"},
    "number": {"type": "number"},
    "integer": {"type": "integer"},
    "flag": {"type": "boolean"},
    "texts": {"type": "array", "items": {"type": "string"}},
}


@with_options
def extract(
    file: documents.File = None,
    schema: Annotated[Path | None, typer.Option(help="JSON Schema file of the result.")] = None,
    type_: Annotated[
        str | None, typer.Option("--type", metavar="FILE.py:NAME", help="Python type of the result. Runs the file.")
    ] = None,
    field: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:TYPE]",
            help="A field to look for, instead of a schema; may be repeated. Its type is text (without one), date, "
            "time, datetime, duration, number, integer, flag or texts.",
        ),
    ] = None,
    question: Annotated[str, typer.Option(help="What to look for, if the schema does not say it.")] = "",
    language: Annotated[str | None, typer.Option(help="Language of the text, such as de; detected without it.")] = None,
    region: Annotated[
        str | None, typer.Option(help="Country such as US, where dates and numbers can be read in two ways.")
    ] = None,
    adapter: options.Adapter = None,
    as_json: documents.Json = False,
    model: options.Model = DEFAULT_MODEL,
    device: Device = None,
    dtype: DType = "auto",
) -> None:
    """Extract structured data from a text: only what stands in the text can be in the result.

    A terminal shows a table of values and the places that they come from; a pipe gets the result as JSON.

    pippin extract letter.txt --schema invoice.json
    pippin extract letter.txt --field sender --field date:date --field total:number
    """
    if (schema is not None) + (type_ is not None) + bool(field) != 1:
        raise InvalidArgument(
            "give the type of the result: --schema FILE.json, --type FILE.py:NAME, or --field NAME for each field"
        )
    target = _fields(field) if field else inputs.target(schema=schema, type_name=type_)
    _, text = documents.read(file)
    from pippin.session.session import Session

    with (
        options.provider(model, None, ModelOptions(device=device, dtype=dtype), adapter) as provider,
        progress.busy(f"reading {len(text):,} characters and filling in", show_progress=not as_json),
    ):
        session = Session(provider, adapter=options.adapter_name(adapter))
        found = session.extract(text, target, question=question, language=language, region=region)
    if as_json:
        printed = {"model": provider.name, "content": found.content, "spans": list(map(_span, found.spans))}
        terminal.write(terminal.to_json(printed) + "\n")
    elif terminal.watched(sys.stdout):
        _show(found, text)
    else:
        terminal.write(terminal.to_json(found.content) + "\n")


def _fields(fields: list[str]) -> dict[str, Any]:
    """The schema of fields that are named on the command line; each may be missing.

    Raises:
        InvalidArgument: a field without a name, twice, or of an unknown type.
    """
    properties: dict[str, Any] = {}
    for each in fields:
        name, _, kind = each.rpartition(":") if each.rpartition(":")[2] in _TYPES else (each, "", "text")
        if not name.strip() or name in properties:
            raise InvalidArgument(f"--field is NAME or NAME:TYPE with different names, got {each!r}")
        if ":" in name and " " not in name:
            raise InvalidArgument(f"--field {each}: the type is one of {', '.join(_TYPES)}")
        properties[name] = _TYPES[kind]
    return {"type": "object", "properties": properties}


def _span(span: Any) -> dict[str, Any]:
    return {
        "name": span.name,
        "text": span.text,
        "start": span.start,
        "end": span.end,
        "value": span.value,
        "confidence": None if span.confidence is None else round(span.confidence, 4),
        "ambiguous": span.ambiguous,
    }


def _show(found: Extraction[Any], text: str) -> None:
    """A table of the values and where they come from; values without a place follow as JSON does."""
    from rich.console import Console

    console = Console()
    if found.spans:
        console.print(_table(found, text))
    else:
        console.print_json(terminal.to_json(found.content))


def _table(found: Extraction[Any], text: str) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(header_style="bold")
    for title, justify in (("field", "left"), ("value", "left"), ("in the text", "left"), ("line", "right")):
        table.add_column(title, justify=justify)  # type: ignore[arg-type]
    table.add_column("confidence", justify="right")
    for span in found.spans:
        before, after = text[max(0, span.start - 12) : span.start], text[span.end : span.end + 12]
        context = Text.assemble(
            (terminal.one_line(before) + " " * before[-1:].isspace(), "dim"),
            (terminal.one_line(span.text), "bold"),
            (" " * after[:1].isspace() + terminal.one_line(after), "dim"),
        )
        sure = "" if span.confidence is None else f"{span.confidence:.0%}"
        value = terminal.one_line(str(span.value)) + (" ?" if span.ambiguous else "")
        table.add_row(span.name, Text(value), context, str(text.count("\n", 0, span.start) + 1), sure)
    return table
