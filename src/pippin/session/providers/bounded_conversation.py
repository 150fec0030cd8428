"""A conversation of a local model in a bounded cache: tokens are appended to those that were computed.

Notable here:
- what the model wrote stays as it wrote it, thoughts included: to render the past anew, as templates do, would change
  tokens whose keys may be gone, and all would have to be computed again
- a new turn is rendered behind a short conversation in place of the real one, so it costs the same at any length
- a transcript that does not go on from the last one, as after `Session.reset`, is rendered from its beginning
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from pippin.core.errors import InvalidArgument, PromptCacheMismatch
from pippin.engine.decoding.token_ids import common_prefix
from pippin.engine.engine import Engine
from pippin.engine.kv_eviction import CachePolicy, ConversationCache, EpiCache, EpisodicCache, SingleCache, Utterance
from pippin.engine.kv_eviction.bounded_cache import BoundedCache
from pippin.engine.request import Finished, Token
from pippin.language.language_model import LanguageModel
from pippin.session.transcript import Answer, Instructions, Prompt, Reasoning, ToolCalls, Transcript

Render = Callable[[Transcript, bool], list[int]]
"""Tokens of a transcript; the flag says whether its last prompt gets the text about the answer's type."""

BEFORE = Prompt("a")
"""Stands for the conversation so far where a new turn is rendered."""


@dataclass
class _Known:
    """The tokens of a request and of what the model wrote then."""

    entries: tuple[Any, ...]
    token_ids: list[int]
    text: str = ""


