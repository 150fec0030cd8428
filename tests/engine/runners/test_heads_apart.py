"""Sequences whose heads have lost tokens, each head others, against transformers with a mask for every head."""

import random
from dataclasses import replace

import pytest
import torch

from pippin.core import native
from pippin.core.errors import PippinError
from pippin.engine.head_tables import HeadTables
from pippin.engine.model_runner import Capture, ModelInput
from pippin.engine.runners.native_runner import NativeRunner
from pippin.engine.runners.torch_runner import TorchRunner
from pippin.nn.attention.attention_capture import AttentionCapture

LAYERS, HEADS, KV_HEADS, OLD, NEW, BLOCKS = 3, 4, 2, 70, 9, 16
IDS = torch.randint(260, (OLD + NEW,), generator=torch.Generator().manual_seed(3)).tolist()
KERNELS = pytest.mark.skipif(native.library() is None, reason="the native kernels are not built")
RUNNERS = [pytest.param(NativeRunner, marks=KERNELS), TorchRunner]
CLOSE = {"float32": 2e-5, "bfloat16": 0.05, "int8": 0.05}


@pytest.fixture(scope="module")
def theirs(random_llama):
    return random_llama(LAYERS, 512)


@pytest.fixture
def ours(theirs, as_model):
    return lambda runner, dtype="float32": runner(as_model(theirs, pack=runner is NativeRunner), BLOCKS, dtype)


