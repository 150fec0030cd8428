"""The service without HTTP: admission, fairness, ends of every kind, and books that are right afterwards."""

import asyncio
import contextlib
import json
import logging
import random
import shutil
import threading
from contextlib import aclosing
from dataclasses import replace

import pytest
from tokenizers import Tokenizer as Backend, decoders, models

from pippin.core.errors import (
    ContextOverflow,
    DecodingFailure,
    GuardrailViolation,
    InvalidArgument,
    ModelNotFound,
    Overloaded,
    PippinError,
    RateLimited,
    TimedOut,
    UnsupportedCapability,
)
from pippin.data.text.tokenizer import Tokenizer
from pippin.engine import Token
from pippin.serve import guardrails, logs
from pippin.serve.admission import AdmissionQueue
from pippin.serve.limits import Caller
from pippin.serve.service import Service
from pippin.serve.settings import ServerSettings
from pippin.session.options import GenerationOptions
from pippin.session.providers.provider import Done, ProviderRequest, ReasoningDelta, TextDelta, ToolCallsMade
from pippin.session.transcript import Prompt, ToolCall, Transcript
from pippin.session.types.schema import Schema

from .conftest import TinyEncoder
from .stub import Stub, make_service, turn

ALICE, BOB = Caller("key:alice", "alice"), Caller("key:bob", "bob")


@pytest.fixture
def services():
    made = []

    def make(stub=None, **settings):
        made.append(make_service(stub, **settings))
        return made[-1]

    yield make
    for service, _ in made:
        service.close()


async def until(holds, seconds=10.0):
    async with asyncio.timeout(seconds):
        while not holds():
            await asyncio.sleep(0.002)


def is_idle(service):
    return not (service.active or service.waiting or service._active_requests or service._of_caller) and all(
        not (loaded.users or loaded.admission.inside or loaded.admission.waiting)
        for loaded in service.pool.loaded.values()
    )


async def answer(service, build=None, caller=ALICE, model="stub"):
    return [event async for event in service.run(model, build or turn(), caller)]


async def until_it_breaks(service, build):
    """The events before an error, and the error."""
    seen = []
    try:
        async for event in service.run("stub", build, ALICE):
            seen.append(event)
    except PippinError as error:
        return seen, error
    raise AssertionError("nothing broke")


async def test_events_come_whole_and_in_order(services):
    service, _ = services()
    *deltas, done = await answer(service, turn(50))
    assert "".join(delta.text for delta in deltas) == "".join(f"{number} " for number in range(50))
    assert isinstance(done, Done)
    assert done.finish_reason == "stop"
    await until(lambda: is_idle(service))


async def test_many_at_once_each_get_their_own(services):
    service, stub = services(max_num_seqs=4, max_queued_requests=64)
    found = await asyncio.gather(*(answer(service, turn(number + 1)) for number in range(40)))
    assert [len(events) for events in found] == [number + 2 for number in range(40)]
    assert stub.most <= 4 + 4  # the slots, and as many let in ahead
    await until(lambda: is_idle(service))


async def test_errors_come_with_the_first_step(services):
    service, stub = services()
    with pytest.raises(ModelNotFound, match="'other' is not served"):
        await anext(service.run("other", turn(), ALICE))

    def build(provider):
        raise InvalidArgument("no such thing")

    with pytest.raises(InvalidArgument, match="no such thing"):
        await anext(service.run("stub", build, ALICE))
    stub.error = ContextOverflow("too long", context_size=1, token_count=2)
    with pytest.raises(ContextOverflow):
        await anext(service.run("stub", turn(), ALICE))
    await until(lambda: is_idle(service))


async def test_an_error_in_the_middle_reaches_its_own_request_only(services):
    service, stub = services(max_num_seqs=2)
    stub.error, stub.error_at = DecodingFailure("no token"), 3
    seen, error = await until_it_breaks(service, turn())
    assert isinstance(error, DecodingFailure)
    assert len(seen) == 3
    stub.error = None
    assert len(await answer(service)) == 6
    await until(lambda: is_idle(service))


