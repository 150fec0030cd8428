"""Scale-invariant groups are found by test: every kind of norm, networks without, and look-alikes that are none."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from pippin.bayes.laplace.linearized.scale_invariance import (
    ParamGroup,
    find_scale_invariant_groups,
    partition,
    rescaled,
)
from pippin.core.errors import InvalidArgument, InvalidInput


def made(*layers, seed=0):
    """A network of random weights and statistics, in evaluation mode."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(*layers).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 + torch.randn(parameter.shape, generator=generator))
        for name, buffer in model.named_buffers():
            if "running" in name:
                buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))
    return model


def x(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(9))


def found(model, inputs):
    return {group.name: group.statistics for group in find_scale_invariant_groups(model, inputs)}


def test_the_layer_before_a_layer_norm_with_its_bias():
    model = made(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 2))
    (group,) = find_scale_invariant_groups(model, x(5, 3))
    assert group == ParamGroup("2", ("2.weight", "2.bias"), invariant=True)


def test_convolutions_before_a_group_norm():
    model = made(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
    assert found(model, x(3, 1, 6, 6)) == {"0": ""}


def test_a_batch_norm_goes_along_with_its_own_layer():
    model = made(
        nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4),
        nn.ReLU(), nn.Flatten(), nn.Linear(16, 2),
    )  # fmt: skip
    assert found(model, x(3, 1, 6, 6)) == {"0": "1", "3": "4"}


def test_relu_without_biases_hands_the_scale_on_to_the_norm():
    layers = nn.Linear(3, 6, bias=False), nn.ReLU(), nn.Linear(6, 8, bias=False), nn.LayerNorm(8), nn.Linear(8, 2)
    assert set(found(made(*layers), x(5, 3))) == {"0", "2"}
    with_bias = nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 2)
    assert set(found(made(*with_bias), x(5, 3))) == {"2"}


def test_nothing_is_invariant_without_a_norm():
    assert found(made(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2)), x(5, 3)) == {}


def test_saturated_units_and_unused_parameters_are_no_invariance():
    saturated = made(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2))
    with torch.no_grad():
        saturated[0].weight.mul_(3.0)
    assert found(saturated, x(5, 3)) == {}

    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, inputs):
            return self.used(inputs)

    assert found(Idle(), x(5, 3)) == {}


def test_the_test_leaves_the_model_as_it_was():
    model = made(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    find_scale_invariant_groups(model, x(5, 3))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model[1].eps == 1e-5
    assert not model[1]._forward_hooks


@settings(max_examples=15, deadline=None)
@given(st.floats(0.2, 5.0))
def test_what_was_found_holds_for_any_factor(factor):
    model = made(nn.Linear(3, 4), nn.BatchNorm1d(4, eps=1e-9), nn.ReLU(), nn.Linear(4, 2)).double()
    (group,) = find_scale_invariant_groups(model, x(5, 3).double())
    own = dict(model.named_parameters())
    with torch.no_grad():
        before = model(x(5, 3).double())
        with rescaled([own[name] for name in group.parameters], model.get_submodule(group.statistics), factor):
            torch.testing.assert_close(model(x(5, 3).double()), before, rtol=1e-6, atol=1e-7)


def test_partitions_cover_every_parameter_once():
    model = made(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2))
    everything = [name for name, _ in model.named_parameters()]
    for groups in ("auto", "layerwise", "scalar"):
        covered = [name for group in partition(model, groups, x(5, 3)) for name in group.parameters]
        assert sorted(covered) == sorted(everything)
    assert [group.name for group in partition(model, "auto", x(5, 3))] == ["0", "other"]
    assert [group.name for group in partition(model, "layerwise", x(5, 3))] == ["0", "1", "3"]
    assert [group.invariant for group in partition(model, "layerwise", x(5, 3))] == [True, False, False]
    (last,) = partition(model, "auto", x(5, 3), ["3.weight", "3.bias"])
    assert last == ParamGroup("other", ("3.weight", "3.bias"))


def test_bad_input_is_named():
    model = made(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    with pytest.raises(InvalidArgument, match="groups must be 'auto', 'layerwise' or 'scalar'"):
        partition(model, "channels", x(5, 3))
    with pytest.raises(InvalidArgument, match=r"leave out 1\.weight"):
        partition(model, [ParamGroup("a", ("0.weight", "0.bias"))], x(5, 3))
    with pytest.raises(InvalidArgument, match=r"'0\.bias' twice"):
        partition(model, [ParamGroup("a", ("0.weight", "0.bias")), ParamGroup("b", ("0.bias",))], x(5, 3))
    with pytest.raises(InvalidArgument, match=r"names 'nine'"):
        partition(model, [ParamGroup("a", ("nine",))], x(5, 3))
    with pytest.raises(InvalidArgument, match="'a' is empty"):
        partition(model, [ParamGroup("a", ())], x(5, 3))
    with pytest.raises(InvalidArgument, match="several groups have the name 'a'"):
        partition(model, [ParamGroup("a", ("0.weight",)), ParamGroup("a", ("0.bias",))], x(5, 3))
    with pytest.raises(InvalidArgument, match="tolerance must be"):
        find_scale_invariant_groups(model, x(5, 3), tolerance=0.0)
    with pytest.raises(InvalidInput, match="at least one example"):
        find_scale_invariant_groups(model, x(0, 3))
    with pytest.raises(InvalidInput, match="not finite"):
        find_scale_invariant_groups(model, x(5, 3) * torch.nan)
    model.train()
    with pytest.raises(InvalidArgument, match=r"'1' is in training mode.*model\.eval"):
        find_scale_invariant_groups(model, x(5, 3))
