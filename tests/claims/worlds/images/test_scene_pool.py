"""Every arm gets the same batches, and the learning rate of the lowest loss."""

from itertools import islice

import pytest
import torch

from pippin.claims.worlds.images.scene_pool import PoolBatches, best_rate, labeled
from pippin.core.errors import NonFiniteLoss
from pippin.data.synthetic.scenes import SceneSpec, sample_scenes


def test_batches_are_the_same_for_every_arm_and_labels_go_with_their_images():
    scenes = sample_scenes(SceneSpec(objects=(1, 3)), 20, seed=0)
    known = labeled(scenes)
    first, second = (list(islice(PoolBatches(known, 4, seed=7), 3)) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.x, other.x)
        for x, label in zip(one.x, one.condition.labels, strict=True):
            place = next(i for i in range(20) if torch.equal(scenes.x[i], x))
            assert int(label) == int(scenes.counts[place]) - 1


def test_the_best_rate_is_searched_only_among_several():
    assert best_rate((1e-3,), lambda rate: pytest.fail("nothing to search")) == 1e-3
    assert best_rate((1.0, 2.0, 3.0), lambda rate: (rate - 2.2) ** 2) == 2.0


def test_a_rate_at_which_training_breaks_down_is_not_taken():
    def loss_at(rate: float) -> float:
        if rate == 3.0:
            raise NonFiniteLoss("too high", step=1)
        return float("nan") if rate == 1.0 else 5.0

    assert best_rate((1.0, 2.0, 3.0), loss_at) == 2.0
