"""The bounded cache, or the several ones, of one conversation: which one answers a question, and how they are saved."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from pippin.core.errors import CorruptedFile, PromptCacheMismatch
from pippin.engine.kv_eviction.bounded_cache import BoundedCache
from pippin.engine.kv_eviction.cache_file import Loaded
from pippin.engine.kv_eviction.episodes import Utterance
from pippin.engine.kv_eviction.policy import CachePolicy


@runtime_checkable
class CacheMaker(Protocol):
    """What the cache of a conversation needs of an engine."""

    def bounded_cache(self, policy: CachePolicy) -> BoundedCache:
        """A cache within a budget."""

    def save_caches(
        self, path: Path, caches: Mapping[str, BoundedCache], tensors: Mapping[str, Tensor], values: Mapping[str, Any]
    ) -> int:
        """Write caches, and what belongs to them, to a file."""

    def load_caches(self, path: Path) -> Loaded:
        """Read it."""


class ConversationCache(ABC):
    """The caches of one conversation.

    Args:
        settings: policy or settings, a dataclass.
        engine: makes the caches and computes in them.

    Attributes:
        caches: by number.
    """

    def __init__(self, settings: Any, engine: CacheMaker) -> None:
        self.settings, self._engine = settings, engine
        self.caches: dict[int, BoundedCache] = {}

    @abstractmethod
    def cache_for(self, num_tokens: int, utterances: Sequence[Utterance], question: str) -> BoundedCache:
        """The cache to answer a question in; give it to a `Request` whose prompt is the whole conversation.

        Args:
            num_tokens: tokens of the prompt.
            utterances: the conversation so far, without the question.
            question: what is asked.
        """

    @abstractmethod
    def _saved(self) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
        """What is kept beside the caches, as tensors and as JSON."""

    @abstractmethod
    def _restored(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any], names: Sequence[str]) -> None:
        """Take what `_saved` gave, and make caches with these numbers."""

    def save(
        self, path: str | Path, *, tensors: Mapping[str, Tensor] | None = None, values: Mapping[str, Any] | None = None
    ) -> int:
        """Write the caches to a file, for `load` with the same model and settings; return its bytes.

        Args:
            path: the file; its folder must exist.
            tensors: what else to keep, by name.
            values: likewise, as JSON.

        Raises:
            InvalidArgument: a request holds one of the caches.
            DiskFull: the disk has no room for it. InvalidInput: nothing may be written there.
        """
        own_tensors, own = self._saved()
        named = {str(number): cache for number, cache in self.caches.items()}
        arrays = {f"own.{name}": each for name, each in own_tensors.items()} | dict(tensors or {})
        kept = {"settings": _described(self.settings), "own": own, "values": dict(values or {})}
        return self._engine.save_caches(Path(path), named, arrays, kept)

    def load(self, path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Read what `save` wrote; what the conversation had before is forgotten. Return what else was kept.

        Args:
            path: the file.

        Raises:
            InvalidInput: the file cannot be read, or there is none.
            CorruptedFile: it is no such file, or is truncated or changed.
            PromptCacheMismatch: it is of another model, another precision or other settings.
        """
        loaded = self._engine.load_caches(Path(path))
        saved, own = loaded.values["settings"], _described(self.settings)
        for name in sorted({*saved, *own}):
            if saved.get(name) != own.get(name):
                raise PromptCacheMismatch(
                    f"the cache {path} was kept with {name} {saved.get(name)!s:.40}, here it is {own.get(name)!s:.40}; "
                    "take the same settings, or begin the conversation anew"
                )
        own_tensors = {name[4:]: each for name, each in loaded.tensors.items() if name.startswith("own.")}
        try:
            self._restored(own_tensors, loaded.values["own"], list(loaded.states))
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise CorruptedFile(f"the cache {path} contradicts itself; begin the conversation anew") from error
        for number, cache in self.caches.items():
            if str(number) not in loaded.states:  # of an adapter that is not loaded
                continue
            tensors, numbers, key = loaded.states[str(number)]
            cache.restore(tensors, numbers)
            cache.key = key
        others = {name: each for name, each in loaded.tensors.items() if not name.startswith("own.")}
        return others, loaded.values["values"]


class SingleCache(ConversationCache):
    """One cache, whatever is asked.

    Args:
        policy: what stays.
        engine: makes the cache and computes in it.
    """

    def __init__(self, policy: CachePolicy, engine: CacheMaker) -> None:
        super().__init__(policy, engine)
        self.caches = {0: engine.bounded_cache(policy)}

    def cache_for(self, num_tokens: int, utterances: Sequence[Utterance], question: str) -> BoundedCache:
        """See `ConversationCache.cache_for`."""
        return self.caches[0]

    def _saved(self) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
        return {}, {}

    def _restored(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any], names: Sequence[str]) -> None:
        self.caches = {0: self._engine.bounded_cache(self.settings)}


def _described(settings: Any) -> dict[str, Any]:
    """Settings by their names; of an object, such as an encoder, its kind."""
    found: dict[str, Any] = {"kind": type(settings).__name__}
    for each in fields(settings):
        value = getattr(settings, each.name)
        if isinstance(value, tuple):
            value = list(value)
        found[each.name] = value if isinstance(value, int | float | str | list | None) else type(value).__name__
    return found
