"""Policies that shorten what the model reads, and skills that load on demand."""

import pytest
from hypothesis import given, strategies as st

import pippin
from pippin.core.errors import InvalidArgument, InvalidInput, TimedOut, ToolCallError
from pippin.session import (
    Answer,
    Instructions,
    Prompt,
    Session,
    Skill,
    Skills,
    ToolCall,
    ToolCalls,
    ToolOutput,
    Transcript,
    history,
)
from pippin.session.providers.provider import Capabilities, Done, Provider, TextDelta, ToolCallsMade


class Counting:
    """A model for policies: a token for each character; its summaries are numbered."""

    def __init__(self, context_size=1000):
        self.context_size, self.asked = context_size, []

    def token_count(self, transcript):
        return sum(len(entry.text) for entry in transcript if not isinstance(entry, ToolCalls))

    def ask(self, instructions, prompt):
        self.asked.append(prompt)
        return f"summary {len(self.asked)}"


def turn(number, *, tools=0, answered=True):
    entries = [Prompt(f"question {number}")]
    for index in range(tools):
        call = ToolCall(id=f"{number}.{index}", name="f", arguments={})
        entries += [ToolCalls(calls=(call,)), ToolOutput("out", call_id=call.id, name="f")]
    return entries + ([Answer(f"answer {number}")] if answered else [])


def conversation(*turns):
    return Transcript(entries=(Instructions("Be brief."), *(entry for some in turns for entry in some)))


def well_formed(transcript):
    called = {call.id for entry in transcript if isinstance(entry, ToolCalls) for call in entry.calls}
    answered = {entry.call_id for entry in transcript if isinstance(entry, ToolOutput)}
    return called == answered


shapes = st.lists(st.integers(0, 3), min_size=1, max_size=6)


@given(shapes, st.integers(1, 12), st.booleans())
def test_a_window_keeps_whole_turns_and_the_last_one(shape, size, answered):
    turns = [turn(i, tools=n, answered=answered or i < len(shape) - 1) for i, n in enumerate(shape)]
    shorter = history.rolling_window(size)(conversation(*turns), Counting())
    kept = list(shorter.history)
    assert shorter.entries[0] == Instructions("Be brief.")
    assert kept[-len(turns[-1]) :] == turns[-1]
    assert len(kept) <= max(size, len(turns[-1]))
    assert well_formed(shorter)
    missing = [e for some in turns for e in some][: -len(kept)]
    if missing:  # the next older turn would not have fitted
        older = history.turns(missing)[-1]
        assert len(kept) + len(older) > size


@given(shapes)
def test_finished_calls_are_dropped_and_running_ones_stay(shape):
    turns = [turn(i, tools=n, answered=i < len(shape) - 1) for i, n in enumerate(shape)]
    shorter = history.drop_tool_calls()(conversation(*turns), Counting())
    assert [e.text for e in shorter if isinstance(e, Prompt)] == [f"question {i}" for i in range(len(shape))]
    assert sum(isinstance(e, ToolCalls) for e in shorter) == shape[-1]
    assert well_formed(shorter)


def test_a_long_conversation_is_summarized_once_and_calls_keep_their_ids():
    model, policy = Counting(context_size=200), history.summarize(0.5, keep_turns=1)
    turns = [turn(i, tools=i % 2) for i in range(6)]
    assert policy(conversation(*turns[:2]), model) == conversation(*turns[:2])
    assert model.asked == []
    shorter = policy(conversation(*turns), model)
    assert len(model.asked) >= 1
    assert "question 0" in model.asked[0]
    assert "answer 4" in model.asked[-1]
    assert "question 5" not in model.asked[-1]
    assert [e.text for e in shorter if isinstance(e, Prompt)] == [history.ASK, "question 5"]
    assert [c.id for e in shorter if isinstance(e, ToolCalls) for c in e.calls] == ["1.0", "3.0", "5.0"]
    assert well_formed(shorter)
    count = len(model.asked)
    assert policy(conversation(*turns), model) == shorter
    assert len(model.asked) == count  # the same summary, not a new one
    longer = policy(conversation(*turns, *[turn(i) for i in range(6, 14)]), model)
    assert model.asked[count].startswith(f"Before: summary {count}")
    assert [e.text for e in longer if isinstance(e, Prompt)][-1] == "question 13"


def test_a_turn_longer_than_the_context_is_summarized_in_part():
    model = Counting(context_size=300)
    huge = [Prompt("x" * 5000), Answer("ok")]
    shorter = history.summarize(0.5, keep_turns=1)(conversation(huge, turn(1)), model)
    assert all(len(prompt) < 300 for prompt in model.asked)
    assert model.token_count(shorter) < 150


def test_policies_follow_each_other():
    both = history.chain(history.drop_tool_calls(), history.rolling_window(4))
    shorter = both(conversation(turn(0), turn(1, tools=2), turn(2)), Counting())
    assert [e.text for e in shorter.history] == ["question 1", "answer 1", "question 2", "answer 2"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: history.rolling_window(0),
        lambda: history.summarize(0),
        lambda: history.summarize(1.0),
        lambda: history.summarize(keep_turns=0),
    ],
)
def test_policies_out_of_range(make):
    with pytest.raises(InvalidArgument):
        make()


