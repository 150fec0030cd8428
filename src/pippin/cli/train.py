"""`pippin train`: all weights of a model, or an adapter beside it."""

from __future__ import annotations

import typer

from pippin.cli.train_full import full
from pippin.cli.train_lora import lora

app = typer.Typer(no_args_is_help=True, help="Train a model on text or conversations of yours.")

app.command()(full)
app.command()(lora)
