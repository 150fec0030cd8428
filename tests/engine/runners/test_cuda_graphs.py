"""Steps in static shapes: unrecorded on the CPU, as graphs on a GPU; against the decoder without a cache."""

import random

import pytest
import torch

from pippin.engine.cache.paged_store import PagedStore
from pippin.engine.model_runner import ModelInput
from pippin.engine.runners.cuda_graphs import DecodeSteps, can_record, shape_of
from pippin.engine.runners.torch_runner import TorchRunner
from pippin.language import Decoder, DecoderConfig, LanguageModel, LayerSpec
from pippin.nn.attention.attention import AttentionSpec
from pippin.nn.feedforward.feedforward import FeedForwardSpec
from pippin.nn.lora import Adapter

GATED = FeedForwardSpec(48)
LAYERS = (
    LayerSpec(AttentionSpec(window=9), GATED),
    LayerSpec(AttentionSpec(rotary=None), GATED),
    LayerSpec(AttentionSpec(), GATED),
    LayerSpec(AttentionSpec(kv_source=2), GATED),
)


@pytest.fixture
def build(tiny):
    def make(device="cpu", layers=LAYERS, dtype=torch.float32):
        config = DecoderConfig(
            "llama",
            97,
            32,
            layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=512,
        )
        module = Decoder(config).initialize(seed=1).requires_grad_(False).eval()
        for name, parameter in module.named_parameters():
            if "layers" in name and parameter.ndim == 2:
                parameter *= 8
        return LanguageModel("small", module.to(device, dtype), tiny.tokenizer, None)

    return make


def with_steps(model, blocks, kv_cache_dtype="float32"):
    """A runner that takes single tokens in static shapes, on any device."""
    runner = TorchRunner(model, blocks, kv_cache_dtype)
    if runner._steps is None:
        runner._store = PagedStore(model.config, blocks + 1, kv_cache_dtype, model.device, zeros=True)
        runner._steps = DecodeSteps(model, runner._store, blocks)
    return runner


def decode(runner, model, tolerance, seed=0, count=5):
    """Sequences of different length go on token by token, some of them now and then; compare with whole sequences."""
    rng = random.Random(seed)
    order = rng.sample(range(runner.blocks), runner.blocks)
    ids = [rng.choices(range(97), k=rng.choice([3, 17, 60, 260])) for _ in range(count)]
    tables = [[order.pop() for _ in range(-(-(len(part) + 12) // 16))] for part in ids]
    runner.forward([ModelInput(part, 0, table, []) for part, table in zip(ids, tables, strict=True)])
    for _ in range(8):
        going = rng.sample(range(count), rng.randrange(1, count + 1))
        inputs = []
        for i in going:
            ids[i].append(rng.randrange(97))
            inputs.append(ModelInput(ids[i][-1:], len(ids[i]) - 1, tables[i], [0]))
        for i, logits in zip(going, runner.forward(inputs), strict=True):
            with torch.inference_mode():
                expected = model.module(torch.tensor([ids[i]], device=model.device))[0, -1:]
            torch.testing.assert_close(logits, expected.float().cpu(), atol=tolerance, rtol=1e-4)


@pytest.mark.parametrize(("kv_cache_dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.006), ("int8", 0.02)])
def test_static_steps_equal_whole_sequences(build, kv_cache_dtype, tolerance):
    model = build()
    decode(with_steps(model, 100, kv_cache_dtype), model, tolerance)


def test_steps_and_prompts_mix(build):
    """Single tokens, a prompt, and a token that leaves no logits, in one pass; the answers keep their order."""
    model = build()
    runner = with_steps(model, 8)
    ids = list(range(30))
    runner.forward([ModelInput(ids[:20], 0, [4, 2], []), ModelInput(ids[:5], 0, [1], [])])
    inputs = [
        ModelInput(ids[5:6], 5, [1], [0]),
        ModelInput(ids, 0, [0, 7], [29]),
        ModelInput(ids[20:21], 20, [4, 2], []),
    ]
    one, whole, silent = runner.forward(inputs)
    (after,) = runner.forward([ModelInput(ids[21:22], 21, [4, 2], [0])])
    with torch.inference_mode():
        expected = model.module(torch.tensor([ids]))[0]
    torch.testing.assert_close(torch.cat([one, after, whole]), expected[[5, 21, 29]], atol=1e-4, rtol=1e-4)
    assert silent.shape == (0, 97)


def test_idle_rows_of_a_shape_leave_no_trace(build):
    """Four sequences step, then three in the shape for four, when the block of the fourth belongs to another."""
    model = build()
    runner = with_steps(model, 4)
    runner.forward([ModelInput([1], 2, [block], [0]) for block in range(4)])
    runner.forward([ModelInput([5, 6, 7], 0, [3], [])])
    runner.forward([ModelInput([1], 2, [block], [0]) for block in range(3)])
    (logits,) = runner.forward([ModelInput([8], 3, [3], [0])])
    with torch.inference_mode():
        expected = model.module(torch.tensor([[5, 6, 7, 8]]))[0, -1:]
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)


def test_what_is_no_simple_step():
    assert can_record(ModelInput([1], 3, [0], [0]))
    residual = torch.zeros(1, 4)
    for model_input in (
        ModelInput([1, 2], 3, [0], [0]),
        ModelInput([1], 3, [0], []),
        ModelInput([1], 3, [0], [0], adapter=Adapter("a", {})),
        ModelInput([1], 3, [0], [0], depth=1),
        ModelInput([1], 3, [0], [0], residual=residual, resume=1),
    ):
        assert not can_record(model_input)


def test_shapes_hold_what_they_are_for():
    for sequences in range(1, 300):
        for tokens in (1, 16, 256, 257, 4096, 4097):
            batch, blocks = shape_of(sequences, tokens)
            assert sequences <= batch < 2 * sequences + 128
            assert tokens <= 16 * blocks < 2 * tokens + 257


def test_a_mixture_of_experts_is_not_recorded(build):
    routed = LayerSpec(AttentionSpec(), FeedForwardSpec(48, num_experts=4, num_experts_per_tok=2))
    assert not DecodeSteps.supports(build(layers=(routed,)))
    assert DecodeSteps.supports(build())


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("kv_cache_dtype", ["float32", "bfloat16", "int8"])
def test_recorded_steps_equal_whole_sequences(build, kv_cache_dtype):
    model = build("cuda")
    runner = TorchRunner(model, 300, kv_cache_dtype)
    for seed in range(4):
        decode(runner, model, 1e-3 if kv_cache_dtype == "float32" else 0.02, seed, count=7)
    assert runner._steps is not None
    assert runner._steps.record, "nothing was recorded"


@gpu
@pytest.mark.gpu
def test_the_gpu_agrees_with_the_cpu(build):
    ids = random.Random(0).choices(range(97), k=200)
    expected = build().module(torch.tensor([ids]))[0].detach()
    runner = TorchRunner(build("cuda", dtype=torch.bfloat16), 20)
    pieces = [
        runner.forward([ModelInput(ids[i : i + 64], i, range(20), range(len(ids[i : i + 64])))])[0]
        for i in (0, 64, 128, 192)
    ]
    assert (torch.cat(pieces) - expected).abs().max() < 0.25 * expected.std()
