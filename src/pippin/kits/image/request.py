"""What an image creator is asked for, checked before any work, and what comes back.

Notable here:
- everything that can be refused without a model is refused here
- variety and strategy are words of the interface; what they do to guidance and strength is one formula each
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypedDict, get_args

import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor

from pippin.core.errors import InvalidArgument
from pippin.core.files import atomic_write
from pippin.data import image_files, images
from pippin.kits.image.backends import QUALITIES, Quality

Strategy = Literal["auto", "resemble", "inspire"]
MOST: Final = 64
"""Pictures of one request."""
ENLARGED: Final = 16
"""How many times the model's size a picture may be enlarged to."""
STRENGTHS: Final[Mapping[tuple[str, bool], float]] = {
    ("resemble", False): 0.3,
    ("auto", False): 0.55,
    ("inspire", False): 0.8,
    ("resemble", True): 0.6,
    ("auto", True): 0.75,
    ("inspire", True): 0.9,
}
"""How far to go from what is given, by strategy and by whether it is a drawing."""
SYNTHETIC: Final = "http://cv.iptc.org/newscodes/digitalsourcetype/trainedAlgorithmicMedia"
"""The IPTC's word for media that a model made."""
_XMP: Final = (
    '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
    '<rdf:Description rdf:about="" xmlns:Iptc4xmpExt="http://iptc.org/std/Iptc4xmpExt/2008-02-29/" '
    f'Iptc4xmpExt:DigitalSourceType="{SYNTHETIC}"/></rdf:RDF></x:xmpmeta>'
)


class Settings(TypedDict, total=False):
    """The keywords of `ImageCreator.images`; see `Request`."""

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
    together: int


