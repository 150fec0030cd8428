"""Sequences in a bounded cache, against transformers with masks for what was given up."""

from dataclasses import replace

import pytest
import torch

from pippin.core import device, native
from pippin.core.errors import CorruptedFile, InvalidArgument
from pippin.engine.cache.prefix_tree import CacheKey
from pippin.engine.kv_eviction import H2O, BoundedCache, CachePolicy, KeyDiff, Probe, SnapKV, StreamingLLM
from pippin.engine.model_runner import ModelInput
from pippin.engine.runners.native_runner import NativeRunner
from pippin.engine.runners.torch_runner import TorchRunner
from pippin.language import Decoder

LAYERS, KV_HEADS, BLOCKS = 2, 2, 40
IDS = torch.randint(260, (400,), generator=torch.Generator().manual_seed(3)).tolist()
KERNELS = pytest.mark.skipif(native.library() is None, reason="the native kernels are not built")
RUNNERS = [pytest.param(NativeRunner, marks=KERNELS), TorchRunner]
PROBE = tuple(IDS[350:370])


def probing(**fields):
    return Probe(token_ids=PROBE, **fields)


POLICIES = [StreamingLLM, H2O, SnapKV, KeyDiff, probing]
SMALL = {"budget": 70, "block_size": 48, "recent_tokens": 20}


@pytest.fixture(scope="module")
def theirs(random_llama):
    return random_llama(LAYERS)


@pytest.fixture
def running(theirs, as_model):
    return lambda runner, dtype="float32": runner(as_model(theirs, pack=runner is NativeRunner), BLOCKS, dtype)


def bounded(runner, policy):
    cache = BoundedCache(policy, runner.model.config, runner)
    cache.attach(list(range(3, 3 + cache.num_blocks)))
    return cache


def compute(runner, cache, until, step=1000):
    """The tokens up to some number, with the probes, in passes of at most ``step``; logits of each token."""
    found = []
    while True:
        at, probe, capture = cache.num_tokens, cache.probe(step), cache.capture()
        count = len(probe) or cache.chunk(min(step, until - at))
        if not count:
            return torch.cat(found)
        ids = probe or IDS[at : at + count]
        outputs = () if probe else range(count)
        work = ModelInput(ids, cache.num_slots, (), outputs, heads=cache.tables(), capture=capture)
        work.other_tables = [()] * (len(runner.windows) - 1)
        found += runner.forward([work])
        if probe:
            cache.advance_probe(count, capture)
        else:
            cache.advance(ids, capture)


def seen_by(theirs, *masks):
    """Logits by transformers where query i sees what row i of the mask of a layer says; one mask is that of all."""
    hooks = []
    for index, layer in enumerate(theirs.model.layers):
        mask = masks[index % len(masks)]
        bias = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)[None, None]

        def given(module, args, kwargs, bias=bias):
            return args, {**kwargs, "attention_mask": bias}

        hooks.append(layer.self_attn.register_forward_pre_hook(given, with_kwargs=True))
    with torch.no_grad():
        found = theirs(torch.tensor([IDS[: len(masks[0])]])).logits[0]
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


