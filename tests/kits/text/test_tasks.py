"""The face of the text tasks: what they share, and the tasks without a file of their own."""

import threading
from typing import Literal

import pytest

from pippin.core.errors import (
    ContextOverflow,
    InvalidArgument,
    InvalidInput,
    UnsupportedCapability,
    UnsupportedLanguage,
)
from pippin.kits.text import TextTasks
from pippin.session import Session

GERMAN = "Die Lampe wird von Hand angezündet und nicht gelöscht."


@pytest.mark.parametrize("text", ["", "  ", 3, "a\udc80"])
@pytest.mark.parametrize(
    "task",
    [
        TextTasks.summarize,
        TextTasks.key_points,
        TextTasks.to_list,
        TextTasks.to_table,
        lambda tasks, text: tasks.rewrite(text, tone="formal"),
        TextTasks.proofread,
        lambda tasks, text: tasks.extract(text, int),
        lambda tasks, text: tasks.classify(text, ["a", "b"], calibrate="off"),
        TextTasks.tag,
        lambda tasks, text: tasks.topics([text]),
        TextTasks.replies,
    ],
)
def test_every_task_refuses_what_is_no_text(tiny, task, text):
    with pytest.raises(InvalidInput):
        task(TextTasks(tiny), text)


def test_a_session_lends_its_model_and_keeps_its_conversation(scripted):
    session = Session(scripted(lambda prompt: "Fine."), instructions="Be brief.")
    tasks = TextTasks(session)
    assert tasks.sessions.provider is session.provider
    assert tasks.summarize("It is fine.").text == "Fine."
    assert len(session.transcript) == 1


def test_tasks_run_in_several_threads(scripted):
    gate = threading.Barrier(2, timeout=10)

    def answer(prompt):
        gate.wait()  # both are being answered at once
        return "Fine."

    tasks, found = TextTasks(scripted(answer)), []
    threads = [threading.Thread(target=lambda: found.append(str(tasks.summarize("It is fine.")))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["Fine.", "Fine."]


def test_a_task_starts_from_its_instructions_every_time(scripted):
    provider = scripted(lambda prompt: "Fine.")
    tasks = TextTasks(provider)
    for _ in range(2):
        tasks.summarize("It is fine.")
    assert [len(turn.transcript.entries) for turn in provider.turns] == [2, 2]


# --- proofread --------------------------------------------------------------------------------------------------------


def test_written_corrections_become_edits(scripted):
    tasks = TextTasks(scripted(lambda prompt: prompt.removeprefix("Correct: ").replace("teh", "the")))
    text = "I saw teh dog.\n\n  And `teh x` in teh house. "
    revision = tasks.proofread(text)
    assert revision.text == "I saw the dog.\n\n  And `teh x` in the house. "
    assert [edit.kind for edit in revision.edits] == ["spelling", "spelling"]


@pytest.mark.parametrize("answer", ["I am a helpful assistant and cannot do that.", "", "I saw\nthe dog."])
def test_a_rewrite_in_the_dress_of_a_correction_is_rejected(scripted, answer):
    assert TextTasks(scripted(lambda prompt: answer)).proofread("I saw teh dog.").edits == ()


def test_how_to_proofread(scripted, tiny):
    with pytest.raises(InvalidArgument, match="'auto', 'choose' or 'write'"):
        TextTasks(scripted(str)).proofread("x", method="guess")
    with pytest.raises(UnsupportedCapability):
        TextTasks(scripted(str)).proofread("x", method="choose")
    with pytest.raises(UnsupportedLanguage, match="use method='write'") as caught:
        TextTasks(tiny).proofread(GERMAN, method="choose")
    assert caught.value.language == "de"


# --- tables, forms, replies -------------------------------------------------------------------------------------------


def test_a_table_has_its_columns_and_is_checked(scripted):
    rows = '[["Ann", "34"], ["Bob", "41"], ["Ann", "34"], ["", ""]]'
    tasks = TextTasks(scripted(lambda prompt: rows, guided_generation=True))
    table = tasks.to_table("Ann is 34.", columns=["Name", "Age"])
    assert table.rows == (("Ann", "34"), ("Bob", "41"))
    assert set(table.unverified) == {"Bob", "41"}
    assert table.to_markdown() == "| Name | Age |\n| --- | --- |\n| Ann | 34 |\n| Bob | 41 |"


def test_the_model_may_choose_the_columns(scripted):
    provider = scripted(
        lambda prompt: '["Name", "Age"]' if "columns of" in prompt else '[["Ann", "34"]]', guided_generation=True
    )
    assert TextTasks(provider).to_table("Ann is 34.").columns == ("Name", "Age")


@pytest.mark.parametrize("columns", [[], "Name", ["a", "a"]])
def test_columns_that_cannot_be(scripted, columns):
    with pytest.raises(InvalidArgument, match="columns are different names"):
        TextTasks(scripted(str, guided_generation=True)).to_table("Ann is 34.", columns=columns)


def test_a_form_is_filled_in_whatever_the_model_would_say(tiny):
    assert TextTasks(tiny).extract("It is red.", Literal["red", "green"]).content in {"red", "green"}


def test_a_form_needs_guided_generation(scripted):
    with pytest.raises(UnsupportedCapability, match="guided"):
        TextTasks(scripted(str)).extract("It is red.", Literal["red", "green"])


def test_a_text_that_is_too_long_names_what_fits(tiny):
    tasks = TextTasks(tiny)
    with pytest.raises(
        ContextOverflow, match=r"takes at most [\d,]+ tokens of text \(its context holds 2,048\)"
    ) as caught:
        tasks.to_table("a b " * 600)
    assert caught.value.token_count == 2400
    with pytest.raises(ContextOverflow):
        tasks.replies("a b " * 600)


def test_replies_are_of_their_kinds_and_differ(scripted):
    told = {"agree": "Yes, I will.", "decline": "Yes, I will!", "question": "When? Where?"}
    provider = scripted(str)
    provider.answer = lambda prompt: next(
        answer for word, answer in told.items() if word in provider.turns[-1].transcript.instructions[0].text
    )
    found = TextTasks(provider).replies("Will you come?")
    assert [(reply.kind, reply.text) for reply in found] == [("accept", "Yes, I will."), ("ask", "When?")]


@pytest.mark.parametrize("kinds", [["shout"], [], "ask"])
def test_other_kinds_of_replies_are_refused(scripted, kinds):
    with pytest.raises(InvalidArgument, match="kinds of replies are accept, decline, ask, thank"):
        TextTasks(scripted(str)).replies("Will you come?", kinds=kinds)
