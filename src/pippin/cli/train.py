"""`pippin train`: all weights of a model, or an adapter beside it."""

from __future__ import annotations

import typer

from pippin.cli.train_diffusion import diffusion
from pippin.cli.train_full import full
from pippin.cli.train_images import images
from pippin.cli.train_lora import lora
from pippin.cli.train_prune import prune
from pippin.cli.train_reasoner import reasoner
from pippin.cli.train_refiner import refiner
from pippin.cli.train_soup import soup

app = typer.Typer(no_args_is_help=True, help="Train a model on text, conversations or pictures of yours.")

app.command()(full)
app.command()(diffusion)
app.command()(images)
app.command()(lora)
app.command()(prune)
app.command()(reasoner)
app.command()(refiner)
app.command()(soup)
