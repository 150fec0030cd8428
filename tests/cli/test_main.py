"""The command as a whole: its start, its errors, its exit codes."""

import os
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from pippin import cli
from pippin.cli import app, exit_code, main
from pippin.cli.common import exit_codes, terminal
from pippin.core import errors


def every_error() -> list[type[errors.PippinError]]:
    """All classes of the hierarchy."""
    found = [errors.PippinError]
    for kind in found:
        found += kind.__subclasses__()
    return found


def provoke(kind: type[Exception]) -> Exception:
    """An error of that kind with the attributes it needs."""
    needs = {
        errors.ContextOverflow: {"context_size": 10, "token_count": 20},
        errors.AnswerTruncated: {"partial": ""},
        errors.InvalidAnswer: {"value": None, "text": "null", "reason": "it is nothing"},
        errors.ToolCallError: {"tool": "clock"},
        errors.UnsupportedLanguage: {"language": "xx"},
        errors.GuardrailViolation: {"verdict": None},
        errors.Refusal: {"explanation": "no"},
        errors.InvalidRecord: {"path": "notes.jsonl"},
        errors.NonFiniteLoss: {"step": 3},
        errors.NewtonDivergence: {"iterations": 3, "residual": 0.5},
        errors.NonFiniteSample: {"step": 3},
        errors.CreationUnavailable: {"reason": "weights missing"},
        errors.ConceptsBlocked: {"category": "violence"},
        errors.OverMemoryBudget: {"estimate": 2, "budget": 1},
        errors.CreationFailed: {"step": 3},
        errors.InvalidImage: {"path": "cat.png"},
        errors.ChainDiverged: {"step": 3},
        errors.NotConverged: {"iterations": 3, "residual": 0.5},
    }
    return kind("what was\nwrong", **needs.get(kind, {}))


def test_a_command_runs_where_its_outputs_are_closed(tmp_path):
    shell = f"{sys.executable} -m pippin models >&- 2>&- <&-"
    assert subprocess.run(["sh", "-c", shell], check=False, timeout=120).returncode == 0
    wrong = subprocess.run(["sh", "-c", f"{sys.executable} -m pippin ask --file none.txt >&-"], capture_output=True)
    assert (wrong.returncode, wrong.stderr) == (2, b"error: there is no file 'none.txt'\n")


# The table of the documentation: a class answers for what is below it.
EXPECTED = {
    errors.PippinError: 1,
    errors.InvalidArgument: 2,
    errors.InvalidInput: 2,
    errors.SchemaError: 2,
    errors.AssetError: 3,
    errors.CheckpointError: 4,
    errors.CreationUnavailable: 3,
    errors.UnsupportedInputImage: 2,
    errors.GenerationError: 5,
    errors.ToolError: 5,
    errors.MissingDependency: 6,
    errors.ProviderError: 7,
    errors.BackendUnavailable: 6,
    errors.TrainingError: 8,
    errors.InferenceError: 8,
    errors.ExportError: 8,
}


@pytest.mark.parametrize("kind", every_error())
def test_every_error_is_one_line_and_the_documented_code(kind, monkeypatch, capsys):
    def fail(words):
        raise provoke(kind)

    monkeypatch.setattr(cli, "_run", fail)
    monkeypatch.delenv("PIPPIN_DEBUG", raising=False)
    assert main([]) == exit_code(provoke(kind))
    assert capsys.readouterr() == ("", "error: what was wrong\n")
    assert exit_code(provoke(kind)) == next(EXPECTED[base] for base in kind.__mro__ if base in EXPECTED)


@pytest.mark.parametrize("kind", [errors.AnswerTruncated, errors.TimedOut])
def test_an_answer_that_was_not_completed_is_shown_below_the_error(kind, monkeypatch, capsys):
    def fail(words):
        raise kind("no time left", partial='{"name": "Eva",\n\x1b[31m "age"')

    monkeypatch.setattr(cli, "_run", fail)
    assert main([]) == 5
    assert capsys.readouterr() == ("", 'error: no time left\nwritten until then: {"name": "Eva", [31m "age"\n')


def test_an_error_that_ends_a_streamed_answer_has_a_line_of_its_own(capsys):
    def stream(*texts):
        yield from (SimpleNamespace(delta=text) for text in texts)
        raise errors.TimedOut("no time left")

    for texts, printed in ((("The ", "end"), "The end\n"), ((), "")):
        with pytest.raises(errors.TimedOut):
            terminal.show_text(stream(*texts))
        assert capsys.readouterr().out == printed


