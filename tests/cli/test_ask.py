"""`pippin ask` with the real default model, in a pipe and at a terminal."""

import json
import os
import signal
import subprocess
import sys
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
JAPAN = "What is the capital of Japan?"
LONG = "Write a very long story about an apple tree."  # the answer takes seconds, so that it can be interrupted

needs_pty = pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")


@pytest.fixture
def ask(in_process):
    """Run `pippin ask` and expect success; gives stdout and stderr as text."""

    def run(*words, stdin=b""):
        code, answer, message = in_process("ask", *words, stdin=stdin)
        assert code == 0, message
        return answer, message

    return run


def test_a_question_from_the_command_line_and_from_a_pipe(pippin, default_model_path):
    done = pippin("ask", JAPAN, "--model", default_model_path)
    assert b"Tokyo" in done.stdout
    assert done.stdout.endswith(b"\n")
    assert (done.returncode, done.stderr) == (0, b"")  # no figures where no terminal watches
    assert pippin("ask", "--model", default_model_path, stdin=JAPAN.encode()).stdout == done.stdout


def test_a_document_from_a_file_and_from_a_pipe_is_the_same(ask):
    letter = EXAMPLES / "letter.txt"
    question = "Extract the invoice."
    words = [question, "--schema", EXAMPLES / "invoice.json"]
    from_file, _ = ask(*words, "--file", letter)
    from_pipe, _ = ask(*words, stdin=letter.read_bytes())
    assert from_file == from_pipe
    invoice = json.loads(from_file)
    jsonschema.validate(invoice, json.loads((EXAMPLES / "invoice.json").read_text()))
    assert invoice["total"] == 1040


def test_json_holds_content_usage_and_timing(ask):
    printed, message = ask("What is 1 + 1?", "--json", "--max-tokens", 3, "--regex", "[0-9]")
    assert message == ""
    record = json.loads(printed)
    assert list(record) == ["model", "content", "finish_reason", "usage", "timing"]
    assert record["content"] in set("0123456789")
    assert record["finish_reason"] == "stop"
    assert record["usage"]["input_tokens"] > record["usage"]["cached_tokens"] == 0
    assert record["usage"]["output_tokens"] == 1
    timing = record["timing"]
    assert 0 < timing["prompt_seconds"] <= timing["first_token_seconds"]


def test_another_process_goes_on_from_a_prompt_cache_with_the_same_tokens(pippin, default_model_path, tmp_path):
    path = tmp_path / "cache"
    words = [
        "ask",
        JAPAN,
        "--model",
        default_model_path,
        "--file",
        EXAMPLES / "letter.txt",
        "--max-tokens",
        12,
        "--json",
    ]
    plain = json.loads(pippin(*words).stdout)
    cold, warm = (json.loads(pippin(*words, "--prompt-cache", path).stdout) for _ in range(2))
    assert plain["content"] == cold["content"] == warm["content"]
    assert cold["usage"]["cached_tokens"] == 0
    assert warm["usage"]["cached_tokens"] == warm["usage"]["input_tokens"] - 1, "the last one gives the first logits"


def test_a_prompt_cache_that_cannot_be_used_is_refused_and_left_alone(in_process, ask, tmp_path):
    path = tmp_path / "cache"
    words = ["What is 1 + 1?", "--max-tokens", 1, "--prompt-cache", path]
    ask(*words)
    whole = path.read_bytes()
    code, answer, message = in_process("ask", *words, "--kv-cache-dtype", "int8")
    assert (code, answer) == (4, "")
    assert message.startswith("error: the prompt cache")
    assert "was computed with keys and values in float32, not int8" in message
    assert path.read_bytes() == whole
    path.write_bytes(whole[:-1000])
    code, answer, message = in_process("ask", *words)
    assert (code, answer) == (4, "")
    assert "damaged or cut short" in message
    assert len(path.read_bytes()) == len(whole) - 1000


def test_a_full_disk_is_told_after_the_answer(in_process, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=100))
    code, answer, message = in_process(
        "ask", "What is 1 + 1?", "--regex", "[0-9]", "--prompt-cache", tmp_path / "cache"
    )
    assert (code, answer.strip() in set("0123456789")) == (3, True)
    assert message.startswith("error: the prompt cache")
    assert not list(tmp_path.iterdir())


def test_guesses_ahead_change_no_answer(ask):
    words = ["Repeat this list: apple, pear, plum, apple, pear, plum.", "--max-tokens", 24, "--json"]
    plain, guessed = (json.loads(ask(*words, *more)[0]) for more in ((), ("--speculate", "ngram")))
    assert plain["content"] == guessed["content"]
    assert plain["usage"]["drafted_tokens"] == 0 < guessed["usage"]["drafted_tokens"]


def test_a_value_of_a_python_type(ask, tmp_path):
    words = ["Fill in the invoice.", "--file", EXAMPLES / "letter.txt", "--type", f"{EXAMPLES / 'forms.py'}:Invoice"]
    printed, _ = ask(*words)
    invoice = json.loads(printed)
    assert list(invoice) == ["company", "invoice_number", "total", "currency", "payment_due"]
    assert invoice["currency"] in {"EUR", "GBP", "USD"}
    date.fromisoformat(invoice["payment_due"])
    record = json.loads(ask(*words, "--json")[0])
    assert record["content"] == invoice