class BoundedConversation:
    """The tokens of one conversation, and its caches.

    Args:
        model: what answers.
        engine: computes.
        settings: a policy, or those of EpiCache.
    """

    def __init__(self, model: LanguageModel, engine: Engine, settings: CachePolicy | EpiCache) -> None:
        self._model, self._engine, self.settings = model, engine, settings
        self.caches: ConversationCache | None = None
        self._before: _Known | None = None  # the last request but one, where the last one is undone
        self._last: _Known | None = None

    def known_entries(self, entries: tuple[Any, ...]) -> int:
        """How many of a conversation's entries were read in this one, from which it goes on; 0 for another one."""
        known = [each for each in (self._last, self._before) if each is not None]
        counts = [len(each.entries) for each in known if entries[: len(each.entries)] == each.entries]
        return max(counts, default=0)

    def begin(self, transcript: Transcript, render: Render) -> tuple[list[int], BoundedCache]:
        """The tokens of a request, and the cache to compute them in.

        Args:
            transcript: the conversation.
            render: renders one.

        Raises:
            InvalidArgument: the budget does not hold the instructions.
            UnsupportedModel, NotEnoughMemory: as `pippin.engine.engine.Engine.bounded_cache`.
        """
        entries = tuple(transcript)
        ids = self._continued(entries, render)
        if ids is None:
            self._before = None
            ids = render(transcript, True)
        if self.caches is None:
            self.caches = self._open(entries, render)
        said = {Prompt: "user", Answer: "assistant"}
        *earlier, question = [Utterance(said[type(entry)], entry.text) for entry in entries if type(entry) in said]
        cache = self.caches.cache_for(len(ids), earlier, question.text)
        self._last = _Known(entries, ids)
        cache.idle.wait()  # a request that was cancelled ends with the engine's next step
        return ids, cache

    def note(self, event: Token | Finished) -> None:
        """Add what the model wrote to what is known."""
        assert self._last is not None
        self._last.text += event.text
        if isinstance(event, Token):
            self._last.token_ids.append(event.id)
        elif event.end_token is not None:
            self._last.token_ids.append(event.end_token)

    def save(self, path: str | Path) -> int:
        """Write tokens and caches to a file; return its bytes.

        Raises:
            InvalidArgument: nothing was said yet.
            DiskFull: the disk has no room for it. InvalidInput: nothing may be written there.
        """
        if self.caches is None or self._last is None:
            raise InvalidArgument("nothing was said yet, so there is no cache to save; ask something first")
        for cache in self.caches.caches.values():
            cache.idle.wait()
        last = self._last
        values = {"entries": len(last.entries), "digest": _digest(last.entries), "text": last.text}
        return self.caches.save(path, tensors={"conversation": torch.tensor(last.token_ids)}, values=values)

    def load(self, path: str | Path, transcript: Transcript, render: Render) -> None:
        """Read what `save` wrote; the conversation must be the one that was saved, or go on from it.

        Raises:
            InvalidInput: the file cannot be read, or there is none.
            CorruptedFile: it is no such file, or is truncated or changed.
            PromptCacheMismatch: it is of another model, other settings or another conversation.
        """
        entries = tuple(transcript)
        caches = self._open(entries, render)
        tensors, values = caches.load(path)
        said = entries[: values["entries"]]
        if _digest(said) != values["digest"]:
            raise PromptCacheMismatch(
                f"the cache {path} is of another conversation; give the session the transcript that was saved with it"
            )
        self.caches, self._before = caches, None
        self._last = _Known(said, tensors["conversation"].tolist(), values["text"])

    def _open(self, entries: Sequence[Any], render: Render) -> ConversationCache:
        """The caches, whose first tokens are the instructions with the tools."""
        first = tuple(entry for entry in entries if isinstance(entry, Instructions))
        one, other = (render(Transcript(entries=(*first, Prompt(end))), False) for end in ("a", "b"))
        protected = max(self.settings.sink_tokens, common_prefix(one, other))
        settings = replace(self.settings, sink_tokens=protected)
        if isinstance(settings, CachePolicy):
            return SingleCache(settings, self._engine)
        return EpisodicCache(settings, self._engine, lambda text: self._as_turn(text, render))

    def _as_turn(self, text: str, render: Render) -> list[int]:
        """The tokens of a text as the next message of the user."""
        turn = self._rendered((Answer("b"), Prompt(text)), render)
        return self._model.tokenizer.encode(text) if turn is None else turn

    def _continued(self, entries: tuple[Any, ...], render: Render) -> list[int] | None:
        """The tokens of the last request with what came since, None if this one does not go on from it."""
        for known in (self._last, self._before):
            if known is None or entries[: len(known.entries)] != known.entries:
                continue
            new = [entry for entry in entries[len(known.entries) :] if not isinstance(entry, Reasoning)]
            if len(new) < 2 or not isinstance(new[0], Answer | ToolCalls):
                continue
            if isinstance(new[0], Answer) and new[0].text.strip() != known.text.strip():
                continue  # a hook has replaced it
            turn = self._rendered(new, render)
            if turn is not None:
                ended = known.token_ids[-1] in self._model.tokenizer.eos_ids
                if known is self._last:
                    self._before = known
                return [*known.token_ids, *turn[ended:]]
        return None

    def _rendered(self, new: Sequence[Any], render: Render) -> list[int] | None:
        """The tokens of new entries from the end token of the model's own entry on; None if they are not found."""
        asked = any(isinstance(entry, Prompt) for entry in new)
        one = render(Transcript(entries=(BEFORE,)), not asked)
        both = render(Transcript(entries=(BEFORE, *new)), True)
        tokenizer = self._model.tokenizer
        at = next((at for at in range(common_prefix(one, both), len(both)) if both[at] in tokenizer.eos_ids), None)
        if at is None:
            return None
        text = tokenizer.decode(both[at:])
        shown = all(entry.text.strip()[:20] in text for entry in new[1:])
        return both[at:] if shown else None


class Conversations:
    """The conversations of a provider whose requests do not say which one they are part of, as those of a server.

    Args:
        make: a new conversation.
        most: conversations that are kept; the one that was not used for the longest time goes first.
    """

    def __init__(self, make: Callable[[], BoundedConversation], most: int) -> None:
        self._make, self._most, self._lock = make, most, Lock()
        self._known: list[tuple[str, BoundedConversation]] = []

    def take(self, owner: str, transcript: Transcript) -> BoundedConversation:
        """The conversation of an owner that a transcript goes on from, or a new one; nobody else gets it meanwhile."""
        entries = tuple(transcript)
        with self._lock:
            counts = [each.known_entries(entries) if of == owner else 0 for of, each in self._known]
            best = max(range(len(counts)), key=counts.__getitem__, default=None)
            if best is not None and counts[best]:
                return self._known.pop(best)[1]
        return self._make()

    def give_back(self, owner: str, conversation: BoundedConversation) -> None:
        """Keep a conversation for the next request."""
        with self._lock:
            self._known.append((owner, conversation))
            del self._known[: -self._most]


def _digest(entries: Sequence[Any]) -> str:
    """SHA-256 of entries, as hexadecimal digits."""
    return hashlib.sha256("\n".join(entry.model_dump_json() for entry in entries).encode()).hexdigest()
