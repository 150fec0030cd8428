"""Options that the verbs with a language model share, and the provider that they select."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from pippin.cli.common import terminal
from pippin.cli.common.declared_options import complete_model
from pippin.core.errors import InvalidArgument, PippinError
from pippin.engine.options import MACHINE, CacheOptions, ModelOptions
from pippin.recipes.options import MODEL_HELP
from pippin.session.options import GenerationOptions

if TYPE_CHECKING:
    from pippin.engine.kv_eviction import CachePolicy, EpiCache
    from pippin.language.language_model import LanguageModel
    from pippin.session.providers.provider import Provider

Model = Annotated[
    str,
    typer.Option("--model", "-m", help=MODEL_HELP, autocompletion=complete_model, rich_help_panel=MACHINE),
]
Url = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Ask an OpenAI-compatible endpoint (http://…/v1) instead of this machine; --model names its model, "
        "PIPPIN_API_KEY holds the key.",
        rich_help_panel=MACHINE,
    ),
]
Adapter = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FOLDER|none",
        help="LoRA adapter to use instead of the one that comes with Pippin for the task; several are summed. none is "
        "the model itself.",
        rich_help_panel=MACHINE,
    ),
]
Instructions = Annotated[str | None, typer.Option("--instructions", "-i", help="System instructions for the model.")]

# Small models with greedy decoding may repeat themselves until the context is full.
ANSWER: Final = GenerationOptions(max_tokens=512)
HERE: Final = ModelOptions()
EVERYTHING: Final = CacheOptions()
"""All keys and values of a conversation are kept."""
ADAPTER: Final = "given"
"""Name of the summed adapters in sessions."""
_NONE: Final = Path("none")


def adapter_name(adapters: Sequence[Path] | None) -> str | None:
    """The adapter of a session for the given folders; that of the task without any.

    >>> adapter_name(None), adapter_name([Path("none")]), adapter_name([Path("mine")])
    ('auto', None, 'given')
    """
    if not adapters:
        return "auto"
    return None if list(adapters) == [_NONE] else ADAPTER


def bounded_cache(cache_options: CacheOptions, url: str | None) -> CachePolicy | EpiCache | None:
    """The cache of a session.

    Raises:
        InvalidArgument: a cache for a model at an address.
    """
    from pippin.engine.kv_eviction import cache_settings

    if url is not None and cache_options.cache is not None:
        raise InvalidArgument("--cache: only for local models; leave out with --url")
    return cache_settings(cache_options)


def load(model: str, model_options: ModelOptions = HERE) -> LanguageModel:
    """Load a model for the requested or the default number of threads.

    Raises:
        InvalidArgument: an option that `pippin.load` refuses.
    """
    from pippin.core.threads import use_threads
    from pippin.language.language_model import load as load_language_model
    from pippin.language.methods.kv_routing import fewer_caches

    use_threads(model_options.threads)
    transform = None if model_options.kv_sharing_ratio is None else fewer_caches(model_options.kv_sharing_ratio)
    loaded = load_language_model(
        model,
        device=model_options.device,
        dtype=model_options.dtype,
        bits=model_options.bits,
        memory=model_options.memory,
        neuron_predictor=model_options.neuron_predictor,
        transform=transform,
        tool_dialect=model_options.tool_dialect,
    )
    for each in loaded.notes:
        terminal.note(each)
    return loaded


@contextmanager
def provider(
    model: str, url: str | None, model_options: ModelOptions = HERE, adapters: Sequence[Path] | None = None
) -> Iterator[Provider]:
    """A provider for a local model, or for the model of that name at an address.

    On exit, the KV cache of the conversation is saved to ``model_options.prompt_cache`` if that is given.

    Raises:
        InvalidArgument: an address together with options of a local model, or one that is not http(s).
        CorruptedFile, PromptCacheMismatch: the prompt cache cannot be used.
        InvalidInput, DiskFull: it cannot be read or written.
    """
    if url is None:
        with _local(model, model_options, adapters or ()) as local:
            yield local
        return
    if given := _given(model_options, adapters):
        raise InvalidArgument(f"{given}: only for local models; leave out with --url")
    from pippin.session.providers.openai import OpenAIProvider

    yield OpenAIProvider(url, model, api_key=os.environ.get("PIPPIN_API_KEY"))


def _given(model_options: ModelOptions, adapters: Sequence[Path] | None, *, besides: Sequence[str] = ()) -> str:
    """The options that differ from their defaults, for a message."""
    names = [
        one.name
        for one in fields(model_options)
        if getattr(model_options, one.name) != one.default and one.name not in besides
    ]
    return ", ".join(f"--{name.replace('_', '-')}" for name in [*names, *(["adapter"] if adapters else [])])


@contextmanager
def _local(model: str, model_options: ModelOptions, adapters: Sequence[Path]) -> Iterator[Provider]:
    """A local model with its own engine."""
    from pippin.core.formats.checkpoint import model_type
    from pippin.engine.cache import prompt_cache
    from pippin.engine.engine import Engine
    from pippin.engine.experts import prompt_experts
    from pippin.language.adapter_files import load_adapters
    from pippin.session.providers.local import LocalModel, speculation

    if model_type(model) == "pippin_masked_diffusion":
        yield _filling(model, model_options, adapters)
        return
    if model_options.prompt_cache is not None:
        prompt_cache.check_writable(model_options.prompt_cache)
    experts = prompt_experts.from_options(model_options)
    loaded = load(model, model_options)
    if adapters and list(adapters) != [_NONE]:
        load_adapters(loaded, ADAPTER, adapters)
    guess = None
    if model_options.speculate is not None:
        draft = ModelOptions(device=model_options.device, dtype=model_options.dtype, threads=model_options.threads)
        guess = speculation(model_options.speculate, load=lambda ref: load(ref, draft))
    engine = Engine(
        loaded,
        kv_cache_dtype=model_options.kv_cache_dtype,
        experts=experts,
        prompt_cache=model_options.prompt_cache,
    )
    try:
        yield LocalModel(loaded, engine=engine, speculation=guess)
    except BaseException:
        with suppress(PippinError):  # keep the first error
            engine.close()
        raise
    engine.close()


def _filling(model: str, model_options: ModelOptions, adapters: Sequence[Path]) -> Provider:
    """A local masked diffusion model, which has no engine."""
    from pippin.core.threads import use_threads
    from pippin.language import MaskedDiffusionLM
    from pippin.session.providers.masked_diffusion import DiffusionModel

    if given := _given(model_options, adapters, besides=("device", "dtype", "threads")):
        raise InvalidArgument(f"{given}: not for masked diffusion models such as {model}; leave out")
    use_threads(model_options.threads)
    return DiffusionModel(MaskedDiffusionLM.load(model, device=model_options.device, dtype=model_options.dtype))
