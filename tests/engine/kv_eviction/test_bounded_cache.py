"""Sequences in a bounded cache, against transformers with masks for what was given up."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pippin.core import device, native
from pippin.core.errors import InvalidArgument
from pippin.engine.kv_eviction import H2O, BoundedCache, CachePolicy, KeyDiff, SnapKV, StreamingLLM
from pippin.engine.model_runner import ModelInput
from pippin.engine.runners.native_runner import NativeRunner
from pippin.engine.runners.torch_runner import TorchRunner
from pippin.language import Decoder, LanguageModel, families

LAYERS, HEADS, KV_HEADS, BLOCKS = 2, 4, 2, 40
SIZES = {"vocab_size": 260, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS}
SIZES |= {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "max_position_embeddings": 1024}
IDS = torch.randint(260, (400,), generator=torch.Generator().manual_seed(3)).tolist()
KERNELS = pytest.mark.skipif(native.library() is None, reason="the native kernels are not built")
RUNNERS = [pytest.param(NativeRunner, marks=KERNELS), TorchRunner]
POLICIES = [StreamingLLM, H2O, SnapKV, KeyDiff]
SMALL = {"budget": 70, "block_size": 48, "recent_tokens": 20}


@pytest.fixture(scope="module")
def theirs():
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, attn_implementation="eager")).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data = 0.3 * torch.randn_like(parameter)
    return model


@pytest.fixture
def running(theirs, tiny):
    module = Decoder(families.from_hf({**theirs.config.to_dict(), "model_type": "llama"}))
    module.load_state_dict({name.removeprefix("model."): weight for name, weight in theirs.state_dict().items()})

    def make(runner, dtype="float32"):
        own = module.pack() if runner is NativeRunner else module
        return runner(LanguageModel("llama", own.eval(), tiny.tokenizer, None), BLOCKS, dtype)

    return make


def bounded(runner, policy):
    cache = BoundedCache(policy, runner.model.config, runner)
    cache.attach(list(range(3, 3 + cache.num_blocks)))
    return cache


def compute(runner, cache, until, step=1000):
    """The tokens up to some number, in passes of at most ``step``; logits of each."""
    found = []
    while (at := cache.num_tokens) < until:
        count = cache.chunk(min(step, until - at))
        capture = cache.capture()
        work = ModelInput(IDS[at : at + count], at, (), range(count), heads=cache.tables(), capture=capture)
        found += runner.forward([work])
        cache.advance(work.token_ids, capture)
    return torch.cat(found)


def seen_by(theirs, mask):
    """Logits by transformers where query i sees what row i of the mask says, in all layers and heads."""
    bias = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)[None, None]
    hooks = [
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: (args, {**kwargs, "attention_mask": bias}), with_kwargs=True
        )
        for layer in theirs.model.layers
    ]
    with torch.no_grad():
        found = theirs(torch.tensor([IDS[: len(mask)]])).logits[0]
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_budget_that_is_enough_changes_nothing(running, theirs, runner, policy):
    alone = running(runner)
    found = compute(alone, bounded(alone, policy(budget=300)), 300)
    wanted = seen_by(theirs, torch.ones(300, 300, dtype=torch.bool).tril())
    assert (found - wanted).abs().max() < 2e-5 * wanted.abs().max()
    (plain,) = running(runner).forward([ModelInput(IDS[:300], 0, range(19), range(300))])
    torch.testing.assert_close(found, plain, rtol=0, atol=0 if alone.invariant else 1e-4)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("share_heads", [False, True])
def test_streaming_llm_is_attention_to_the_first_and_the_newest_tokens(running, theirs, runner, share_heads):
    policy = StreamingLLM(**SMALL, sink_tokens=5, share_heads=share_heads)
    alone = running(runner)
    found = compute(alone, bounded(alone, policy), 300)
    mask, lost = torch.ones(300, 300, dtype=torch.bool).tril(), 0
    for at in range(300):
        if at >= 70 + 48 and (at - 70) % 48 == 0:  # behind each block; 5 + 65 tokens stay
            lost = at - 65
        mask[at, 5 : max(5, lost)] = False
    wanted, everything = seen_by(theirs, mask), seen_by(theirs, torch.ones_like(mask).tril())
    assert (found - wanted).abs().max() < 2e-5 * wanted.abs().max()
    assert (everything - wanted).abs().max() > 0.1 * wanted.abs().max()  # what was lost mattered


def first_eviction(theirs, policy, tokens):
    """Positions that stay by attention and keys of transformers, (layers, kv_heads) of sets."""
    with torch.no_grad():
        done = theirs(torch.tensor([IDS[:tokens]]), output_attentions=True)
    found = []
    for layer in range(LAYERS):
        attention = done.attentions[layer][0].unflatten(0, (KV_HEADS, -1))
        keys = done.past_key_values.layers[layer].keys[0]
        match policy:
            case H2O():
                scores = attention.sum((1, 2))
            case SnapKV():
                received = attention[:, :, -64:].sum((1, 2))
                windows = [received[:, max(0, at - 3) : at + 4].mean(1) for at in range(tokens)]
                scores = torch.stack(windows, 1)
            case _:
                unit = keys / keys.norm(dim=-1, keepdim=True)
                mean = unit.mean(1, keepdim=True)
                scores = -(unit * mean / mean.norm(dim=-1, keepdim=True)).sum(-1)
        scores = scores.clone()
        scores[:, : policy.sink_tokens] = scores[:, tokens - policy.recent_tokens :] = torch.inf
        if policy.share_heads:
            best = scores.flatten().topk(policy.budget * KV_HEADS).indices
            rows = [{int(each) % tokens for each in best if int(each) // tokens == head} for head in range(KV_HEADS)]
        else:
            rows = [set(row.topk(policy.budget).indices.tolist()) for row in scores]
        found.append(rows)
    return found


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("policy", POLICIES[1:])
@pytest.mark.parametrize("share_heads", [False, True])
def test_what_stays_is_what_attention_and_keys_of_transformers_say(running, theirs, runner, policy, share_heads):
    chosen = policy(budget=100, block_size=80, share_heads=share_heads)
    alone = running(runner)
    cache = bounded(alone, chosen)
    compute(alone, cache, 180)
    found = [[set(cache.positions(layer, head).tolist()) for head in range(KV_HEADS)] for layer in range(LAYERS)]
    assert found == first_eviction(theirs, chosen, 180)
    if share_heads:
        assert len({len(row) for rows in found for row in rows}) > 1


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_it_never_has_more_than_budget_and_block_and_keys_keep_their_positions(running, runner, policy, dtype):
    alone = running(runner, dtype)
    cache = bounded(alone, policy(**{**SMALL, "budget": 90}))
    (plain,) = alone.forward([ModelInput(IDS[:300], 0, range(21, 40), (299,))])
    keys = [
        alone.read_head([block * LAYERS * KV_HEADS + head for block in range(21, 40)], 300) for head in range(KV_HEADS)
    ]
    for until in range(1, 301, 23):
        compute(alone, cache, until)
        for layer, lengths in enumerate(cache.lengths):
            assert sum(lengths) <= KV_HEADS * (90 + 48)
            for head, length in enumerate(lengths):
                positions = cache.positions(layer, head)
                assert len(positions) == length
                assert (positions.diff() > 0).all()
                assert set(range(4)) <= set(positions.tolist()) or until < 4
                if layer == 0:  # whose keys depend on nothing but the token and its position
                    blocks = cache.tables().tables[layer, head].tolist()
                    found, wanted = alone.read_head(blocks, length), keys[head].at(positions)
                    for mine, other in zip(found.dense(), wanted.dense(), strict=True):
                        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)
    assert plain.isfinite().all()


@KERNELS
@pytest.mark.parametrize("policy", POLICIES)
def test_passes_of_other_sizes_and_a_pause_change_nothing(running, policy):
    first, second = running(NativeRunner), running(NativeRunner)
    one, other = bounded(first, policy(**SMALL)), bounded(second, policy(**SMALL))
    wanted = compute(first, one, 300)
    found = []
    for until, step in ((20, 3), (150, 31), (151, 1), (300, 17)):
        found.append(compute(second, other, until, step))
        blocks = other.detach()
        assert len(blocks) == other.num_blocks
        second.write(blocks, torch.full((len(blocks), second.block_bytes), 255, dtype=torch.uint8))
        other.attach(blocks[1:] + blocks[:1])
    assert torch.equal(torch.cat(found), wanted)
    assert one.lengths == other.lengths


@KERNELS
def test_keys_that_threads_share_are_read_as_by_one(running):
    """A next token after many: its keys go in parts of 256, and the heads have kept more or fewer."""
    policy, found, before = H2O(budget=330, block_size=10), [], native.threads()
    for threads in (1, min(2, device.threads())):
        native.set_threads(threads)
        try:
            alone = running(NativeRunner)
            cache = bounded(alone, policy)
            compute(alone, cache, 341)
            assert len({length for lengths in cache.lengths for length in lengths}) > 1
            found.append(compute(alone, cache, 360, step=1))
        finally:
            native.set_threads(before)
    assert torch.equal(found[0], found[1])


def test_a_policy_of_ones_own_is_a_few_lines(running):
    class Strided(CachePolicy):
        def scores(self, head):
            return -(head.positions % 3).float()

    alone = running(TorchRunner)
    cache = bounded(alone, Strided(budget=60, sink_tokens=0, recent_tokens=0, block_size=60, share_heads=False))
    compute(alone, cache, 120)
    assert cache.positions(1, 1).tolist() == sorted([*range(0, 120, 3), *range(1, 60, 3)])


@pytest.mark.parametrize(
    ("policy", "change", "message"),
    [
        (StreamingLLM, {"budget": 20}, "holds no more than the 20 that always stay"),
        (SnapKV, {"budget": 68}, "holds no more than the 68"),
        (H2O, {"budget": 0}, "budget"),
        (H2O, {"budget": 50, "block_size": 0}, "block_size"),
        (KeyDiff, {"budget": 50, "sink_tokens": -1}, "sink_tokens"),
        (SnapKV, {"budget": 100, "kernel_size": 0}, "kernel_size"),
    ],
)
def test_budgets_that_hold_nothing_are_refused(policy, change, message):
    with pytest.raises(InvalidArgument, match=message):
        policy(**change)


def test_blocks_must_be_as_many_as_it_needs(running):
    alone = running(TorchRunner)
    cache = BoundedCache(StreamingLLM(budget=64, block_size=32), alone.model.config, alone)
    assert cache.num_blocks == 7
    with pytest.raises(InvalidArgument, match="needs 7 blocks, got 3"):
        cache.attach([1, 2, 3])
