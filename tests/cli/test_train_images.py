"""The verb on real pictures and small models: what it writes, what it refuses, and how a run goes on."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from pippin.cli import main
from pippin.data import images
from pippin.generate import folder
from pippin.generate.condition import Condition


@pytest.fixture
def run(capsys):
    """The command in this process: its exit code and what it said."""

    def run(*words):
        code = main([str(word) for word in words])
        return SimpleNamespace(code=code, **capsys.readouterr()._asdict())

    return run


@pytest.fixture
def pictures(tmp_path):
    """Dark and light pictures, in a folder each."""
    rng = np.random.default_rng(0)
    for name, level in (("dark", 60), ("light", 190)):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for i in range(12):
            noise = rng.normal(0, 10, (8, 8))
            Image.fromarray(np.clip(level + noise, 0, 255).astype(np.uint8)).save(
                tmp_path / "pictures" / name / f"{i}.png"
            )
    return tmp_path / "pictures"


SMALL = ("--size", "8", "--channels", "1", "--width", "16", "--layers", "1", "--batch", "8")


def test_a_model_learns_its_classes(run, pictures, tmp_path):
    out = tmp_path / "made"
    done = run("train", "images", pictures, "--out", out, "--steps", "80", *SMALL, "--lr", "5e-3", "--json")
    assert done.code == 0, done.err
    said = json.loads(done.out)
    assert said["steps"] == 80
    assert said["last_loss"] < 0.5 * said["first_loss"]
    assert said["held_out_loss"] is None  # 2 % of 24 pictures are none
    model = folder.load(out)
    assert model.facts == {"data": "pictures", "method": "unet", "classes": ["dark", "light"]}
    drawn = model.sample(Condition(labels=torch.tensor([0] * 4 + [1] * 4)), seed=0)
    dark, light = drawn[:4].mean(), drawn[4:].mean()
    assert light - dark > 0.5
    assert images.read(out / "samples.png").shape == (3, 34, 34)
    assert (out / "run" / "loss.png").is_file()


def test_a_run_goes_on(run, pictures, tmp_path):
    out = tmp_path / "made"
    first = run("train", "images", pictures, "--out", out, "--steps", "4", "--every", "2", *SMALL, "--json")
    assert first.code == 0, first.err
    again = run("train", "images", pictures, "--out", out, "--steps", "4", *SMALL)
    assert again.code == 2
    assert "--resume" in again.err
    more = run("train", "images", pictures, "--out", out, "--steps", "4", "--every", "2", "--resume", *SMALL, "--json")
    assert json.loads(more.out)["last_loss"] == json.loads(first.out)["last_loss"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--method", "gan"), "no method 'gan'; choose one of unet, dit"),
        (("--from", "sound"), "--from is 'sound'"),
        (("--from", "text"), "pictures has no captions"),
        (("--held-out", "1"), "--held-out is 1"),
        (("--held-out", "0.99"), "leave none to learn"),
        (("--batch", "0"), "--batch must be at least 1"),
        (("--lr", "0"), "--lr must be above 0"),
        (("--size", "7", "--method", "dit", "--patch", "2"), "7"),
        (("--width", "0"), "width is 0"),
        (("--channels", "2"), "channels"),
    ],
)
def test_mistakes_are_told_before_anything_is_written(run, pictures, tmp_path, words, message):
    done = run("train", "images", pictures, "--out", tmp_path / "made", "--steps", "1", *words)
    assert done.code == 2, done.err
    assert message in done.err
    assert not (tmp_path / "made").exists()


def test_damaged_pictures_are_named_and_left_out_if_asked(run, pictures, tmp_path):
    (pictures / "dark" / "x.png").write_bytes(b"no picture")
    words = ("train", "images", pictures, "--out", tmp_path / "made", "--steps", "1", *SMALL)
    done = run(*words)
    assert done.code == 2
    assert "x.png" in done.err
    done = run(*words, "--skip-bad")
    assert done.code == 0, done.err
    assert "left out 1 files" in done.err