async def test_a_full_queue_refuses_and_says_when_to_come_back(services):
    service, stub = services(Stub(gate=threading.Semaphore(0)), max_num_seqs=1, max_queued_requests=1)
    running = [asyncio.create_task(answer(service)) for _ in range(2)]
    await until(lambda: (service.active, service.waiting) == (1, 1))
    with pytest.raises(Overloaded, match="stub answers 1 requests and 1 are waiting") as caught:
        await answer(service)
    assert 1 <= caught.value.retry_after <= 120
    stub.gate.release(100)
    assert [len(events) for events in await asyncio.gather(*running)] == [6, 6]
    await until(lambda: is_idle(service))
    assert len(await answer(service)) == 6


async def test_without_a_queue_only_slots_count(services):
    service, stub = services(Stub(gate=threading.Semaphore(0)), max_num_seqs=2, max_queued_requests=0)
    running = [asyncio.create_task(answer(service)) for _ in range(2)]
    await until(lambda: stub.running == 2)
    with pytest.raises(Overloaded):
        await answer(service)
    stub.gate.release(100)
    await asyncio.gather(*running)


async def test_the_estimate_follows_what_was_measured(services):
    service, _ = services(max_num_seqs=2)
    for _ in range(100):
        service.metrics.in_slot(8.0)
    assert service.metrics.wait_estimate(3, 2) == pytest.approx(16.0, rel=0.01)
    assert service.metrics.wait_estimate(1000, 2) == 120.0
    service.metrics._mean = 0.001
    assert service.metrics.wait_estimate(0, 2) == 1.0


async def test_one_caller_may_have_so_many_and_no_more(services):
    service, stub = services(Stub(gate=threading.Semaphore(0)), max_requests_per_caller=2)
    running = [asyncio.create_task(answer(service)) for _ in range(2)]
    await until(lambda: stub.running == 2)
    with pytest.raises(RateLimited, match="2 requests of this caller") as caught:
        await answer(service)
    assert not isinstance(caught.value, Overloaded)
    bob = asyncio.create_task(answer(service, caller=BOB))
    stub.gate.release(100)
    await asyncio.gather(bob, *running)
    assert len(await answer(service)) == 6


async def test_callers_take_turns():
    gate, order = AdmissionQueue(1), []

    async def one(caller, number):
        await gate.enter(caller)
        order.append(f"{caller}{number}")
        await asyncio.sleep(0)
        gate.leave()

    await gate.enter("a")
    waiting = [asyncio.create_task(one("a", number)) for number in range(3)]
    await asyncio.sleep(0)
    waiting.append(asyncio.create_task(one("b", 0)))
    await asyncio.sleep(0)
    assert (gate.active, gate.waiting) == (1, 4)
    gate.leave()
    await asyncio.gather(*waiting)
    assert order == ["a0", "b0", "a1", "a2"]
    assert (gate.inside, gate.waiting) == (0, 0)


async def test_higher_priorities_go_first_and_callers_take_turns_among_equals():
    gate, order = AdmissionQueue(1), []

    async def one(caller, priority):
        await gate.enter(caller, priority)
        order.append(f"{caller}{priority}")
        gate.leave()

    await gate.enter("a")
    asked = [("a", -5), ("a", 0), ("a", 0), ("b", 0), ("a", 5), ("b", 5), ("c", 0)]
    waiting = [asyncio.create_task(one(*who)) for who in asked]
    await asyncio.sleep(0)
    waiting[-1].cancel()
    await asyncio.sleep(0)
    gate.leave()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert order == ["a5", "b5", "a0", "b0", "a0", "a-5"]
    assert (gate.inside, gate.waiting) == (0, 0)


async def test_a_gate_survives_any_order_of_leaving():
    rng = random.Random(1)
    gate = AdmissionQueue(3, ahead=2)
    most = 0

    async def one(number):
        nonlocal most
        await gate.enter(str(number % 4), number % 3)
        try:
            most = max(most, gate.inside)
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
        finally:
            gate.leave()

    tasks = [asyncio.create_task(one(number)) for number in range(300)]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        rng.choice(tasks).cancel()
    assert (gate.inside, gate.waiting, most) == (0, 0, 5)
    assert not gate._queues


