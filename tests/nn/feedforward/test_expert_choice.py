"""Oracles for routed feed-forward layers: loops over tokens and experts, a dense layer, invariances, errors."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import Tensor

from pippin.core.errors import InvalidArgument
from pippin.nn.feedforward.expert_choice import ExpertChoiceFFN, Experts, TokenChoiceFFN, choose_tokens
from pippin.nn.images.adaptive_norm import AdaptiveBlock, BidirectionalCache
from pippin.nn.kv_cache import NoCache
from pippin.nn.recurrent.states import RecurrentState


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed))


def one_expert(experts: Experts, index: int, x: Tensor) -> Tensor:
    """A feed-forward layer written out for one vector."""
    inner = F.gelu(x @ experts.up[index] + experts.up_bias[index, 0], approximate="tanh")
    return inner @ experts.down[index] + experts.down_bias[index, 0]


def with_biases(layer, seed: int = 9):
    with torch.no_grad():
        for bias in (layer.experts.up_bias, layer.experts.down_bias):
            bias.normal_(generator=seeded(seed))
    return layer


def expert_choice_by_hand(layer: ExpertChoiceFFN, x: Tensor, present: Tensor | None = None) -> Tensor:
    """Picture by picture, expert by expert, token by token."""
    out = torch.zeros_like(x)
    for picture in range(len(x)):
        there = [s for s in range(x.shape[1]) if present is None or present[picture, s]]
        affinity = (x[picture] @ layer.router.T).softmax(-1)
        most = math.ceil(len(there) * layer.capacity / layer.experts.count)
        for expert in range(layer.experts.count):
            best = sorted(there, key=lambda s: -affinity[s, expert].item())[:most]
            for s in best:
                answer = one_expert(layer.experts, expert, x[picture, s])
                out[picture, s] += layer.gate_scale * affinity[s, expert] * answer
    return out


def layer_of(width: int = 6, experts: int = 4, **options) -> ExpertChoiceFFN:
    layer = ExpertChoiceFFN(width, 10, experts, **options)
    layer.initialize(seeded(1))
    return with_biases(layer)


@settings(deadline=None, max_examples=15)
@given(
    tokens=st.integers(1, 9),
    experts=st.integers(1, 5),
    quarters=st.integers(1, 20),
    scale=st.floats(0.5, 3.0),
    seed=st.integers(0, 99),
)
def test_expert_choice_equals_the_loop_over_pictures_experts_and_tokens(tokens, experts, quarters, scale, seed):
    layer = layer_of(experts=experts, capacity=min(quarters / 4, experts), gate_scale=scale)
    x = drawn(3, tokens, 6, seed=seed)
    torch.testing.assert_close(layer(x), expert_choice_by_hand(layer, x), rtol=1e-5, atol=1e-5)


def test_gradients_equal_those_of_the_loop():
    layer, x = layer_of(capacity=2.0), drawn(2, 8, 6)
    aim = drawn(2, 8, 6, seed=5)
    parameters = list(layer.parameters())
    fast = torch.autograd.grad((layer(x) * aim).sum(), parameters)
    slow = torch.autograd.grad((expert_choice_by_hand(layer, x) * aim).sum(), parameters)
    for one, other in zip(fast, slow, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert float(fast[0].abs().max()) > 1e-3  # the router learns through the gates


def test_every_expert_takes_exactly_its_share_of_every_picture():
    layer, x = layer_of(capacity=1.5), drawn(5, 7, 6)
    layer.capture = True
    layer(x)
    routing = layer.last_routing
    most = math.ceil(7 * 1.5 / 4)
    assert routing.indices.shape == (5, 4, most)
    assert routing.per_expert.tolist() == [5 * most] * 4
    assert routing.per_token.sum(1).tolist() == [4 * most] * 5
    for picture in range(5):
        counted = [sum(s in taken for taken in routing.indices[picture].tolist()) for s in range(7)]
        assert routing.per_token[picture].tolist() == counted
    affinity = (x @ layer.router.T).softmax(-1)
    torch.testing.assert_close(routing.gates, affinity.transpose(1, 2).gather(2, routing.indices))


def test_a_picture_alone_is_the_picture_in_a_batch():
    layer, x = layer_of(capacity=2.0), drawn(6, 8, 6)
    together = layer(x)
    alone = torch.cat([layer(x[i : i + 1]) for i in range(6)])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-6)


def test_larger_groups_make_neighbors_matter_and_equal_one_long_picture():
    layer, x = layer_of(capacity=1.0), drawn(4, 6, 6)
    own = layer(x)
    layer.group = 12
    paired = layer(x)
    assert not torch.allclose(own, paired)
    layer.group = "image"
    torch.testing.assert_close(paired, layer(x.view(2, 12, 6)).view(4, 6, 6))


def test_moving_tokens_moves_the_results():
    layer, x = layer_of(capacity=1.5), drawn(2, 9, 6)
    order = torch.randperm(9, generator=seeded(3))
    torch.testing.assert_close(layer(x)[:, order], layer(x[:, order]), rtol=0, atol=1e-6)


def test_one_expert_with_every_token_is_a_dense_layer():
    layer, x = layer_of(experts=1, capacity=1.0), drawn(2, 5, 6)
    torch.testing.assert_close(layer(x), one_expert(layer.experts, 0, x))


def test_tokens_that_are_not_there_change_nothing():
    layer, x = layer_of(capacity=2.0), drawn(3, 8, 6)
    mask = torch.tensor([[1] * 8, [1] * 5 + [0] * 3, [0, 1, 0, 1, 1, 0, 0, 0]]).bool()
    out = layer(x, mask)
    torch.testing.assert_close(out, expert_choice_by_hand(layer, x, mask), rtol=1e-5, atol=1e-5)
    assert not out[~mask].any()
    torch.testing.assert_close(out[1, :5], layer(x[1:2, :5])[0])
    noisy = torch.where(mask[..., None], x, 100 * drawn(3, 8, 6, seed=8))
    torch.testing.assert_close(layer(noisy, mask), out)
    nothing = layer(x[:1], torch.zeros(1, 8, dtype=torch.bool))
    assert not nothing.any()


@pytest.mark.parametrize(("tokens", "experts", "capacity"), [(8, 4, 2.0), (12, 4, 1.0), (6, 3, 2.0), (4, 8, 6.0)])
def test_a_router_of_zeros_gives_every_token_to_equally_many_experts(tokens, experts, capacity):
    flat = torch.full((2, tokens, experts), 1 / experts)
    for present in (None, torch.ones(2, tokens, dtype=torch.bool)):
        indices, _ = choose_tokens(flat, capacity, present)
        for picture in indices:
            assert picture.flatten().bincount(minlength=tokens).tolist() == [int(capacity)] * tokens


def test_padding_does_not_move_what_is_settled_by_position():
    flat = torch.full((1, 10, 2), 0.5)
    present = torch.tensor([[0, 1, 1, 0, 1, 1, 1, 1, 0, 0]]).bool()
    places = present[0].nonzero()[:, 0]
    padded, gates = choose_tokens(flat, 1.0, present)
    packed, _ = choose_tokens(flat[:, :6], 1.0)
    assert torch.equal(padded[..., :3], places[packed])
    assert not gates[..., 3:].any()


def test_the_router_stays_in_float32_under_autocast():
    layer, x = layer_of(width=64, experts=8, capacity=2.0), drawn(2, 16, 64)
    layer.capture = True
    layer(x)
    before = layer.last_routing.indices
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    assert torch.equal(before, layer.last_routing.indices)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, layer(x), rtol=0.05, atol=0.05)


@settings(deadline=None, max_examples=10)
@given(experts=st.integers(1, 5), data=st.data())
def test_token_choice_equals_the_loop_over_tokens(experts, data):
    active = data.draw(st.integers(1, experts))
    layer = TokenChoiceFFN(6, 10, experts, active=active)
    with_biases(layer.initialize(seeded(2)))
    x = drawn(2, 7, 6, seed=data.draw(st.integers(0, 99)))
    wanted = torch.zeros_like(x)
    for picture in range(2):
        for s in range(7):
            affinity = (layer.router @ x[picture, s]).softmax(-1)
            best = sorted(range(experts), key=lambda e: -affinity[e].item())[:active]
            total = sum(affinity[e].item() for e in best)
            for e in best:
                wanted[picture, s] += affinity[e] / total * one_expert(layer.experts, e, x[picture, s])
    torch.testing.assert_close(layer(x), wanted, rtol=1e-5, atol=1e-5)


def test_the_balance_loss_is_1_when_even_and_as_many_as_experts_when_all_go_to_one():
    layer = TokenChoiceFFN(4, 8, 4, active=1).train()
    layer.initialize(seeded(0))
    with torch.no_grad():
        layer.router.copy_(100 * torch.eye(4))
    layer(torch.eye(4)[None].repeat(2, 1, 1))
    assert layer.balance.item() == pytest.approx(1.0, abs=1e-5)
    layer(torch.eye(4)[:1].expand(2, 5, 4))
    assert layer.balance.item() == pytest.approx(4.0, abs=1e-5)


def test_descending_the_balance_loss_evens_out_the_loads():
    layer = TokenChoiceFFN(8, 4, 4, active=1).train()
    layer.initialize(seeded(3))
    x = drawn(1, 256, 8) + 1.0
    layer.capture = True
    layer(x)
    before = layer.last_routing.per_expert
    optimizer = torch.optim.Adam([layer.router], lr=0.03)
    for _ in range(60):
        layer(x)
        layer.balance.backward()
        optimizer.step()
        optimizer.zero_grad()
    after = layer.last_routing.per_expert
    assert int(before.max()) > 120
    assert int(after.max()) < 90
    assert int(after.sum()) == 256


def test_only_asked_for_passes_leave_their_routing():
    layer = layer_of(capacity=2.0)
    layer(drawn(1, 4, 6))
    assert layer.last_routing is None


# --- order ------------------------------------------------------------------------------------------------------------


def block_of(feed_forward) -> AdaptiveBlock:
    return AdaptiveBlock(8, 2, feed_forward=feed_forward).initialize(seeded(0))


@pytest.mark.parametrize("cache", [NoCache(), RecurrentState()])
def test_causal_blocks_refuse_experts_that_choose(cache):
    chooser = ExpertChoiceFFN(8, 8, 2, capacity=1.0)
    chooser.initialize(seeded(0))
    block = block_of(chooser)
    assert block(drawn(1, 4, 8), None, BidirectionalCache(), 0).shape == (1, 4, 8)
    with pytest.raises(InvalidArgument, match="ExpertChoiceFFN chooses among all tokens"):
        block(drawn(1, 4, 8), None, cache, 0)


def test_what_causal_blocks_refuse_would_leak_and_what_they_allow_does_not():
    x = drawn(1, 6, 8)
    changed = torch.cat([x[:, :-1], 5 * x[:, -1:]], 1)
    chooser = layer_of(width=8, experts=2, capacity=0.7)
    assert not torch.allclose(chooser(x)[:, :-1], chooser(changed)[:, :-1])
    tokens = TokenChoiceFFN(8, 8, 4)
    tokens.initialize(seeded(0))
    block = block_of(tokens)
    one, other = (block(y, None, NoCache(), 0) for y in (x, changed))
    torch.testing.assert_close(one[:, :-1], other[:, :-1])


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": 4.5}, r"capacity is 4\.5; 4 experts take each token at most 4 times"),
        ({"group": 0}, "group must be at least 1, got 0"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(InvalidArgument, match=message):
        ExpertChoiceFFN(6, 8, 4, **options)


def test_bad_sizes_groups_masks_and_choices_are_named():
    with pytest.raises(InvalidArgument, match="experts must be at least 1, got 0"):
        ExpertChoiceFFN(6, 8, 0)
    with pytest.raises(InvalidArgument, match="active is 5; each token takes 1 to 4"):
        TokenChoiceFFN(6, 8, 4, active=5)
    layer = layer_of(capacity=2.0, group=5)
    with pytest.raises(InvalidArgument, match="groups of 5 do not divide 2 images of 4 tokens"):
        layer(drawn(2, 4, 6))
    with pytest.raises(InvalidArgument, match=r"mask is of shape \(2, 3\), the tokens are 2 by 4"):
        layer(drawn(2, 4, 6), torch.ones(2, 3, dtype=torch.bool))
