"""Continuous batching against the bare loop and transformers: the same answers, whoever else is being answered."""

import gc
import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st

from pippin.core.errors import (
    ContextOverflow,
    DecodingFailure,
    GenerationError,
    InvalidArgument,
    ModelNotFound,
    Overloaded,
    SchemaError,
)
from pippin.engine import BatchEngine, Engine, Finished, Request, SamplingOptions
from pippin.engine.constraint import Grammar
from pippin.engine.engine import Prefix
from pippin.language import Decoder, LanguageModel, LayerSpec
from pippin.nn.attention import AttentionSpec
from pippin.nn.feedforward import FeedForwardSpec
from pippin.nn.rotary import Rotary

SAMPLED = {"temperature": 1.0, "top_p": 0.9}


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(32, 127), k=length)


def collect(events):
    *tokens, last = events
    assert isinstance(last, Finished)
    return [token.id for token in tokens], "".join(token.text for token in tokens) + last.text, last


def together(engine, requests, pause=0.0):
    """Send all requests, each from a thread of its own; their answers in order."""

    def one(request):
        time.sleep(random.Random(len(request.prompt)).random() * pause)
        return collect(engine.stream(request))

    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(one, requests))


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
    step = engine._step
    engine._step = lambda: (time.sleep(seconds), step())[1]
    return engine


@pytest.fixture
def engine(tiny):
    with BatchEngine(tiny, slots=3, chunk=32) as engine:
        yield engine


def test_greedy_answers_in_a_batch_equal_transformers(tiny, tmp_path):
    from transformers import AutoModelForCausalLM

    tiny.save(tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    requests = [Request(prompt(i, 5 + 37 * i), SamplingOptions(max_tokens=10 + 5 * i)) for i in range(9)]
    with BatchEngine(tiny, slots=4, chunk=20) as engine:
        answers = together(engine, requests, pause=0.05)
        # the second time every prompt is found in a slot or shares nothing with any
        again = together(engine, requests[:4])
        assert engine.stats().prompt_tokens == sum(len(r.prompt) for r in [*requests, *requests[:4]])
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
        assert last.prompt_tokens == len(request.prompt)
        assert last.answer_tokens == len(ids)
        assert 0 < last.prompt_seconds <= last.first_token_seconds <= last.total_seconds


@pytest.mark.parametrize("chunk", [1, 7, 4096])
def test_a_seed_gives_the_same_text_whatever_else_runs(tiny, chunk):
    options = [
        SamplingOptions(max_tokens=25, seed=i, **SAMPLED, **extra)
        for i, extra in enumerate(
            [{}, {"repetition_penalty": 1.3}, {"frequency_penalty": 1.0, "presence_penalty": 0.5}, {"top_k": 5}]
        )
    ]
    requests = [Request(prompt(i, 60), each) for i, each in enumerate(options)]
    alone = [collect(Engine(tiny).stream(request))[1] for request in requests]
    with BatchEngine(tiny, slots=4, chunk=chunk) as engine:
        assert [text for _, text, _ in together(engine, requests)] == alone
        assert [text for _, text, _ in together(engine, requests[::-1])] == alone[::-1]


def test_log_probabilities_in_a_batch_are_those_of_the_model(engine, tiny):
    options = SamplingOptions(max_tokens=6, logprobs=3)
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
            assert len(token.top_logprobs) == 3


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
        for i in range(12)
    ]
    with BatchEngine(tiny, slots=5, chunk=16) as engine:
        answers = together(engine, requests, pause=0.02)
    for index, (_, text, last) in enumerate(answers):
        if index % 4 == 0:
            assert set(json.loads(text)) == {"name", "rows"}
            assert last.reason == "stop"
        elif index % 4 != 1:
            assert requests[index].grammar.allows(text)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["windows and no positions", "shared keys", "experts", "norms everywhere"])
