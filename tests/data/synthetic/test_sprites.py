"""Made sprites: their numbers, where they are drawn, and that every combination of factors is another image."""

import itertools

import pytest
import torch

from pippin.core.errors import InvalidArgument, InvalidInput
from pippin.data.synthetic.sprites import FACTORS, Sprites, SpriteSpec


@pytest.fixture(scope="module")
def sprites():
    return Sprites(SpriteSpec(size=16, scales=2, xs=4, ys=4))


def test_factors_are_all_combinations_in_order(sprites):
    expected = list(itertools.product(*map(range, sprites.spec.counts)))
    assert sprites.factors(torch.arange(len(sprites))).tolist() == [list(row) for row in expected]


def test_every_combination_is_another_picture(sprites):
    pictures = sprites.images(torch.arange(len(sprites)))
    assert len(torch.unique(pictures.flatten(1), dim=0)) == len(sprites) == 3 * 2 * 8 * 4 * 4
    assert float(pictures.min()) == 0
    assert float(pictures.max()) == 1


def test_no_sprite_touches_the_border_of_its_picture():
    for size in (32, 64):
        spec = SpriteSpec(size, scales=1, xs=2, ys=2)
        largest = Sprites(SpriteSpec(size, scales=4, rotations=8, xs=2, ys=2))
        numbers = torch.arange(len(largest))
        numbers = numbers[largest.factors(numbers)[:, 1] == 3]
        pictures = largest.images(numbers)
        edge = torch.cat([pictures[..., 0, :], pictures[..., -1, :], pictures[..., 0], pictures[..., -1]])
        assert float(edge.max()) == 0
        assert Sprites(spec).images(torch.tensor([0])).shape == (1, 1, size, size)


def test_the_middle_of_the_ink_moves_with_x_and_y_and_its_amount_with_the_square_of_scale():
    sprites = Sprites(SpriteSpec(size=64, scales=3, rotations=1, xs=5, ys=5))
    numbers = torch.arange(len(sprites))
    factors, pictures = sprites.factors(numbers), sprites.images(numbers)[:, 0]
    ink = pictures.sum((1, 2))
    grid = (torch.arange(64) + 0.5) / 64
    across = (pictures.sum(1) * grid).sum(1) / ink
    down = (pictures.sum(2) * grid).sum(1) / ink
    for shape in range(3):
        for axis, middle in (("x", across), ("y", down)):
            for scale in range(3):
                column = FACTORS.index(axis)
                these = (factors[:, 0] == shape) & (factors[:, 1] == scale)
                steps = [float(middle[these & (factors[:, column] == value)].mean()) for value in range(5)]
                gaps = torch.tensor(steps).diff()
                torch.testing.assert_close(gaps, torch.full((4,), 0.125), rtol=0, atol=2e-3)
        amounts = [float(ink[(factors[:, 0] == shape) & (factors[:, 1] == scale)].mean()) for scale in range(3)]
        assert amounts[0] / amounts[2] == pytest.approx(0.36, rel=0.05)
        assert amounts[1] / amounts[2] == pytest.approx(0.64, rel=0.05)


def test_a_quarter_turn_turns_the_picture():
    sprites = Sprites(SpriteSpec(size=32, scales=1, rotations=4, xs=1, ys=1))
    for shape in range(3):
        upright, turned = sprites.images(torch.tensor([4 * shape, 4 * shape + 1]))[:, 0]
        torch.testing.assert_close(torch.rot90(upright, -1), turned, rtol=0, atol=0.12)
        assert float((upright - turned).abs().max()) > 0.5


def test_draws_follow_the_generator(sprites):
    one, other = (sprites.sample(8, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(one[0], other[0])
    assert torch.equal(one[1], other[1])
    strides = torch.tensor([2 * 8 * 16, 8 * 16, 16, 4, 1])
    torch.testing.assert_close(sprites.images((one[1] * strides).sum(1)), one[0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": 4}, "size must be at least 8"),
        ({"shapes": 4}, "shapes must be from 1 to 3"),
        ({"xs": 0}, "xs must be"),
    ],
)
def test_bad_specifications_are_refused(settings, message):
    with pytest.raises(InvalidArgument, match=message):
        SpriteSpec(**settings)


@pytest.mark.parametrize("number", [-1, 768])
def test_a_number_without_a_picture_is_refused(sprites, number):
    with pytest.raises(InvalidInput, match=f"no sprite {number}"):
        sprites.images(torch.tensor([0, number]))


def test_no_number_gives_no_picture(sprites):
    assert sprites.images(torch.zeros(0, dtype=torch.long)).shape == (0, 1, 16, 16)