@dataclass(frozen=True)
class Request:
    """How pictures are to be made.

    Attributes:
        style: name of an available style.
        limit: pictures, 1 to 64.
        size: height and width; a whole multiple of the model's, to which the picture is enlarged; None for the model's.
        variety: 0 to 1; guidance g becomes ``1 + 2 (1 - variety) (g - 1)``: 0.5 leaves it, 1 turns it off.
        strategy: how closely a given picture is followed: "resemble", "auto" or "inspire".
        strength: the same as a number from 0 (the picture comes back) to 1 (nothing of it stays); None for the
            strategy's.
        quality: "draft", "normal" or "best": the number of steps, as the model's family sees fit.
        steps: the same as a number.
        guidance: how closely the description is followed; 1 for no guidance, None for the style's or the model's.
        seed: picture i depends on ``seed + i`` alone.
        together: pictures that are drawn at once. More than 1 is faster, and may round the last bit differently.

    Raises:
        InvalidArgument: a value out of range.
    """

    style: str = "plain"
    limit: int = 1
    size: tuple[int, int] | None = None
    variety: float = 0.5
    strategy: Strategy = "auto"
    strength: float | None = None
    quality: Quality = "normal"
    steps: int | None = None
    guidance: float | None = None
    seed: int = 0
    together: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.limit <= MOST:
            raise InvalidArgument(f"limit is {self.limit}; give 1 to {MOST} pictures")
        for name in ("variety", "strength"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise InvalidArgument(f"{name} is {value}; give 0 to 1")
        if self.strategy not in get_args(Strategy):
            raise InvalidArgument(f"strategy {self.strategy!r}; choose one of {', '.join(get_args(Strategy))}")
        if self.quality not in QUALITIES:
            raise InvalidArgument(f"quality {self.quality!r}; choose one of {', '.join(QUALITIES)}")
        if self.steps is not None and self.steps < 1:
            raise InvalidArgument(f"steps is {self.steps}; give at least 1")
        if self.guidance is not None and not 0 <= self.guidance < float("inf"):
            raise InvalidArgument(f"guidance is {self.guidance}; give 0 or more, 1 for none")
        if self.seed < 0:
            raise InvalidArgument(f"seed is {self.seed}; give 0 or more")
        if self.together < 1:
            raise InvalidArgument(f"together is {self.together}; give at least 1")

    def enlargement(self, shape: tuple[int, ...]) -> int:
        """How many times the model's size is wanted.

        Raises:
            InvalidArgument: a size that is not reached; those that are, are named.
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
        """The guidance, where the style's or the model's is ``base``.

        >>> [Request(variety=variety).guided(3.0) for variety in (0, 0.5, 1)]
        [5.0, 3.0, 1.0]
        """
        if self.guidance is not None:
            return self.guidance
        return 1 + 2 * (1 - self.variety) * (base - 1)

    def strong(self, drawing: bool) -> float:
        """How far to go from what is given."""
        return STRENGTHS[self.strategy, drawing] if self.strength is None else self.strength


@dataclass(frozen=True)
class Picture:
    """A finished picture, or a clip.

    Attributes:
        index: which of the request.
        x: from -1 to 1, in the 256 levels of a file; (channels, height, width), or frames first.
        details: how it was made; saved with it.
    """

    index: int
    x: Float[Tensor, "*frames channels height width"]
    details: Mapping[str, Any]

    @classmethod
    def of(cls, index: int, x: Tensor, enlarged: int, details: Mapping[str, Any]) -> Picture:
        """From a sample; enlarged smoothly, clipped and rounded."""
        if enlarged > 1:
            flat = x.reshape(-1, *x.shape[-3:])
            flat = F.interpolate(flat, scale_factor=enlarged, mode="bicubic", align_corners=False)
            x = flat.reshape(*x.shape[:-2], *flat.shape[-2:])
        return cls(index, images.to_samples(images.to_levels(x.cpu())), dict(details))

    @property
    def levels(self) -> UInt8[Tensor, "*frames channels height width"]:
        """In 8 bits."""
        return images.to_levels(self.x)

    @property
    def seed(self) -> int:
        """That this picture depends on."""
        return int(self.details["seed"])

    def save(self, path: str | Path) -> Path:
        """Write a picture (.png, .webp, .jpg) or a clip (.gif, .webp, .png, .mp4).

        A picture's metadata say how it was made and that a model made it; a clip's stand in a `.json` beside it.

        Raises:
            InvalidArgument: another suffix.
            MissingDependency: Pillow is not installed.
            DiskFull: nothing was written.
        """
        path = Path(path)
        text = json.dumps(self.details, ensure_ascii=False)
        if self.x.ndim == 4:
            image_files.write_clip(path, self.x)
            with atomic_write(path.with_suffix(".json"), mode="w") as file:
                file.write(text)
        else:
            image_files.write(path, self.x, text={"pippin": text, "XML:com.adobe.xmp": _XMP})
        return path


def details_of(path: str | Path) -> dict[str, Any]:
    """How a picture was made, as `Picture.save` wrote it; empty for a picture of another source.

    Raises:
        InvalidImage: no picture that can be read.
    """
    said = image_files.text_of(path).get("pippin")
    found: dict[str, Any] = json.loads(said) if said else {}
    return found


@dataclass(frozen=True)
class Progress:
    """A step of a drawing is over.

    Attributes:
        done: steps of all pictures.
        total: steps in all.
        first: number of the first picture that is being drawn.
        preview: what those pictures look like by now, from about -1 to 1; computed when it is called.
    """

    done: int
    total: int
    first: int
    preview: Callable[[], Tensor]


@dataclass(frozen=True)
class Blocked:
    """A picture was made and is withheld: a guard said why."""

    index: int
    category: str


def request_of(settings: Mapping[str, Any]) -> Request:
    """A request of keywords.

    Raises:
        InvalidArgument: an unknown keyword, or a value out of range.
    """
    known = [field.name for field in dataclasses.fields(Request)]
    if unknown := [name for name in settings if name not in known]:
        raise InvalidArgument(f"{unknown[0]!r} is no setting of a picture; those are {', '.join(known)}")
    return Request(**settings)
