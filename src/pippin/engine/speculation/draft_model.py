"""Draft models: a small model drafts for a large one, with a separate runner and cache.

Notable here:
- the draft model's cached tokens are compared with the sequence at every call and truncated at the first difference, so
  that rejected drafts and preemption need no coordination with the scheduler
- a long prompt is prefilled in chunks, one per pass of the target, so that no request waits for a draft
- the cache of ended requests stays until its blocks are needed: the next request of a chat continues from it
- vocabularies are compared once; padding of the output layers may differ
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import RLock

import torch
from jaxtyping import Float
from torch import Tensor

from pippin.core.errors import VocabularyMismatch
from pippin.data.text.tokenizer import Tokenizer
from pippin.engine.decoding.sampling import Sampler
from pippin.engine.grammar.constraint import Constraint
from pippin.engine.model_runner import BLOCK_SIZE, ModelInput, Runner
from pippin.engine.runners.select import make_runner
from pippin.engine.speculation.drafts import CachePosition, Draft, sample_draft
from pippin.language.language_model import LanguageModel

POOL_TOKENS = 16_384
"""Capacity of a draft model's cache in tokens, over all requests; at least one whole context."""
MAX_PREFILL_TOKENS = 256
"""Maximum prompt tokens that a draft model computes per pass of the target; until it is done, there are no drafts."""

_compared: weakref.WeakKeyDictionary[Tokenizer, weakref.WeakSet[Tokenizer]] = weakref.WeakKeyDictionary()


def check_vocabulary(model: LanguageModel, draft: LanguageModel) -> None:
    """Check that a draft model has the vocabulary of the target model.

    Raises:
        VocabularyMismatch: an id stands for different tokens.
    """
    ours, theirs = model.tokenizer, draft.tokenizer
    same = _compared.setdefault(ours, weakref.WeakSet())
    if ours is theirs or theirs in same:
        return
    different = ours.first_difference(theirs)
    if different is not None:
        raise VocabularyMismatch(
            f"{draft.name} ({theirs.vocab_size:,} tokens) cannot draft for {model.name} ({ours.vocab_size:,}): token "
            f"{different} is {theirs.token_bytes(different)!r} for the one and {ours.token_bytes(different)!r} for the "
            'other; take a draft model of the same family, or draft="ngram"'
        )
    same.add(theirs)


@dataclass(eq=False)
class DraftState:
    """The part of one sequence that is in the draft model's cache."""

    owner: str
    token_ids: list[int] = field(default_factory=list)
    table: list[int] = field(default_factory=list)
    used: bool = True

    def agree(self, token_ids: Sequence[int], start: int) -> int:
        """Length of the common prefix with ``token_ids``; the first ``start`` tokens are known to be equal."""
        end = min(len(self.token_ids), len(token_ids) - 1)  # the last token is always computed, for its logits
        return next((at for at in range(min(start, end), end) if self.token_ids[at] != token_ids[at]), end)


