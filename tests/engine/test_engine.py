"""The engine against a bare loop and transformers: the same answers, whoever else is being answered."""

import copy
import gc
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import SimpleQueue

import pytest
import torch

from pippin.core.errors import (
    ContextOverflow,
    CorruptedFile,
    DecodingFailure,
    GenerationError,
    InvalidArgument,
    ModelNotFound,
    Overloaded,
    SchemaError,
)
from pippin.engine import Engine, Finished, Request, SamplingOptions, shared_engine
from pippin.engine.cache.prefix_tree import CacheKey
from pippin.engine.grammar.constraint import Grammar
from pippin.language import Decoder, LanguageModel, LayerSpec
from pippin.nn.attention import AttentionSpec
from pippin.nn.feedforward import FeedForwardSpec
from pippin.nn.linear import Linear
from pippin.nn.lora import Adapter, LowRankUpdate
from pippin.nn.rotary import Rotary

from .fake import FakeRunner, right_answer

SAMPLED = {"temperature": 1.0, "top_p": 0.9}
ENDLESS = {"logit_bias": {256: -100}}


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(32, 127), k=length)


def collect(events):
    *tokens, last = events
    assert isinstance(last, Finished)
    return [token.id for token in tokens], "".join(token.text for token in tokens) + last.text, last


def ask(engine, ids, **fields):
    return collect(engine.stream(Request(ids, **{"options": SamplingOptions(max_tokens=20), **fields})))


def together(engine, requests, pause=0.0):
    """Send all requests, each from a thread of its own; their answers in order."""

    def one(request):
        time.sleep(random.Random(len(request.prompt)).random() * pause)
        return collect(engine.stream(request))

    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(one, requests))


@torch.no_grad()
def bare_greedy(model, ids, count):
    """The loop that needs no engine: whole sequences, no cache."""
    ids, start = list(ids), len(ids)
    for _ in range(count):
        ids.append(int(model.module(torch.tensor([ids]))[0, -1].argmax()))
        if ids[-1] in model.tokenizer.eos_ids:
            return ids[start:-1]
    return ids[start:]


def at_once(engine, requests):
    """Send all requests before the engine takes the first in; their answers in order."""
    with engine._loop._wake:
        streams = [engine.stream(request) for request in requests]
    return [collect(stream) for stream in streams]


def wait_until(condition, seconds=10.0):
    end = time.perf_counter() + seconds
    while not condition():
        assert time.perf_counter() < end, "it did not happen"
        time.sleep(0.001)


def is_idle(engine):
    stats = engine.stats()
    return stats.active == stats.waiting == 0


def slowed(engine, seconds=0.002):
    """Make each step take a while, so that what happens in between does."""
    step = engine._loop._step
    engine._loop._step = lambda: (time.sleep(seconds), step())[1]
    return engine


@pytest.fixture
def fake(monkeypatch):
    """Engines compute with the fake runner."""
    monkeypatch.setattr("pippin.engine.engine.make_runner", FakeRunner)
    monkeypatch.setattr("pippin.engine.cache_size.runner_class", lambda model: FakeRunner)


@pytest.fixture
def engine(tiny):
    with Engine(tiny, max_num_seqs=3, max_num_batched_tokens=32, cache_tokens=2048) as engine:
        yield engine


# --- the same tokens as without an engine -----------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 7, 64, 4096])
def test_greedy_equals_the_bare_loop_for_every_chunk_size(tiny, chunk):
    with Engine(tiny, max_num_batched_tokens=chunk) as engine:
        ids, _, last = ask(engine, prompt(0, 180))
    assert ids == bare_greedy(tiny, prompt(0, 180), 20)
    assert (last.prompt_tokens, last.answer_tokens) == (180, len(ids))
    assert 0 < last.prompt_seconds <= last.first_token_seconds <= last.total_seconds


