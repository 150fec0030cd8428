"""`pippin attest`: a root key, the measurement of this installation, and the log that a client checks against."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pippin.cli.common import documents, terminal

app = typer.Typer(no_args_is_help=True, help="Make and publish what a client of a sealed server checks.")


@app.command()
def key(file: Annotated[Path, typer.Argument(help="Where the new key is to be kept; only you can read it.")]) -> None:
    """Make a software root key and print its public half, which clients name in their policy.

    It is a key in a file: it proves nothing against whoever has the file.
    """
    from pippin.core.trust.attestation import SoftwareRoot

    with documents.writing(file):
        public = SoftwareRoot.create(file).public
    terminal.write(public + "\n")


@app.command()
def measure(
    model: Annotated[Path | None, typer.Argument(help="A model's file or folder; none measures Pippin itself.")] = None,
) -> None:
    """Print the measurement of this installation, or of a model."""
    from pippin.core.trust import attestation

    terminal.write((attestation.measure() if model is None else attestation.model_hash(model)) + "\n")


@app.command()
def log(
    file: Annotated[Path, typer.Argument(help="The log: one measurement a line.")],
    add: Annotated[bool, typer.Option("--add", help="Add this installation, if it is not in.")] = False,
    extends: Annotated[str | None, typer.Option("--extends", help="Fail unless the log once had this root.")] = None,
) -> None:
    """Print the size and the root of a log; clients pin the root."""
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
