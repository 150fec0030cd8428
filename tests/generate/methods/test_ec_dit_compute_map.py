"""Oracles for maps of work and for upcycling: counts by hand, the dense network itself, images read back, errors."""

import dataclasses

import pytest
import torch
from torch import nn

from pippin.core.errors import InvalidArgument
from pippin.generate.conditions import Conditioning, ConditioningSpec, Samples
from pippin.generate.diffusion.diffusion import Denoising, Diffusion, DiffusionConfig
from pippin.generate.diffusion.dit import DiT, DiTConfig
from pippin.generate.diffusion.schedules import NoiseSchedule
from pippin.generate.methods.ec_dit.compute_map import compute_map, plot_compute_map
from pippin.generate.methods.ec_dit.upcycling import upcycle

SPARSE = DiTConfig(
    hidden_size=16,
    num_hidden_layers=4,
    num_attention_heads=2,
    feed_forward="expert_choice",
    num_experts=4,
    capacity_factor=1.5,
)
DENSE = dataclasses.replace(SPARSE, feed_forward="dense")
CLASSES = ConditioningSpec(num_classes=3)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def awake(network: nn.Module, seed: int = 1) -> None:
    """Open what is closed at first, so that everything shows."""
    generator = seeded(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            if not parameter.any():
                parameter.normal_(0.0, 0.2, generator=generator)


def network_of(config: DiTConfig, condition: ConditioningSpec = CLASSES) -> DiT:
    network = config.build((1, 8, 12), condition).initialize(seeded(0))
    awake(network)
    return network


def diffusion_of(config: DiTConfig) -> Diffusion:
    flow = NoiseSchedule.flow()
    model = Diffusion(DiffusionConfig((1, 8, 12), config, CLASSES, flow, prediction="flow", steps=2)).initialize(0)
    awake(model)
    return model


X = torch.randn(3, 1, 8, 12, generator=seeded(5))
T = torch.tensor([0.1, 0.5, 0.9])
SHOWN = Conditioning(labels=torch.tensor([0, 1, 2]))


def test_maps_count_what_the_routers_chose_patch_by_patch():
    network = network_of(SPARSE)
    seen = {}
    for index, block in enumerate(network.blocks[1::2]):
        block.feed_forward.register_forward_hook(
            lambda layer, inputs, out, index=index: seen.update({index: (inputs[0] @ layer.router.T).softmax(-1)})
        )
    maps = compute_map(network, X, T, SHOWN)
    assert maps.shape == (3, 2, 4, 6)
    for layer in range(2):
        for picture in range(3):
            counts = torch.zeros(24, dtype=torch.long)
            for expert in range(4):
                counts[seen[layer][picture, :, expert].topk(9).indices] += 1
            assert torch.equal(maps[picture, layer].flatten(), counts)
    assert maps.sum((2, 3)).unique().tolist() == [36]  # 24 tokens, 1.5 experts each


def test_a_map_leaves_the_network_as_it_was_and_is_that_of_the_model_around_it():
    model = diffusion_of(SPARSE).train()
    maps = compute_map(model, X, 0.3, SHOWN)
    assert model.training
    layers = [block.feed_forward for block in model.network.blocks[1::2]]
    assert not any(layer.capture or layer.last_routing for layer in layers)
    assert torch.equal(maps, compute_map(model.network, X, torch.full((3,), 0.3), SHOWN))
    assert not torch.equal(maps, compute_map(model, X, 0.9, SHOWN))


def test_where_tokens_choose_every_patch_gets_the_same():
    config = dataclasses.replace(SPARSE, feed_forward="token_choice", capacity_factor=3)
    assert compute_map(network_of(config), X, 0.2, SHOWN).unique().tolist() == [3]


def test_the_drawing_shows_the_map(tmp_path):
    from matplotlib.image import imread

    low, high = (torch.full((2, 1, 4, 6), value) for value in (0, 4))
    low[:, :, 0, 0] = 4  # both drawings have the same scale
    for name, maps in (("low", low), ("high", high)):
        plot_compute_map(maps, X[:2].clamp(-1, 1), tmp_path / f"{name}.png")
    dark, light = (imread(tmp_path / f"{name}.png")[..., :3] for name in ("low", "high"))
    assert dark.shape == light.shape
    changed = abs(light - dark).max(-1) > 0.3
    assert 0.05 < changed.mean() < 0.8
    assert dark[changed].mean() < light[changed].mean()
    plot_compute_map(high[:1], X[:1].expand(1, 3, 8, 12), tmp_path / "colors.svg")
    assert (tmp_path / "colors.svg").read_text().count("<image") == 3  # image, map, scale


# --- upcycling --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("experts", "capacity", "every"), [(4, 2.0, 2), (8, 2.0, 1), (4, 1.0, 2), (3, 3.0, 2), (6, 2.0, 4)]
)
def test_an_upcycled_network_says_what_the_dense_one_says(experts, capacity, every):
    dense = network_of(DENSE)
    sparse = upcycle(dense, experts, capacity_factor=capacity, moe_every=every)
    assert sparse.config.feed_forward == "expert_choice"
    torch.testing.assert_close(sparse(X, T, SHOWN), dense(X, T, SHOWN), rtol=1e-5, atol=1e-5)
    weights = [sum(p.numel() for p in network.parameters()) for network in (sparse, dense)]
    assert weights[0] - weights[1] >= (experts - 1) * (2 * 16 * 64 + 64 + 16) * (4 // every)


def test_uneven_shares_are_close_and_noise_is_noise():
    dense = network_of(DENSE)
    said = dense(X, T, SHOWN)
    uneven = upcycle(dense, 5, capacity_factor=2.0)(X, T, SHOWN)  # 48 places for 24 tokens are 10 for each of 5 experts
    assert 1e-5 < (uneven - said).abs().max() < 0.5 * said.abs().max()
    noisy = [upcycle(dense, 4, noise=0.1, seed=seed) for seed in (0, 0, 1)]
    ups = [network.blocks[1].feed_forward.experts.up for network in noisy]
    assert torch.equal(ups[0], ups[1])
    assert not torch.equal(ups[0], ups[2])
    weight = dense.blocks[1].feed_forward.up_proj.weight
    spread = (ups[0] - weight.T).std() / weight.std()
    assert float(spread.detach()) == pytest.approx(0.1, rel=0.05)


def test_an_upcycled_model_samples_as_before_and_its_experts_learn_different_things():
    dense = diffusion_of(DENSE)
    dense.metadata["classes"] = ["a", "b", "c"]
    sparse = upcycle(dense, 4)
    assert sparse.config.network.gate_scale == 2.0
    assert sparse.metadata == dense.metadata
    torch.testing.assert_close(sparse.sample(SHOWN, seed=3), dense.sample(SHOWN, seed=3), rtol=1e-4, atol=1e-4)
    before = {name: tensor.clone() for name, tensor in dense.state_dict().items()}
    optimizer = torch.optim.AdamW(sparse.parameters(), lr=1e-2)
    objective, generator = Denoising(), seeded(0)
    for _ in range(3):
        loss = objective(sparse, Samples(X.clamp(-1, 1), SHOWN), generator)
        loss.total.backward()
        optimizer.step()
        optimizer.zero_grad()
    layer = sparse.network.blocks[1].feed_forward
    assert layer.router.abs().max() > 1e-3
    assert (layer.experts.up[0] - layer.experts.up[1]).abs().max() > 1e-3
    assert all(torch.equal(tensor, before[name]) for name, tensor in dense.state_dict().items())


# --- errors -----------------------------------------------------------------------------------------------------------


def test_errors_name_what_is_missing(tmp_path):
    with pytest.raises(InvalidArgument, match="no experts"):
        compute_map(network_of(DENSE), X, 0.2, SHOWN)
    with pytest.raises(InvalidArgument, match="Linear holds no DiT"):
        compute_map(nn.Linear(1, 1), X, 0.2)
    with pytest.raises(InvalidArgument, match="1 maps for 3 images"):
        plot_compute_map(torch.ones(1, 1, 4, 6, dtype=torch.long), X, tmp_path / "a.png")
    with pytest.raises(InvalidArgument, match="has experts already"):
        upcycle(network_of(SPARSE), 4)
    with pytest.raises(InvalidArgument, match="noise must be"):
        upcycle(network_of(DENSE), 4, noise=-1)
    with pytest.raises(InvalidArgument, match="capacity_factor must be at most num_experts=2"):
        upcycle(network_of(DENSE), 2, capacity_factor=3.0)
