"""`pippin attest`: root keys, measurements, and the transparency log that clients check."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pippin.cli.common import documents, terminal

app = typer.Typer(no_args_is_help=True, help="Root keys, measurements and logs for clients of a sealed server.")


@app.command()
def key(file: Annotated[Path, typer.Argument(help="File for the new key; only you can read it.")]) -> None:
    """Create a software root key and print its public key, which clients put in their policy.

    The key is a plain file: whoever has the file can sign with it.
    """
    from pippin.core.trust.attestation import SoftwareRoot

    with documents.writing(file):
        public = SoftwareRoot.create(file).public
    terminal.write(public + "\n")


@app.command()
def measure(
    model: Annotated[Path | None, typer.Argument(help="A model's file or folder; by default, Pippin itself.")] = None,
) -> None:
    """Print the measurement of this installation, or of a model."""
    from pippin.core.trust import attestation

    terminal.write((attestation.measure() if model is None else attestation.model_hash(model)) + "\n")


@app.command()
def log(
    file: Annotated[Path, typer.Argument(help="The log file: one measurement per line.")],
    add: Annotated[bool, typer.Option("--add", help="Add this installation if the log does not contain it.")] = False,
    extends: Annotated[str | None, typer.Option("--extends", help="Fail unless the log extends this root.")] = None,
) -> None:
    """Print the size and the root hash of a log; clients pin the root."""
    from importlib.metadata import version

    from pippin.core.errors import NotInLog
    from pippin.core.trust.attestation import TransparencyLog, measure

    known = TransparencyLog() if add and not file.exists() else TransparencyLog.read(file)
    if add and known.prove(measure()) is None:
        known = known.add(measure(), version=version("pippin"))
        with documents.writing(file):
            known.write(file)
    if extends is not None and not known.extends(extends):
        raise NotInLog(f"{file} never had the root {extends}: an entry was changed or taken out")
    terminal.write(f"{len(known.entries)} {known.root}\n")
