"""The window of a local network is exactly what its configuration says, and nothing outside of it has any influence."""

import pytest
import torch
from jaxtyping import TypeCheckError

from pippin.core.errors import InvalidArgument
from pippin.generate.conditions import Conditioning, ConditioningSpec
from pippin.generate.diffusion.local_network import LocalNet, LocalNetConfig

NONE = ConditioningSpec()


def random_network(config: LocalNetConfig, spec: ConditioningSpec = NONE, size: int = 15) -> LocalNet:
    network = config.build((2, size, size), spec)
    network.initialize(torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    for parameter in network.parameters():  # the last layers begin at zero and would hide any influence
        parameter.data.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return network.eval()


def window(size: int, row: int, column: int, radius: int) -> torch.Tensor:
    rows, columns = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    return ((rows - row).abs() <= radius) & ((columns - column).abs() <= radius)


@pytest.mark.parametrize(("blocks", "radius"), [(1, None), (2, None), (2, 3), (3, 4), (2, 1)])
@pytest.mark.parametrize("padding", ["zeros", "reflect"])
def test_the_receptive_field_is_exactly_the_window(blocks, radius, padding):
    config = LocalNetConfig(channels=8, num_blocks=blocks, radius=radius, padding=padding)
    network = random_network(config, ConditioningSpec(map_channels=1))
    x = torch.randn(1, 2, 15, 15, generator=torch.Generator().manual_seed(2)).requires_grad_()
    drawn = torch.randn(1, 1, 15, 15, generator=torch.Generator().manual_seed(3)).requires_grad_()
    out = network(x, torch.tensor([0.4]), Conditioning(map=drawn))
    for row, column in ((7, 7), (0, 0), (2, 13)):
        for channel in (0, 1):
            of_x, of_map = torch.autograd.grad(out[0, channel, row, column], (x, drawn), retain_graph=True)
            inside = window(15, row, column, config.reach)
            assert not of_x[0, :, ~inside].any()
            assert not of_map[0, :, ~inside].any()
            if (row, column) == (7, 7):  # and the window is used to its corners
                assert of_x[0, :, inside].ne(0).all()
                assert of_map[0, :, inside].ne(0).all()


def test_a_distant_change_leaves_the_output_bit_for_bit_the_same():
    network = random_network(LocalNetConfig(channels=8, num_blocks=2))
    x = torch.randn(3, 2, 15, 15, generator=torch.Generator().manual_seed(2))
    changed = x.clone()
    changed[..., 12:, 12:] += 100.0
    before, after = (network(value, torch.full((3,), 0.7)) for value in (x, changed))
    assert torch.equal(before[..., :7, :], after[..., :7, :])
    assert not torch.equal(before[..., 7:, 7:], after[..., 7:, 7:])


def test_time_and_class_reach_every_pixel():
    network = random_network(LocalNetConfig(channels=8, num_blocks=1), ConditioningSpec(num_classes=3))
    x = torch.randn(1, 2, 15, 15, generator=torch.Generator().manual_seed(2))

    def draw(t: float, label: int) -> torch.Tensor:
        return network(x, torch.tensor([t]), Conditioning(labels=torch.tensor([label])))

    assert draw(0.2, 0).ne(draw(0.9, 0)).all()
    assert draw(0.2, 0).ne(draw(0.2, 1)).all()


def test_reflected_borders_hide_where_the_border_is():
    """A constant image stays constant with reflection; zeros outside show."""
    x = torch.full((1, 2, 15, 15), 0.3)
    flat = random_network(LocalNetConfig(channels=8, num_blocks=2, padding="reflect"))(x, torch.tensor([0.5]))
    seen = random_network(LocalNetConfig(channels=8, num_blocks=2, padding="zeros"))(x, torch.tensor([0.5]))
    torch.testing.assert_close(flat, flat[..., :1, :1].expand_as(flat), rtol=0, atol=1e-5)
    assert (seen - seen[..., :1, :1]).abs().max() > 1e-2


def test_no_condition_is_a_map_of_zeros_and_the_start_is_zero():
    network = LocalNetConfig(channels=8).build((2, 15, 15), ConditioningSpec(map_channels=1, num_classes=2, null=True))
    network.initialize(torch.Generator().manual_seed(0))
    x = torch.randn(2, 2, 15, 15, generator=torch.Generator().manual_seed(2))
    assert not network(x, torch.tensor([0.1, 0.9])).any()
    network = random_network(LocalNetConfig(channels=8), ConditioningSpec(map_channels=1, num_classes=2, null=True))
    nothing = Conditioning(labels=torch.tensor([-1, -1]), map=torch.zeros(2, 1, 15, 15))
    t = torch.tensor([0.1, 0.9])
    torch.testing.assert_close(network(x, t), network(x, t, nothing), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_blocks": 0}, "num_blocks must be at least 1"),
        ({"num_blocks": 2, "radius": 6}, "radius must be at most 5"),
    ],
)
def test_a_bad_configuration_names_the_value(arguments, message):
    with pytest.raises(InvalidArgument, match=message):
        LocalNetConfig(**arguments)


def test_a_word_that_is_none_of_the_choices_is_refused():
    """By our own check, or before it by that of types, which tests switch on."""
    with pytest.raises((InvalidArgument, TypeCheckError), match="circular"):
        LocalNetConfig(padding="circular")


def test_a_window_as_wide_as_the_picture_and_a_clip_are_refused():
    with pytest.raises(InvalidArgument, match="a radius of 7 pixels sees all of an image of 7 by 7"):
        LocalNetConfig(num_blocks=3).build((1, 7, 7), ConditioningSpec())
    with pytest.raises(InvalidArgument, match="is for images"):
        LocalNetConfig().build((4, 1, 16, 16), ConditioningSpec())
