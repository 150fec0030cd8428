"""Who is computed next, and where: places, blocks, and the token budget of each pass.

Notable here:
- a pass has a budget of tokens: first one for each answer that is being written (with its draft), then prompts, by
  priority and the shortest first, but a quarter always for the oldest, so that nobody starves
- requests get a place by priority, then in the order in which they came; a higher priority displaces a lower one
- when blocks run out, the lowest priority makes room, then the youngest: its blocks go to the prefix tree, where it
  finds again what nobody else needed meanwhile
- every full block goes to the prefix tree as soon as it is computed, so that requests which come together with one
  beginning compute it once: while one of them reads a block, those who need the same one wait for it
- nothing here knows about threads, logits or models: plans go out, and what was computed comes back
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Final

from pippin.engine.blocks import BlockPool
from pippin.engine.radix import Key, PrefixTree
from pippin.engine.runner import BLOCK
from pippin.engine.scores import ROWS
from pippin.engine.sequences import Branch, Job, Line, Part, blocks_for
from pippin.engine.speculation.drafts import Draft

_rank: Final = attrgetter("rank")


class Scheduler:
    """Requests, waiting and active, and the blocks of those that are active. Used by one thread.

    Args:
        slots: requests that are active at the same time.
        chunk: tokens of prompts in one pass while nobody is writing; a quarter of it while somebody is.
        blocks: size of the pool.
        copy: copies one block over another.
        reuse: whether what was computed is kept for later requests.

    Attributes:
        waiting: requests without a place, the next one first.
        active: those with one.
        preempted, prompt_tokens, cached_tokens, prefix_hits: see `EngineStats`.
    """

    def __init__(
        self, slots: int, chunk: int, blocks: int, copy: Callable[[int, int], None], *, reuse: bool = True
    ) -> None:
        self.slots, self.chunk, self.reuse = slots, chunk, reuse
        self._copy = copy
        self.waiting: list[Job] = []
        self.active: list[Job] = []
        self.preempted = self.prompt_tokens = self.cached_tokens = self.prefix_hits = 0
        self.pool = BlockPool(blocks)
        self.tree = PrefixTree(self.pool)

    def add(self, job: Job) -> None:
        """Take a request in; it fits the pool if it is alone."""
        insort(self.waiting, job, key=_rank)

    def remove(self, job: Job, *, keep: bool) -> None:
        """A request ends; what was computed of it stays for later ones if ``keep``."""
        if job in self.active:
            self.active.remove(job)
            self._release(job, keep=keep)
        elif job in self.waiting:
            self.waiting.remove(job)

    def reset(self) -> list[Job]:
        """Forget all contents and who was active; return those."""
        gone, self.active = self.active, []
        self.pool = BlockPool(self.pool.count)
        self.tree = PrefixTree(self.pool)
        for job in gone:
            self._forget(job)
        return gone

    def forget(self) -> None:
        """Give up all that is kept for later requests."""
        while self.pool.idle:
            self.tree.evict()

    # --- before a pass --------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Give places to those who wait and blocks to those who write; fork what is to be scored."""
        if self.waiting:
            self._admit()
        order = sorted(self.active, key=_rank) if len(self.active) > 1 else self.active.copy()
        for job in order:
            if job.writing:
                self._grow(job)
            elif job.scores is not None and not job.pending:
                self._fork(job)
        for job in order:
            if job.draft_room and job.writing and job.writer is not None:
                self._grow_for_draft(job, min(job.draft_room, job.writer.limit - job.writer.count - 1))

    def plan(self, drafts: Mapping[Job, Draft]) -> list[Part]:
        """What the next pass computes.

        Args:
            drafts: what is to be computed behind the last tokens of those who write.
        """
        parts = []
        reading: list[Line] = []
        spent = 0
        for job in self.active:
            if job.writing:
                count = min(job.pending, self.chunk)
                draft = drafts.get(job)
                parts.append(Part(job, count, draft))
                spent += count + (0 if draft is None else len(draft.tokens))
            else:
                reading += job.branches or ([job] if job.pending else ())
        if reading:
            budget = self.chunk // 4 if parts else self.chunk
            parts += self._share_out(reading, max(budget - spent, budget // 4, 1))
        return parts

    def _admit(self) -> None:
        """Places, by rank; nobody overtakes."""
        while self.waiting:
            job = self.waiting[0]
            if len(self.active) < self.slots and self._enter(job):
                del self.waiting[0]
                self.active.append(job)
            elif not self._displace(job):
                return

    def _enter(self, job: Job) -> bool:
        """Give a request its blocks: those that the tree holds of it, and new ones for the rest."""
        match = self.tree.match(job.key, job.ids, len(job.ids) - 1) if self.reuse else None
        found = [] if match is None else match.blocks
        need = blocks_for(len(job.ids)) - len(found)
        # each answer on its way may soon need one block more; without this the new one would soon be displaced
        spare = sum(other.writing for other in self.active)
        for block in found:
            self.pool.hold(block)
        part = match.part if match is not None and match.tokens else None
        if part is not None:
            self.pool.hold(part)
            if need + spare > self.pool.available:  # the block to be copied from may be the very one that is missing
                self.pool.drop(part)
                part = None
        if need + spare > self.pool.available:
            self.pool.drop_all(found)
            return False
        job.table = found + self._fresh(need)
        job.held, job.shared = len(found) * BLOCK, len(found)
        job.node = match.node if match is not None and found else None
        if match is not None and part is not None:
            self._copy(part, job.table[len(found)])
            self.pool.drop(part)
            job.held += match.tokens
        if job.first:
            self.prompt_tokens += len(job.ids)
            self.prefix_hits += job.held > 0
            self._count_cached(job, job.held)
        return True

    def _displace(self, job: Job) -> bool:
        """Let a lower priority make room, if that can help."""
        lower = [other for other in self.active if other.priority < job.priority]
        if not lower:
            return False
        room = self.pool.available + sum(len(line.table) for other in lower for line in (other, *other.branches))
        if room < blocks_for(len(job.ids)):
            return False
        self._preempt(max(lower, key=_rank))
        return True

    def _grow(self, job: Job) -> None:
        """Blocks for all tokens of an answer so far, or back into the queue."""
        missing = blocks_for(len(job.ids)) - len(job.table)
        if missing <= 0 or job not in self.active:
            return
        if self._make_room(job, missing):
            job.table += self._fresh(missing)
        else:
            self._preempt(job)

    def _grow_for_draft(self, job: Job, tokens: int) -> None:
        """Blocks for so many guesses if there are any left; nobody makes room for a guess."""
        missing = blocks_for(len(job.ids) + tokens) - len(job.table)
        if 0 < missing <= self.pool.available:
            job.table += self._fresh(missing)

    def _fork(self, job: Job) -> None:
        """Begin branches for continuations, as many as one pass takes."""
        scores = job.scores
        if scores is None or job not in self.active:
            return
        rows, whole = sum(branch.pending for branch in job.branches), len(job.ids) // BLOCK
        while scores.todo and rows < ROWS:
            index = scores.todo[0]
            branch = Branch(job, index, scores.continuations[index])
            missing = blocks_for(len(branch.ids)) - whole
            # one branch is enough to go on with: only the first of them takes room from others
            if self.pool.available < missing and (job.branches or not self._make_room(job, missing)):
                return
            scores.todo.popleft()
            for block in job.table[:whole]:
                self.pool.hold(block)
            branch.table = job.table[:whole] + self._fresh(missing)
            branch.held, branch.states = len(job.ids), job.states.copy()
            job.branches.append(branch)
            rows += branch.pending
            if len(job.ids) % BLOCK:
                self._copy(job.table[whole], branch.table[whole])

    def _make_room(self, line: Line, blocks: int) -> bool:
        """Let those of lower rank make room; False if that is not enough."""
        while self.pool.available < blocks:
            last = max((each for job in self.active for each in (job, *job.branches)), key=_rank)
            if last.rank <= line.rank:
                return False
            if isinstance(last, Branch):
                self.drop_branch(last)
                assert last.parent.scores is not None
                last.parent.scores.todo.appendleft(last.index)
            elif isinstance(last, Job):
                self._preempt(last)
        return True

    def _fresh(self, count: int) -> list[int]:
        """So many blocks; they are available."""
        while self.pool.free < count:
            self.tree.evict()
        return [self.pool.take() for _ in range(count)]

    def _preempt(self, job: Job) -> None:
        """Back into the queue; it will go on where it was, from its prompt and what it wrote."""
        self.active.remove(job)
        self._release(job, keep=True)
        self.preempted += 1
        insort(self.waiting, job, key=_rank)

    def _share_out(self, reading: Sequence[Line], budget: int) -> Iterator[Part]:
        """Divide a budget of tokens among prompts and branches."""
        order = sorted(reading, key=lambda line: (line.rank[0], line.pending, line.rank))
        oldest = min(reading, key=lambda line: line.rank[1:])
        saved = max(1, budget // 4) if len(order) > 1 else 0  # for the oldest, until its turn
        rows = ROWS
        claimed: set[tuple[Key, int, tuple[int, ...]]] = set()
        for line in order:
            if line is oldest:
                saved = 0
            claim = None
            if isinstance(line, Job) and self.reuse:
                claim = self._claim(line)
                if claim in claimed:
                    continue
            count = min(line.pending, budget - saved)
            if isinstance(line, Branch):
                count = min(count, rows)
                rows -= count
            if count > 0:
                budget -= count
                if claim is not None:
                    claimed.add(claim)
                yield Part(line, count)

    def _claim(self, job: Job) -> tuple[Key, int, tuple[int, ...]] | None:
        """The next block that this prompt needs, after those that others have computed meanwhile."""
        while job.held == job.shared * BLOCK and job.pending > BLOCK:
            node = job.node or self.tree.root(job.key)
            tokens = tuple(job.ids[job.held : job.held + BLOCK])
            there = self.tree.follow(node, tokens)
            if there is None:
                return job.key, node.block, tokens
            self._use(job, job.shared, there.block)
            job.node, job.shared, job.held = there, job.shared + 1, job.held + BLOCK
            if job.first:
                self._count_cached(job, BLOCK)
        return None

    def _count_cached(self, job: Job, tokens: int) -> None:
        self.cached_tokens += tokens
        if job.writer is not None:
            job.writer.cached += tokens

    # --- after a pass ---------------------------------------------------------------------------------------------

    def computed(self, line: Line, tokens: int) -> None:
        """So many more of a sequence's tokens are in the cache; full blocks are shared from now on."""
        line.held += tokens
        if isinstance(line, Job) and self.reuse:
            self._publish(line)

    def drop_branch(self, branch: Branch) -> None:
        """A branch is complete, or has to begin again later."""
        branch.parent.branches.remove(branch)
        self.pool.drop_all(branch.table)

    def restore(self, key: Key, ids: Sequence[int], fill: Callable[[int, int], None]) -> None:
        """Put a sequence into the prefix tree that was computed earlier, as far as blocks can be had.

        Args:
            key: whose it is, and what it was computed with.
            ids: its tokens.
            fill: called with the number of a block of the sequence, and the block to be filled with it.
        """
        node, path = self.tree.root(key), list[int]()
        try:
            for index in range(blocks_for(len(ids))):
                tokens = tuple(ids[index * BLOCK : (index + 1) * BLOCK])
                there = self.tree.follow(node, tokens)
                if there is not None:
                    self.pool.hold(there.block)
                    path.append(there.block)
                    node = there
                    continue
                if not self.pool.available:
                    return
                path += self._fresh(1)
                fill(index, path[-1])
                node = self.tree.add(node, tokens, path[-1])
        finally:
            self.pool.drop_all(path)

    def _publish(self, job: Job) -> None:
        """Give the tree the full blocks that it does not know yet; use its own where it has them already."""
        while (job.shared + 1) * BLOCK <= job.held:
            at = job.shared * BLOCK
            block = job.table[job.shared]
            node = self.tree.add(job.node or self.tree.root(job.key), tuple(job.ids[at : at + BLOCK]), block)
            if node.block != block:
                self._use(job, job.shared, node.block)
            job.node, job.shared = node, job.shared + 1

    def _use(self, job: Job, index: int, block: int) -> None:
        """Put another block into a table."""
        self.pool.hold(block)
        self.pool.drop(job.table[index])
        job.table[index] = block

    def _release(self, job: Job, *, keep: bool) -> None:
        """Give up all blocks of a request."""
        for branch in job.branches.copy():
            self.drop_branch(branch)
            assert job.scores is not None
            job.scores.todo.appendleft(branch.index)
        if keep and self.reuse:
            self._publish(job)
            at = job.shared * BLOCK
            if job.held > at:
                self.tree.add(job.node or self.tree.root(job.key), tuple(job.ids[at : job.held]), job.table[job.shared])
        self.pool.drop_all(job.table)
        self._forget(job)

    def _forget(self, job: Job) -> None:
        job.table, job.held, job.shared, job.node, job.states = [], 0, 0, None, {}
        job.branches = []
        job.first = job.writing = False