def test_a_session_remembers_all_and_shows_a_part(tiny):
    session = Session(tiny, instructions="Be brief.", history=history.rolling_window(1))
    options = pippin.GenerationOptions(max_tokens=3)
    used = [session.respond("Hello", options=options).usage.input_tokens for _ in range(3)]
    assert used[0] == used[1] == used[2]
    assert len(session.transcript) == 7


def test_a_session_summarizes_with_its_own_model(tiny):
    session = Session(tiny, history=history.summarize(0.05, keep_turns=1))
    options = pippin.GenerationOptions(max_tokens=3)
    for _ in range(3):
        response = session.respond("words and words and more of them", options=options)
    assert response.usage.output_tokens > 3  # the summary's tokens are counted
    assert len(session.transcript) == 6


class Interrupted(Provider):
    """Calls a tool, and is interrupted while it summarizes."""

    name = "interrupted"
    capabilities = Capabilities(tool_calling=True)
    context_size = 10

    def stream(self, turn):
        if turn.transcript.instructions:  # the summary
            turn.cancel.wait(5)
            yield TextDelta("Half of")
            yield Done("cancelled")
        else:
            yield ToolCallsMade((ToolCall(id="a", name="convert", arguments={"celsius": 1}),))
            yield Done("tool_calls")

    def token_count(self, item):
        return 0 if isinstance(item, str) else len(item.transcript)


def test_half_a_summary_is_not_kept():
    policy = history.summarize(0.5, keep_turns=1)
    earlier = Transcript(entries=(Prompt("1"), Answer("2"), Prompt("3"), Answer("4")))
    session = Session(Interrupted(), tools=[convert], history=policy, transcript=earlier)
    with pytest.raises(TimedOut):
        session.respond("Go", options=pippin.GenerationOptions(timeout=0.05))
    assert policy.written == {}


# --- skills -----------------------------------------------------------------------------------------------------------


@pippin.tool
def convert(celsius: float) -> float:
    """To Fahrenheit."""
    return celsius * 9 / 5 + 32


class Loader(Provider):
    """Loads a skill, uses its tool, answers."""

    name = "loader"
    capabilities = Capabilities(tool_calling=True)

    def __init__(self):
        self.tools = []

    def stream(self, turn):
        self.tools.append([tool.name for tool in turn.tools])
        self.last = turn.transcript.entries[-1].text
        steps = [
            ToolCallsMade((ToolCall(id="a", name="load_skill", arguments={"name": "weather"}),)),
            ToolCallsMade((ToolCall(id="b", name="convert", arguments={"celsius": 100}),)),
            TextDelta("212"),
        ]
        yield steps[len(self.tools) - 1]
        yield Done("stop")


def test_a_skill_is_loaded_when_the_model_asks(tmp_path):
    (tmp_path / "SKILL.md").write_text("---\nname: weather\ndescription: units of weather\n---\nUse convert.\n")
    skills = Skills([Skill.from_folder(tmp_path, tools=[convert])])
    provider = Loader()
    session = Session(provider, skills=skills)
    assert session.respond("100 degrees?").content == "212"
    assert provider.tools == [["load_skill"], ["convert"], ["convert"]]
    assert session.transcript.entries[2].text == "Use convert."
    assert provider.last == "212.0"
    assert skills.loaded == ["weather"]
    session.reset()
    assert list(skills.tools) == ["load_skill"]


def test_a_request_that_fails_loads_no_skill():
    def lose() -> str:
        """Fail."""
        raise RuntimeError("lost")

    class Failing(Loader):
        def stream(self, turn):
            self.tools.append(turn.tools)
            yield (
                ToolCallsMade((ToolCall(id="a", name="load_skill", arguments={"name": "weather"}),))
                if len(self.tools) == 1
                else ToolCallsMade((ToolCall(id="b", name="lose", arguments={}),))
            )
            yield Done("stop")

    for on_error, loaded in (("revert", []), ("preserve", ["weather"])):
        skills = Skills([Skill("weather", "About the weather.", "Say degrees.", tools=[lose])])
        session = Session(Failing(), skills=skills, on_error=on_error)
        with pytest.raises(ToolCallError):
            session.respond("Warm?")
        assert skills.loaded == loaded


def test_skills_that_cannot_be(tmp_path):
    skill = Skill("a", "b", "c")
    with pytest.raises(InvalidArgument, match="a name of its own"):
        Skills([skill, skill])
    with pytest.raises(InvalidArgument, match="at least one"):
        Skills([])
    with pytest.raises(InvalidArgument, match="no skill 'x'; there are: a"):
        Skills([skill]).load("x")
    with pytest.raises(InvalidInput, match="there is no skill"):
        Skill.from_folder(tmp_path)
    (tmp_path / "SKILL.md").write_text("name: x\n")
    with pytest.raises(InvalidInput, match="must begin with a line ---"):
        Skill.from_folder(tmp_path)
