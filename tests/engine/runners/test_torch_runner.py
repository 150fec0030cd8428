"""The torch runner against the decoder without a cache, and against transformers: any cut, any table, any precision."""

import random
from dataclasses import replace

import pytest
import torch
from tests.language.families.checkpoints import read
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from pippin.core.errors import InvalidArgument, NotEnoughMemory
from pippin.engine.cache.paged_store import block_bytes
from pippin.engine.model_runner import BLOCK_SIZE, ModelInput
from pippin.engine.runners.torch_runner import TorchRunner
from pippin.language import Decoder, DecoderConfig, LanguageModel, LayerSpec
from pippin.nn.attention.attention import AttentionSpec
from pippin.nn.attention.rotary import Rotary
from pippin.nn.feedforward.feedforward import FeedForwardSpec
from pippin.nn.lora import Adapter, LowRankUpdate

GATED = FeedForwardSpec(48)


def layer(**attention):
    return LayerSpec(AttentionSpec(**attention), GATED)


# every way in which layers see: all, a window, no positions, another layer's keys, a mixture of experts
LAYERS = {
    "plain": (layer(), layer(), layer()),
    "windows": (layer(window=7), layer(rotary=None), layer(window=20, rotary=Rotary(theta=500.0))),
    "shared": (layer(window=9), layer(), layer(kv_source=1), layer(kv_source=0), layer(kv_source=1)),
    "shared below": (layer(), layer(kv_source=0), layer(), layer(kv_source=2)),
    "experts": (layer(), LayerSpec(AttentionSpec(), replace(GATED, num_experts=4, num_experts_per_tok=2))),
}


@pytest.fixture
def build(tiny):
    """Makes a random float32 model of given layers; weights large enough for the layers to matter."""

    def make(layers, **fields):
        sizes = {
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 512,
        } | fields
        config = DecoderConfig("llama", 97, layers=layers, qk_norm="head", embedding_scale=3.0, **sizes)
        module = Decoder(config).initialize(seed=1).requires_grad_(False).eval()
        for name, parameter in module.named_parameters():
            if "layers" in name and parameter.ndim == 2:
                parameter *= 8
        return LanguageModel("small", module, tiny.tokenizer, None)

    return make


@pytest.fixture(params=LAYERS)
def small(request, build):
    return build(LAYERS[request.param])


def oracle(model, ids, adapter=None):
    shares = None if adapter is None else [(adapter, slice(0, len(ids)))]
    with torch.inference_mode():
        return model.module(torch.tensor([ids]), adapters=shares)[0]


def tokens(count, seed=0):
    return random.Random(seed).choices(range(97), k=count)


def lora(model, seed):
    """An adapter of random size 1 on every projection but the experts'."""
    generator = torch.Generator().manual_seed(seed)
    changes = {}
    for name, linear in model.module.named_modules():
        if name.endswith("_proj") and "experts" not in name:
            down = torch.randn(1, linear.inputs, generator=generator) / 8
            changes[linear] = (LowRankUpdate(down, torch.randn(linear.outputs, 1, generator=generator)),)
    return Adapter(f"random {seed}", changes)


class Sequence:
    """A sequence under test: what it holds, and where."""

    def __init__(self, ids, adapter=None):
        self.ids, self.adapter = ids, adapter
        self.held, self.table = 0, []

    def work(self, count, outputs, allocate):
        new = self.ids[self.held : self.held + count]
        while len(self.table) * BLOCK_SIZE < self.held + len(new):
            self.table.append(allocate())
        return ModelInput(new, self.held, list(self.table), outputs, self.adapter)


