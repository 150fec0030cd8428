"""Model pool: several models under one memory budget, loaded on demand and unloaded when others need the memory.

Notable here:
- the least recently used idle model is unloaded, never one that is answering
- requests for a model that is being loaded wait for the same load; a client that disconnects does not stop it
- a failed load is remembered for a few seconds, so that a broken model does not keep the machine busy, and then retried
- names are resolved against the server's settings: no request can make it download something
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pippin.core import memory
from pippin.core.errors import (
    AdapterMismatch,
    AssetError,
    CheckpointError,
    ModelNotFound,
    NotEnoughMemory,
    Overloaded,
    PippinError,
)
from pippin.core.files import format_bytes
from pippin.core.formats.checkpoint import read_json
from pippin.core.store import catalog, store
from pippin.engine.model_runner import KVCacheDtypeChoice
from pippin.language.task_adapters import TaskAdapter, load, task_adapters
from pippin.serve import logs
from pippin.serve.admission import AdmissionQueue
from pippin.serve.settings import NO_ADAPTER, ServerSettings

Kind = Literal["chat", "base", "encoder", "adapter"]

_CACHE_PART = 4  # divisor of the budget: maximum for one model's cache
_REMEMBER_FAILURE = 5.0  # seconds
_ENCODER_TYPES = ("bert",)


@dataclass(frozen=True)
class ModelInfo:
    """One model that requests may name.

    ``created`` is in seconds since the epoch; ``context_size`` in tokens, None if it is unknown before loading;
    ``nbytes`` is 0 if it is not loaded.
    """

    id: str
    created: int
    owned_by: str
    kind: Kind
    loaded: bool
    context_size: int | None
    nbytes: int = 0


@dataclass
class LoadedModel:
    """A model in memory, with its state in the pool; ``model`` is a `LocalModel` or a `TextEncoder`."""

    name: str
    model: Any
    kind: Kind
    nbytes: int
    admission: AdmissionQueue
    users: int = 0
    last_used: float = 0.0
    adapters: set[str] = field(default_factory=set)

    @property
    def engine(self) -> Any:
        """The engine of a language model; None for an encoder."""
        return getattr(self.model, "engine", None)


class ModelPool:
    """The models of one server; to be used from one event loop.

    Args:
        settings: the served models and their memory budget.
        load: returns a `LocalModel` for a reference; with ``memory`` one that takes no more.
        load_encoder: returns a `TextEncoder` for a reference.
        encoders: names of encoders, besides those whose files identify them.
        memory_needed: from a reference and a maximum cache size to the bytes that the model will take; None if that is
            unknown before loading.
        least_memory: from a reference to the least ``memory`` that it can be loaded with, None for a model that only
            fits as a whole; None for all models.
        clock: a monotonic clock in seconds.
    """

    def __init__(
        self,
        settings: ServerSettings,
        *,
        load: Callable[..., Any],
        load_encoder: Callable[[str], Any],
        encoders: Iterable[str] = (),
        memory_needed: Callable[[str, int], int] | None = None,
        least_memory: Callable[[str], int | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._clock = settings, clock
        self._load, self._load_encoder = load, load_encoder
        self._needed, self._least = memory_needed, least_memory
        self._encoders = frozenset(encoders)
        self._loads: dict[str, asyncio.Task[LoadedModel]] = {}
        self._failures: dict[str, tuple[float, Exception]] = {}
        self._reserved: dict[str, int] = {}
        self._created = int(time.time())
        self.loaded: dict[str, LoadedModel] = {}
        self.budget = budget(settings)

    # --- names --------------------------------------------------------------------------------------------------------

    def references(self) -> dict[str, str]:
        """The names that requests may use, with their references."""
        found = dict(self._settings.references)
        if self._settings.any_installed:
            here = {installed.name for installed in store.installed() if installed.kind == "model"}
            found |= {name: name for name in catalog.entries() if name in here and name not in found}
        return found

    def resolve(self, model: str) -> tuple[str, str | None]:
        """Name and adapter of a requested model; the default model for an empty name.

        Raises:
            ModelNotFound: the server does not serve it.
        """
        names = self.references()
        model = model or self._settings.default
        if model in names:
            return model, None
        base, colon, adapter = model.rpartition(":")
        if colon and base in names and adapter in (*self._adapters_of(base), NO_ADAPTER):
            return base, adapter
        known = [*names, *(f"{base}:{name}" for base in names for name in self._adapters_of(base))]
        raise ModelNotFound(f"the model {model[:100]!r} is not served here; these are: {', '.join(known)}")

    def models(self) -> list[ModelInfo]:
        """All models that requests may name, models before their adapters."""
        found = []
        for name, ref in self.references().items():
            here = self.loaded.get(name)
            kind = here.kind if here else self.kind(name, ref)
            size = self._context_size(name, ref)
            info = ModelInfo(name, self._created, "pippin", kind, here is not None, size, here.nbytes if here else 0)
            found.append(info)
            for adapter in self._adapters_of(name):
                there = here is not None and adapter in here.adapters
                found.append(ModelInfo(f"{name}:{adapter}", self._created, "pippin", "adapter", there, size))
        return found

    def kind(self, name: str, ref: str) -> Kind:
        """The kind of a model, determined without loading it."""
        if name in self._encoders:
            return "encoder"
        if entry := catalog.find(ref):
            return entry.role or "chat"
        config = Path(ref).expanduser() / "config.json"
        if config.is_file() and read_json(config).get("model_type") in _ENCODER_TYPES:
            return "encoder"
        return "chat"

    def _context_size(self, name: str, ref: str) -> int | None:
        if here := self.loaded.get(name):
            size = here.model.max_tokens if here.kind == "encoder" else here.model.context_size
            return int(size)
        entry = catalog.find(ref)
        return entry.context_length if entry else None

    def _adapters_of(self, base: str) -> list[str]:
        own = [name.rpartition(":") for name in self._settings.adapters]
        named = [name for model, _, name in own if (model or self._settings.default) == base]
        return [*named, *(name for name in self._task_adapters(base) if name not in named)]

    def _task_adapters(self, base: str) -> dict[str, TaskAdapter]:
        """The adapters that come with Pippin for a model of the catalog."""
        reference = self.references().get(base)
        return {each.name: each for each in task_adapters() if each.model == reference}

    def _adapter_path(self, base: str, adapter: str) -> Path | None:
        given = self._settings.adapters
        path = given.get(f"{base}:{adapter}") or (given.get(adapter) if base == self._settings.default else None)
        return None if path is None else Path(path)

    # --- loading ------------------------------------------------------------------------------------------------------

    async def acquire(self, name: str, adapter: str | None = None) -> LoadedModel:
        """A loaded model that will not be unloaded before `release`; loads it, and its adapter, if necessary.

        Raises:
            NotEnoughMemory: it does not fit into the budget even alone.
            Overloaded: it would fit, but the loaded models are answering.
            ModelNotFound, CheckpointError, AdapterMismatch: it cannot be loaded.
        """
        while True:
            loaded = self.loaded.get(name) or await self._wait_for(name)
            if self.loaded.get(name) is loaded:  # it was not unloaded before this request continued
                break
        loaded.users += 1
        try:
            if adapter is not None and adapter != NO_ADAPTER and adapter not in loaded.adapters:
                await asyncio.to_thread(self._load_adapter, loaded, adapter)
                loaded.adapters.add(adapter)
        except BaseException:
            self.release(loaded)
            raise
        return loaded

    def _load_adapter(self, loaded: LoadedModel, adapter: str) -> None:
        """Load an adapter of the settings, or one that comes with Pippin.

        Raises:
            CheckpointError, CorruptedFile: it cannot be read. AdapterMismatch: it is of another model.
        """
        model = loaded.model.model
        if (path := self._adapter_path(loaded.name, adapter)) is not None:
            model.load_adapter(adapter, path)
        elif load(model, self._task_adapters(loaded.name)[adapter].task) is None:
            raise AdapterMismatch(f"{loaded.name} is not the model that {adapter} was trained for")

    def release(self, loaded: LoadedModel) -> None:
        """Mark a request as done with a model."""
        loaded.users -= 1
        loaded.last_used = self._clock()

    @property
    def cache_bytes(self) -> int:
        """Maximum size of one model's cache."""
        return self.budget // _CACHE_PART

    @property
    def nbytes(self) -> int:
        """Bytes of the loaded models and those being loaded, with their caches counted at full size."""
        return sum(one.nbytes for one in self.loaded.values()) + sum(self._reserved.values())

    def close(self) -> None:
        """Unload everything, in use or not."""
        for task in self._loads.values():
            task.cancel()
        for name in list(self.loaded):
            self._unload(name)

    async def _wait_for(self, name: str) -> LoadedModel:
        failed = self._failures.get(name)
        if failed and self._clock() - failed[0] < _REMEMBER_FAILURE:
            raise failed[1].with_traceback(None)
        task = self._loads.get(name)
        if task is None:
            task = asyncio.create_task(self._load_now(name), name=f"load {name}")
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # possibly nobody waits
            self._loads[name] = task
        return await asyncio.shield(task)  # a client that disconnects must not stop it for the others

    async def _load_now(self, name: str) -> LoadedModel:
        ref = self.references()[name]
        kind = self.kind(name, ref)
        try:
            need, bounded = await asyncio.to_thread(self._estimate, ref)
            self._make_room(name, need)
            self._reserved[name] = need
            if bounded:
                model = await asyncio.to_thread(self._load, ref, memory=need)
            else:
                model = await asyncio.to_thread(self._load_encoder if kind == "encoder" else self._load, ref)
            loaded = LoadedModel(
                name, model, kind if kind == "encoder" else _kind(model), size_of(model), self._new_admission_queue()
            )
        except (AssetError, CheckpointError) as error:
            self._failures[name] = (self._clock(), error)
            raise
        finally:
            self._loads.pop(name, None)
            self._reserved.pop(name, None)
        try:
            self._make_room(name, loaded.nbytes)  # its size is now known, not only estimated
        except BaseException:
            _close(loaded)
            raise
        self._failures.pop(name, None)
        loaded.last_used = self._clock()
        self.loaded[name] = loaded
        return loaded

    def _new_admission_queue(self) -> AdmissionQueue:
        settings = self._settings
        return AdmissionQueue(settings.max_num_seqs, ahead=min(settings.max_num_seqs, settings.max_queued_requests))

    def _estimate(self, ref: str) -> tuple[int, bool]:
        """Bytes of a model, and whether it has to be held to them: it would take more than all models may."""
        try:
            need = 0 if self._needed is None else self._needed(ref, self.cache_bytes)
            least = self._least(ref) if need > self.budget and self._least is not None else None
        except (AssetError, CheckpointError):
            return 0, False  # the load itself will raise the error
        if least is None:
            return need, False
        in_use = sum(one.nbytes for one in self.loaded.values() if one.users) + sum(self._reserved.values())
        return max(least, self.budget - in_use), True

    def _make_room(self, name: str, need: int) -> None:
        if need > self.budget:
            raise NotEnoughMemory(
                f"{name} needs {format_bytes(need)}, and all models together may take {format_bytes(self.budget)}; "
                "give the server more memory, or take a smaller model"
            )
        idle = sorted((one for one in self.loaded.values() if not one.users), key=lambda one: one.last_used)
        while self.nbytes + need > self.budget:
            if not idle:
                raise Overloaded(
                    f"{name} needs {format_bytes(need)}, and the loaded models are answering requests; try again",
                    retry_after=5.0,
                )
            self._unload(idle.pop(0).name)

    def _unload(self, name: str) -> None:
        loaded = self.loaded.pop(name)
        _close(loaded)
        gc.collect()  # modules and engines reference each other; their memory is needed now