def test_greedy_answers_in_a_batch_equal_transformers(tiny, tmp_path):
    from transformers import AutoModelForCausalLM

    tiny.save(tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    requests = [Request(prompt(i, 5 + 37 * i), SamplingOptions(max_tokens=10 + 5 * i)) for i in range(9)]
    with Engine(tiny, max_num_seqs=4, max_num_batched_tokens=20) as engine:
        answers = together(engine, requests, pause=0.05)
        again = together(engine, requests[:4])  # the second time nearly nothing of a prompt is computed
        stats = engine.stats()
        assert stats.prompt_tokens == sum(len(r.prompt) for r in [*requests, *requests[:4]])
        assert stats.cached_tokens >= sum(len(r.prompt) - 1 for r in requests[:4])
    for request, (ids, _, last) in zip([*requests, *requests[:4]], [*answers, *again], strict=True):
        with torch.no_grad():
            expected = reference.generate(
                torch.tensor([request.prompt]),
                max_new_tokens=request.options.max_tokens,
                do_sample=False,
                eos_token_id=256,
                pad_token_id=0,
            )[0, len(request.prompt) :].tolist()
        assert ids == [id for id in expected if id != 256]
        assert (last.prompt_tokens, last.answer_tokens) == (len(request.prompt), len(ids))


@pytest.mark.parametrize("how", ["alone", "together", "in pieces", "warm", "preempted"])
def test_the_real_model_writes_what_transformers_generates(model, reference, how):
    questions = ["What is the capital of France?", "Tell me about a river.", "Write a haiku about the sea."]
    prompts = [model.template.encode([{"role": "user", "content": text}]) for text in questions]
    fields = {"in pieces": {"max_num_batched_tokens": 5}, "preempted": {"cache_tokens": 96, "max_num_seqs": 3}}.get(
        how, {}
    )
    requests = [Request(ids, SamplingOptions(max_tokens=24)) for ids in prompts]
    with Engine(model, **{"cache_tokens": 1024, "max_num_seqs": 4} | fields) as engine:
        if how == "alone":
            answers = [collect(engine.stream(request)) for request in requests]
        elif how == "warm":
            together(engine, requests)
            answers = together(engine, requests)
            assert all(last.cached_tokens == len(ids) - 1 for ids, (*_, last) in zip(prompts, answers, strict=True))
        else:
            answers = at_once(engine, requests)
        assert (engine.stats().preempted > 0) == (how == "preempted")
    assert [ids for ids, _, _ in answers] == [reference(tuple(ids), 24) for ids in prompts]


@pytest.fixture(scope="module")
def reference(default_model_path, tmp_path_factory):
    """Greedy answers of transformers, which reads the same GGUF file, in float32."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("gguf")
    (folder / "model.gguf").symlink_to(default_model_path)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", dtype=torch.float32).eval()
    known = {}

    def greedy(ids, count):
        if ids not in known:
            with torch.no_grad():
                done = model.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False, pad_token_id=0)
            answer = done[0, len(ids) :].tolist()
            ends = model.generation_config.eos_token_id
            known[ids] = answer[:-1] if answer[-1] in (ends if isinstance(ends, list) else [ends, 2]) else answer
        return known[ids]

    return greedy


@pytest.mark.parametrize("chunk", [1, 7, 4096])
def test_a_seed_gives_the_same_text_whatever_else_runs(tiny, fake, chunk):
    extras = [{}, {"repetition_penalty": 1.3}, {"frequency_penalty": 1.0, "presence_penalty": 0.5}, {"top_k": 5}]
    requests = [
        Request(prompt(i, 60), SamplingOptions(max_tokens=25, seed=i, **SAMPLED, **extra))
        for i, extra in enumerate(extras)
    ]
    alone = [[token.id for token in right_answer(tiny, request)[0]] for request in requests]
    with Engine(tiny, max_num_seqs=4, max_num_batched_tokens=chunk, cache_tokens=512) as engine:
        assert [ids for ids, _, _ in together(engine, requests)] == alone
        assert [ids for ids, _, _ in together(engine, requests[::-1])] == alone[::-1]


@pytest.mark.parametrize("kv_cache_dtype", ["float32", "bfloat16", "int8"])
def test_native_answers_are_the_same_to_the_bit_whatever_else_happens(tiny, kv_cache_dtype):
    model = replace(tiny, network=copy.deepcopy(tiny.module).pack())
    options = [
        SamplingOptions(max_tokens=40, logprobs=2, temperature=1.0, seed=at, repetition_penalty=1.1, **ENDLESS)
        for at in range(5)
    ]
    requests = [Request([*prompt(9, 40), *prompt(at, 9 + 17 * at)], each) for at, each in enumerate(options)]
    continuations = [prompt(at, 7 * at + 1) for at in range(5)]

    def answers(together, **fields):
        with Engine(model, **{"cache_tokens": 2048, "kv_cache_dtype": kv_cache_dtype, **fields}) as engine:
            if not engine._runner.invariant:
                pytest.skip("no native kernels here")
            if together:
                with engine._loop._wake:  # so that all are there before the first step
                    streams = [engine.stream(request) for request in requests]
            else:
                streams = map(engine.stream, requests)
            tokens = [list(stream)[:-1] for stream in streams]
            scores = engine.score(requests[0].prompt, continuations)
            return (tokens, scores), engine.stats()

    alone, _ = answers(False, enable_prefix_caching=False)
    for fields in (
        {"max_num_batched_tokens": 7},
        {"max_num_batched_tokens": 64, "max_num_seqs": 5},
        {"max_num_seqs": 2, "enable_prefix_caching": False},
    ):
        assert answers(True, **fields)[0] == alone
    warm, stats = answers(False)
    assert warm == alone
    assert stats.cached_tokens >= 4 * 40
    small, stats = answers(True, cache_tokens=160, max_num_seqs=5, max_num_batched_tokens=24)
    assert small == alone
    assert stats.preempted > 0


def test_log_probabilities_in_a_batch_are_those_of_the_model(engine, tiny):
    options = SamplingOptions(max_tokens=6, logprobs=3, temperature=2.0, seed=0)
    requests = [Request(prompt(i, 20 + i), options) for i in range(3)]
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda request: list(engine.stream(request))[:-1], requests))
    for request, tokens in zip(requests, answers, strict=True):
        ids = [*request.prompt, *(token.id for token in tokens)]
        with torch.no_grad():
            logprobs = tiny.module(torch.tensor([ids]))[0].log_softmax(-1)
        for index, token in enumerate(tokens):
            row = logprobs[len(request.prompt) + index - 1]
            assert token.logprob == pytest.approx(float(row[token.id]), abs=1e-4)
            assert [id for id, _ in token.top_logprobs] == row.topk(3).indices.tolist()


def test_grammars_in_a_batch_always_parse_beside_free_text(tiny):
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "rows": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
        },
        "required": ["name", "rows"],
        "additionalProperties": False,
    }
    grammars = [Grammar.json_schema(schema), None, Grammar.regex(r"a{3}b+c?[0-9]{4}"), Grammar.choice(["yes", "no"])]
    requests = [
        Request(prompt(i, 30 + i), SamplingOptions(max_tokens=300, seed=i, temperature=1.0), grammars[i % 4])
        for i in range(8)
    ]
    with Engine(tiny, max_num_seqs=5, max_num_batched_tokens=16) as engine:
        answers = together(engine, requests, pause=0.02)
    for index, (_, text, last) in enumerate(answers):
        if index % 4 == 0:
            assert set(json.loads(text)) == {"name", "rows"}
            assert last.finish_reason == "stop"
        elif index % 4 != 1:
            assert requests[index].grammar.allows(text)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["windows and no positions", "shared keys", "experts", "norms everywhere"])
def test_every_kind_of_layer_works_in_a_batch(tiny, kind, packed):
    def layer(window=None, kv_source=None, rotary=Rotary(), **feedforward):
        return LayerSpec(AttentionSpec(window, rotary, kv_source), FeedForwardSpec(48, **feedforward))

    fields = {
        "windows and no positions": {"layers": (layer(window=16), layer(rotary=None), layer(window=16))},
        "shared keys": {"layers": (layer(), layer(window=20), layer(kv_source=1), layer(kv_source=0))},
        "experts": {"layers": (layer(num_experts=4, num_experts_per_tok=2), layer())},
        "norms everywhere": {"qk_norm": "head", "residual": "pre and post", "qkv_bias": True, "embedding_scale": 5.0},
    }[kind]
    module = Decoder(replace(tiny.config, **fields)).initialize(seed=1).eval()
    plain = LanguageModel(kind, module, tiny.tokenizer, None)
    requests = [Request(prompt(i, 10 + 40 * i), SamplingOptions(max_tokens=20, **ENDLESS)) for i in range(4)]
    expected = [bare_greedy(replace(plain, tokenizer=tiny.tokenizer), r.prompt, 20) for r in requests]
    continuations = [prompt(9, 3), prompt(8, 25), prompt(7, 1)]
    sums = [bare_score(plain, requests[3].prompt, each) for each in continuations]
    model = replace(plain, network=module.pack()) if packed else plain
    with Engine(model, max_num_seqs=3, max_num_batched_tokens=24, cache_tokens=1024) as engine:
        assert [ids[: len(right)] for (ids, _, _), right in zip(together(engine, requests), expected, strict=True)] == (
            expected
        )
        assert engine.score(requests[3].prompt, continuations) == pytest.approx(sums, abs=0.05 if packed else 1e-3)


@torch.no_grad()
def bare_score(model, ids, continuation):
    rows = model.module(torch.tensor([[*ids, *continuation]]))[0].double().log_softmax(-1)
    return sum(float(rows[at, id]) for at, id in enumerate(continuation, len(ids) - 1))


def test_what_a_grammar_forces_is_computed_in_one_step(engine):
    _, text, last = ask(engine, prompt(0, 10), grammar=Grammar.regex("the (yes|no), sir"))
    assert text in ("the yes, sir", "the no, sir")
    assert last.finish_reason == "stop"
    assert engine.stats().steps <= 4


def test_stop_strings_and_characters_of_several_bytes_come_whole_in_every_stream(tiny, fake):
    grammar = Grammar.regex("(?:naïve 日本語 🍏 END never){2}")
    requests = [Request(prompt(i, 10), SamplingOptions(stop=["END"]), grammar) for i in range(4)]
    with Engine(tiny, max_num_seqs=2) as engine, ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(lambda request: [event.text for event in engine.stream(request)], requests))
    for texts in parts:
        assert "".join(texts) == "naïve 日本語 🍏 "
        assert not any("\ufffd" in text for text in texts)


def test_the_last_tokens_of_the_context_can_be_used(tiny, fake):
    ids = [65] * (tiny.context_size - 3)
    with Engine(tiny, max_num_seqs=1) as engine:
        answer, _, last = ask(engine, ids, options=SamplingOptions(temperature=1.0, seed=0, **ENDLESS))
    assert (len(answer), last.finish_reason) == (3, "length")


def test_a_decode_step_takes_no_memory_that_grows_with_the_context(tiny):
    from pippin.engine.model_runner import ModelInput
    from pippin.engine.runners.torch_runner import TorchRunner

    def allocated(context: int) -> int:
        runner = TorchRunner(tiny, 126)
        table = range(126)
        runner.forward([ModelInput([7] * context, 0, table, ())])
        runner.forward([ModelInput([7], context, table, (0,))])
        with torch.profiler.profile(profile_memory=True) as profile:
            runner.forward([ModelInput([7], context + 1, table, (0,))])
        return sum(max(0, event.self_cpu_memory_usage) for event in profile.key_averages())

    # attention inputs in blocks of 512 keys; beyond one block nothing depends on the length
    assert allocated(1800) == allocated(600) > 0


# --- what was computed before -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0, 1, 15, 16, 31, 100, 179, 180])
def test_a_prompt_is_found_up_to_where_it_parts_from_earlier_ones(engine, tiny, keep):
    first = prompt(0, 180)
    ask(engine, first)
    other = [*first[:keep], 1, 2, 3]
    ids, _, last = ask(engine, other)
    assert last.cached_tokens == keep
    assert ids == bare_greedy(tiny, other, 20)
    assert engine.stats().prefix_hits == (keep > 0)


def test_the_second_turn_of_a_chat_computes_only_what_is_new(engine, tiny):
    opening = prompt(0, 200)
    ids, _, first = ask(engine, opening, options=SamplingOptions(max_tokens=10, **ENDLESS))
    together(engine, [Request(prompt(i, 150), SamplingOptions(max_tokens=5)) for i in (1, 2)])
    second = [*opening, *ids, *prompt(3, 20)]
    answer, _, last = ask(engine, second, options=SamplingOptions(max_tokens=5))
    # the last token of an answer is never computed
    assert (first.cached_tokens, last.cached_tokens) == (0, 209)
    assert answer == bare_greedy(tiny, second, 5)


def test_what_conversations_share_is_there_once_and_all_are_kept(tiny, fake):
    system = prompt(0, 96)
    short = SamplingOptions(max_tokens=2)
    with Engine(tiny, max_num_seqs=2, cache_tokens=2048) as engine:
        texts = [[*system, i, *prompt(i, 149)] for i in range(1, 6)]
        cached = [ask(engine, each, options=short)[2].cached_tokens for each in [*texts, *texts]]
        assert cached == [0, *4 * [96], *5 * [245]]
        stats = engine.stats()
        assert stats.cache_tokens_used <= 96 + 5 * (150 + 16)
        assert stats.blocks_cached == stats.blocks_total - stats.blocks_free


def test_requests_that_come_together_with_one_beginning_compute_it_once(tiny, fake):
    system = prompt(0, 320)
    requests = [Request([*system, *prompt(i, 20)], SamplingOptions(max_tokens=3)) for i in range(1, 5)]
    with Engine(tiny, max_num_seqs=4, max_num_batched_tokens=64, cache_tokens=2048) as engine:
        answers = at_once(engine, requests)
        computed = sum(count for each in engine._runner.passes for count, _ in each)
    assert [ids for ids, _, _ in answers] == [[t.id for t in right_answer(tiny, r)[0]] for r in requests]
    assert computed <= 320 + 4 * (20 + 3)
    assert sorted(last.cached_tokens for *_, last in answers) == [0, 320, 320, 320]


def test_the_least_recently_used_is_given_up_first(tiny, fake):
    short = SamplingOptions(max_tokens=1)
    prompts = [prompt(i, 50) for i in range(4)]
    with Engine(tiny, max_num_seqs=1, cache_tokens=14 * 16) as engine:  # room for three of them
        for each in [*prompts[:3], prompts[0], prompts[3]]:  # the fourth takes the place of the second
            ask(engine, each, options=short)
        found = [engine._scheduler.tree.match(engine._with_version(CacheKey("", None)), each, 49) for each in prompts]
        held = [16 * len(match.rows) + match.num_partial_tokens for match in found]
        assert held[0] == held[2] == held[3] == 49
        assert held[1] < 49


def test_prefill_ahead_of_time_is_found_by_the_request(engine):
    assert engine.prefill([]) == 0
    assert engine.prefill(prompt(0, 100)) == 100
    assert ask(engine, [*prompt(0, 100), 65], options=SamplingOptions(max_tokens=1))[2].cached_tokens == 100
    with pytest.raises(ContextOverflow):
        engine.prefill([65] * 5000)


def test_nothing_is_kept_without_reuse(tiny, fake):
    with Engine(tiny, max_num_seqs=2, enable_prefix_caching=False) as engine:
        for _ in range(2):
            assert ask(engine, prompt(0, 100))[2].cached_tokens == 0
        wait_until(lambda: is_idle(engine))
        assert engine.stats().cache_tokens_used == 0


def test_cancelling_during_the_prompt_keeps_what_was_computed(tiny, fake):
    cancel = threading.Event()
    with Engine(tiny, max_num_batched_tokens=32) as engine:
        forward = engine._runner.forward
        engine._runner.forward = lambda inputs: (cancel.set(), forward(inputs))[1]
        *_, last = engine.stream(Request(prompt(0, 180), cancel=cancel))
        assert last.finish_reason == "cancelled"
        assert ask(engine, prompt(0, 180))[2].cached_tokens == 32


def test_nothing_computed_for_one_owner_is_used_for_another(tiny, fake):
    ids, short = prompt(0, 100), SamplingOptions(max_tokens=1)
    with Engine(tiny) as engine:

        def cached(owner):
            return ask(engine, ids, options=short, owner=owner)[2].cached_tokens

        assert engine.prefill(ids, owner="ann") == 100
        assert cached("bob") == 0
        assert (cached("ann"), cached("bob")) == (99, 99)
        before = engine.stats().cached_tokens
        engine.score(ids, [[65]], owner="eve")
        assert engine.stats().cached_tokens == before
        engine.score(ids, [[65]], owner="eve")
        assert engine.stats().cached_tokens == before + 99


def test_what_was_computed_before_the_weights_changed_is_not_used(tiny):
    model = replace(tiny, network=copy.deepcopy(tiny.module))
    ids = prompt(0, 50)
    with Engine(model) as engine:
        before = ask(engine, ids)[0]
        assert ask(engine, ids)[2].cached_tokens == 49
        with torch.no_grad():
            for weight in model.module.parameters():
                weight.mul_(-2.0)
        after, _, last = ask(engine, ids)
        assert last.cached_tokens == 0
        assert after == bare_greedy(model, ids, 20) != before


def test_blocks_of_a_request_that_runs_while_the_weights_change_are_not_reused(tiny):
    model = replace(tiny, network=copy.deepcopy(tiny.module))
    ids = prompt(0, 50)
    with Engine(model) as engine:
        running = engine.stream(Request(ids, options=SamplingOptions(max_tokens=400, **ENDLESS)))
        next(running)  # its prompt is in the cache, and its blocks are held
        with torch.no_grad():
            for weight in model.module.parameters():
                weight.mul_(-2.0)
        for _ in range(2):
            next(running)
        scores = engine.prompt_logprobs(ids, 0)
        answer, _, last = ask(engine, ids)
        running.close()
        ask(engine, prompt(1, 20))  # what the closed request held is idle by now
        assert ask(engine, ids)[0] == answer == bare_greedy(model, ids, 20)
        assert last.cached_tokens == 1, "the first token, which was computed for the log-probabilities"
    with Engine(model) as cold:
        expected = cold.prompt_logprobs(ids, 0)
    assert [one.logprob for one in scores[1:]] == pytest.approx([one.logprob for one in expected[1:]], abs=1e-5)


def test_blocks_of_an_adapter_that_was_trained_meanwhile_are_not_reused(tiny):
    model = replace(tiny, network=copy.deepcopy(tiny.module), adapters={})
    layer = next(part for part in model.module.modules() if isinstance(part, Linear))
    outputs, inputs = layer.weight.shape
    update = LowRankUpdate(torch.randn(2, inputs), torch.randn(outputs, 2))
    model.adapters["task"] = Adapter("task", {layer: (update,)})
    ids = prompt(0, 50)
    with Engine(model) as engine:
        before = ask(engine, ids, adapter="task")[2]
        update.up.mul_(-3.0)
        first, second = (ask(engine, ids, adapter="task") for _ in range(2))
    with Engine(model) as cold:
        expected = ask(cold, ids, adapter="task")
    assert (before.cached_tokens, first[2].cached_tokens, second[2].cached_tokens) == (0, 0, 49)
    assert first[:2] == second[:2] == expected[:2]


def test_a_prompt_cache_holds_nothing_of_older_weights(tiny, tmp_path):
    model = replace(tiny, network=copy.deepcopy(tiny.module))
    with Engine(model) as engine:
        running = engine.stream(Request(prompt(0, 50), options=SamplingOptions(max_tokens=400, **ENDLESS)))
        next(running)
        with torch.no_grad():
            next(model.module.parameters()).mul_(2.0)
        ask(engine, prompt(1, 40))
        engine.save_prompt_cache(tmp_path / "cache")
        running.close()
    with Engine(model) as engine:
        assert engine.load_prompt_cache(tmp_path / "cache") == 1
        assert ask(engine, prompt(0, 50))[2].cached_tokens == 0


def test_what_other_weights_computed_is_forgotten_before_anybody_else_is_let_in(tiny, fake, monkeypatch):
    model = replace(tiny, network=copy.deepcopy(tiny.module))
    with Engine(model) as engine:
        between, order = engine._loop.call_between_steps, []
        monkeypatch.setattr(
            engine._loop, "call_between_steps", lambda call: (order.append(engine._version), between(call))
        )
        before = engine._version
        with torch.no_grad():
            next(model.module.parameters()).mul_(2.0)
        ask(engine, prompt(0, 20))
        assert order == [before], "the new version counts from when the old one's work is gone"
        assert engine._version != before
        ask(engine, prompt(0, 20))
        assert len(order) == 1


def test_sessions_over_one_model_share_an_engine_that_goes_with_the_model(tiny, fake):
    import weakref

    model = replace(tiny)
    engine = shared_engine(model)
    assert shared_engine(model) is engine
    assert shared_engine(replace(model)) is not engine
    assert "_engine" in vars(copy.copy(model))
    assert copy.deepcopy(vars(model)["_engine"]).engine is None
    engine.close()
    assert shared_engine(model) is not engine
    gone = weakref.ref(shared_engine(model))
    del model, engine
    gc.collect()
    assert gone() is None


# --- company ----------------------------------------------------------------------------------------------------------


def test_a_long_prompt_does_not_hold_up_the_others(tiny, fake):
    with Engine(tiny, max_num_seqs=2, max_num_batched_tokens=64, cache_tokens=4096) as engine:
        first = engine.stream(Request(prompt(0, 8), SamplingOptions(max_tokens=500, **ENDLESS)))
        next(first)
        before = engine.stats().tokens_generated
        ask(engine, prompt(1, 1500), options=SamplingOptions(max_tokens=1))
        # 1,500 tokens take 100 steps of a quarter of 64 less one, and the other request writes in each of them
        assert engine.stats().tokens_generated - before > 80
        first.close()


def test_requests_are_taken_in_the_order_in_which_they_come(tiny, fake):
    order = []
    with Engine(tiny, max_num_seqs=1) as engine:
        slowed(engine)
        streams = [engine.stream(Request(prompt(i, 10), SamplingOptions(max_tokens=3))) for i in range(6)]
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(lambda pair: (collect(pair[1]), order.append(pair[0])), enumerate(streams)))
    assert order == sorted(order)


def test_a_full_queue_refuses_at_the_call_and_says_when_to_come_back(tiny, fake):
    with slowed(Engine(tiny, max_num_seqs=1, max_waiting=1)) as engine:
        request = Request(prompt(0, 10), SamplingOptions(max_tokens=500, temperature=1.0, seed=0))
        streams = [engine.stream(request) for _ in range(2)]
        with pytest.raises(Overloaded, match="1 requests are running and 1 are waiting") as caught:
            engine.stream(request)
        assert caught.value.retry_after >= 1
        with pytest.raises(Overloaded):
            engine.score([65], [[66]])
        streams[0].close()
        assert collect(streams[1])[2].answer_tokens > 0
        assert engine.stats().refused == 2


@pytest.mark.parametrize("how", ["close", "drop", "event"])
def test_leaving_frees_the_place_within_a_step(tiny, fake, how):
    cancel = threading.Event()
    options = SamplingOptions(max_tokens=1500, temperature=1.0, seed=0, **ENDLESS)
    with Engine(tiny) as engine:
        stream = engine.stream(Request(prompt(0, 10), options, cancel=cancel))
        next(stream)
        steps = engine.stats().steps
        if how == "close":
            stream.close()
            assert list(stream) == []
        elif how == "drop":
            del stream
            gc.collect()
        else:
            cancel.set()
        wait_until(lambda: is_idle(engine))
        stats = engine.stats()
        assert stats.cancelled == 1
        assert stats.steps - steps < 1000
        if how == "event":
            assert list(stream)[-1].finish_reason == "cancelled"


def test_a_request_that_waits_can_be_cancelled(tiny, fake):
    with slowed(Engine(tiny, max_num_seqs=1)) as engine:
        cancel = threading.Event()
        options = SamplingOptions(max_tokens=500, temperature=1.0, seed=0, **ENDLESS)
        running = engine.stream(Request(prompt(0, 10), options))
        waiting = engine.stream(Request(prompt(1, 10), options, cancel=cancel))
        next(running)
        cancel.set()
        ids, text, last = collect(waiting)
        assert (ids, text, last.finish_reason) == ([], "", "cancelled")
        assert next(running).text


def test_a_slow_reader_holds_up_nobody(tiny, fake):
    with Engine(tiny, max_num_seqs=2) as engine:
        slow = engine.stream(Request(prompt(0, 10), SamplingOptions(max_tokens=200, **ENDLESS)))
        assert ask(engine, prompt(1, 10))[2].answer_tokens > 0
        wait_until(lambda: is_idle(engine))
        assert collect(slow)[2].answer_tokens == 200  # all of it was there, waiting


@pytest.fixture
def interruptible():
    """Python's own handler, also where the tests run in the background of a shell, which ignores interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_reaches_the_caller_at_once_and_ends_its_request(tiny, fake, interruptible):
    with slowed(Engine(tiny), 1.0) as engine:
        timer = threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGINT])
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            engine.prefill(prompt(0, 10))
        assert not is_idle(engine)  # the step that was interrupted is still being computed
        timer.join()
        wait_until(lambda: is_idle(engine))