async def test_closing_ends_the_turn_and_frees_the_slot(services):
    service, stub = services(Stub(seconds=0.001), max_num_seqs=1)
    async with aclosing(service.run("stub", turn(100_000), ALICE)) as events:
        await anext(events)
        assert service.active == 1
    await until(lambda: is_idle(service))
    assert stub.running == 0
    assert service.metrics.requests.labels("stub", "cancelled")._value.get() == 1


async def test_a_slot_is_free_when_the_work_is_done_not_when_the_client_has_gone(services):
    service, stub = services(Stub(gate=threading.Semaphore(1), deaf=True), max_num_seqs=1, max_queued_requests=0)
    async with aclosing(service.run("stub", turn(2), ALICE)) as events:
        await anext(events)
    assert service.active == 1
    with pytest.raises(Overloaded):
        await answer(service)
    stub.gate.release(100)
    await until(lambda: is_idle(service))


async def test_leaving_the_queue_leaves_no_trace(services):
    service, stub = services(Stub(gate=threading.Semaphore(0)), max_num_seqs=1, max_queued_requests=5)
    first = asyncio.create_task(answer(service))
    await until(lambda: stub.running == 1)
    waiting = [asyncio.create_task(answer(service)) for _ in range(5)]
    await until(lambda: service.waiting == 5)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await until(lambda: service.waiting == 0)
    stub.gate.release(100)
    await first
    await until(lambda: is_idle(service))


@pytest.mark.parametrize("max_num_seqs", [1, 2], ids=["in the queue", "while running"])
async def test_a_request_that_takes_too_long_is_ended(services, max_num_seqs):
    service, _ = services(Stub(gate=threading.Semaphore(0)), max_num_seqs=max_num_seqs, request_timeout=0.1)
    running = [asyncio.create_task(answer(service)) for _ in range(2)]
    found = await asyncio.gather(*running, return_exceptions=True)
    assert all(isinstance(error, TimedOut) for error in found)
    assert "within the 0.1 seconds" in str(found[0])
    await until(lambda: is_idle(service))


async def test_a_load_that_takes_too_long_ends_the_request_but_not_the_load():
    release, stub = threading.Event(), Stub()
    service = Service(
        ServerSettings(models=("stub",), request_timeout=0.05), load=lambda _: (release.wait(10), stub)[1]
    )
    with pytest.raises(TimedOut):
        await answer(service)
    assert (service.active, service.waiting) == (0, 0)
    release.set()
    await until(lambda: "stub" in service.pool.loaded)
    assert len(await answer(service)) == 6
    service.close()


async def test_draining_lets_finish_what_runs_and_takes_nothing_in(services):
    service, stub = services(Stub(gate=threading.Semaphore(0)))
    running = asyncio.create_task(answer(service))
    await until(lambda: stub.running == 1)
    drain = asyncio.create_task(service.drain(10))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="about to stop") as caught:
        await answer(service)
    assert caught.value.retry_after
    stub.gate.release(100)
    assert len(await running) == 6
    assert await drain is True


async def test_draining_ends_what_takes_too_long(services):
    service, stub = services(Stub(gate=threading.Semaphore(0)))
    running = asyncio.create_task(answer(service))
    await until(lambda: stub.running == 1)
    assert await service.drain(0.05) is False
    with pytest.raises(Overloaded, match="stops"):
        await running
    await until(lambda: is_idle(service))


async def test_ready_says_why_not(services):
    service, _ = services()
    assert service.ready() == "stub is being loaded"
    await service.prepare()
    assert service.ready() == ""
    service.draining = True
    assert "stop" in service.ready()
    broken = Service(ServerSettings(models=("stub",)), load=lambda _: (_ for _ in ()).throw(ModelNotFound("gone")))
    await broken.prepare()
    assert broken.ready() == "gone"
    broken.close()


async def test_a_first_load_that_fails_is_told_and_made_good_by_a_later_one(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("pippin"), "propagate", True)
    outcomes = iter([RuntimeError("the disk said: secret"), None])

    def load(_):
        if error := next(outcomes):
            raise error
        return Stub()

    service = Service(ServerSettings(models=("stub",)), load=load)
    await service.prepare()
    assert service.ready() == "stub could not be loaded; the log says why"
    (record,) = [record for record in caplog.records if record.getMessage() == "model not loaded"]
    line = json.loads(logs.JSONLines().format(record))
    assert (line["model"], line["error"]) == ("stub", "RuntimeError")
    assert "secret" not in str(line)
    async with aclosing(service.run("stub", turn(1), ALICE)) as events:
        assert [event async for event in events]
    assert service.ready() == ""
    service.close()


