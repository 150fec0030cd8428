"""Requests and results of image generation; requests are validated before any computation.

Notable here:
- everything that can be checked without a model is checked here
- variety and strategy are settings of the interface; one formula each converts them to guidance and strength
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypedDict

import torch.nn.functional as F
from annotated_types import Ge, Le
from jaxtyping import Float, UInt8
from torch import Tensor

from pippin.core.checks import NonNegativeFloat, NonNegativeInt, PositiveInt, Probability, checked
from pippin.core.errors import InvalidArgument
from pippin.core.files import atomic_write
from pippin.data import image_files, images
from pippin.kits.image.job import Quality

Strategy = Literal["auto", "resemble", "inspire"]
MOST: Final = 64
"""Maximum number of images in one request."""
ENLARGED: Final = 16
"""Maximum upscaling factor."""
STRENGTHS: Final[Mapping[tuple[str, bool], float]] = {
    ("resemble", False): 0.3,
    ("auto", False): 0.55,
    ("inspire", False): 0.8,
    ("resemble", True): 0.6,
    ("auto", True): 0.75,
    ("inspire", True): 0.9,
}
"""Default strength, by strategy and by whether the input is a drawing."""
SYNTHETIC: Final = "http://cv.iptc.org/newscodes/digitalsourcetype/trainedAlgorithmicMedia"
"""The IPTC's term for media that a model made."""
_XMP: Final = (
    '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
    '<rdf:Description rdf:about="" xmlns:Iptc4xmpExt="http://iptc.org/std/Iptc4xmpExt/2008-02-29/" '
    f'Iptc4xmpExt:DigitalSourceType="{SYNTHETIC}"/></rdf:RDF></x:xmpmeta>'
)


class ImageSettings(TypedDict, total=False):
    """The keywords of `ImageCreator.images`; see `ImageRequest`."""

    style: str
    limit: int
    size: tuple[int, int] | None
    variety: float
    strategy: Strategy
    strength: float | None
    quality: Quality
    steps: int | None
    guidance: float | None
    seed: int
    batch_size: int


@checked
@dataclass(frozen=True)
class ImageRequest:
    """Settings of image generation.

    Attributes:
        style: name of an available style.
        limit: number of images, 1 to 64.
        size: height and width; a whole multiple of the model's, to which the image is upscaled; None for the model's.
        variety: 0 to 1; guidance g becomes ``1 + 2 (1 - variety) (g - 1)``: 0.5 leaves it unchanged, 1 turns it off.
        strategy: how closely a given image is followed: "resemble", "auto" or "inspire".
        strength: the same as a number from 0 (the image unchanged) to 1 (nothing of it remains); None for the
            strategy's.
        quality: "draft", "normal" or "best": the number of steps, which depends on the model's family.
        steps: the number of steps itself.
        guidance: scale of classifier-free guidance; 1 for no guidance, None for the style's or the model's.
        seed: image i depends on ``seed + i`` alone.
        batch_size: images that are sampled at once. More than 1 is faster, and may change the last bits of a result.

    Raises:
        InvalidArgument: a value out of range.
    """

    style: str = "plain"
    limit: Annotated[int, Ge(1), Le(MOST)] = 1
    size: tuple[int, int] | None = None
    variety: Probability = 0.5
    strategy: Strategy = "auto"
    strength: Probability | None = None
    quality: Quality = "normal"
    steps: PositiveInt | None = None
    guidance: NonNegativeFloat | None = None
    seed: NonNegativeInt = 0
    batch_size: PositiveInt = 1

    def enlargement(self, shape: tuple[int, ...]) -> int:
        """The upscaling factor.

        Raises:
            InvalidArgument: a size that is not a multiple; the message lists valid sizes.
        """
        height, width = shape[-2:]
        if self.size is None:
            return 1
        times = self.size[0] // height
        if self.size != (times * height, times * width) or not 1 <= times <= ENLARGED:
            raise InvalidArgument(
                f"size {self.size} is not reachable: the model draws {height} by {width} pixels, and whole multiples "
                f"up to {ENLARGED} times are enlarged from it, such as ({2 * height}, {2 * width})"
            )
        return times

    def guided(self, base: float) -> float:
        """The guidance, if the style's or the model's is ``base``.

        >>> [ImageRequest(variety=variety).guided(3.0) for variety in (0, 0.5, 1)]
        [5.0, 3.0, 1.0]
        """
        if self.guidance is not None:
            return self.guidance
        return 1 + 2 * (1 - self.variety) * (base - 1)

    def strong(self, drawing: bool) -> float:
        """The strength of a request with an input image."""
        return STRENGTHS[self.strategy, drawing] if self.strength is None else self.strength