def test_a_process_ends_while_its_engine_computes_and_leaves_its_prompts(tmp_path):
    script = """
import sys
sys.path.insert(0, sys.argv[1])
from pippin.engine import cache_size, engine as module
from fake import FakeRunner
module.make_runner, cache_size.runner_class = FakeRunner, lambda model: FakeRunner
from types import SimpleNamespace
import torch
config = SimpleNamespace(
    recurrent_layers=(), cached_layers=(0,), cache_groups=((0,),), group_window=lambda layers: None,
    original_max_position_embeddings=None,
)
model = SimpleNamespace(
    name="none", device=torch.device("cpu"), context_size=2048, cache_layout=config, adapter=lambda name: None,
    network=torch.nn.Linear(2, 2), source=None, vocab_size=260, placement=None,
)
engine = module.Engine(model, prompt_cache=sys.argv[2])
import threading
from contextlib import suppress
def ask():
    with suppress(module.PippinError):
        engine.prefill([65] * 2000)
threading.Thread(target=ask, daemon=True).start()
while not engine.stats().steps:
    pass
"""
    here = os.path.dirname(__file__)
    path = tmp_path / "prompts"
    done = subprocess.run([sys.executable, "-c", script, here, path], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert path.read_bytes().startswith(b"PIPPINKV")


# --- what goes wrong --------------------------------------------------------------------------------------------------


def test_an_error_of_one_request_reaches_its_caller_only(tiny, fake, monkeypatch):
    from pippin.engine.sampling import Sampler

    choose = Sampler.sample

    def failing(self, logits):
        if self.options.seed == 13:
            raise DecodingFailure("no token is allowed")
        return choose(self, logits)

    monkeypatch.setattr(Sampler, "sample", failing)
    good = [Request(prompt(i, 20), SamplingOptions(max_tokens=10, seed=i, temperature=1.0)) for i in range(2)]
    with Engine(tiny, max_num_seqs=3) as engine, ThreadPoolExecutor(3) as pool:
        bad = pool.submit(lambda: list(engine.stream(Request(prompt(2, 20), SamplingOptions(seed=13)))))
        expected = [[token.id for token in right_answer(tiny, request)[0]] for request in good]
        assert [ids for ids, _, _ in pool.map(lambda r: collect(engine.stream(r)), good)] == expected
        with pytest.raises(DecodingFailure, match="no token is allowed"):
            bad.result()
        assert engine.stats().failed == 1


def test_an_error_of_a_pass_reaches_all_of_it_and_the_engine_goes_on(tiny, fake):
    requests = [Request(prompt(i, 40), SamplingOptions(max_tokens=20)) for i in range(3)]
    expected = [[token.id for token in right_answer(tiny, request)[0]] for request in requests]
    with Engine(tiny, max_num_seqs=3) as engine:
        assert [ids for ids, _, _ in together(engine, requests)] == expected
        engine._runner.broken = RuntimeError("out of memory")
        streams = [engine.stream(request) for request in requests]
        for stream in streams:
            with pytest.raises(GenerationError, match="out of memory") as caught:
                list(stream)
            assert isinstance(caught.value.__cause__, RuntimeError)
        wait_until(lambda: is_idle(engine))
        assert engine.stats().cache_tokens_used == 0
        engine._runner.broken = None
        assert [ids for ids, _, _ in together(engine, requests)] == expected
        assert engine.stats().failed == 3


def test_an_error_while_a_request_is_taken_in_does_not_stop_the_engine(tiny, fake, monkeypatch):
    with Engine(tiny) as engine:
        enter = engine._scheduler._allocate

        def failing(request):
            if len(request.token_ids) == 13:
                raise MemoryError("no memory")
            return enter(request)

        monkeypatch.setattr(engine._scheduler, "_allocate", failing)
        with pytest.raises(GenerationError, match="no memory"):
            list(engine.stream(Request(prompt(0, 13))))
        assert ask(engine, prompt(0, 12))[2].finish_reason in ("stop", "length")


def test_a_fault_of_the_engine_itself_leaves_nobody_waiting(tiny, fake, monkeypatch):
    def failing(self, error):
        raise RuntimeError("the last straw")

    seen = []
    monkeypatch.setattr("pippin.engine.loop.EngineLoop._fail", failing)
    monkeypatch.setattr("threading.excepthook", lambda args: seen.append(str(args.exc_value)))
    engine = Engine(tiny)
    engine._runner.broken = RuntimeError("out of memory")
    with pytest.raises(GenerationError, match="the engine failed: RuntimeError"):
        ask(engine, prompt(0, 10))
    with pytest.raises(Overloaded, match="closed"):
        ask(engine, prompt(0, 10))
    engine.close()
    wait_until(lambda: seen == ["the last straw"])


def test_a_fault_of_the_books_leaves_nobody_waiting(tiny, fake, monkeypatch):
    seen, answer = [], SimpleQueue()
    monkeypatch.setattr("threading.excepthook", lambda args: seen.append(args.exc_type))
    engine = Engine(tiny)

    def failing(*_, **__):
        if not seen:
            engine._loop._calls.append((list, answer))  # somebody asks for a word while the step goes on
        raise AssertionError("a block is held twice")

    for name in ("prepare", "remove", "reset"):
        monkeypatch.setattr(engine._scheduler, name, failing)
    with engine._loop._wake:
        streams = [engine.stream(Request(prompt(i, 10))) for i in range(2)]
    for error in (*(stream._request.events.get(timeout=10) for stream in streams), answer.get(timeout=10)[1]):
        assert isinstance(error, GenerationError)
        assert "the engine failed: AssertionError" in str(error)
    wait_until(lambda: seen)
    with pytest.raises(Overloaded, match="closed"):
        engine._loop.call_between_steps(lambda: None)


def test_bounded_memory_makes_the_youngest_wait_and_changes_no_answer(tiny, fake):
    options = SamplingOptions(max_tokens=120, seed=1, temperature=1.0, **ENDLESS)
    requests = [Request(prompt(i, 60 + i), options) for i in range(5)]
    expected = [[token.id for token in right_answer(tiny, request)[0]] for request in requests]
    with Engine(tiny, max_num_seqs=5, cache_tokens=640, max_num_batched_tokens=32) as engine:
        answers = at_once(engine, requests)
        stats = engine.stats()
    assert [ids for ids, _, _ in answers] == expected
    assert stats.preempted > 0
    assert stats.cache_tokens_capacity == 640
    assert stats.tokens_generated == 600


def test_what_can_never_fit_the_memory_is_refused(tiny, fake):
    with Engine(tiny, cache_tokens=270) as engine:
        assert engine.context_size == 256
        with pytest.raises(ContextOverflow, match=r"cache_tokens.* holds 256") as caught:
            engine.stream(Request([65] * 200, SamplingOptions(max_tokens=57)))
        assert (caught.value.context_size, caught.value.token_count) == (256, 257)
        with pytest.raises(ContextOverflow):
            engine.score([65] * 235, [[66] * 7])
        assert engine.score([65] * 233, [[66] * 7]) != []
        assert ask(engine, [65] * 200, options=SamplingOptions())[2].answer_tokens <= 56


@pytest.mark.parametrize(("length", "maximum"), [(2048, None), (2040, 9), (1, 2048), (5000, None)])
def test_what_does_not_fit_is_refused_with_both_numbers(tiny, fake, length, maximum):
    with pytest.raises(ContextOverflow, match=f"{tiny.context_size:,}") as caught:
        Engine(tiny).stream(Request([65] * length, SamplingOptions(max_tokens=maximum)))
    assert (caught.value.context_size, caught.value.token_count) == (2048, length + (maximum or 1))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be"),
        ({"max_waiting": -1}, "max_waiting must be"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens must be"),
        ({"max_num_seqs": 2, "cache_tokens": 31}, "cache_tokens must be at least 32"),
    ],
)
def test_impossible_engines_are_refused(tiny, fields, message):
    with pytest.raises(InvalidArgument, match=message):
        Engine(tiny, **fields)


