"""How a server gets its models: from the disk only, and each under an engine that answers many requests at once.

Notable here:
- one model that guesses ahead serves all whose vocabulary it has; the others write one token at a time, and the log
  says so
- a file of prompts that cannot be used keeps no model from being served: the log says why, and it is written anew
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from pippin.core import reference
from pippin.core.errors import PippinError
from pippin.serve import logs
from pippin.serve.pool import cache_share, token_bytes
from pippin.serve.settings import Settings

if TYPE_CHECKING:
    from pippin.engine.engine import Engine
    from pippin.engine.speculation import Speculation
    from pippin.language.load import LanguageModel
    from pippin.session.local import LocalModel


def language_loader(
    settings: Settings, load: Callable[[str], Any] | None, cache_bytes: Callable[[], int]
) -> Callable[[str], Any]:
    """A function from a reference to a `LocalModel` that many may use at once.

    Args:
        settings: slots, device, precision and all else that concerns the engine.
        load: gives a `LanguageModel` (or a whole `LocalModel`) for a reference; None loads it from this disk.
        cache_bytes: the most that its cache may take.
    """

    def from_disk(ref: str, retention: float | None = None) -> Any:
        from pippin.language.load import load

        path, device = reference.resolve(ref, download=False).path, settings.device
        return load(path, device=device, dtype=settings.dtype, bits=settings.bits, retention=retention)

    draft = _Draft(settings.speculate, load or from_disk)

    def give(ref: str) -> Any:
        from pippin.language.load import LanguageModel
        from pippin.session.local import LocalModel

        model = from_disk(ref, settings.retention) if load is None else load(ref)
        if not isinstance(model, LanguageModel):
            return model
        return LocalModel(model, engine=_engine(settings, model, cache_bytes()), speculation=draft.of(model))

    return give


@contextmanager
def alone(settings: Settings) -> Iterator[LocalModel]:
    """The default model of the settings for one client, without a server; its prompts are kept at the end.

    Raises:
        ModelNotFound, CheckpointError: it cannot be loaded.
    """
    local = language_loader(settings, None, lambda: cache_share(settings))(settings.references[settings.default])
    try:
        yield local
    finally:
        local.engine.close()


def _engine(settings: Settings, model: LanguageModel, cache_bytes: int) -> Engine:
    """The engine of a model, with the prompts that were kept of it (of one with recurrent layers none can be)."""
    from pippin.engine.engine import Engine
    from pippin.engine.runner import BLOCK

    room = cache_bytes // max(1, token_bytes(model, settings.cache_type))  # recurrent layers take none for a token
    engine = Engine(
        model,
        slots=settings.slots,
        queue=2 * settings.slots,  # only for what is let in ahead: the queue itself is at the gate of the model
        cache_tokens=max(settings.slots * BLOCK, min(settings.slots * model.context_size, room)),
        cache_type=settings.cache_type,
        reuse=not settings.stateless,
    )
    if settings.prompt_cache is not None and not model.config.recurrent_layers:
        file = prompt_file(settings.prompt_cache, model.name)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            if file.exists():
                engine.load_prompt_cache(file)
        except (PippinError, OSError) as error:
            fields = {"model": model.name, "error": type(error).__name__, "reason": str(error)}
            logs.log.error("kept prompts not used", extra={"fields": fields})
        engine.prompt_cache = file
    return engine


def prompt_file(folder: Path, model: str) -> Path:
    """Where what was computed of prompts is kept for a model.

    >>> prompt_file(Path("kept"), "owner/name").name
    'owner%2Fname.prompts'
    """
    return folder / f"{quote(model, safe='')}.prompts"


class _Draft:
    """What guesses ahead for the models of a server; loaded with the first of them."""

    def __init__(self, name: str | None, load: Callable[[str], Any]) -> None:
        self._name, self._load = name, load
        self._made: Speculation | None = None
        self._lock = threading.Lock()

    def of(self, model: LanguageModel) -> Speculation | None:
        """How to guess for a model; None where it cannot be done."""
        if self._name is None:
            return None
        from pippin.session.local import speculation

        with self._lock:
            if self._made is None:
                self._made = speculation(self._name, load=self._load)
        try:
            self._made.check(model)
        except PippinError as error:
            fields = {"model": model.name, "error": type(error).__name__, "reason": str(error)}
            logs.log.error("nothing is guessed ahead", extra={"fields": fields})
            return None
        return self._made


def encoder_loader(settings: Settings) -> Callable[[str], Any]:
    """A function from a reference to a `TextEncoder`, from this disk."""

    def give(ref: str) -> Any:
        from pippin.language.encoder import load_encoder

        return load_encoder(reference.resolve(ref, download=False).path, device=settings.device)

    return give


def memory_needed(settings: Settings) -> Callable[[str, int], int]:
    """A function from a reference, and the most that its cache may take, to the bytes that the model will take."""

    def give(ref: str, cache_bytes: int) -> int:
        from pippin.language.availability import memory_needed

        def bytes_of(ref: str, *, bits: int | None = settings.bits, **more: Any) -> int:
            return memory_needed(ref, settings.dtype, device=settings.device, bits=bits, **{"context": 0} | more)

        weights = bytes_of(ref, retention=settings.retention)
        context = bytes_of(ref, retention=settings.retention, context=None) - weights
        guesser = 0 if settings.speculate in (None, "ngram", "self") else bytes_of(settings.speculate, bits=None)
        return weights + guesser + min(cache_bytes, settings.slots * context)

    return give