async def test_embeddings():
    service = Service(
        ServerSettings(models=("stub", "enc")),
        load=lambda _: Stub(),
        load_encoder=lambda _: TinyEncoder(),
        encoders={"enc"},
    )
    texts = [f"text {number}" for number in range(40)]
    vectors, tokens = await service.embed("enc", texts, ALICE)
    assert vectors == TinyEncoder().embed(texts).tolist()
    assert tokens == 80
    assert service.metrics.tokens.labels("enc", "input")._value.get() == 80
    with pytest.raises(UnsupportedCapability, match="no encoder"):
        await service.embed("stub", texts, ALICE)
    with pytest.raises(UnsupportedCapability, match="cannot write"):
        await answer(service, model="enc")
    await until(lambda: is_idle(service))
    service.close()


# --- what is kept of a request ----------------------------------------------------------------------------------------


async def cached(service, caller):
    *_, done = await answer(service, turn(3, "a long prompt that is worth keeping"), caller, "tiny")
    return done.usage.cached_tokens


async def test_what_one_caller_left_is_never_used_for_another(tiny):
    service = Service(ServerSettings(models=("tiny",)), load=lambda _: tiny)
    assert await cached(service, ALICE) == 0
    assert await cached(service, ALICE) > 0
    assert await cached(service, BOB) == 0
    assert await cached(service, ALICE) > 0
    service.close()


async def test_priorities_reach_the_turn_and_the_gate(tiny):
    service, stub = make_service(max_num_seqs=1, max_queued_requests=4)
    seen, stream = [], stub.stream
    stub.stream = lambda turn: seen.append(turn.priority) or stream(turn)
    for priority in (-5, 0, 5):
        async for _ in service.run("", turn(1), ALICE, priority=priority):
            pass
    assert seen == [-5, 0, 5]
    service.close()


async def test_prompts_are_kept_when_the_server_stops_and_used_when_it_starts_again(tiny, tmp_path, monkeypatch):
    folder = tmp_path / "kept" / "prompts"
    settings = ServerSettings(models=("tiny",), prompt_cache=folder)
    service = Service(settings, load=lambda _: tiny)
    assert await cached(service, ALICE) == 0
    service.close()
    assert [file.name for file in folder.iterdir()] == ["tiny.prompts"]
    service = Service(settings, load=lambda _: tiny)
    assert await cached(service, BOB) == 0
    assert await cached(service, ALICE) > 0
    service.close()
    # a file that cannot be used is told in the log, and written anew
    (folder / "tiny.prompts").write_bytes(b"PIPPINKV" + bytes(100))
    told = []
    monkeypatch.setattr(logs.log, "error", lambda text, **more: told.append((text, more["extra"]["fields"]["error"])))
    service = Service(settings, load=lambda _: tiny)
    assert await cached(service, ALICE) == 0
    service.close()
    assert told == [("prompt cache not used", "PromptCacheMismatch")]
    service = Service(settings, load=lambda _: tiny)
    assert await cached(service, ALICE) > 0
    service.close()


async def test_prompts_that_cannot_be_kept_do_not_keep_the_server_from_stopping(tiny, tmp_path, monkeypatch):
    service = Service(ServerSettings(models=("tiny",), prompt_cache=tmp_path / "kept"), load=lambda _: tiny)
    assert await cached(service, ALICE) == 0
    told = []
    monkeypatch.setattr(logs.log, "error", lambda text, **more: told.append((text, more["extra"]["fields"]["error"])))
    shutil.rmtree(tmp_path / "kept")
    service.close()
    assert told == [("prompt cache not written", "InvalidInput")]


