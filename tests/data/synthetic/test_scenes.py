"""Oracles: scipy's connected components, areas of the shapes, and what was drawn, read back by the detector."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy import ndimage

from pippin.core.errors import InvalidArgument
from pippin.data.synthetic import scenes as made
from pippin.data.synthetic.scenes import (
    SceneObject,
    SceneSpec,
    SceneStream,
    cell_map,
    components,
    coverage,
    sample_scenes,
)

SPECS = {
    "gray": SceneSpec(),
    "cells": SceneSpec(cells=4, objects=(0, 3), radius=(1.2, 1.6), kinds=("square",)),
    "two grays": SceneSpec(size=32, colors=("white", "gray"), radius=(3, 4.5)),
    "colors": SceneSpec(size=32, colors=("red", "green", "blue", "white"), radius=(3, 4.5)),
    "dim": SceneSpec(size=24, cells=6, objects=(0, 8), radius=(1.0, 1.3), brightness=(0.6, 1.0), kinds=("disc",)),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_the_detector_reads_what_was_drawn(spec):
    batch = sample_scenes(spec, 100, seed=3)
    right = 0
    for found, things in zip(made.detect(batch.x, spec), batch.things, strict=True):
        kinds = Counter((one.thing.kind, one.thing.color) for one in found)
        right += kinds == Counter((thing.kind, thing.color) for thing in things)
        assert len(found) == len(things)
        places = np.array([(one.thing.row, one.thing.column) for one in found]).reshape(-1, 2)
        for thing in things:
            assert np.hypot(*(places - (thing.row, thing.column)).T).min() < 0.5
    assert right >= 98
    if spec.cells:
        assert torch.equal(made.cells(batch.x, spec), batch.presence)
    assert torch.equal(made.count(batch.x, spec), batch.counts)


def test_the_detector_sees_nothing_in_noise_and_what_is_missing():
    spec = SPECS["gray"]
    empty, _ = made.render(spec, [()])
    assert made.count(empty.float() / 127.5 - 1, spec).tolist() == [0]
    batch = sample_scenes(spec, 20, seed=1)
    erased = torch.where(batch.masks[:, None], -0.76, batch.x)
    assert float(made.count(erased, spec).float().mean()) < 0.5


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.floats(0.1, 0.9))
def test_components_are_scipys(seed, share):
    cover = np.random.default_rng(seed).random((2, 9, 11)) < share
    got = components(torch.from_numpy(cover))
    for mine, picture in zip(got.numpy(), cover, strict=True):
        theirs, number = ndimage.label(picture, np.ones((3, 3)))
        assert len(set(zip(mine.ravel(), theirs.ravel(), strict=True))) == number + (not picture.all())
        assert mine.max() == number


@pytest.mark.parametrize("kind", made.KINDS)
def test_shapes_of_one_radius_have_one_area(kind):
    cover = coverage(SceneObject(kind, 16, 16, 5), 32)
    assert cover.sum() == pytest.approx(np.pi * 25, rel=0.06)
    assert np.array_equal(cover, cover.T)


def test_scenes_follow_from_seed_and_number():
    spec = SPECS["colors"]
    whole, late = sample_scenes(spec, 6, seed=5), sample_scenes(spec, 2, seed=5, first=4)
    assert torch.equal(whole.images[4:], late.images)
    assert whole.things[4:] == late.things
    assert not torch.equal(whole.images, sample_scenes(spec, 6, seed=6).images)
    stream = SceneStream(spec, 2, seed=5)
    given = iter(stream)
    first, second = next(given), next(given)
    assert torch.equal(torch.cat([first.images, second.images]), whole.images[:4])
    again = SceneStream(spec, 2, seed=5)
    again.load_state_dict(stream.state_dict())
    assert torch.equal(next(iter(again)).images, late.images)


def test_numbers_of_objects_are_even_and_objects_lie_apart():
    batch = sample_scenes(SPECS["gray"], 600, seed=0)
    assert np.allclose(batch.counts.bincount(minlength=4)[1:] / 600, 1 / 3, atol=0.06)
    kinds = Counter(thing.kind for things in batch.things for thing in things)
    assert min(kinds.values()) > 0.28 * sum(kinds.values())
    parts = [ndimage.label(mask, np.ones((3, 3)))[1] for mask in batch.masks.numpy()]
    assert parts == batch.counts.tolist()


def test_maps_have_a_bump_where_an_object_is_to_be():
    presence = torch.zeros(1, 4, 4, dtype=torch.bool)
    assert float(cell_map(presence, 16).abs().max()) == 0
    presence[0, 1, 2] = True
    drawn = cell_map(presence, 16)[0, 0]
    row, column = divmod(int(drawn.argmax()), 16)
    assert (row // 4, column // 4) == (1, 2)
    assert torch.allclose(drawn[:12], drawn[:12].flip(0), atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"objects": (3, 2)}, "objects"),
        ({"objects": (0, 5), "cells": 2}, "4 cells"),
        ({"radius": (0.0, 1.0)}, "radius"),
        ({"radius": (2.0, 9.0)}, "radius"),
        ({"kinds": ("star",)}, "'star' is none"),
        ({"colors": ("pink",)}, "'pink' is none"),
        ({"noise": -1.0}, "noise must be"),
        ({"size": 2, "radius": (0.5, 1.0)}, "size must be"),
    ],
)
def test_scenes_that_cannot_be(change, message):
    with pytest.raises(InvalidArgument, match=message):
        SceneSpec(**change)


def test_other_mistakes():
    with pytest.raises(InvalidArgument, match="find no place"):
        sample_scenes(SceneSpec(objects=(9, 9), radius=(2.5, 2.8)), 1)
    for wrong in (lambda: sample_scenes(SceneSpec(), 0), lambda: SceneStream(SceneSpec(), 0)):
        with pytest.raises(InvalidArgument, match="at least 1"):
            wrong()
    with pytest.raises(InvalidArgument, match="have no cells"):
        made.cells(torch.zeros(1, 1, 16, 16), SceneSpec())


def test_captions_say_everything():
    assert made.caption(()) == "nothing"
    assert made.caption([SceneObject("disc", 1, 1, 1, "red")] * 3) == "three red discs"
    text = made.caption(
        [SceneObject("disc", 1, 1, 1), SceneObject("square", 1, 1, 1, "gray"), SceneObject("diamond", 1, 1, 1, "red")]
    )
    assert text == "one gray square, one red diamond and one white disc"
