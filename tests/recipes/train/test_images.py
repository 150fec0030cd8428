"""A generator trained on real images: what is written, how a run continues, what is refused."""

import numpy as np
import pytest
import torch
from PIL import Image

import pippin
from pippin.core.errors import InvalidArgument, PippinError
from pippin.data import images
from pippin.generate.conditions import Conditioning
from pippin.generate.flows.itarflow import IterativeTarFlow
from pippin.recipes.train.images import Config, run, still_falling
from pippin.train import TrainingResult

SMALL = {"image_size": 8, "channels": 1, "hidden_size": 16, "num_hidden_layers": 1, "batch_size": 8}


@pytest.fixture
def folder(tmp_path):
    """Dark and light images, in a folder each."""
    rng = np.random.default_rng(0)
    for name, level in (("dark", 60), ("light", 190)):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(12):
            noise = rng.normal(0, 10, (8, 8))
            array = np.clip(level + noise, 0, 255).astype(np.uint8)
            Image.fromarray(array).save(tmp_path / "images" / name / f"{i}.png")
    return tmp_path / "images"


def train(folder, out, **given):
    return run(Config(data=str(folder), out=out, **(SMALL | given)), show_progress=False)


def test_a_generator_is_trained_on_its_classes(folder, tmp_path):
    out = tmp_path / "made"
    result = train(folder, out, steps=80, lr=5e-3)
    losses = result.training.losses
    assert (len(losses), losses[-1] < 0.5 * losses[0]) == (80, True)
    assert result.held_out_loss is None  # 2 % of 24 images are none
    model = pippin.load(out)
    assert model.metadata == {"data": "images", "method": "unet", "classes": ["dark", "light"]}
    samples = model.sample(Conditioning(labels=torch.tensor([0] * 4 + [1] * 4)), seed=0)
    assert samples[4:].mean() - samples[:4].mean() > 0.5
    assert images.read_image(out / "samples.png").shape == (3, 34, 34)
    assert (out / "run" / "loss.png").is_file()


def test_the_samples_of_an_iterative_flow_are_sampled_iteratively(folder, tmp_path, monkeypatch):
    seen, sample = [], IterativeTarFlow.sample

    def recorded(self, *given, **options):
        seen.append(self.model.config.noise_std_range)
        return sample(self, *given, **options)

    monkeypatch.setattr(IterativeTarFlow, "sample", recorded)
    train(folder, tmp_path / "made", steps=1, method="itarflow")
    train(folder, tmp_path / "other", steps=1, method="tarflow")
    assert seen == [(0.02, 0.5)]


def test_a_run_continues(folder, tmp_path):
    out = tmp_path / "made"
    first = train(folder, out, steps=4, eval_every=2)
    with pytest.raises(InvalidArgument, match="--resume"):
        train(folder, out, steps=4)
    again = train(folder, out, steps=4, eval_every=2, resume=True)
    assert again.training.losses == first.training.losses


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "gan"}, "method must be 'unet'"),
        ({"condition_on": "text"}, "images has no captions"),
        ({"held_out": 0.99}, "leave none to train on"),
        ({"image_size": 7, "method": "dit", "patch_size": 2}, "7"),
        ({"method": "dit", "noise_std": 0.1}, "for methods 'tarflow' and 'starflow', not for 'dit'"),
        ({"method": "starflow", "noise_std": 0.0}, "starflow learns from its noise"),
        ({"channels": 2}, "channels must be 1 or 3, got 2"),
    ],
)
def test_mistakes_are_told_before_anything_is_written(folder, tmp_path, given, message):
    with pytest.raises(InvalidArgument, match=message):
        train(folder, tmp_path / "made", steps=1, **given)
    assert not (tmp_path / "made").exists()


def test_damaged_images_are_named_and_left_out_if_asked(folder, tmp_path, capsys):
    (folder / "dark" / "x.png").write_bytes(b"no image")
    with pytest.raises(PippinError, match=r"x\.png"):
        train(folder, tmp_path / "made", steps=1)
    run(Config(data=str(folder), out=tmp_path / "made", steps=1, skip_bad=True, **SMALL))
    assert "left out 1 files" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ([1.0, 0.8, 0.6, 0.5, 0.4, 0.3], "from 0.6 to 0.3 in the second half"),
        ([1.0, 0.5, 0.4, 0.4, 0.4, 0.4], None),
        ([-1.0, -2.0, -2.0, -3.0], "from -2 to -3 in the second half"),
        ([1.0, 0.2], None),
    ],
)
def test_a_run_that_is_too_short_is_said(losses, words):
    result = TrainingResult(evaluations=[(step, {"loss": loss}) for step, loss in enumerate(losses)])
    hint = still_falling(result)
    assert hint is None if words is None else words in hint