@pytest.fixture
def windowed(theirs, as_model):
    """The same weights with a window in the first layer, whose keys have a group of blocks of their own."""

    def make(runner, dtype="float32", window=24):
        model = as_model(theirs, pack=False)
        first, second = model.config.layers
        local = replace(first, attention=replace(first.attention, window=window))
        module = Decoder(replace(model.config, layers=(local, second)))
        module.load_state_dict(model.module.state_dict())
        module = module.requires_grad_(False).eval()
        model = replace(model, network=module.pack() if runner is NativeRunner else module)
        return runner(model, 2 * BLOCKS, dtype, groups=module.config.cache_groups)

    return make


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_layers_with_windows_see_their_window_whatever_the_policy_says(windowed, theirs, runner, policy):
    alone = windowed(runner)
    cache = bounded(alone, policy(budget=300, block_size=48))
    found = compute(alone, cache, 300)
    causal = torch.ones(300, 300, dtype=torch.bool).tril()
    wanted = seen_by(theirs, causal & ~causal.tril(-24), causal)
    assert (found - wanted).abs().max() < 2e-5 * wanted.abs().max()
    assert (seen_by(theirs, causal) - wanted).abs().max() > 0.1 * wanted.abs().max()
    kept = 23 + 300 % 48
    assert cache.lengths == [[kept] * KV_HEADS, [300] * KV_HEADS]
    assert cache.num_blocks * alone.heads_in_block <= KV_HEADS * (-(-348 // 16) + -(-71 // 16) + 2 + 2)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_beside_windows_the_other_layers_give_up_tokens(windowed, theirs, runner, dtype):
    policy = StreamingLLM(**SMALL, sink_tokens=5, share_heads=False)
    alone = windowed(runner, dtype)
    found = compute(alone, bounded(alone, policy), 300)
    causal = torch.ones(300, 300, dtype=torch.bool).tril()
    mask, lost = causal.clone(), 0
    for at in range(300):
        if at >= 96 and at % 48 == 0:  # behind each block; 5 + 65 tokens stay
            lost = at - 65
        mask[at, 5 : max(5, lost)] = False
    wanted = seen_by(theirs, causal & ~causal.tril(-24), mask)
    bound = 2e-5 if dtype == "float32" else 0.1
    assert (found - wanted).abs().max() < bound * wanted.abs().max()
    if dtype == "float32":
        assert (seen_by(theirs, mask) - wanted).abs().max() > 0.1 * wanted.abs().max()


@KERNELS
@pytest.mark.parametrize("policy", POLICIES)
def test_with_windows_passes_of_other_sizes_and_a_pause_change_nothing(windowed, policy):
    first, second = windowed(NativeRunner), windowed(NativeRunner)
    one, other = bounded(first, policy(**SMALL)), bounded(second, policy(**SMALL))
    wanted, found = compute(first, one, 300), []
    for until, step in ((20, 3), (150, 31), (151, 1), (300, 17)):
        found.append(compute(second, other, until, step))
        blocks = other.detach()
        second.write(blocks, torch.full((len(blocks), second.block_bytes), 255, dtype=torch.uint8))
        other.attach(blocks[1:] + blocks[:1])
    assert torch.equal(torch.cat(found), wanted)


@pytest.mark.parametrize("runner", RUNNERS)
def test_beyond_the_context_windows_move_up_too(random_llama, as_model, runner):
    one = random_llama(1, 160)
    model = as_model(one, pack=False)
    layer = model.config.layers[0]
    local = replace(layer, attention=replace(layer.attention, window=50))
    module = Decoder(replace(model.config, layers=(local,)))
    module.load_state_dict(model.module.state_dict())
    module = module.requires_grad_(False).eval()
    model = replace(model, network=module.pack() if runner is NativeRunner else module)
    alone = runner(model, BLOCKS, "float32")
    cache = bounded(alone, StreamingLLM(budget=64, block_size=32, recent_tokens=20))
    found = compute(alone, cache, 358)
    assert cache.num_slots < 160
    with torch.no_grad():
        wanted = one(torch.tensor([IDS[358 - 50 : 358]])).logits[0, -1:]
    torch.testing.assert_close(found[-1:], wanted, rtol=1e-4, atol=1e-4)


def first_eviction(theirs, policy, tokens):
    """Positions that stay by attention and keys of transformers, (layers, kv_heads) of sets."""
    probe = list(policy.probe())
    with torch.no_grad():
        done = theirs(torch.tensor([IDS[:tokens] + probe]), output_attentions=True)
    found = []
    for layer in range(LAYERS):
        attention = done.attentions[layer][0].unflatten(0, (KV_HEADS, -1))
        keys = done.past_key_values.layers[layer].keys[0]
        if probe:
            given = attention[:, :, tokens:, :tokens]
            given = given / given.sum(-1, keepdim=True)
        match policy:
            case Probe():
                scores = given.amax((1, 2))
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
def test_layers_have_budgets_of_their_own(running, theirs, runner):
    policy = KeyDiff(budget=100, block_size=80, layer_budgets=(60, 140))
    alone = running(runner)
    cache = bounded(alone, policy)
    compute(alone, cache, 180)
    assert [sum(lengths) for lengths in cache.lengths] == [120, 280]
    compute(alone, cache, 180 + 80 * 2)
    assert [sum(lengths) for lengths in cache.lengths] == [120, 280]


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_may_deviate_behind_the_last_eviction(running, runner, policy):
    """What came since is forgotten, or everything, where the policy counts what it gave."""
    one, other = running(runner), running(runner)
    again, fresh = bounded(one, policy(**SMALL)), bounded(other, policy(**SMALL))
    compute(one, again, 250)
    key = CacheKey("", None)
    again.key = key
    other_ids = IDS[:240] + IDS[:30]
    again.begin(other_ids, key)
    assert again.num_tokens in (0, 240)
    if policy in (StreamingLLM, KeyDiff, probing):
        assert again.num_tokens == 240
    assert again.token_ids == IDS[: again.num_tokens]
    if again.num_tokens:
        compute(other, fresh, 240)
        (found,), (wanted,) = (
            runner_.forward([ModelInput(IDS[:5], cache.num_slots, (), range(5), heads=cache.tables())])
            for runner_, cache in ((one, again), (other, fresh))
        )
        assert torch.equal(found, wanted) or not one.invariant
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    again.end()
    again.begin(IDS[:50], key)
    assert again.num_tokens == 0


@pytest.mark.parametrize("runner", RUNNERS)
def test_beyond_the_context_what_is_left_moves_up(random_llama, as_model, runner):
    """With one layer, keys depend on tokens and positions alone: it is as if only what is left had been said."""
    one = random_llama(1, 160)
    alone = runner(as_model(one, pack=runner is NativeRunner), BLOCKS, "float32")
    cache = bounded(alone, StreamingLLM(budget=64, block_size=32, recent_tokens=20, sink_tokens=4, share_heads=False))
    assert cache.max_tokens is None
    found = compute(alone, cache, 358)  # evictions behind each 32 tokens; at 160, 256 and 352 what is left moves up
    kept = cache.positions(0, 0).tolist()
    assert kept == [0, 1, 2, 3, *range(292, 358)]
    assert cache.num_slots == len(kept)
    with torch.no_grad():
        wanted = one(torch.tensor([[IDS[at] for at in kept]])).logits[0, -6:]
    torch.testing.assert_close(found[-6:], wanted, rtol=1e-4, atol=1e-4)


def test_learned_positions_have_an_end(theirs, as_model):
    model = as_model(theirs, pack=False)
    module = Decoder(replace(model.config, learned_positions=True)).eval()
    alone = TorchRunner(replace(model, network=module), BLOCKS, "float32")
    assert bounded(alone, StreamingLLM(budget=64)).max_tokens == 1024


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
        (H2O, {"budget": 100, "layer_budgets": (90, 111)}, "100.5 tokens on average, more than the budget of 100"),
        (H2O, {"budget": 100, "layer_budgets": (20, 180)}, "a budget of 20 tokens holds no more"),
        (Probe, {"budget": 100, "token_ids": ()}, "a probe without tokens"),
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


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors, numbers: tensors.pop("blocks"),
        lambda tensors, numbers: tensors["blocks"].__setitem__(0, 10_000),
        lambda tensors, numbers: tensors["blocks"].__setitem__(0, -1),
        lambda tensors, numbers: tensors["blocks"].__setitem__(0, int(tensors["blocks"][1])),
        lambda tensors, numbers: tensors["lengths"].__setitem__(0, 90),
        lambda tensors, numbers: tensors.update(received=tensors["received"][1:]),
        lambda tensors, numbers: tensors.update(data=tensors["data"][1:]),
        lambda tensors, numbers: tensors.pop("data"),
        lambda tensors, numbers: numbers.update(room=10_000),
        lambda tensors, numbers: numbers.update(room=0),
        lambda tensors, numbers: numbers.update(rotation=3),
        lambda tensors, numbers: numbers.update(rotation="3"),
        lambda tensors, numbers: numbers.update(runner=None),
    ],
)
def test_a_state_that_contradicts_itself_is_refused(running, change):
    alone = running(TorchRunner)
    cache = bounded(alone, StreamingLLM(**SMALL))
    compute(alone, cache, 200)
    cache.detach()
    tensors, numbers = cache.state()
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    again = BoundedCache(cache.policy, alone.model.config, alone)
    again.restore(tensors, numbers)
    assert again.lengths == cache.lengths
    change(tensors, numbers)
    with pytest.raises(CorruptedFile, match="contradicts itself"):
        again.restore(tensors, numbers)