async def test_guesses_ahead_are_checked_and_counted(tiny):
    options = ServerSettings(models=("tiny",), speculate="twin", max_num_seqs=2)
    service = Service(options, load=lambda name: replace(tiny, name=name))
    *_, done = await answer(service, turn(40, "abc abc abc"), ALICE, "tiny")
    assert done.usage.accepted_tokens > 20
    stats = service.pool.loaded["tiny"].engine.stats()
    assert (stats.drafted, stats.accepted) == (done.usage.drafted_tokens, done.usage.accepted_tokens)
    weights = sum(parameter.nbytes for parameter in tiny.module.parameters())
    assert service.pool.loaded["tiny"].nbytes > 2 * weights, "what guesses ahead takes memory, too"
    service.close()


async def test_a_model_whose_vocabulary_is_another_is_served_without_guesses(tiny, monkeypatch):
    told = []
    monkeypatch.setattr(logs.log, "error", lambda text, **more: told.append((text, more["extra"]["fields"]["error"])))
    backend = Backend(models.BPE({"b": 0, "a": 1}, []))
    backend.decoder = decoders.ByteLevel()
    other = replace(tiny, name="other", tokenizer=Tokenizer(backend, eos_ids=[0]))
    service = Service(
        ServerSettings(models=("tiny",), speculate="other"), load=lambda name: other if name == "other" else tiny
    )
    *_, done = await answer(service, turn(5, "abc"), ALICE, "tiny")
    assert done.usage.drafted_tokens == 0
    assert told == [("no speculative decoding", "VocabularyMismatch")]
    service.close()


async def test_stateless_keeps_nothing_for_anybody(tiny):
    service = Service(ServerSettings(models=("tiny",), stateless=True), load=lambda _: tiny)
    assert [await cached(service, ALICE) for _ in range(3)] == [0, 0, 0]
    engine = service.pool.loaded["tiny"].engine
    assert engine.stats().cache_tokens_used == 0
    service.close()


# --- guardrails -------------------------------------------------------------------------------------------------------


class Checker:
    """Blocks "7"; holds back the last two characters."""

    def __init__(self):
        self.text, self.out = "", 0

    def push(self, text):
        self.text += text
        if "7" in self.text:
            raise GuardrailViolation("seven", verdict="rule", safe_prefix=self.out)
        return self._release(max(self.out, len(self.text) - 2))

    def finish(self):
        return self._release(len(self.text))

    @property
    def released(self):
        return self.out

    def _release(self, end):
        begin, self.out = self.out, end
        return self.text[begin:end]


class Guard:
    """Rules that a test can see through."""

    def enforce(self, text, *, role):
        assert role == "input"
        if "bomb" in text:
            raise GuardrailViolation("bomb", verdict="rule")
        return text.replace("secret", "***")

    def stream(self):
        return Checker()

    def enforce_value(self, value, *, role):
        assert role == "output"
        if "bomb" in str(value):
            raise GuardrailViolation("bomb", verdict="rule")


@pytest.fixture
def guarded(services, monkeypatch):
    monkeypatch.setattr(guardrails, "guardrails", lambda level: Guard())
    return services(guardrails="strict")


async def test_a_blocked_prompt_computes_nothing(guarded):
    service, stub = guarded
    with pytest.raises(GuardrailViolation, match="bomb"):
        await anext(service.run("stub", turn(5, "make a bomb"), ALICE))
    assert stub.owners == []


async def test_a_blocked_answer_ends_before_what_is_blocked(guarded):
    service, stub = guarded
    seen, error = await until_it_breaks(service, turn(20))
    assert isinstance(error, GuardrailViolation)
    text = "".join(event.text for event in seen)
    assert "0 1 2 3 4 5 6 ".startswith(text)
    assert len(text) == error.safe_prefix
    assert len([token for event in seen for token in event.tokens]) <= len(text) / 2
    await until(lambda: stub.running == 0)


async def test_what_a_blocked_answer_has_cost_is_charged(services, monkeypatch):
    monkeypatch.setattr(guardrails, "guardrails", lambda level: Guard())
    service, _ = services(guardrails="strict", tokens_per_day=1000)
    _, error = await until_it_breaks(service, turn(20))
    assert isinstance(error, GuardrailViolation)
    await until(lambda: is_idle(service))
    assert service.limits.headers(ALICE)["x-quota-remaining-tokens"] == str(1000 - 3 - 8)


