"""Image data sets: from the catalog, from folders, from arrays.

Notable here:
- a data set is 8-bit levels and labels in memory, batches are views of it: nothing is decoded twice
- an unreadable file stops the loading with its name, unless ``skip_bad`` is set; then it is counted and named
- whatever is written goes to a temporary name first
"""

from __future__ import annotations

import gzip
import json
import lzma
import struct
import tokenize
import zipfile
import zlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from pippin.core import progress
from pippin.core.checks import PositiveInt, checked
from pippin.core.errors import AssetError, CorruptedFile, InvalidImage, InvalidInput, MissingDependency
from pippin.core.store import store
from pippin.core.text_files import read_text

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

FASHION: Final = (
    "t-shirt", "trousers", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot",
)  # fmt: skip
DIGITS: Final = tuple("0123456789")
CIFAR: Final = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SUFFIXES: Final = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
"""Suffixes of image files."""
MOST_PIXELS: Final = 100_000_000
"""Maximum number of pixels of an image after decoding."""
_ZIP_ERRORS: Final = (zipfile.BadZipFile, zlib.error, struct.error, lzma.LZMAError)
# NumPy reads the header of an array with Python's own tokenizer
_HEADER_ERRORS: Final = (tokenize.TokenError, SyntaxError)


@dataclass(frozen=True)
class ImageSet:
    """Images of one size, with labels where they have some.

    Attributes:
        images: 8-bit levels.
        labels: the class of each; None if unknown.
        class_names: names of the classes.
        captions: a description of each; None if there are none.
        name: for reports.
        skipped: files that could not be read.
    """

    images: UInt8[Tensor, "n channels height width"]
    labels: Int[Tensor, n] | None = None
    class_names: tuple[str, ...] = ()
    captions: tuple[str, ...] | None = None
    name: str = "pictures"
    skipped: tuple[str, ...] = field(default_factory=tuple)

    def __post_init__(self) -> None:
        if self.images.dtype != torch.uint8 or self.images.ndim != 4 or not len(self.images):
            raise InvalidInput(
                f"a set of images is 8-bit levels (n, channels, height, width), got {self.images.dtype} of shape "
                f"{tuple(self.images.shape)}"
            )
        for what, part in (("labels", self.labels), ("captions", self.captions)):
            if part is not None and len(part) != len(self.images):
                raise InvalidInput(f"{len(part)} {what} for {len(self.images)} images")
        if self.labels is not None and not 0 <= int(self.labels.min()) <= int(self.labels.max()) < len(
            self.class_names
        ):
            raise InvalidInput(
                f"labels from {int(self.labels.min())} to {int(self.labels.max())} for {len(self.class_names)} classes"
            )

    def __len__(self) -> int:
        return len(self.images)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of each."""
        channels, height, width = self.images.shape[1:]
        return channels, height, width

    @property
    def x(self) -> Float[Tensor, "n channels height width"]:
        """The images as numbers from -1 to 1."""
        return to_samples(self.images)

    def select(self, index: slice | Int[Tensor, chosen]) -> ImageSet:
        """A subset of the images."""
        captions = None
        if self.captions is not None:
            places = range(len(self))[index] if isinstance(index, slice) else index.tolist()
            captions = tuple(self.captions[i] for i in places)
        labels = None if self.labels is None else self.labels[index]
        return replace(self, images=self.images[index], labels=labels, captions=captions)

    @checked
    def resized(self, size: PositiveInt, *, channels: Literal[1, 3] | None = None) -> ImageSet:
        """Images of ``size`` by ``size``, antialiased; converted between gray and color."""
        images = self.images
        if channels is not None and channels != images.shape[1]:
            weights = torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)
            gray = (images.float() * weights).sum(1, keepdim=True).round().to(torch.uint8) if channels == 1 else images
            images = gray.expand(-1, channels, -1, -1)
        if images.shape[2:] != (size, size):
            parts = images.split(2048)
            images = torch.cat([_resize(part, size) for part in parts])
        return replace(self, images=images)


def to_samples(levels: UInt8[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Levels 0 to 255 as numbers from -1 to 1."""
    return levels.float() / 127.5 - 1


