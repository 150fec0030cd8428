"""The U-Net against a plain sum over its attention, and what must and must not reach its output."""

import math

import pytest
import torch

from pippin.core.errors import InvalidArgument
from pippin.generate.conditions import Conditioning, ConditioningSpec
from pippin.generate.diffusion.unet import UNet, UNetConfig, _Attention

SPEC = ConditioningSpec(num_classes=3, map_channels=2, vector_dim=4, null=True)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def stirred(config: UNetConfig, spec: ConditioningSpec = SPEC, shape: tuple[int, ...] = (1, 8, 8)) -> UNet:
    net = config.build(shape, spec).initialize(torch.Generator().manual_seed(0))
    with torch.no_grad():
        for index, parameter in enumerate(net.parameters()):
            parameter.add_(0.1 * normal(*parameter.shape, seed=index))
    return net


def condition(n: int) -> Conditioning:
    return Conditioning(labels=torch.arange(n) % 3, map=normal(n, 2, 8, 8, seed=1), vector=normal(n, 4, seed=2))


T = torch.tensor([0.2, 0.9])
FORMS = [
    UNetConfig(base_channels=8),
    UNetConfig(base_channels=8, patch_size=2),
    UNetConfig(base_channels=8, num_levels=3, blocks_per_level=2, attention=False),
    UNetConfig(base_channels=8, pool=False),
]


@pytest.mark.parametrize("config", FORMS)
def test_a_new_network_says_zero_and_learns_with_all_its_weights(config):
    net = config.build((1, 8, 8), SPEC).initialize(torch.Generator().manual_seed(0))
    x = normal(2, 1, 8, 8)
    assert bool((net(x, T, condition(2)) == 0).all())
    net = stirred(config)
    given = Conditioning.concatenate([condition(2), condition(2).null()])
    net(torch.cat([x, x]), torch.cat([T, T]), given).square().sum().backward()
    assert all(p.grad is not None and bool((p.grad != 0).any()) for p in net.parameters())


@pytest.mark.parametrize("config", FORMS)
def test_time_and_every_part_of_a_condition_matter_and_other_samples_do_not(config):
    net, x, said = stirred(config), normal(2, 1, 8, 8), condition(2)
    y = net(x, T, said)
    torch.testing.assert_close(net(x[1:], T[1:], said.select(slice(1, 2))), y[1:], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(net(x, T + 0.05, said), y, atol=1e-3)
    for name in ("labels", "map", "vector"):
        parts = {part: getattr(said, part) for part in ("labels", "map", "vector")}
        parts[name] = parts[name].roll(1, 0)
        assert not torch.allclose(net(x, T, Conditioning(**parts)), y, atol=1e-3), name
    torch.testing.assert_close(net(x, T), net(x, T, said.null()))


@torch.no_grad()
def test_a_change_of_the_map_is_felt_most_where_it_is():
    net = stirred(UNetConfig(base_channels=8, num_levels=1, attention=False))
    said = condition(1)
    moved = said.map.clone()
    moved[:, :, 0, 0] += 1.0
    x, t = normal(1, 1, 8, 8), T[:1]
    change = (net(x, t, Conditioning(said.labels, None, None, moved, said.vector)) - net(x, t, said)).abs()[0, 0]
    assert float(change[:4, :4].mean()) > 3 * float(change[4:, 4:].mean())


@torch.no_grad()
def test_attention_is_the_sum_over_all_places():
    layer, channels = _Attention(64), 64
    with torch.no_grad():
        for index, parameter in enumerate(layer.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=index) / 8)
    x = normal(1, channels, 2, 3)
    tokens = layer.norm(x)[0].flatten(1).T
    q, k, v = (tokens @ layer.into.weight.T + layer.into.bias).split(channels, 1)
    seen = torch.empty(6, channels)
    for head in range(2):
        part = slice(32 * head, 32 * head + 32)
        for i in range(6):
            weights = [math.exp(float(q[i, part] @ k[j, part]) / math.sqrt(32)) for j in range(6)]
            seen[i, part] = sum(w / sum(weights) * v[j, part] for j, w in enumerate(weights))
    wanted = x + (seen @ layer.out.weight.T + layer.out.bias).T.view(1, channels, 2, 3)
    torch.testing.assert_close(layer(x), wanted, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_other_sizes_go_through_and_the_seed_decides_the_weights():
    net = stirred(UNetConfig(base_channels=8), ConditioningSpec())
    assert net(normal(2, 1, 12, 20), T).shape == (2, 1, 12, 20)
    before = torch.random.get_rng_state()
    one, same, other = (
        UNetConfig(base_channels=8).build((1, 8, 8), SPEC).initialize(torch.Generator().manual_seed(seed))
        for seed in (0, 0, 1)
    )
    assert torch.equal(before, torch.random.get_rng_state())
    weights = [torch.cat([p.flatten() for p in net.parameters()]) for net in (one, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_the_usual_network_is_small():
    net = UNetConfig(base_channels=24, patch_size=2).build((1, 16, 16), ConditioningSpec())
    assert sum(p.numel() for p in net.parameters()) == pytest.approx(0.3e6, rel=0.05)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: UNetConfig(num_levels=0), "num_levels must be at least 1"),
        (lambda: UNetConfig(base_channels=12), "base_channels must be a multiple of 8, got 12"),
        (
            lambda: UNetConfig(num_levels=3, patch_size=2).build((1, 12, 16), SPEC),
            "12 by 16 pixels.*sides that 8 divides",
        ),
        (lambda: UNetConfig().build((4, 1, 8, 8), SPEC), r"not for samples of shape \(4, 1, 8, 8\)"),
        (lambda: stirred(UNetConfig(base_channels=8))(torch.zeros(2, 1, 7, 8), T, condition(2)), "7 by 8 pixels"),
        (
            lambda: stirred(UNetConfig(base_channels=8))(torch.zeros(3, 1, 8, 8), torch.ones(3), condition(2)),
            "of 2 samples",
        ),
    ],
)
def test_bad_sizes_are_named(make, message):
    with pytest.raises(InvalidArgument, match=message):
        make()
