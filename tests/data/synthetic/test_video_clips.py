"""Videos against a ball that is moved frame by frame, and the tracker against where objects were put."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from pippin.core.errors import InvalidArgument
from pippin.data.synthetic.scenes import SceneSpec, detect
from pippin.data.synthetic.video_clips import (
    VideoClipSpec,
    VideoClipStream,
    bounced,
    direction,
    sample_video_clips,
    track,
)

SPEC = VideoClipSpec(frames=12)


def test_places_are_those_of_a_ball_that_turns_at_the_walls():
    rng = np.random.default_rng(0)
    for _ in range(50):
        room, at, step = rng.uniform(2, 9), rng.uniform(0, 2), rng.uniform(-3, 3)
        places, here, going = [], at, step
        for _ in range(40):
            places.append(here)
            here += going
            while not 0 <= here <= room:  # a fast ball turns more than once
                here, going = (-here if here < 0 else 2 * room - here), -going
        np.testing.assert_allclose(bounced(np.array(at), np.array(step), 40, room), places, atol=1e-9)


def test_objects_stay_inside_keep_their_speed_and_are_found_where_they_are():
    drawn = sample_video_clips(SPEC, 24, seed=3)
    centers = drawn.centers[:, :, 0]
    assert centers.min() >= SPEC.edge - 1e-5
    assert centers.max() <= 16 - SPEC.edge + 1e-5
    steps = centers.diff(dim=1)
    speed = drawn.velocities[:, 0].norm(dim=-1)
    # on each axis a step is the full one, or shorter where the wall was met in between
    full = drawn.velocities[:, 0].abs()[:, None]
    assert bool((steps.abs() <= full + 1e-4).all())
    assert bool(((steps.abs() - full).abs() < 1e-4).float().mean() > 0.7)
    assert bool(((speed >= SPEC.speed[0]) & (speed <= SPEC.speed[1])).all())
    found = track(drawn.x, SPEC.scene)
    off = (found.centers - centers).norm(dim=-1)
    assert float(off.max()) < 0.25
    assert float(off.mean()) < 0.07
    assert bool(found.visible.all())
    kinds = [parts[0].thing.kind for parts in detect(drawn.x[:, 0], SPEC.scene)]
    assert np.mean([kind == things[0].kind for kind, things in zip(kinds, drawn.things, strict=True)]) > 0.9


def test_a_clip_follows_from_seed_and_number_and_a_longer_one_begins_with_it():
    some = sample_video_clips(SPEC, 4, seed=5)
    assert torch.equal(sample_video_clips(SPEC, 2, seed=5, first=2).images, some.images[2:])
    longer = sample_video_clips(VideoClipSpec(frames=20), 4, seed=5)
    assert torch.equal(longer.images[:, :12], some.images)
    assert not torch.equal(sample_video_clips(SPEC, 4, seed=6).images, some.images)
    stream = VideoClipStream(SPEC, 2, seed=5)
    first, second = itertools.islice(stream, 2)
    assert torch.equal(torch.cat([first.images, second.images]), some.images)
    other = VideoClipStream(SPEC, 2, seed=5)
    other.load_state_dict({"given": 1})
    assert torch.equal(next(iter(other)).images, second.images)
    assert stream.state_dict() == {"given": 2}


def test_captions_tell_kind_and_direction():
    drawn = sample_video_clips(SPEC, 32, seed=1)
    for text, things, velocity in zip(drawn.captions, drawn.things, drawn.velocities[:, 0].tolist(), strict=True):
        assert text.startswith(f"one white {things[0].kind}, moving ")
        down, right = velocity
        way = ("down" if down > 0 else "up") if abs(down) > abs(right) else ("right" if right > 0 else "left")
        assert text.endswith(way)
    assert drawn.kinds.tolist() == [SPEC.scene.kinds.index(things[0].kind) for things in drawn.things]


def test_several_objects_and_none_at_all():
    scene = SceneSpec(size=24, objects=(0, 3))
    drawn = sample_video_clips(VideoClipSpec(scene, frames=3), 16, seed=2)
    numbers = [len(things) for things in drawn.things]
    assert set(numbers) == {0, 1, 2, 3}
    there = ~drawn.centers[:, 0, :, 0].isnan()
    assert there.sum(1).tolist() == numbers
    empty = track(drawn.x, scene)
    assert [bool(here) for here in empty.visible[:, 0]] == [number > 0 for number in numbers]
    none = numbers.index(0)
    assert drawn.captions[none] == "nothing"
    assert int(drawn.kinds[none]) == -1
    assert bool(empty.speeds[none].isnan().all())
    celled = sample_video_clips(VideoClipSpec(SceneSpec(size=24, objects=(4, 4), cells=2), frames=1), 1).centers[0, 0]
    assert sorted(map(tuple, celled.tolist())) == [(6.0, 6.0), (6.0, 18.0), (18.0, 6.0), (18.0, 18.0)]


def test_direction_of_the_axes():
    steps = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, -1.0], [-1.0, 0.0]])
    assert direction(steps).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: VideoClipSpec(frames=0), "frames must be"),
        (lambda: VideoClipSpec(speed=(2.0, 1.0)), r"speed=\(2.0, 1.0\)"),
        (lambda: VideoClipSpec(speed=(0.0, 9.0)), "half of the size 16"),
        (lambda: VideoClipSpec(SceneSpec(size=8, radius=(3.8, 3.8))), "cannot move in 8 pixels"),
        (lambda: sample_video_clips(SPEC, 0), "n must be"),
        (lambda: VideoClipStream(SPEC, 0), "batch_size must be"),
        (lambda: sample_video_clips(VideoClipSpec(SceneSpec(objects=(9, 9), radius=(2.5, 2.5))), 1), "find no place"),
    ],
)
def test_bad_arguments_are_named(make, message):
    with pytest.raises(InvalidArgument, match=message):
        make()
