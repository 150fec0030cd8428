"""A runner without arithmetic: logits are a hash of the tokens that a sequence sees, read back from the blocks.

So a wrong table, a block that was not copied, or one that somebody else has overwritten gives wrong answers; and what
the right answer is can be told without any engine.
"""

import zlib
from array import array

import torch

from pippin.core.errors import InvalidArgument
from pippin.engine.model_runner import BLOCK_SIZE
from pippin.engine.output_processor import OutputProcessor
from pippin.engine.request import Finished

VOCAB = 260


def mark_of(adapter):
    """What tells the tokens of one adapter from those of another."""
    return 0 if adapter is None else zlib.crc32(adapter.name.encode())


HORIZON = None
"""How many tokens a model whose layers all have windows sees; None for all."""


def logits_after(tokens, adapter=None):
    """What follows a list of tokens: two random rows, turned by a hash."""
    seen = zlib.crc32(array("q", tokens[-HORIZON:] if HORIZON else tokens).tobytes(), mark_of(adapter))
    return ROWS[0].roll(seen % VOCAB) + ROWS[1].roll((seen >> 12) % VOCAB)


ROWS = 3 * torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(0))


def right_answer(model, request, size=2048):
    """Tokens and last event, from the law of the fake runner and no engine."""
    output, ids, answer = OutputProcessor(model, request, size), list(request.prompt), []
    adapter = model.adapter(request.adapter)
    while output.finish_reason is None:
        tokens = output.process(logits_after(ids, adapter)[None].clone())
        answer += tokens
        ids += [token.id for token in tokens]
    return answer, output.finished(output.finish_reason)


def right_score(prompt, continuation, adapter=None):
    ids, total = list(prompt), 0.0
    for id in continuation:
        total += float(logits_after(ids, adapter).log_softmax(-1)[id])
        ids.append(id)
    return total


class FakeRunner:
    """See `pippin.engine.model_runner.Runner`; it remembers the largest pass and can be told to fail."""

    block_bytes, kv_cache_dtype, invariant, heads_in_block = BLOCK_SIZE * 16, "float32", True, 0

    def __init__(self, model, blocks, kv_cache_dtype="auto", groups=None):
        self.windows = [None] if groups is None else [model.cache_layout.group_window(layers) for layers in groups]
        self.recurrent = bool(model.cache_layout.recurrent_layers)
        self.blocks, self.memory = blocks, array("q", [-1]) * (2 * BLOCK_SIZE * blocks)
        self.passes, self.broken, self.may_write, self.copies = [], None, lambda block: True, 0
        self.given_back = []

    def forward(self, inputs):
        if self.broken is not None:
            raise self.broken
        self.passes.append([(len(model_input.token_ids), model_input.num_computed_tokens) for model_input in inputs])
        for model_input in inputs:
            assert len(model_input.token_ids) > 0
            end = model_input.num_computed_tokens + len(model_input.token_ids)
            for table in model_input.tables:
                assert len(table) * BLOCK_SIZE >= end
                for place, id in enumerate(model_input.token_ids, model_input.num_computed_tokens):
                    block = table[place // BLOCK_SIZE]
                    assert block >= 0
                    assert self.may_write(block)
                    at = 2 * (block * BLOCK_SIZE + place % BLOCK_SIZE)
                    self.memory[at], self.memory[at + 1] = id, mark_of(model_input.adapter)
        return [self.rows(model_input) for model_input in inputs]

    def give_back(self, blocks):
        self.given_back += blocks
        for block in blocks:  # what they held is lost
            self.memory[2 * block * BLOCK_SIZE : 2 * (block + 1) * BLOCK_SIZE] = array("q", [-1]) * (2 * BLOCK_SIZE)

    def rows(self, model_input):
        start, ids, known = model_input.num_computed_tokens, array("q"), 0
        end = start + len(model_input.token_ids)
        for group, (table, window) in enumerate(zip(model_input.tables, self.windows, strict=True)):
            first = 0 if window is None else max(0, start - window + 1)
            seen = array("q")
            for block in table:
                seen += array("q", [-2]) * (2 * BLOCK_SIZE) if block < 0 else self.block(block)
            tokens = seen[: 2 * end : 2]
            assert set(seen[2 * first + 1 : 2 * end : 2]) == {mark_of(model_input.adapter)}
            if group:
                assert ids[max(first, known) :] == tokens[max(first, known) :]
            if not group or first < known:
                ids, known = tokens, first
        if self.recurrent:
            before = model_input.states.get(0, torch.empty(0))
            assert before.tolist() == ids[:start].tolist()
            model_input.states[0] = torch.tensor(ids[:end].tolist())
        rows = [logits_after(ids[: start + output + 1], model_input.adapter) for output in model_input.outputs]
        return torch.stack(rows) if rows else torch.empty(0, VOCAB)

    def block(self, block):
        return self.memory[2 * BLOCK_SIZE * block : 2 * BLOCK_SIZE * (block + 1)]

    def copy(self, source, target):
        assert source != target
        self.copies += 1
        self.memory[2 * BLOCK_SIZE * target : 2 * BLOCK_SIZE * (target + 1)] = self.block(source)

    def read(self, blocks):
        return torch.stack([torch.frombuffer(bytearray(self.block(block)), dtype=torch.uint8) for block in blocks])

    def write(self, blocks, data):
        for block, row in zip(blocks, data, strict=True):
            values = array("q", row.numpy().tobytes())
            self.memory[2 * BLOCK_SIZE * block : 2 * BLOCK_SIZE * (block + 1)] = values

    def read_head(self, head_blocks, tokens):
        raise InvalidArgument("a fake has no heads")

    def write_head(self, head_blocks, data):
        raise InvalidArgument("a fake has no heads")

    def close(self):
        self.blocks = 0

    @staticmethod
    def block_bytes_of(model, kv_cache_dtype="auto"):
        return FakeRunner.block_bytes


def drive(engine):
    """Keep an engine from starting its thread; returns a function that does one step."""
    loop = engine._loop
    loop._start = lambda: None

    def step():
        if not loop.requests:
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
    while not stream._request.events.empty():
        found.append(stream._request.events.get())
    return found


def is_last(event):
    return isinstance(event, Finished | Exception)