class DraftPool:
    """The runner of a draft model and the blocks of its cache, allocated to sequences; thread-safe.

    Args:
        model: the draft model.
        tokens: capacity of the cache in tokens, at least one whole context; None for `POOL_TOKENS`.
    """

    def __init__(self, model: LanguageModel, tokens: int | None = None) -> None:
        self.model, self.lock = model, RLock()
        self.blocks = -(-max(tokens or POOL_TOKENS, model.context_size) // BLOCK_SIZE)
        self._free = list(range(self.blocks - 1, -1, -1))
        self._states: list[DraftState] = []  # least recently used first
        self._runner: Runner | None = None

    @property
    def runner(self) -> Runner:
        """The runner, created on first use."""
        if self._runner is None:
            self._runner = make_runner(self.model, self.blocks, "auto")
            # not at exit, when an engine's thread may still use it
            weakref.finalize(self, self._runner.close).atexit = False
        return self._runner

    def open(self, owner: str, token_ids: Sequence[int]) -> DraftState:
        """A state for one sequence: the unused one of the same owner with the longest common prefix, or a new one."""
        with self.lock:
            best, state = 0, None
            for one in list(self._states):
                if not one.used and one.owner == owner and (same := one.agree(token_ids, 0)) > best:
                    best, state = same, one
            if state is None:
                state = DraftState(owner)
                self._states.append(state)
            state.used = True
            return state

    def release(self, state: DraftState) -> None:
        """Mark a state as unused; its tokens stay cached until the blocks are needed."""
        with self.lock:
            state.used = False
            self._states = [one for one in self._states if one.used or one.table]

    def reserve(self, state: DraftState, tokens: int) -> bool:
        """Allocate the blocks for ``tokens`` tokens, evicting the least recently used states; False if too few."""
        need = -(-tokens // BLOCK_SIZE) - len(state.table)
        others = [one for one in self._states if one is not state]
        self._states = [*others, state]
        for other in sorted(others, key=lambda one: one.used):  # stable: ended ones first, the oldest first
            if len(self._free) >= need:
                break
            self._free += reversed(other.table)
            other.table, other.token_ids = [], []
        if len(self._free) < need:
            return False
        state.table += [self._free.pop() for _ in range(need)]
        return True


class ModelDrafter:
    """Drafts of a draft model for one request.

    Args:
        pool: the pool of the draft model.
        target: the target model.
        owner: owner of the request; cached tokens are reused only for requests of the same owner.
        generator: random generator of the draft.
        skip_forced: append tokens that the constraint forces without sampling.
    """

    def __init__(
        self, pool: DraftPool, target: LanguageModel, owner: str, generator: torch.Generator, *, skip_forced: bool
    ) -> None:
        self._pool, self._owner, self._generator, self._skip_forced = pool, owner, generator, skip_forced
        self._ends, self._vocab_size = target.tokenizer.eos_ids, target.vocab_size
        self._state: DraftState | None = None
        self._agreed = 0  # tokens of the sequence that the cache was last seen to agree with

    def draft(
        self,
        token_ids: Sequence[int],
        max_tokens: int,
        sampler: Sampler,
        constraint: Constraint | None,
        position: CachePosition | None,
    ) -> Draft | None:
        """Draft at most ``max_tokens`` tokens after ``token_ids``; None while a long prompt is being prefilled."""
        model = self._pool.model
        longest = model.cache_layout.original_max_position_embeddings or model.context_size
        max_tokens = min(max_tokens, longest - len(token_ids))
        if max_tokens < 1:
            return None
        with self._pool.lock:
            if self._state is None:
                self._state = self._pool.open(self._owner, token_ids)
                weakref.finalize(self, self._pool.release, self._state)
            state = self._state
            if not self._pool.reserve(state, len(token_ids) + max_tokens):
                return None
            del state.token_ids[state.agree(token_ids, self._agreed) :]
            pending = token_ids[len(state.token_ids) :]
            self._agreed = len(token_ids)
            if len(pending) > MAX_PREFILL_TOKENS:
                self._forward(pending[:MAX_PREFILL_TOKENS], with_logits=False)
                self._agreed = len(state.token_ids)
                return None
            return sample_draft(
                self._forward(pending),
                self._forward,
                max_tokens,
                sampler,
                constraint,
                generator=self._generator,
                ends=self._ends,
                skip_forced=self._skip_forced,
            )

    def _forward(self, token_ids: Sequence[int], with_logits: bool = True) -> Float[Tensor, vocab]:
        """Logits after the last of these tokens, as wide as the target's."""
        state = self._state
        assert state is not None
        outputs = [len(token_ids) - 1] if with_logits else []
        (logits,) = self._pool.runner.forward([ModelInput(token_ids, len(state.token_ids), state.table, outputs)])
        state.token_ids += token_ids
        if not with_logits:
            return logits.new_empty(0)
        row = logits[0, : self._vocab_size]
        missing = self._vocab_size - len(row)
        return torch.nn.functional.pad(row, (0, missing), value=-torch.inf) if missing else row
