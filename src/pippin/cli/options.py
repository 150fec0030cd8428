"""The options that several verbs share, declared once: the model, where it runs, how it samples."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from pippin.core import catalogue
from pippin.core.errors import InvalidArgument

if TYPE_CHECKING:
    from pippin.language.load import LanguageModel
    from pippin.session.options import GenerationOptions
    from pippin.session.provider import Provider


def complete_model(incomplete: str) -> list[tuple[str, str]]:
    """Chat models of the catalogue whose name begins like this, with their titles, for shell completion."""
    return [(e.name, e.title) for e in catalogue.entries().values() if e.chat and e.name.startswith(incomplete)]


_SAMPLING = "Sampling"
_MACHINE = "Model and machine"

Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="Catalogue name, hub repository, folder or .gguf file.",
        autocompletion=complete_model,
        rich_help_panel=_MACHINE,
    ),
]
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda, cuda:N or mps; the best there is without it.", rich_help_panel=_MACHINE)
]
DType = Annotated[str, typer.Option(help="auto, float32 or bfloat16.", rich_help_panel=_MACHINE)]
Url = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Ask an OpenAI-compatible endpoint (http://…/v1) instead of this machine; --model names its model, "
        "PIPPIN_API_KEY holds the key.",
        rich_help_panel=_MACHINE,
    ),
]
Instructions = Annotated[str | None, typer.Option("--instructions", "-i", help="Who the model is, how it answers.")]
Temperature = Annotated[
    float | None, typer.Option(help="0 takes the likeliest token; higher is more varied.", rich_help_panel=_SAMPLING)
]
TopK = Annotated[int | None, typer.Option(help="Choose among the K likeliest tokens.", rich_help_panel=_SAMPLING)]
TopP = Annotated[
    float | None,
    typer.Option(help="Choose among the likeliest tokens of total probability P.", rich_help_panel=_SAMPLING),
]
MinP = Annotated[
    float | None,
    typer.Option(help="Leave out tokens less likely than P times the likeliest.", rich_help_panel=_SAMPLING),
]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same answer.", rich_help_panel=_SAMPLING)]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(help="Above 1, what was said before becomes less likely.", rich_help_panel=_SAMPLING),
]
MaxTokens = Annotated[int, typer.Option(help="The answer ends there at the latest.", rich_help_panel=_SAMPLING)]

# Small models, asked for the likeliest token every time, may go round in circles until the context is full.
MAX_TOKENS = 512


def load(model: str, device: str | None, dtype: str) -> LanguageModel:
    """Load a model, for as many threads as are worth starting here.

    Torch counts the machine's cores, not those that a container may use; OMP_NUM_THREADS still has the last word.
    """
    import torch

    import pippin
    from pippin.core.device import threads

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads())
    return pippin.load(model, device=device, dtype=cast(Any, dtype))  # it names the precisions itself


def provider(model: str, device: str | None, dtype: str, url: str | None) -> Provider:
    """The model to ask: one of this machine, or the one of that name behind an address.

    Raises:
        InvalidArgument: an address together with a device or a precision, or one that is not http(s).
    """
    if url is None:
        from pippin.session.local import LocalModel

        return LocalModel(load(model, device, dtype))
    if device is not None or dtype != "auto":
        raise InvalidArgument("--device and --dtype are for a model of this machine; leave them out with --url")
    from pippin.session.openai_provider import OpenAIProvider

    return OpenAIProvider(url, model, api_key=os.environ.get("PIPPIN_API_KEY"))


def generation_options(**given: Any) -> GenerationOptions:
    """Generation options from those given on the command line; the rest keep their defaults.

    Raises:
        InvalidArgument: a value is out of its range.
    """
    from pippin.session.options import GenerationOptions

    return GenerationOptions(**{name: value for name, value in given.items() if value is not None})
