"""Synthetic scenes: images of simple objects with complete ground truth, and a detector that recovers it.

Notable here:
- objects are discs, squares and diamonds with soft edges; the parts of a scene are independent, so a model of them can
  be tested outside its training distribution
- a scene depends on the seed and its index alone: the supply is infinite, and nothing is stored
- the detector uses images only: connected bright components, then the template that fits each best
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from annotated_types import Ge, Le
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from pippin.core.checks import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, checked
from pippin.core.errors import InvalidArgument
from pippin.data.streams import Numbered

KINDS: Final = ("disc", "square", "diamond")
COLORS: Final[Mapping[str, tuple[int, int, int]]] = {
    "white": (235, 235, 235),
    "gray": (150, 150, 150),
    "red": (220, 60, 50),
    "green": (60, 190, 80),
    "blue": (70, 100, 230),
    "yellow": (230, 210, 60),
}
"""Available colors; with one channel only white and gray are distinct."""
_NUMBERS: Final = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@dataclass(frozen=True)
class SceneObject:
    """One object: its kind, its center and radius in pixels, and the name of its color."""

    kind: str
    row: float
    column: float
    radius: float
    color: str = "white"


@checked
@dataclass(frozen=True)
class SceneSpec:
    """The distribution of scenes.

    Attributes:
        size: height and width in pixels.
        objects: smallest and largest number of objects.
        cells: rows and columns of a grid whose cells hold at most one object each, at their center; 0 places objects
            anywhere without overlap.
        kinds: kinds of objects.
        colors: names of colors; with more than white and gray, images have three channels.
        radius: smallest and largest.
        background: level of the background, 0 to 255.
        brightness: smallest and largest factor on an object's color.
        noise: standard deviation of each pixel, in levels.

    Raises:
        InvalidArgument: numbers out of range.
    """

    size: Annotated[int, Ge(4)] = 16
    objects: tuple[NonNegativeInt, NonNegativeInt] = (1, 3)
    cells: NonNegativeInt = 0
    kinds: tuple[str, ...] = KINDS
    colors: tuple[str, ...] = ("white",)
    radius: tuple[PositiveFloat, PositiveFloat] = (1.8, 2.8)
    background: Annotated[int, Ge(0), Le(255)] = 30
    brightness: tuple[float, float] = (1.0, 1.0)
    noise: NonNegativeFloat = 2.0

    def __post_init__(self) -> None:
        low, high = self.objects
        if low > high or (self.cells and high > self.cells**2):
            raise InvalidArgument(f"objects={self.objects} do not fit" + (f" {self.cells**2} cells" * bool(self.cells)))
        if not self.radius[0] <= self.radius[1] <= self.size / 2:
            raise InvalidArgument(f"radius={self.radius} must rise, to at most half of size={self.size}")
        if unknown := [k for k in self.kinds if k not in KINDS] + [c for c in self.colors if c not in COLORS]:
            raise InvalidArgument(f"{unknown[0]!r} is none of {KINDS} and {tuple(COLORS)}")

    @property
    def channels(self) -> int:
        """1, or 3 where a color is neither white nor gray."""
        return 1 if set(self.colors) <= {"white", "gray"} else 3


@dataclass(frozen=True)
class Scenes:
    """A batch of scenes.

    Attributes:
        images: 8-bit images.
        masks: where objects are (covered by at least a half).
        things: the objects of each.
        spec: their distribution.
    """

    images: UInt8[Tensor, "n channels size size"]
    masks: Bool[Tensor, "n size size"]
    things: tuple[tuple[SceneObject, ...], ...]
    spec: SceneSpec

    def __len__(self) -> int:
        return len(self.things)

    @property
    def x(self) -> Float[Tensor, "n channels size size"]:
        """The images as numbers from -1 to 1."""
        return self.images.float() / 127.5 - 1

    @property
    def counts(self) -> Int[Tensor, n]:
        """Number of objects of each."""
        return torch.tensor([len(things) for things in self.things])

    @property
    def captions(self) -> list[str]:
        """A caption of each: "two white squares and one gray disc"."""
        return [caption(things) for things in self.things]

    @property
    def presence(self) -> Bool[Tensor, "n cells cells"]:
        """Which cells hold an object; only for scenes with cells."""
        found = torch.zeros(len(self), self.spec.cells, self.spec.cells, dtype=torch.bool)
        for index, things in enumerate(self.things):
            for thing in things:
                row, column = (int(at * self.spec.cells / self.spec.size) for at in (thing.row, thing.column))
                found[index, row, column] = True
        return found


@checked
def sample_scenes(spec: SceneSpec, n: PositiveInt, *, seed: int = 0, first: int = 0) -> Scenes:
    """Sample scenes number ``first`` to ``first + n`` of a seed.

    Raises:
        InvalidArgument: fewer than one, or objects that do not fit.

    >>> batch = sample_scenes(SceneSpec(), 2)
    >>> batch.images.shape, batch.counts.min() >= 1
    (torch.Size([2, 1, 16, 16]), tensor(True))
    """
    things = tuple(_things(spec, np.random.default_rng((seed, 77, first + i))) for i in range(n))
    images, masks = render(spec, things, noise=[np.random.default_rng((seed, 78, first + i)) for i in range(n)])
    return Scenes(images, masks, things, spec)


def render(
    spec: SceneSpec, things: Sequence[Sequence[SceneObject]], *, noise: Sequence[np.random.Generator] | None = None
) -> tuple[UInt8[Tensor, "n channels size size"], Bool[Tensor, "n size size"]]:
    """Images of given objects, and their masks; without ``noise`` exact levels."""
    size, n = spec.size, len(things)
    ground = np.full((n, spec.channels, size, size), float(spec.background))
    covered = np.zeros((n, size, size), bool)
    for index, parts in enumerate(things):
        for thing in parts:
            cover = coverage(thing, size)
            factor = 1.0
            if noise is not None and spec.brightness != (1.0, 1.0):
                factor = float(noise[index].uniform(*spec.brightness))
            color = np.array(COLORS[thing.color][: spec.channels], float)[:, None, None] * factor
            ground[index] = (1 - cover) * ground[index] + cover * color
            covered[index] |= cover >= 0.5
        if noise is not None and spec.noise:
            ground[index] += spec.noise * noise[index].standard_normal(ground[index].shape)
    levels = np.clip(np.rint(ground), 0, 255).astype(np.uint8)
    return torch.from_numpy(levels), torch.from_numpy(covered)


def coverage(thing: SceneObject, size: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """How much of each pixel an object covers, 0 to 1, with edges one pixel soft; discs, squares and diamonds of one
    radius have about the same area."""
    rows, columns = np.mgrid[0:size, 0:size] + 0.5
    down, right = np.abs(rows - thing.row), np.abs(columns - thing.column)
    if thing.kind == "disc":
        inside = thing.radius - np.hypot(down, right)
    elif thing.kind == "square":
        inside = 0.89 * thing.radius - np.maximum(down, right)
    else:
        inside = (1.25 * thing.radius - (down + right)) / 2**0.5
    return np.asarray(np.clip(inside + 0.5, 0, 1))


def caption(things: Sequence[SceneObject]) -> str:
    """A caption of a scene: kinds and colors with their numbers, the most frequent first.

    >>> caption([SceneObject("disc", 3, 3, 2), SceneObject("square", 9, 3, 2, "gray"), SceneObject("disc", 9, 9, 2)])
    'two white discs and one gray square'
    """
    counts: dict[tuple[str, str], int] = {}
    for thing in things:
        counts[thing.color, thing.kind] = counts.get((thing.color, thing.kind), 0) + 1
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    words = [f"{_NUMBERS[count]} {color} {kind}{'s' * (count > 1)}" for (color, kind), count in ordered]
    if not words:
        return "nothing"
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def cell_map(presence: Bool[Tensor, "n cells cells"], size: int, *, width: float = 0.35) -> Float[Tensor, "n 1 h w"]:
    """Condition maps: a Gaussian bump at the center of each cell that holds an object.

    Args:
        presence: the cells with an object.
        size: height and width of the map.
        width: standard deviation of a bump in cells.
    """
    cells = presence.shape[-1]
    at = (torch.arange(size) + 0.5) * cells / size
    bump = torch.exp(-((at[None] - (torch.arange(cells) + 0.5)[:, None]) ** 2) / (2 * width**2))
    drawn = torch.einsum("nij,ih,jw->nhw", presence.float(), bump, bump)
    return drawn[:, None]


class SceneStream(Numbered[Scenes]):
    """Infinite batches of scenes, as a stream with a cursor.

    Args:
        spec: their distribution.
        batch_size: scenes in a batch.
        seed: seed of all scenes.
    """

    def __init__(self, spec: SceneSpec, batch_size: int, *, seed: int = 0) -> None:
        super().__init__(lambda n, first: sample_scenes(spec, n, seed=seed, first=first), batch_size)


# --- the detector -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Detection:
    """One connected component of an image, with its best template.

    Attributes:
        thing: kind, center, radius and color that fit best.
        area: covered pixels.
        error: root mean square difference from the template, 0 to 1 of its contrast.
    """

    thing: SceneObject
    area: float
    error: float


def estimate_coverage(x: Float[Tensor, "n channels h w"], spec: SceneSpec) -> Float[Tensor, "n h w"]:
    """Coverage of each pixel of images from -1 to 1 by an object: 0 to 1 (white, or its own color)."""
    ground = spec.background / 127.5 - 1
    if spec.channels == 1:
        return ((x[:, 0] - ground) / (235 / 127.5 - 1 - ground)).clamp(0, 1)
    # the distance from the background, over that of the color it is nearest to in direction
    palette = torch.tensor([COLORS[name] for name in spec.colors], dtype=torch.float32, device=x.device) / 127.5 - 1
    away = x - ground
    directions = palette - ground
    along = torch.einsum("nchw,kc->nkhw", away, directions) / directions.square().sum(-1)[None, :, None, None]
    return along.amax(1).clamp(0, 1)


def components(cover: Bool[Tensor, "n h w"]) -> Int[Tensor, "n h w"]:
    """Labels of the connected components (with diagonals), from 1 up in each image; 0 for background.

    >>> components(torch.tensor([[[1, 0, 0], [1, 0, 1]]]).bool())
    tensor([[[1, 0, 0],
             [1, 0, 2]]])
    """
    n, h, w = cover.shape
    mark = torch.arange(1, h * w + 1, device=cover.device, dtype=torch.float32).view(1, 1, h, w) * cover[:, None]
    while True:
        spread = F.max_pool2d(mark, 3, 1, 1) * cover[:, None]
        if torch.equal(spread, mark):
            break
        mark = spread
    marks = mark[:, 0].long()
    out = torch.zeros_like(marks)
    for index in range(n):
        for number, value in enumerate(marks[index].unique()[1 if not bool(cover[index].all()) else 0 :], 1):
            out[index][marks[index] == value] = number
    return out


def count(x: Float[Tensor, "n channels h w"], spec: SceneSpec, *, min_area: int = 3) -> Int[Tensor, n]:
    """Number of objects in each image: components of at least ``min_area`` pixels with a coverage of at least a
    half."""
    return torch.tensor([len(found) for found in detect(x, spec, min_area=min_area)])


def cells(x: Float[Tensor, "n channels h w"], spec: SceneSpec, *, share: float = 0.15) -> Bool[Tensor, "n cells cells"]:
    """Which cells hold an object: at least this share of their pixels has a coverage of a quarter or more."""
    if not spec.cells:
        raise InvalidArgument("scenes without a grid have no cells; give SceneSpec(cells=...)")
    bright = (estimate_coverage(x, spec) > 0.25).float()[:, None]
    return F.adaptive_avg_pool2d(bright, spec.cells)[:, 0] >= share


def detect(x: Float[Tensor, "n channels h w"], spec: SceneSpec, *, min_area: int = 3) -> list[list[Detection]]:
    """The objects of each image, from left to right.

    Args:
        x: images from -1 to 1.
        spec: the kinds and colors to detect, and the background.
        min_area: minimum number of pixels of a component.
    """
    cover = estimate_coverage(x, spec)
    labels = components(cover > 0.4)
    found = []
    for index in range(len(x)):
        here = []
        for number in range(1, int(labels[index].max()) + 1):
            part = labels[index] == number
            if int(part.sum()) >= min_area:
                here.append(_fit(x[index], cover[index], part, spec))
        found.append(sorted(here, key=lambda one: one.thing.column))
    return found


def _fit(x: Tensor, cover: Tensor, part: Tensor, spec: SceneSpec) -> Detection:
    """The template that fits one component best."""
    near = F.max_pool2d(part[None].float(), 3, 1, 1)[0].bool()
    color, strength = _color(x[:, part].mean(1), spec)
    if spec.brightness != (1.0, 1.0):
        strength = float(cover[part].max())
    own = (cover / max(strength, 1e-3)).clamp(0, 1) * near
    area = float(own.sum())
    rows, columns = torch.meshgrid(*(torch.arange(s) + 0.5 for s in own.shape), indexing="ij")
    row, column = (float((own * at.to(own.device)).sum() / own.sum()) for at in (rows, columns))
    best: tuple[float, SceneObject] | None = None
    for kind in spec.kinds:
        thing = SceneObject(kind, row, column, (area / np.pi) ** 0.5, color)
        template = torch.from_numpy(coverage(thing, own.shape[-1])).to(own)
        error = float(((template - own)[near] ** 2).mean() ** 0.5)
        if best is None or error < best[0]:
            best = (error, thing)
    assert best is not None
    return Detection(best[1], area, best[0])


def _color(mean: Tensor, spec: SceneSpec) -> tuple[str, float]:
    """The color nearest to the mean of a component, and the contrast of a full pixel of it."""
    ground = torch.full_like(mean, spec.background / 127.5 - 1)
    named = {name: torch.tensor(COLORS[name][: spec.channels]).to(mean) / 127.5 - 1 for name in spec.colors}
    name = min(named, key=lambda key: float((named[key] - mean).square().sum()))
    if spec.channels == 1:
        white = COLORS["white"][0] / 127.5 - 1
        return name, float((named[name] - ground)[0] / (white - ground[0]))
    return name, 1.0


def _things(spec: SceneSpec, rng: np.random.Generator) -> tuple[SceneObject, ...]:
    """The objects of one scene."""
    number = int(rng.integers(spec.objects[0], spec.objects[1] + 1))

    def one(row: float, column: float, radius: float) -> SceneObject:
        return SceneObject(str(rng.choice(spec.kinds)), row, column, radius, str(rng.choice(spec.colors)))

    if spec.cells:
        pitch = spec.size / spec.cells
        chosen = rng.permutation(spec.cells**2)[:number]
        return tuple(
            one((cell // spec.cells + 0.5) * pitch, (cell % spec.cells + 0.5) * pitch, float(rng.uniform(*spec.radius)))
            for cell in chosen.tolist()
        )
    for _ in range(200):
        placed: list[tuple[float, float, float]] = []
        for _ in range(60 * number):
            if len(placed) == number:
                break
            radius = float(rng.uniform(*spec.radius))
            edge = 1.2 * radius + 0.3
            row, column = rng.uniform(edge, spec.size - edge, size=2)
            if all(np.hypot(row - r, column - c) > 1.3 * (radius + other) + 1.4 for r, c, other in placed):
                placed.append((float(row), float(column), radius))
        if len(placed) == number:
            return tuple(one(*place) for place in placed)
    raise InvalidArgument(
        f"{number} objects of radius {spec.radius} find no place in {spec.size} by {spec.size} pixels"
    )
