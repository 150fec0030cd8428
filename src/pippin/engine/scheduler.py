"""Continuous batching: which requests run, which blocks they hold, and how many tokens each computes in a pass.

Notable here:
- a pass has a token budget: first one token for each decoding request (with its draft), then chunks of prompts, by
  priority and the shortest first; a quarter is reserved for the oldest prompt, so that none starves
- requests are admitted by priority, then in the order of arrival; a higher priority preempts a lower one
- when blocks run out, the request of the lowest priority is preempted, and of equal ones the newest: its blocks go to
  the prefix tree, from which it reuses those that were not evicted meanwhile
- every full block goes to the prefix tree as soon as it is computed, so that requests with a common prefix that arrive
  at the same time compute it once: while one of them computes a block, those that need the same block wait
- it has no threads, logits or models: its inputs are requests and numbers of computed tokens, its outputs chunks
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Final

from pippin.engine.cache.block_pool import BlockPool
from pippin.engine.cache.prefix_tree import CacheKey, PrefixTree
from pippin.engine.continuation_scores import MAX_ROWS
from pippin.engine.model_runner import BLOCK_SIZE
from pippin.engine.request_state import ContinuationState, RequestState, ScheduledChunk, SequenceState, blocks_for
from pippin.engine.speculation.drafts import Draft

_rank: Final = attrgetter("rank")


class Scheduler:
    """Waiting and running requests, and the blocks of those that run. Used by one thread.

    Args:
        max_num_seqs: requests that run at the same time.
        max_num_batched_tokens: prompt tokens in one pass; a quarter of it while a request is decoding.
        num_blocks: blocks in the pool.
        copy_block: copies one block over another.
        enable_prefix_caching: whether computed blocks are cached for later requests.

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
    ) -> None:
        self.max_num_seqs, self.max_num_batched_tokens, self.enable_prefix_caching = (
            max_num_seqs,
            max_num_batched_tokens,
            enable_prefix_caching,
        )
        self._copy_block = copy_block
        self.waiting: list[RequestState] = []
        self.running: list[RequestState] = []
        self.num_preempted = self.prompt_tokens = self.cached_tokens = self.prefix_hits = 0
        self.pool = BlockPool(num_blocks)
        self.tree = PrefixTree(self.pool)

    def add(self, request: RequestState) -> None:
        """Queue a request, which must not need more blocks than the pool has."""
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
        self.pool = BlockPool(self.pool.num_blocks)
        self.tree = PrefixTree(self.pool)
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
                count = min(request.num_pending_tokens, self.max_num_batched_tokens)
                draft = drafts.get(request)
                chunks.append(ScheduledChunk(request, count, draft))
                spent += count + (0 if draft is None else len(draft.tokens))
            else:
                prefilling += request.branches or ([request] if request.num_pending_tokens else ())
        if prefilling:
            budget = self.max_num_batched_tokens // 4 if chunks else self.max_num_batched_tokens
            chunks += self._schedule_prefill(prefilling, max(budget - spent, budget // 4, 1))
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
        match = (
            self.tree.match(request.key, request.token_ids, len(request.token_ids) - 1)
            if self.enable_prefix_caching
            else None
        )
        found = [] if match is None else match.blocks
        need = blocks_for(len(request.token_ids)) - len(found)
        # each decoding request may soon need one more block; without a reserve the new one would be preempted at once
        spare = sum(other.decoding for other in self.running)
        for block in found:
            self.pool.retain(block)
        part = match.partial_block if match is not None and match.num_partial_tokens else None
        if part is not None:
            self.pool.retain(part)
            # the block to be copied from may be the one that is missing
            if need + spare > self.pool.num_available:
                self.pool.release(part)
                part = None
        if need + spare > self.pool.num_available:
            self.pool.release_all(found)
            return False
        request.block_table = found + self._new_blocks(need)
        request.num_computed_tokens, request.num_shared_blocks = len(found) * BLOCK_SIZE, len(found)
        request.node = match.node if match is not None and found else None
        if match is not None and part is not None:
            self._copy_block(part, request.block_table[len(found)])
            self.pool.release(part)
            request.num_computed_tokens += match.num_partial_tokens
        if request.never_ran:
            self.prompt_tokens += len(request.token_ids)
            self.prefix_hits += request.num_computed_tokens > 0
            self._count_cached(request, request.num_computed_tokens)
        return True

    def _preempt_lower_priority(self, request: RequestState) -> bool:
        """Preempt a request of lower priority, if that can free enough blocks."""
        lower = [other for other in self.running if other.priority < request.priority]
        if not lower:
            return False
        room = self.pool.num_available + sum(
            len(sequence.block_table) for other in lower for sequence in (other, *other.branches)
        )
        if room < blocks_for(len(request.token_ids)):
            return False
        self._preempt(max(lower, key=_rank))
        return True

    def _grow_block_table(self, request: RequestState) -> None:
        """Allocate blocks for all tokens so far, or preempt the request."""
        missing = blocks_for(len(request.token_ids)) - len(request.block_table)
        if missing <= 0:
            return
        if self._free_blocks_for(request, missing):
            request.block_table += self._new_blocks(missing)
        else:
            self._preempt(request)

    def _grow_for_draft(self, request: RequestState, tokens: int) -> None:
        """Allocate blocks for ``tokens`` draft tokens if any are available; no request is preempted for a draft."""
        missing = blocks_for(len(request.token_ids) + tokens) - len(request.block_table)
        if 0 < missing <= self.pool.num_available:
            request.block_table += self._new_blocks(missing)

    def _fork(self, request: RequestState) -> None:
        """Fork continuations, as many as one pass computes."""
        scores = request.scores
        assert scores is not None
        rows, whole = (
            sum(branch.num_pending_tokens for branch in request.branches),
            len(request.token_ids) // BLOCK_SIZE,
        )
        while scores.waiting and rows < MAX_ROWS:
            index = scores.waiting[0]
            branch = ContinuationState(request, index, scores.continuations[index])
            missing = blocks_for(len(branch.token_ids)) - whole
            # one continuation is enough to make progress, so only the first may preempt others
            if self.pool.num_available < missing and (request.branches or not self._free_blocks_for(request, missing)):
                return
            scores.waiting.popleft()
            for block in request.block_table[:whole]:
                self.pool.retain(block)
            branch.block_table = request.block_table[:whole] + self._new_blocks(missing)
            branch.num_computed_tokens, branch.states = len(request.token_ids), request.states.copy()
            request.branches.append(branch)
            rows += branch.num_pending_tokens
            if len(request.token_ids) % BLOCK_SIZE:
                self._copy_block(request.block_table[whole], branch.block_table[whole])

    def _free_blocks_for(self, sequence: SequenceState, blocks: int) -> bool:
        """Preempt sequences of lower rank until ``blocks`` are available; False if that is not enough."""
        while self.pool.num_available < blocks:
            last = max((each for request in self.running for each in (request, *request.branches)), key=_rank)
            if last.rank <= sequence.rank:
                return False
            if isinstance(last, ContinuationState):
                self.drop_branch(last)
                assert last.parent.scores is not None
                last.parent.scores.waiting.appendleft(last.index)
            elif isinstance(last, RequestState):
                self._preempt(last)
        return True

    def _new_blocks(self, count: int) -> list[int]:
        """Take ``count`` blocks, which must be available, evicting cached ones where needed."""
        while self.pool.num_free < count:
            self.tree.evict()
        return [self.pool.allocate() for _ in range(count)]

    def _preempt(self, request: RequestState) -> None:
        """Put a running request back into the queue; it will be recomputed from its prompt and its answer so far."""
        self.running.remove(request)
        self._release(request, keep=True)
        self.num_preempted += 1
        insort(self.waiting, request, key=_rank)

    def _schedule_prefill(self, prefilling: Sequence[SequenceState], budget: int) -> Iterator[ScheduledChunk]:
        """Divide a budget of tokens among prompts and continuations."""
        order = sorted(prefilling, key=lambda sequence: (sequence.rank[0], sequence.num_pending_tokens, sequence.rank))
        oldest = min(prefilling, key=lambda sequence: sequence.rank[1:])
        reserved = max(1, budget // 4)  # for the oldest, until it is scheduled
        rows = MAX_ROWS
        claimed: set[tuple[CacheKey, int, tuple[int, ...]]] = set()
        for sequence in order:
            if sequence is oldest:
                reserved = 0
            claim = None
            if isinstance(sequence, RequestState) and self.enable_prefix_caching:
                claim = self._claim_next_block(sequence)
                if claim in claimed:
                    continue
            count = min(sequence.num_pending_tokens, budget - reserved)
            if isinstance(sequence, ContinuationState):
                count = min(count, rows)
                rows -= count
            if count > 0:
                budget -= count
                if claim is not None:
                    claimed.add(claim)
                yield ScheduledChunk(sequence, count)

    def _claim_next_block(self, request: RequestState) -> tuple[CacheKey, int, tuple[int, ...]] | None:
        """The next full block of a prompt that is not cached; blocks that others computed meanwhile are reused."""
        while (
            request.num_computed_tokens == request.num_shared_blocks * BLOCK_SIZE
            and request.num_pending_tokens > BLOCK_SIZE
        ):
            node = request.node or self.tree.root(request.key)
            tokens = tuple(request.token_ids[request.num_computed_tokens : request.num_computed_tokens + BLOCK_SIZE])
            child = self.tree.find_child(node, tokens)
            if child is None:
                return request.key, node.block, tokens
            self._replace_block(request, request.num_shared_blocks, child.block)
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
        if isinstance(sequence, RequestState) and self.enable_prefix_caching:
            self._publish(sequence)

    def drop_branch(self, branch: ContinuationState) -> None:
        """Release a continuation that is complete or has to be recomputed later."""
        branch.parent.branches.remove(branch)
        self.pool.release_all(branch.block_table)

    def restore(self, key: CacheKey, token_ids: Sequence[int], fill: Callable[[int, int], None]) -> None:
        """Put a sequence that was computed earlier into the prefix tree, as far as there are blocks.

        Args:
            key: its owner and adapter.
            token_ids: its tokens.
            fill: called with the index of a block of the sequence, and the block of the pool to write it to.
        """
        node, path = self.tree.root(key), list[int]()
        try:
            for index in range(blocks_for(len(token_ids))):
                tokens = tuple(token_ids[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE])
                child = self.tree.find_child(node, tokens)
                if child is not None:
                    self.pool.retain(child.block)
                    path.append(child.block)
                    node = child
                    continue
                if not self.pool.num_available:
                    return
                path += self._new_blocks(1)
                fill(index, path[-1])
                node = self.tree.add(node, tokens, path[-1])
        finally:
            self.pool.release_all(path)

    def _publish(self, request: RequestState) -> None:
        """Add full blocks to the prefix tree; if it has an equal one already, that one replaces the request's."""
        while (request.num_shared_blocks + 1) * BLOCK_SIZE <= request.num_computed_tokens:
            at = request.num_shared_blocks * BLOCK_SIZE
            block = request.block_table[request.num_shared_blocks]
            node = self.tree.add(
                request.node or self.tree.root(request.key), tuple(request.token_ids[at : at + BLOCK_SIZE]), block
            )
            if node.block != block:
                self._replace_block(request, request.num_shared_blocks, node.block)
            request.node, request.num_shared_blocks = node, request.num_shared_blocks + 1

    def _replace_block(self, request: RequestState, index: int, block: int) -> None:
        """Replace one block of a block table."""
        self.pool.retain(block)
        self.pool.release(request.block_table[index])
        request.block_table[index] = block

    def _release(self, request: RequestState, *, keep: bool) -> None:
        """Release all blocks of a request."""
        for branch in request.branches.copy():
            self.drop_branch(branch)
            assert request.scores is not None
            request.scores.waiting.appendleft(branch.index)
        if keep and self.enable_prefix_caching:
            self._publish(request)
            at = request.num_shared_blocks * BLOCK_SIZE
            if request.num_computed_tokens > at:
                self.tree.add(
                    request.node or self.tree.root(request.key),
                    tuple(request.token_ids[at : request.num_computed_tokens]),
                    request.block_table[request.num_shared_blocks],
                )
        self.pool.release_all(request.block_table)
        self._forget(request)

    def _forget(self, request: RequestState) -> None:
        request.block_table, request.num_computed_tokens, request.num_shared_blocks, request.node, request.states = (
            [],
            0,
            0,
            None,
            {},
        )
        request.branches = []
        request.never_ran = request.decoding = False
