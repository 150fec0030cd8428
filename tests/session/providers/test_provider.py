"""A session over a provider of one's own, and what it does with every kind of event."""

import asyncio
import threading
import time
import weakref
from dataclasses import replace
from typing import Annotated

import pytest
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

import pippin
from pippin.core.errors import (
    AnswerTruncated,
    Cancelled,
    ConcurrentRequests,
    Denied,
    GuardrailViolation,
    InvalidAnswer,
    InvalidArgument,
    InvalidProviderAnswer,
    Refusal,
    TimedOut,
    ToolCallError,
    TranscriptMutation,
    UnsupportedCapability,
    UnsupportedContent,
)
from pippin.session import (
    Allow,
    Answer,
    Attachment,
    Capabilities,
    Deny,
    GenerationOptions,
    Hooks,
    Instructions,
    Profile,
    Prompt,
    Provider,
    Reasoning,
    Replace,
    Session,
    StructuredSegment,
    ToolCall,
    ToolCalls,
    ToolOutput,
    Transcript,
    Usage,
)
from pippin.session.guardrails import Guardrails, TermRule
from pippin.session.providers.provider import Done, ReasoningDelta, Refused, TextDelta, ToolCallsMade

ALL = Capabilities(*[True] * 7)


class Scripted(Provider):
    """Answers each turn with the next list of events, and remembers what it was asked."""

    name = "scripted"

    def __init__(self, *turns, capabilities=ALL, context_size=None):
        self.turns, self.asked = list(turns), []
        self.capabilities, self.context_size = capabilities, context_size

    def stream(self, turn):
        self.asked.append(turn)
        return self._events(self.turns.pop(0), turn)

    def _events(self, events, turn):
        for event in events:
            if callable(event):
                event(turn)
            elif event == "wait":
                turn.cancel.wait(60)
                yield Done("cancelled")
                return
            else:
                yield event


def said(text, *, reason="stop", **usage):
    return [TextDelta(text[:2]), TextDelta(text[2:]), Done(reason, Usage(**usage))]


def calling(*calls, text=""):
    return [TextDelta(text), ToolCallsMade(tuple(calls)), Done("tool_calls", Usage(5, 0, 3))]


class City(BaseModel):
    name: str
    people: int = 0


@pippin.tool
def add(a: int, b: int) -> int:
    """Add."""
    return a + b


CALL = ToolCall(id="c1", name="add", arguments={"a": 2, "b": 3})


def test_text_types_and_usage():
    provider = Scripted(said("Hello.", input_tokens=7, output_tokens=2), said('{"name": "Rome"}'))
    session = Session(provider, instructions="Be brief.")
    stream = session.stream("Hi")
    shown = list(stream)
    assert [s.content for s in shown] == ["He", "Hello.", "Hello."]
    assert [s.is_complete for s in shown] == [False, False, True]
    assert session.respond("Where?", generating=City).content == City(name="Rome")
    assert session.usage == Usage(7, 0, 2)
    assert session.transcript.entries == (
        Instructions("Be brief."),
        Prompt("Hi"),
        Answer("Hello."),
        Prompt("Where?"),
        Answer(segments=(StructuredSegment(text='{"name": "Rome"}', schema_name="City"),)),
    )
    assert provider.asked[1].transcript == Transcript(entries=session.transcript.entries[:4])


def test_a_tool_turn_shows_nothing_and_goes_on():
    provider = Scripted(calling(CALL), said("It is 5."))
    session = Session(provider, tools=[add])
    stream = session.stream("2 + 3?")
    assert [s.content for s in stream] == ["It", "It is 5.", "It is 5."]
    assert session.transcript.entries[1:3] == (ToolCalls(calls=(CALL,)), ToolOutput("5", call_id="c1", name="add"))
    assert [t.name for t in provider.asked[0].tools] == ["add"]


def test_several_calls_run_side_by_side_and_keep_their_order():
    barrier = threading.Barrier(2, timeout=5)

    @pippin.tool
    def meet(name: str) -> str:
        """Wait for the other."""
        barrier.wait()
        return name.upper()

    calls = tuple(ToolCall(id=n, name="meet", arguments={"name": n}) for n in "xy")
    session = Session(Scripted(calling(*calls), said("Done.")), tools=[meet])
    outputs = [e.text for e in session.respond("Go").transcript_entries if isinstance(e, ToolOutput)]
    assert outputs == ["X", "Y"]


