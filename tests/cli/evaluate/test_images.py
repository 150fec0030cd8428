"""`pippin evaluate images` as a user runs it: its figures are those of the library."""

import json

import numpy as np
import pytest
import torch

from pippin.data.images import to_samples
from pippin.evaluate.images.features import Pixels
from pippin.evaluate.images.sample_quality import compare


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sets")
    rng = np.random.default_rng(0)
    for name, n, low in (("real", 40, 100), ("drawn", 30, 60), ("few", 5, 0), ("large", 20, 0)):
        side = 12 if name == "large" else 8
        np.savez(folder / f"{name}.npz", images=rng.integers(low, 200, (n, side, side)).astype(np.uint8))
    return folder


def test_figures_are_those_of_the_library(pippin, sets):
    run = pippin("evaluate", "images", sets / "drawn.npz", sets / "real.npz", "--features", "pixels", "--json")
    assert run.returncode == 0, run.stderr
    drawn, real = (
        to_samples(torch.from_numpy(np.load(sets / f"{name}.npz")["images"])[:, None]) for name in ("drawn", "real")
    )
    assert json.loads(run.stdout) == json.loads(compare(drawn, real, Pixels((1, 8, 8))).to_json())


def test_the_small_network_tells_a_set_from_another_and_draws_a_plot(pippin, sets):
    picture = sets / "figures.svg"
    run = pippin("evaluate", "images", sets / "drawn.npz", sets / "real.npz", "--plot", picture)
    assert run.returncode == 0, run.stderr
    assert b"small network, rotations of real" in run.stdout
    assert b"fewer than 1000 images" in run.stderr
    assert b"<svg" in picture.read_bytes()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("few.npz", "real.npz"), b"holds 5 images; give 16"),
        (("large.npz", "real.npz"), b"--image-size"),
        (("none.npz", "real.npz"), b"no file, folder or catalog name"),
        (("drawn.npz", "real.npz", "--limit", "3"), b"limit must be at least 16, got 3"),
        (("drawn.npz", "real.npz", "--plot", "figures.gif"), b"figures.gif"),
    ],
)
def test_what_cannot_be_done_is_said_before_it_is_begun(pippin, sets, words, message):
    run = pippin("evaluate", "images", *(sets / word if word.endswith(".npz") else word for word in words))
    assert run.returncode == 2
    assert message in run.stderr
    assert not run.stdout
