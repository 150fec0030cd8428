"""Continuous batching: which requests run, which blocks they hold, and how many tokens each computes in a pass.

Notable here:
- a pass has a token budget: first one token for each decoding request (with its draft), then chunks of prompts, by
  priority and the shortest first; a quarter is reserved for the oldest prompt, so that none starves
- requests are admitted by priority, then in the order of arrival; a higher priority preempts a lower one
- when blocks run out, the request of the lowest priority is preempted, and of equal ones the newest: its blocks go to
  the prefix tree, from which it reuses those that were not evicted meanwhile
- every full block goes to the prefix tree as soon as it is computed, so that requests with a common prefix that arrive
  at the same time compute it once: while one of them computes a block, those that need the same block wait
- each group of layers has a block table; a group with a sliding window gets blocks as its tokens are computed, and
  gives those behind the window back
- chunks of a model with recurrent states end at block boundaries, where snapshots of the states go to the prefix tree
- a span of tokens that see each other is computed in one pass, even if that exceeds the budget
- it has no threads, logits or models: its inputs are requests and numbers of computed tokens, its outputs chunks
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Final

from torch import Tensor

from pippin.engine.cache.block_pool import BlockPool
from pippin.engine.cache.prefix_tree import CacheKey, PrefixTree, Row
from pippin.engine.kv_eviction.bounded_cache import BoundedCache
from pippin.engine.model_runner import BLOCK_SIZE, GIVEN_BACK
from pippin.engine.scheduling.block_tables import BlockTables
from pippin.engine.scheduling.continuation_scores import MAX_ROWS
from pippin.engine.scheduling.request_state import (
    ContinuationState,
    RequestState,
    ScheduledChunk,
    SequenceState,
    blocks_for,
)
from pippin.engine.speculation.drafts import Draft

_rank: Final = attrgetter("rank")

# The key of a sequence, the node that it has reached, and its next tokens.
_Claim = tuple[CacheKey, Row, tuple[int, ...]]


class Scheduler:
    """Waiting and running requests, and the blocks of those that run. Used by one thread.

    Args:
        max_num_seqs: requests that run at the same time.
        max_num_batched_tokens: prompt tokens in one pass; a quarter of it while a request is decoding.
        num_blocks: blocks in the pool.
        copy_block: copies one block over another.
        enable_prefix_caching: whether computed blocks are cached for later requests.
        windows: the sliding window of each group of layers; None for one that sees all.
        max_snapshots: snapshots of recurrent states in the prefix tree; 0 for a model without states.
        max_scored_rows: tokens of continuations in one pass.
        original_max_position_embeddings: length beyond which a sequence is rotated otherwise (LongRoPE) and therefore
            computed anew; None for none.

    Attributes:
        waiting: requests that are not admitted yet, the next one first.
        running: requests that hold blocks.
        num_preempted, prompt_tokens, cached_tokens, prefix_hits: see `EngineStats`.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        num_blocks: int,
        copy_block: Callable[[int, int], None],
        *,
        enable_prefix_caching: bool = True,
        windows: Sequence[int | None] = (None,),
        max_snapshots: int = 0,
        max_scored_rows: int = MAX_ROWS,
        original_max_position_embeddings: int | None = None,
    ) -> None:
        self.max_num_seqs, self.max_num_batched_tokens, self.enable_prefix_caching = (
            max_num_seqs,
            max_num_batched_tokens,
            enable_prefix_caching,
        )
        self.windows, self._max_snapshots, self._max_scored_rows = tuple(windows), max_snapshots, max_scored_rows
        self.original_max_position_embeddings = original_max_position_embeddings
        self.waiting: list[RequestState] = []
        self.running: list[RequestState] = []
        self.num_preempted = self.prompt_tokens = self.cached_tokens = self.prefix_hits = 0
        self.blocks = BlockTables(num_blocks, windows, max_num_batched_tokens, max_snapshots, copy_block)

    @property
    def pool(self) -> BlockPool:
        """All blocks."""
        return self.blocks.pool

    @property
    def tree(self) -> PrefixTree:
        """The prefix cache."""
        return self.blocks.tree

    def add(self, request: RequestState) -> None:
        """Queue a request, which must not need more blocks than the pool has."""
        self._lengthen(request)
        insort(self.waiting, request, key=_rank)

    def remove(self, request: RequestState, *, keep: bool) -> None:
        """End a request; with ``keep``, its blocks stay cached for later ones."""
        if request in self.running:
            self.running.remove(request)
            self._release(request, keep=keep)
        elif request in self.waiting:
            self.waiting.remove(request)

    def reset(self) -> list[RequestState]:
        """Release all blocks and all running requests; return those requests."""
        stopped, self.running = self.running, []
        for request in stopped:
            if request.cache is not None:
                request.cache.detach()
        self.blocks.reset(self.pool.num_blocks)
        for request in stopped:
            self._forget(request)
        return stopped

    def clear_prefix_cache(self) -> None:
        """Evict every block that no running request holds."""
        while self.pool.idle:
            self.tree.evict()

    # --- before a pass --------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Admit waiting requests, give blocks to those that decode, and fork continuations that are to be scored."""
        if self.original_max_position_embeddings is not None:
            for request in self.running.copy():
                self._lengthen(request)
        if self.waiting:
            self._admit()
        order = sorted(self.running, key=_rank) if len(self.running) > 1 else self.running.copy()
        for request in order:
            if request.decoding:
                self._grow_block_table(request)
            elif request.scores is not None and not request.num_pending_tokens:
                self._fork(request)
        for request in order:
            if request.max_draft_tokens and request.decoding and request.output is not None:
                self._grow_for_draft(
                    request, min(request.max_draft_tokens, request.output.max_tokens - request.output.num_tokens - 1)
                )

    def _lengthen(self, request: RequestState) -> None:
        """Give a request that has outgrown the trained context the positions of long ones, and compute it anew."""
        original = self.original_max_position_embeddings
        if original is None or request.length <= original or request.has_own_positions:
            return
        if request in self.running:
            self._requeue(request)
        request.rotate_as_long(original)

    def plan(self, drafts: Mapping[RequestState, Draft]) -> list[ScheduledChunk]:
        """The chunks that the next pass computes.

        Args:
            drafts: draft tokens of decoding requests, to be verified after their last token.
        """
        chunks = []
        prefilling: list[SequenceState] = []
        spent = 0
        for request in self.running:
            if request.decoding:
                count = _with_one_set(request, min(request.num_pending_tokens, self.max_num_batched_tokens))
                if request.cache is not None:
                    chunks.append(_bounded_chunk(request, request.cache, count, self.max_num_batched_tokens // 4))
                    spent += chunks[-1].size
                    continue
                draft = drafts.get(request)
                chunks.append(ScheduledChunk(request, count, draft))
                spent += chunks[-1].size
            else:
                prefilling += request.branches or ([request] if request.num_pending_tokens else ())
        while prefilling:
            budget = self.max_num_batched_tokens // 4 if chunks else self.max_num_batched_tokens
            chunks += self._schedule_prefill(prefilling, max(budget - spent, budget // 4, 1))
            if chunks or len(prefilling) < 2:
                break
            # all wait for blocks behind windows: the last one gives its own to the others
            prefilling.remove(last := max(prefilling, key=_rank))
            self._preempt_sequence(last)
        return chunks

    def _admit(self) -> None:
        """Admit waiting requests by rank; none overtakes another."""
        while self.waiting:
            request = self.waiting[0]
            if len(self.running) < self.max_num_seqs and self._allocate(request):
                del self.waiting[0]
                self.running.append(request)
            elif not self._preempt_lower_priority(request):
                return

    def _allocate(self, request: RequestState) -> bool:
        """Fill a block table: cached blocks of the prefix, and new ones for the rest; False if there are too few."""
        # each decoding request may soon need one more block; without a reserve the new one would be preempted at once
        spare = len(self.windows) * sum(other.decoding for other in self.running)
        if request.cache is not None:
            return self._allocate_bounded(request, request.cache, spare)
        match = self.tree.match(request.key, request.keys, len(request.keys) - 1) if self._publishes(request) else None
        found = [] if match is None else match.rows
        rows = blocks_for(len(request.token_ids)) - len(found)
        need = self.blocks.needed(rows)
        self.blocks.retain(found)
        part = match.partial_row if match is not None and match.num_partial_tokens else None
        if part is not None:
            self.blocks.retain([part])
            # the block to be copied from may be the one that is missing
            if need + spare > self.pool.num_available:
                self.blocks.release([part])
                part = None
        if need + spare > self.pool.num_available:
            self.blocks.release(found)
            return False
        request.tables = [list(table) for table in zip(*found, strict=True)] if found else [[] for _ in self.windows]
        self.blocks.append(request, rows, 0 if part is None else 1)
        request.num_computed_tokens, request.num_shared_blocks = len(found) * BLOCK_SIZE, len(found)
        request.node = match.node if match is not None and found else None
        if request.node is not None and request.node.states is not None:
            request.states = dict(request.node.states)
        if match is not None and part is not None:
            self.blocks.copy(part, request.row(len(found)))
            self.blocks.release([part])
            request.num_computed_tokens += match.num_partial_tokens
        self.blocks.give_back(request)
        self._count_prompt(request)
        return True

    def _allocate_bounded(self, request: RequestState, cache: BoundedCache, spare: int) -> bool:
        """Give a bounded cache all of its blocks; False if there are too few."""
        if cache.num_blocks + spare > self.pool.num_available:
            return False
        cache.attach(self.blocks.take(cache.num_blocks))
        request.tables, request.num_computed_tokens = [[] for _ in self.windows], cache.num_tokens
        self._count_prompt(request)
        return True

    def _count_prompt(self, request: RequestState) -> None:
        if request.never_ran:
            self.prompt_tokens += len(request.token_ids)
            self.prefix_hits += request.num_computed_tokens > 0
            self._count_cached(request, request.num_computed_tokens)

    def _needed(self, request: RequestState) -> int:
        """Blocks that a request takes on entry, if nothing of it is cached."""
        return (
            self.blocks.needed(blocks_for(len(request.token_ids)))
            if request.cache is None
            else request.cache.num_blocks
        )

    def _preempt_lower_priority(self, request: RequestState) -> bool:
        """Preempt a request of lower priority, if that can free enough blocks."""
        lower = [other for other in self.running if other.priority < request.priority]
        if not lower:
            return False
        room = self.pool.num_available + sum(
            sequence.num_blocks for other in lower for sequence in (other, *other.branches)
        )
        if room < self._needed(request):
            return False
        self._preempt(max(lower, key=_rank))
        return True

    def _grow_block_table(self, request: RequestState) -> None:
        """Allocate blocks for all tokens so far, or preempt the request; a bounded cache has all that it needs."""
        if request.cache is not None:
            return
        missing = blocks_for(len(request.token_ids)) - len(request.block_table)
        if missing <= 0:
            return
        if self._free_blocks_for(request, missing * len(self.windows)):
            self.blocks.append(request, missing, missing)
        else:
            self._preempt(request)

    def _grow_for_draft(self, request: RequestState, tokens: int) -> None:
        """Allocate blocks for ``tokens`` draft tokens if any are available; no request is preempted for a draft."""
        missing = blocks_for(len(request.token_ids) + tokens) - len(request.block_table)
        if 0 < missing * len(self.windows) <= self.pool.num_available:
            self.blocks.append(request, missing, missing)

    def _fork(self, request: RequestState) -> None:
        """Fork continuations, as many as one pass computes."""
        scores = request.scores
        assert scores is not None
        rows, whole = (
            sum(branch.num_pending_tokens for branch in request.branches),
            len(request.token_ids) // BLOCK_SIZE,
        )
        while scores.waiting and rows < self._max_scored_rows:
            index = scores.waiting[0]
            branch = ContinuationState(request, index, scores.continuations[index])
            rows_missing = blocks_for(len(branch.token_ids)) - whole
            missing = self.blocks.needed(rows_missing)
            # one continuation is enough to make progress, so only the first may preempt others
            if self.pool.num_available < missing and (request.branches or not self._free_blocks_for(request, missing)):
                return
            scores.waiting.popleft()
            self.blocks.retain([request.row(index) for index in range(whole)])
            branch.tables = [table[:whole] for table in request.tables]
            self.blocks.append(branch, rows_missing, 1)
            branch.num_computed_tokens, branch.states = len(request.token_ids), request.states.copy()
            request.branches.append(branch)
            rows += branch.num_pending_tokens
            if len(request.token_ids) % BLOCK_SIZE:
                self.blocks.copy(request.row(whole), branch.row(whole))

    def _free_blocks_for(self, sequence: SequenceState, blocks: int) -> bool:
        """Preempt sequences of lower rank until ``blocks`` are available; False if that is not enough."""
        while self.pool.num_available < blocks:
            last = max((each for request in self.running for each in (request, *request.branches)), key=_rank)
            if last.rank <= sequence.rank:
                return False
            self._preempt_sequence(last)
        return True

    def _preempt_sequence(self, sequence: SequenceState) -> None:
        """Put a request back into the queue, or a continuation back to those of its request."""
        if isinstance(sequence, ContinuationState):
            self.drop_branch(sequence)
            assert sequence.parent.scores is not None
            sequence.parent.scores.waiting.appendleft(sequence.index)
        elif isinstance(sequence, RequestState):
            self._preempt(sequence)

    def _preempt(self, request: RequestState) -> None:
        """Put a running request back into the queue for want of blocks."""
        self._requeue(request)
        self.num_preempted += 1

    def _requeue(self, request: RequestState) -> None:
        """Put a running request back into the queue; it will be recomputed from its prompt and its answer so far."""
        self.running.remove(request)
        self._release(request, keep=True)
        insort(self.waiting, request, key=_rank)

    def _schedule_prefill(self, prefilling: Sequence[SequenceState], budget: int) -> Iterator[ScheduledChunk]:
        """Divide a budget of tokens among prompts and continuations."""
        order = sorted(prefilling, key=lambda sequence: (sequence.rank[0], sequence.num_pending_tokens, sequence.rank))
        oldest = min(prefilling, key=lambda sequence: sequence.rank[1:])
        reserved = max(1, budget // 4)  # for the oldest, until it is scheduled
        rows = self._max_scored_rows
        claimed: set[_Claim] = set()
        for sequence in order:
            if sequence is oldest:
                reserved = 0
            claim = None
            if isinstance(sequence, RequestState) and self._publishes(sequence):
                claim = self._claim_next_block(sequence)
                if claim in claimed:
                    continue
            if isinstance(sequence, RequestState) and sequence.cache is not None:
                if budget > reserved:
                    most = budget - reserved
                    chunk = _bounded_chunk(sequence, sequence.cache, min(sequence.num_pending_tokens, most), most)
                    budget -= chunk.size
                    yield chunk
                continue
            count = self._chunk(sequence, min(sequence.num_pending_tokens, budget - reserved))
            if isinstance(sequence, ContinuationState):
                count = min(count, rows)
                rows -= count
            if count > 0 and self.blocks.cover(sequence, count):
                budget -= count
                if claim is not None:
                    claimed.add(claim)
                yield ScheduledChunk(sequence, count)

    def _chunk(self, sequence: SequenceState, count: int) -> int:
        """The number of tokens of a chunk of about ``count``, so that it ends where it may."""
        if count <= 0:
            return count
        start, end = sequence.num_computed_tokens, sequence.num_computed_tokens + count
        for first, last in sequence.spans:
            if first < end < last:  # not within a span whose tokens see each other
                end = first if first > start else last
        if isinstance(sequence, RequestState):
            end = start + _with_one_set(sequence, end - start)
        if self._max_snapshots and isinstance(sequence, RequestState):
            boundary = end // BLOCK_SIZE * BLOCK_SIZE
            end = boundary if boundary > start else end
        return end - start

    def _claim_next_block(self, request: RequestState) -> _Claim | None:
        """The next full block of a prompt that is not cached; blocks that others computed meanwhile are reused."""
        while (
            request.num_computed_tokens == request.num_shared_blocks * BLOCK_SIZE
            and request.num_pending_tokens > BLOCK_SIZE
        ):
            node = request.node or self.tree.root(request.key)
            tokens = tuple(request.keys[request.num_computed_tokens : request.num_computed_tokens + BLOCK_SIZE])
            child = self.tree.find_child(node, tokens)
            if child is None:
                return request.key, tuple(node.blocks), tokens
            self._replace_row(request, request.num_shared_blocks, tuple(child.blocks))
            if child.states is not None:
                request.states = dict(child.states)
            request.node, request.num_shared_blocks, request.num_computed_tokens = (
                child,
                request.num_shared_blocks + 1,
                request.num_computed_tokens + BLOCK_SIZE,
            )
            if request.never_ran:
                self._count_cached(request, BLOCK_SIZE)
        return None

    def _count_cached(self, request: RequestState, tokens: int) -> None:
        self.cached_tokens += tokens
        if request.output is not None:
            request.output.num_cached_tokens += tokens

    # --- after a pass ---------------------------------------------------------------------------------------------

    def mark_computed(self, sequence: SequenceState, tokens: int) -> None:
        """Record that ``tokens`` more of a sequence are in the cache; full blocks go to the prefix tree."""
        sequence.num_computed_tokens += tokens
        if isinstance(sequence, RequestState) and self._publishes(sequence):
            self._publish(sequence)
            if self._max_snapshots:
                self._snapshot(sequence)
        self.blocks.give_back(sequence)

    def drop_branch(self, branch: ContinuationState) -> None:
        """Release a continuation that is complete or has to be recomputed later."""
        branch.parent.branches.remove(branch)
        self.blocks.release(branch.rows())

    def restore(
        self,
        key: CacheKey,
        token_ids: Sequence[int],
        rows: Sequence[Row],
        states: Mapping[int, Mapping[int, Tensor]],
        fill: Callable[[int, int], None],
    ) -> None:
        """Put a sequence that was computed earlier into the prefix tree, as far as there are blocks.

        Args:
            key: its owner and adapter.
            token_ids: its tokens.
            rows: the old numbers of its blocks; `GIVEN_BACK` where there is none.
            states: by row, the states of recurrent layers after its tokens.
            fill: called with the old number of a block, and the block of the pool to write it to.
        """
        node, path = self.tree.root(key), list[Row]()
        try:
            for index, old in enumerate(rows):
                tokens = tuple(token_ids[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE])
                child = self.tree.find_child(node, tokens)
                if child is not None:
                    path.append(tuple(child.blocks))
                    self.blocks.retain(path[-1:])
                    node = child
                    continue
                if self.pool.num_available < len(old) - old.count(GIVEN_BACK):
                    return
                new = tuple(GIVEN_BACK if block == GIVEN_BACK else self.blocks.take(1)[0] for block in old)
                path.append(new)
                for source, target in zip(old, new, strict=True):
                    if source != GIVEN_BACK:
                        fill(source, target)
                node = self.tree.add(node, tokens, new)
                if index in states and node.states is None:
                    self.tree.snapshot(node, states[index])
        finally:
            self.blocks.release(path)

    def _publishes(self, request: RequestState) -> bool:
        """Whether others may go on from the tokens of a request."""
        return self.enable_prefix_caching and request.cache is None and request.choice is None

    def _publish(self, request: RequestState) -> None:
        """Add full blocks to the prefix tree; if it has an equal one already, that one replaces the request's."""
        while (request.num_shared_blocks + 1) * BLOCK_SIZE <= request.num_computed_tokens:
            at = request.num_shared_blocks * BLOCK_SIZE
            row = request.row(request.num_shared_blocks)
            node = self.tree.add(
                request.node or self.tree.root(request.key), tuple(request.keys[at : at + BLOCK_SIZE]), row
            )
            if tuple(node.blocks) != row:  # what was given back stays so
                kept = tuple(
                    GIVEN_BACK if own == GIVEN_BACK else block for own, block in zip(row, node.blocks, strict=True)
                )
                self._replace_row(request, request.num_shared_blocks, kept)
            request.node, request.num_shared_blocks = node, request.num_shared_blocks + 1

    def _snapshot(self, request: RequestState) -> None:
        """Store the recurrent states at a block boundary; while decoding, only the newest of a request."""
        node = request.node
        if node is None or request.num_computed_tokens != request.num_shared_blocks * BLOCK_SIZE or not request.states:
            return
        if request.decoding and request.last_snapshot is not None:
            self.tree.drop_snapshot(request.last_snapshot)
        if node.states is None:
            self.tree.snapshot(node, dict(request.states))
            request.last_snapshot = node if request.decoding else None

    def _replace_row(self, request: RequestState, index: int, row: Row) -> None:
        """Replace the blocks of one row, except where the new row has none."""
        for table, block in zip(request.tables, row, strict=True):
            if block != GIVEN_BACK and block != table[index]:
                self.pool.retain(block)
                if table[index] != GIVEN_BACK:
                    self.pool.release(table[index])
                table[index] = block

    def _release(self, request: RequestState, *, keep: bool) -> None:
        """Release all blocks of a request."""
        for branch in request.branches.copy():
            self.drop_branch(branch)
            assert request.scores is not None
            request.scores.waiting.appendleft(branch.index)
        if request.cache is not None:
            self.pool.release_all(request.cache.detach())
        elif keep and self._publishes(request):
            self._publish(request)
            at = request.num_shared_blocks * BLOCK_SIZE
            if request.num_computed_tokens > at:
                self.tree.add(
                    request.node or self.tree.root(request.key),
                    tuple(request.keys[at : request.num_computed_tokens]),
                    request.row(request.num_shared_blocks),
                )
        self.blocks.release(request.rows())
        self._forget(request)

    def _forget(self, request: RequestState) -> None:
        request.tables, request.first_rows, request.branches = [[]], {}, []
        request.num_computed_tokens, request.num_shared_blocks = 0, 0
        request.node, request.last_snapshot, request.states = None, None, {}
        request.never_ran = request.decoding = False


def _with_one_set(request: RequestState, tokens: int) -> int:
    """How many of the next tokens are served by the same set of experts."""
    end = None if request.choice is None else request.choice.end_of_set(request.num_computed_tokens)
    return tokens if end is None else min(tokens, end - request.num_computed_tokens)


def _bounded_chunk(request: RequestState, cache: BoundedCache, tokens: int, most: int) -> ScheduledChunk:
    """The next tokens of a request in a bounded cache, or of its probe, which goes first."""
    if probe := cache.probe(max(1, most)):
        return ScheduledChunk(request, 0, probe=probe)
    return ScheduledChunk(request, cache.chunk(tokens))
