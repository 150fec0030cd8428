"""The choice of experts: against loops over tokens, and SparseMixer against Phi-3.5-MoE's own."""

import pytest
import torch
from hypothesis import given, strategies as st
from transformers.models.phimoe.modeling_phimoe import sparsemixer as theirs

from pippin.nn.feedforward.routing import RouterSpec, route, sparsemixer


def logits(seed, experts=12):
    return torch.randn(5, experts, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("groups", "taken", "group_score"), [(1, 1, "max"), (4, 2, "max"), (4, 2, "top two")])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("normalized", [False, True])
@given(seed=st.integers(0, 1000))
def test_routes_equal_a_loop_over_tokens(scores, groups, taken, group_score, biased, normalized, seed):
    spec = RouterSpec(scores, num_groups=groups, num_chosen_groups=taken, group_score=group_score, scale=2.5)
    rows, bias = logits(seed), torch.randn(12, generator=torch.Generator().manual_seed(seed + 1))
    weights, chosen = route(rows, spec, 3, normalized=normalized, choice_bias=bias if biased else None)
    for row, mine, indices in zip(rows, weights, chosen, strict=True):
        affinity = (row.softmax(0) if scores == "softmax" else row.sigmoid()).tolist()
        choice = [a + b for a, b in zip(affinity, bias.tolist() if biased else [0.0] * 12, strict=True)]
        size = 12 // groups
        of_group = [
            sorted(choice[g * size : (g + 1) * size])[-1 if group_score == "max" else -2 :] for g in range(groups)
        ]
        best = sorted(range(groups), key=lambda g: -sum(of_group[g]))[:taken]
        allowed = [expert for expert in range(12) if expert // size in best]
        expected = sorted(allowed, key=lambda expert: -choice[expert])[:3]
        assert indices.tolist() == expected
        total = sum(affinity[expert] for expert in expected) if normalized else 1.0
        assert mine.tolist() == pytest.approx([2.5 * affinity[expert] / total for expert in expected], rel=1e-5)


def test_a_bias_for_the_choice_brings_no_masked_expert_back():
    rows = torch.tensor([[0.0, 1.0, -torch.inf, 2.0]])
    bias = torch.tensor([0.0, 0.0, 9.0, 0.0])
    weights, chosen = route(rows, RouterSpec("sigmoid"), 2, normalized=True, choice_bias=bias)
    assert chosen.tolist() == [[3, 1]]
    assert weights.sum().item() == pytest.approx(1.0)


def test_sigmoids_of_zero_give_no_nan():
    weights, _ = route(torch.full((1, 4), -1000.0), RouterSpec("sigmoid"), 2, normalized=True)
    assert weights.tolist() == [[0.0, 0.0]]


@given(seed=st.integers(0, 1000), jitter=st.sampled_from([0.01, 0.2, 1.0]))
def test_sparsemixer_is_that_of_phi(seed, jitter):
    weights, chosen = sparsemixer(logits(seed), 2, jitter)
    expected, indices = theirs(logits(seed), jitter, training=False)
    assert chosen.tolist() == indices.tolist()
    torch.testing.assert_close(weights, expected)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_bounded_logits_change_weights_and_bring_no_masked_expert_back(scores):
    logits = torch.tensor([[9.0, 3.0, 1.0, -torch.inf, -8.0]])
    bounded = 2 * torch.tanh(logits / 2)
    affinities = bounded.masked_fill(logits.isneginf(), -torch.inf)
    affinities = affinities.softmax(-1) if scores == "softmax" else affinities.sigmoid()
    weights, chosen = route(logits, RouterSpec(scores, softcap=2.0), 4, normalized=False)
    assert chosen.tolist() == [[0, 1, 2, 4]]
    torch.testing.assert_close(weights, affinities[:, chosen[0]])
    assert not torch.equal(weights, route(logits, RouterSpec(scores), 4, normalized=False)[0])