def test_a_tool_that_was_never_offered():
    session = Session(Scripted(calling(replace_name(CALL, "rm"))), tools=[add])
    with pytest.raises(ToolCallError, match=r"'rm', which is not one of its tools \(add\)"):
        session.respond("Go")
    assert len(session.transcript) == 0


def replace_name(call, name):
    return call.model_copy(update={"name": name})


def test_reasoning_is_kept_apart_with_its_signature():
    events = [ReasoningDelta("Let me "), ReasoningDelta("see.", b"seal"), *said("Four.")]
    session = Session(Scripted(events))
    stream = session.stream("2 + 2?", options=GenerationOptions(reasoning="light"))
    assert [s.content for s in stream][-1] == "Four."
    _prompt, thought, answer = session.transcript
    assert (thought.kind, thought.text, thought.signature) == ("reasoning", "Let me see.", b"seal")
    assert Transcript.from_json(session.transcript.to_json()) == session.transcript
    assert answer.text == "Four."


@pytest.mark.parametrize(
    ("events", "error", "message"),
    [
        ([Refused("I would rather not.")], Refusal, "declined: I would rather not"),
        ([TextDelta("Hal")], InvalidProviderAnswer, "without saying why"),
        (said("{]"), InvalidProviderAnswer, "did not hold to the type"),
        (said('{"name"', reason="length"), AnswerTruncated, "not complete"),
        ([TextDelta("a"), Done("cancelled")], Cancelled, "cancelled"),
    ],
)
def test_what_a_provider_does_wrong(events, error, message):
    session = Session(Scripted(events))
    with pytest.raises(error, match=message):
        session.respond("Hi", generating=City)
    assert len(session.transcript) == 0
    assert not session.is_responding


PNG = Attachment(media_type="image/png", data="iVBO", label="map.png")


@pytest.mark.parametrize(
    ("name", "request_"),
    [
        ("guided_generation", {"generating": City}),
        ("grammars", {"generating": pippin.Regex("a+")}),
        ("tool_calling", {"tools": [add]}),
        ("required_tool_calls", {"tools": [add], "options": GenerationOptions(tool_calling="required")}),
        ("reasoning", {"options": GenerationOptions(reasoning=10)}),
        ("logprobs", {"options": GenerationOptions(logprobs=2)}),
        ("vision", {"prompt": ["Where is this?", PNG]}),
    ],
)
def test_what_a_provider_cannot_do_is_refused_before_it_is_asked(name, request_):
    request_ = dict(request_)
    provider = Scripted(said("no"), capabilities=replace(ALL, **{name: False}))
    session = Session(provider, tools=request_.pop("tools", ()))
    with pytest.raises(UnsupportedContent if name == "vision" else UnsupportedCapability) as caught:
        session.respond(request_.pop("prompt", "Hi"), **request_)
    assert ("map.png" if name == "vision" else name.replace("_", " ")) in str(caught.value)
    assert provider.asked == []
    assert not session.is_responding


# --- errors: revert or preserve ---------------------------------------------------------------------------------------


def test_revert_and_preserve():
    @pippin.tool
    def broken() -> str:
        """Break."""
        raise RuntimeError("no luck")

    def run(on_error):
        call = ToolCall(id="c9", name="broken", arguments={})
        session = Session(Scripted(calling(CALL, call)), tools=[add, broken], on_error=on_error)
        before = session.transcript.to_json()
        with pytest.raises(ToolCallError):
            session.respond("Go")
        return session, before

    session, before = run("revert")
    assert session.transcript.to_json() == before
    session, _ = run("preserve")
    kinds = [entry.kind for entry in session.transcript]
    assert kinds == ["prompt", "tool_calls", "tool_output", "tool_output"]
    assert {e.call_id for e in session.transcript if isinstance(e, ToolOutput)} == {"c1", "c9"}


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_preserve_keeps_the_part_of_the_answer_that_was_shown(how):
    session = Session(Scripted([TextDelta("Once upon"), "wait"]), on_error="preserve")
    stream = session.stream("A story")
    assert next(stream).content == "Once upon"
    if how == "cancel":
        stream.cancel()
        with pytest.raises(Cancelled):
            next(stream)
    else:
        stream.close()
    assert session.transcript.entries == (Prompt("A story"), Answer("Once upon"))
    assert not session.is_responding


