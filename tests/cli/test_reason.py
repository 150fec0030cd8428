"""`pippin train reasoner` and `pippin reason`: from a file of solutions to answers, on again, and what is refused."""

import json

import pytest

from pippin.claims import _arithmetic
from pippin.cli import main
from pippin.language.ladir import LatentReasoner


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small model of numbers, and problems with solutions."""
    place = tmp_path_factory.mktemp("reasoner")
    _arithmetic.model(layers=1, width=16, seed=0).save(place / "model")
    lines = [
        {"prompt": p.question, "completion": "\n".join([*p.steps, f"The answer is {p.answer}"])}
        for p in _arithmetic.problems(20, seed=0)
    ]
    (place / "sums.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return place


def run(capsys, *words):
    code = main([str(word) for word in words])
    out, err = capsys.readouterr()
    return code, out, err


def train(folder, out, *words):
    small = ["--rows", 4, "--length", 8, "--latents", 2, "--latent-width", 4, "--draws", 2, "--device", "cpu"]
    return ["train", "reasoner", folder / "model", "--data", folder / "sums.jsonl", "--out", out, *small, *words]


@pytest.fixture(scope="module")
def thinker(folder):
    out = folder / "thinker"
    assert main([str(word) for word in train(folder, out, "--steps", 2, "--held-out", 0.1, "--json")]) == 0
    return out


def test_a_trained_reasoner_opens_answers_and_is_not_overwritten(folder, thinker, capsys):
    reasoner = LatentReasoner.load(thinker, device="cpu")
    assert (reasoner.vae.tokens, reasoner.vae.width, reasoner.max_blocks, int(reasoner.taught)) == (2, 4, 2, 2)
    assert {path.name for path in (thinker / "run").iterdir()} == {"autoencoder", "stage-1", "stage-2"}

    code, out, _ = run(capsys, "reason", thinker, "3,8,5=6", "--steps", 2, "--seed", 1, "--json", "--show-thoughts")
    assert code == 0
    (answer,) = json.loads(out)["answers"]
    (same,) = reasoner.generate(["3,8,5=6"], steps=2, seed=1, return_thoughts=True)
    assert (answer["text"], answer["thoughts"]) == (same.text, list(same.thoughts))

    code, out, _ = run(capsys, "reason", thinker, "3,8,5=6", "--steps", 1, "--samples", 3, "--diversity", 0.4)
    assert code == 0
    assert sum(int(line.split("/3")[0]) for line in out.splitlines() if "/3  " in line) == 3

    code, _, err = run(capsys, *train(folder, thinker, "--steps", 2))
    assert code == 2
    assert "--resume" in err
    code, out, _ = run(capsys, *train(folder, thinker, "--steps", 2, "--held-out", 0.1, "--resume", "--json"))
    assert code == 0
    made = json.loads(out)
    assert made["steps"] == {"autoencoder": 2, "stage 1": 2, "stage 2": 1}
    assert set(made["held_out"]) == {"sentences given back", *(f"answers as written, {n} steps" for n in (1, 4, 16))}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--learn", "all"], "--learn"),
        (["--vae-steps", 0], "--vae-steps"),
        (["--rollout-steps", -1], "--rollout-steps"),
        (["--held-out", 1.5], "--held-out"),
        (["--draws", 0], "draws"),
        (["--max-blocks", 1], "2 sentences"),
    ],
)
def test_options_that_make_no_sense_are_refused_before_anything_is_written(folder, tmp_path, capsys, words, message):
    code, _, err = run(capsys, *train(folder, tmp_path / "new", "--steps", 1, *words))
    assert code == 2
    assert message in err
    assert not (tmp_path / "new").exists()


def test_what_cannot_be_asked_is_refused(folder, thinker, capsys):
    code, _, err = run(capsys, "reason", thinker, "3,8,5=6", "--steps", 0)
    assert (code, "steps must be at least 1" in err) == (2, True)
    code, _, err = run(capsys, "reason", thinker, " ")
    assert (code, "no question" in err) == (2, True)
    code, _, err = run(capsys, "reason", folder / "model", "3,8,5=6")
    assert (code, "no reasoner" in err) == (4, True)
