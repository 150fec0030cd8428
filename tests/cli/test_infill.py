"""`pippin infill`, and `pippin ask` with a masked diffusion model."""

import io
import json
import sys

import pytest

from pippin.cli import main
from pippin.recipes.train import diffusion

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "and", "runs", "away", "from", "it"]


@pytest.fixture(scope="module")
def place(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("diffusion")
    tiny.save(folder / "model")
    (folder / "text.txt").write_text(" ".join(WORDS[i * i % len(WORDS)] for i in range(600)))
    return folder


@pytest.fixture(scope="module")
def filler(place):
    config = diffusion.Config(
        model=str(place / "model"), data=(place / "text.txt",), out=place / "filler", max_length=32, steps=3
    )
    return diffusion.run(config, show_progress=False).out


@pytest.fixture
def run(capsys, monkeypatch):
    def words(*given):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
        code = main([str(word) for word in given])
        return code, *capsys.readouterr()

    return words


def test_gaps_are_filled(filler, run):
    code, out, err = run("infill", filler, "the quick [[6]] fox [[3]] over", "--steps", 4, "--json")
    made = json.loads(out)
    assert (code, made["masked"], made["passes"]) == (0, 9, 4), err
    assert made["text"] == f"the quick {made['gaps'][0]} fox {made['gaps'][1]} over"
    assert [step["text"].count("░") for step in made["steps"]] == [6, 4, 2, 0]
    code, out, _ = run("infill", filler, "the quick [[6]] fox [[3]] over", "--steps", 4)
    assert (code, out) == (0, made["text"] + "\n")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["no gap"], 2, "the text has no gap"),
        (["[[3]] more"], 2, "the first token is masked"),
        (["a [[3]]", "--steps", "0"], 2, "steps must be at least 1"),
        (["a [[3]]", "--order", "left"], 2, "order must be 'random' or 'confidence', got 'left'"),
        (["a [[3000]]"], 5, "3002 tokens, masked ones included"),
    ],
)
def test_what_cannot_be_filled(filler, run, words, code, message):
    found, out, err = run("infill", filler, *words)
    assert (out, message in err) == ("", True), err
    assert found == code


def test_other_models_are_told_apart(place, filler, run):
    assert "of type 'llama', not 'pippin_masked_diffusion'" in run("infill", place / "model", "a [[3]]")[2]
    code, out, err = run("ask", "-m", filler, "Hello", "--max-tokens", 5, "--json")
    assert code == 0, err
    assert json.loads(out)["usage"]["output_tokens"] <= 5
    assert "--bits: not for" in run("ask", "-m", filler, "Hello", "--bits", 8)[2]
