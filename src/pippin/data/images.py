"""Sets of pictures: from the catalogue, from folders, from arrays; and samples written as pictures and clips.

Notable here:
- a set is 8-bit levels and labels in memory, batches are views of it: nothing is decoded twice
- a file that cannot be read stops the reading by its name, unless skipping was asked for; then it is counted and named
- whatever is written goes to a temporary name first
"""

from __future__ import annotations

import gzip
import json
import struct
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from pippin.core import progress, store
from pippin.core.errors import AssetError, CorruptedFile, InvalidArgument, InvalidImage, InvalidInput, MissingDependency

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

FASHION: Final = (
    "t-shirt", "trousers", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot",
)  # fmt: skip
DIGITS: Final = tuple("0123456789")
CIFAR: Final = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SUFFIXES: Final = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
"""Of files that are taken for pictures."""
MOST_PIXELS: Final = 100_000_000
"""A picture that would be larger once decoded is refused."""


@dataclass(frozen=True)
class ImageSet:
    """Pictures of one size, with labels where they have some.

    Attributes:
        images: 8-bit levels.
        labels: the class of each; None where nothing is known.
        classes: names of the classes.
        captions: what each shows in words; None where nobody said.
        name: for reports.
        skipped: files that could not be read.
    """

    images: UInt8[Tensor, "n channels height width"]
    labels: Int[Tensor, n] | None = None
    classes: tuple[str, ...] = ()
    captions: tuple[str, ...] | None = None
    name: str = "pictures"
    skipped: tuple[str, ...] = field(default_factory=tuple)

    def __post_init__(self) -> None:
        if self.images.dtype != torch.uint8 or self.images.ndim != 4 or not len(self.images):
            raise InvalidInput(
                f"a set of pictures is 8-bit levels (n, channels, height, width), got {self.images.dtype} of shape "
                f"{tuple(self.images.shape)}"
            )
        for what, part in (("labels", self.labels), ("captions", self.captions)):
            if part is not None and len(part) != len(self.images):
                raise InvalidInput(f"{len(part)} {what} for {len(self.images)} pictures")
        if self.labels is not None and not 0 <= int(self.labels.min()) <= int(self.labels.max()) < len(self.classes):
            raise InvalidInput(
                f"labels from {int(self.labels.min())} to {int(self.labels.max())} for {len(self.classes)} classes"
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
        """The pictures from -1 to 1."""
        return to_samples(self.images)

    def rows(self, index: slice | Int[Tensor, chosen]) -> ImageSet:
        """Some of the pictures."""
        captions = None
        if self.captions is not None:
            places = range(len(self))[index] if isinstance(index, slice) else index.tolist()
            captions = tuple(self.captions[i] for i in places)
        labels = None if self.labels is None else self.labels[index]
        return replace(self, images=self.images[index], labels=labels, captions=captions)

    def resized(self, size: int, *, channels: int | None = None) -> ImageSet:
        """Pictures of ``size`` by ``size``, antialiased; grey ones made of colour or shown in it.

        Raises:
            InvalidArgument: a size below 1, or channels other than 1 and 3.
        """
        if size < 1 or channels not in (None, 1, 3):
            raise InvalidArgument(f"size {size}, channels {channels}: give a size of 1 or more, and 1 or 3 channels")
        images = self.images
        if channels is not None and channels != images.shape[1]:
            weights = torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)
            grey = (images.float() * weights).sum(1, keepdim=True).round().to(torch.uint8) if channels == 1 else images
            images = grey.expand(-1, channels, -1, -1)
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


def load(
    source: str | Path,
    *,
    split: str = "train",
    size: int | None = None,
    channels: int | None = None,
    limit: int | None = None,
    skip_bad: bool = False,
    show: bool = True,
) -> ImageSet:
    """Pictures of a catalogue name, a folder, or an `.npz` file.

    Args:
        source: "fashion-mnist", "mnist" or "cifar-10" (pulled before; nothing is fetched here), a folder of one of
            them, a folder of pictures (each folder in it one class, or all without labels; `NAME.txt` beside `NAME.png`
            is its caption), or a `.npz` with "images" (n, height, width) or (n, height, width, channels) and, if they
            have any, "labels" and "classes".
        split: "train" or "test", of the sets of the catalogue.
        size: pictures are cut to squares in their middle and resized; None leaves them, and wants all of one size.
        channels: 1 or 3; None leaves them as they are (pictures of a folder: 3).
        limit: at most so many, evenly from the whole; None for all.
        skip_bad: leave out files that cannot be read, instead of stopping at the first.
        show: whether a bar is drawn.

    Raises:
        AssetError: a set of the catalogue that is not here; the message says how to get it.
        InvalidImage: a file that is no picture, or of another size than the others; it is named.
        InvalidInput: no pictures, or arrays that are none.
        MissingDependency: Pillow is not installed.
    """
    name = str(source)
    if split not in ("train", "test"):
        raise InvalidArgument(f"split is {split!r}; choose train or test")
    for what, value in (("limit", limit), ("size", size)):
        if value is not None and value < 1:
            raise InvalidArgument(f"{what} is {value}; give 1 or more")
    if channels not in (None, 1, 3):
        raise InvalidArgument(f"channels is {channels}; give 1 (grey) or 3 (colour)")
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
        return _folder(folder, size, channels, limit, skip_bad, show)
    if limit is not None and limit < len(found):
        found = found.rows(torch.linspace(0, len(found) - 1, limit).long())
    if size is not None or channels is not None:
        height, width = found.shape[1:]
        if size is None and height != width:
            raise InvalidInput(f"{name}: pictures of {height} by {width}; give a size to cut them to squares")
        found = found.resized(size or height, channels=channels)
    return found