def to_levels(samples: Float[Tensor, "*shape"]) -> UInt8[Tensor, "*shape"]:
    """Numbers from -1 to 1 (others are clipped) as levels 0 to 255.

    >>> to_levels(torch.tensor([-1.0, 0.0, 2.0])).tolist()
    [0, 128, 255]
    """
    return ((samples.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)


# --- reading ----------------------------------------------------------------------------------------------------------


@checked
def load(
    source: str | Path,
    *,
    split: Literal["train", "test"] = "train",
    size: PositiveInt | None = None,
    channels: Literal[1, 3] | None = None,
    limit: PositiveInt | None = None,
    skip_bad: bool = False,
    show_progress: bool = True,
) -> ImageSet:
    """Images of a catalog name, a folder, or an `.npz` file.

    Args:
        source: "fashion-mnist", "mnist" or "cifar-10" (downloaded before with `pippin pull`), a folder of one of them,
            a folder of images (one class per subfolder, or all without labels; `NAME.txt` beside `NAME.png` is its
            caption), or a `.npz` with "images" (n, height, width) or (n, height, width, channels) and optionally
            "labels" and "classes".
        split: "train" or "test", for the data sets of the catalog.
        size: images are center-cropped to squares and resized; None leaves them, and requires equal sizes.
        channels: 1 or 3; None leaves them unchanged (images of a folder: 3).
        limit: maximum number, evenly spaced over all; None for all.
        skip_bad: skip unreadable files, instead of stopping at the first.
        show_progress: whether to show a progress bar.

    Raises:
        AssetError: a data set of the catalog that is not downloaded; the message says how to get it.
        InvalidImage: a file that is not an image, or has another size than the others; it is named.
        InvalidInput: no images, or invalid arrays.
        MissingDependency: Pillow is not installed.
    """
    name = str(source)
    folder = _place(name)
    if (folder / "train-images-idx3-ubyte.gz").is_file():
        found = _mnist(folder, split, ".gz", FASHION)
    elif (folder / "train-images-idx3-ubyte").is_file():
        found = _mnist(folder, split, "", DIGITS)
    elif (folder / "test_batch.png").is_file():
        found = _cifar(folder, split)
    elif folder.suffix == ".npz":
        found = _arrays(folder)
    else:
        return _folder(folder, size, channels, limit, skip_bad, show_progress)
    if limit is not None and limit < len(found):
        found = found.select(torch.linspace(0, len(found) - 1, limit).long())
    if size is not None or channels is not None:
        height, width = found.shape[1:]
        if size is None and height != width:
            raise InvalidInput(f"{name}: images of {height} by {width}; give a size to cut them to squares")
        found = found.resized(size or height, channels=channels)
    return found


def _place(name: str) -> Path:
    """The folder of a catalog name, or the given path."""
    from pippin.core.store import catalog

    path = Path(name).expanduser()
    entry = catalog.find(name)
    if entry is not None and not path.exists():
        found = store.find(name)
        if found is None:
            raise AssetError(f"{name} is not here: pippin pull {name}")
        return found
    if not path.exists():
        raise InvalidInput(f"no file, folder or catalog name {name!r}; `pippin models` lists the names")
    return path


def _mnist(folder: Path, split: str, suffix: str, classes: tuple[str, ...]) -> ImageSet:
    prefix = "train" if split == "train" else "t10k"
    images = _idx(folder / f"{prefix}-images-idx3-ubyte{suffix}", 3)
    labels = _idx(folder / f"{prefix}-labels-idx1-ubyte{suffix}", 1)
    return ImageSet(images[:, None], labels.long(), classes, name="fashion-mnist" if suffix else "mnist")


def _idx(path: Path, axes: int) -> UInt8[Tensor, "*shape"]:
    """An array in the format of MNIST, compressed or not."""
    try:
        raw = path.read_bytes()
        raw = gzip.decompress(raw) if path.suffix == ".gz" else raw
        shape = struct.unpack(f">{axes}I", raw[4 : 4 + 4 * axes])
        values = np.frombuffer(raw, np.uint8, offset=4 + 4 * axes).reshape(shape)
    except (OSError, EOFError, struct.error, ValueError) as error:
        raise CorruptedFile(f"{path}: not an idx file of {axes} axes: {error}; pull it again") from error
    return torch.from_numpy(values.copy())


def _cifar(folder: Path, split: str) -> ImageSet:
    files = [f"data_batch_{i}.png" for i in range(1, 6)] if split == "train" else ["test_batch.png"]
    parts = [np.asarray(open_image(folder / name, max_pixels=None)).reshape(-1, 32, 32, 3) for name in files]
    images = torch.from_numpy(np.concatenate(parts)).permute(0, 3, 1, 2).contiguous()
    try:
        labels = torch.tensor(json.loads((folder / f"{split}_labels.json").read_text()))
    except (OSError, ValueError) as error:
        raise CorruptedFile(f"{folder}: no labels of {split}: {error}; pull cifar-10 again") from error
    return ImageSet(images, labels, CIFAR, name="cifar-10")


def _arrays(path: Path) -> ImageSet:
    try:
        with np.load(path, allow_pickle=False) as file:
            # an entry that is no array comes as bytes
            arrays: dict[str, Any] = {name: found for name in file.files if isinstance(found := file[name], np.ndarray)}
    except (OSError, ValueError, EOFError, KeyError, RuntimeError, MemoryError, *_ZIP_ERRORS, *_HEADER_ERRORS) as error:
        # NumPy's own message is left out: it advises to unpickle the file
        raise InvalidInput(f"{path}: not a .npz file of plain arrays (damaged, or with Python objects)") from error
    images = arrays.get("images")
    flat = images is not None and (images.ndim == 3 or (images.ndim == 4 and images.shape[3] in (1, 3)))
    if images is None or images.dtype != np.uint8 or not flat or not len(images):
        raise InvalidInput(
            f"{path}: wanted 'images', 8-bit, (n, height, width) or (n, height, width, 1 or 3 channels); it holds "
            f"{ {name: (str(array.dtype), array.shape) for name, array in arrays.items()} }"
        )
    levels = torch.from_numpy(images)[:, None] if images.ndim == 3 else torch.from_numpy(images).permute(0, 3, 1, 2)
    labels = arrays.get("labels")
    classes = tuple(map(str, arrays["classes"])) if "classes" in arrays else ()
    if labels is not None:
        if labels.dtype.kind not in "iu" or labels.shape != (len(images),) or int(labels.min()) < 0:
            raise InvalidInput(
                f"{path}: labels are whole numbers from 0, one for each of {len(images)} images; it holds "
                f"{labels.dtype} of shape {labels.shape}"
                + (f" from {labels.min()}" if labels.dtype.kind in "iu" and labels.size else "")
            )
        classes = classes or tuple(str(i) for i in range(int(labels.max()) + 1))
    indices = None if labels is None else torch.from_numpy(labels.astype(np.int64))
    return ImageSet(levels.contiguous(), indices, classes, name=path.stem)


def _folder(
    folder: Path, size: int | None, channels: int | None, limit: int | None, skip_bad: bool, show: bool
) -> ImageSet:
    if not folder.is_dir():
        raise InvalidInput(f"{folder} is no folder of images, and no .npz file")
    paths = sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
    if limit is not None and limit < len(paths):
        paths = [paths[int(i)] for i in np.linspace(0, len(paths) - 1, limit)]
    if not paths:
        raise InvalidInput(f"{folder} holds no images ({', '.join(sorted(SUFFIXES))})")
    images, kept, skipped = list[Tensor](), list[Path](), list[str]()
    with progress.bar(len(paths), "reading images", unit="pictures", show_progress=show) as bar:
        for path in paths:
            try:
                image = read_image(path, size=size, channels=channels or 3)
                if images and image.shape != images[0].shape:
                    raise InvalidImage(
                        f"{path}: {tuple(image.shape)}, the images before it {tuple(images[0].shape)}; "
                        "give a size to resize all to",
                        path=str(path),
                    )
                images.append(image)
                kept.append(path)
            except InvalidImage:
                if not skip_bad:
                    raise
                skipped.append(str(path))
            bar.advance(1)
    if not images:
        raise InvalidInput(f"{folder}: none of {len(paths)} files could be read as an image")
    parents = [path.parent.relative_to(folder).as_posix() for path in kept]
    classes = tuple(sorted(set(parents)))
    labels = torch.tensor([classes.index(parent) for parent in parents]) if classes != (".",) else None
    captions = [_caption(path) for path in kept]
    return ImageSet(
        torch.stack(images),
        labels,
        classes if labels is not None else (),
        None if any(text is None for text in captions) else tuple(map(str, captions)),
        name=folder.name,
        skipped=tuple(skipped),
    )


def _caption(path: Path) -> str | None:
    file = path.with_suffix(".txt")
    return read_text(file).strip() if file.is_file() else None


def read_image(
    path: str | Path, *, size: int | None = None, channels: int = 3
) -> UInt8[Tensor, "channels height width"]:
    """One image, rotated upright as its metadata say; transparency is blended with white.

    Args:
        path: the file.
        size: center-cropped to a square, and resized; None leaves it.
        channels: 1 or 3.

    Raises:
        InvalidImage: missing, not an image, damaged, or too large to decode; the file is named.
        MissingDependency: Pillow is not installed.
    """
    from PIL import ImageOps

    path = Path(path)
    try:
        picture = ImageOps.exif_transpose(open_image(path)).convert("RGBA")
    except InvalidImage:
        raise
    except (OSError, ValueError, SyntaxError) as error:
        raise InvalidImage(f"{path}: damaged: {error}", path=str(path)) from error
    levels = np.asarray(picture).astype(np.float32)
    flat = levels[..., :3] * (levels[..., 3:] / 255) + 255 - levels[..., 3:]
    image = torch.from_numpy(flat.round().astype(np.uint8)).permute(2, 0, 1)
    if size is not None:
        side = min(image.shape[1:])
        top, left = ((extent - side) // 2 for extent in image.shape[1:])
        image = _resize(image[None, :, top : top + side, left : left + side], size)[0]
    if channels == 1:
        image = (image.float() * torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1)).sum(0, keepdim=True)
        image = image.round().to(torch.uint8)
    return image.contiguous()


def open_image(path: Path, *, max_pixels: int | None = MOST_PIXELS) -> Picture:
    """An image as a Pillow image, with decoded pixels.

    Args:
        path: the file.
        max_pixels: maximum number of pixels; None for no limit.

    Raises:
        InvalidImage: missing, not an image, damaged, or too large; the file is named.
        MissingDependency: Pillow is not installed.
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise MissingDependency("images need Pillow: pip install 'pippin[image]'") from error
    if not path.is_file():
        raise InvalidImage(f"{path}: there is no such file", path=str(path))
    before, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None  # checked here, before anything is decoded
    try:
        with path.open("rb") as file:
            picture = Image.open(file)
            if max_pixels is not None and picture.width * picture.height > max_pixels:
                raise InvalidImage(
                    f"{path}: {picture.width} by {picture.height} pixels are more than {max_pixels}; make it smaller "
                    "first",
                    path=str(path),
                )
            picture.load()
            return picture
    except InvalidImage:
        raise
    except UnidentifiedImageError as error:
        raise InvalidImage(f"{path}: no image that can be read: of no known format", path=str(path)) from error
    except (OSError, ValueError, SyntaxError) as error:
        raise InvalidImage(f"{path}: no image that can be read: {error}", path=str(path)) from error
    finally:
        Image.MAX_IMAGE_PIXELS = before


def _resize(images: UInt8[Tensor, "n channels h w"], size: int) -> UInt8[Tensor, "n channels size size"]:
    levels = images.float()
    out = torch.nn.functional.interpolate(levels, (size, size), mode="bilinear", antialias=True, align_corners=False)
    return out.round().clamp(0, 255).to(torch.uint8)
