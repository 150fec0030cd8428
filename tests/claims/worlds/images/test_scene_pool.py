"""Every arm gets the same batches, and the learning rate of the lowest loss."""

from itertools import islice

import torch

from pippin.claims.worlds.images.scene_pool import PoolBatches, labeled
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
