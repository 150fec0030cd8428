"""`pippin imagine`: files, what it says, and what it refuses before it loads a model."""

import json

import pytest
import torch
from typer.testing import CliRunner

from pippin.cli.app import app
from pippin.core.errors import CreationUnavailable, InvalidArgument
from pippin.data import image_files
from pippin.data.images import read_image
from pippin.generate.conditions import ConditioningSpec
from pippin.generate.diffusion.diffusion import Diffusion, DiffusionConfig
from pippin.generate.diffusion.unet import UNetConfig
from pippin.kits.image import read_details


@pytest.fixture(scope="module")
def painter(tmp_path_factory):
    """A model of two classes."""
    network = UNetConfig(base_channels=8, patch_size=2, num_levels=1, attention=False)
    spec = ConditioningSpec(num_classes=2, null=True)
    model = Diffusion(DiffusionConfig((1, 8, 8), network, spec, steps=3)).initialize(0)
    model.metadata = {"classes": ["disc", "square"], "styles": {"bold": {"guidance": 4.0}}}
    place = tmp_path_factory.mktemp("models") / "painter"
    model.save(place)
    return str(place)


def said(*words):
    """What the verb prints."""
    result = CliRunner().invoke(app, ["imagine", *map(str, words)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_images_are_files_named_by_their_seeds(painter, tmp_path):
    out = tmp_path / "new" / "folder"
    lines = said("a square", "-m", painter, "-n", 2, "--seed", 7, "--out", out, "--size", "16x16").split()
    assert lines == [str(out / "0007.png"), str(out / "0008.png")]
    assert read_details(lines[0])["seed"] == 7
    again = json.loads(
        said("--class", "square", "-m", painter, "--seed", 7, "-o", tmp_path, "--json", "--size", "16x16")
    )
    (picture,) = again["images"]
    assert torch.equal(read_image(picture["path"]), read_image(lines[0]))
    assert picture["classes"] == ["square"]


def test_a_single_image_may_have_a_name(painter, tmp_path):
    file = tmp_path / "new" / "square.jpg"
    assert said("a square", "-m", painter, "--out", file, "--size", "16x16").split() == [str(file)]
    assert file.read_bytes().startswith(b"\xff\xd8")
    (tmp_path / "folder.png").mkdir()
    (path,) = said("a square", "-m", painter, "--out", tmp_path / "folder.png", "--size", "16x16").split()
    assert path == str(tmp_path / "folder.png" / "0000.png")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-n", "2"], "is one file, and -n asks for 2 images; give a folder"),
        (["--format", "webp"], "ends as png files do, and --format is webp"),
        (["--animate", "a.png"], "videos are written as gif, webp, png, mp4"),
    ],
)
def test_a_name_that_does_not_fit_is_refused_before_anything_is_sampled(painter, tmp_path, words, message):
    out = tmp_path / ("a.jpg" if "--animate" in words else "a.png")
    with pytest.raises(InvalidArgument, match=message):
        CliRunner().invoke(app, ["imagine", "x", "-m", str(painter), "--out", str(out), *words], catch_exceptions=False)
    assert not out.exists()


def test_a_picture_is_changed_inside_a_mask(painter, tmp_path):
    given = torch.rand(1, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    marked = torch.full((1, 8, 8), -1.0)
    marked[..., 4:] = 1
    image_files.write_image(tmp_path / "a.png", given)
    image_files.write_image(tmp_path / "m.png", marked)
    words = ["-m", painter, "--edit", tmp_path / "a.png", "--mask", tmp_path / "m.png", "-o", tmp_path / "out"]
    (path,) = said("disc", *words, "--preview", tmp_path / "p.png").split()
    before, after = read_image(tmp_path / "a.png", channels=1), read_image(path, channels=1)
    assert torch.equal(before[..., :4], after[..., :4])
    assert not torch.equal(before[..., 4:], after[..., 4:])
    assert (tmp_path / "p.png").is_file()


def test_styles_and_costs_are_told(painter, tmp_path):
    assert "styles: plain, gray, poster, sketch, sepia, bold" in said("-m", painter, "--styles")
    told = json.loads(said("-m", painter, "--styles", "--json"))
    assert told["classes"] == ["disc", "square"]
    assert told["tasks"] == ["draw", "fill", "restyle"]
    cost = json.loads(said("disc", "-m", painter, "--estimate", "--json"))
    assert cost["bytes"] > cost["weight_bytes"] > 0
    assert "of weights" in said("disc", "-m", painter, "--estimate")
    assert not (tmp_path / "images").exists()


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (["a disc"], InvalidArgument, "--model FOLDER"),
        (["--model", "nowhere"], CreationUnavailable, "is not there"),
        (["--model", "nowhere", "--mask", "m.png"], InvalidArgument, "--edit"),
        (["--model", "nowhere", "--edit", "a", "--animate", "b"], InvalidArgument, "exclude each other"),
        (["--model", "nowhere", "--strength", "0.5"], InvalidArgument, "--edit"),
        (["--model", "nowhere", "--memory-budget", "nan"], InvalidArgument, "--memory-budget: 'nan' is not a size"),
        (["--model", "nowhere", "--preview", "now.txt"], InvalidArgument, "--preview writes"),
        (["--model", "nowhere", "--size", "64"], InvalidArgument, "write HEIGHTxWIDTH"),
        (["--model", "nowhere", "--format", "bmp"], InvalidArgument, "png, webp, jpg"),
        (["--model", "nowhere", "--format", "jpg", "--animate", "a.png"], InvalidArgument, "gif, webp, png, mp4"),
    ],
)
def test_what_makes_no_sense_is_refused_first(words, error, message):
    with pytest.raises(error, match=message):
        CliRunner().invoke(app, ["imagine", *words], catch_exceptions=False)