def test_impossible_requests_are_refused_at_the_call(tiny, fake):
    engine = Engine(tiny)
    with pytest.raises(InvalidArgument, match="the prompt is empty"):
        engine.stream(Request([]))
    for ids in ([3, 260], [-1]):
        with pytest.raises(InvalidArgument, match=f"token id {ids[-1]}"):
            engine.stream(Request(ids))
    for id in (260, 10**12):
        with pytest.raises(InvalidArgument, match=f"token id {id} is outside the vocabulary of 260"):
            engine.stream(Request([65], SamplingOptions(logit_bias={id: 1})))
    with pytest.raises(SchemaError):
        engine.stream(Request([65], grammar=Grammar("start: (")))
    with pytest.raises(ModelNotFound, match="no adapter 'poet' loaded; loaded: none"):
        engine.stream(Request([65], adapter="poet"))
    with pytest.raises(InvalidArgument, match="priority must be"):
        Request([65], priority=11)
    assert engine.stats().requests == 0


# --- the end ----------------------------------------------------------------------------------------------------------


def test_draining_answers_what_was_taken_in_and_takes_no_more(tiny, fake):
    engine = slowed(Engine(tiny, max_num_seqs=1))
    streams = [engine.stream(Request(prompt(i, 10), SamplingOptions(max_tokens=5, **ENDLESS))) for i in range(3)]
    engine.close(drain=True)
    assert [collect(stream)[2].finish_reason for stream in streams] == ["length"] * 3
    for call in (lambda: engine.stream(Request([65])), lambda: engine.prefill([65]), engine.load_prompt_cache):
        with pytest.raises((Overloaded, InvalidArgument), match=r"closed|no prompt cache"):
            call()
    engine.close()
    assert engine.stats().cache_tokens_used == 0


