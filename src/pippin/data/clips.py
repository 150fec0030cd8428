"""Made clips of objects that move straight on and bounce off the walls, and a tracker that reads them back.

Notable here:
- objects are those of made scenes; all that moves is their centres, at a constant speed, mirrored at the walls
- a clip follows from the seed and its number alone, and has no last frame: a longer clip begins as the shorter one does
- the tracker looks at frames only: centre, size and step of what stands out from the ground
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from pippin.core.errors import InvalidArgument
from pippin.data.ordering import Numbered
from pippin.data.scenes import SceneSpec, Thing, caption, cover_of, render

Floats = np.ndarray[Any, np.dtype[np.float64]]
DIRECTIONS: Final = ("right", "down", "left", "up")
"""Of a movement: the quarter that it points to."""


@dataclass(frozen=True)
class ClipSpec:
    """What clips are like.

    Attributes:
        scene: the ground, the objects and their number; with a grid of cells objects begin in their middles.
        frames: of a clip.
        speed: smallest and largest step of an object between two frames, in pixels.

    Raises:
        InvalidArgument: numbers out of range, or objects that touch both walls.
    """

    scene: SceneSpec = field(default_factory=lambda: SceneSpec(objects=(1, 1), radius=(2.2, 2.8)))
    frames: int = 8
    speed: tuple[float, float] = (0.6, 1.6)

    def __post_init__(self) -> None:
        if self.frames < 1:
            raise InvalidArgument(f"frames is {self.frames}; give at least 1")
        low, high = self.speed
        if not 0 <= low <= high <= self.scene.size / 2:
            raise InvalidArgument(f"speed={self.speed} must be from 0 to half of the size {self.scene.size}")
        if self.room <= 0:
            raise InvalidArgument(f"objects of radius {self.scene.radius[1]} cannot move in {self.scene.size} pixels")

    @property
    def edge(self) -> float:
        """How near a centre comes to a wall, in pixels: what the largest object needs."""
        return self.scene.radius[1] + 0.3

    @property
    def room(self) -> float:
        """Pixels between the two turning points of a centre."""
        return self.scene.size - 2 * self.edge


@dataclass(frozen=True)
class Clips:
    """A batch of clips.

    Attributes:
        images: 8-bit frames.
        centres: row and column of each object in each frame, in pixels; NaN for objects that are not there.
        velocities: the step of each object at the start, rows and columns in pixels a frame.
        things: the objects of each clip as they are in its first frame.
        spec: what they were drawn by.
    """

    images: UInt8[Tensor, "n frames channels size size"]
    centres: Float[Tensor, "n frames objects 2"]
    velocities: Float[Tensor, "n objects 2"]
    things: tuple[tuple[Thing, ...], ...]
    spec: ClipSpec

    def __len__(self) -> int:
        return len(self.things)

    @property
    def x(self) -> Float[Tensor, "n frames channels size size"]:
        """The frames from -1 to 1."""
        return self.images.float() / 127.5 - 1

    @property
    def kinds(self) -> Int[Tensor, n]:
        """The kind of the first object of each clip, by its place in the spec; -1 where there is none."""
        names = self.spec.scene.kinds
        return torch.tensor([names.index(things[0].kind) if things else -1 for things in self.things])

    @property
    def captions(self) -> list[str]:
        """What each shows, with the direction of its first object: "one white disc, moving left"."""
        words = []
        for things, velocity in zip(self.things, self.velocities, strict=True):
            way = f", moving {DIRECTIONS[int(direction(velocity[0]))]}" if things else ""
            words.append(caption(things) + way)
        return words


def clips(spec: ClipSpec, n: int, *, seed: int = 0, first: int = 0) -> Clips:
    """Draw clips number ``first`` to ``first + n`` of a seed.

    Raises:
        InvalidArgument: fewer than one, or objects that find no place.

    >>> batch = clips(ClipSpec(frames=4), 2)
    >>> batch.images.shape, batch.captions[0].split(", ")[1].split()[0]
    (torch.Size([2, 4, 1, 16, 16]), 'moving')
    """
    if n < 1:
        raise InvalidArgument(f"n is {n}; give at least 1")
    most, scene = max(spec.scene.objects[1], 1), spec.scene
    images = torch.empty(n, spec.frames, scene.channels, scene.size, scene.size, dtype=torch.uint8)
    centres = torch.full((n, spec.frames, most, 2), torch.nan)
    velocities = torch.zeros(n, most, 2)
    first_things = []
    for index in range(n):
        rng = np.random.default_rng((seed, 79, first + index))
        number = int(rng.integers(scene.objects[0], scene.objects[1] + 1))
        path, velocity = _paths(spec, number, rng)
        look = [
            (str(rng.choice(scene.kinds)), float(rng.uniform(*scene.radius)), str(rng.choice(scene.colours)))
            for _ in range(number)
        ]
        moving = [
            tuple(
                Thing(kind, row, column, radius, colour)
                for (kind, radius, colour), (row, column) in zip(look, places, strict=True)
            )
            for places in path.tolist()
        ]
        noise = np.random.default_rng((seed, 80, first + index))
        images[index] = render(scene, moving, noise=[noise] * spec.frames)[0]
        centres[index, :, :number] = torch.from_numpy(path).float()
        velocities[index, :number] = torch.from_numpy(velocity).float()
        first_things.append(moving[0])
    return Clips(images, centres, velocities, tuple(first_things), spec)


class ClipStream(Numbered[Clips]):
    """Batches of clips without end, as a stream with a cursor.

    Args:
        spec: what they are like.
        batch: clips of each.
        seed: of all of them.
    """

    def __init__(self, spec: ClipSpec, batch: int, *, seed: int = 0) -> None:
        super().__init__(lambda n, first: clips(spec, n, seed=seed, first=first), batch)


# --- the tracker ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Track:
    """What stands out in each frame of clips, as one object.

    Attributes:
        centres: row and column of its middle, in pixels; NaN in a frame where nothing stands out.
        areas: pixels that it covers.
    """

    centres: Float[Tensor, "n frames 2"]
    areas: Float[Tensor, "n frames"]

    @property
    def speeds(self) -> Float[Tensor, "n steps"]:
        """Pixels between the middles of neighbouring frames; NaN beside an empty frame."""
        steps: Tensor = self.centres.diff(dim=1).norm(dim=-1)
        return steps

    @property
    def there(self) -> Float[Tensor, "n frames"]:
        """1 where something stands out, else 0."""
        return torch.where(self.centres[..., 0].isnan(), 0.0, 1.0)


def track(x: Float[Tensor, "n frames channels h w"], spec: SceneSpec, *, least: float = 3.0) -> Track:
    """Follow the object of clips that hold one.

    Args:
        x: frames from -1 to 1.
        spec: the ground and the colours.
        least: pixels below which a frame counts as empty.

    >>> drawn = clips(ClipSpec(frames=4), 2)
    >>> (track(drawn.x, drawn.spec.scene).centres - drawn.centres[:, :, 0]).abs().max() < 0.2
    tensor(True)
    """
    n, frames = x.shape[:2]
    cover = cover_of(x.flatten(0, 1), spec)
    # what the noise of a pixel can do is below a quarter; the soft edge above it keeps the middle unbiased
    weight = torch.where(cover > 0.25, cover, torch.zeros(()).to(cover))
    areas = weight.sum((1, 2))
    rows = torch.arange(x.shape[-2], device=x.device) + 0.5
    columns = torch.arange(x.shape[-1], device=x.device) + 0.5
    total = torch.where(areas >= least, areas, torch.nan)
    middle = torch.stack([(weight.sum(2) * rows).sum(1), (weight.sum(1) * columns).sum(1)], -1) / total[:, None]
    return Track(middle.view(n, frames, 2), areas.view(n, frames))


def direction(velocity: Float[Tensor, "*batch 2"]) -> Int[Tensor, "*batch"]:
    """The quarter that a step (rows, columns) points to, by its place in `DIRECTIONS`.

    >>> direction(torch.tensor([[0.1, 1.0], [-2.0, 1.0]])).tolist()
    [0, 3]
    """
    down, right = velocity.unbind(-1)
    vertical = down.abs() > right.abs()
    along = torch.where(vertical, down, right)
    return vertical.long() + 2 * (along < 0).long()


def bounced(start: Floats, step: Floats, frames: int, room: float) -> Floats:
    """Places (frames, ...) of points that move by ``step`` a frame between mirrors at 0 and ``room``.

    A straight line on the unfolded floor, folded back: exact whatever the speed.

    >>> bounced(np.array([3.0]), np.array([2.0]), 4, 4.0)[:, 0].tolist()
    [3.0, 3.0, 1.0, 1.0]
    """
    line = start + np.arange(frames).reshape(-1, *[1] * start.ndim) * step
    return np.asarray(room - np.abs(room - np.mod(line, 2 * room)))


def _paths(spec: ClipSpec, number: int, rng: np.random.Generator) -> tuple[Any, Any]:
    """Centres (frames, objects, 2) and steps at the start (objects, 2)."""
    scene = spec.scene
    if scene.cells:
        cells = rng.permutation(scene.cells**2)[:number]
        pitch = scene.size / scene.cells
        start = np.stack([cells // scene.cells, cells % scene.cells], -1) * pitch + pitch / 2 - spec.edge
        start = start.clip(0, spec.room)
    else:
        start = _apart(spec, number, rng)
    angle, speed = rng.uniform(0, 2 * np.pi, number), rng.uniform(*spec.speed, number)
    step = np.stack([np.sin(angle), np.cos(angle)], -1) * speed[:, None]
    return spec.edge + bounced(np.asarray(start, float), step, spec.frames, spec.room), step


def _apart(spec: ClipSpec, number: int, rng: np.random.Generator) -> Floats:
    """Places of objects that do not touch in the first frame; later they may pass each other."""
    least = 2.2 * spec.scene.radius[1]
    for _ in range(500):
        start = rng.uniform(0, spec.room, (number, 2))
        gaps = np.linalg.norm(start[:, None] - start[None], axis=-1)[np.triu_indices(number, 1)]
        if not len(gaps) or gaps.min() > least:
            return np.asarray(start)
    raise InvalidArgument(f"{number} objects of radius {spec.scene.radius} find no place in {spec.scene.size} pixels")
