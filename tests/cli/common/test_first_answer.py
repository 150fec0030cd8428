"""The note about the default model: once, on a terminal, and for that model alone."""

import os
import sys

import pytest

from pippin.cli.common import terminal as streams
from pippin.cli.common.first_answer import MARKER, explain_default_model

needs_pty = pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")


@pytest.fixture
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("PIPPIN_HOME", str(tmp_path))
    monkeypatch.setattr(streams, "watched", lambda stream: True)
    return tmp_path


def test_it_is_said_once(home, capsys):
    explain_default_model("SmolLM2-135M", None)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "smollm2-135m is small: it extracts, classifies, calls tools" in shown.err
    assert "pippin doctor" in shown.err
    assert "pippin pull NAME" in shown.err
    assert (home / MARKER).exists()
    explain_default_model("smollm2-135m", None)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("model", "url"), [("qwen3-0.6b", None), ("./smollm2-135m", None), ("smollm2-135m", "http://localhost/v1")]
)
def test_other_models_are_not_explained(home, capsys, model, url):
    explain_default_model(model, url)
    assert capsys.readouterr().err == ""
    assert not (home / MARKER).exists()


def test_nothing_is_said_where_nobody_reads(home, monkeypatch, capsys):
    monkeypatch.setattr(streams, "watched", lambda stream: stream is not sys.stderr)
    explain_default_model("smollm2-135m", None)
    assert capsys.readouterr().err == ""
    assert not (home / MARKER).exists()


def test_without_a_folder_for_the_marker_nothing_is_said(home, monkeypatch, capsys):
    monkeypatch.setenv("PIPPIN_HOME", str(home / "none"))
    explain_default_model("smollm2-135m", None)
    assert capsys.readouterr().err == ""


@pytest.fixture
def installed(tmp_path, default_model_path):
    """A cache folder of its own with the default model, by a link."""
    folder = tmp_path / "installed" / default_model_path.parent.name
    folder.mkdir(parents=True)
    os.symlink(default_model_path, folder / default_model_path.name)
    return {"PIPPIN_HOME": str(tmp_path), "PIPPIN_OFFLINE": "1"}


@needs_pty
def test_the_first_answer_of_ask_and_no_other(terminal, pippin, installed):
    assert pippin("ask", "Hi", "--max-tokens", 2, env=installed).returncode == 0  # not on a terminal
    screen = terminal("ask", "Hi", "--max-tokens", 2, "--json", env=installed)
    assert screen.exit_code() == 0
    assert "is small" not in screen.shown
    screen = terminal("ask", "Hi", "--max-tokens", 2, env=installed)
    screen.wait_for("smollm2-135m is small")
    assert screen.exit_code() == 0
    screen = terminal("ask", "Hi", "--max-tokens", 2, env=installed)
    screen.wait_for("tokens/s")
    assert screen.exit_code() == 0
    assert "is small" not in screen.shown


@needs_pty
def test_the_first_answer_of_a_chat(terminal, installed):
    screen = terminal("chat", "--max-tokens", 2, env=installed)
    screen.wait_for(">")
    screen.type("Hi\r")
    screen.wait_for("smollm2-135m is small")
    screen.wait_for(">")
    screen.type("Hi\r")
    screen.wait_for("tokens/s")
    screen.wait_for(">")
    screen.type("\x04")
    assert screen.exit_code() == 0
    assert screen.shown.count("is small") == 1
