"""A small model that guesses for a large one: its own runner, its own blocks, its own pace.

Notable here:
- what the draft model has computed is compared with the sequence at every call and cut back to where they part; so
  rejected guesses, preemption and several requests need no word between it and the scheduler
- a long prompt is caught up with in parts, a part per pass, so that nobody waits for a draft
- the states of ended requests are kept while there is room: the next turn of a chat begins where the last one ended
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
from pippin.data.tokenizer import Tokenizer
from pippin.engine.constraint import Constraint
from pippin.engine.runner import BLOCK, Runner, Work, make_runner
from pippin.engine.sampling import Sampler
from pippin.engine.speculation.drafts import Draft, Place, continue_freely
from pippin.language.load import LanguageModel

POOL_TOKENS = 16_384
"""Tokens in the cache of a draft model, all requests together; one whole context at least."""
CATCH_UP = 256
"""Tokens that a draft model reads, at most, before a pass of the target without having guessed."""

_compared: weakref.WeakKeyDictionary[Tokenizer, weakref.WeakSet[Tokenizer]] = weakref.WeakKeyDictionary()


def check_vocabulary(model: LanguageModel, draft: LanguageModel) -> None:
    """Raise where a draft's tokens would mean something else to the model.

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
class State:
    """What the draft model's cache holds of one sequence."""

    owner: str
    ids: list[int] = field(default_factory=list)
    table: list[int] = field(default_factory=list)
    used: bool = True

    def agree(self, ids: Sequence[int], start: int) -> int:
        """How many tokens of the cache begin ``ids``; the first ``start`` are known to."""
        end = min(len(self.ids), len(ids) - 1)  # the last token is always computed: its logits are wanted
        return next((at for at in range(min(start, end), end) if self.ids[at] != ids[at]), end)


class DraftPool:
    """The runner of a draft model and the blocks of its cache, lent to sequences. Safe to use from several threads.

    Args:
        model: the draft model.
        tokens: room for so many, one whole context at least; None for `POOL_TOKENS`.
    """

    def __init__(self, model: LanguageModel, tokens: int | None = None) -> None:
        self.model, self.lock = model, RLock()
        self.blocks = -(-max(tokens or POOL_TOKENS, model.context_size) // BLOCK)
        self._free = list(range(self.blocks - 1, -1, -1))
        self._states: list[State] = []  # least recently used first
        self._runner: Runner | None = None

    @property
    def runner(self) -> Runner:
        """Made at the first use."""
        if self._runner is None:
            self._runner = make_runner(self.model, self.blocks, "auto")
            # not when the process ends, where the thread of an engine may still be inside
            weakref.finalize(self, self._runner.close).atexit = False
        return self._runner

    def open(self, owner: str, ids: Sequence[int]) -> State:
        """A state for one sequence: that of an ended one of the same owner which begins most like it, or a new one."""
        with self.lock:
            best, state = 0, None
            for one in list(self._states):
                if not one.used and one.owner == owner and (same := one.agree(ids, 0)) > best:
                    best, state = same, one
            if state is None:
                state = State(owner)
                self._states.append(state)
            state.used = True
            return state

    def release(self, state: State) -> None:
        """Its sequence has ended; what it holds is kept until the room is needed."""
        with self.lock:
            state.used = False
            self._states = [one for one in self._states if one.used or one.table]

    def reserve(self, state: State, tokens: int) -> bool:
        """Give a state the blocks for so many tokens, taking them from those used longest ago; False: too many."""
        need = -(-tokens // BLOCK) - len(state.table)
        others = [one for one in self._states if one is not state]
        self._states = [*others, state]
        for other in sorted(others, key=lambda one: one.used):  # stable: ended ones first, the oldest first
            if len(self._free) >= need:
                break
            self._free += reversed(other.table)
            other.table, other.ids = [], []
        if len(self._free) < need:
            return False
        state.table += [self._free.pop() for _ in range(need)]
        return True


class ModelDrafter:
    """Guesses of a draft model for one request.

    Args:
        pool: of the draft model.
        target: the model that answers.
        owner: whose request it is; what was computed is used again only for requests of one owner.
        generator: random numbers of the draft.
        skip_forced: write what the constraint forces without drawing.
    """

    def __init__(
        self, pool: DraftPool, target: LanguageModel, owner: str, generator: torch.Generator, *, skip_forced: bool
    ) -> None:
        self._pool, self._owner, self._generator, self._skip_forced = pool, owner, generator, skip_forced
        self._ends, self._vocab_size = target.tokenizer.eos_ids, target.config.vocab_size
        self._state: State | None = None
        self._agreed = 0  # tokens of the sequence that the cache was last seen to agree with

    def draft(
        self, ids: Sequence[int], room: int, sampler: Sampler, constraint: Constraint | None, place: Place | None
    ) -> Draft | None:
        """Guess at most ``room`` tokens after ``ids``; None while a long sequence is caught up with."""
        room = min(room, self._pool.model.context_size - len(ids))
        if room < 1:
            return None
        with self._pool.lock:
            if self._state is None:
                self._state = self._pool.open(self._owner, ids)
                weakref.finalize(self, self._pool.release, self._state)
            state = self._state
            if not self._pool.reserve(state, len(ids) + room):
                return None
            del state.ids[state.agree(ids, self._agreed) :]
            pending = ids[len(state.ids) :]
            self._agreed = len(ids)
            if len(pending) > CATCH_UP:
                self._forward(pending[:CATCH_UP], wanted=False)
                self._agreed = len(state.ids)
                return None
            return continue_freely(
                self._forward(pending),
                self._forward,
                room,
                sampler,
                constraint,
                generator=self._generator,
                ends=self._ends,
                skip_forced=self._skip_forced,
            )

    def _forward(self, ids: Sequence[int], wanted: bool = True) -> Float[Tensor, vocab]:
        """Logits after the last of these tokens, as wide as the target's."""
        state = self._state
        assert state is not None
        outputs = [len(ids) - 1] if wanted else []
        (logits,) = self._pool.runner.forward([Work(ids, len(state.ids), state.table, outputs)])
        state.ids += ids
        if not wanted:
            return logits.new_empty(0)
        row = logits[0, : self._vocab_size]
        missing = self._vocab_size - len(row)
        return torch.nn.functional.pad(row, (0, missing), value=-torch.inf) if missing else row
