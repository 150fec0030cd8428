"""What a picture is asked to show or to begin from: words, a class, another picture, a drawing, a mask.

Notable here:
- a string is always words, never a path: pictures come as `ImageRef`, so that no text can name a file
- drawings are strokes in a unit square, drawn here at any size without another library
- a long text becomes a few phrases by rule, ranked by an encoder where there is one; the caller sees and may edit them
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from pippin.core.errors import InvalidArgument, InvalidImage, InvalidInput, UnsupportedInputImage
from pippin.data import images
from pippin.kits.image.text import TextEncoder
from pippin.kits.text.words import FUNCTION_WORDS

PictureSource: TypeAlias = str | Path | Tensor | Any
"""A file, a tensor (channels, height, width) of 8-bit levels or from -1 to 1, a NumPy array, or a Pillow image."""
_GREY = (0.299, 0.587, 0.114)
_PHRASE = re.compile(r"[^\W_][\w'’-]*")
_BREAK = re.compile(r"[.,;:!?()\[\]\"“”\n]+|\s[-–—]\s")


@dataclass(frozen=True)
class Text:
    """Words that the picture is to show."""

    text: str


@dataclass(frozen=True)
class ExtractedText:
    """A long text (a note, a chapter) of which the picture shows the most telling phrases.

    Attributes:
        text: the whole.
        title: phrases that share words with it come first.
        most: phrases at most.
    """

    text: str
    title: str = ""
    most: int = 3


@dataclass(frozen=True)
class Label:
    """A class of the model, by its name or its number."""

    name: str | int


@dataclass(frozen=True)
class ImageRef:
    """A picture to begin from."""

    image: PictureSource


@dataclass(frozen=True)
class Drawing:
    """Strokes to begin from.

    Attributes:
        strokes: each a line through points (across, down) in a unit square, from the top left; of one point, a dot.
        width: of the lines, in widths of the picture.
        ink: level of the lines, -1 to 1.
        ground: level of what is not drawn on.

    >>> Drawing([[(0.0, 0.5), (1.0, 0.5)]], width=0.5).raster((3, 4, 4))[0, :, 0].tolist()
    [-1.0, 1.0, 1.0, -1.0]
    """

    strokes: Sequence[Sequence[tuple[float, float]]]
    width: float = 0.08
    ink: float = 1.0
    ground: float = -1.0

    def __post_init__(self) -> None:
        points = [point for stroke in self.strokes for point in stroke]
        if not points or any(not (0 <= value <= 1) for point in points for value in point):
            raise InvalidArgument("a drawing has at least one point, and its points lie in 0 to 1")
        if not 0 < self.width <= 1:
            raise InvalidArgument(f"a drawing's width is {self.width}; give a share of the picture, 0 to 1")

    def raster(self, shape: Sequence[int]) -> Float[Tensor, "channels height width"]:
        """The drawing as a picture of this shape; edges are one pixel soft."""
        channels, height, width = shape[-3:]
        rows, columns = torch.meshgrid(torch.arange(height) + 0.5, torch.arange(width) + 0.5, indexing="ij")
        away = torch.full((height, width), float("inf"))
        for stroke in self.strokes:
            ends = [(x * width, y * height) for x, y in stroke]
            for (x0, y0), (x1, y1) in zip(ends, ends[1:] or ends, strict=False):
                dx, dy = x1 - x0, y1 - y0
                along = ((columns - x0) * dx + (rows - y0) * dy) / max(dx * dx + dy * dy, 1e-12)
                along = along.clamp(0, 1)
                away = torch.minimum(away, torch.hypot(columns - x0 - along * dx, rows - y0 - along * dy))
        cover = (self.width * width / 2 - away + 0.5).clamp(0, 1)
        return (self.ground + (self.ink - self.ground) * cover).expand(channels, -1, -1).clone()


@dataclass(frozen=True)
class Mask:
    """Where a picture is to be drawn anew: white, or True."""

    image: PictureSource

    def raster(self, shape: Sequence[int]) -> Bool[Tensor, "1 height width"]:
        """The mask at the size of a model's pictures.

        Raises:
            UnsupportedInputImage: no picture that can be read, or nothing in it is marked.
        """
        source = self.image
        if isinstance(source, Tensor | np.ndarray) and str(source.dtype).endswith("bool"):
            source = torch.as_tensor(source)
            source = (source if source.ndim == 3 else source[None]).float() * 2 - 1
        marked = read_picture(source, (1, *shape[-2:])) > 0
        if not bool(marked.any()):
            raise UnsupportedInputImage("the mask marks nothing; white (or True) says what is to be drawn anew")
        return marked


Concept: TypeAlias = str | Text | ExtractedText | Label | ImageRef | Drawing


def read_picture(source: PictureSource, shape: Sequence[int]) -> Float[Tensor, "channels height width"]:
    """A picture as a model of this shape sees it: cut in its middle to the model's proportions, resized, -1 to 1.

    Raises:
        UnsupportedInputImage: not there, no picture, damaged, or of a form that is none of `PictureSource`.
    """
    channels, height, width = shape[-3:]
    try:
        x = _pixels(source)
    except (InvalidImage, InvalidInput) as error:
        raise UnsupportedInputImage(str(error)) from error
    if x.shape[0] == 4:
        x = x[:3]
    if x.shape[0] != channels:
        weights = x.new_tensor(_GREY).view(3, 1, 1)
        x = (x * weights).sum(0, keepdim=True) if channels == 1 else x.expand(channels, -1, -1)
    rows, columns = x.shape[1:]
    if (rows, columns) == (height, width):
        return x
    scale = min(rows / height, columns / width)
    tall, wide = max(1, round(height * scale)), max(1, round(width * scale))
    top, left = (rows - tall) // 2, (columns - wide) // 2
    cut = x[None, :, top : top + tall, left : left + wide]
    return F.interpolate(cut, (height, width), mode="bilinear", antialias=True, align_corners=False)[0]


def _pixels(source: PictureSource) -> Float[Tensor, "channels height width"]:
    if isinstance(source, str | Path):
        return images.to_samples(images.read(source))
    if isinstance(source, Tensor):
        x = source
    elif isinstance(source, np.ndarray) or hasattr(source, "getbands"):
        array = np.asarray(source if isinstance(source, np.ndarray) else source.convert("RGB"))
        x = torch.from_numpy(array.copy())
        x = x.permute(2, 0, 1) if x.ndim == 3 else x
    else:
        raise InvalidInput(f"{type(source).__name__} is no picture: give a file, a tensor, an array or a Pillow image")
    x = x[None] if x.ndim == 2 else x
    if x.ndim != 3 or x.shape[0] not in (1, 3, 4) or not x.numel():
        raise InvalidInput(f"a picture is (channels, height, width) with 1, 3 or 4 channels, got {tuple(x.shape)}")
    if x.dtype == torch.uint8:
        return images.to_samples(x)
    if not x.is_floating_point() or not bool(x.isfinite().all()) or float(x.abs().max()) > 1.001:
        raise InvalidInput(f"a picture of type {x.dtype} is from -1 to 1, and finite; or give 8-bit levels")
    return x.detach().float().cpu()


def joined(phrases: Sequence[str]) -> str:
    """Several descriptions as one.

    >>> joined(["two white squares", "a disc", "a cat"])
    'two white squares, a disc and a cat'
    """
    *first, last = phrases
    return f"{', '.join(first)} and {last}" if first else last


def extract(text: str, *, title: str = "", most: int = 3, encoder: TextEncoder | None = None) -> list[str]:
    """The most telling phrases of a long text, in its order.

    Phrases are runs of words between marks and small words. They are ranked by how often their words occur, whether
    they are in the title and how early they come; with an encoder by how near they are to the whole, instead.

    Args:
        text: a note, a story, a message.
        title: words that count double.
        most: phrases at most.
        encoder: ranks by meaning.

    Raises:
        InvalidArgument: ``most`` below 1.
        InvalidInput: nothing in the text is a phrase.

    >>> extract("The red kite flew over the hills. A red kite! We had tea.", most=2)
    ['red kite flew', 'hills']
    """
    if most < 1:
        raise InvalidArgument(f"most is {most}; give at least 1")
    phrases = _phrases(text)
    if not phrases:
        raise InvalidInput(f"there is no phrase to draw in {text!r:.60}; write what the picture is to show")
    scores = _by_meaning(phrases, f"{title}. {text}", encoder) if encoder else _by_words(phrases, title)
    ranked = sorted(range(len(phrases)), key=lambda i: (-scores[i], i))
    chosen: list[int] = []
    for index in ranked:
        words = set(phrases[index].lower().split())
        said = {word for other in chosen for word in phrases[other].lower().split()}
        if len(words & said) * 2 <= len(words) and len(chosen) < most:
            chosen.append(index)
    return [phrases[index] for index in sorted(chosen)]


def _phrases(text: str) -> list[str]:
    found: dict[str, str] = {}
    for part in _BREAK.split(text):
        run: list[str] = []
        for word in [*_PHRASE.findall(part), "the"]:
            if word.lower() in FUNCTION_WORDS or len(run) == 4:
                if run and len("".join(run)) > 2:
                    found.setdefault(" ".join(run).lower(), " ".join(run))
                run = []
            if word.lower() not in FUNCTION_WORDS:
                run.append(word)
    return list(found.values())


def _by_words(phrases: Sequence[str], title: str) -> list[float]:
    counts = Counter(word for phrase in phrases for word in phrase.lower().split())
    named = set(title.lower().split())

    def score(index: int) -> float:
        words = phrases[index].lower().split()
        told = sum(counts[word] + 2.0 * (word in named) for word in words)
        return float(told / math.sqrt(len(words))) * (1.5 - 0.5 * index / len(phrases))

    return [score(index) for index in range(len(phrases))]


def _by_meaning(phrases: Sequence[str], whole: str, encoder: TextEncoder) -> list[float]:
    vectors = encoder.encoder.embed([whole, *phrases], truncate=True)
    return [float(score) for score in vectors[1:] @ vectors[0]]
