"""Passes of the native kernels against the decoder in torch and float64, with the weights that the packed ones mean."""

import copy
import gc
import weakref
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st

from pippin.core import memory, native
from pippin.core.errors import AdapterMismatch, InvalidArgument, NotEnoughMemory
from pippin.engine.model_runner import BLOCK_SIZE, ModelInput, Runner
from pippin.engine.runners.native_runner import NativeRunner
from pippin.language import Decoder, DecoderConfig, LanguageModel, LayerSpec
from pippin.nn.attention.attention import AttentionSpec
from pippin.nn.attention.rotary import Rotary
from pippin.nn.feedforward.feedforward import FeedForwardSpec
from pippin.nn.feedforward.routing import RouterSpec
from pippin.nn.kv_cache import NoCache
from pippin.nn.linear import Linear
from pippin.nn.lora import Adapter, LowRankUpdate
from pippin.nn.parallel.tracks import Tracks, side_by_side
from pippin.nn.quantization.packed import NativeWeight, quantize

pytestmark = pytest.mark.skipif(native.library() is None, reason="the native kernels are not built")

VOCAB, WIDTH = 70, 64
DENSE = FeedForwardSpec(96)
PLAIN = LayerSpec(AttentionSpec(), DENSE)


def config(*layers: LayerSpec, **changes) -> DecoderConfig:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096}
    return DecoderConfig("llama", VOCAB, WIDTH, layers or (PLAIN, PLAIN), **(sizes | changes))


LOCAL = AttentionSpec(window=5, rotary=Rotary(100.0))
YARN = Rotary(500.0, scaling="yarn", factor=4.0, original_max_position_embeddings=64)
CONFIGS = {
    "llama": config(),
    "untied, one kv head": config(tie_word_embeddings=False, num_key_value_heads=1),
    "biases": config(qkv_bias=True, num_attention_heads=2, num_key_value_heads=2, head_dim=32),
    "norms on heads": config(qk_norm="head", attention_scale=0.3),
    "gemma": config(
        LayerSpec(LOCAL, FeedForwardSpec(96, "gelu_tanh")),
        LayerSpec(AttentionSpec(rotary=YARN), FeedForwardSpec(96, "gelu_tanh")),
        residual="pre and post",
        qk_norm="head",
        embedding_scale=8.0,
    ),
    "no positions": config(PLAIN, LayerSpec(AttentionSpec(rotary=None), DENSE)),
    "not gated": config(*(LayerSpec(AttentionSpec(), FeedForwardSpec(96, act, False)) for act in ("relu", "gelu"))),
    "experts": config(
        LayerSpec(AttentionSpec(), FeedForwardSpec(32, num_experts=5, num_experts_per_tok=2)),
        LayerSpec(AttentionSpec(), FeedForwardSpec(32, num_experts=4, num_experts_per_tok=1, norm_topk_prob=False)),
    ),
    "bounded routers": config(
        *(
            LayerSpec(
                AttentionSpec(),
                FeedForwardSpec(32, num_experts=5, num_experts_per_tok=2, router=RouterSpec(softcap=0.5, bias=True)),
            ),
        )
        * 2
    ),
    "shared keys": config(
        PLAIN,
        LayerSpec(LOCAL, DENSE),
        LayerSpec(replace(LOCAL, kv_source=1), DENSE),
        LayerSpec(AttentionSpec(kv_source=0), DENSE),
    ),
    **{
        f"tracks, {join}": config(
            *side_by_side(
                (
                    LayerSpec(LOCAL, DENSE),
                    LayerSpec(AttentionSpec(), FeedForwardSpec(32, num_experts=4, num_experts_per_tok=2)),
                    LayerSpec(LOCAL, DENSE),
                    LayerSpec(AttentionSpec(rotary=None), DENSE),
                ),
                Tracks(3, 2),
            ),
            tracks=Tracks(3, 2, join),
        )
        for join in ("mean", "delta", "sum")
    },
}


def decoder(of: DecoderConfig, seed: int = 0) -> Decoder:
    """Weights large enough that every part of a layer shows in the logits."""
    module = Decoder(of)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        random = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + random / 4 if name.endswith("norm.weight") else random / parameter.shape[-1] ** 0.5
    return module.eval()