def test_every_kind_of_layer_works_in_a_batch(tiny, kind, packed):
    def layer(window=None, source=None, rotary=Rotary(), **feedforward):
        return LayerSpec(AttentionSpec(window, rotary, source), FeedForwardSpec(48, **feedforward))

    fields = {
        "windows and no positions": {"layers": (layer(window=16), layer(rotary=None), layer(window=16))},
        "shared keys": {"layers": (layer(), layer(window=20), layer(source=1), layer(source=0))},
        "experts": {"layers": (layer(experts=4, active=2), layer())},
        "norms everywhere": {"qk_norm": True, "post_norms": True, "qkv_bias": True, "embedding_scale": 5.0},
    }[kind]
    module = Decoder(replace(tiny.config, **fields)).initialise(seed=1).eval()
    model = LanguageModel(kind, module.pack() if packed else module, tiny.tokenizer, None)
    requests = [
        Request(prompt(i, 10 + 40 * i), SamplingOptions(max_tokens=20, logit_bias={256: -100})) for i in range(4)
    ]
    expected = [collect(Engine(model).stream(request))[0] for request in requests]
    with BatchEngine(model, slots=3, chunk=24) as engine:
        assert [ids for ids, _, _ in together(engine, requests)] == expected
        continuations = [prompt(9, 3), prompt(8, 25), prompt(7, 1)]
        scores = engine.score(requests[3].prompt, continuations)
        assert scores == pytest.approx(Engine(model, chunk=7).score(requests[3].prompt, continuations), abs=1e-3)


def test_what_a_grammar_forces_is_computed_in_one_step(engine):
    _, text, _ = collect(engine.stream(Request(prompt(0, 10), grammar=Grammar.regex("the (yes|no), sir"))))
    assert text in ("the yes, sir", "the no, sir")
    assert engine.stats().steps <= 4


def test_stop_strings_and_characters_of_several_bytes_come_whole_in_every_stream(tiny):
    grammar = Grammar.regex("(?:naïve 日本語 🍏 END never){2}")
    requests = [Request(prompt(i, 10), SamplingOptions(stop=["END"]), grammar) for i in range(4)]
    with BatchEngine(tiny, slots=2) as engine, ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(lambda request: [event.text for event in engine.stream(request)], requests))
    for texts in parts:
        assert "".join(texts) == "naïve 日本語 🍏 "
        assert not any("\ufffd" in text for text in texts)


def test_a_long_prompt_does_not_hold_up_the_others(tiny):
    with BatchEngine(tiny, slots=2, chunk=64) as engine:
        first = engine.stream(Request(prompt(0, 8), SamplingOptions(max_tokens=500, logit_bias={256: -100})))
        next(first)
        long = engine.stream(Request(prompt(1, 1500), SamplingOptions(max_tokens=1)))
        before = engine.stats().tokens_generated
        collect(long)
        # 1,500 tokens take 94 steps of a quarter of 64, and the other request writes in each of them
        assert engine.stats().tokens_generated - before > 80
        first.close()


def test_the_second_turn_of_a_chat_computes_only_what_is_new(engine):
    opening = prompt(0, 200)
    ids, _, first = collect(engine.stream(Request(opening, SamplingOptions(max_tokens=10))))
    others = [Request(prompt(i, 150), SamplingOptions(max_tokens=5)) for i in (1, 2)]
    together(engine, others)
    second = [*opening, *ids, *prompt(3, 20)]
    *_, last = engine.stream(Request(second, SamplingOptions(max_tokens=5)))
    assert (first.cached_tokens, last.cached_tokens) == (0, 209)  # the last token of an answer is never computed
    assert engine.stats().cached_tokens == 209
    assert (
        collect(engine.stream(Request(second, SamplingOptions(max_tokens=5))))[0]
        == collect(Engine(engine.model).stream(Request(second, SamplingOptions(max_tokens=5))))[0]
    )


def test_what_two_conversations_share_is_copied_and_both_are_kept(engine):
    system = prompt(0, 100)
    one, other = [*system, *prompt(1, 150)], [*system, *prompt(2, 150)]
    short = SamplingOptions(max_tokens=2)
    *_, first = engine.stream(Request(one, short))
    *_, second = engine.stream(Request(other, short))
    *_, again = engine.stream(Request(one, short))
    assert (first.cached_tokens, second.cached_tokens, again.cached_tokens) == (0, 100, 249)


