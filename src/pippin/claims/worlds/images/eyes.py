"""Synthetic eyes of 24 by 24 pixels with known gaze: as a simulator renders them, and as a hidden camera sees them.

Notable here:
- the camera has blur, a nonlinear response, vignetting, fixed-pattern and random noise; its images have another
  distribution of gazes, so a refiner that moves pupils would look more real, and would be wrong
- the decoder knows the geometry of the simulator: it estimates gaze by matching a clean pupil at every position
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SIZE = 24
REACH = 4.0
"""Gazes of the simulator lie within so many pixels of the middle, on both axes."""
PUPIL = 3.2
SKIN, WHITE, DARK, GLINT = -0.1, 0.75, -0.8, 0.9


@dataclass(frozen=True)
class Eyes:
    """Images and their gazes: (down, right) in pixels from the center of the eye."""

    x: Tensor
    gaze: Tensor


def simulated(n: int, seed: int) -> Eyes:
    """Rendered images, with gazes uniform over a square."""
    import torch

    generator = torch.Generator().manual_seed(10_000 + seed)
    gaze = REACH * (2 * torch.rand(n, 2, generator=generator) - 1)
    return Eyes(_draw(gaze, generator), gaze)


def photographed(n: int, seed: int) -> Eyes:
    """Images from the camera, with gazes concentrated around one point."""
    import torch

    generator = torch.Generator().manual_seed(20_000 + seed)
    center = torch.tensor([1.2, -1.2])
    gaze = (center + 1.6 * torch.randn(n, 2, generator=generator)).clamp(-REACH, REACH)
    return Eyes(camera(_draw(gaze, generator), generator), gaze)


def camera(x: Tensor, generator: torch.Generator) -> Tensor:
    """Apply blur, a nonlinear response, vignetting, lower brightness, fixed-pattern and random noise."""
    import torch
    import torch.nn.functional as F

    offsets = torch.arange(-3, 4).float()
    kernel = torch.exp(-offsets.square() / 2)
    kernel = kernel / kernel.sum()
    x = F.pad((x + 1) / 2, (3, 3, 3, 3), mode="replicate")
    x = F.conv2d(F.conv2d(x, kernel.view(1, 1, 1, 7)), kernel.view(1, 1, 7, 1)).clamp(0, 1)
    at = torch.linspace(-1, 1, SIZE)
    corners = 1 - 0.35 * (at[:, None].square() + at.square()) / 2
    fixed = 0.05 * torch.randn(1, 1, SIZE, SIZE, generator=torch.Generator().manual_seed(77))
    x = 0.75 * x**1.6 * corners + 0.08 + fixed
    shot = (x.clamp_min(0) / 400).sqrt() * torch.randn(x.shape, generator=generator)
    return ((x + shot) * 2 - 1).clamp(-1, 1)


def decoded(x: Tensor) -> Tensor:
    """Gaze of each image by subpixel template matching of a clean pupil."""
    import torch
    import torch.nn.functional as F

    at = torch.arange(11) - 5.0
    inside = (PUPIL - torch.hypot(at[:, None], at) + 0.5).clamp(0, 1)
    surround = (PUPIL + 2 - torch.hypot(at[:, None], at) + 0.5).clamp(0, 1) - inside
    template = (surround / surround.sum() - inside / inside.sum())[None, None]
    score = F.conv2d(F.pad(x, (5, 5, 5, 5), mode="replicate"), template)[:, 0]
    middle, reach = SIZE // 2, round(REACH) + 2
    window = score[:, middle - reach : middle + reach, middle - reach : middle + reach]
    best = window.flatten(1).argmax(1)
    side = window.shape[1]
    row, column = best // side, best % side
    index = torch.arange(len(x))
    down = row + _top(window[index, :, column], row)
    right = column + _top(window[index, row], column)
    return torch.stack([down, right], 1) - reach + 0.5


def _draw(gaze: Tensor, generator: torch.Generator) -> Tensor:
    """Render skin, a bright ellipse, a dark disc at the gaze, and a glint on it."""
    import torch

    n = len(gaze)
    rows = (torch.arange(SIZE) + 0.5 - SIZE / 2).view(1, SIZE, 1)
    columns = rows.transpose(1, 2)
    axes = torch.tensor([8.0, 10.0]) + 1.5 * torch.rand(n, 2, generator=generator)
    tall, wide = (axes[:, i].view(n, 1, 1) for i in range(2))
    ellipse = ((1 - torch.hypot(rows / tall, columns / wide)) * tall + 0.5).clamp(0, 1)
    down, right = (gaze[:, i].view(n, 1, 1) for i in range(2))
    pupil = (PUPIL - torch.hypot(rows - down, columns - right) + 0.5).clamp(0, 1)
    glint = (0.9 - torch.hypot(rows - down + 1.1, columns - right - 1.1) + 0.5).clamp(0, 1)
    x = SKIN + 0.1 * torch.randn(n, 1, 1, generator=generator) + torch.zeros(n, SIZE, SIZE)
    for cover, level in ((ellipse, WHITE), (pupil, DARK), (glint, GLINT)):
        x = x + cover * (level - x)
    return x[:, None].clamp(-1, 1)


def _top(scores: Tensor, at: Tensor) -> Tensor:
    import torch

    inside = at.clamp(1, scores.shape[1] - 2)
    left, middle, right = (scores.gather(1, (inside + i)[:, None])[:, 0] for i in (-1, 0, 1))
    bend = (left - 2 * middle + right).clamp_max(-1e-9)
    return torch.where(inside == at, ((left - right) / (2 * bend)).clamp(-0.5, 0.5), torch.zeros_like(bend))


def matched(x: Tensor, real: Tensor, seed: int) -> Tensor:
    """Simulated images with the histogram of real ones, and noise added up to the level of real ones."""
    import torch

    order = x.flatten().argsort()
    levels = real.flatten().sort().values
    made = torch.empty_like(x).flatten()
    made[order] = levels[torch.linspace(0, len(levels) - 1, len(order)).long()]
    made = made.view_as(x)

    def fine(images: Tensor) -> float:
        blocks = images.unfold(2, 2, 2).unfold(3, 2, 2).flatten(-2)
        return float(blocks.var(-1).mean())

    sigma = max(fine(real) - fine(made), 0.0) ** 0.5
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(6000 + seed))
    return torch.as_tensor((made + sigma * noise).clamp(-1, 1))
