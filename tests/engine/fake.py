"""A runner without arithmetic: logits are a hash of the tokens that a sequence sees, read back from the blocks.

So a wrong table, a block that was not copied, or one that somebody else has overwritten gives wrong answers; and what
the right answer is can be told without any engine.
"""

import zlib
from array import array

import torch

from pippin.engine.request import Finished
from pippin.engine.runner import BLOCK
from pippin.engine.writer import Writer

VOCAB = 260


def mark_of(adapter):
    """What tells the tokens of one adapter from those of another."""
    return 0 if adapter is None else zlib.crc32(adapter.name.encode())


def logits_after(tokens, adapter=None):
    """What follows a list of tokens: two random rows, turned by a hash."""
    seen = zlib.crc32(array("q", tokens).tobytes(), mark_of(adapter))
    return ROWS[0].roll(seen % VOCAB) + ROWS[1].roll((seen >> 12) % VOCAB)


ROWS = 3 * torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(0))


def right_answer(model, request, size=2048):
    """Tokens and last event, from the law of the fake runner and no engine."""
    writer, ids, answer = Writer(model, request, size), list(request.prompt), []
    adapter = model.adapter(request.adapter)
    while writer.reason is None:
        tokens = writer.take(logits_after(ids, adapter)[None].clone())
        answer += tokens
        ids += [token.id for token in tokens]
    return answer, writer.finished(writer.reason)


def right_score(prompt, continuation, adapter=None):
    ids, total = list(prompt), 0.0
    for id in continuation:
        total += float(logits_after(ids, adapter).log_softmax(-1)[id])
        ids.append(id)
    return total


class FakeRunner:
    """See `pippin.engine.runner.Runner`; it remembers the largest pass and can be told to fail."""

    block_bytes, cache_type, invariant = BLOCK * 16, "float32", True

    def __init__(self, model, blocks, cache_type="auto"):
        self.blocks, self.memory = blocks, array("q", [-1]) * (2 * BLOCK * blocks)
        self.passes, self.broken, self.may_write, self.copies = [], None, lambda block: True, 0

    def forward(self, works):
        if self.broken is not None:
            raise self.broken
        self.passes.append([(len(work.ids), work.held) for work in works])
        for work in works:
            assert len(work.ids) > 0
            assert len(work.table) * BLOCK >= work.held + len(work.ids)
            for place, id in enumerate(work.ids, work.held):
                block = work.table[place // BLOCK]
                assert self.may_write(block)
                at = 2 * (block * BLOCK + place % BLOCK)
                self.memory[at], self.memory[at + 1] = id, mark_of(work.adapter)
        return [self.rows(work) for work in works]

    def rows(self, work):
        seen = array("q")
        for block in work.table:
            seen += self.block(block)
        ids, marks = seen[::2], set(seen[1 : 2 * (work.held + len(work.ids)) : 2])
        assert marks == {mark_of(work.adapter)}
        rows = [logits_after(ids[: work.held + output + 1], work.adapter) for output in work.outputs]
        return torch.stack(rows) if rows else torch.empty(0, VOCAB)

    def block(self, block):
        return self.memory[2 * BLOCK * block : 2 * BLOCK * (block + 1)]

    def copy(self, source, target):
        assert source != target
        self.copies += 1
        self.memory[2 * BLOCK * target : 2 * BLOCK * (target + 1)] = self.block(source)

    def read(self, blocks):
        return torch.stack([torch.frombuffer(bytearray(self.block(block)), dtype=torch.uint8) for block in blocks])

    def write(self, blocks, data):
        for block, row in zip(blocks, data, strict=True):
            values = array("q", row.numpy().tobytes())
            self.memory[2 * BLOCK * block : 2 * BLOCK * (block + 1)] = values

    def close(self):
        self.blocks = 0

    @staticmethod
    def block_bytes_of(model, cache_type="auto"):
        return FakeRunner.block_bytes


def drive(engine):
    """Keep an engine from starting its thread; returns a function that does one step."""
    loop = engine._loop
    loop._start = lambda: None

    def step():
        if not loop.jobs:
            return False
        loop._has_work()
        try:
            loop._step()
        except Exception as error:
            loop._fail(error)
        return True

    return step


def events_so_far(stream):
    """What a driven engine has sent and the caller has not taken."""
    found = []
    while not stream._job.events.empty():
        found.append(stream._job.events.get())
    return found


def is_last(event):
    return isinstance(event, Finished | Exception)
