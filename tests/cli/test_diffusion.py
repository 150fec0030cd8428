"""`pippin train diffusion`, `pippin infill` and `pippin ask` with what they made, from files to the terminal."""

import io
import json
import sys

import pytest

from pippin.cli import main
from pippin.language import load_diffusion

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "and", "runs", "away", "from", "it"]


@pytest.fixture(scope="module")
def place(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("diffusion")
    tiny.save(folder / "model")
    (folder / "text.txt").write_text(" ".join(WORDS[i * i % len(WORDS)] for i in range(600)))
    return folder


@pytest.fixture
def run(capsys, monkeypatch):
    def words(*given):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
        code = main([str(word) for word in given])
        return code, *capsys.readouterr()

    return words


SMALL = ["--length", 32, "--rows", 4, "--lr", 0.01, "--steps", 6, "--every", 3]


@pytest.fixture(scope="module")
def filler(place):
    words = ["train", "diffusion", place / "model", "--data", place / "text.txt", "--out", place / "filler", *SMALL]
    assert main([str(word) for word in [*words, "--anneal", 2, "--json"]]) == 0
    return place / "filler"


def test_training_makes_a_model_that_fills_and_goes_on_from_there(place, filler, run):
    lm = load_diffusion(filler, device="cpu")
    assert (lm.mask_id, lm.shift) == (258, True)
    log = [json.loads(line) for line in (filler / "run" / "log.jsonl").read_text().splitlines()]
    assert len([line for line in log if "loss" in line]) >= 6
    data = ["--data", place / "text.txt", *SMALL]
    code, out, _ = run("train", "diffusion", filler, *data, "--out", place / "more", "--json")
    made = json.loads(out)
    assert code == 0
    assert made["losses"] == "bounds"
    assert made["held_out_after"]["loss"] < made["held_out_before"]["loss"], "it goes on learning"
    assert load_diffusion(place / "more", device="cpu").mask_id == 258
    code, _, err = run("train", "diffusion", filler, *data, "--out", place / "other", "--no-shift")
    assert code == 2
    assert "is a diffusion model already" in err


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
        (["a [[3]]", "--order", "left"], 2, "order is 'left'"),
        (["a [[3000]]"], 5, "3002 tokens, masked ones included"),
    ],
)
def test_what_cannot_be_filled(filler, run, words, code, message):
    found, out, err = run("infill", filler, *words)
    assert (out, message in err) == ("", True), err
    assert found == code


def test_other_models_are_told_apart(place, filler, run):
    assert "is no masked diffusion model" in run("infill", place / "model", "a [[3]]")[2]
    code, out, err = run("ask", "-m", filler, "Hello", "--max-tokens", 5, "--json")
    assert code == 0, err
    assert json.loads(out)["usage"]["output_tokens"] <= 5
    assert "--bits: not for" in run("ask", "-m", filler, "Hello", "--bits", 8)[2]