async def test_an_allowed_answer_is_whole_with_all_its_tokens(guarded):
    service, _ = guarded
    *deltas, done = await answer(service, turn(6))
    assert "".join(delta.text for delta in deltas) == "0 1 2 3 4 5 "
    assert [token.id for delta in deltas for token in delta.tokens] == list(range(6))
    released = 0
    for delta in deltas:  # a token never comes before its text
        released += len(delta.text)
        assert all(2 * token.id + 2 <= released for token in delta.tokens)
    assert isinstance(done, Done)


async def test_a_masked_prompt_is_what_the_model_reads(guarded):
    service, _ = guarded
    seen = []

    def build(provider):
        provider.stream, before = lambda turn: (seen.append(turn.transcript), before(turn))[1], provider.stream
        return turn(2, "my secret")(provider)

    await answer(service, build)
    assert [entry.text for entry in seen[0]] == ["my ***"]


def test_thoughts_and_arguments_of_calls_are_checked_too():
    asked = ProviderRequest(Transcript(entries=(Prompt("x"),)))
    events = [ReasoningDelta("let me "), ReasoningDelta("think"), TextDelta("yes"), Done("stop")]
    assert list(guardrails.guarded(Guard(), asked, iter(events))) == [
        ReasoningDelta("let m"),
        ReasoningDelta("e thi"),
        TextDelta("y"),
        ReasoningDelta("nk"),
        TextDelta("es"),
        Done("stop"),
    ]
    with pytest.raises(GuardrailViolation):
        list(guardrails.guarded(Guard(), asked, iter([ReasoningDelta("7")])))
    calls = ToolCallsMade((ToolCall(id="1", name="make", arguments={"what": "a bomb"}),))
    with pytest.raises(GuardrailViolation):
        list(guardrails.guarded(Guard(), asked, iter([calls, Done("tool_calls")])))


def test_an_escape_in_json_hides_nothing():
    asked = ProviderRequest(Transcript(entries=(Prompt("x"),)), schema=Schema(dict[str, str]))
    events = [TextDelta('{"what": "b'), TextDelta("\\u006fmb"), TextDelta('"}'), Done("stop")]
    with pytest.raises(GuardrailViolation, match="bomb"):
        list(guardrails.guarded(Guard(), asked, iter(events)))


@pytest.mark.parametrize("level", ["default", "permissive"])
def test_the_real_guardrails_fit(level):
    guard = guardrails.guardrails(level)
    asked = ProviderRequest(Transcript(entries=(Prompt("When was the kettle invented?"),)))
    assert guardrails.checked_request(guard, asked) == asked
    words = ["The kettle ", "was invented ", "long ago."]
    events = [TextDelta(word, (Token(number, word),)) for number, word in enumerate(words)]
    *deltas, done = guardrails.guarded(guard, asked, iter([*events, Done("stop")]))
    assert "".join(delta.text for delta in deltas) == "".join(words)
    assert [token.id for delta in deltas for token in delta.tokens] == [0, 1, 2]
    assert done == Done("stop")


# --- books ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_clients_do_nothing_is_left_behind(tiny, seed):
    """Clients of a real engine that leave at random moments: before, between and after tokens, in queue and slot."""
    service = Service(ServerSettings(models=("tiny",), max_num_seqs=4, max_queued_requests=1000), load=lambda _: tiny)
    rng = random.Random(seed)

    async def client(number):
        build = lambda provider: ProviderRequest(  # noqa: E731
            Transcript(entries=(Prompt("x" * rng.randrange(1, 200)),)),
            options=GenerationOptions(max_tokens=rng.randrange(1, 40), temperature=1.0, seed=number),
        )
        events = service.run("tiny", build, Caller(str(number % 5)))
        with contextlib.suppress(asyncio.CancelledError):
            async with aclosing(events):
                for _ in range(rng.randrange(8)):
                    if not isinstance(await anext(events, None), TextDelta):
                        break

    tasks = [asyncio.create_task(client(number)) for number in range(120)]
    for _ in range(40):
        await asyncio.sleep(0.005)
        rng.choice(tasks).cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await until(lambda: is_idle(service))
    engine = service.pool.loaded["tiny"].engine
    await until(lambda: engine.stats().active == engine.stats().waiting == 0)
    service.close()