def _place(name: str) -> Path:
    """The folder of a catalogue name, or the path that was given."""
    from pippin.core import catalogue

    path = Path(name).expanduser()
    entry = catalogue.find(name)
    if entry is not None and not path.exists():
        found = store.find(name)
        if found is None:
            raise AssetError(f"{name} is not here: pippin pull {name}")
        return found
    if not path.exists():
        raise InvalidInput(f"no file, folder or catalogue name {name!r}; `pippin models` lists the names")
    return path


def _mnist(folder: Path, split: str, suffix: str, classes: tuple[str, ...]) -> ImageSet:
    prefix = "train" if split == "train" else "t10k"
    images = _idx(folder / f"{prefix}-images-idx3-ubyte{suffix}", 3)
    labels = _idx(folder / f"{prefix}-labels-idx1-ubyte{suffix}", 1)
    return ImageSet(images[:, None], labels.long(), classes, name="fashion-mnist" if suffix else "mnist")


def _idx(path: Path, axes: int) -> UInt8[Tensor, "*shape"]:
    """An array in the format of MNIST, packed or not."""
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
    parts = [np.asarray(open_picture(folder / name, most=None)).reshape(-1, 32, 32, 3) for name in files]
    images = torch.from_numpy(np.concatenate(parts)).permute(0, 3, 1, 2).contiguous()
    try:
        labels = torch.tensor(json.loads((folder / f"{split}_labels.json").read_text()))
    except (OSError, ValueError) as error:
        raise CorruptedFile(f"{folder}: no labels of {split}: {error}; pull cifar-10 again") from error
    return ImageSet(images, labels, CIFAR, name="cifar-10")


def _arrays(path: Path) -> ImageSet:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError) as error:
        # NumPy's own words are left out: they advise to unpickle the file
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
                f"{path}: labels are whole numbers from 0, one for each of {len(images)} pictures; it holds "
                f"{labels.dtype} of shape {labels.shape}"
                + (f" from {labels.min()}" if labels.dtype.kind in "iu" and labels.size else "")
            )
        labels = torch.from_numpy(labels.astype(np.int64))
        classes = classes or tuple(str(i) for i in range(int(labels.max()) + 1))
    return ImageSet(levels.contiguous(), labels, classes, name=path.stem)


def _folder(
    folder: Path, size: int | None, channels: int | None, limit: int | None, skip_bad: bool, show: bool
) -> ImageSet:
    if not folder.is_dir():
        raise InvalidInput(f"{folder} is no folder of pictures, and no .npz file")
    paths = sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
    if limit is not None and limit < len(paths):
        paths = [paths[int(i)] for i in np.linspace(0, len(paths) - 1, limit)]
    if not paths:
        raise InvalidInput(f"{folder} holds no pictures ({', '.join(sorted(SUFFIXES))})")
    images, kept, skipped = list[Tensor](), list[Path](), list[str]()
    with progress.bar(len(paths), "reading pictures", unit="pictures", show=show) as bar:
        for path in paths:
            try:
                image = read(path, size=size, channels=channels or 3)
                if images and image.shape != images[0].shape:
                    raise InvalidImage(
                        f"{path}: {tuple(image.shape)}, the pictures before it {tuple(images[0].shape)}; "
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
        raise InvalidInput(f"{folder}: none of {len(paths)} files could be read as a picture")
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
    return file.read_text("utf-8").strip() if file.is_file() else None


def read(path: str | Path, *, size: int | None = None, channels: int = 3) -> UInt8[Tensor, "channels height width"]:
    """One picture, turned upright as its metadata says; transparency is laid over white.

    Args:
        path: the file.
        size: cut to a square in the middle, and resized; None leaves it.
        channels: 1 or 3.

    Raises:
        InvalidImage: not there, no picture, damaged, or too large to decode; the file is named.
        MissingDependency: Pillow is not installed.
    """
    from PIL import ImageOps

    path = Path(path)
    try:
        picture = ImageOps.exif_transpose(open_picture(path)).convert("RGBA")
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


def open_picture(path: Path, *, most: int | None = MOST_PIXELS) -> Picture:
    """A picture as a Pillow image, its pixels decoded.

    Args:
        path: the file.
        most: pixels; None for any number.

    Raises:
        InvalidImage: not there, no picture, damaged, or too large; the file is named.
        MissingDependency: Pillow is not installed.
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise MissingDependency("pictures need Pillow: pip install 'pippin[image]'") from error
    if not path.is_file():
        raise InvalidImage(f"{path}: there is no such file", path=str(path))
    before, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None  # judged here, before anything is decoded
    try:
        with path.open("rb") as file:
            picture = Image.open(file)
            if most is not None and picture.width * picture.height > most:
                raise InvalidImage(
                    f"{path}: {picture.width} by {picture.height} pixels are more than {most}; make it smaller first",
                    path=str(path),
                )
            picture.load()
            return picture
    except InvalidImage:
        raise
    except UnidentifiedImageError as error:
        raise InvalidImage(f"{path}: no picture that can be read: of no known format", path=str(path)) from error
    except (OSError, ValueError, SyntaxError) as error:
        raise InvalidImage(f"{path}: no picture that can be read: {error}", path=str(path)) from error
    finally:
        Image.MAX_IMAGE_PIXELS = before


def _resize(images: UInt8[Tensor, "n channels h w"], size: int) -> UInt8[Tensor, "n channels size size"]:
    levels = images.float()
    out = torch.nn.functional.interpolate(levels, (size, size), mode="bilinear", antialias=True, align_corners=False)
    return out.round().clamp(0, 255).to(torch.uint8)
