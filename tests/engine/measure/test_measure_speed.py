"""Bytes and bandwidth: counts against an independent one, the limit's arithmetic, and what is refused."""

import gguf
import pytest
import torch
from hypothesis import given, settings, strategies as st

from pippin.core import device, native
from pippin.core.errors import ContextOverflow, InvalidArgument
from pippin.engine import Engine
from pippin.engine.measure import measure_speed
from pippin.language import Decoder, DecoderConfig, LayerSpec
from pippin.nn.attention.attention import AttentionSpec
from pippin.nn.feedforward.feedforward import FeedForwardSpec


def decoder(*layers, **settings):
    config = DecoderConfig(
        "llama",
        100,
        16,
        layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        **settings,
    )
    return Decoder(config).initialize(seed=0)


# --- weights ----------------------------------------------------------------------------------------------------------


def test_an_unpacked_decoder_reads_its_parameters_once_and_one_row_of_the_embedding():
    module = decoder(*[LayerSpec(AttentionSpec(), FeedForwardSpec(24))] * 2, tie_word_embeddings=False)
    numbers = sum(parameter.numel() for parameter in module.parameters())
    assert measure_speed.weight_bytes(module) == 4 * (numbers - 99 * 16)


def test_a_tied_embedding_counts_as_the_output_matrix():
    module = decoder(LayerSpec(AttentionSpec(), FeedForwardSpec(24)))
    numbers = sum(parameter.numel() for parameter in module.parameters())  # the tied one once
    assert measure_speed.weight_bytes(module) == 4 * (numbers + 16)


def test_of_a_mixture_only_the_experts_that_a_token_uses_count():
    module = decoder(
        LayerSpec(AttentionSpec(), FeedForwardSpec(24, num_experts=8, num_experts_per_tok=2)), tie_word_embeddings=False
    )
    expert = 3 * 16 * 24
    numbers = sum(parameter.numel() for parameter in module.parameters())
    assert measure_speed.weight_bytes(module) == 4 * (numbers - 99 * 16 - 6 * expert)


def test_packed_weights_count_as_the_file_stores_them(default_model_path, model_in_blocks):
    """A file of Q4_1 blocks, counted by the gguf library: the kernels change the order of bytes, not their number."""
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(default_model_path).tensors}
    row = tensors["token_embd.weight"].n_bytes // model_in_blocks.config.vocab_size
    stored = sum(int(tensor.n_bytes) for tensor in tensors.values())
    assert measure_speed.weight_bytes(model_in_blocks.module) == pytest.approx(stored + row, rel=0.002)


@pytest.fixture(scope="module")
def model_in_blocks(default_model_path):
    import pippin

    if native.library() is None:
        pytest.skip(f"without native kernels weights are dequantized: {native.unavailable_reason()}")
    return pippin.load(default_model_path, device="cpu")


# --- cache ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kv_cache_dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_a_cache_is_read_as_large_as_its_tensors_are(kv_cache_dtype, size):
    config = decoder(*[LayerSpec(AttentionSpec(), FeedForwardSpec(24))] * 3).config
    keys = torch.empty(3, 2, config.num_key_value_heads, 10, config.head_dim, dtype=getattr(torch, kv_cache_dtype))
    assert measure_speed.cache_bytes(config, kv_cache_dtype, 10) == keys.nbytes == 3 * 2 * 2 * 10 * 8 * size


def test_eight_bits_have_a_scale_for_each_token_and_head():
    config = decoder(LayerSpec(AttentionSpec(), FeedForwardSpec(24))).config
    assert measure_speed.cache_bytes(config, "int8", 10) == 10 * 2 * 2 * (8 + 4)


def test_a_window_shows_its_tokens_and_a_shared_layer_reads_nothing_new():
    feedforward = FeedForwardSpec(24)
    wide, narrow = LayerSpec(AttentionSpec(), feedforward), LayerSpec(AttentionSpec(window=4), feedforward)
    per_token = 2 * 2 * 8 * 4
    assert measure_speed.cache_bytes(decoder(wide, narrow).config, "float32", 10) == (10 + 3) * per_token
    sharing = LayerSpec(AttentionSpec(kv_source=0), feedforward)
    assert measure_speed.cache_bytes(decoder(wide, sharing).config, "float32", 10) == 10 * per_token
    # the layer that owns the keys looks at three of them, the one that shares them at all
    assert measure_speed.cache_bytes(decoder(narrow, sharing).config, "float32", 10) == 10 * per_token


