"""Synthetic videos of objects that move in straight lines and bounce off the walls, and a tracker of their motion.

Notable here:
- objects are those of synthetic scenes; only their centers move, at a constant speed, mirrored at the walls
- a video depends on the seed and its index alone, and has no last frame: a longer video begins like the shorter one
- the tracker uses frames only: center, size and step of the pixels that differ from the background
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from pippin.core.checks import NonNegativeFloat, PositiveInt, checked
from pippin.core.errors import InvalidArgument
from pippin.data.streams import Numbered
from pippin.data.synthetic.scenes import SceneObject, SceneSpec, caption, estimate_coverage, render

Floats = np.ndarray[Any, np.dtype[np.float64]]
DIRECTIONS: Final = ("right", "down", "left", "up")
"""Names of the directions of motion."""


@checked
@dataclass(frozen=True)
class VideoClipSpec:
    """The distribution of videos.

    Attributes:
        scene: the background, the objects and their number; with a grid of cells objects start at their centers.
        frames: number of frames.
        speed: smallest and largest step of an object between two frames, in pixels.

    Raises:
        InvalidArgument: numbers out of range, or objects that touch both walls.
    """

    scene: SceneSpec = field(default_factory=lambda: SceneSpec(objects=(1, 1), radius=(2.2, 2.8)))
    frames: PositiveInt = 8
    speed: tuple[NonNegativeFloat, NonNegativeFloat] = (0.6, 1.6)

    def __post_init__(self) -> None:
        low, high = self.speed
        if not low <= high <= self.scene.size / 2:
            raise InvalidArgument(f"speed={self.speed} must rise, to at most half of the size {self.scene.size}")
        if self.room <= 0:
            raise InvalidArgument(f"objects of radius {self.scene.radius[1]} cannot move in {self.scene.size} pixels")

    @property
    def edge(self) -> float:
        """Minimum distance of a center from a wall, in pixels, for the largest object."""
        return self.scene.radius[1] + 0.3

    @property
    def room(self) -> float:
        """Pixels between the two turning points of a center."""
        return self.scene.size - 2 * self.edge


@dataclass(frozen=True)
class VideoClips:
    """A batch of videos.

    Attributes:
        images: 8-bit frames.
        centers: row and column of each object in each frame, in pixels; NaN for missing objects.
        velocities: the initial step of each object, rows and columns in pixels per frame.
        things: the objects of each video as they are in its first frame.
        spec: their distribution.
    """

    images: UInt8[Tensor, "n frames channels size size"]
    centers: Float[Tensor, "n frames objects 2"]
    velocities: Float[Tensor, "n objects 2"]
    things: tuple[tuple[SceneObject, ...], ...]
    spec: VideoClipSpec

    def __len__(self) -> int:
        return len(self.things)

    @property
    def x(self) -> Float[Tensor, "n frames channels size size"]:
        """The frames as numbers from -1 to 1."""
        return self.images.float() / 127.5 - 1

    @property
    def kinds(self) -> Int[Tensor, n]:
        """The kind of the first object of each video, by its index in the spec; -1 if there is none."""
        names = self.spec.scene.kinds
        return torch.tensor([names.index(things[0].kind) if things else -1 for things in self.things])

    @property
    def captions(self) -> list[str]:
        """A caption of each, with the direction of its first object: "one white disc, moving left"."""
        words = []
        for things, velocity in zip(self.things, self.velocities, strict=True):
            way = f", moving {DIRECTIONS[int(direction(velocity[0]))]}" if things else ""
            words.append(caption(things) + way)
        return words


@checked
def sample_video_clips(spec: VideoClipSpec, n: PositiveInt, *, seed: int = 0, first: int = 0) -> VideoClips:
    """Sample videos number ``first`` to ``first + n`` of a seed.

    Raises:
        InvalidArgument: fewer than one, or objects that do not fit.

    >>> batch = sample_video_clips(VideoClipSpec(frames=4), 2)
    >>> batch.images.shape, batch.captions[0].split(", ")[1].split()[0]
    (torch.Size([2, 4, 1, 16, 16]), 'moving')
    """
    most, scene = max(spec.scene.objects[1], 1), spec.scene
    images = torch.empty(n, spec.frames, scene.channels, scene.size, scene.size, dtype=torch.uint8)
    centers = torch.full((n, spec.frames, most, 2), torch.nan)
    velocities = torch.zeros(n, most, 2)
    first_things = []
    for index in range(n):
        rng = np.random.default_rng((seed, 79, first + index))
        number = int(rng.integers(scene.objects[0], scene.objects[1] + 1))
        path, velocity = _paths(spec, number, rng)
        look = [
            (str(rng.choice(scene.kinds)), float(rng.uniform(*scene.radius)), str(rng.choice(scene.colors)))
            for _ in range(number)
        ]
        moving = [
            tuple(
                SceneObject(kind, row, column, radius, color)
                for (kind, radius, color), (row, column) in zip(look, places, strict=True)
            )
            for places in path.tolist()
        ]
        noise = np.random.default_rng((seed, 80, first + index))
        images[index] = render(scene, moving, noise=[noise] * spec.frames)[0]
        centers[index, :, :number] = torch.from_numpy(path).float()
        velocities[index, :number] = torch.from_numpy(velocity).float()
        first_things.append(moving[0])
    return VideoClips(images, centers, velocities, tuple(first_things), spec)


class VideoClipStream(Numbered[VideoClips]):
    """Infinite batches of videos, as a stream with a cursor.

    Args:
        spec: their distribution.
        batch_size: videos in a batch.
        seed: seed of all videos.
    """

    def __init__(self, spec: VideoClipSpec, batch_size: int, *, seed: int = 0) -> None:
        super().__init__(lambda n, first: sample_video_clips(spec, n, seed=seed, first=first), batch_size)


# --- the tracker ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Track:
    """The foreground of each frame of videos, as one object.

    Attributes:
        centers: row and column of its center, in pixels; NaN in a frame without foreground.
        areas: covered pixels.
    """

    centers: Float[Tensor, "n frames 2"]
    areas: Float[Tensor, "n frames"]

    @property
    def speeds(self) -> Float[Tensor, "n steps"]:
        """Distance between the centers in consecutive frames, in pixels; NaN beside an empty frame."""
        steps: Tensor = self.centers.diff(dim=1).norm(dim=-1)
        return steps

    @property
    def visible(self) -> Float[Tensor, "n frames"]:
        """1 if a frame has foreground, else 0."""
        return torch.where(self.centers[..., 0].isnan(), 0.0, 1.0)


def track(x: Float[Tensor, "n frames channels h w"], spec: SceneSpec, *, min_area: float = 3.0) -> Track:
    """Track the object of videos with a single object.

    Args:
        x: frames from -1 to 1.
        spec: the background and the colors.
        min_area: minimum foreground in pixels; frames with less count as empty.

    >>> drawn = sample_video_clips(VideoClipSpec(frames=4), 2)
    >>> (track(drawn.x, drawn.spec.scene).centers - drawn.centers[:, :, 0]).abs().max() < 0.2
    tensor(True)
    """
    n, frames = x.shape[:2]
    cover = estimate_coverage(x.flatten(0, 1), spec)
    # pixel noise stays below a quarter; the soft edge above it keeps the center unbiased
    weight = torch.where(cover > 0.25, cover, torch.zeros(()).to(cover))
    areas = weight.sum((1, 2))
    rows = torch.arange(x.shape[-2], device=x.device) + 0.5
    columns = torch.arange(x.shape[-1], device=x.device) + 0.5
    total = torch.where(areas >= min_area, areas, torch.nan)
    middle = torch.stack([(weight.sum(2) * rows).sum(1), (weight.sum(1) * columns).sum(1)], -1) / total[:, None]
    return Track(middle.view(n, frames, 2), areas.view(n, frames))


def direction(velocity: Float[Tensor, "*batch 2"]) -> Int[Tensor, "*batch"]:
    """The direction of a step (rows, columns), by its index in `DIRECTIONS`.

    >>> direction(torch.tensor([[0.1, 1.0], [-2.0, 1.0]])).tolist()
    [0, 3]
    """
    down, right = velocity.unbind(-1)
    vertical = down.abs() > right.abs()
    along = torch.where(vertical, down, right)
    return vertical.long() + 2 * (along < 0).long()


def bounced(start: Floats, step: Floats, frames: int, room: float) -> Floats:
    """Positions (frames, ...) of points that move by ``step`` a frame between mirrors at 0 and ``room``.

    Computed by unfolding the reflections: exact at any speed.

    >>> bounced(np.array([3.0]), np.array([2.0]), 4, 4.0)[:, 0].tolist()
    [3.0, 3.0, 1.0, 1.0]
    """
    line = start + np.arange(frames).reshape(-1, *[1] * start.ndim) * step
    return np.asarray(room - np.abs(room - np.mod(line, 2 * room)))


def _paths(spec: VideoClipSpec, number: int, rng: np.random.Generator) -> tuple[Any, Any]:
    """Centers (frames, objects, 2) and initial steps (objects, 2)."""
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


def _apart(spec: VideoClipSpec, number: int, rng: np.random.Generator) -> Floats:
    """Positions of objects that do not touch in the first frame; later they may pass each other."""
    least = 2.2 * spec.scene.radius[1]
    for _ in range(500):
        start = rng.uniform(0, spec.room, (number, 2))
        gaps = np.linalg.norm(start[:, None] - start[None], axis=-1)[np.triu_indices(number, 1)]
        if not len(gaps) or gaps.min() > least:
            return np.asarray(start)
    raise InvalidArgument(f"{number} objects of radius {spec.scene.radius} find no place in {spec.scene.size} pixels")
