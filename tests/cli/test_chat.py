"""`pippin chat`: what counts as a message, a scripted chat, and a chat at a real pseudo-terminal."""

import json
import stat
import sys

import pytest
from hypothesis import given, strategies as st

from pippin.cli.chat import finish, is_open, messages

lines = st.text(st.characters(exclude_categories=["Cs", "Cc"])).filter(lambda t: not t.startswith('"""'))


@given(st.lists(lines, min_size=1))
def test_a_message_of_any_lines_can_be_fenced(given_lines):
    body = "\n".join(given_lines)
    if body.startswith("\n") or body.endswith(("\n", '"')):
        return  # the fence drops the line breaks beside it, and a quote would run into it
    typed = ['"""', *given_lines, '"""']
    # A line that ends in three quotes closes the block early; everything typed is still in some message.
    found = list(messages(iter(typed)))
    if not any(line.endswith('"""') for line in given_lines):
        assert found == [body]
    else:
        assert len(found) >= 1


@given(st.lists(lines.filter(lambda t: not t.endswith("\\")), min_size=1))
def test_backslashes_join_lines(given_lines):
    typed = [line + "\\" for line in given_lines[:-1]] + [given_lines[-1]]
    assert list(messages(iter(typed))) == ["\n".join(given_lines)]


@given(st.lists(lines.filter(lambda t: not t.endswith("\\"))))
def test_plain_lines_are_messages(given_lines):
    assert list(messages(iter(given_lines))) == given_lines


def test_the_end_of_input_closes_a_message():
    assert list(messages(iter(['"""', "a", "b"]))) == ["a\nb"]
    assert list(messages(iter(["a\\"]))) == ["a"]


def test_quotes_alone_are_not_yet_a_block():
    assert is_open('"""')
    assert is_open('""""')
    assert not is_open('""""""')
    assert finish('"""a"""') == "a"


# --- with the real model ----------------------------------------------------------------------------------------------


@pytest.fixture
def chat(in_process):
    """Run a scripted chat; gives exit code, stdout and stderr."""

    def run(*typed: str):
        return in_process("chat", "--max-tokens", 24, stdin="".join(line + "\n" for line in typed).encode())

    return run


def test_a_scripted_chat_answers_line_by_line_and_saves(pippin, default_model_path, tmp_path):
    typed = ["What is the capital of Japan?", "", f"/save {tmp_path / 'talk.json'}", "/quit", "Never asked."]
    done = pippin("chat", "--model", default_model_path, "--max-tokens", 24, stdin="\n".join(typed).encode())
    assert done.returncode == 0
    assert b"Tokyo" in done.stdout
    assert b"Traceback" not in done.stderr
    entries = json.loads((tmp_path / "talk.json").read_text())["entries"]
    assert [entry["kind"] for entry in entries] == ["prompt", "response"]
    assert done.stdout.decode() == entries[1]["segments"][0]["text"] + "\n"


def test_load_goes_on_and_reset_forgets(chat, tmp_path):
    first, second, third = (tmp_path / f"{n}.json" for n in (1, 2, 3))
    chat("/system Answer with one word.", "What is the capital of Japan?", f"/save {first}")
    code, _, _ = chat(f"/load {first}", "And of Italy?", f"/save {second}", "/reset", f"/save {third}")
    assert code == 0
    before, after, reset = (json.loads(path.read_text())["entries"] for path in (first, second, third))
    assert before[0]["segments"] == [{"type": "text", "text": "Answer with one word."}]
    assert after[:3] == before
    assert [entry["kind"] for entry in after[3:]] == ["prompt", "response"]
    assert reset == before[:1]


def test_help_is_on_stdout(chat):
    _, shown, _ = chat("/help")
    for word in ("/save FILE", "/load FILE", "/reset", "/system TEXT", "/quit", "Alt-Enter", "Ctrl-C", '"""'):
        assert word in shown