@pytest.mark.parametrize("seed", range(6))
def test_any_schedule_gives_the_logits_of_whole_sequences(small, seed):
    """Random cuts, companies, tables, forks that share blocks, copies on writing, adapters, and wanted rows."""
    rng = random.Random(seed)
    runner = TorchRunner(small, 60)
    free = list(range(60))
    if seed % 2:
        rng.shuffle(free)
    adapters = [None, lora(small, 1), lora(small, 2)]
    sequences = [Sequence(tokens(rng.randrange(20, 90), i), rng.choice(adapters)) for i in range(4)]
    wanted = [oracle(small, s.ids, s.adapter) for s in sequences]
    for _ in range(60):
        going = [i for i, s in enumerate(sequences) if s.held < len(s.ids)]
        if not going:
            break
        inputs, places = [], []
        for i in rng.sample(going, rng.randrange(1, len(going) + 1)):
            count = min(rng.choice([1, 1, 1, 2, 17, 40]), len(sequences[i].ids) - sequences[i].held)
            outputs = rng.choice([[], [count - 1], sorted(rng.sample(range(count), rng.randrange(count + 1)))])
            inputs.append(sequences[i].work(count, outputs, free.pop))
            places.append(i)
        for i, model_input, logits in zip(places, inputs, runner.forward(inputs), strict=True):
            expected = wanted[i][[model_input.num_computed_tokens + index for index in model_input.outputs]]
            torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)
            sequences[i].held += len(model_input.token_ids)
        if len(sequences) < 8 and rng.random() < 0.3:
            i = rng.randrange(len(sequences))
            if sequences[i].held > 1:
                sequences.append(fork(rng, runner, sequences[i], free, tokens(30, 100 + len(sequences))))
                wanted.append(oracle(small, sequences[-1].ids, sequences[-1].adapter))
    assert all(s.held == len(s.ids) for s in sequences)