def test_the_least_recently_used_slot_is_taken_first(engine):
    short = SamplingOptions(max_tokens=1)
    prompts = [prompt(i, 50) for i in range(4)]
    for each in [*prompts[:3], prompts[0], prompts[3]]:  # the fourth takes the place of the second
        collect(engine.stream(Request(each, short)))
    cached = [collect(engine.stream(Request(prompts[i], short)))[2].cached_tokens for i in (0, 2, 3)]
    assert cached == [49, 49, 49]
    assert collect(engine.stream(Request(prompts[1], short)))[2].cached_tokens == 0


def test_prefill_ahead_of_time_is_found_by_the_request(engine):
    assert engine.prefill([], Prefix()) == 0
    assert engine.prefill(prompt(0, 100), Prefix()) == 100
    *_, last = engine.stream(Request([*prompt(0, 100), 65], SamplingOptions(max_tokens=1)))
    assert last.cached_tokens == 100
    with pytest.raises(ContextOverflow):
        engine.prefill([65] * 5000)


def test_nothing_is_kept_without_reuse(tiny):
    with BatchEngine(tiny, slots=2, reuse=False) as engine:
        for _ in range(2):
            assert collect(engine.stream(Request(prompt(0, 100), SamplingOptions(max_tokens=2))))[2].cached_tokens == 0
        wait_until(lambda: is_idle(engine))
        assert engine.stats().cache_tokens_used == 0


def test_requests_are_taken_in_the_order_in_which_they_come(tiny):
    order = []
    with BatchEngine(tiny, slots=1) as engine:
        slowed(engine)
        streams = [engine.stream(Request(prompt(i, 10), SamplingOptions(max_tokens=3))) for i in range(6)]
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(lambda pair: (collect(pair[1]), order.append(pair[0])), enumerate(streams)))
    assert order == sorted(order)


def test_a_full_queue_refuses_at_the_call_and_says_when_to_come_back(tiny):
    with slowed(BatchEngine(tiny, slots=1, queue=1)) as engine:
        request = Request(prompt(0, 10), SamplingOptions(max_tokens=500, temperature=1.0, seed=0))
        streams = [engine.stream(request) for _ in range(2)]
        with pytest.raises(Overloaded, match="1 requests are being answered and 1 are waiting") as caught:
            engine.stream(request)
        assert caught.value.retry_after >= 1
        with pytest.raises(Overloaded):
            engine.score([65], [[66]])
        streams[0].close()
        assert collect(streams[1])[2].answer_tokens > 0
        assert engine.stats().refused == 2


@pytest.mark.parametrize("how", ["close", "drop", "event"])
def test_leaving_frees_the_slot_within_a_step(engine, how):
    cancel = threading.Event()
    options = SamplingOptions(max_tokens=1500, temperature=1.0, seed=0, logit_bias={256: -100})
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
        assert list(stream)[-1].reason == "cancelled"


def test_a_request_that_waits_can_be_cancelled(tiny):
    with slowed(BatchEngine(tiny, slots=1)) as engine:
        cancel = threading.Event()
        options = SamplingOptions(max_tokens=500, temperature=1.0, seed=0, logit_bias={256: -100})
        running = engine.stream(Request(prompt(0, 10), options))
        waiting = engine.stream(Request(prompt(1, 10), options, cancel=cancel))
        next(running)
        cancel.set()
        ids, text, last = collect(waiting)
        assert (ids, text, last.reason) == ([], "", "cancelled")
        assert next(running).text


