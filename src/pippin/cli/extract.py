"""`pippin extract`: structured data from a text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pippin.cli.common import documents, inputs, options, terminal
from pippin.cli.common.declared_options import with_options
from pippin.core import progress
from pippin.core.errors import InvalidArgument
from pippin.core.store.catalog import DEFAULT_MODEL
from pippin.engine.options import Device, DType, ModelOptions


@with_options
def extract(
    file: documents.File = None,
    schema: Annotated[Path | None, typer.Option(help="JSON Schema file of the result.")] = None,
    type_: Annotated[
        str | None, typer.Option("--type", metavar="FILE.py:NAME", help="Python type of the result. Runs the file.")
    ] = None,
    question: Annotated[str, typer.Option(help="What to look for, if the schema does not say it.")] = "",
    as_json: documents.Json = False,
    model: options.Model = DEFAULT_MODEL,
    device: Device = None,
    dtype: DType = "auto",
) -> None:
    """Extract structured data from a text, and print it as JSON.

    pippin extract letter.txt --schema invoice.json
    """
    if schema is None and type_ is None:
        raise InvalidArgument("give the type of the result: --schema FILE.json or --type FILE.py:NAME")
    target = inputs.target(schema=schema, type_name=type_)
    _, text = documents.read(file)
    from pippin.kits.text import TextTasks

    language_model = options.load(model, ModelOptions(device=device, dtype=dtype))
    with progress.busy(f"reading {len(text):,} characters and filling in", show_progress=not as_json):
        value = TextTasks(language_model).extract(text, target, question=question)
    printed = {"model": language_model.name, "content": value} if as_json else value
    terminal.write(terminal.to_json(printed) + "\n")
