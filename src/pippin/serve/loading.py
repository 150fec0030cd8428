"""How a server gets its models: from the disk only, and each under an engine that answers many requests at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pippin.core import reference
from pippin.serve.pool import token_bytes
from pippin.serve.settings import Settings


def language_loader(
    settings: Settings, load: Callable[[str], Any] | None, cache_bytes: Callable[[], int]
) -> Callable[[str], Any]:
    """A function from a reference to a `LocalModel` that many may use at once.

    Args:
        settings: slots, device and precision.
        load: gives a `LanguageModel` (or a whole `LocalModel`) for a reference; None loads it from this disk.
        cache_bytes: the most that its cache may take.
    """

    def from_disk(ref: str) -> Any:
        from pippin.language.load import load

        found = reference.resolve(ref, download=False)
        return load(found.path, device=settings.device, dtype=settings.dtype)

    def give(ref: str) -> Any:
        from pippin.engine.batch import BatchEngine
        from pippin.engine.slots import BLOCK
        from pippin.language.load import LanguageModel
        from pippin.session.local import LocalModel

        model = (load or from_disk)(ref)
        if not isinstance(model, LanguageModel):
            return model
        engine = BatchEngine(
            model,
            slots=settings.slots,
            queue=2 * settings.slots,  # only for what is let in ahead: the queue itself is at the gate of the model
            cache_tokens=max(BLOCK, min(settings.slots * model.context_size, cache_bytes() // token_bytes(model))),
            reuse=not settings.stateless,
        )
        return LocalModel(model, engine=engine)

    return give


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

        weights = memory_needed(ref, settings.dtype, device=settings.device, context=0)
        context = memory_needed(ref, settings.dtype, device=settings.device) - weights
        return weights + min(cache_bytes, settings.slots * context)

    return give
