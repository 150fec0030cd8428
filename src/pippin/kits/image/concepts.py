"""Inputs of image generation: descriptions, classes, images, drawings, masks.

Notable here:
- a string is always a description, never a path: images are passed as `ImageRef`, so that no text can name a file
- drawings are strokes in a unit square, rendered here at any size without another library
- a long text is reduced to a few phrases by rules, ranked by an encoder if there is one; the caller can edit them
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from annotated_types import Gt, Le
from jaxtyping import Bool, Float
from torch import Tensor

from pippin.core.checks import PositiveInt, checked
from pippin.core.errors import InvalidArgument, InvalidImage, InvalidInput, UnsupportedInputImage
from pippin.data import images
from pippin.kits.text.english_words import FUNCTION_WORDS
from pippin.recipes.prompt_encoder import PromptEncoder

ImageSource: TypeAlias = str | Path | Tensor | Any
"""A file, a tensor (channels, height, width) of 8-bit levels or from -1 to 1, a NumPy array, or a Pillow image."""
_GRAY = (0.299, 0.587, 0.114)
_PHRASE = re.compile(r"[^\W_][\w'’-]*")
_BREAK = re.compile(r"[.,;:!?()\[\]\"“”\n]+|\s[-–—]\s")


@dataclass(frozen=True)
class TextConcept:
    """A description of the image."""

    text: str


@checked
@dataclass(frozen=True)
class ExtractedText:
    """A long text (a note, a chapter) of which the image shows the most salient phrases.

    Attributes:
        text: the whole text.
        title: phrases that share words with it come first.
        max_concepts: maximum number of phrases.
    """

    text: str
    title: str = ""
    max_concepts: PositiveInt = 3


@dataclass(frozen=True)
class Label:
    """A class of the model, by its name or its number."""

    name: str | int


@dataclass(frozen=True)
class ImageRef:
    """An image to start from."""

    image: ImageSource


@checked
@dataclass(frozen=True)
class Drawing:
    """Strokes to start from.

    Attributes:
        strokes: each a line through points (across, down) in a unit square, from the top left; of one point, a dot.
        stroke_width: of the lines, in widths of the image.
        ink: level of the lines, -1 to 1.
        background: level outside the lines.

    >>> Drawing([[(0.0, 0.5), (1.0, 0.5)]], stroke_width=0.5).raster((3, 4, 4))[0, :, 0].tolist()
    [-1.0, 1.0, 1.0, -1.0]
    """

    strokes: Sequence[Sequence[tuple[float, float]]]
    stroke_width: Annotated[float, Gt(0), Le(1)] = 0.08
    ink: float = 1.0
    background: float = -1.0

    def __post_init__(self) -> None:
        points = [point for stroke in self.strokes for point in stroke]
        if not points or any(not (0 <= value <= 1) for point in points for value in point):
            raise InvalidArgument("a drawing has at least one point, and its points lie in 0 to 1")

    def raster(self, shape: Sequence[int]) -> Float[Tensor, "channels height width"]:
        """The drawing as an image of this shape; edges are one pixel soft."""
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
        cover = (self.stroke_width * width / 2 - away + 0.5).clamp(0, 1)
        return (self.background + (self.ink - self.background) * cover).expand(channels, -1, -1).clone()


@dataclass(frozen=True)
class Mask:
    """The region to generate again: white, or True."""

    image: ImageSource

    def raster(self, shape: Sequence[int]) -> Bool[Tensor, "1 height width"]:
        """The mask at the size of a model's images.

        Raises:
            UnsupportedInputImage: the image cannot be read, or no pixel is marked.
        """
        source = self.image
        if isinstance(source, Tensor | np.ndarray) and str(source.dtype).endswith("bool"):
            source = torch.as_tensor(source)
            source = (source if source.ndim == 3 else source[None]).float() * 2 - 1
        marked = read_image(source, (1, *shape[-2:])) > 0
        if not bool(marked.any()):
            raise UnsupportedInputImage("the mask marks nothing; white (or True) says what is to be drawn anew")
        return marked


Concept: TypeAlias = str | TextConcept | ExtractedText | Label | ImageRef | Drawing


def read_image(source: ImageSource, shape: Sequence[int]) -> Float[Tensor, "channels height width"]:
    """An image as input of a model of this shape: cropped to the model's aspect ratio, resized, -1 to 1.

    Raises:
        UnsupportedInputImage: missing, not an image, damaged, or of a type that is not an `ImageSource`.
    """
    channels, height, width = shape[-3:]
    try:
        x = _pixels(source)
    except (InvalidImage, InvalidInput) as error:
        raise UnsupportedInputImage(str(error)) from error
    if x.shape[0] == 4:
        x = x[:3]
    if x.shape[0] != channels:
        weights = x.new_tensor(_GRAY).view(3, 1, 1)
        x = (x * weights).sum(0, keepdim=True) if channels == 1 else x.expand(channels, -1, -1)
    rows, columns = x.shape[1:]
    if (rows, columns) == (height, width):
        return x
    scale = min(rows / height, columns / width)
    tall, wide = max(1, round(height * scale)), max(1, round(width * scale))
    top, left = (rows - tall) // 2, (columns - wide) // 2
    cut = x[None, :, top : top + tall, left : left + wide]
    return F.interpolate(cut, (height, width), mode="bilinear", antialias=True, align_corners=False)[0]


def _pixels(source: ImageSource) -> Float[Tensor, "channels height width"]:
    if isinstance(source, str | Path):
        return images.to_samples(images.read_image(source))
    if isinstance(source, Tensor):
        x = source
    elif isinstance(source, np.ndarray) or hasattr(source, "getbands"):
        array = np.asarray(source if isinstance(source, np.ndarray) else source.convert("RGB"))
        x = torch.from_numpy(array.copy())
        x = x.permute(2, 0, 1) if x.ndim == 3 else x
    else:
        raise InvalidInput(f"{type(source).__name__} is no image: give a file, a tensor, an array or a Pillow image")
    x = x[None] if x.ndim == 2 else x
    if x.ndim != 3 or x.shape[0] not in (1, 3, 4) or not x.numel():
        raise InvalidInput(f"an image is (channels, height, width) with 1, 3 or 4 channels, got {tuple(x.shape)}")
    if x.dtype == torch.uint8:
        return images.to_samples(x)
    if not x.is_floating_point() or not bool(x.isfinite().all()) or float(x.abs().max()) > 1.001:
        raise InvalidInput(f"an image of type {x.dtype} is from -1 to 1, and finite; or give 8-bit levels")
    return x.detach().float().cpu()


def joined(phrases: Sequence[str]) -> str:
    """Several descriptions joined to one.

    >>> joined(["two white squares", "a disc", "a cat"])
    'two white squares, a disc and a cat'
    """
    *first, last = phrases
    return f"{', '.join(first)} and {last}" if first else last


@checked
def extract(
    text: str, *, title: str = "", max_concepts: PositiveInt = 3, encoder: PromptEncoder | None = None
) -> list[str]:
    """The most salient phrases of a long text, in its order.

    Phrases are runs of words between punctuation and stop words. They are ranked by the frequency of their words,
    whether they are in the title and how early they occur; with an encoder by their similarity to the whole text
    instead.

    Args:
        text: a note, a story, a message.
        title: words that count double.
        max_concepts: maximum number of phrases.
        encoder: ranks by similarity of meaning.

    Raises:
        InvalidArgument: ``max_concepts`` below 1.
        InvalidInput: nothing in the text is a phrase.

    >>> extract("The red kite flew over the hills. A red kite! We had tea.", max_concepts=2)
    ['red kite flew', 'hills']
    """
    phrases = _phrases(text)
    if not phrases:
        raise InvalidInput(f"there is no phrase to draw in {text!r:.60}; write what the image is to show")
    scores = _by_meaning(phrases, f"{title}. {text}", encoder) if encoder else _by_words(phrases, title)
    ranked = sorted(range(len(phrases)), key=lambda i: (-scores[i], i))
    chosen: list[int] = []
    for index in ranked:
        words = set(phrases[index].lower().split())
        said = {word for other in chosen for word in phrases[other].lower().split()}
        if len(words & said) * 2 <= len(words) and len(chosen) < max_concepts:
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
        total = sum(counts[word] + 2.0 * (word in named) for word in words)
        return float(total / math.sqrt(len(words))) * (1.5 - 0.5 * index / len(phrases))

    return [score(index) for index in range(len(phrases))]


def _by_meaning(phrases: Sequence[str], whole: str, encoder: PromptEncoder) -> list[float]:
    vectors = encoder.encoder.embed([whole, *phrases], truncate=True)
    return [float(score) for score in vectors[1:] @ vectors[0]]
