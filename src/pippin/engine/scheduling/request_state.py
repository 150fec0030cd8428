"""The state of a request while it waits and runs, of the continuations that it scores, and its stream of events.

Notable here:
- caller and engine share a queue of events and one flag: a caller that stops reading, or is garbage-collected, ends
  the request without waiting for it, and a slow caller delays no other request
- a continuation is a separate sequence that begins with its parent's blocks and states; it exists only while it is
  computed
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Final

from torch import Tensor

from pippin.engine.cache.prefix_tree import CacheKey, PrefixNode, Row
from pippin.engine.experts.prompt_experts import ExpertChoice
from pippin.engine.kv_eviction.bounded_cache import BoundedCache
from pippin.engine.model_runner import BLOCK_SIZE, GIVEN_BACK, ModelInput
from pippin.engine.output_processor import OutputProcessor
from pippin.engine.prompt_extras import PromptExtras
from pippin.engine.scheduling.continuation_scores import Scores
from pippin.engine.speculation.drafts import Draft
from pippin.nn.lora import Adapter

END: Final = object()
"""Marks the end of a stream of events."""


def blocks_for(tokens: int) -> int:
    """Number of blocks that hold this many tokens.

    >>> blocks_for(0), blocks_for(16), blocks_for(17)
    (0, 1, 2)
    """
    return -(-tokens // BLOCK_SIZE)


class SequenceState:
    """A sequence of tokens, of which the cache holds a prefix.

    Args:
        token_ids: all tokens so far.
        adapter: the LoRA adapter that they are computed with; None for the base model.
        rank: order of priority and arrival; the smallest runs first and is preempted last.
        extras: what its prompt has beside tokens; None for nothing.

    Attributes:
        num_computed_tokens: tokens whose keys and values are in the cache.
        keys: what each token is known by in the prefix tree, drafts and penalties: its id, or a negative number where
            its embedding was given.
        tables: its blocks in each group of layers, in order; they hold ``num_computed_tokens`` tokens at least.
        first_rows: for groups with a sliding window, the first row that was not given back.
        states: states of recurrent layers after the ``num_computed_tokens`` tokens; see `ModelInput`.
    """

    def __init__(
        self,
        token_ids: list[int],
        adapter: Adapter | None,
        rank: tuple[int, int, int],
        extras: PromptExtras | None = None,
    ) -> None:
        self.token_ids, self.adapter, self.rank = token_ids, adapter, rank
        self.extras = extras
        self.keys = token_ids if extras is None else extras.keys(token_ids)
        self.num_computed_tokens = 0
        self.tables: list[list[int]] = [[]]
        self.first_rows: dict[int, int] = {}
        self.states: dict[int, Tensor] = {}

    @property
    def block_table(self) -> list[int]:
        """Its blocks in the first group of layers."""
        return self.tables[0]

    @property
    def num_blocks(self) -> int:
        """Blocks that it holds."""
        return sum(len(table) - table.count(GIVEN_BACK) for table in self.tables)

    @property
    def spans(self) -> Sequence[tuple[int, int]]:
        """Spans of tokens that see each other, each with its first token and the one behind it."""
        return () if self.extras is None else self.extras.spans

    def row(self, index: int) -> Row:
        """The blocks of 16 tokens in all groups."""
        return tuple(table[index] for table in self.tables)

    def rows(self) -> list[Row]:
        """All of its blocks."""
        return list(zip(*self.tables, strict=True))

    def rotate_as_long(self, original: int) -> None:
        """Give a sequence that has outgrown the trained context of LongRoPE the positions of long ones.

        None of its tokens may be computed.
        """
        extras = PromptExtras(len(self.token_ids)) if self.extras is None else self.extras
        self.extras = extras.at_long_positions(original)
        self.keys = self.extras.keys(self.token_ids)

    @property
    def has_own_positions(self) -> bool:
        """Whether positions are other than 0, 1, 2, ..."""
        return self.extras is not None and self.extras.positions is not None

    def append(self, token_id: int) -> None:
        """Add a token of the answer."""
        self.token_ids.append(token_id)
        if self.keys is not self.token_ids:
            self.keys.append(token_id)

    @property
    def num_pending_tokens(self) -> int:
        """Tokens that are not computed yet."""
        return len(self.token_ids) - self.num_computed_tokens


class RequestState(SequenceState):
    """A request that waits or runs; ``token_ids`` are its prompt and its answer so far.

    Args:
        prompt: token ids.
        adapter: the LoRA adapter to compute it with; None for the base model.
        output: samples the tokens of the answer.
        scores: the continuations to score instead of an answer. Without either the prompt is only prefilled.
        owner: owner of the request; see `Request`.
        priority: -10 to 10.
        max_draft_tokens: longest draft of speculative decoding.
        extras: what its prompt has beside tokens; None for nothing.

    Attributes:
        num_shared_blocks: blocks at the beginning of the table that are also in the prefix tree; ``node`` is the last
            of them.
        decoding: whether the whole prompt is computed.
        branches: continuations that are being computed.
        last_snapshot: the node of the prefix tree with the newest states of the answer.
        never_ran: whether it has not been admitted yet.
        cache: the bounded cache that it is kept in; None for blocks of its own.
        choice: the experts that its prompt chooses; None where it chooses none.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        adapter: Adapter | None,
        *,
        output: OutputProcessor | None = None,
        scores: Scores | None = None,
        owner: str = "",
        priority: int = 0,
        max_draft_tokens: int = 0,
        extras: PromptExtras | None = None,
    ) -> None:
        super().__init__(list(prompt), adapter, (-priority, 0, 0), extras)
        self.key = CacheKey(owner, adapter, variant="" if extras is None else extras.variant)
        self.output, self.scores, self.priority, self.max_draft_tokens = output, scores, priority, max_draft_tokens
        self.events: SimpleQueue[Any] = SimpleQueue()
        self.cancelled: Callable[[], bool] = bool
        self.closed = False
        self.start_time = time.perf_counter()
        self.never_ran, self.decoding = True, False
        self.num_shared_blocks = 0
        self.node: PrefixNode | None = None
        self.last_snapshot: PrefixNode | None = None
        self.branches: list[ContinuationState] = []
        self.cache: BoundedCache | None = None
        self.choice: ExpertChoice | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks that it holds."""
        return super().num_blocks if self.cache is None else len(self.cache.blocks)

    @property
    def wants_logits(self) -> bool:
        """Whether the logits after the last token are needed."""
        return self.output is not None or (self.scores is not None and not self.scores.has_prompt_logits)

    @property
    def length(self) -> int:
        """Number of its tokens, with those of the longest continuation."""
        return len(self.token_ids) + (0 if self.scores is None else max(map(len, self.scores.continuations)))

    def set_arrival(self, number: int) -> None:
        """Set its position in the order of arrival."""
        self.rank = (-self.priority, number, 0)


class ContinuationState(SequenceState):
    """A continuation that is being scored: its parent's prompt, and all of its own tokens but the last.

    Args:
        parent: the request, whose prompt is computed.
        index: index of the continuation among those of the request.
        continuation: its token ids, at least two.
    """

    def __init__(self, parent: RequestState, index: int, continuation: Sequence[int]) -> None:
        super().__init__(
            [*parent.token_ids, *continuation[:-1]], parent.adapter, (*parent.rank[:2], 1 + index), parent.extras
        )
        self.parent, self.index = parent, index


@dataclass
class ScheduledChunk:
    """The part of a sequence that a pass computes: its next ``num_tokens`` tokens, and a draft after the last of them;
    or tokens of the probe of its bounded cache."""

    sequence: SequenceState
    num_tokens: int
    draft: Draft | None = None
    probe: Sequence[int] = ()

    @property
    def size(self) -> int:
        """Tokens that the pass computes for it."""
        return self.num_tokens + len(self.probe) + (0 if self.draft is None else len(self.draft.tokens))

    def model_input(self) -> ModelInput:
        """The chunk as the input of a runner."""
        sequence = self.sequence
        if isinstance(sequence, RequestState) and sequence.cache is not None:
            return self._bounded_input(sequence, sequence.cache)
        model_input = ModelInput(
            sequence.token_ids[sequence.num_computed_tokens : sequence.num_computed_tokens + self.num_tokens],
            sequence.num_computed_tokens,
            sequence.block_table,
            (),
            sequence.adapter,
        )
        model_input.states = sequence.states
        if len(sequence.tables) > 1:
            model_input.other_tables = tuple(sequence.tables[1:])
        if isinstance(sequence, ContinuationState):
            model_input.outputs = range(self.num_tokens)
        elif (
            self.num_tokens == sequence.num_pending_tokens
            and isinstance(sequence, RequestState)
            and sequence.wants_logits
        ):
            model_input.outputs = (self.num_tokens - 1,)
        if self.draft is not None:
            model_input.outputs = range(self.num_tokens - 1, self.num_tokens + len(self.draft.tokens))
            model_input.token_ids = [*model_input.token_ids, *self.draft.tokens]
            model_input.resume, model_input.residual = self.draft.resume, self.draft.residual
        if sequence.extras is not None:
            sequence.extras.fill(model_input)
        if isinstance(sequence, RequestState) and sequence.choice is not None:
            model_input.experts = sequence.choice.mask_at(sequence.num_computed_tokens)
        return model_input

    def _bounded_input(self, request: RequestState, cache: BoundedCache) -> ModelInput:
        """The chunk of a request in a bounded cache."""
        start = request.num_computed_tokens
        ids = self.probe or request.token_ids[start : start + self.num_tokens]
        last = not self.probe and self.num_tokens == request.num_pending_tokens and request.wants_logits
        outputs = (len(ids) - 1,) if last else ()
        made = ModelInput(ids, cache.num_slots, (), outputs, request.adapter)
        made.heads, made.capture = cache.tables(), cache.capture()
        made.other_tables = tuple(request.tables[1:])
        return made


class EventStream:
    """The events of a request, for one consumer; waiting for an event can be interrupted."""

    def __init__(self, request: RequestState) -> None:
        self._request = request
        self._over = False

    def __iter__(self) -> EventStream:
        return self

    def __next__(self) -> Any:
        if self._over:
            raise StopIteration
        event = self._request.events.get()
        if event is END or isinstance(event, Exception):
            self._over = True
            raise event if isinstance(event, Exception) else StopIteration
        return event

    def close(self) -> None:
        """End the request within one step; there are no more events."""
        self._over = self._request.closed = True

    def __del__(self) -> None:
        self._request.closed = True