def test_an_error_of_one_request_reaches_its_caller_only(tiny, monkeypatch):
    from pippin.engine.sampling import Sampler

    choose = Sampler.choose

    def failing(self, logits):
        if self.options.seed == 13:
            raise DecodingFailure("no token is allowed")
        return choose(self, logits)

    monkeypatch.setattr(Sampler, "choose", failing)
    good = [Request(prompt(i, 20), SamplingOptions(max_tokens=10, seed=i, temperature=1.0)) for i in range(2)]
    with BatchEngine(tiny, slots=3) as engine, ThreadPoolExecutor(3) as pool:
        bad = pool.submit(lambda: list(engine.stream(Request(prompt(2, 20), SamplingOptions(seed=13)))))
        expected = [collect(Engine(tiny).stream(request))[1] for request in good]
        assert [text for _, text, _ in pool.map(lambda r: collect(engine.stream(r)), good)] == expected
        with pytest.raises(DecodingFailure, match="no token is allowed"):
            bad.result()
        assert engine.stats().failed == 1


def test_an_error_of_a_step_reaches_all_of_it_and_the_engine_goes_on(tiny, monkeypatch):
    requests = [Request(prompt(i, 40), SamplingOptions(max_tokens=20)) for i in range(3)]
    expected = [collect(Engine(tiny).stream(request))[1] for request in requests]
    hidden = type(tiny.module).hidden
    broken = threading.Event()

    def failing(self, ids, **fields):
        if broken.is_set():
            raise RuntimeError("out of memory")
        return hidden(self, ids, **fields)

    monkeypatch.setattr(type(tiny.module), "hidden", failing)
    with BatchEngine(tiny, slots=3) as engine:
        assert [text for _, text, _ in together(engine, requests)] == expected
        broken.set()
        streams = [engine.stream(request) for request in requests]
        for stream in streams:
            with pytest.raises(GenerationError, match="out of memory") as caught:
                list(stream)
            assert isinstance(caught.value.__cause__, RuntimeError)
        wait_until(lambda: is_idle(engine))
        assert engine.stats().cache_tokens_used == 0
        broken.clear()
        assert [text for _, text, _ in together(engine, requests)] == expected
        assert engine.stats().failed == 3


def test_an_error_while_a_request_is_taken_in_does_not_stop_the_engine(engine, monkeypatch):
    acquire = engine._slots.acquire

    def failing(ids, *rest):
        if len(ids) == 13:
            raise MemoryError("no memory")
        return acquire(ids, *rest)

    monkeypatch.setattr(engine._slots, "acquire", failing)
    with pytest.raises(GenerationError, match="no memory"):
        list(engine.stream(Request(prompt(0, 13))))
    assert collect(engine.stream(Request(prompt(0, 12), SamplingOptions(max_tokens=2))))[2].reason in ("stop", "length")


def test_bounded_memory_makes_the_youngest_wait_and_changes_no_answer(tiny):
    options = SamplingOptions(max_tokens=120, seed=1, temperature=1.0, logit_bias={256: -100})
    requests = [Request(prompt(i, 60 + i), options) for i in range(5)]
    expected = [collect(Engine(tiny).stream(request))[0] for request in requests]
    with BatchEngine(tiny, slots=5, cache_tokens=640, chunk=32) as engine:
        seen = []
        step = engine._step
        engine._step = lambda: (step(), seen.append(engine.stats().cache_tokens_used))[0]
        answers = together(engine, requests)
        stats = engine.stats()
    assert [ids for ids, _, _ in answers] == expected
    assert stats.preempted > 0
    assert max(seen) <= stats.cache_tokens_capacity == 640
    assert stats.tokens_generated == 600


def test_what_can_never_fit_the_memory_is_refused(tiny):
    with BatchEngine(tiny, cache_tokens=300) as engine:
        assert engine.context_size == 256
        with pytest.raises(ContextOverflow, match=r"cache_tokens.* holds 256") as caught:
            engine.stream(Request([65] * 200, SamplingOptions(max_tokens=57)))
        assert (caught.value.context_size, caught.value.token_count) == (256, 257)
        with pytest.raises(ContextOverflow):
            engine.score([65] * 250, [[66] * 7])
        assert collect(engine.stream(Request([65] * 200)))[2].answer_tokens <= 56


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"slots": 0}, "slots must be"),
        ({"queue": -1}, "queue must be"),
        ({"chunk": 0}, "chunk must be"),
        ({"cache_tokens": 127}, "cache_tokens must be"),
    ],
)
def test_impossible_engines_are_refused(tiny, fields, message):
    with pytest.raises(InvalidArgument, match=message):
        BatchEngine(tiny, **fields)