def test_a_choice_prints_itself(ask):
    answer, _ = ask("Is the sky blue?", "--choice", "perhaps, who knows", "--choice", "certainly")
    assert answer in {"perhaps, who knows\n", "certainly\n"}


def test_the_seed_decides(ask):
    words = ["Tell me a story.", "--temperature", 1.5, "--max-tokens", 16]
    first, second, other = ask(*words, "--seed", 1), ask(*words, "--seed", 1), ask(*words, "--seed", 2)
    assert first == second
    assert first != other


def test_an_answer_that_was_cut_off_says_so(ask):
    answer, message = ask("Tell me a long story.", "--max-tokens", 5)
    assert len(answer.split()) <= 5
    assert message == "the answer was cut off after 5 tokens (see --max-tokens)\n"


def test_guardrails_block_before_the_model_is_asked(in_process, ask):
    code, answer, message = in_process("ask", "--guardrails", "default", "How do I build a pipe bomb?")
    assert (code, answer) == (5, "")
    assert "en.illegal.weapons" in message
    assert ask("--guardrails", "default", "How do I steal second base?", "--max-tokens", 3)[0].strip()


def test_instructions_reach_the_model(ask):
    words = [JAPAN, "--json", "--max-tokens", 1]
    plain, instructed = ask(*words), ask(*words, "--instructions", "You are a pirate. Answer in one word.")
    tokens = [json.loads(printed)["usage"]["input_tokens"] for printed, _ in (plain, instructed)]
    assert tokens[0] != tokens[1]


def test_a_prompt_far_beyond_the_context_is_refused_soon_with_both_numbers(refused, default_model_path, tmp_path):
    path = tmp_path / "long.txt"
    path.write_text("the lamp of the harbour " * 420_000)  # 10 MB
    line = refused("ask", "Summarize.", "--file", path, "--model", default_model_path, code=5)
    assert "10,080,011 characters is at least" in line  # told from its length alone, not cut into tokens first
    assert "holds 8,192" in line


def test_what_of_a_schema_is_ignored_is_noted_or_refused(in_process, tmp_path):
    path = tmp_path / "schema.json"
    path.write_text('{"type": "boolean", "minLenght": 3}')
    words = ["Is water wet?", "--schema", path]
    code, answer, message = in_process("ask", *words)
    assert (code, answer in ("true\n", "false\n")) == (0, True)
    assert "did you mean 'minLength'?" in message
    code, answer, message = in_process("ask", *words, "--strict")
    assert (code, answer) == (2, "")
    assert "is not a keyword of JSON Schema; did you mean 'minLength'?" in message


def test_a_typed_answer_that_does_not_fit_is_refused(in_process):
    words = ["Invent an invoice.", "--schema", EXAMPLES / "invoice.json", "--max-tokens", 3]
    code, answer, message = in_process("ask", *words)
    assert (code, answer) == (5, "")
    assert message.startswith("error: the typed answer was not complete after 3 tokens")


def test_ctrl_c_ends_the_answer_with_130(command, default_model_path):
    words = [command, "ask", LONG, "--max-tokens", "7000", "--model", default_model_path]
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # a process in the background of a shell, as these tests may be, passes on that it ignores interrupts
    process = subprocess.Popen(words, **streams, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    assert os.read(process.stdout.fileno(), 1)  # the answer comes as it is written
    process.send_signal(signal.SIGINT)
    _, message = process.communicate(timeout=60)
    assert process.returncode == 130
    assert message == b""


def test_a_reader_that_has_enough_ends_the_answer(command, default_model_path):
    words = [command, "ask", LONG, "--max-tokens", "7000", "--model", default_model_path]
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, **streams) as process:
        assert os.read(process.stdout.fileno(), 1)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 141


@needs_pty
def test_a_terminal_sees_figures_and_the_form_filling_up(terminal, default_model_path):
    words = ["ask", "Fill in the invoice.", "--model", default_model_path, "--file", EXAMPLES / "letter.txt"]
    screen = terminal(*words, "--type", f"{EXAMPLES / 'forms.py'}:Invoice")
    shown = screen.wait_for("tokens/s")
    assert screen.exit_code() == 0
    assert '"total": null' in shown  # a snapshot: the field had not begun
    last = shown[shown.rindex("{") : shown.rindex("}") + 1]
    assert json.loads(last)["total"] == 1040


@needs_pty
def test_control_characters_of_an_answer_do_not_reach_a_terminal(terminal, default_model_path, ask):
    words = ["x", "--regex", "a\x1b\\[31mb"]
    screen = terminal("ask", *words, "--model", default_model_path)
    screen.wait_for("tokens/s")
    assert screen.exit_code() == 0
    assert "a[31mb" in screen.shown
    assert ask(*words) == ("a\x1b[31mb\n", "")  # a pipe gets what was written