@pytest.mark.parametrize("generating", [None, City])
def test_preserve_keeps_nothing_that_a_rule_or_a_hook_stopped(generating):
    good, bad = '{"name": "Rome"}', '{"name": "zebra crossing"}'
    session = Session(Scripted(split(bad)), on_error="preserve", guardrails=RULES)
    with pytest.raises(GuardrailViolation):
        session.respond("Where?", generating=generating)
    assert "zebra crossing" not in session.transcript.to_json()
    session = Session(
        Scripted(split(good)), on_error="preserve", hooks=Hooks(on_response=lambda response: Deny("not that"))
    )
    with pytest.raises(Denied):
        session.respond("Where?", generating=generating)
    assert session.transcript.entries == (Prompt("Where?"),)


# --- one reader, however it is left -----------------------------------------------------------------------------------


class Gate:
    """A provider's step that waits until it is let go."""

    def __init__(self):
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self, turn):
        self.reached.set()
        assert self.open.wait(5)


def _is_free(session):
    for _ in range(500):
        if not session.is_responding:
            return True
        time.sleep(0.01)
    return False


def test_a_second_reader_is_refused_and_does_not_free_the_session():
    gate = Gate()
    session = Session(Scripted([gate, *said("Hello.")]))
    stream = session.stream("Hi")
    first = threading.Thread(target=lambda: next(stream))
    first.start()
    assert gate.reached.wait(5)
    with pytest.raises(ConcurrentRequests, match="another thread is reading"):
        next(stream)
    assert session.is_responding
    gate.open.set()
    first.join()
    assert [snapshot.content for snapshot in stream][-1] == stream.response.content == "Hello."


def test_closing_while_another_thread_reads_frees_the_session_once_that_step_is_done():
    gate = Gate()
    session = Session(Scripted([gate, *said("Hello.")]), on_error="preserve")
    stream = session.stream("Hi")
    reader = threading.Thread(target=lambda: next(stream))
    reader.start()
    assert gate.reached.wait(5)
    stream.close()
    assert session.is_responding
    gate.open.set()
    reader.join()
    assert not session.is_responding
    assert session.transcript.entries == (Prompt("Hi"), Answer("He"))


