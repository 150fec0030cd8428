"""What a session leaves behind by default: nothing in any log, nothing on the terminal, nothing on disk."""

import logging
import warnings

import pytest
from pydantic import BaseModel

import pippin
from pippin.core.errors import AnswerTruncated, ContextOverflow, PippinError, ToolCallError
from pippin.session import GenerationOptions, Session

SECRET = "quince-7c1f-medlar"
ONE_CALL = GenerationOptions(tool_calling="required", parallel_tool_calls=False, max_tokens=120)


class Mood(BaseModel):
    name: str


@pippin.tool
def fail(where: bool) -> str:
    """Look somewhere."""
    raise RuntimeError(f"nothing about {SECRET} there")


def use(tiny) -> list[PippinError]:
    """Sessions of every kind, on the good way and on the bad ones; the errors that came."""
    errors = []
    session = Session(tiny, instructions=f"You know {SECRET}.")
    session.prewarm(SECRET)
    session.respond(SECRET, options=GenerationOptions(max_tokens=8))
    for _ in session.stream(SECRET, options=GenerationOptions(max_tokens=8)):
        pass
    for action in (
        lambda: session.respond(SECRET, generating=Mood, options=GenerationOptions(max_tokens=3)),
        lambda: session.respond(SECRET * 500),
        lambda: Session(tiny, tools=[fail]).respond(SECRET, options=ONE_CALL),
    ):
        with pytest.raises(PippinError) as caught:
            action()
        errors.append(caught.value)
    return errors


def test_no_log_no_output_and_no_warning_quotes_a_prompt(tiny, caplog, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with caplog.at_level(logging.DEBUG), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        errors = use(tiny)
    assert [type(error) for error in errors] == [AnswerTruncated, ContextOverflow, ToolCallError]
    assert SECRET not in caplog.text
    assert SECRET not in "".join(capfd.readouterr())
    assert SECRET not in "".join(str(warning.message) for warning in warned)
    assert not list(tmp_path.iterdir())


def test_a_log_that_quotes_would_be_seen(caplog):
    with caplog.at_level(logging.DEBUG):
        logging.getLogger("pippin.session").debug("prompt: %s", SECRET)
    assert SECRET in caplog.text


def test_the_repr_of_a_session_and_its_errors_quote_no_prompt(tiny):
    """What ends up in logs by accident; only the tool's own message passes through, which is the tool's matter."""
    session = Session(tiny, instructions=SECRET)
    session.respond(SECRET, options=GenerationOptions(max_tokens=4))
    assert SECRET not in repr(session)
    truncated, overflow, _ = use(tiny)
    assert SECRET not in str(truncated)
    assert SECRET not in str(overflow)


def test_transcripts_are_only_where_the_user_saves_them(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    session = Session(tiny)
    session.respond(SECRET, options=GenerationOptions(max_tokens=4))
    assert not list(tmp_path.rglob("*"))
    (tmp_path / "mine.json").write_text(session.transcript.to_json())
    assert SECRET in (tmp_path / "mine.json").read_text()
