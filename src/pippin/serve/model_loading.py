"""Model loading for the server: from disk only, each model with an engine that batches requests.

Notable here:
- one draft model serves all models with its vocabulary; the others decode one token at a time, and the log reports it
- a prompt cache file that cannot be used does not prevent serving: the log gives the reason, and the file is written
  again
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

from pippin.core.errors import InvalidArgument, PippinError
from pippin.core.store import reference
from pippin.engine.options import CacheOptions
from pippin.serve import logs, processes
from pippin.serve.model_pool import cache_share, token_bytes
from pippin.serve.settings import ServerSettings

if TYPE_CHECKING:
    from pippin.engine.engine import Engine
    from pippin.engine.kv_eviction import CachePolicy, EpiCache
    from pippin.engine.speculation import Speculation
    from pippin.language.language_model import LanguageModel
    from pippin.session.providers.local import LocalModel


def language_loader(
    settings: ServerSettings, load: Callable[[str], Any] | None, cache_bytes: Callable[[], int]
) -> Callable[..., Any]:
    """A function from a reference, and perhaps ``memory``, to a `LocalModel` for concurrent requests.

    Args:
        settings: batch size, device, precision and all other settings of the engine.
        load: returns a `LanguageModel` (or a whole `LocalModel`) for a reference; None loads it from this disk.
        cache_bytes: maximum size of its cache.
    """

    from_disk = partial(read_model, settings)
    draft = _Draft(settings.speculate, load or from_disk)

    def load_model(ref: str, memory: int | None = None) -> Any:
        from pippin.engine.kv_eviction import cache_settings
        from pippin.language.language_model import LanguageModel
        from pippin.session.providers.local import LocalModel

        model = from_disk(ref, settings.kv_sharing_ratio, memory) if load is None else load(ref)
        if not isinstance(model, LanguageModel):
            return model
        cache = cache_settings(CacheOptions(cache=settings.cache, cache_budget=settings.cache_budget))
        most = most_conversations(settings, model, cache, cache_bytes() // 2)
        engine = _engine(settings, model, cache_bytes() if cache is None else cache_bytes() // 2)
        return LocalModel(
            model,
            engine=engine,
            speculation=draft.of(model),
            tool_dialect=settings.tool_dialect,
            cache=cache,
            max_conversations=most,
        )

    return load_model


def read_model(
    settings: ServerSettings, ref: str, kv_sharing_ratio: float | None = None, memory: int | None = None
) -> LanguageModel:
    """A model of this disk; where several processes compute it, the part of this one.

    Args:
        settings: device, precision and bits.
        ref: which model.
        kv_sharing_ratio: share of the layers that keep a cache of their own; None for as many as it has.
        memory: most bytes that it may take; None for what it needs.
    """
    from pippin.language.language_model import load
    from pippin.language.methods.kv_routing import fewer_caches

    path, device = reference.resolve(ref, download=False).path, settings.device
    if processes.is_joined():
        return processes.part_of(load(path, device=device, dtype=settings.dtype, pack=False))
    transform = None if kv_sharing_ratio is None else fewer_caches(kv_sharing_ratio)
    predictor = None if memory is None else settings.neuron_predictor
    return load(
        path,
        device=device,
        dtype=settings.dtype,
        bits=settings.bits,
        memory=memory,
        neuron_predictor=predictor,
        transform=transform,
    )


def most_conversations(
    settings: ServerSettings, model: LanguageModel, cache: CachePolicy | EpiCache | None, most_bytes: int
) -> int:
    """Conversations that bounded caches keep, at most as many as the settings say and some bytes hold, but one."""
    if cache is None:
        return settings.max_conversations
    fit = most_bytes // max(1, cache.most_tokens * token_bytes(model, settings.kv_cache_dtype))
    return max(1, min(settings.max_conversations, fit))


@contextmanager
def alone(settings: ServerSettings) -> Iterator[LocalModel]:
    """The default model of the settings for one client, without a server; its prompt cache is written at the end.

    Raises:
        ModelNotFound, CheckpointError: it cannot be loaded.
    """
    local = language_loader(settings, None, lambda: cache_share(settings))(settings.references[settings.default])
    try:
        yield local
    finally:
        local.engine.close()


def _engine(settings: ServerSettings, model: LanguageModel, cache_bytes: int) -> Engine:
    """The engine of a model, with its stored prompt cache."""
    from pippin.engine.cache.prompt_cache import remove_partials
    from pippin.engine.engine import Engine
    from pippin.engine.experts import prompt_experts
    from pippin.engine.model_runner import BLOCK_SIZE

    cache_limit = cache_bytes // max(
        1, token_bytes(model, settings.kv_cache_dtype)
    )  # recurrent layers need none per token
    tokens = max(settings.max_num_seqs * BLOCK_SIZE, min(settings.max_num_seqs * model.context_size, cache_limit))
    engine = Engine(
        model,
        max_num_seqs=settings.max_num_seqs,
        # only requests admitted ahead wait in the engine; all others wait in the model's admission queue
        max_waiting=2 * settings.max_num_seqs,
        cache_tokens=tokens if model.placement is None else None,
        kv_cache_dtype=settings.kv_cache_dtype,
        enable_prefix_caching=not settings.stateless,
        experts=prompt_experts.from_options(settings),
    )
    if settings.prompt_cache is not None:
        file = prompt_file(settings.prompt_cache, model.name)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            remove_partials(file)
            if file.exists():
                engine.load_prompt_cache(file)
        except (PippinError, OSError) as error:
            fields = {"model": model.name, "error": type(error).__name__, "reason": str(error)}
            logs.log.error("prompt cache not used", extra={"fields": fields})
        engine.prompt_cache = file
    return engine


def prompt_file(path: Path, model: str) -> Path:
    """The prompt cache file of a model.

    >>> prompt_file(Path("cache"), "owner/name").name
    'owner%2Fname.prompts'
    """
    return path / f"{quote(model, safe='')}.prompts"


class _Draft:
    """The draft model of a server; loaded with its first target model."""

    def __init__(self, name: str | None, load: Callable[[str], Any]) -> None:
        self._name, self._load = name, load
        self._speculation: Speculation | None = None
        self._lock = threading.Lock()

    def of(self, model: LanguageModel) -> Speculation | None:
        """The speculation for a model; None where it is not possible."""
        if self._name is None:
            return None
        from pippin.session.providers.local import speculation

        with self._lock:
            if self._speculation is None:
                self._speculation = speculation(self._name, load=self._load)
        try:
            self._speculation.check(model)
        except PippinError as error:
            fields = {"model": model.name, "error": type(error).__name__, "reason": str(error)}
            logs.log.error("no speculative decoding", extra={"fields": fields})
            return None
        return self._speculation


def encoder_loader(settings: ServerSettings) -> Callable[[str], Any]:
    """A function from a reference to a `TextEncoder`, from this disk."""

    def load(ref: str) -> Any:
        from pippin.language.encoder import load_encoder

        return load_encoder(reference.resolve(ref, download=False).path, device=settings.device)

    return load


def memory_needed(settings: ServerSettings) -> Callable[[str, int], int]:
    """A function from a reference and a maximum cache size to the bytes that the model will take."""

    def estimate(ref: str, cache_bytes: int) -> int:
        from pippin.language.availability import memory_needed
        from pippin.language.methods.kv_routing import with_kv_sharing_layers

        def bytes_of(ref: str, *, bits: Literal[2, 3, 4, 8] | None = settings.bits, **more: Any) -> int:
            return memory_needed(ref, settings.dtype, device=settings.device, bits=bits, **{"context": 0} | more)

        fewer = (
            None
            if settings.kv_sharing_ratio is None
            else partial(with_kv_sharing_layers, kv_sharing_ratio=settings.kv_sharing_ratio)
        )
        weights = bytes_of(ref, transform=fewer)
        context = bytes_of(ref, transform=fewer, context=None) - weights
        draft_bytes = 0 if settings.speculate in (None, "ngram", "self") else bytes_of(settings.speculate, bits=None)
        return weights + draft_bytes + min(cache_bytes, settings.max_num_seqs * context)

    return estimate


def least_memory(settings: ServerSettings) -> Callable[[str], int | None]:
    """A function from a reference to the least memory that it can be loaded with; None if it can't be bounded."""

    def least(ref: str) -> int | None:
        from pippin.language.availability import least_memory
        from pippin.language.methods.kv_routing import with_kv_sharing_layers

        ratio = settings.kv_sharing_ratio
        fewer = None if ratio is None else partial(with_kv_sharing_layers, kv_sharing_ratio=ratio)
        try:
            return least_memory(
                ref,
                settings.dtype,
                device=settings.device,
                bits=settings.bits,
                transform=fewer,
                neuron_predictor=settings.neuron_predictor,
            )
        except InvalidArgument:
            return None

    return least