def test_the_mean_is_taken_over_the_tokens_after_the_first():
    config = decoder(LayerSpec(AttentionSpec(window=6), FeedForwardSpec(24))).config
    each = [measure_speed.cache_bytes(config, "bfloat16", held) for held in (4, 5, 6)]
    assert measure_speed.mean_cache_bytes(config, "bfloat16", prompt=4, answer=4) == sum(each) / 3


# --- the limit --------------------------------------------------------------------------------------------------------


@given(
    weights=st.integers(1, 10**12),
    cache=st.floats(0, 1e12),
    bandwidth=st.floats(1e6, 1e13),
    rate=st.floats(1e-3, 1e6),
)
@settings(deadline=None)
def test_the_limit_is_the_time_that_reading_takes(weights, cache, bandwidth, rate):
    limit = measure_speed.BandwidthLimit(weights, cache, bandwidth)
    seconds = weights / bandwidth + cache / bandwidth
    assert limit.tokens_per_second == pytest.approx(1 / seconds, rel=1e-9)
    assert limit.share(rate) == pytest.approx(rate * seconds, rel=1e-9)
    assert limit.share(limit.tokens_per_second) == pytest.approx(1.0)


def test_bandwidth_is_measured_with_kernels_and_without(monkeypatch):
    measured = measure_speed.read_bandwidth(1, size=2**24, repeats=2)
    monkeypatch.setattr(native, "library", lambda: None)
    threads = torch.get_num_threads()
    by_torch = measure_speed.read_bandwidth(1, size=2**24, repeats=2)
    assert torch.get_num_threads() == threads
    # between a slow memory card and the first-level cache of a large machine
    assert all(1e8 < bandwidth < 1e13 for bandwidth in (measured, by_torch))


@pytest.mark.parametrize("threads", [0, -1, device.threads() + 1])
def test_threads_that_there_are_no_cores_for_are_refused(threads):
    with pytest.raises(InvalidArgument, match=f"{threads} threads were requested; .* 1 to {device.threads()}"):
        measure_speed.read_bandwidth(threads)


def test_a_measurement_of_nothing_is_refused():
    with pytest.raises(InvalidArgument, match="size must be at least 1048576"):
        measure_speed.read_bandwidth(1, size=2**19)


# --- speed ------------------------------------------------------------------------------------------------------------


def test_speed_is_that_of_the_request(tiny):
    with Engine(tiny) as engine:
        found = measure_speed.measure_speed(
            engine, measure_speed.prompt_ids(tiny, 300), 20, stops=sorted(tiny.tokenizer.eos_ids)
        )
    assert len(found.token_ids) == 20
    assert found.answer_tokens_per_second == pytest.approx(19 / found.answer_seconds)
    assert found.first_token_seconds >= 300 / found.prompt_tokens_per_second > 0
    assert all(part >= 0 for part in found.profile)


def test_an_answer_does_not_end_before_its_time(tiny):
    """What a random model says again and again is taken away from it."""
    with Engine(tiny) as engine:
        prompt = measure_speed.prompt_ids(tiny, 30)
        (first, *_) = measure_speed.measure_speed(engine, prompt, 5).token_ids
        again = measure_speed.measure_speed(engine, prompt, 5, stops=[first])
    assert first not in again.token_ids
    assert len(again.token_ids) == 5


def test_what_cannot_be_measured_is_refused(tiny):
    with Engine(tiny) as engine:
        with pytest.raises(InvalidArgument, match="answer must be at least 2, got 1"):
            measure_speed.measure_speed(engine, [1, 2, 3], 1)
        with pytest.raises(InvalidArgument, match="the prompt is empty"):
            measure_speed.measure_speed(engine, [], 4)
        with pytest.raises(ContextOverflow):
            measure_speed.measure_speed(engine, [1] * 2048, 4)


@pytest.mark.parametrize("count", [1, 7, 500])
def test_a_prompt_has_as_many_tokens_as_asked_for(tiny, count):
    ids = measure_speed.prompt_ids(tiny, count)
    assert len(ids) == count
    assert tiny.tokenizer.decode(ids).startswith("The old orchard"[:count])