@pytest.mark.parametrize("timeout", [None, 0.01])
def test_closing_cancels_what_runs_and_waits(tiny, fake, timeout):
    engine = slowed(Engine(tiny, max_num_seqs=1))
    options = SamplingOptions(max_tokens=1000, temperature=1.0, seed=0, **ENDLESS)
    streams = [engine.stream(Request(prompt(i, 10), options)) for i in range(3)]
    next(streams[0])
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(engine.prefill, prompt(9, 10))
        wait_until(lambda: engine.stats().requests == 4)
        engine.close(drain=timeout is not None, timeout=timeout)
        with pytest.raises(Overloaded, match="closed"):
            waiting.result()
    assert [collect(stream)[2].finish_reason for stream in streams] == ["cancelled"] * 3
    assert not any(thread is engine._loop._thread for thread in threading.enumerate())


def test_the_thread_ends_when_there_is_nothing_to_do_and_comes_back(tiny, fake, monkeypatch):
    monkeypatch.setattr("pippin.engine.loop.IDLE_SECONDS", 0.01)
    engine = Engine(tiny)
    for _ in range(2):
        ask(engine, [65, 66])
        wait_until(lambda: engine._loop._thread is None)
    assert engine.stats().finished == 2


# --- scores -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 12])
@pytest.mark.parametrize("chunk", [4, 16, 256])
def test_scores_equal_the_log_softmax_of_transformers(tiny, tmp_path, chunk, window):
    from transformers import AutoModelForCausalLM

    family = "llama" if window is None else "mistral"
    layers = tuple(replace(one, attention=replace(one.attention, window=window)) for one in tiny.config.layers)
    module = Decoder(replace(tiny.config, family=family, layers=layers)).initialize(seed=3).eval()
    for parameter in module.parameters():  # far enough from uniform for a wrong view to show
        parameter.data *= 3
    model = LanguageModel("windowed", module, tiny.tokenizer, None)
    model.save(tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = prompt(0, 180)
    continuations = [ids[i : i + n] for i, n in enumerate([1, 3, 9, 30, 2, 1, 5])]
    expected = []
    for continuation in continuations:
        with torch.no_grad():
            rows = reference(torch.tensor([[*ids, *continuation]])).logits[0].double().log_softmax(-1)
        expected.append(sum(float(rows[at, id]) for at, id in enumerate(continuation, len(ids) - 1)))
    with Engine(model, max_num_batched_tokens=chunk) as engine:
        for _ in range(2):  # the second time from what the first left
            assert engine.score(ids, continuations) == pytest.approx(expected, abs=2e-4)
        assert engine.stats().cached_tokens == 179
        assert ask(engine, ids)[0] == bare_greedy(model, ids, 20)
        tokens = engine.prompt_logprobs([*ids, *continuations[3]], num_logprobs=4)
    assert sum(token.logprob for token in tokens[180:]) == pytest.approx(expected[3], abs=2e-4)
    assert (tokens[0].logprob, tokens[0].top_logprobs) == (None, ())
    assert [token.id for token in tokens] == [*ids, *continuations[3]]
    likeliest = rows_of(reference, ids)[:-1].topk(4).indices.tolist()
    assert [[id for id, _ in token.top_logprobs] for token in tokens[1:180]] == likeliest


@torch.no_grad()
def rows_of(reference, ids):
    return reference(torch.tensor([ids])).logits[0].log_softmax(-1)


def test_scores_of_all_single_tokens_are_a_distribution(tiny, fake):
    with Engine(tiny) as engine:
        scores = engine.score(prompt(0, 20), [[id] for id in range(tiny.config.vocab_size)])
        assert torch.tensor(scores).exp().sum() == pytest.approx(1, abs=1e-4)
        assert engine.score(prompt(0, 20), []) == []
        assert [token.id for token in engine.prompt_logprobs([65])] == [65]


def test_what_cannot_be_scored_is_refused(tiny, fake):
    engine = Engine(tiny)
    with pytest.raises(InvalidArgument, match="the prompt is empty"):
        engine.score([], [[1]])
    with pytest.raises(InvalidArgument, match="the prompt is empty"):
        engine.prompt_logprobs([])
    with pytest.raises(InvalidArgument, match="continuation 1 is empty"):
        engine.score([1], [[1], []])
    with pytest.raises(InvalidArgument, match="token id 999"):
        engine.score([1], [[1], [999]])
    with pytest.raises(ContextOverflow) as caught:
        engine.score([1] * 2000, [[1], [2] * 49])
    assert caught.value.token_count == 2049


def test_many_scores_do_not_hold_up_the_others(tiny, fake):
    with Engine(tiny, max_num_seqs=2, max_num_batched_tokens=32, cache_tokens=2048) as engine:
        stream = engine.stream(Request(prompt(0, 8), SamplingOptions(max_tokens=1000, **ENDLESS)))
        next(stream)
        before = engine.stats().tokens_generated
        engine.score(prompt(1, 8), [prompt(i, 7) for i in range(60)])
        assert engine.stats().tokens_generated - before >= 40  # one token with each pass over 7 others
        stream.close()


def test_an_error_of_a_score_reaches_its_caller_only(tiny, fake, monkeypatch):
    def failing(*_):
        raise GenerationError("this score failed")

    monkeypatch.setattr("pippin.engine.continuation_scores.Scores.add_logits", failing)
    with Engine(tiny) as engine:
        stream = engine.stream(Request(prompt(0, 8), SamplingOptions(max_tokens=30, **ENDLESS)))
        with pytest.raises(GenerationError, match="this score failed"):
            engine.score([65, 66], [[67, 68], [67, 69]])
        assert collect(stream)[2].answer_tokens == 30
        assert engine.stats().blocks_free + engine.stats().blocks_cached == engine.stats().blocks_total


# --- prompts on disk --------------------------------------------------------------------------------------------------


def test_a_file_that_cannot_be_used_is_never_written_over(tiny, tmp_path):
    from pippin.engine.engine import _engines

    path = tmp_path / "prompts"
    path.write_bytes(b"something else")
    with pytest.raises(CorruptedFile) as caught:
        Engine(tiny, cache_tokens=1024, prompt_cache=path)
    # the error holds the engine, and with it what would be written when the process ends
    assert [engine for engine in _engines if engine.prompt_cache == path] == []
    assert path.read_bytes() == b"something else"
    del caught


def test_what_was_computed_survives_the_engine(tiny, tmp_path):
    path = tmp_path / "prompts"
    texts = [[*prompt(0, 60), *prompt(i, 30 + i)] for i in range(1, 4)]
    with Engine(tiny, cache_tokens=1024, prompt_cache=path) as engine:
        answers = [ask(engine, each)[0] for each in texts]
        assert not path.exists()
    with Engine(tiny, cache_tokens=1024, prompt_cache=path) as engine:
        for each, answer in zip(texts, answers, strict=True):
            ids, _, last = ask(engine, each)
            assert (ids, last.cached_tokens) == (answer, len(each) - 1)
    with Engine(tiny, max_num_seqs=1, cache_tokens=96) as engine:  # as much as there is room for
        assert engine.load_prompt_cache(path) == 3
        assert engine.stats().blocks_free == 0
        assert ask(engine, texts[2][:70])[0] == bare_greedy(tiny, texts[2][:70], 20)
        with pytest.raises(InvalidArgument, match="no prompt cache of its own"):
            engine.save_prompt_cache()
