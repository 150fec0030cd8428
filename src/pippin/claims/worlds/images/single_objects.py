"""Scenes of one small or large disc or none, a model trained on them, and its compositions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from pippin.data.synthetic.scenes import SceneSpec
    from pippin.generate.composition.compose import Composed
    from pippin.generate.conditions import Conditioning as GeneratorCondition
    from pippin.generate.diffusion.diffusion import Diffusion

CELLS = 4
RADII = {"small": (0.30, 0.36), "large": (0.65, 0.72)}
"""Of objects, in cells; large ones reach into the cells beside them."""


def scene_spec(side: int, kind: str) -> SceneSpec:
    """Scenes of one disc of that kind, or none."""
    from pippin.data.synthetic.scenes import SceneSpec

    low, high = (radius * side / CELLS for radius in RADII[kind])
    return SceneSpec(size=side, objects=(0, 1), cells=CELLS, kinds=("disc",), radius=(low, high))


def object_map(presence: Tensor, kind: str, side: int) -> GeneratorCondition:
    """A map of three channels: where a small object is, where a large one is, and whether one is anywhere."""
    import torch

    from pippin.data.synthetic.scenes import cell_map
    from pippin.generate.conditions import Conditioning

    maps = torch.zeros(len(presence), 3, side, side)
    maps[:, list(RADII).index(kind)] = cell_map(presence, side)[:, 0]
    return Conditioning(map=maps)


def backgrounds(side: int) -> dict[str, GeneratorCondition]:
    """The empty scene, and any one object of either size."""
    import torch

    from pippin.generate.conditions import Conditioning

    anywhere = torch.tensor([0.0, 0.0, 1.0]).view(1, 3, 1, 1).expand(1, 3, side, side)
    return {"empty": Conditioning(map=0 * anywhere), "unconditional": Conditioning(map=anywhere)}


def single_object_model(side: int, width: int, steps: int, pool_size: int, batch: int, seed: int) -> Diffusion:
    """Train a model of single objects, small and large; the position is dropped from a quarter of the conditions."""
    import torch

    from pippin.claims.worlds.images.composed_scenes import Pool, trained
    from pippin.data.synthetic.scenes import Scenes, sample_scenes
    from pippin.generate.conditions import Conditioning, ConditioningSpec
    from pippin.generate.diffusion.unet import UNetConfig

    kinds = {
        kind: sample_scenes(scene_spec(side, kind), pool_size // 2, seed=100 * index + seed)
        for index, kind in enumerate(RADII)
    }
    images, masks = (torch.cat([getattr(part, name) for part in kinds.values()]) for name in ("images", "masks"))
    things = tuple(thing for part in kinds.values() for thing in part.things)
    pool = Scenes(images, masks, things, kinds["small"].spec)
    maps = torch.cat([object_map(part.presence, kind, side).map for kind, part in kinds.items()])  # type: ignore[misc]

    def condition(rows: Tensor, generator: torch.Generator) -> GeneratorCondition:
        condition_maps = maps[rows].clone()
        unsaid = (torch.rand(len(rows), generator=generator) < 0.25) & (pool.counts[rows] > 0)
        condition_maps[unsaid] = torch.tensor([0.0, 0.0, 1.0]).view(3, 1, 1)
        return Conditioning(map=condition_maps)

    network, data = UNetConfig(base_channels=width, attention=False), Pool(pool, condition, batch, seed)
    return trained(network, ConditioningSpec(map_channels=3), data, steps=steps, rate=2e-3, seed=seed)


def composed_of(model: Diffusion, cells: Tensor, kind: str, background: GeneratorCondition) -> Composed:
    """One part for each object; ``cells`` says which cells hold one, the same number in each scene."""
    import torch

    from pippin.generate.composition.compose import compose

    flat = cells.flatten(1)
    places = flat.nonzero()[:, 1].view(len(flat), -1).T
    alone = [torch.zeros_like(flat).scatter(1, place[:, None], True).view_as(cells) for place in places]
    return compose([object_map(one, kind, model.shape[-1]) for one in alone], background, of=model)


def picture_error(x: Tensor, kind: str, cells: tuple[tuple[int, int], ...], side: int) -> float:
    """How far images are from the union of the objects, over how far that is from the empty scene."""
    from pippin.data.synthetic.scenes import SceneObject, render

    pitch, radius, spec = side / CELLS, sum(RADII[kind]) / 2 * side / CELLS, scene_spec(side, kind)
    things = [SceneObject("disc", (row + 0.5) * pitch, (column + 0.5) * pitch, radius) for row, column in cells]
    wanted, empty = (render(spec, [some])[0].float() / 127.5 - 1 for some in (things, []))
    return math.sqrt(float((x.cpu() - wanted).square().mean() / (wanted - empty).square().mean()))
