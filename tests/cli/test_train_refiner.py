"""`pippin train refiner` as a user runs it: what it writes can be read back and trained on."""

import json

import numpy as np
import pytest
import torch

from pippin.data import images
from pippin.generate.refiner import SimRefiner


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sets")
    rng = np.random.default_rng(0)
    labels = np.arange(40) % 2
    made = np.where(labels[:, None, None] > 0, 220, 30) + rng.integers(0, 20, (40, 12, 12))
    np.savez(folder / "made.npz", images=made.astype(np.uint8), labels=labels, classes=np.array(["dark", "bright"]))
    np.savez(folder / "real.npz", images=rng.integers(40, 200, (40, 12, 12)).astype(np.uint8))
    np.savez(folder / "large.npz", images=rng.integers(40, 200, (40, 16, 16)).astype(np.uint8))
    return folder


def test_a_refiner_and_refined_pictures_with_their_labels_are_written(pippin, sets):
    out = sets / "refiner"
    small = ("--rounds", 2, "--every", 1, "--batch", 4, "--history", 8, "--width", 2, "--blocks", 1)
    run = pippin("train", "refiner", sets / "made.npz", sets / "real.npz", "--out", out, *small, "--json")
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout)
    made, refined = images.load(sets / "made.npz"), images.load(out / "refined.npz")
    assert torch.equal(refined.labels, made.labels)
    assert refined.classes == ("dark", "bright")
    refiner = SimRefiner.load(out)
    assert torch.equal(images.to_levels(refiner.refine(made.x)), refined.images)
    assert refiner.facts == {"synthetic": "made", "real": "real"}
    checks = json.loads((out / "checks.json").read_text())
    assert [check["round"] for check in checks] == [1, 2]
    assert checks[-1] == {"round": 2} | {name: told[name] for name in ("change", "moved", "kept", "accuracy")}
    assert images.read(out / "samples.png").shape[0] == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("made.npz", "large.npz"), b"give --size"),
        (("made.npz", "real.npz", "--batch", "5"), b"batch=5"),
        (("made.npz", "real.npz", "--weight", "-1"), b"weight (lambda) is -1.0"),
        (("made.npz", "real.npz", "--rounds", "0"), b"--rounds is 0"),
    ],
)
def test_what_cannot_be_done_is_said_before_it_is_begun(pippin, sets, tmp_path, words, message):
    given = [sets / word if word.endswith(".npz") else word for word in words]
    run = pippin("train", "refiner", *given, "--out", tmp_path / "out")
    assert run.returncode == 2
    assert message in run.stderr
    assert not (tmp_path / "out").exists()