def test_impossible_requests_are_refused_at_the_call(engine):
    with pytest.raises(InvalidArgument, match="the prompt is empty"):
        engine.stream(Request([]))
    with pytest.raises(InvalidArgument, match="token id 260"):
        engine.stream(Request([65], SamplingOptions(logit_bias={260: 1})))
    with pytest.raises(SchemaError):
        engine.stream(Request([65], grammar=Grammar("start: (")))
    with pytest.raises(ModelNotFound, match="no adapter 'poet' loaded; loaded: none"):
        engine.stream(Request([65], adapter="poet"))
    assert engine.stats().requests == 0


def test_draining_answers_what_was_taken_in_and_takes_no_more(tiny):
    engine = slowed(BatchEngine(tiny, slots=1))
    streams = [engine.stream(Request(prompt(i, 10), SamplingOptions(max_tokens=5))) for i in range(3)]
    engine.close(drain=True)
    assert [collect(stream)[2].reason for stream in streams] == ["length"] * 3
    with pytest.raises(Overloaded, match="closed"):
        engine.stream(Request([65]))
    with pytest.raises(Overloaded, match="closed"):
        engine.prefill([65])
    engine.close()
    assert engine.stats().cache_tokens_used == 0


@pytest.mark.parametrize("timeout", [None, 0.01])
def test_closing_cancels_what_runs_and_waits(tiny, timeout):
    engine = slowed(BatchEngine(tiny, slots=1))
    options = SamplingOptions(max_tokens=1000, temperature=1.0, seed=0, logit_bias={256: -100})
    streams = [engine.stream(Request(prompt(i, 10), options)) for i in range(3)]
    next(streams[0])
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(engine.prefill, prompt(9, 10))
        wait_until(lambda: engine.stats().requests == 4)
        engine.close(drain=timeout is not None, timeout=timeout)
        with pytest.raises(Overloaded, match="closed"):
            waiting.result()
    assert [collect(stream)[2].reason for stream in streams] == ["cancelled"] * 3
    assert not any(thread.name == "pippin-batch" for thread in threading.enumerate())


def test_the_thread_ends_when_there_is_nothing_to_do_and_comes_back(tiny, monkeypatch):
    monkeypatch.setattr("pippin.engine.batch.IDLE_SECONDS", 0.01)
    engine = BatchEngine(tiny)
    for _ in range(2):
        collect(engine.stream(Request([65, 66], SamplingOptions(max_tokens=2))))
        wait_until(lambda: engine._thread is None)
    assert engine.stats().finished == 2


@given(
    st.lists(
        st.tuples(
            st.integers(1, 300),  # prompt tokens
            st.integers(1, 40),  # max_tokens
            st.none() | st.integers(0, 12),  # events after which the caller leaves
            st.sampled_from(["close", "event"]),
            st.booleans(),  # under a grammar
            st.integers(0, 3),  # milliseconds before the request comes
        ),
        min_size=1,
        max_size=8,
    )
)
@settings(max_examples=12, deadline=None)
def test_after_any_schedule_every_slot_is_free_and_every_answer_right(tiny, schedule):
    grammar = Grammar.regex("[a-z]{3}(one|two|three)+")
    with BatchEngine(tiny, slots=3, queue=8, chunk=32, cache_tokens=512) as engine:

        def one(index, length, maximum, leave, how, constrained, delay):
            time.sleep(delay / 1000)
            cancel = threading.Event()
            options = SamplingOptions(max_tokens=maximum, seed=index, temperature=1.0)
            request = Request(prompt(index, length), options, grammar if constrained else None, cancel=cancel)
            stream, ids = engine.stream(request), []
            for event in stream:
                if isinstance(event, Finished):
                    return request, ids, event.reason
                ids.append(event.id)
                if leave is not None and len(ids) >= leave:
                    if how == "close":
                        stream.close()
                        return request, ids, "closed"
                    cancel.set()
            raise AssertionError("no last event")

        with ThreadPoolExecutor(len(schedule)) as pool:
            results = list(pool.map(lambda pair: one(pair[0], *pair[1]), enumerate(schedule)))
        wait_until(lambda: is_idle(engine))
        stats = engine.stats()
        assert stats.finished + stats.cancelled == stats.requests == len(schedule)
        assert stats.failed == 0
        assert not any(slot.busy for slot in engine._slots.slots)
        assert all(len(slot.ids) == (slot.cache.length if slot.cache else 0) for slot in engine._slots.slots)
        assert stats.cache_tokens_used <= 512
    for request, ids, reason in results:
        expected = collect(Engine(tiny).stream(Request(request.prompt, request.options, request.grammar)))[0]
        assert ids == expected[: len(ids)]
        assert reason in ("closed", "cancelled") or ids == expected


