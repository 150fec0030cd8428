"""SimGAN: what is written can be read back and trained on."""

import json

import numpy as np
import pytest
import torch

from pippin.core.errors import PippinError
from pippin.data import images
from pippin.generate.methods.simgan.model import SimRefiner
from pippin.recipes.train.refiner import Config, run

SMALL = {"max_rounds": 2, "eval_every": 1, "batch_size": 4, "history_size": 8, "hidden_channels": 2, "blocks": 1}


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


def test_a_refiner_and_refined_images_with_their_labels_are_written(sets):
    out = sets / "refiner"
    config = Config(synthetic=str(sets / "made.npz"), real=str(sets / "real.npz"), out=out, device="cpu", **SMALL)
    result = run(config, show_progress=False)
    synthetic, refined = images.load(sets / "made.npz"), images.load(out / "refined.npz")
    assert torch.equal(refined.labels, synthetic.labels)
    assert refined.class_names == ("dark", "bright")
    refiner = SimRefiner.load(out)
    assert torch.equal(images.to_levels(refiner.refine(synthetic.x)), refined.images)
    assert refiner.metadata == {"synthetic": "made", "real": "real"}
    checks = json.loads((out / "checks.json").read_text())
    assert [check["round"] for check in checks] == [1, 2]
    assert checks[-1] == {"round": 2} | {n: result.figures[n] for n in ("change", "moved", "label_score", "accuracy")}
    assert images.read_image(out / "samples.png").shape[0] == 3


@pytest.mark.parametrize(
    ("real", "given", "message"),
    [
        ("large.npz", {}, "--image-size"),
        ("real.npz", {"batch_size": 5}, "batch"),
        ("real.npz", {"max_rounds": 0}, "max_rounds"),
    ],
)
def test_what_cannot_be_done_is_said_before_it_is_begun(sets, tmp_path, real, given, message):
    with pytest.raises(PippinError, match=message):
        run(Config(synthetic=str(sets / "made.npz"), real=str(sets / real), out=tmp_path / "out", **given))
    assert not (tmp_path / "out").exists()