def fork(rng, runner, parent, free, continuation):
    """Go on otherwise from a prefix: whole blocks are shared, the one that is begun is copied."""
    child = Sequence([], parent.adapter)
    child.held = rng.randrange(1, parent.held)
    child.ids = parent.ids[: child.held] + continuation
    child.table = parent.table[: child.held // BLOCK_SIZE]
    if child.held % BLOCK_SIZE:
        child.table.append(free.pop())
        runner.copy(parent.table[child.held // BLOCK_SIZE], child.table[-1])
    return child


def test_a_prompt_in_two_parts_equals_transformers(tmp_path, tiny):
    fields = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 8, "layer_types": None}
    torch.manual_seed(0)
    description = AutoConfig.for_model("gemma3_text", **fields, **heads, sliding_window_pattern=2)
    reference = AutoModelForCausalLM.from_config(description, attn_implementation="eager").eval()
    reference.save_pretrained(tmp_path)
    module = read(tmp_path)
    ids = tokens(40)
    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).logits[0]
    runner = TorchRunner(LanguageModel("small", module.eval(), tiny.tokenizer, None), 6, "float32")
    (first,) = runner.forward([ModelInput(ids[:19], 0, [3, 1, 5], range(19))])
    (rest,) = runner.forward([ModelInput(ids[19:], 19, [3, 1, 5], range(21))])
    torch.testing.assert_close(torch.cat([first, rest]), expected, atol=1e-4, rtol=1e-4)


def test_stopping_and_going_on_equals_one_pass(build):
    """Draft with the lower layers token by token, then check all drafts with the upper ones in one pass."""
    model = build(LAYERS["shared"])
    ids, runner = tokens(40), TorchRunner(model, 5)
    expected = oracle(model, ids)
    runner.forward([ModelInput(ids[:30], 0, [0, 2, 1], [])])
    residual = torch.empty(10, 32)
    for index in range(10):
        model_input = ModelInput(ids[30 + index : 31 + index], 30 + index, [0, 2, 1], [0], depth=2)
        model_input.residual = residual[index : index + 1]
        (early,) = runner.forward([model_input])
        with torch.inference_mode():
            exit_early = model.module.lm_head(model.module.norm(residual[index]))
        torch.testing.assert_close(early[0], exit_early, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(early[0], expected[-1], atol=1e-2)
    other = tokens(20, 9)
    going_on = ModelInput(ids[30:], 30, [0, 2, 1], [0, 4, 9], residual=residual, resume=2)
    checked, company = runner.forward([going_on, ModelInput(other, 0, [4, 3], [19])])
    torch.testing.assert_close(checked, expected[[30, 34, 39]], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(company, oracle(model, other)[-1:], atol=1e-4, rtol=1e-4)


def test_a_pass_in_three_parts_equals_one(build):
    """Every layer has its own keys: each part writes those of its layers."""
    model = build(LAYERS["windows"])
    ids, runner = tokens(25), TorchRunner(model, 2)
    residual = torch.empty(25, 32)
    for first, last, outputs in ((0, 1, []), (1, 2, []), (2, None, [3, 24])):
        model_input = ModelInput(ids, 0, [1, 0], outputs, depth=last, residual=residual, resume=first)
        (logits,) = runner.forward([model_input])
    expected = oracle(model, ids)
    torch.testing.assert_close(logits, expected[[3, 24]], atol=1e-4, rtol=1e-4)
    # all layers left their keys: the sequence goes on as if it had been computed at once
    (following,) = runner.forward([ModelInput([5], 25, [1, 0], [0])])
    torch.testing.assert_close(following, oracle(model, [*ids, 5])[-1:], atol=1e-4, rtol=1e-4)


def test_an_early_exit_computes_no_more_than_it_needs(build):
    """Without a residual to fill, the last layer computed is cut to the wanted tokens: the same logits."""
    model = build(LAYERS["plain"])
    ids = tokens(25)
    kept = ModelInput(ids, 0, [0, 1], [7, 24], depth=2, residual=torch.empty(25, 32))
    (whole,) = TorchRunner(model, 2).forward([kept])
    (cut,) = TorchRunner(model, 2).forward([ModelInput(ids, 0, [0, 1], [7, 24], depth=2)])
    torch.testing.assert_close(cut, whole, atol=1e-5, rtol=1e-5)


@pytest.fixture
def on_device(build):
    """The shape of AFM's decoder, small: ten layers with keys of their own, six that read the last of them."""
    own, reuse = layer(rotary=Rotary(theta=5e5)), layer(rotary=Rotary(theta=5e5), kv_source=9)
    return build(
        (own,) * 10 + (reuse,) * 6,
        hidden_size=256,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
    )


def test_the_prefill_skip_is_exact(on_device):
    """Check 2 of the on-device card: last logits, a greedy continuation, and the size of the cache."""
    prompt = tokens(100)
    runner, plain = TorchRunner(on_device, 20), TorchRunner(on_device, 20)
    (logits,) = runner.forward([ModelInput(prompt, 0, range(20), [99])])
    (full,) = plain.forward([ModelInput(prompt, 0, range(20), range(100))])  # all wanted: nothing is left out
    torch.testing.assert_close(logits[0], full[-1], atol=1e-5, rtol=0)
    answers: list[list[int]] = [[], []]
    for answer, engine, start in ((answers[0], runner, logits), (answers[1], plain, full[-1:])):
        while len(answer) < 80:
            answer.append(int(start.argmax()))
            (start,) = engine.forward([ModelInput(answer[-1:], 99 + len(answer), range(20), [0])])
    assert answers[0] == answers[1]
    unshared = replace(on_device.config, layers=on_device.config.layers[:1] * 16)
    assert runner.block_bytes * 16 == block_bytes(unshared, "float32") * 10


def test_the_prefill_skip_saves_what_it_should(on_device):
    """Check 3 of the card, by count: multiplications of a prompt of 2,048 tokens, attention included."""
    prompt = tokens(2048)

    def flops(outputs):
        runner = TorchRunner(on_device, 128)
        with FlopCounterMode(display=False) as counter:
            runner.forward([ModelInput(prompt, 0, range(128), outputs)])
        return counter.get_total_flops() - 2 * 97 * 256 * len(outputs)  # without the head

    everything, last, nothing = flops(range(2048)), flops([2047]), flops([])
    assert 0.5 < last / everything < 0.72
    assert nothing < last


def test_eight_bits_stay_within_their_rounding(build):
    """Each number within half a step of its vector's scale; logits near those of float32, and the same in any cut."""
    model = build(LAYERS["plain"])
    ids = tokens(60)
    exact, coarse = TorchRunner(model, 5, "float32"), TorchRunner(model, 5, "int8")
    (wanted,) = exact.forward([ModelInput(ids, 0, [3, 0, 1, 2], range(60))])
    (got,) = coarse.forward([ModelInput(ids, 0, [3, 0, 1, 2], range(60))])
    keys, _ = exact._store.read(0, slice(0, 32), torch.float32)
    rounded, _ = coarse._store.read(0, slice(0, 32), torch.float32)
    step = keys.abs().amax(-1, keepdim=True) / 127
    assert ((keys - rounded).abs() <= 0.5001 * step).all()
    assert 0 < (got - wanted).std() < 0.02 * wanted.std()
    again = TorchRunner(model, 5, "int8")
    pieces = [
        again.forward([ModelInput(ids[i : i + 13], i, [0, 1, 2, 4], range(len(ids[i : i + 13])))])
        for i in range(0, 60, 13)
    ]
    torch.testing.assert_close(torch.cat([p for (p,) in pieces]), got, atol=0.02, rtol=0)


def test_a_zero_vector_survives_eight_bits(build):
    model = build(LAYERS["plain"])
    for name, parameter in model.module.named_parameters():
        if "k_proj" in name or "v_proj" in name:
            parameter.zero_()
    (logits,) = TorchRunner(model, 1, "int8").forward([ModelInput([1, 2, 3], 0, [0], [2])])
    torch.testing.assert_close(logits, oracle(model, [1, 2, 3])[-1:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kv_cache_dtype", ["float32", "bfloat16", "int8"])
def test_contents_of_blocks_move_to_another_pool(build, kv_cache_dtype):
    model = build(LAYERS["shared"])
    ids = tokens(40)
    old, new = TorchRunner(model, 4, kv_cache_dtype), TorchRunner(model, 7, kv_cache_dtype)
    old.forward([ModelInput(ids, 0, [2, 0, 3], [])])
    data = old.read([2, 0, 3])
    assert data.shape == (3, old.block_bytes) == (3, TorchRunner.block_bytes_of(model, kv_cache_dtype))
    new.write([6, 1, 2], data)
    (there,) = new.forward([ModelInput([7], 40, [6, 1, 2], [0])])
    (here,) = old.forward([ModelInput([7], 40, [2, 0, 3], [0])])
    torch.testing.assert_close(there, here, atol=1e-5, rtol=1e-5)
    assert torch.equal(new.read([6])[0], data[0])


def test_bfloat16_throughout(build):
    model = build(LAYERS["windows"])
    ids = tokens(50)
    expected = oracle(model, ids)
    model.module.to(torch.bfloat16)
    runner = TorchRunner(model, 4)
    assert runner.kv_cache_dtype == "bfloat16"
    (first,) = runner.forward([ModelInput(ids[:30], 0, [0, 1, 3, 2], range(30))])
    (second,) = runner.forward([ModelInput(ids[30:], 30, [0, 1, 3, 2], range(20))])
    logits = torch.cat([first, second])
    assert logits.dtype == torch.float32
    assert (logits - expected).abs().max() < 0.25 * expected.std()


def test_logits_are_not_written_again(build):
    runner = TorchRunner(build(LAYERS["plain"]), 2)
    (first,) = runner.forward([ModelInput([1], 0, [0], [0])])
    before = first.clone()
    runner.forward([ModelInput([2], 1, [0], [0])])
    assert torch.equal(first, before)


def test_bad_input_is_refused_before_anything_is_computed(build):
    model = build(LAYERS["plain"])
    runner = TorchRunner(model, 2)
    good = ModelInput([1, 2], 0, [0], [1])
    for model_input, message in (
        (ModelInput([], 0, [0], []), "0 new ones"),
        (ModelInput([1], -1, [0], []), "-1 tokens"),
        (ModelInput([1] * 17, 0, [0], []), "a block table for 16 tokens was given 17"),
        (ModelInput([1], 0, [2], [0]), "blocks 0 to 1, not 2 to 2"),
        (ModelInput([1], 0, [-1], [0]), "not -1"),
        (ModelInput([1, 2], 0, [0], [1, 0]), r"ascending.*\[1, 0\]"),
        (ModelInput([1, 2], 0, [0], [2]), "below 2"),
        (ModelInput([1], 0, [0], [0], depth=4), "layers 0 to 4 of 3"),
        (ModelInput([1], 0, [0], [0], depth=0), "layers 0 to 0"),
        (ModelInput([1], 0, [0], [0], resume=1), "needs the residual"),
        (ModelInput([1], 0, [0], [0], residual=torch.zeros(2, 32), depth=1), r"got \(2, 32\)"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            runner.forward([good, model_input])
    with pytest.raises(InvalidArgument, match="blocks 0 to 1"):
        runner.copy(0, 5)
    with pytest.raises(InvalidArgument, match="blocks 0 to 1"):
        runner.read([2])
    with pytest.raises(InvalidArgument, match="data of shape"):
        runner.write([0], torch.zeros(1, 3, dtype=torch.uint8))
    runner.close()
    with pytest.raises(InvalidArgument, match="closed"):
        runner.forward([good])


def test_pools_that_cannot_be(build):
    model = build(LAYERS["plain"])
    with pytest.raises(InvalidArgument, match="blocks must be at least 1, got 0"):
        TorchRunner(model, 0)
    with pytest.raises(InvalidArgument, match="must be 'auto', 'float32', 'bfloat16' or 'int8'"):
        TorchRunner(model, 1, "int4")
    with pytest.raises(NotEnoughMemory, match="cpu has no room for 1000000000000 cache blocks"):
        TorchRunner(model, 10**12)
