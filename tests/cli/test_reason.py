"""`pippin reason`: the answers of a reasoner, and what is refused."""

import json

import pytest

from pippin.claims.worlds.sequences import countdown
from pippin.cli import main
from pippin.core import progress
from pippin.language.methods.ladir.model import LatentReasoner


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small model of numbers, and problems with solutions."""
    place = tmp_path_factory.mktemp("reasoner")
    countdown.model(layers=1, width=16, seed=0).save(place / "model")
    lines = [
        {"prompt": p.question, "completion": "\n".join([*p.steps, f"The answer is {p.answer}"])}
        for p in countdown.problems(20, seed=0)
    ]
    (place / "sums.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return place


def run(capsys, *words):
    code = main([str(word) for word in words])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture(scope="module")
def thinker(folder):
    out = folder / "thinker"
    small = ["--batch-size", 4, "--max-length", 8, "--block-size", 2, "--latent-size", 4, "--num-noise-samples", 2]
    words = ["--data", folder / "sums.jsonl", "--out", out, *small, "--steps", 2, "--held-out", 0.1, "--device", "cpu"]
    assert main([str(word) for word in ("train", "reasoner", folder / "model", *words, "--json")]) == 0
    return out


def test_a_trained_reasoner_answers(thinker, capsys):
    reasoner = LatentReasoner.load(thinker, device="cpu")
    code, out, _ = run(capsys, "reason", thinker, "3,8,5=6", "--steps", 2, "--seed", 1, "--json", "--show-thoughts")
    assert code == 0
    (answer,) = json.loads(out)["answers"]
    (same,) = reasoner.generate(["3,8,5=6"], steps=2, seed=1, return_thoughts=True)
    assert (answer["text"], answer["thoughts"]) == (same.text, list(same.thoughts))

    code, out, _ = run(capsys, "reason", thinker, "3,8,5=6", "--steps", 1, "--samples", 3, "--diversity", 0.4)
    assert code == 0
    assert sum(int(line.split("/3")[0]) for line in out.splitlines() if "/3  " in line) == 3


def test_long_thoughts_say_how_far_they_are(thinker, capsys, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    code, out, err = run(capsys, "reason", thinker, "3,8,5=6", "--steps", 3, "--seed", 1)
    assert code == 0
    assert "thinking: 1 steps" in err
    assert "block 1, step 3 of 3" in err
    assert "thinking" not in out
    assert run(capsys, "reason", thinker, "3,8,5=6", "--steps", 3, "--seed", 1, "--json")[2] == ""


def test_what_cannot_be_asked_is_refused(folder, thinker, capsys):
    code, _, err = run(capsys, "reason", thinker, "3,8,5=6", "--steps", 0)
    assert (code, "steps must be at least 1" in err) == (2, True)
    code, _, err = run(capsys, "reason", thinker, " ")
    assert (code, "no question" in err) == (2, True)
    code, _, err = run(capsys, "reason", folder / "model", "3,8,5=6")
    assert (code, "not 'pippin_ladir'" in err) == (4, True)