def test_a_cancelled_task_leaves_its_block_and_frees_the_session():
    gate = Gate()
    session = Session(Scripted([gate, *said("Hello.")]))
    held = []

    async def read():
        with session.stream("Hi") as stream:
            held.append(stream)  # whoever still holds it does not keep the session busy
            async for _ in stream:
                pass

    async def run():
        task = asyncio.create_task(read())
        await asyncio.to_thread(gate.reached.wait, 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.open.set()

    asyncio.run(run())
    assert _is_free(session)
    assert len(session.transcript) == 0


def test_leaving_an_async_loop_frees_the_session_at_once():
    session = Session(Scripted(*[said("Hello.") for _ in range(40)]))

    async def run():
        for _ in range(20):
            async for _ in session.stream("Hi"):
                break
            assert (await session.arespond("Again")).content == "Hello."

    asyncio.run(run())


def test_the_event_loop_is_free_while_a_hook_waits():
    answered = threading.Event()
    session = Session(
        Scripted(said("ok")), hooks=Hooks(on_prompt=lambda prompt: Allow() if answered.wait(5) else Deny("no answer"))
    )

    async def run():
        asyncio.get_running_loop().call_later(0.05, answered.set)
        return await session.arespond("Hi")

    assert asyncio.run(run()).content == "ok"


def test_what_is_kept_for_a_provider_is_never_given_to_another():
    session = Session(Scripted())
    for number in range(50):
        provider = Scripted()
        memory = session._provider_memory(provider)
        assert memory == {}
        memory["prefix"] = number
        assert session._provider_memory(provider) is memory
        gone = weakref.ref(provider)
        del provider
        assert gone() is None  # its address may be the next one's
    assert len(session._memory) <= 2


def test_ids_of_calls_stay_apart_though_the_provider_gives_one_twice():
    session = Session(Scripted(calling(CALL, CALL), said("5"), calling(CALL), said("5")), tools=[add])
    session.respond("Add")
    session.respond("Add")
    calls = [call.id for entry in session.transcript if isinstance(entry, ToolCalls) for call in entry.calls]
    assert len(set(calls)) == 3
    assert [entry.call_id for entry in session.transcript if isinstance(entry, ToolOutput)] == calls


def test_what_is_said_before_a_call_is_remembered_masked():
    provider = Scripted(calling(CALL, text="My key is hunter2."), said("5"))
    session = Session(provider, tools=[add], guardrails=RULES)
    session.respond("Add")
    assert session.transcript.entries[1].text == "My key is [key]."
    assert "hunter2" not in provider.asked[1].transcript.to_json()


def test_an_answer_that_takes_too_long():
    session = Session(Scripted(["wait"]))
    began = time.perf_counter()
    with pytest.raises(TimedOut, match=r"within 0\.05 seconds"):
        session.respond("Hi", options=GenerationOptions(timeout=0.05))
    assert time.perf_counter() - began < 30  # it would have waited for 60


def test_the_error_of_a_timeout_has_what_was_written():
    session = Session(Scripted([TextDelta("The capital "), TextDelta("is"), "wait"]))
    with pytest.raises(TimedOut) as caught:
        session.respond("Hi", options=GenerationOptions(timeout=0.2))
    assert caught.value.partial == "The capital is"


def test_the_error_of_a_timeout_has_nothing_that_guardrails_hold_back():
    session = Session(Scripted([TextDelta("My key is hunter2."), TextDelta(" And it is"), "wait"]), guardrails=RULES)
    with pytest.raises(TimedOut) as caught:
        session.respond("Hi", options=GenerationOptions(timeout=0.2))
    assert caught.value.partial
    assert "hunter2" not in caught.value.partial


@pytest.mark.parametrize("cut", ["answer", "call"])
def test_what_was_cut_is_nothing_that_guardrails_hold_back(cut):
    text, schema = '{"key": "hunter2', None if cut == "call" else dict[str, str]
    events = [TextDelta(text)] if cut == "answer" else []
    done = Done("length", Usage(output_tokens=9), partial_call=text if cut == "call" else "")
    for guardrails, is_there in ((None, True), (RULES, False)):
        session = Session(Scripted([*events, done]), guardrails=guardrails)
        with pytest.raises(AnswerTruncated) as caught:
            session.respond("Hi", generating=schema)
        assert ("hunter2" in caught.value.partial) is is_there


@pytest.mark.parametrize("how", ["timeout", "cancel"])
def test_nobody_waits_for_a_tool_once_the_answer_is_not_wanted(how):
    running, end = threading.Event(), threading.Event()

    @pippin.tool
    def slow() -> str:
        """Take long."""
        running.set()
        end.wait(60)
        return "late"

    call = ToolCall(id="c1", name="slow", arguments={})
    session = Session(Scripted(calling(call), said("no")), tools=[slow], tool_timeout=None, on_error="preserve")
    options = GenerationOptions(timeout=0.2 if how == "timeout" else None)
    stream = session.stream("Go", options=options)
    if how == "cancel":
        threading.Thread(target=lambda: running.wait(5) and stream.cancel()).start()
    began = time.perf_counter()
    with pytest.raises(TimedOut if how == "timeout" else Cancelled):
        list(stream)
    assert time.perf_counter() - began < 30  # the tool waits for 60
    assert not session.is_responding
    assert [entry.kind for entry in session.transcript] == ["prompt", "tool_calls", "tool_output"]
    end.set()


def test_the_transcript_is_not_replaced_while_it_grows():
    session = Session(Scripted(said("Hello.")))
    with session.stream("Hi") as stream:
        next(stream)
        with pytest.raises(TranscriptMutation, match="cannot replace the transcript"):
            session.transcript = Transcript()


# --- hooks ------------------------------------------------------------------------------------------------------------


def test_hooks_replace_what_passes():
    provider = Scripted([ReasoningDelta("hm"), *calling(CALL)], said("It is 50."))
    hooks = Hooks(
        on_prompt=lambda prompt: Replace(prompt.text.upper()),
        on_reasoning=lambda thought: Replace("(thought)"),
        on_tool_call=lambda call: Replace({"a": 20, "b": 30}),
        on_tool_output=lambda output: Replace(f"<{output.text}>"),
        on_response=lambda response: Replace(response.content + "!"),
    )
    session = Session(provider, tools=[add], hooks=hooks)
    response = session.respond("sum", options=GenerationOptions(reasoning="light"))
    assert response.content == response.raw_content == "It is 50.!"
    assert [e.text for e in session.transcript] == ["SUM", "(thought)", "", "<50>", "It is 50.!"]
    assert session.transcript.entries == response.transcript_entries


def test_hooks_replace_a_typed_answer():
    hooks = Hooks(on_response=lambda response: Replace(City(name="Oslo", people=7)))
    response = Session(Scripted(said('{"name": "Rome"}')), hooks=hooks).respond("Where?", generating=City)
    assert response.content == City(name="Oslo", people=7)
    assert response.transcript_entries[-1].segments[0].value == {"name": "Oslo", "people": 7}
    with pytest.raises(InvalidArgument, match="must replace text by text"):
        Session(Scripted(said("Hi.")), hooks=Hooks(on_response=lambda r: Replace(3))).respond("Hi")


@pytest.mark.parametrize("hook", ["on_prompt", "on_reasoning", "on_response"])
def test_a_hook_that_denies_ends_the_request(hook):
    session = Session(
        Scripted([ReasoningDelta("hm"), *said("Yes.")]), hooks=Hooks(**{hook: lambda x: pippin.Deny("no")})
    )
    with pytest.raises(Denied, match=r"^no$"):
        session.respond("Hi", options=GenerationOptions(reasoning="light"))
    assert len(session.transcript) == 0


def test_a_denied_call_or_output_is_told_to_the_model():
    for hook in ("on_tool_call", "on_tool_output"):
        provider = Scripted(calling(CALL), said("I see."))
        session = Session(provider, tools=[add], hooks=Hooks(**{hook: lambda x: pippin.Deny("not today")}))
        session.respond("Go")
        assert provider.asked[1].transcript.entries[-1] == ToolOutput("not today", call_id="c1", name="add")


# --- profiles ---------------------------------------------------------------------------------------------------------


def test_a_profile_decides_anew_for_each_turn():
    small, large = Scripted(said("small"), said("small")), Scripted(said("large"))
    activated = []

    def profile(session):
        if session.state.get("hard"):
            return Profile("hard", large, "Think.", tools=[add], temperature=0.5, reasoning="deep")
        return Profile("easy")

    hooks = Hooks(on_activate=lambda profile: activated.append(profile.name))
    session = Session(small, instructions="Be brief.", profile=profile, hooks=hooks)
    assert session.respond("1").content == "small"
    session.state["hard"] = True
    assert session.respond("2").content == "large"
    session.state["hard"] = False
    assert session.respond("3", options=GenerationOptions(temperature=0.1)).content == "small"
    assert activated == ["easy", "hard", "easy"]
    turn = large.asked[0]
    assert turn.transcript.entries[0] == Instructions("Think.")
    assert [t.name for t in turn.tools] == ["add"]
    assert (turn.options.temperature, turn.options.reasoning) == (0.5, "deep")
    assert session.transcript.entries[0] == Instructions("Be brief.")
    assert small.asked[1].options.temperature == 0.1
    assert not small.asked[1].tools


def test_a_request_outranks_its_profile():
    provider = Scripted(said("x"))
    session = Session(provider, profile=lambda session: Profile(temperature=0.9, reasoning="deep"))
    session.respond("Hi", options=GenerationOptions(temperature=0.2, reasoning=7))
    assert (provider.asked[0].options.temperature, provider.asked[0].options.reasoning) == (0.2, 7)
    with pytest.raises(InvalidArgument, match="must return a Profile"):
        Session(Scripted(), profile=lambda session: None).respond("Hi")


def test_a_provider_that_cannot_count_says_so():
    with pytest.raises(UnsupportedCapability, match="scripted cannot count"):
        Session(Scripted()).token_count("Hi")


def test_reasoning_entries_are_bytes_in_and_bytes_out():
    entry = Reasoning(text="hm", signature=b"c2VhbA==")
    assert entry.signature == b"seal"


# --- guardrails -------------------------------------------------------------------------------------------------------

RULES = Guardrails(
    [
        TermRule(id="no-zebra", category="zoo", terms=("zebra crossing",)),
        TermRule(id="mask-key", category="secret", terms=("hunter2",), replacement="[key]"),
    ],
    thresholds={"zoo": 0.5, "secret": 0.5},
    detect_refusals=True,
)


def split(text):
    return [*(TextDelta(letter) for letter in text), Done("stop")]


def test_a_blocked_prompt_is_never_sent():
    provider = Scripted(said("no"))
    session = Session(provider, guardrails=RULES)
    with pytest.raises(GuardrailViolation, match="no-zebra") as caught:
        session.respond("Draw a zebra crossing.")
    assert caught.value.verdict.action == "block"
    assert provider.asked == []
    assert session.respond("Draw a zebra, crossing the river.").content == "no"


def test_a_masked_prompt_is_sent_masked():
    provider = Scripted(said("ok"))
    Session(provider, guardrails=RULES).respond(["My key is hunter2."])
    assert provider.asked[0].transcript.entries[-1] == Prompt("My key is [key].")


def test_a_blocked_answer_shows_nothing_of_what_is_blocked():
    session = Session(Scripted(split("See the zebra crossing there.")), guardrails=RULES)
    shown = []
    with pytest.raises(GuardrailViolation) as caught:
        shown.extend(snapshot.content for snapshot in session.stream("Hi"))
    assert shown[-1] == "See the "
    assert caught.value.safe_prefix == len("See the ")
    assert len(session.transcript) == 0
    assert not session.is_responding


def test_an_answer_that_passes_is_shown_whole_and_masked_where_a_rule_says():
    session = Session(Scripted(split("The zebra is on hunter2 street, zebra")), guardrails=RULES)
    stream = session.stream("Hi")
    text = "".join(snapshot.delta for snapshot in stream)
    assert text == stream.response.content == session.transcript.entries[-1].text
    assert text == "The zebra is on [key] street, zebra"


def test_a_typed_answer_is_covered():
    good = split('{"name": "zebra town", "people": 3}')
    session = Session(Scripted(good, split('{"name": "zebra \\u0063rossing"}')), guardrails=RULES)
    assert [*session.stream("Where?", generating=City)][-1].content == City(name="zebra town", people=3)
    shown = []
    with pytest.raises(GuardrailViolation) as caught:
        shown.extend((s.content.name, s.raw_content) for s in session.stream("Where?", generating=City))
    assert caught.value.verdict.decisions[0].path == "name"
    assert not any("zebra" in text for name, raw in shown for text in (name or "", raw))
    masked = Session(Scripted(split('{"name": "hunter2"}')), guardrails=RULES).respond("Where?", generating=City)
    assert masked.content.name == "[key]"
    assert "hunter2" not in masked.raw_content + masked.transcript_entries[-1].text


def test_a_refusal_is_no_violation():
    session = Session(Scripted(said("I'm sorry, but I can't help with that.")), guardrails=RULES)
    with pytest.raises(Refusal, match="declined: I'm sorry") as caught:
        session.respond("Hi")
    assert caught.value.explanation == "I'm sorry, but I can't help with that."


def test_the_tokens_of_a_refusal_are_counted():
    session = Session(Scripted([Refused("Not that."), Done("stop", Usage(7, 0, 2))], [Refused("Nor that.")]))
    for said_ in ("Not that", "Nor that"):
        with pytest.raises(Refusal, match=said_):
            session.respond("Hi")
    assert session.usage == Usage(7, 0, 2)


# --- validators of the answer's type ----------------------------------------------------------------------------------


class Town(BaseModel):
    name: str
    people: int = Field(ge=0)

    @field_validator("name")
    @classmethod
    def begins_large(cls, name):
        if not name[:1].isupper():
            raise ValueError("a name begins with a capital")
        return name.strip()

    @model_validator(mode="after")
    def is_lived_in(self):
        if not self.people:
            raise ValueError("nobody lives there")
        return self


BAD, EMPTY, GOOD = '{"name": "rome", "people": 3}', '{"name": "Rome", "people": 0}', '{"name": "Rome ", "people": 3}'


def test_an_answer_that_a_validator_does_not_accept_is_asked_for_again_and_only_the_accepted_one_is_kept():
    tries = [[ReasoningDelta("Hm. "), *said(BAD, output_tokens=9)], said(EMPTY, output_tokens=9)]
    provider = Scripted(*tries, [ReasoningDelta("Ah."), *said(GOOD, output_tokens=10)])
    session = Session(provider)
    response = session.respond("Where?", generating=Town)
    assert response.content == Town(name="Rome", people=3)
    assert response.content.name == "Rome"  # what a validator returns is the value
    assert response.usage.output_tokens == session.usage.output_tokens == 28
    assert response.reasoning == "Ah."
    assert [entry.kind for entry in session.transcript] == ["prompt", "reasoning", "response"]
    assert response.transcript_entries == session.transcript.entries
    # each try reads the last one and its reason, and no earlier ones
    seen = [[entry.text for entry in turn.transcript] for turn in provider.asked]
    assert seen[0] == ["Where?"]
    assert [len(each) for each in seen[1:]] == [3, 3]
    assert seen[1][1] == BAD
    assert "name: a name begins with a capital" in seen[1][2]
    assert seen[2][1] == EMPTY
    assert "nobody lives there" in seen[2][2]


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_retries_are_bounded_and_the_error_has_the_last_value(retries):
    provider = Scripted(*[said(BAD, output_tokens=2)] * retries, said(EMPTY, output_tokens=2))
    session = Session(provider)
    with pytest.raises(InvalidAnswer, match=r"is_lived_in.*nobody lives there.*raise retries") as caught:
        session.respond("Where?", generating=Town, options=GenerationOptions(retries=retries))
    error = caught.value
    assert (error.value, error.text, error.tries) == ({"name": "Rome", "people": 0}, EMPTY, retries + 1)
    assert error.reason == "nobody lives there"
    assert session.usage.output_tokens == 2 * (retries + 1)
    assert not session.transcript.entries
    assert not session.is_responding


def test_in_a_stream_only_the_last_snapshot_is_validated():
    session = Session(Scripted(said(BAD), said(GOOD)))
    stream = session.stream("Where?", generating=Town)
    shown = list(stream)
    assert [snapshot.is_complete for snapshot in shown] == [False] * (len(shown) - 1) + [True]
    assert {snapshot.content.name for snapshot in shown[:-1]} >= {"rome", "Rome "}
    assert shown[-1].content == stream.response.content == Town(name="Rome", people=3)


def test_tools_that_were_called_before_an_answer_that_is_not_accepted_stay():
    session = Session(Scripted(calling(CALL), said(BAD), calling(CALL), said(GOOD)), tools=[add])
    assert session.respond("Where?", generating=Town).content.name == "Rome"
    kinds = ["prompt", "tool_calls", "tool_output", "tool_calls", "tool_output", "response"]
    assert [entry.kind for entry in session.transcript] == kinds


def test_what_is_preserved_of_a_request_whose_answer_is_never_accepted_has_no_corrections():
    session = Session(Scripted(said(BAD), said(BAD)), on_error="preserve")
    with pytest.raises(InvalidAnswer):
        session.respond("Where?", generating=Town, options=GenerationOptions(retries=1))
    assert [entry.text for entry in session.transcript] == ["Where?", BAD]


def test_guardrails_and_hooks_see_the_accepted_answer_alone():
    heard = []
    hooks = Hooks(on_response=lambda response: heard.append(response.content) or Allow())
    rules = Guardrails([TermRule(id="no-oslo", category="places", terms=("Oslo",))])
    session = Session(Scripted(said(BAD), said(GOOD)), hooks=hooks, guardrails=rules)
    stream = session.stream("Where?", generating=Town)
    assert list(stream)[-1].content == heard[0] == Town(name="Rome", people=3)
    assert len(heard) == 1


def _custom(value):
    raise PydanticCustomError("odd", "{value} is odd", {"value": value})


@pytest.mark.parametrize(
    ("target", "text", "reason"),
    [
        (Annotated[int, AfterValidator(_custom)], "3", "3 is odd"),
        (list[Annotated[int, AfterValidator(_custom)]], "[3]", "0: 3 is odd"),
        (Annotated[int, BeforeValidator(lambda value: "x")], "3", "valid integer"),
    ],
)
def test_every_kind_of_validator_says_why(target, text, reason):
    with pytest.raises(InvalidAnswer, match=reason):
        Session(Scripted(said(text))).respond("Go", generating=target, options=GenerationOptions(retries=0))


def test_a_bug_in_a_validator_is_passed_on_and_text_that_is_no_json_is_the_providers_fault():
    def broken(value):
        raise KeyError(value)

    session = Session(Scripted(said("3"), said("{]")))
    with pytest.raises(KeyError):
        session.respond("Go", generating=Annotated[int, AfterValidator(broken)])
    with pytest.raises(InvalidProviderAnswer):
        session.respond("Go", generating=Town)
    assert not session.is_responding


@pytest.mark.parametrize("retries", [-1, 17])
def test_retries_have_a_range(retries):
    with pytest.raises(InvalidArgument, match="retries"):
        GenerationOptions(retries=retries)
