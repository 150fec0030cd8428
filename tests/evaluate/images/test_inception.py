"""Oracles: the statistics that the network stored of its training, images known to be alike, counted sizes."""

import zipfile

import pytest
import torch
import torch.nn.functional as F

from pippin.core.errors import AssetError, CorruptedFile, InvalidInput
from pippin.core.store import store
from pippin.data import images
from pippin.evaluate.images.inception import InceptionFeatures, inception


@pytest.fixture(scope="module")
def network():
    if store.find("inception-fid") is None:
        pytest.skip("the Inception weights are not here: pippin pull inception-fid")
    return inception()


@pytest.fixture(scope="module")
def pictures():
    """Real images."""
    folder = store.find("cifar-10")
    if folder is None:
        pytest.skip("CIFAR-10 is not here: pippin pull cifar-10")
    return images.load(folder, split="test").x[:4]


def test_the_first_layer_sees_what_it_was_trained_on(network, pictures):
    """The variance of its answers on real images is near the stored one; on another scale it is 10,000 times that."""
    first = network.stem[0]
    answers = F.conv2d(F.interpolate(pictures, (299, 299), mode="bilinear"), first.weight, None, 2)
    ratio = (answers.var((0, 2, 3)) / first.variance).log10().median()
    assert abs(float(ratio)) < 1


def test_features_tell_the_same_picture_from_another(network, pictures):
    a = F.normalize(network(pictures), dim=1)
    b = F.normalize(network(pictures.flip(3)), dim=1)
    alike = a @ b.T
    assert bool((alike.argmax(1) == torch.arange(4)).all())
    assert alike.diagonal().min() > alike[~torch.eye(4, dtype=torch.bool)].max() + 0.1


def test_gray_pictures_are_shown_on_all_channels(network, pictures):
    gray = pictures[:1].mean(1, keepdim=True)
    assert torch.equal(network(gray), network(gray.expand(-1, 3, -1, -1)))


def test_its_size_is_that_of_the_published_network():
    """As Keras counts it without its last matrix: weights, shifts, means and variances."""
    assert sum(p.numel() for p in InceptionFeatures().parameters()) == 21_802_784


def test_missing_and_damaged_weights_and_other_pictures_are_refused(tmp_path):
    with pytest.raises(AssetError, match="pippin pull inception-fid"):
        inception(tmp_path / "nothing.pt")
    bad = tmp_path / "bad.pt"
    bad.write_bytes(b"no archive")
    with pytest.raises(CorruptedFile, match="not an archive of the Inception weights"):
        inception(bad)
    with zipfile.ZipFile(bad, "w") as archive:
        archive.writestr("out_jit_module/data/0", b"1234")
    with pytest.raises(CorruptedFile, match="has 4 bytes, wanted 3456"):
        inception(bad)
    with pytest.raises(InvalidInput, match="1 or 3 channels"):
        InceptionFeatures()(torch.zeros(1, 2, 8, 8))