@pytest.mark.parametrize(
    ("typed", "code", "message"),
    [
        ("/dance", 2, "unknown command '/dance'; /help lists the commands"),
        ("/save", 2, "/save needs a file name"),
        ("/load no-such-file", 2, "there is no file 'no-such-file'"),
        (
            "/save /no-such-folder/talk.json",
            2,
            "'/no-such-folder/talk.json' cannot be written: No such file or directory",
        ),
        ("caf\0", 2, "line 1 of standard input is not text"),
    ],
)
def test_without_a_terminal_the_first_error_ends_the_chat(chat, typed, code, message):
    ended, shown, said = chat(typed, "/help")
    assert (ended, shown) == (code, "")
    assert said.startswith(f"error: {message}")
    assert said.count("\n") == 1


def test_a_file_that_is_no_conversation(chat, tmp_path):
    (tmp_path / "talk.json").write_text('{"entries": [{"kind": "song"}]}')
    code, _, said = chat(f"/load {tmp_path / 'talk.json'}")
    assert code == 4
    assert "not a transcript" in said


needs_pty = pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")


@needs_pty
def test_ctrl_c_stops_the_answer_and_not_the_chat(terminal, default_model_path, tmp_path):
    screen = terminal("chat", "--model", default_model_path, env={"PIPPIN_HOME": str(tmp_path)})
    screen.wait_for(">")
    screen.type("Count from 1 to 1000, one number in each line.\r")
    screen.wait_for("2")
    screen.type("\x03")
    screen.wait_for("stopped; the question and its answer were removed")
    screen.wait_for(">")
    screen.type("What is the capital of Japan?\r")
    screen.wait_for("Tokyo")
    screen.wait_for("tokens/s")
    screen.wait_for(">")
    screen.type("\x03")
    screen.wait_for("Ctrl-C again, or Ctrl-D, leaves")
    screen.wait_for(">")
    screen.type("\x03")
    assert screen.exit_code() == 0
    assert "Traceback" not in screen.shown
    history = tmp_path / "chat_history"
    assert "What is the capital of Japan?" in history.read_text()
    assert stat.S_IMODE(history.stat().st_mode) == 0o600


@needs_pty
def test_several_lines_errors_and_ctrl_d(terminal, default_model_path, tmp_path):
    saved = tmp_path / "talk.json"
    screen = terminal("chat", "--model", default_model_path, "--max-tokens", 4, env={"PIPPIN_HOME": str(tmp_path)})
    screen.wait_for(">")
    for keys in ("one\x1b\rtwo\r", "one\\\rtwo\r", '"""one\rtwo"""\r'):  # Alt-Enter, backslash, triple quotes
        screen.type(keys)
        screen.wait_for("tokens/s")
        screen.wait_for(">")
    screen.type("/dance\r")
    screen.wait_for("error: unknown command '/dance'")
    screen.wait_for(">")
    screen.type(f"/save {saved}\r")
    screen.wait_for("saved to")
    screen.wait_for(">")
    screen.type("\x04")
    assert screen.exit_code() == 0
    entries = json.loads(saved.read_text())["entries"]
    assert [entry["segments"][0]["text"] for entry in entries if entry["kind"] == "prompt"] == ["one\ntwo"] * 3


def test_a_bounded_cache_answers_as_before_while_it_has_room(chat, in_process, tmp_path):
    typed = ["What is the capital of Japan?", "And of Italy?"]
    given = ("chat", "--max-tokens", 24, "--cache", "snapkv", "--cache-budget", 512)
    code, out, _ = in_process(*given, stdin="".join(line + "\n" for line in typed).encode())
    assert code == 0
    assert out == chat(*typed)[1]


def test_a_budget_needs_a_cache_and_a_cache_this_machine(in_process):
    code, _, said = in_process("chat", "--cache-budget", 512, stdin=b"Hello\n")
    assert code
    assert "name one with cache" in said
    code, _, said = in_process("chat", "--url", "http://localhost:1/v1", "--cache", "h2o", stdin=b"Hello\n")
    assert code
    assert "--cache: only for local models" in said
