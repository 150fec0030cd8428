"""The verbs of `pippin`. Each has its own file, which imports heavy modules only when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from pippin.cli.ask import ask
from pippin.cli.attest import app as attest
from pippin.cli.bench import bench
from pippin.cli.chat import chat
from pippin.cli.claims import app as claims
from pippin.cli.classify import classify
from pippin.cli.doctor import doctor
from pippin.cli.evaluate.app import app as evaluate
from pippin.cli.extract import extract
from pippin.cli.imagine import imagine
from pippin.cli.infill import infill
from pippin.cli.laws import app as laws
from pippin.cli.models import models
from pippin.cli.privacy import privacy
from pippin.cli.proofread import proofread
from pippin.cli.pull import pull
from pippin.cli.reason import reason
from pippin.cli.remove import remove
from pippin.cli.serve import serve
from pippin.cli.shape.app import app as shape
from pippin.cli.summarize import summarize
from pippin.cli.train.app import app as train

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Help on a verb: pippin VERB --help",
)


def _version(wanted: bool) -> bool:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"pippin {version('pippin')}")
        raise typer.Exit
    return wanted


@app.callback()
def pippin(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error, as PIPPIN_DEBUG=1 does.")
    ] = False,
) -> None:
    """Private foundation models on the machine you have."""


for verb in (ask, chat, summarize, extract, classify, proofread, serve, models, pull, remove, doctor, bench, privacy):
    app.command()(verb)
app.command()(reason)
app.command()(infill)
app.command()(imagine)
app.add_typer(attest, name="attest")
app.add_typer(claims, name="claims")
app.add_typer(evaluate, name="evaluate")
app.add_typer(laws, name="laws")
app.add_typer(train, name="train")
app.add_typer(shape, name="shape")
