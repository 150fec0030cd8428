"""Oracles: Pillow and PyAV read back what was written; published statistics of the sets; hand-made files."""

import gzip
import json
import struct

import numpy as np
import pytest
import torch
from PIL import Image

from pippin.core.errors import AssetError, CorruptedFile, GuessedEncoding, InvalidArgument, InvalidImage, InvalidInput
from pippin.core.store import store
from pippin.data import image_files, images
from pippin.data.images import ImageSet


def pulled(name):
    if store.find(name) is None:
        pytest.skip(f"{name} is not here: pippin pull {name}")


@pytest.fixture
def folder(tmp_path):
    """Two classes of images, with captions."""
    rng = np.random.default_rng(0)
    for kind in ("cats", "dogs"):
        (tmp_path / kind).mkdir()
        for i in range(3):
            pixels = rng.integers(0, 256, (12, 12, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / kind / f"{i}.png")
            (tmp_path / kind / f"{i}.txt").write_text(f"{kind} № {i}\n", encoding="utf-8")
    return tmp_path


def test_captions_of_other_systems_are_read_and_said(folder):
    (folder / "cats" / "0.txt").write_bytes("château\n".encode("latin-1"))
    (folder / "dogs" / "2.txt").write_bytes("naïf".encode("utf-16"))
    with (
        pytest.warns(GuessedEncoding, match=r"0\.txt is not UTF-8; it was read as windows-1252"),
        pytest.warns(GuessedEncoding, match=r"2\.txt is not UTF-8; it was read as utf-16-le"),
    ):
        captions = images.load(folder).captions
    assert (captions[0], captions[5]) == ("château", "naïf")


def test_a_folder_gives_levels_labels_and_captions(folder):
    found = images.load(folder)
    assert found.class_names == ("cats", "dogs")
    assert found.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert found.captions[4] == "dogs № 1"
    pixels = np.asarray(Image.open(folder / "dogs" / "1.png"))
    assert np.array_equal(found.images[4].permute(1, 2, 0).numpy(), pixels)
    assert torch.equal(images.to_levels(found.x), found.images)


def test_a_folder_without_classes_has_no_labels(folder):
    found = images.load(folder / "cats", channels=1)
    assert found.labels is None
    assert found.class_names == ()
    assert found.shape == (1, 12, 12)
    gray = np.asarray(Image.open(folder / "cats" / "0.png").convert("L")).astype(int)
    assert np.abs(found.images[0, 0].numpy().astype(int) - gray).max() <= 1


def test_limits_are_spread_over_the_whole(folder):
    assert images.load(folder, limit=2).labels.tolist() == [0, 1]


def test_a_damaged_file_is_named_and_skipped_only_if_asked(folder):
    bad = folder / "cats" / "1.png"
    bad.write_bytes(bad.read_bytes()[:60])
    with pytest.raises(InvalidImage, match=r"1\.png") as caught:
        images.load(folder)
    assert caught.value.path == str(bad)
    found = images.load(folder, skip_bad=True)
    assert len(found) == 5
    assert found.skipped == (str(bad),)
    (folder / "cats" / "2.png").write_bytes(b"")
    with pytest.raises(InvalidImage, match="no image that can be read"):
        images.read_image(folder / "cats" / "2.png")
    with pytest.raises(InvalidImage, match="no such file"):
        images.read_image(folder / "none.png")


def test_other_sizes_are_refused_or_resized(folder):
    Image.new("RGB", (20, 10), (255, 0, 0)).save(folder / "dogs" / "9.png")
    with pytest.raises(InvalidImage, match=r"9\.png: \(3, 10, 20\).*\(3, 12, 12\)"):
        images.load(folder)
    found = images.load(folder, size=6)
    assert found.shape == (3, 6, 6)
    assert found.images[-1].flatten(1).float().mean(1).tolist() == [255, 0, 0]


def test_a_picture_that_would_fill_the_memory_is_not_decoded(tmp_path, monkeypatch):
    Image.new("L", (64, 64)).save(tmp_path / "large.png")
    monkeypatch.setattr(images, "MOST_PIXELS", 1000)
    with pytest.raises(InvalidImage, match="64 by 64 pixels"):
        images.open_image(tmp_path / "large.png", max_pixels=1000)


def test_transparency_lies_over_white_and_pictures_stand_upright(tmp_path):
    Image.new("RGBA", (4, 4), (255, 0, 0, 0)).save(tmp_path / "clear.png")
    assert images.read_image(tmp_path / "clear.png").unique().tolist() == [255]
    turned = Image.fromarray(np.arange(6, dtype=np.uint8).reshape(2, 3) * 40)
    exif = Image.Exif()
    exif[0x0112] = 6
    turned.save(tmp_path / "turned.png", exif=exif)
    assert images.read_image(tmp_path / "turned.png", channels=1).shape == (1, 3, 2)


def test_arrays(tmp_path):
    levels = np.random.default_rng(0).integers(0, 256, (5, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "set.npz", images=levels, labels=[0, 2, 1, 0, 2], classes=["a", "b", "c"])
    found = images.load(tmp_path / "set.npz")
    assert np.array_equal(found.images[:, 0].numpy(), levels)
    assert found.class_names == ("a", "b", "c")
    np.savez(tmp_path / "floats.npz", images=levels / 255)
    with pytest.raises(InvalidInput, match="wanted 'images', 8-bit"):
        images.load(tmp_path / "floats.npz")
    (tmp_path / "text.npz").write_text("no archive")
    with pytest.raises(InvalidInput, match=r"not a \.npz file"):
        images.load(tmp_path / "text.npz")


def test_nothing_to_read(tmp_path, monkeypatch):
    with pytest.raises(InvalidInput, match="holds no images"):
        images.load(tmp_path)
    with pytest.raises(InvalidInput, match="no file, folder or catalog name"):
        images.load(tmp_path / "none")
    monkeypatch.setattr(store, "find", lambda name: None)
    with pytest.raises(AssetError, match="pippin pull cifar-10"):
        images.load("cifar-10")
    with pytest.raises(InvalidArgument, match="split must be 'train' or 'test'"):
        images.load(tmp_path, split="validation")
    with pytest.raises(InvalidArgument, match="limit"):
        images.load(tmp_path, limit=0)


def test_sets_that_contradict_themselves():
    levels = torch.zeros(2, 1, 4, 4, dtype=torch.uint8)
    with pytest.raises(InvalidInput, match="8-bit levels"):
        ImageSet(levels[:0])
    with pytest.raises(InvalidInput, match="3 labels for 2 images"):
        ImageSet(levels, torch.tensor([0, 1, 1]), ("a", "b"))
    with pytest.raises(InvalidInput, match="labels from 0 to 2 for 2 classes"):
        ImageSet(levels, torch.tensor([0, 2]), ("a", "b"))
    with pytest.raises(InvalidArgument, match="channels must be 1 or 3, got 2"):
        ImageSet(levels).resized(4, channels=2)


def test_fashion_mnist_as_published():
    pulled("fashion-mnist")
    train, test = images.load("fashion-mnist"), images.load("fashion-mnist", split="test")
    assert (len(train), len(test), train.shape) == (60_000, 10_000, (1, 28, 28))
    assert train.labels.bincount().tolist() == [6000] * 10
    assert abs(float(train.images.float().mean()) / 255 - 0.2860) < 1e-4


def test_cifar_as_published():
    pulled("cifar-10")
    test = images.load("cifar-10", split="test")
    assert test.labels.bincount().tolist() == [1000] * 10
    assert test.class_names[int(test.labels[0])] == "cat"
    means = test.images.flatten(2).float().mean((0, 2)) / 255
    assert torch.allclose(means, torch.tensor([0.4942, 0.4851, 0.4504]), atol=1e-4)


def test_damaged_sets_of_the_catalog(tmp_path):
    header = struct.pack(">4I", 2051, 2, 4, 4)
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(header + bytes(31)))
    with pytest.raises(CorruptedFile, match="not an idx file"):
        images.load(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    for name in ("test_batch.png",):
        Image.fromarray(np.zeros((2, 3072), np.uint8)).save(other / name)
    with pytest.raises(CorruptedFile, match="no labels of test"):
        images.load(other, split="test")
    (other / "test_labels.json").write_text(json.dumps([1, 2]))
    assert images.load(other, split="test").labels.tolist() == [1, 2]


# --- writing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".png", ".webp", ".jpg"])
def test_pictures_come_back(tmp_path, suffix):
    ramp = torch.linspace(-1, 1, 16).expand(3, 16, 16)
    path = tmp_path / f"ramp{suffix}"
    image_files.write_image(path, ramp, text={"seed": "7", "prompt": "ein Würfel"})
    back = images.read_image(path)
    assert (back.int() - images.to_levels(ramp).int()).abs().max() <= (0 if suffix != ".jpg" else 12)
    said = {"seed": "7", "prompt": "ein Würfel"}
    assert image_files.read_text(path) == said
    if suffix == ".png":
        with Image.open(path) as file:
            assert file.text == said


def test_a_picture_of_another_program_says_nothing(tmp_path):
    exif = Image.Exif()
    exif[0x9286] = b"UNICODE\x00\x00x"
    Image.new("L", (4, 4)).save(tmp_path / "a.jpg", exif=exif)
    assert image_files.read_text(tmp_path / "a.jpg") == {}


@pytest.mark.parametrize("suffix", [".gif", ".webp", ".png", ".mp4"])
def test_clips_come_back(tmp_path, suffix):
    frames = torch.stack([torch.full((1, 15, 16), level) for level in (-1.0, 0.0, 1.0)])
    path = tmp_path / f"clip{suffix}"
    image_files.write_video(path, frames, fps=5, zoom=2)
    if suffix == ".mp4":
        import av

        with av.open(str(path)) as file:
            found = [frame.to_ndarray(format="gray") for frame in file.decode(video=0)]
            assert float(file.streams.video[0].average_rate) == 5
    else:
        with Image.open(path) as file:
            assert file.n_frames == 3
            found = []
            for i in range(3):
                file.seek(i)
                found.append(np.asarray(file.convert("L")))
    assert np.allclose([frame.mean() for frame in found], [0, 128, 255], atol=6)
    assert found[0].shape == (30, 32)


def test_what_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(InvalidArgument, match="images are written as"):
        image_files.write_image(tmp_path / "a.bmp", torch.zeros(1, 4, 4))
    with pytest.raises(InvalidArgument, match="1 or 3 channels"):
        image_files.write_image(tmp_path / "a.png", torch.zeros(2, 4, 4))
    for path, frames in (("a.avi", 2), ("a.gif", 0)):
        with pytest.raises(InvalidArgument, match="videos are"):
            image_files.write_video(tmp_path / path, torch.zeros(frames, 1, 4, 4))
    with pytest.raises(InvalidArgument, match="fps must be above 0 and at most 240, got 0"):
        image_files.write_video(tmp_path / "a.gif", torch.zeros(2, 1, 4, 4), fps=0)
    assert list(tmp_path.iterdir()) == []


def test_a_sheet_has_every_picture_in_its_place():
    samples = torch.arange(6.0).view(6, 1, 1, 1).expand(6, 1, 2, 2) / 10
    sheet = image_files.image_grid(samples, columns=3, gap=1)
    assert sheet.shape == (1, 5, 8)
    assert sheet[0, ::3, ::3].flatten().tolist() == pytest.approx([0, 0.1, 0.2, 0.3, 0.4, 0.5])
    assert sheet[0, 2].tolist() == [1.0] * 8
    assert image_files.image_grid(samples, columns=3, zoom=2).shape == (1, 10, 16)


def test_mnist_as_published():
    pulled("mnist")
    train, test = images.load("mnist"), images.load("mnist", split="test")
    assert (len(train), len(test), train.shape) == (60_000, 10_000, (1, 28, 28))
    assert train.labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert torch.bincount(test.labels).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
