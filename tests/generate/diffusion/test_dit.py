"""Oracles for the diffusion transformer: a block written out, counted products, laws of its conditions, training."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from pydantic import TypeAdapter
from torch.utils.flop_counter import FlopCounterMode

import pippin
from pippin.core.errors import InvalidArgument
from pippin.generate.conditions import Conditioning, ConditioningSpec, Samples
from pippin.generate.diffusion.diffusion import Denoising, Diffusion, DiffusionConfig
from pippin.generate.diffusion.dit import DiT, DiTConfig
from pippin.generate.diffusion.schedules import NoiseSchedule
from pippin.train import AdamW, CosineSchedule, Trainer

SMALL = DiTConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, patch_size=2)
KINDS = ("dense", "expert_choice", "token_choice")
NOTHING = ConditioningSpec()


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def awake(config: DiTConfig, shape=(1, 8, 8), condition: ConditioningSpec = NOTHING, seed: int = 0) -> DiT:
    """A network whose closed branches and head are opened, so that everything in it shows."""
    network = config.build(shape, condition).initialize(seeded(seed))
    generator = seeded(seed + 1)
    with torch.no_grad():
        for parameter in network.parameters():
            if not parameter.any():
                parameter.normal_(0.0, 0.2, generator=generator)
    return network.eval()


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=seeded(seed))


def test_one_layer_is_the_published_block_written_out():
    network = awake(
        DiTConfig(
            hidden_size=8, num_hidden_layers=1, num_attention_heads=1, position_embedding="learned", qk_norm=False
        ),
        (1, 4, 4),
    )
    x, t = drawn(2, 1, 4, 4), torch.tensor([0.2, 0.9])
    with torch.no_grad():
        said = network(x, t)
        patches = x.unfold(2, 2, 2).unfold(3, 2, 2).reshape(2, 4, 4)
        tokens = patches @ network.into.weight.T + network.into.bias + network.position_embedding
        time = F.silu(network.time(t))
        block = network.blocks[0]
        shift, scale, gate, shift2, scale2, gate2 = (
            part[:, None] for part in (time @ block.adapt.weight.T + block.adapt.bias).chunk(6, -1)
        )
        seen = F.layer_norm(tokens, (8,)) * (1 + scale) + shift
        attention = block.attention
        q, k, v = (seen @ p.weight.T for p in (attention.q_proj, attention.k_proj, attention.v_proj))
        attended = (q @ k.transpose(1, 2) / 8**0.5).softmax(-1) @ v
        tokens = tokens + gate * (attended @ attention.o_proj.weight.T)
        seen = F.layer_norm(tokens, (8,)) * (1 + scale2) + shift2
        up, down = block.feed_forward.up_proj, block.feed_forward.down_proj
        inner = F.gelu(seen @ up.weight.T + up.bias, approximate="tanh")
        tokens = tokens + gate2 * (inner @ down.weight.T + down.bias)
        head = network.head
        shift, scale = (part[:, None] for part in (time @ head.adapt.weight.T + head.adapt.bias).chunk(2, -1))
        out = (F.layer_norm(tokens, (8,)) * (1 + scale) + shift) @ head.out.weight.T + head.out.bias
    wanted = F.fold(out.transpose(1, 2), (4, 4), 2, stride=2)
    torch.testing.assert_close(said, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_network_says_nothing_and_has_a_gradient(kind):
    network = replace(SMALL, feed_forward=kind).build((1, 8, 8), NOTHING).initialize(seeded(0))
    said = network(drawn(2, 1, 8, 8), torch.rand(2, generator=seeded(1)))
    assert not said.any()
    (said - 1).square().mean().backward()
    assert network.head.out.weight.grad.abs().max() > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kv_heads", [None, 1])
def test_multiplications_are_those_that_torch_counts(kind, kv_heads):
    config = DiTConfig(
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=kv_heads,
        intermediate_size=(24, 40, 32),
        feed_forward=kind,
        num_experts=3,
        capacity_factor=2,
    )
    network = awake(config, (3, 8, 12), ConditioningSpec(text_dim=5))
    text = Conditioning(text=drawn(1, 7, 5), text_mask=torch.ones(1, 7, dtype=torch.bool))
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        network(drawn(1, 3, 8, 12), torch.tensor([0.3]), text)
    assert counter.get_total_flops() == 2 * network.multiply_adds(text_tokens=7)


def test_experts_cost_what_a_dense_layer_of_capacity_times_the_width_costs_and_a_router():
    dense = DiTConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=(64, 128)).build(
        (1, 8, 8), NOTHING
    )
    for kind in ("expert_choice", "token_choice"):
        sparse = DiTConfig(
            hidden_size=16, num_hidden_layers=2, num_attention_heads=2, feed_forward=kind, num_experts=4
        ).build((1, 8, 8), NOTHING)
        assert sparse.multiply_adds() - dense.multiply_adds() == 16 * 16 * 4
        weights = [sum(p.numel() for p in network.parameters()) for network in (sparse, dense)]
        assert weights[0] > weights[1]


def test_every_second_layer_is_sparse():
    network = DiTConfig(hidden_size=8, num_hidden_layers=5, num_attention_heads=1, feed_forward="expert_choice").build(
        (1, 4, 4), NOTHING
    )
    names = [type(block.feed_forward).__name__ for block in network.blocks]
    assert names == ["FeedForward", "ExpertChoiceFFN"] * 2 + ["FeedForward"]


def test_places_are_told_apart_and_rotations_see_differences_only():
    x, t = drawn(1, 1, 8, 8), torch.tensor([0.5])
    learned = awake(DiTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, position_embedding="learned"))
    rotary = awake(DiTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, position_embedding="rotary"))
    both = awake(DiTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, position_embedding="both"))
    for network in (learned, rotary, both):
        turned = network(x.flip(-1), t)
        pixels = network(x, t).unfold(3, 2, 2).flip(3).flatten(3)  # patches in reverse order
        assert not torch.allclose(turned, pixels, atol=1e-3)
    # a constant image looks the same from every place where only differences of places are seen
    flat = rotary(torch.ones(1, 1, 8, 8), t)[0, 0]
    torch.testing.assert_close(flat[:2, :2].repeat(4, 4), flat, rtol=1e-4, atol=1e-5)
    for network in (learned, both):
        uneven = network(torch.ones(1, 1, 8, 8), t)[0, 0]
        assert not torch.allclose(uneven[:2, :2].repeat(4, 4), uneven, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_does_not_depend_on_its_batch(kind):
    network = awake(replace(SMALL, feed_forward=kind, capacity_factor=1.0))
    assert not network.mixes_samples
    x, t = drawn(4, 1, 8, 8), torch.rand(4, generator=seeded(2))
    alone = torch.cat([network(x[i : i + 1], t[i : i + 1]) for i in range(4)])
    torch.testing.assert_close(network(x, t), alone, rtol=1e-4, atol=1e-5)


def test_larger_groups_say_that_they_mix_samples():
    network = awake(
        DiTConfig(
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            feed_forward="expert_choice",
            capacity_factor=0.5,
            routing_group=32,
        )
    )
    assert network.mixes_samples
    x, t = drawn(4, 1, 8, 8), torch.full((4,), 0.5)
    assert not torch.allclose(network(x, t)[:2], network(torch.cat([x[:1], 5 * x[:1], x[2:]]), t)[:2])
    with pytest.raises(InvalidArgument, match="groups of 32 do not divide 1 images of 16 tokens"):
        network(x[:1], t[:1])


def test_maps_texts_classes_and_vectors_are_read_and_padding_is_not():
    spec = ConditioningSpec(num_classes=3, text_dim=4, map_channels=2, vector_dim=5, null=True)
    network = awake(SMALL, condition=spec)
    full = {
        "labels": torch.tensor([0, 1]),
        "text": drawn(2, 3, 4),
        "text_mask": torch.tensor([[True, True, False], [True, True, True]]),
        "map": drawn(2, 2, 8, 8, seed=3),
        "vector": drawn(2, 5, seed=4),
    }
    x, t = drawn(2, 1, 8, 8), torch.tensor([0.4, 0.6])
    said = network(x, t, Conditioning(**full))
    for name in ("text", "map", "vector"):
        other = network(x, t, Conditioning(**{**full, name: full[name] + 1}))
        assert (said - other).abs().max() > 1e-3
    other = network(x, t, Conditioning(**{**full, "labels": torch.tensor([2, 1])}))
    assert (said - other)[0].abs().max() > 1e-3
    torch.testing.assert_close(said[1], other[1])
    padded = full["text"].clone()
    padded[0, 2] += 7
    torch.testing.assert_close(network(x, t, Conditioning(**{**full, "text": padded})), said)
    # the tokens are read one by one, too, not as their mean alone
    swapped = torch.stack([full["text"][0], full["text"][1] + torch.tensor([[1.0], [-1.0], [0.0]])])
    assert (network(x, t, Conditioning(**{**full, "text": swapped})) - said)[1].abs().max() > 1e-4


# --- training ---------------------------------------------------------------------------------------------------------

WORDS = {"bright": 0, "dark": 1, "left": 2, "right": 3}


def told(seed: int, n: int) -> tuple[torch.Tensor, Conditioning]:
    """Images with one half filled, as a text of two words in either order says, of a made vocabulary."""
    vocabulary = F.one_hot(torch.arange(4), 4).float()
    generator = seeded(seed)
    bright, left, order = (torch.randint(0, 2, (n,), generator=generator).bool() for _ in range(3))
    x = torch.zeros(n, 1, 4, 4)
    level = torch.where(bright, 1.0, -1.0)[:, None, None]
    x[left, 0, :, :2] = level[left].expand(-1, 4, 2)
    x[~left, 0, :, 2:] = level[~left].expand(-1, 4, 2)
    level_word = torch.where(bright, WORDS["bright"], WORDS["dark"])
    side_word = torch.where(left, WORDS["left"], WORDS["right"])
    ids = torch.stack([torch.where(order, level_word, side_word), torch.where(order, side_word, level_word)], 1)
    return x, Conditioning(text=vocabulary[ids], text_mask=torch.ones(n, 2, dtype=torch.bool))


def test_a_network_learns_what_a_text_says():
    network = DiTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        feed_forward="expert_choice",
        num_experts=2,
        capacity_factor=1.0,
    )
    config = DiffusionConfig(
        (1, 4, 4), network, ConditioningSpec(text_dim=4, null=True), NoiseSchedule.flow(), prediction="flow", steps=6
    )
    model = Diffusion(config).initialize(0)
    batches = [Samples(*told(seed, 32)) for seed in range(90)]
    optimizer = AdamW(lr=1e-2, weight_decay=0.0)
    Trainer(
        model,
        Denoising(),
        batches,
        steps=90,
        optimizer=optimizer,
        schedule=CosineSchedule(warmup_steps=0.1),
        show_progress=False,
    ).fit()
    model.eval()
    wanted, condition = told(1000, 32)
    four = wanted.flatten(1).unique(dim=0)
    assert len(four) == 4

    def follows(samples: torch.Tensor) -> float:
        """The share of samples that are nearest to what their text says."""
        nearest = four[torch.cdist(samples.flatten(1), four).argmin(1)]
        return float((nearest == wanted.flatten(1)).all(1).float().mean())

    assert follows(model.sample(condition, seed=3)) >= 0.9
    assert follows(model.sample(condition.select(torch.arange(32).roll(1)), seed=3)) < 0.6  # the text of another image
    assert follows(model.sample(n=32, seed=3)) < 0.6  # no text


def test_the_balance_loss_is_in_the_objective_once_per_sample():
    balance = 0.5
    network = DiTConfig(
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        feed_forward="token_choice",
        num_experts=4,
        load_balancing_weight=balance,
    )
    model = Diffusion(DiffusionConfig((1, 8, 8), network, prediction="flow", schedule=NoiseSchedule.flow()))
    model.initialize(0).train()
    loss = Denoising()(model, Samples(drawn(6, 1, 8, 8).clamp(-1, 1)), seeded(1))
    added = float((loss.total - loss.metrics["error"]).detach()) / 6
    # two layers, each between 1 (even) and 4 (all to one expert)
    assert 2 * balance * 0.99 <= added <= 2 * balance * 4
    assert model.network.auxiliary_loss() is None  # taken once
    model.network(drawn(6, 1, 8, 8), torch.rand(6, generator=seeded(0)))
    layers = [block.feed_forward for block in model.network.blocks[1::2]]
    expected = balance * sum(float(layer.balance.detach()) for layer in layers)
    assert float(model.network.auxiliary_loss().detach()) == pytest.approx(expected)
    model.eval()
    model.network(drawn(2, 1, 8, 8), torch.rand(2, generator=seeded(0)))
    assert model.network.auxiliary_loss() is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_model_samples_the_same(kind, tmp_path):
    network = DiTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=(24, 32),
        feed_forward=kind,
        num_experts=2,
        capacity_factor=1.0,
    )
    config = DiffusionConfig(
        (1, 4, 4), network, ConditioningSpec(num_classes=2), NoiseSchedule.flow(), prediction="flow", steps=2
    )
    assert TypeAdapter(DiTConfig).validate_python(json.loads(TypeAdapter(DiTConfig).dump_json(network))) == network
    model = Diffusion(config)
    model.network.load_state_dict(awake(network, (1, 4, 4), config.condition).state_dict())
    model.eval().save(tmp_path / "model")
    again = pippin.load(tmp_path / "model", device="cpu")
    condition = Conditioning(labels=torch.tensor([0, 1]))
    assert again.config == config
    assert torch.equal(again.sample(condition, seed=4), model.sample(condition, seed=4))


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers must be"),
        ({"intermediate_size": (8, 8)}, "2 values of intermediate_size for 4 layers"),
        ({"feed_forward": "expert_choice", "moe_every": 9}, "moe_every=9 makes none of 4 layers sparse"),
        ({"feed_forward": "token_choice", "capacity_factor": 1.5}, "capacity_factor must be a whole number"),
    ],
)
def test_bad_configurations_are_named(options, message):
    with pytest.raises(InvalidArgument, match=message):
        DiTConfig(**options)


def test_bad_shapes_and_conditions_are_named():
    with pytest.raises(InvalidArgument, match=r"shape \(1, 9, 8\) are not cut into patches of 2"):
        SMALL.build((1, 9, 8), NOTHING)
    with pytest.raises(InvalidArgument, match="3 heads do not divide a width of 16"):
        DiTConfig(hidden_size=16, num_attention_heads=3).build((1, 8, 8), NOTHING)
    with pytest.raises(InvalidArgument, match=r"capacity is 3\.0; 2 experts"):
        DiTConfig(hidden_size=16, feed_forward="expert_choice", num_experts=2, capacity_factor=3.0).build(
            (1, 8, 8), NOTHING
        )
    network = awake(SMALL)
    with pytest.raises(InvalidArgument, match=r"shape \(3, 8, 8\); the network reads \(1, 8, 8\)"):
        network(drawn(1, 3, 8, 8), torch.zeros(1))
    with pytest.raises(InvalidArgument, match="no condition"):
        network(drawn(1, 1, 8, 8), torch.zeros(1), Conditioning(labels=torch.tensor([0])))
