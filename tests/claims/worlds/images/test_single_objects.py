"""Scenes of single objects: the error of images against the union of the objects, and the two backgrounds."""

import pytest
import torch

from pippin.claims.worlds.images.single_objects import CELLS, backgrounds, object_map, picture_error, scene_spec
from pippin.data.synthetic.scenes import SceneObject, render


def test_the_union_has_no_error_and_the_empty_scene_has_one():
    side, cells, spec = 16, ((0, 0), (3, 3)), scene_spec(16, "small")
    pitch, radius = side / CELLS, 0.33 * side / CELLS
    things = [SceneObject("disc", (row + 0.5) * pitch, (column + 0.5) * pitch, radius) for row, column in cells]
    union, empty = (render(spec, [some])[0].float() / 127.5 - 1 for some in (things, []))
    assert picture_error(union, "small", cells, side) == pytest.approx(0, abs=1e-6)
    assert picture_error(empty, "small", cells, side) == pytest.approx(1)


def test_kinds_have_channels_of_their_own_and_the_backgrounds_differ_in_the_third():
    presence = torch.zeros(1, CELLS, CELLS, dtype=torch.bool)
    presence[0, 1, 2] = True
    small, large = (object_map(presence, kind, 16).map for kind in ("small", "large"))
    assert torch.equal(small[:, 0], large[:, 1])
    assert float(small[:, 1:].abs().sum()) == 0 == float(large[:, [0, 2]].abs().sum())
    empty, anywhere = (condition.map for condition in backgrounds(16).values())
    assert not empty.any()
    assert torch.equal(anywhere[:, 2], torch.ones(1, 16, 16))
    assert not anywhere[:, :2].any()
