"""Requests whose sequences are kept in bounded caches: the same answers alone, beside others, and turn after turn."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
import torch

from pippin.core import native
from pippin.core.errors import (
    ContextOverflow,
    GenerationError,
    InvalidArgument,
    NotEnoughMemory,
    Overloaded,
    UnsupportedModel,
)
from pippin.engine import Engine, Finished, Request, SamplingOptions
from pippin.engine.kv_eviction import H2O, KeyDiff, Probe, SnapKV, StreamingLLM
from pippin.engine.speculation import Speculation
from pippin.language import Decoder, DecoderConfig, LanguageModel, LayerSpec
from pippin.nn.attention.attention import AttentionSpec, LatentSpec
from pippin.nn.feedforward.feedforward import FeedForwardSpec

POLICIES = [StreamingLLM, H2O, SnapKV, KeyDiff, partial(Probe, token_ids=tuple(range(60, 95)))]
SMALL = {"budget": 80, "block_size": 32, "recent_tokens": 20}
KERNELS = pytest.mark.skipif(native.library() is None, reason="the native kernels are not built")


def model_of(tiny, *, pack, window=None):
    """Two layers, the first of which has a window if one is given."""
    layers = tuple(LayerSpec(AttentionSpec(window=each), FeedForwardSpec(48)) for each in (window, None))
    config = DecoderConfig(
        "llama",
        260,
        32,
        layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=2048,
        embedding_scale=3.0,
    )
    module = Decoder(config).initialize(seed=1).requires_grad_(False).eval()
    for name, parameter in module.named_parameters():
        if "_proj" in name:
            parameter *= 8
    return LanguageModel("random", module.pack() if pack else module, tiny.tokenizer, None)


@pytest.fixture(
    params=[
        pytest.param((True, None), marks=KERNELS),
        (False, None),
        pytest.param((True, 24), marks=KERNELS),
        (False, 24),
    ],
    ids=["native", "torch", "native, window", "torch, window"],
)
def model(tiny, request):
    pack, window = request.param
    return model_of(tiny, pack=pack, window=window)


def tokens(count, seed):
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(count)]


def answer(engine, prompt, count=12, **fields):
    options = SamplingOptions(max_tokens=count, temperature=0.0, logit_bias={256: -100.0, 257: -100.0, 258: -100.0})
    events = list(engine.stream(Request(prompt, options, **fields)))
    assert isinstance(events[-1], Finished)
    return [event.id for event in events[:-1]], events[-1]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_budget_that_is_enough_changes_no_answer(model, policy):
    prompt = tokens(300, 0)
    with Engine(model, max_num_seqs=2) as engine:
        cache = engine.bounded_cache(policy(budget=400))
        assert answer(engine, prompt, cache=cache)[0] == answer(engine, prompt)[0]


@pytest.mark.parametrize("policy", POLICIES)
def test_turn_after_turn_it_is_as_all_at_once(model, policy):
    with Engine(model, max_num_seqs=2, enable_prefix_caching=True) as engine:
        cache, text = engine.bounded_cache(policy(**SMALL)), []
        for turn in range(5):
            text += tokens(90, turn)
            found, finished = answer(engine, text, cache=cache)
            assert finished.cached_tokens == (len(text) - 90 - 1 if turn else 0)
            whole = answer(engine, text, cache=engine.bounded_cache(policy(**SMALL)))
            assert found == whole[0]
            assert whole[1].cached_tokens == 0
            assert all(sum(lengths) <= 2 * (80 + 32) for lengths in cache.lengths)
            text += found
        assert cache.token_ids == text[:-1]
        assert engine.stats().blocks_free + engine.stats().blocks_cached == engine.stats().blocks_total


def test_a_text_longer_than_the_pool_is_answered(model):
    with Engine(model, max_num_seqs=1, cache_tokens=160) as engine:
        with pytest.raises(ContextOverflow):
            engine.check(tokens(1000, 0), SamplingOptions())
        cache = engine.bounded_cache(SnapKV(budget=96, block_size=32))
        found, finished = answer(engine, tokens(1000, 0), cache=cache)
        assert len(found) == 12
        assert finished.prompt_tokens == 1000
        assert engine.prefill(tokens(1500, 1), cache=cache) == 1500
        found, finished = answer(engine, tokens(2500, 2), cache=cache)  # the model has 2,048 positions
        assert (len(found), finished.prompt_tokens) == (12, 2500)
        assert cache.num_slots < 2048


@KERNELS
@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("policy", POLICIES)
def test_it_is_the_same_alone_beside_others_and_preempted(tiny, policy, window):
    model = model_of(tiny, pack=True, window=window)
    prompts = [tokens(150 + 20 * each, each) for each in range(4)]
    with Engine(model, max_num_seqs=1) as engine:
        wanted = [answer(engine, each, 40, cache=engine.bounded_cache(policy(**SMALL)))[0] for each in prompts]
        plain = [answer(engine, each, 40)[0] for each in prompts]
    assert wanted != plain
    with Engine(model, max_num_seqs=8, cache_tokens=16 * 40, max_num_batched_tokens=50) as engine:

        def ask(number):
            priority, prompt = number % 3, prompts[number // 2]
            if number % 2:
                return answer(engine, prompt, 40, priority=5 + priority)[0]
            return answer(engine, prompt, 40, priority=priority, cache=engine.bounded_cache(policy(**SMALL)))[0]

        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(ask, range(8)))
        assert found[::2] == wanted
        assert found[1::2] == plain
        assert engine.stats().preempted


def test_a_prompt_that_goes_on_from_something_else_begins_anew(model):
    with Engine(model, max_num_seqs=2) as engine:
        cache = engine.bounded_cache(StreamingLLM(**SMALL))
        answer(engine, tokens(200, 0), cache=cache)
        # of the last prompt nothing was given up, so its answer alone is forgotten
        for prompt, cached in ((tokens(250, 1), 0), (tokens(100, 0), 0), (tokens(100, 0), 99)):
            found, finished = answer(engine, prompt, cache=cache)
            assert finished.cached_tokens == cached
            assert found == answer(engine, prompt, cache=engine.bounded_cache(StreamingLLM(**SMALL)))[0]
        _, finished = answer(engine, [*prompt, *found, 7], cache=cache, owner="another")
        assert finished.cached_tokens == 0


def test_what_was_kept_in_part_is_never_given_to_others(model):
    with Engine(model, max_num_seqs=2) as engine:
        answer(engine, tokens(200, 0), cache=engine.bounded_cache(StreamingLLM(**SMALL)))
        found, finished = answer(engine, tokens(200, 0))
        assert finished.cached_tokens == 0
    with Engine(model, max_num_seqs=2) as engine:
        assert answer(engine, tokens(200, 0))[0] == found


def test_after_a_failure_it_begins_anew(model, monkeypatch):
    with Engine(model, max_num_seqs=2) as engine:
        cache = engine.bounded_cache(StreamingLLM(**SMALL))
        forward = engine._runner.forward
        monkeypatch.setattr(engine._runner, "forward", lambda inputs: (_ for _ in ()).throw(RuntimeError("broken")))
        with pytest.raises(GenerationError):
            answer(engine, tokens(200, 0), cache=cache)
        monkeypatch.setattr(engine._runner, "forward", forward)
        assert answer(engine, tokens(200, 0), cache=cache)[0]
        assert engine.stats().blocks_free + engine.stats().blocks_cached == engine.stats().blocks_total


def test_a_fault_of_the_engine_frees_the_cache(tiny, monkeypatch):
    engine = Engine(model_of(tiny, pack=False), max_num_seqs=2)
    cache = engine.bounded_cache(StreamingLLM(**SMALL))
    monkeypatch.setattr("threading.excepthook", lambda args: None)
    monkeypatch.setattr(engine._scheduler, "plan", lambda drafts: (_ for _ in ()).throw(RuntimeError("broken")))
    monkeypatch.setattr("pippin.engine.loop.EngineLoop._fail", lambda self, error: (_ for _ in ()).throw(error))
    with pytest.raises(GenerationError, match="the engine failed"):
        answer(engine, tokens(200, 0), cache=cache)
    assert cache.idle.wait(10)
    assert not cache.num_tokens
    with pytest.raises(Overloaded):
        answer(engine, tokens(200, 0), cache=cache)
    assert not cache.in_use
    engine.close()
    for thread in threading.enumerate():  # its error reaches the hook last of all
        if thread.name == "pippin-engine":
            thread.join(10)


def test_a_cancelled_request_leaves_what_it_computed(model):
    with Engine(model, max_num_seqs=2) as engine:
        cache, prompt = engine.bounded_cache(StreamingLLM(**SMALL)), tokens(200, 0)
        stream = engine.stream(Request(prompt, SamplingOptions(max_tokens=500, temperature=0.0), cache=cache))
        next(stream)
        with pytest.raises(InvalidArgument, match="another request holds this cache"):
            answer(engine, prompt, cache=cache)
        stream.close()
        while cache.in_use:
            engine.stats()
        assert cache.token_ids[:200] == prompt
        assert answer(engine, [*cache.token_ids, 3, 4], cache=cache)[1].cached_tokens >= 200


def test_what_a_bounded_cache_cannot_do_is_refused(tiny, model):
    with Engine(model, max_num_seqs=2, cache_tokens=320) as engine, Engine(model, max_num_seqs=1) as other:
        with pytest.raises(NotEnoughMemory, match="take a smaller budget"):
            engine.bounded_cache(StreamingLLM(budget=1000))
        cache = engine.bounded_cache(StreamingLLM(budget=100, block_size=32))
        with pytest.raises(InvalidArgument, match="belongs to another engine"):
            answer(other, [1, 2], cache=cache)
        with pytest.raises(InvalidArgument, match="there are no drafts"):
            answer(engine, [1, 2], cache=cache, speculation=Speculation("ngram"))
        with pytest.raises(InvalidArgument, match="there are no drafts"):
            answer(engine, [1, 2], cache=cache, return_hidden_states=True)
        assert not cache.in_use
    latent = AttentionSpec(latent=LatentSpec(8, 4, 4, 4))
    layers = (LayerSpec(latent, FeedForwardSpec(48)),) * 2
    changed = replace(model.config, layers=layers, head_dim=12, num_key_value_heads=1)
    module = Decoder(changed).initialize(seed=0).eval()
    with Engine(LanguageModel("latent", module, tiny.tokenizer, None)) as engine, pytest.raises(UnsupportedModel):
        engine.bounded_cache(StreamingLLM(budget=100))
    assert torch.is_inference_mode_enabled() is False