def tables_of(lengths, spare, seed=0):
    """Head-blocks for heads of these lengths, scattered over the pool, of which block 0 is left out."""
    per = LAYERS * KV_HEADS
    free = list(range(per, BLOCKS * per))
    random.Random(seed).shuffle(free)
    longest = max(-(-(length + spare) // 16) for row in lengths for length in row)
    tables = torch.full((LAYERS, KV_HEADS, longest), -1, dtype=torch.int32)
    for layer, row in enumerate(lengths):
        for head, length in enumerate(row):
            for at in range(-(-(length + spare) // 16)):
                tables[layer, head, at] = free.pop()
    return tables


def filled(runner):
    """The old tokens in a runner, all heads apart and nothing lost; and the logits of the last one."""
    heads = HeadTables(tables_of([[OLD] * KV_HEADS] * LAYERS, NEW), torch.zeros(LAYERS, KV_HEADS, dtype=torch.int32))
    (logits,) = runner.forward([ModelInput(IDS[:50], 0, (), (), heads=heads)])
    assert not len(logits)
    (logits,) = runner.forward([ModelInput(IDS[50:OLD], 50, (), (OLD - 51,), heads=heads)])
    return heads, logits


def lose(runner, heads, kept):
    """Keep some of the old tokens of each head, in new head-blocks."""
    lengths = [[len(each) for each in row] for row in kept]
    # what is kept is read before anything is written: the new blocks may be the old ones
    parts = [
        [runner.read_head(heads.tables[layer, head].tolist(), OLD).at(kept[layer][head]) for head in range(KV_HEADS)]
        for layer in range(LAYERS)
    ]
    tables = tables_of(lengths, NEW, seed=1)
    for layer in range(LAYERS):
        for head in range(KV_HEADS):
            runner.write_head(tables[layer, head].tolist(), parts[layer][head])
    return HeadTables(tables, OLD - torch.tensor(lengths, dtype=torch.int32))


@pytest.fixture
def kept():
    """Of each head which old tokens it keeps: between one and all."""
    chosen, counts = random.Random(2), [[1, 70], [33, 16], [48, 7]]
    return [[torch.tensor(sorted(chosen.sample(range(OLD), count))) for count in row] for row in counts]


def masks_of(kept):
    """Of each layer what every query of every head sees: the old tokens all before them, the new ones what is kept."""
    found = torch.ones(LAYERS, HEADS, OLD + NEW, OLD + NEW, dtype=torch.bool).tril()
    for layer, row in enumerate(kept):
        for head, each in enumerate(row):
            lost = torch.ones(OLD, dtype=torch.bool)
            lost[each] = False
            group = slice(head * HEADS // KV_HEADS, (head + 1) * HEADS // KV_HEADS)
            found[layer, group, OLD:, :OLD] &= ~lost
    return found


def expected(theirs, kept):
    """Logits and attention (layers, heads, queries, keys) of all tokens by transformers."""
    hooks = []
    for layer, mask in zip(theirs.model.layers, masks_of(kept), strict=True):
        bias = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)[None]
        change = lambda module, args, kwargs, bias=bias: (args, {**kwargs, "attention_mask": bias})  # noqa: E731
        hooks.append(layer.self_attn.register_forward_pre_hook(change, with_kwargs=True))
    with torch.no_grad():
        found = theirs(torch.tensor([IDS]), output_attentions=True)
    for hook in hooks:
        hook.remove()
    return found.logits[0], torch.cat(found.attentions)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_each_head_attends_to_what_it_kept(ours, theirs, kept, runner, dtype):
    running = ours(runner, dtype)
    heads = lose(running, filled(running)[0], kept)
    found = [running.forward([ModelInput(IDS[OLD : OLD + 3], OLD, (), range(3), heads=heads)])[0]]
    for at in range(OLD + 3, OLD + NEW):
        found += running.forward([ModelInput(IDS[at : at + 1], at, (), (0,), heads=heads)])
    wanted = expected(theirs, kept)[0][OLD:]
    everything = expected(theirs, [[torch.arange(OLD)] * KV_HEADS] * LAYERS)[0][OLD:]
    scale = wanted.abs().max()
    assert (torch.cat(found) - wanted).abs().max() < CLOSE[dtype] * scale
    assert (everything - wanted).abs().max() > 5 * CLOSE[dtype] * scale  # what was lost mattered


@pytest.mark.parametrize("runner", RUNNERS)
def test_with_nothing_lost_it_is_the_same_as_blocks(ours, runner):
    running = ours(runner)
    _, logits = filled(running)
    (plain,) = ours(runner).forward([ModelInput(IDS[:OLD], 0, range(5), (OLD - 1,))])
    torch.testing.assert_close(logits, plain, rtol=0, atol=0 if running.invariant else 1e-4)


@pytest.mark.parametrize("runner", RUNNERS)
def test_beside_others_it_is_the_same_as_alone(ours, kept, runner):
    alone, together = ours(runner), ours(runner)
    inputs = []
    for running in (alone, together):
        heads = lose(running, filled(running)[0], kept)
        inputs.append(ModelInput(IDS[OLD:], OLD, (), range(NEW), heads=heads))
    other = ModelInput(IDS[:7], 0, (0,), (6,))
    (wanted,), (plain,) = alone.forward(inputs[:1]), ours(runner).forward([other])
    first, second = together.forward([other, inputs[1]])
    exact = 0 if alone.invariant else 1e-4
    torch.testing.assert_close(second, wanted, rtol=0, atol=exact)
    torch.testing.assert_close(first, plain, rtol=0, atol=exact)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("reduction", ["sum", "max"])
@pytest.mark.parametrize(("first", "before"), [(0, None), (0, OLD), (3, OLD), (3, None)])
def test_attention_received_is_that_of_what_each_head_kept(ours, theirs, kept, runner, reduction, first, before):
    running = ours(runner)
    heads = lose(running, filled(running)[0], kept)
    capture = Capture(attention=AttentionCapture(reduction, before))
    if first:
        running.forward([ModelInput(IDS[OLD : OLD + first], OLD, (), (), heads=heads)])
    running.forward([ModelInput(IDS[OLD + first :], OLD + first, (), (), heads=heads, capture=capture)])
    weights = expected(theirs, kept)[1][:, :, OLD + first :]
    if before is not None:
        weights = weights[..., :before] / weights[..., :before].sum(-1, keepdim=True)
    groups = weights.unflatten(1, (KV_HEADS, -1))
    received = groups.sum((2, 3)) if reduction == "sum" else groups.amax((2, 3))
    for layer in range(LAYERS):
        for head in range(KV_HEADS):
            index = torch.cat([kept[layer][head], torch.arange(OLD, OLD + NEW)])
            seen = index if before is None else index[index < before]
            found = capture.attention.received[layer][head][: len(index)]
            torch.testing.assert_close(found[: len(seen)], received[layer, head, seen], rtol=1e-4, atol=1e-5)
            assert not found[len(seen) :].any()


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_what_is_written_is_read_and_touches_nothing_else(ours, runner, dtype):
    running = ours(runner, dtype)
    heads, _ = filled(running)
    before = running.read(range(BLOCKS))
    table = heads.tables[1, 0].tolist()
    data = running.read_head(table, OLD)
    running.write_head(table, data)
    assert torch.equal(running.read(range(BLOCKS))[1:], before[1:])
    running.write_head(table, data.at(torch.arange(OLD - 1, -1, -1)))
    again = running.read_head(table, OLD)
    for found, wanted in zip(again.dense(), data.dense(), strict=True):
        assert torch.equal(found, wanted.flip(0))


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(
    "change",
    [
        lambda heads: {"lost": heads.lost - 1},
        lambda heads: {"lost": heads.lost + OLD + 1},
        lambda heads: {"tables": heads.tables[:, :, :1].contiguous()},
        lambda heads: {"tables": heads.tables + BLOCKS * LAYERS * KV_HEADS},
        lambda heads: {"tables": heads.tables[:2], "lost": heads.lost[:2]},
        lambda heads: {"tables": heads.tables[:, :1], "lost": heads.lost[:, :1]},
    ],
)
def test_tables_that_do_not_fit_are_refused(ours, runner, change):
    running = ours(runner)
    heads, _ = filled(running)
    bad = replace(heads, **change(heads))
    with pytest.raises(PippinError):
        running.forward([ModelInput(IDS[OLD:], OLD, (), (0,), heads=bad)])