def test_scores_in_a_batch_equal_the_engine_alone(tiny):
    continuations = [prompt(i, 1 + i) for i in range(6)]
    expected = Engine(tiny).score(prompt(9, 50), continuations)
    with BatchEngine(tiny, slots=2, cache_tokens=256, chunk=8) as engine:
        stream = engine.stream(Request(prompt(0, 20), SamplingOptions(max_tokens=100, temperature=1.0, seed=0)))
        assert engine.score(prompt(9, 50), continuations) == pytest.approx(expected, abs=1e-4)
        assert engine.score(prompt(9, 50), []) == []
        collect(stream)
        *_, last = engine.stream(Request(prompt(9, 50), SamplingOptions(max_tokens=1)))
        assert last.cached_tokens == 49


def test_many_scores_do_not_hold_up_the_others(tiny):
    with BatchEngine(tiny, slots=2, chunk=8) as engine:
        options = SamplingOptions(max_tokens=1000, logit_bias={256: -100})
        stream = engine.stream(Request(prompt(0, 8), options))
        next(stream)
        before = engine.stats().tokens_generated
        continuations = [prompt(i, 7) for i in range(60)]
        scores = engine.score(prompt(1, 8), continuations)
        assert engine.stats().tokens_generated - before >= 60  # one token with each pass over 7 tokens
        assert scores == pytest.approx(Engine(tiny).score(prompt(1, 8), continuations), abs=1e-4)
        stream.close()


def test_an_error_of_a_score_reaches_its_caller_only(engine, monkeypatch):
    def failing(*_):
        raise GenerationError("this score failed")

    monkeypatch.setattr("pippin.engine.scoring._group", failing)
    stream = engine.stream(Request(prompt(0, 8), SamplingOptions(max_tokens=30, logit_bias={256: -100})))
    with pytest.raises(GenerationError, match="this score failed"):
        engine.score([65, 66], [[67]])
    assert collect(stream)[2].answer_tokens == 30


def test_scores_begin_again_when_memory_runs_out_under_them(tiny):
    continuations = [prompt(i, 30) for i in range(20)]
    expected = Engine(tiny).score(prompt(5, 100), continuations)
    with BatchEngine(tiny, slots=3, cache_tokens=384, chunk=32) as engine, ThreadPoolExecutor(2) as pool:
        options = SamplingOptions(max_tokens=150, logit_bias={256: -100})
        stream = engine.stream(Request(prompt(0, 100), options))
        scored = pool.submit(engine.score, prompt(5, 100), continuations)
        assert collect(stream)[2].answer_tokens == 150
        assert scored.result() == pytest.approx(expected, abs=1e-4)


def test_nothing_computed_for_one_owner_is_used_for_another(engine):
    ids, short = prompt(0, 100), SamplingOptions(max_tokens=1)

    def cached(owner):
        return collect(engine.stream(Request(ids, short, owner=owner)))[2].cached_tokens

    assert engine.prefill(ids, owner="ann") == 100
    assert cached("bob") == 0
    assert (cached("ann"), cached("bob")) == (99, 99)
    before = engine.stats().cached_tokens
    engine.score(ids, [[65]], owner="eve")
    assert engine.stats().cached_tokens == before
    engine.score(ids, [[65]], owner="eve")
    assert engine.stats().cached_tokens == before + 99
