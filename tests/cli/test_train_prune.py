"""`pippin train prune` and `pippin shape specialize` on a small model: folders that open, errors before any work."""

import json

import pytest
import torch

import pippin
from pippin.claims._byte_text import byte_config, byte_model
from pippin.cli import main
from pippin.core.errors import UnsupportedModel
from pippin.language import Decoder
from pippin.language.pruned import load_pruned

TEXT = "The rain in Spain stays mainly in the plain.\n"


@pytest.fixture
def base(tmp_path):
    byte_model(Decoder(byte_config(layers=2, width=32)).initialise(seed=0)).save(tmp_path / "base")
    (tmp_path / "text.txt").write_text(TEXT * 60)
    pairs = [{"prompt": f"Say {n}.", "completion": f"It is {n}."} for n in range(60)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    return tmp_path


def prune(base, model, out, *words, data="text.txt") -> int:
    where = ["--data", str(base / data), "--out", str(base / out), "--device", "cpu"]
    always = [*where, "--length", "32", "--rows", "2", "--every", "99"]
    return main(["train", "prune", str(base / model), *always, *map(str, words)])


def specialize(base, folder, *words) -> int:
    return main(["shape", "specialize", str(base / folder), "--out", str(base / "small"), *map(str, words)])


def test_a_model_is_pruned_tuned_and_made_small(base, capsys):
    assert prune(base, "base", "pruned", "--keep", 32, "--steps", 4, "--lr", 5e-3, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["held_out_after"]["loss"] < said["held_out_before"]["loss"]
    assert said["held_out_after"]["kept"] == pytest.approx(32 / 96)
    assert said["held_out_after"]["in use"] >= 32 / 96 - 1e-6
    first = load_pruned(base / "pruned", device="cpu")
    assert (first.module.keep, first.module.width) == (32, 96)

    words = ("--stage", "instruct", "--steps", 2, "--json")
    assert prune(base, "pruned", "tuned", *words, data="pairs.jsonl") == 0
    assert json.loads(capsys.readouterr().out)["stage"] == "instruct"
    tuned = load_pruned(base / "tuned", device="cpu")
    assert tuned.module.keep == 32
    assert not torch.equal(tuned.module.predictor.outer.weight, first.module.predictor.outer.weight)

    assert specialize(base, "tuned", "--prompt", "Say 4.", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    small = pippin.load(base / "small", device="cpu", dtype="float32", pack=False)
    assert told["parameters after"] == sum(p.numel() for p in small.module.parameters()) < told["parameters before"]
    assert 0 < told["bytes read for a token, after / before"] < 1
    ids = torch.arange(20)[None]
    with torch.no_grad():
        masks = tuned.module.masks(torch.tensor([tuned.prompt_ids("Say 4.")]))
        torch.testing.assert_close(small.module(ids), tuned.module(ids, masks), atol=1e-5, rtol=1e-5)


def test_one_choice_for_all_needs_no_prompt(base, capsys):
    assert prune(base, "base", "pruned", "--keep", 33, "--steps", 2, "--predictor", "static", "--start", "random") == 0
    shown = capsys.readouterr().err.replace("\n", " ")
    assert "33 of 96 channels" in shown
    assert "multiples of 32" in shown
    assert specialize(base, "pruned") == 0
    shown = capsys.readouterr()
    assert "parameters after" in shown.out + shown.err
    assert pippin.load(base / "small", device="cpu").config.layers[0].feedforward.size == 33


def test_a_trained_reader_must_know_the_same_tokens(base, tiny, capsys):
    tiny.save(base / "other")
    assert prune(base, "base", "pruned", "--keep", 32, "--predictor", base / "other", "--steps", 1) != 0
    assert "differ in token" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--keep is missing"),
        (["--keep", 97], "k must be from 1 to 96"),
        (["--keep", 32, "--stage", "first"], "--stage is 'first'"),
        (["--keep", 32, "--start", "zero"], "--start is 'zero'"),
        (["--keep", 32, "--narrow", 2], "--narrow is 2.0"),
        (["--keep", 32, "--chunks", 1], "at least 2 chunks"),
        (["--keep", 32, "--eps", 0], "eps must be above 0"),
        (["--keep", 32, "--stage", "instruct"], "the data holds no prompts with answers"),
    ],
)
def test_bad_options_are_refused_before_any_work(base, words, message, capsys):
    assert prune(base, "base", "pruned", "--steps", 1, *words) != 0
    assert message in capsys.readouterr().err.replace("\n", " ")
    assert not (base / "pruned" / "config.json").exists()


def test_what_cannot_be_specialised_says_so(base, capsys):
    assert specialize(base, "base", "--prompt", "a") != 0
    assert "neither a model that" in capsys.readouterr().err.replace("\n", " ")
    assert prune(base, "base", "pruned", "--keep", 32, "--steps", 1, "--predictor", base / "base") == 0
    assert specialize(base, "pruned") != 0
    assert "give a prompt" in capsys.readouterr().err.replace("\n", " ")
    assert specialize(base, "pruned", "--weights", "a=1") != 0
    assert "give --prompt, not" in capsys.readouterr().err.replace("\n", " ")
    assert prune(base, "pruned", "again", "--predictor", "small", "--steps", 1) != 0
    assert "has a predictor already" in capsys.readouterr().err.replace("\n", " ")
    with pytest.raises(UnsupportedModel, match="pippin shape specialize FOLDER --prompt"):
        pippin.load(base / "pruned")