@dataclass(frozen=True)
class CreatedImage:
    """A finished image, or a video.

    Attributes:
        index: index of the image in the request.
        x: from -1 to 1, in the 256 levels of a file; (channels, height, width), or frames first.
        details: metadata on how it was made; saved with it.
    """

    index: int
    x: Float[Tensor, "*frames channels height width"]
    details: Mapping[str, Any]

    @classmethod
    def of(cls, index: int, x: Tensor, enlarged: int, details: Mapping[str, Any]) -> CreatedImage:
        """From a sample, which is upscaled smoothly, clipped and rounded."""
        if enlarged > 1:
            flat = x.reshape(-1, *x.shape[-3:])
            flat = F.interpolate(flat, scale_factor=enlarged, mode="bicubic", align_corners=False)
            x = flat.reshape(*x.shape[:-2], *flat.shape[-2:])
        return cls(index, images.to_samples(images.to_levels(x.cpu())), dict(details))

    @property
    def levels(self) -> UInt8[Tensor, "*frames channels height width"]:
        """The image as 8-bit integers."""
        return images.to_levels(self.x)

    @property
    def seed(self) -> int:
        """The seed of this image."""
        return int(self.details["seed"])

    def save(self, path: str | Path) -> Path:
        """Write an image (.png, .webp, .jpg) or a video (.gif, .webp, .png, .mp4).

        The metadata of an image record how it was made and that a model made it; those of a video are in a `.json`
        beside it.

        Raises:
            InvalidArgument: another suffix.
            MissingDependency: Pillow is not installed.
            DiskFull: nothing was written.
        """
        path = Path(path)
        text = json.dumps(self.details, ensure_ascii=False)
        if self.x.ndim == 4:
            image_files.write_video(path, self.x)
            with atomic_write(path.with_suffix(".json"), mode="w") as file:
                file.write(text)
        else:
            image_files.write_image(path, self.x, text={"pippin": text, "XML:com.adobe.xmp": _XMP})
        return path


def read_details(path: str | Path) -> dict[str, Any]:
    """Metadata on how an image was made, as `CreatedImage.save` wrote them; empty for an image of another source.

    Raises:
        InvalidImage: not a readable image.
    """
    said = image_files.read_text(path).get("pippin")
    found: dict[str, Any] = json.loads(said) if said else {}
    return found


@dataclass(frozen=True)
class Progress:
    """Progress after a sampling step.

    Attributes:
        done: completed steps of all images.
        total: total number of steps.
        first: index of the first image that is being sampled.
        preview: returns the current estimate of those images, from about -1 to 1; computed when it is called.
    """

    done: int
    total: int
    first: int
    preview: Callable[[], Tensor]


@dataclass(frozen=True)
class Blocked:
    """An image that was withheld, with the reason."""

    index: int
    category: str


def request_of(settings: Mapping[str, Any]) -> ImageRequest:
    """A request from keyword arguments.

    Raises:
        InvalidArgument: an unknown keyword, or a value out of range.
    """
    known = [field.name for field in dataclasses.fields(ImageRequest)]
    if unknown := [name for name in settings if name not in known]:
        raise InvalidArgument(f"{unknown[0]!r} is no setting of an image; those are {', '.join(known)}")
    return ImageRequest(**settings)
