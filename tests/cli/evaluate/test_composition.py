"""`pippin evaluate composition` as a user runs it: a verdict, JSON, an image, errors."""

import json

import pytest
import torch

from pippin.cli import main
from pippin.generate.conditions import ConditioningSpec
from pippin.generate.diffusion.diffusion import Diffusion, DiffusionConfig
from pippin.generate.diffusion.local_network import LocalNetConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A class model with random weights; classes 0 and 1 have the same vector, so they change the same features."""
    spec = ConditioningSpec(num_classes=3, null=True)
    config = DiffusionConfig((1, 8, 8), LocalNetConfig(channels=8, num_blocks=1), spec, method="ddim", steps=3)
    model = Diffusion(config).initialize(0)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    embedding = model.network.embedding.classes
    embedding.data[1] = embedding.data[0]
    model.metadata = {"classes": ["disc", "round", "square"]}
    path = tmp_path_factory.mktemp("models") / "model"
    model.save(path)
    return path


def run(capsys, *words):
    code = main(["evaluate", "composition", *map(str, words)])
    return code, *capsys.readouterr()


def test_parts_that_are_the_same_are_at_risk(capsys, folder, tmp_path):
    picture = tmp_path / "both.png"
    words = ["--part", "disc", "--part", "round", "--background", "nothing", "--num-samples", 2]
    code, out, err = run(capsys, folder, *words, "--draw", picture, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["verdict"] == "at risk"
    assert found["cosine"][0][1] == pytest.approx(1.0, abs=1e-3)
    assert found["parts"] == ["disc", "round"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_verdict_in_words_and_a_class_by_its_number(capsys, folder):
    words = ["--part", "2", "--part", "disc", "--background", "round", "--num-samples", 2, "--corrector-steps", 1]
    code, out, _ = run(capsys, folder, *words)
    assert code == 0
    assert out.startswith("0 2, 1 disc\ncomposition: ")
    assert "overlap of positions" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--part", "disk", "--background", "nothing"), "'disk' is no class of the model; it has disc, round, square"),
        (("--part", "disc", "--background", "nothing", "--num-samples", 0), "--num-samples must be at least 1, got 0"),
        (("--part", "disc", "--background", "nothing", "--draw", "a.mp4"), "draw (--draw) writes .png"),
        (("--part", "disc", "--part", "square", "--background", "nothing", "--weight", 2), "1 weights for 2 parts"),
    ],
)
def test_what_is_wrong_is_said(capsys, folder, words, message):
    code, out, err = run(capsys, folder, *words)
    assert (code != 0, out) == (True, "")
    assert message in err


def test_a_folder_without_a_generator_is_named(capsys, tmp_path):
    code, _, err = run(capsys, tmp_path / "none", "--part", "a", "--background", "b")
    assert code != 0
    assert "none" in err
