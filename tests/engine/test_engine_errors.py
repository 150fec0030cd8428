"""What goes wrong in an engine reaches those whom it concerns, and the engine goes on."""

from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import pytest

from pippin.core.errors import (
    ContextOverflow,
    DecodingFailure,
    GenerationError,
    InvalidArgument,
    ModelNotFound,
    Overloaded,
    SchemaError,
)
from pippin.engine import Engine, Request, SamplingOptions
from pippin.engine.grammar.constraint import Grammar

from .asking import ENDLESS, ask, at_once, collect, is_idle, prompt, together, wait_until
from .fake import right_answer


def test_an_error_of_one_request_reaches_its_caller_only(tiny, fake, monkeypatch):
    from pippin.engine.decoding.sampling import Sampler

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
