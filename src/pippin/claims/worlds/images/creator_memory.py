"""Memory that an image creator estimates, and memory that a process uses, for images of any size."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

_CHILD = """
import sys
from pippin.claims.worlds.images.creator_memory import measured
print(*measured(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
"""


def measured(side: int, batch_size: int, device: str) -> tuple[float, float, float, float]:
    """Bytes estimated, bytes used, seconds estimated, and the share allocated when refused; needs a fresh process."""
    import torch

    from pippin.core.device import peak_memory
    from pippin.core.errors import OverMemoryBudget
    from pippin.generate.conditions import ConditioningSpec
    from pippin.generate.diffusion.diffusion import Diffusion, DiffusionConfig
    from pippin.generate.diffusion.unet import UNetConfig
    from pippin.kits.image import ImageCreator
    from pippin.kits.image.plan import LiveBytes

    def make(pixels: int, **settings: Any) -> ImageCreator:
        config = DiffusionConfig(
            (1, pixels, pixels), UNetConfig(base_channels=32, num_levels=2), ConditioningSpec(), steps=2
        )
        return ImageCreator(Diffusion(config).initialize(0).to(device).eval().requires_grad_(False), **settings)

    # what is loaded with the first images of any size
    list(make(16).images([], limit=batch_size, batch_size=batch_size))
    make(16).estimate([])
    before = peak_memory()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.max_memory_allocated()
    creator = make(side)
    cost = creator.estimate([], limit=batch_size, batch_size=batch_size)
    list(creator.images([], limit=batch_size, batch_size=batch_size))
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else peak_memory()
    small = make(side, memory_budget=cost.weight_bytes + cost.bytes_per_image // 2)
    with LiveBytes() as watch:
        try:
            small.images([])
            return cost.bytes, peak - before, cost.seconds, float("inf")
        except OverMemoryBudget:
            return cost.bytes, peak - before, cost.seconds, watch.peak / cost.bytes_per_image


def measured_apart(side: int, batch_size: int, device: str) -> tuple[float, float, float, float]:
    """Run `measured` in a fresh process."""
    command = [sys.executable, "-c", _CHILD, str(side), str(batch_size), device]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    estimate, used, seconds, allocated = map(float, output[-4:])
    return estimate, used, seconds, allocated