def packed(module: Decoder, tiny) -> LanguageModel:
    return LanguageModel("packed", copy.deepcopy(module).pack(), tiny.tokenizer, None)


def some_ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def exact(module: Decoder, ids: list[int], **options) -> torch.Tensor:
    with torch.no_grad():
        return copy.deepcopy(module).double()(torch.tensor([ids]), **options)[0]


def work(ids, held=0, first=0, outputs=None, **options) -> ModelInput:
    """A sequence that lies in the blocks from ``first`` on."""
    table = range(first, first + -(-(held + len(ids)) // BLOCK_SIZE))
    return ModelInput(ids, held, list(table), range(len(ids)) if outputs is None else outputs, **options)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_pass_equals_the_decoder_in_float64(name, tiny):
    module, ids = decoder(CONFIGS[name]), some_ids(70)
    model = packed(module, tiny)
    assert NativeRunner.supports(model)
    runner = NativeRunner(model, 8)
    assert isinstance(runner, Runner)
    assert (runner.kv_cache_dtype, runner.invariant) == ("float32", True)
    expected = exact(module, ids)
    (logits,) = runner.forward([work(ids)])
    assert (logits.dtype, logits.shape) == (torch.float32, (70, VOCAB))
    torch.testing.assert_close(logits.double(), expected, atol=1e-4, rtol=0)
    runner.forward([work(ids[:33], first=0)])
    for at in range(33, 50):
        (logits,) = runner.forward([work([ids[at]], held=at)])
        torch.testing.assert_close(logits[0].double(), expected[at], atol=1e-4, rtol=0)


@pytest.mark.parametrize(("kv_cache_dtype", "bound"), [("float32", 1e-4), ("bfloat16", 0.05), ("int8", 0.1)])
def test_the_cache_costs_no_more_than_its_precision(kv_cache_dtype, bound, tiny):
    module, ids = decoder(CONFIGS["llama"]), some_ids(50)
    runner = NativeRunner(packed(module, tiny), 8, kv_cache_dtype)
    (logits,) = runner.forward([work(ids)])
    error = (logits.double() - exact(module, ids)).abs().max()
    assert error < bound
    if kv_cache_dtype != "float32":
        assert error > 1e-4  # it was really stored in less


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_our_own_formats_equal_their_dequantized_weights(bits, tiny):
    module = decoder(config(*(LayerSpec(AttentionSpec(), FeedForwardSpec(64)),) * 2))
    model = packed(module, tiny)
    matrices = {name: part for name, part in module.named_modules() if isinstance(part, Linear)}
    for name, part in matrices.items():
        if name == "lm_head":
            continue
        weight = NativeWeight.from_codes(*quantize(part.weight.data, bits, 32), bits, 32)
        model.module.get_submodule(name).packed = weight
        part.weight.data = weight.dense()
    (logits,) = NativeRunner(model, 8, "float32").forward([work(some_ids(40))])
    expected = exact(module, some_ids(40))
    # what is left is the rounding of activations to 8 bits
    assert (logits.double() - expected).norm() < 0.03 * expected.norm()


@pytest.mark.parametrize("kv_cache_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("name", ["gemma", "experts", "shared keys", "tracks, delta"])
def test_logits_are_the_same_bits_whatever_the_cuts_and_the_company(name, kv_cache_dtype, tiny):
    model, ids = packed(decoder(CONFIGS[name]), tiny), some_ids(60)
    (alone,) = NativeRunner(model, 64, kv_cache_dtype).forward([work(ids)])

    @given(st.lists(st.integers(1, 59), max_size=4, unique=True), st.integers(0, 3), st.integers(0, 1000))
    @settings(max_examples=12, deadline=None)
    def check(cuts, company, seed):
        runner = NativeRunner(model, 64, kv_cache_dtype)
        pieces = []
        cuts = [0, *sorted(cuts), 60]
        for begin, end in pairwise(cuts):
            others = [work(some_ids(7 + 13 * i, seed + i), first=10 * (i + 1), outputs=[0]) for i in range(company)]
            place = seed % (company + 1)
            others.insert(place, work(ids[begin:end], held=begin))
            pieces.append(runner.forward(others)[place])
        assert torch.equal(torch.cat(pieces), alone)

    check()


@pytest.mark.parametrize("name", ["shared keys", "tracks, mean", "tracks, delta"])
def test_only_the_outputs_that_are_asked_for_are_given(name, tiny):
    runner, ids = NativeRunner(packed(decoder(CONFIGS[name]), tiny), 16), some_ids(40)
    (every,) = runner.forward([work(ids)])
    some, none, last = runner.forward(
        [work(ids, outputs=[0, 3, 39]), work(ids, first=4, outputs=[]), work(ids, first=8, outputs=[39])]
    )
    assert torch.equal(some, every[[0, 3, 39]])
    assert none.shape == (0, VOCAB)
    assert torch.equal(last, every[[39]])
    (after,) = runner.forward([work([5], held=40, first=4)])
    (again,) = runner.forward([work([5], held=40, first=8)])
    assert torch.equal(after, again)
    last.zero_()  # memory of its own
    assert torch.equal(runner.forward([work(ids, outputs=[39])])[0], every[[39]])


def test_a_pass_that_stops_early_and_goes_on_equals_a_whole_one(tiny):
    module, ids = decoder(CONFIGS["shared keys"]), some_ids(20)
    runner = NativeRunner(packed(module, tiny), 16)
    whole, other = runner.forward([work(ids), work(ids[:5], first=8)])
    residual, halfway = torch.zeros(20, WIDTH), torch.zeros(20, WIDTH)
    early, beside = runner.forward([work(ids, first=2, depth=2, residual=residual), work(ids[:5], first=8)])
    assert torch.equal(beside, other)
    with torch.no_grad():
        double = copy.deepcopy(module).double()
        x = double.forward_layers(double.embed(torch.tensor([ids])), NoCache(), layers=range(2))
        expected = double.lm_head(double.norm(x))
    torch.testing.assert_close(residual.double(), x[0], atol=1e-4, rtol=0)
    torch.testing.assert_close(early.double(), expected[0], atol=1e-4, rtol=0)
    (third,) = runner.forward([work(ids, first=2, depth=3, resume=2, residual=halfway.copy_(residual))])
    assert not torch.equal(third, early)
    assert not torch.equal(halfway, residual)
    for entered, layer in ((residual, 2), (halfway, 3)):
        kept = entered.clone()
        (resumed,) = runner.forward([work(ids, first=2, resume=layer, residual=entered)])
        assert torch.equal(resumed, whole)
        assert torch.equal(entered, kept)
    (unasked,) = runner.forward([work(ids, first=2, depth=2)])
    assert torch.equal(unasked, early)


@pytest.mark.parametrize("name", ["tracks, mean", "tracks, delta"])
def test_tracks_are_computed_in_whole_blocks(name, tiny):
    module, ids = decoder(CONFIGS[name]), some_ids(150)  # more than go through a layer together
    runner = NativeRunner(packed(module, tiny), 32)
    (whole,) = runner.forward([work(ids)])
    torch.testing.assert_close(whole.double(), exact(module, ids), atol=1e-4, rtol=0)
    residual = torch.zeros(150, WIDTH)
    (early,) = runner.forward([work(ids, first=12, depth=6, residual=residual)])
    with torch.no_grad():
        double = copy.deepcopy(module).double()
        x = double.forward_layers(double.embed(torch.tensor([ids])), NoCache(), layers=range(6))
        expected = double.lm_head(double.norm(x))[0]
    torch.testing.assert_close(early.double(), expected, atol=1e-4, rtol=0)
    (resumed,) = runner.forward([work(ids, first=12, resume=6, residual=residual)])
    assert torch.equal(resumed, whole)
    for depth in (1, 2, 7):
        with pytest.raises(InvalidArgument, match=f"layers 0 to {depth} of tracks that are joined after every 6"):
            runner.forward([work(ids, depth=depth)])


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read on Linux")
def test_memory_of_blocks_is_given_back(tiny):
    runner = NativeRunner(packed(decoder(CONFIGS["llama"]), tiny), 4000)
    full = torch.full((4000, runner.block_bytes), 3, dtype=torch.uint8)
    runner.write(range(4000), full)
    assert runner.block_bytes * 4000 > 30_000_000
    before = memory.resident()
    runner.give_back([*range(1000), *range(1500, 3999)])
    assert before - memory.resident() > 0.9 * 3499 * runner.block_bytes
    assert torch.equal(runner.read([*range(1000, 1500), 3999]), full[:501])  # their neighbors are as they were
    (logits,) = runner.forward([work(some_ids(40))])
    assert torch.equal(logits, NativeRunner(runner.model, 4).forward([work(some_ids(40))])[0])


def low_rank(module: Decoder, rank: int, seed: int, start: int = 0) -> Adapter:
    generator = torch.Generator().manual_seed(seed)
    changes = {}
    for name, layer in module.named_modules():
        if isinstance(layer, Linear) and name != "lm_head" and ".experts." not in name and not name.endswith(".gate"):
            down = torch.randn(rank, layer.inputs, generator=generator) / layer.inputs**0.5
            up = torch.randn(layer.outputs - start, rank, generator=generator) / 2
            changes[layer] = (LowRankUpdate(down, up, start), *([LowRankUpdate(down[:1], up[:8, :1])] if start else []))
    return Adapter(f"adapter {seed}", changes)


@pytest.mark.parametrize("name", ["biases", "tracks, mean"])
def test_adapters_work_on_their_own_sequences(name, tiny):
    module = decoder(CONFIGS[name])
    model = packed(module, tiny)
    runner = NativeRunner(model, 32)
    ours = [low_rank(model.module, 3, 1), low_rank(model.module, 2, 2, start=4)]
    double = copy.deepcopy(module).double()
    ids = some_ids(20)
    expected = [exact(module, ids)]
    for adapter in ours:
        theirs = {id(model.module.get_submodule(name)): layer for name, layer in double.named_modules() if name}
        changes = {
            theirs[id(layer)]: tuple(LowRankUpdate(p.down.double(), p.up.double(), p.start) for p in parts)
            for layer, parts in adapter.changes.items()
        }
        with torch.no_grad():
            shares = [(Adapter(adapter.name, changes), slice(None))]
            expected.append(double(torch.tensor([ids]), adapters=shares)[0])
    adapters = [None, *ours]
    inputs = [work(ids, first=4 * i, adapter=adapters[i % 3]) for i in range(5)]
    for index, logits in enumerate(runner.forward(inputs)):
        torch.testing.assert_close(logits.double(), expected[index % 3], atol=2e-4, rtol=0)
    assert (expected[0] - expected[1]).abs().max() > 0.1
    (alone,) = runner.forward([work(ids, first=20, adapter=ours[1])])
    assert torch.equal(alone, logits if index % 3 == 2 else runner.forward(inputs)[2])


def test_what_was_made_for_an_adapter_goes_with_it(tiny):
    runner = NativeRunner(packed(decoder(CONFIGS["llama"]), tiny), 8)
    adapter = low_rank(runner.model.module, 2, 0)
    runner.forward([work([1, 2], adapter=adapter)])
    kept = weakref.ref(runner._adapters[adapter])
    del adapter
    gc.collect()
    assert kept() is None
    stranger = low_rank(decoder(CONFIGS["llama"]), 2, 0)
    with pytest.raises(AdapterMismatch, match="changes layers that are not of this model"):
        runner.forward([work([1, 2], adapter=stranger)])


def test_an_adapter_of_another_width_is_refused(tiny):
    runner = NativeRunner(packed(decoder(CONFIGS["llama"]), tiny), 8)
    layer = runner.model.module.layers[0].self_attn.q_proj
    narrow = Adapter("narrow", {layer: (LowRankUpdate(torch.ones(2, WIDTH - 1), torch.ones(layer.outputs, 2)),)})
    with pytest.raises(InvalidArgument, match="change 0 of layer 0"):
        runner.forward([work([1, 2], adapter=narrow)])


@pytest.mark.parametrize("kv_cache_dtype", ["float32", "bfloat16", "int8"])
def test_blocks_are_copied_read_and_written_back(kv_cache_dtype, tiny):
    model, ids = packed(decoder(CONFIGS["llama"]), tiny), some_ids(37)
    runner, other = NativeRunner(model, 8, kv_cache_dtype), NativeRunner(model, 8, kv_cache_dtype)
    runner.forward([work(ids, outputs=[])])
    (expected,) = runner.forward([ModelInput([3], 37, [0, 1, 2], [0])])
    runner.copy(2, 7)
    runner.copy(0, 5)
    assert torch.equal(runner.forward([ModelInput([3], 37, [5, 1, 7], [0])])[0], expected)
    data = runner.read([5, 1, 7])
    assert (data.dtype, data.shape) == (torch.uint8, (3, runner.block_bytes))
    other.write([2, 0, 4], data)
    assert torch.equal(other.forward([ModelInput([3], 37, [2, 0, 4], [0])])[0], expected)
    assert runner.read([]).shape == (0, runner.block_bytes)


def test_a_long_sequence_grows_the_tables_of_rotations(tiny):
    module, ids = decoder(CONFIGS["llama"]), some_ids(2100)
    runner = NativeRunner(packed(module, tiny), 140)
    (first,) = runner.forward([work(ids[:10])])
    (logits,) = runner.forward([work(ids, outputs=[5, 2099])])
    torch.testing.assert_close(logits[1].double(), exact(module, ids)[2099], atol=1e-4, rtol=0)
    assert torch.equal(logits[0], first[5])


@pytest.mark.parametrize(("kv_cache_dtype", "size"), [("float32", 4), ("bfloat16", 2), ("int8", 1)])
def test_a_block_takes_what_its_numbers_take(kv_cache_dtype, size, tiny):
    model = packed(decoder(CONFIGS["shared keys"]), tiny)
    scales = (
        2 * 2 * 2 * BLOCK_SIZE * 4 if kv_cache_dtype == "int8" else 0
    )  # 2 layers with keys, 2 kv heads, keys and values
    runner = NativeRunner(model, 3, kv_cache_dtype)
    assert runner.block_bytes == 2 * 2 * 2 * BLOCK_SIZE * 16 * size + scales
    assert NativeRunner.block_bytes_of(model, kv_cache_dtype) == runner.block_bytes


def test_memory_of_the_pool_is_taken_when_it_is_used(tiny):
    import psutil

    model = packed(decoder(CONFIGS["llama"]), tiny)
    before = psutil.Process().memory_info().rss
    runner = NativeRunner(model, 400_000)
    assert runner.blocks * runner.block_bytes > 3 << 30
    runner.forward([work(some_ids(100))])
    assert psutil.Process().memory_info().rss - before < 50 << 20
    runner.close()
    assert runner.blocks == 0
    for use in (lambda: runner.read([]), lambda: runner.forward([work([1])])):
        with pytest.raises(InvalidArgument, match="closed"):
            use()


def test_a_pool_that_no_memory_holds_is_a_typed_error(tiny):
    with pytest.raises(NotEnoughMemory, match="blocks of"):
        NativeRunner(packed(decoder(CONFIGS["llama"]), tiny), 1 << 48)


def test_the_description_is_freed_with_the_runner(tiny, monkeypatch):
    freed = []
    monkeypatch.setattr(native.Native, "model_free", lambda _, handle: freed.append(handle))
    runner = NativeRunner(packed(decoder(CONFIGS["llama"]), tiny), 1)
    handle = runner._decoder.handle
    del runner
    gc.collect()
    assert freed == [handle]
    monkeypatch.undo()
    native.library().model_free(handle)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (ModelInput([], 0, [0], []), "0 new tokens after 0 older"),
        (ModelInput([1], -1, [0], []), "1 new tokens after -1"),
        (ModelInput([1] * 17, 0, [0], []), "17 new tokens after 0 older ones cannot be computed with 1 blocks of 16"),
        (ModelInput([1], 16, [0], []), "with 1 blocks"),
        (ModelInput([1], 0, [4], [0]), "block 4"),
        (ModelInput([1], 0, [-1], [0]), "block -1"),
        (ModelInput([VOCAB], 0, [0], [0]), f"token {VOCAB} is not"),
        (ModelInput([-1], 0, [0], [0]), "token -1 is not"),
        (ModelInput([1 << 40], 0, [0], [0]), "does not fit into 32 bits"),
        (ModelInput([1, 2], 0, [0], [2]), r"outputs \[2\] were asked for of 2 tokens"),
        (ModelInput([1, 2], 0, [0], [-1]), r"outputs \[-1\]"),
        (ModelInput([1, 2], 0, [0], [1, 0]), "out of order"),
        (ModelInput([1], 0, [0], [0], depth=3), "layers 0 to 3 of 2"),
        (ModelInput([1], 0, [0], [0], depth=0), "layers 0 to 0 of 2"),
        (ModelInput([1], 0, [0], [0], resume=1), "needs the residual"),
        (
            ModelInput([1], 0, [0], [0], resume=1, residual=torch.ones(2, WIDTH)),
            r"shape \(2, 64\), its tokens need \(1, 64\)",
        ),
    ],
)
def test_impossible_work_is_refused_and_changes_nothing(bad, message, tiny):
    runner = NativeRunner(packed(decoder(CONFIGS["llama"]), tiny), 4)
    runner.forward([work(some_ids(20))])
    before = runner.read(range(4))
    with pytest.raises(InvalidArgument, match=message):
        runner.forward([work([1, 2, 3], first=3), bad])
    assert torch.equal(runner.read(range(4)), before)


def test_impossible_blocks_are_refused(tiny):
    runner = NativeRunner(packed(decoder(CONFIGS["llama"]), tiny), 4)
    data = runner.read([0])
    for use in (
        lambda: runner.copy(0, 4),
        lambda: runner.copy(-1, 0),
        lambda: runner.read([0, 4]),
        lambda: runner.write([4], data),
        lambda: runner.write([0, 1], data),
        lambda: runner.write([0], data[:, :-1]),
    ):
        with pytest.raises(InvalidArgument, match="blocks"):
            use()


def test_models_that_the_kernels_cannot_compute_are_told_apart(tiny, monkeypatch):
    model = packed(decoder(CONFIGS["llama"]), tiny)
    for arguments, message in (
        ((0,), "blocks must be at least 1, got 0"),
        ((4, "float16"), "kv_cache_dtype must be 'auto', 'float32', 'bfloat16' or 'int8', got 'float16'"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            NativeRunner(model, *arguments)
    assert not NativeRunner.supports(tiny)
    with pytest.raises(InvalidArgument, match="not packed for the native kernels"):
        NativeRunner(tiny, 4)
    half = replace(tiny, network=copy.deepcopy(model.module))
    half.module.norm.weight.data = half.module.norm.weight.data.bfloat16()
    assert not NativeRunner.supports(half)
    monkeypatch.setattr(native, "library", lambda: None)
    fused = packed(decoder(CONFIGS["llama"]), tiny)
    monkeypatch.undo()
    assert not NativeRunner.supports(fused)
    monkeypatch.setattr(native, "library", lambda: None)
    assert not NativeRunner.supports(model)
    with pytest.raises(InvalidArgument, match="native kernels are not available"):
        NativeRunner(model, 4)


def test_the_real_model_equals_torch(model):
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = model.template.encode(question)
    runner = NativeRunner(model, 16)
    assert runner.kv_cache_dtype == "float32"
    with torch.no_grad():
        expected = model.module(torch.tensor([ids]))[0]
    (logits,) = runner.forward([work(ids)])
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=0)
    answer = [int(logits[-1].argmax())]
    for _ in range(8):
        (logits,) = runner.forward([work(answer[-1:], held=len(ids) + len(answer) - 1)])
        answer.append(int(logits[0].argmax()))
    assert model.tokenizer.decode(answer).startswith("The capital of France is Paris.")


def test_a_decoder_stays_where_it_is_when_the_process_ends(tiny, monkeypatch):
    made, finalize = [], weakref.finalize
    monkeypatch.setattr(weakref, "finalize", lambda *args: made.append(finalize(*args)) or made[-1])
    runner = NativeRunner(packed(Decoder(CONFIGS["llama"]).initialize(seed=0), tiny), 2)
    assert made, "it is freed with the runner"
    assert not any(one.atexit for one in made), "the thread of an engine may still be inside"
    del runner
