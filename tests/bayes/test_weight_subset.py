"""Subsets of weights: places in the flat vector against a vector made by hand, and every refusal."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.func import functional_call

from pippin.bayes.laplace.laplace import Laplace
from pippin.bayes.weight_subset import All, LastLayer, Named, Selection, Subnetwork, Subset, check_last
from pippin.core.errors import InvalidArgument
from pippin.nn.linear import Linear


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def test_the_vector_is_all_parameters_in_order():
    model = network()
    selection = All().resolve(model)
    expected = nn.utils.parameters_to_vector(model.parameters()).detach()
    assert torch.equal(selection.vector(model), expected)
    assert selection.size == selection.full_size == 26
    assert [selection.of(name) for name in selection.names] == [
        slice(0, 12),
        slice(12, 16),
        slice(16, 24),
        slice(24, 26),
    ]


def test_last_layer_is_found_and_can_be_named():
    model = network()
    assert LastLayer().resolve(model).names == ("2.weight", "2.bias")
    assert LastLayer("0").resolve(model).names == ("0.weight", "0.bias")
    assert LastLayer().resolve(nn.Sequential(nn.Linear(2, 2), Linear(2, 3))).names[0] == "1.weight"


def test_named_takes_names_a_predicate_or_what_requires_a_gradient():
    model = network()
    assert Named(["2.bias", "0.weight"]).resolve(model).names == ("0.weight", "2.bias")
    assert Named("2.bias").resolve(model).size == 2
    assert Named(lambda name: name.endswith("bias")).resolve(model).names == ("0.bias", "2.bias")
    model[0].requires_grad_(False)
    assert Named().resolve(model).names == ("2.weight", "2.bias")
    assert all(isinstance(subset, Subset) for subset in (All(), LastLayer(), Named(), Subnetwork([0])))


@settings(max_examples=30, deadline=None)
@given(st.sets(st.integers(0, 25), min_size=1))
def test_a_subnetwork_reads_and_writes_its_weights_and_no_others(chosen):
    model = network()
    whole = All().resolve(model).vector(model)
    selection = Subnetwork(sorted(chosen, reverse=True)).resolve(model)
    order = torch.tensor(sorted(chosen))
    assert torch.equal(selection.vector(model), whole[order])
    fresh = torch.arange(1.0, len(chosen) + 1)
    expected = whole.clone()
    expected[order] = fresh
    x = torch.ones(1, 3)
    with selection.at(model, fresh):
        assert torch.equal(All().resolve(model).vector(model), expected)
        inside = model(x)
    assert torch.equal(All().resolve(model).vector(model), whole)
    assert torch.equal(functional_call(model, selection.tensors(model, fresh), x), inside)
    together = torch.cat([fresh[selection.of(name)] for name in selection.names])
    assert torch.equal(together, fresh)


def test_weights_come_back_after_an_error_and_gradients_flow_into_the_vector():
    model = network()
    selection = Subnetwork([0, 25]).resolve(model)
    before = All().resolve(model).vector(model)
    with pytest.raises(RuntimeError), selection.at(model, torch.zeros(2)):
        raise RuntimeError
    assert torch.equal(All().resolve(model).vector(model), before)
    vector = selection.vector(model).requires_grad_()
    functional_call(model, selection.tensors(model, vector), torch.ones(1, 3)).sum().backward()
    assert vector.grad[1].item() == 1.0


def test_tied_weights_have_one_place():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    assert All().resolve(model).names == ("0.weight",)
    assert LastLayer().resolve(model).names == ("0.weight",)


@pytest.mark.parametrize(
    ("subset", "model", "message"),
    [
        (All(), nn.Tanh(), "without parameters"),
        (All(), nn.ParameterList([nn.Parameter(torch.ones(2, dtype=torch.int32), requires_grad=False)]), "int32"),
        (LastLayer(), nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), r"last layer is 1 \(LayerNorm\).*linear are: 0"),
        (LastLayer(), nn.Tanh(), "no layers"),
        (LastLayer("head"), network(), "no layer 'head'"),
        (Named(["2.bias", "3.bias"]), network(), "no parameters 3.bias"),
        (Named([]), network(), "no names"),
        (Named(lambda name: False), network(), "chose no parameter"),
        (Named(), network().requires_grad_(False), "requires a gradient"),
        (Subnetwork([]), network(), "a list of indices"),
        (Subnetwork([26]), network(), "index 26 is out of range; the model has 26"),
        (Subnetwork([-1]), network(), "index -1 is out of range"),
        (Subnetwork([3, 3]), network(), "index 3 was given twice"),
        (Subnetwork(torch.tensor([0.5])), network(), "integers"),
        (Subnetwork(torch.tensor([True, False])), network(), "mask"),
    ],
)
def test_what_selects_nothing_is_refused(subset, model, message):
    with pytest.raises(InvalidArgument, match=message):
        subset.resolve(model)


def test_another_model_or_vector_is_refused():
    selection = All().resolve(network())
    with pytest.raises(InvalidArgument, match="another model"):
        selection.vector(nn.Sequential(nn.Linear(3, 5)))
    with pytest.raises(InvalidArgument, match="26 weights"), selection.at(network(), torch.zeros(3)):
        pass
    with pytest.raises(InvalidArgument, match="'x' is not among"):
        selection.of("x")
    assert isinstance(selection, Selection)


def test_the_layer_that_was_registered_last_must_run_last():
    class Swapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.body = nn.Linear(4, 2), nn.Linear(3, 4)

        def forward(self, x):
            return self.head(self.body(x).tanh())

    model, x = Swapped(), torch.ones(5, 3)
    with pytest.raises(InvalidArgument, match=r"body\.weight.*LastLayer\('head'\)"):
        check_last(model, LastLayer().resolve(model), x)
    check_last(model, LastLayer("head").resolve(model), x)
    assert not any(layer._forward_hooks for layer in model.modules())
    data = [(x + torch.arange(5)[:, None], torch.tensor([0, 1, 0, 1, 1]))]
    with pytest.raises(InvalidArgument, match="registration"):
        Laplace(model, "classification").fit(data)
    assert Laplace(model, "classification", LastLayer("head")).fit(data).examples == 5
