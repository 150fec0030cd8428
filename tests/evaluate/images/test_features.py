"""The small extractor on synthetic scenes: it counts, it separates degraded images, distances follow."""

import pytest
import torch
import torch.nn.functional as F

from pippin.core.errors import InvalidArgument, InvalidInput
from pippin.data.synthetic.scenes import SceneSpec, sample_scenes
from pippin.evaluate.images.features import Features, Pixels, scene_features, train_features
from pippin.evaluate.images.sample_quality import frechet_distance

SPEC = SceneSpec()


@pytest.fixture(scope="module")
def features():
    return scene_features(SPEC, steps=120)


@pytest.fixture(scope="module")
def real():
    return sample_scenes(SPEC, 500, seed=1)


def blurred(x: torch.Tensor, share: float) -> torch.Tensor:
    return x.lerp(F.avg_pool2d(F.pad(x, (1, 1, 1, 1), mode="replicate"), 3, 1), share)


def test_the_extractor_counts_and_tells_how_pictures_were_spoilt(features, real):
    said = features.outputs(real.x)
    assert (said[:, :3].sum(1) - real.counts).abs().mean() < 0.4 * (
        real.counts - real.counts.float().mean()
    ).abs().mean()
    noisy = real.x + 0.2 * torch.randn(real.x.shape, generator=torch.Generator().manual_seed(0))
    assert (features.outputs(noisy)[:, -1] - said[:, -1]).mean() > 0.2
    assert (features.outputs(blurred(real.x, 1.0))[:, -2] - said[:, -2]).mean() > 0.4


def test_features_are_scaled_and_one_picture_does_not_change_another(features, real):
    rows = features(real.x)
    assert isinstance(features, Features)
    assert rows.shape == (500, features.dim)
    assert not rows.requires_grad
    assert rows.mean(0).abs().max() < 0.3
    assert 0.7 < rows.std(0).median() < 1.3
    torch.testing.assert_close(features(real.x[3:5]), rows[3:5], atol=1e-4, rtol=1e-4)


def test_distances_grow_with_blur_noise_and_wrong_contents(features, real):
    base, more = features(real.x), sample_scenes(SPEC, 500, seed=2).x
    noise = torch.randn(more.shape, generator=torch.Generator().manual_seed(0))

    def distance(x):
        return frechet_distance(features(x), base)

    by_blur = [distance(blurred(more, share)) for share in (0.0, 0.2, 0.5, 1.0)]
    by_noise = [distance(more + level * noise) for level in (0.0, 0.1, 0.2, 0.4)]
    assert by_blur == sorted(by_blur)
    assert by_noise == sorted(by_noise)
    assert distance(sample_scenes(SceneSpec(objects=(1, 2)), 500, seed=3).x) > 2 * by_blur[0]
    assert distance(sample_scenes(SceneSpec(kinds=("disc",)), 500, seed=3).x) > 1.5 * by_blur[0]


def test_scene_features_are_kept_for_the_process(features):
    assert scene_features(SPEC, steps=120) is features


def test_features_follow_from_their_seed():
    x = sample_scenes(SPEC, 40, seed=4).x
    first, again, other = (train_features(x, steps=3, batch_size=8, seed=seed)(x) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_without_labels_it_learns_how_pictures_were_turned():
    ramp = torch.linspace(-1, 1, 8).expand(8, 8)
    pictures = (ramp + 0.1 * torch.randn(64, 1, 8, 8, generator=torch.Generator().manual_seed(0))).clamp(-1, 1)
    learned = train_features(pictures, dim=8, steps=80, batch_size=32)
    for turn in range(4):
        said = learned.outputs(pictures.rot90(turn, (2, 3)))[:, :4]
        assert (said.argmax(1) == turn).float().mean() > 0.9


def test_classes_are_learned_and_the_callers_randomness_is_left_alone():
    labels = torch.arange(60) % 3
    pictures = labels.view(-1, 1, 1, 1).float().expand(60, 1, 8, 8) - 1
    before = torch.random.get_rng_state()
    learned = train_features(pictures.contiguous(), labels, dim=16, steps=150, batch_size=16)
    assert torch.equal(before, torch.random.get_rng_state())
    assert (learned.outputs(pictures)[:, :3].argmax(1) == labels).all()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda f: f(torch.zeros(2, 1, 8, 8)), InvalidArgument, r"\(1, 8, 8\).*\(1, 16, 16\)"),
        (lambda f: f(torch.zeros(0, 1, 16, 16)), InvalidInput, "no image"),
        (lambda f: f(torch.zeros(1, 1, 16, 16, dtype=torch.uint8)), InvalidInput, "uint8.*127.5"),
        (lambda f: f(torch.full((1, 1, 16, 16), torch.nan)), InvalidInput, "NaN"),
        (lambda f: Pixels((1, 4, 4))(torch.zeros(2, 1, 8, 8)), InvalidArgument, r"\(1, 8, 8\)"),
        (lambda f: train_features(torch.zeros(4, 1, 4, 4)), InvalidArgument, "8 by 8"),
        (lambda f: train_features(torch.zeros(4, 1, 8, 10)), InvalidArgument, "cannot be rotated"),
        (lambda f: train_features(torch.zeros(4, 1, 8, 8), steps=0), InvalidArgument, "steps must be"),
        (lambda f: train_features(torch.zeros(4, 1, 8, 8), torch.zeros(3, dtype=torch.long)), InvalidInput, "3 labels"),
    ],
)
def test_bad_input_names_the_value(features, call, error, message):
    with pytest.raises(error, match=message):
        call(features)
