"""Networks that others trained, rebuilt from their weights: the oracle is their published accuracy."""

import pytest
import torch

from pippin.claims.worlds.images.cifar_classifiers import resnet56, vgg16
from pippin.core.store import store
from pippin.data import images


@pytest.mark.parametrize(("build", "published"), [(resnet56, 0.93), (vgg16, 0.92)])
def test_they_are_as_good_as_published(build, published):
    for name in ("cifar-10", "cifar-10-classifiers"):
        if store.find(name) is None:
            pytest.skip(f"{name} is not here: pippin pull {name}")
    data = images.load("cifar-10", split="test", limit=200)
    with torch.no_grad():
        logits = build()(data.images.float() / 255)
    # 200 images: three standard deviations of a share of 0.93 are 0.054
    assert float((logits.argmax(-1) == data.labels).double().mean()) > published - 0.054
