"""The options that several verbs share, declared once: the model, where it runs, how it samples."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from pippin.core import catalogue
from pippin.core.errors import InvalidArgument, PippinError

if TYPE_CHECKING:
    from pippin.language.load import LanguageModel
    from pippin.nn.lora import Adapter as LoadedAdapter
    from pippin.session.options import GenerationOptions
    from pippin.session.provider import Provider


def complete_model(incomplete: str) -> list[tuple[str, str]]:
    """Chat models of the catalogue whose name begins like this, with their titles, for shell completion."""
    return [(e.name, e.title) for e in catalogue.entries().values() if e.chat and e.name.startswith(incomplete)]


_SAMPLING = "Sampling"
_MACHINE = "Model and machine"
_SPEED = "Speed and memory"

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
Bits = Annotated[
    int | None,
    typer.Option(
        help="Pack the weights to 2, 3, 4 or 8 bits: faster and smaller, less exact.",
        rich_help_panel=_SPEED,
    ),
]
CacheType = Annotated[
    str,
    typer.Option(
        help="Precision of what is kept of the text: auto, float32, bfloat16 or int8.", rich_help_panel=_SPEED
    ),
]
Retention = Annotated[
    float | None,
    typer.Option(
        metavar="SHARE",
        help="Let so large a share of the layers keep what they computed of the text, 0.25 say, and the others read "
        "theirs: a smaller cache, for models trained with --route-caches.",
        rich_help_panel=_SPEED,
    ),
]
Threads = Annotated[int | None, typer.Option(help="Threads; without it one for each core.", rich_help_panel=_SPEED)]
Speculate = Annotated[
    str | None,
    typer.Option(
        metavar="HOW",
        help="Guess several tokens ahead and check them in one pass: ngram (from the text so far), self (by the "
        "model's own first layers), or a small model with the same vocabulary. The answers are the same.",
        rich_help_panel=_SPEED,
    ),
]
PromptCache = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Keep what was computed of the text in this file, and begin from it the next time.",
        rich_help_panel=_SPEED,
    ),
]
Adapter = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FOLDER",
        help="Answer with this LoRA adapter; several are added up.",
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


@dataclass(frozen=True)
class Machine:
    """How a model of this machine is run: what the options of these names say."""

    device: str | None = None
    dtype: str = "auto"
    bits: int | None = None
    cache_type: str = "auto"
    threads: int | None = None
    speculate: str | None = None
    prompt_cache: Path | None = None
    adapter: tuple[Path, ...] = ()
    retention: float | None = None

    @property
    def adapter_name(self) -> str | None:
        """What sessions call the sum of the adapters; None without any."""
        return "given" if self.adapter else None


def load(
    model: str,
    device: str | None,
    dtype: str,
    bits: int | None = None,
    threads: int | None = None,
    retention: float | None = None,
) -> LanguageModel:
    """Load a model, for as many threads as are asked for, or as are worth starting here.

    Raises:
        InvalidArgument: more threads than cores, or an option that `pippin.load` refuses.
    """
    import pippin
    from pippin.core.device import use_threads

    use_threads(threads)
    # it names the precisions itself
    return pippin.load(model, device=device, dtype=cast(Any, dtype), bits=bits, retention=retention)


@contextmanager
def provider(model: str, url: str | None, machine: Machine = Machine()) -> Iterator[Provider]:
    """The model to ask: one of this machine, or the one of that name behind an address.

    At the end, what was computed of the conversation is kept where `Machine` says so.

    Raises:
        InvalidArgument: an address together with what concerns this machine, or one that is not http(s).
        CorruptedFile, PromptCacheMismatch: the prompt cache cannot be used.
        InvalidInput, DiskFull: it cannot be read or written.
    """
    if url is None:
        with _local(model, machine) as local:
            yield local
        return
    if machine != Machine():
        named = [
            f"--{name.replace('_', '-')}" for name, value in vars(machine).items() if value != getattr(Machine, name)
        ]
        raise InvalidArgument(f"{', '.join(named)}: for a model of this machine; leave that out with --url")
    from pippin.session.openai_provider import OpenAIProvider

    yield OpenAIProvider(url, model, api_key=os.environ.get("PIPPIN_API_KEY"))


@contextmanager
def _local(model: str, machine: Machine) -> Iterator[Provider]:
    """A model of this machine under an engine of its own."""
    from pippin.engine import prompt_cache
    from pippin.engine.engine import Engine
    from pippin.language.diffusion import is_diffusion
    from pippin.session.local import LocalModel, speculation

    if is_diffusion(model):
        yield _filling(model, machine)
        return
    if machine.prompt_cache is not None:
        prompt_cache.check_place(machine.prompt_cache)
    loaded = load(model, machine.device, machine.dtype, machine.bits, machine.threads, machine.retention)
    if machine.adapter_name is not None:
        add_adapters(loaded, machine.adapter_name, machine.adapter)
    guess = None
    if machine.speculate is not None:
        guess = speculation(
            machine.speculate, load=lambda ref: load(ref, machine.device, machine.dtype, None, machine.threads)
        )
    engine = Engine(loaded, cache_type=cast(Any, machine.cache_type), prompt_cache=machine.prompt_cache)
    try:
        yield LocalModel(loaded, engine=engine, speculation=guess)
    except BaseException:
        with suppress(PippinError):  # the first error is the one to be told
            engine.close()
        raise
    engine.close()


def _filling(model: str, machine: Machine) -> Provider:
    """A masked diffusion model of this machine, which has no engine."""
    from pippin.core.device import use_threads
    from pippin.language import load_diffusion
    from pippin.session.diffusion_provider import DiffusionModel

    kept = Machine(device=machine.device, dtype=machine.dtype, threads=machine.threads)
    if machine != kept:
        named = [f"--{name.replace('_', '-')}" for name, value in vars(machine).items() if value != vars(kept)[name]]
        raise InvalidArgument(f"{', '.join(named)}: not for {model}, which fills masked tokens; leave that out")
    use_threads(machine.threads)
    return DiffusionModel(load_diffusion(model, device=machine.device, dtype=machine.dtype))


def add_adapters(
    model: LanguageModel, name: str, folders: Sequence[Path], weights: Sequence[float] | None = None
) -> LoadedAdapter:
    """Load adapters as one, their weighted sum; requests to the model find it under this name.

    Raises:
        InvalidArgument: not one weight for each folder.
        ModelNotFound, CheckpointError: a folder holds no adapter of this model.
    """
    from pippin.language.adapters import load_adapter
    from pippin.nn.lora import combine

    weights = weights or [1.0] * len(folders)
    if len(weights) != len(folders):
        raise InvalidArgument(f"{len(weights)} weights were given for {len(folders)} adapters; give one for each")
    parts = [
        (load_adapter(model, str(folder), folder), weight) for folder, weight in zip(folders, weights, strict=True)
    ]
    model.adapters[name] = combine(name, parts)
    return model.adapters[name]


def generation_options(**given: Any) -> GenerationOptions:
    """Generation options from those given on the command line; the rest keep their defaults.

    Raises:
        InvalidArgument: a value is out of its range.
    """
    from pippin.session.options import GenerationOptions

    return GenerationOptions(**{name: value for name, value in given.items() if value is not None})
