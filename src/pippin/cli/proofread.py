"""`pippin proofread`: corrections of a text, shown as a diff or applied.

Notable here:
- `--write` replaces the file atomically, and keeps its line ends and encoding
- every edit is shown with position, kind and reason; nothing is changed without `--write`
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from pippin.cli.common import documents, options, terminal
from pippin.cli.common.declared_options import with_options
from pippin.core import progress
from pippin.core.errors import InvalidInput
from pippin.core.store.catalog import DEFAULT_MODEL
from pippin.core.text_files import detect_encoding
from pippin.engine.options import Device, DType, ModelOptions

if TYPE_CHECKING:
    from pippin.kits.text import Edit, Revision


@with_options
def proofread(
    file: documents.File = None,
    write: Annotated[
        bool, typer.Option("--write", help="Apply the corrections to the file; piped text is printed corrected.")
    ] = False,
    method: Annotated[
        Literal["auto", "choose", "write"],
        typer.Option(help="choose among rule-based proposals (English), write a correction with the model, or auto."),
    ] = "auto",
    as_json: documents.Json = False,
    model: options.Model = DEFAULT_MODEL,
    device: Device = None,
    dtype: DType = "auto",
) -> None:
    """Correct spelling, grammar and punctuation.

    Code, quotes, links and e-mail addresses are not changed.
    """
    name, text = documents.read(file)
    path = file if file is not None and file.is_file() else None  # a pipe cannot be reread or written
    if path is not None:
        data = path.read_bytes()
        encoding = detect_encoding(data, name)
        text = data.decode(encoding)  # with its line ends
    from pippin.kits.text import TextTasks

    language_model = options.load(model, ModelOptions(device=device, dtype=dtype))
    with progress.counted("proofreading", unit="characters", show_progress=not as_json) as on_progress:
        revision = TextTasks(language_model).proofread(text, method=method, on_progress=on_progress)
    if write and path is not None:
        _save(path, revision.text, encoding)
    if as_json:
        record = {"model": language_model.name, "text": revision.text, "edits": [asdict(e) for e in revision.edits]}
        terminal.write(terminal.to_json(record) + "\n")
    elif write and path is None:
        terminal.write(revision.text)
    else:
        _show(name, revision)
    if write and path is not None:
        terminal.note(f"{len(revision.edits)} corrections made in {name}")


def _save(path: Path, text: str, encoding: str) -> None:
    """Write a file in its original encoding.

    Raises:
        InvalidInput: a correction has a character that the encoding lacks; the file is unchanged.
    """
    from pippin.core.files import atomic_write

    try:
        data = text.encode(encoding)
    except UnicodeEncodeError as error:
        raise InvalidInput(
            f"{str(path)!r} is encoded in {encoding}, which lacks {error.object[error.start]!r}; convert it to UTF-8"
        ) from None
    with documents.writing(path), atomic_write(path) as file:
        file.write(data)


def _show(name: str, revision: Revision) -> None:
    """Print changed lines before and after, and the edits with their reasons."""
    color = terminal.watched(sys.stdout)
    lines: dict[int, list[Edit]] = {}
    for edit in revision.edits:
        lines.setdefault(revision.original.count("\n", 0, edit.span.start), []).append(edit)
    for number, edits in lines.items():
        begin = revision.original.rfind("\n", 0, edits[0].span.start) + 1
        begin += revision.original.startswith("\ufeff", begin)  # editors do not count the byte-order mark as a column
        end = revision.original.find("\n", edits[-1].span.end)
        end = len(revision.original) if end < 0 else end
        typer.echo(_line("-", revision.original, begin, end, edits, color))
        typer.echo(_line("+", revision.original, begin, end, edits, color))
        for edit in edits:
            place = f"{name}:{number + 1}:{edit.span.start - begin + 1}"
            reason = terminal.one_line(f"{place}: {edit.kind}: {edit.explanation}")
            typer.echo(f"  {typer.style(reason, dim=True) if color else reason}")
    if not revision.edits:
        terminal.note("nothing to correct")


def _line(sign: str, text: str, begin: int, end: int, edits: list[Edit], color: bool) -> str:
    """One line with its deletions or insertions highlighted."""
    tone = "red" if sign == "-" else "green"
    parts = [sign, " "]
    at = begin
    for edit in edits:
        new = terminal.plain(edit.original if sign == "-" else edit.replacement)
        parts += [terminal.plain(text[at : edit.span.start]), typer.style(new, fg=tone, bold=True) if color else new]
        at = edit.span.end
    return "".join([*parts, terminal.plain(text[at:end])])
