"""`pippin train`: train all weights of a model, an adapter, or a model of another kind."""

from __future__ import annotations

import typer

from pippin.cli.train.diffusion import diffusion
from pippin.cli.train.full import full
from pippin.cli.train.images import images
from pippin.cli.train.lora import lora
from pippin.cli.train.neuron_predictor import neuron_predictor
from pippin.cli.train.prune import prune
from pippin.cli.train.reasoner import reasoner
from pippin.cli.train.refiner import refiner
from pippin.cli.train.route import route
from pippin.cli.train.soup import soup
from pippin.cli.train.task_adapter import task_adapter

app = typer.Typer(no_args_is_help=True, help="Train a model on your text, conversations or images.")

app.command()(full)
app.command()(diffusion)
app.command()(images)
app.command()(lora)
app.command(name="task-adapter")(task_adapter)
app.command(name="neuron-predictor")(neuron_predictor)
app.command()(prune)
app.command()(reasoner)
app.command()(refiner)
app.command()(route)
app.command()(soup)