def budget(settings: ServerSettings) -> int:
    """Memory budget of all models together, in bytes."""
    if settings.memory is None or settings.memory == "auto":
        return memory.automatic()
    return settings.memory


def cache_share(settings: ServerSettings) -> int:
    """Maximum size of one model's cache, in bytes."""
    return budget(settings) // _CACHE_PART


def _close(loaded: LoadedModel) -> None:
    close = getattr(loaded.engine, "close", None)
    if close is None:
        return
    try:
        close()
    except PippinError as error:  # unwritten prompt caches must not prevent serving
        fields = {"model": loaded.name, "error": type(error).__name__, "reason": str(error)}
        logs.log.error("prompt cache not written", extra={"fields": fields})


def _kind(model: Any) -> Kind:
    return "chat" if model.model.template is not None else "base"


def size_of(model: Any) -> int:
    """Bytes of a `LocalModel` or a `TextEncoder`: its weights, packed or not, and its cache at full size.

    Its draft model is included.
    """
    given = getattr(model, "nbytes", None)
    if given is not None:
        return int(given)
    inner = getattr(model, "model", model)
    if (placement := getattr(inner, "placement", None)) is not None:
        return int(placement.budget.nbytes)
    module = getattr(inner, "network", None) or getattr(inner, "module", None)  # that of a language model, an encoder
    engine, draft = getattr(model, "engine", None), getattr(getattr(model, "speculation", None), "draft", None)
    weights = sum(_weights(one) for one in (module, getattr(draft, "network", None)) if one is not None)
    if engine is None:
        return weights
    return weights + int(engine.stats().cache_tokens_capacity) * token_bytes(inner, engine.kv_cache_dtype)


def token_bytes(model: Any, kv_cache_dtype: KVCacheDtypeChoice = "auto") -> int:
    """Bytes of the keys and values of one token of a `LanguageModel`, at a cache precision of `Engine`."""
    from pippin.engine.model_runner import BLOCK_SIZE
    from pippin.engine.runners.select import runner_class

    return runner_class(model).block_bytes_of(model, kv_cache_dtype) // BLOCK_SIZE


def _weights(module: Any) -> int:
    """Bytes of all tensors of a module, including packed formats, each storage once."""
    import torch

    seen: dict[int, int] = {}
    for part in module.modules():
        tensors = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
        packed = getattr(part, "packed", None)
        tensors += [value for value in vars(packed).values() if isinstance(value, torch.Tensor)] if packed else []
        for tensor in tensors:
            opaque = tensor.layout is not torch.strided  # oneDNN's own layout has no address to identify it by
            size = tensor.numel() * tensor.element_size() if opaque else tensor.nbytes
            seen[id(tensor) if opaque else tensor.data_ptr()] = size
    return sum(seen.values())