def test_an_unexpected_error_is_one_line_that_names_debug(monkeypatch, capsys):
    def fail(words):
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(cli, "_run", fail)
    monkeypatch.delenv("PIPPIN_DEBUG", raising=False)
    assert main(["ask"]) == 1
    assert capsys.readouterr().err == (
        "error: unexpected ZeroDivisionError: division by zero; run again with --debug for the traceback\n"
    )
    assert main(["ask", "--debug"]) == 1
    shown = capsys.readouterr().err
    assert "Traceback (most recent call last)" in shown
    assert shown.endswith("error: unexpected ZeroDivisionError: division by zero\n")
    monkeypatch.setenv("PIPPIN_DEBUG", "1")
    assert main(["ask"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_debug_is_taken_anywhere_but_after_two_dashes(monkeypatch):
    seen = []
    monkeypatch.setattr(cli, "_run", lambda words: seen.append(words) or 0)
    main(["--debug", "ask", "x"])
    main(["ask", "x", "--debug"])
    main(["ask", "--", "--debug"])
    assert seen == [["ask", "x"], ["ask", "x"], ["ask", "--", "--debug"]]


def test_ctrl_c_is_130_without_a_word(monkeypatch, capsys):
    def stop(words):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_run", stop)
    assert main([]) == 130
    assert capsys.readouterr() == ("", "")


def test_version_and_help(pippin):
    version = pippin("--version")
    assert version.returncode == 0
    assert version.stdout.decode().split()[0] == "pippin"
    shown = pippin("--help")
    assert shown.returncode == 0
    for verb in ("ask", "chat", "models", "pull", "remove", "doctor", "claims"):
        assert f" {verb} " in shown.stdout.decode()
        assert pippin(verb, "--help").returncode == 0


def test_help_loads_nothing_that_is_slow_to_load():
    script = "import sys; from pippin.cli import main; main(['--help']); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    heavy = {"torch", "numpy", "pydantic", "llguidance", "tokenizers", "prompt_toolkit", "huggingface_hub"}
    assert heavy.isdisjoint(done.stderr.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["speak"], "No such command 'speak'."),
        (["pul"], "Did you mean 'pull'? (see `pippin --help`)"),
        (["ask", "--loud"], "No such option: --loud"),
        (["ask", "x", "--seed", "blue"], "Invalid value for '--seed'"),
        (["ask", "x", "--guardrails", "lax"], "Invalid value for '--guardrails': 'lax' is not one of 'strict',"),
        (["ask", "two", "words"], "(see `pippin ask --help`)"),
        (["remove"], "Missing argument"),
        (["train", "lora"], "(see `pippin train lora --help`)"),
    ],
)
def test_usage_errors_are_one_line_and_code_2(refused, words, message):
    line = refused(*words, code=2)
    assert message in line
    assert line.endswith(" --help`)")


def test_a_reader_that_leaves_early_is_not_an_error(command):
    # `pippin --help | true`: the pipe is closed before anything is read.
    for words in (["--help"], ["claims", "list"]):
        process = subprocess.Popen([command, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        process.stdout.close()
        _, message = process.communicate(timeout=60)
        assert message == b""
        assert process.returncode == 141


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /dev/full")
def test_a_full_disk_under_the_output_is_said(command):
    with open("/dev/full", "wb") as full:
        done = subprocess.run([command, "--version"], stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 1
    assert b"No space left on device" in done.stderr
    assert b"Traceback" not in done.stderr


def test_the_app_without_a_verb_shows_help():
    shown = CliRunner().invoke(app.app, [])
    assert "Private foundation models" in shown.output


def test_completion_offers_the_models(command):
    env = os.environ | {"_PIPPIN_COMPLETE": "complete_bash", "COMP_WORDS": "pippin ask --model smol", "COMP_CWORD": "3"}
    done = subprocess.run([command], capture_output=True, text=True, env=env, check=False)
    assert "smollm2-135m" in done.stdout.split()


def test_the_module_s_own_words_name_every_code():
    codes = {exit_code(provoke(kind)) for kind in every_error()} | {cli.INTERRUPTED, cli.BROKEN_PIPE}
    assert all(f"{code} " in exit_codes.__doc__ for code in codes)


def test_a_warning_of_pippin_is_one_line_and_others_are_as_they_were(monkeypatch, capsys):
    def warn(words, **settings):
        warnings.warn("it is not as it was asked for", errors.Truncation, stacklevel=2)
        warnings.warn("somebody else's matter", DeprecationWarning, stacklevel=2)

    monkeypatch.setattr("pippin.cli.app.app", warn)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        shown = []
        monkeypatch.setattr(warnings, "showwarning", lambda *given, **more: shown.append(given[1]))
        assert main([]) == 0
        assert shown == [DeprecationWarning]
    assert capsys.readouterr().err.strip() == "it is not as it was asked for"
