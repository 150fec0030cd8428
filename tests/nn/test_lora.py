"""Low-rank changes against the formula, in float64 and token by token."""

import torch
from hypothesis import given, settings, strategies as st

from pippin.nn.linear import Linear
from pippin.nn.lora import Adapter, LowRankUpdate
from pippin.nn.packed_layers import pack


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).float()


@given(st.lists(st.sampled_from(["one", "two", None]), min_size=1, max_size=6), st.booleans(), st.booleans())
@settings(max_examples=40, deadline=None)
def test_each_token_gets_the_change_of_its_own_adapter(owners, packed, bias):
    layer = Linear(6, 10, bias=bias)
    layer.weight.data = normal(10, 6, seed=0)
    weight = layer.weight.double()
    layer = pack(layer) if packed else layer
    adapters = {
        # the first changes outputs 0 to 3 and 4 to 9 as two layers that were fused, the second only outputs 2 to 6
        "one": Adapter(
            "one",
            {
                layer: (
                    LowRankUpdate(normal(2, 6, seed=1), normal(4, 2, seed=2)),
                    LowRankUpdate(normal(3, 6, seed=3), normal(6, 3, seed=4), 4),
                )
            },
        ),
        "two": Adapter("two", {layer: (LowRankUpdate(normal(1, 6, seed=5), normal(5, 1, seed=6), 2),)}),
    }
    x = normal(1, 3 * len(owners), 6, seed=7)
    shares = [(adapters[name], slice(3 * i, 3 * i + 3)) for i, name in enumerate(owners) if name is not None]
    expected = torch.empty(3 * len(owners), 10, dtype=torch.float64)
    for index, token in enumerate(x[0].double()):
        changed = weight.clone()
        if (name := owners[index // 3]) is not None:
            for change in adapters[name].changes[layer]:
                outputs = slice(change.start, change.start + len(change.up))
                changed[outputs] += change.up.double() @ change.down.double()
        expected[index] = changed @ token
    with torch.no_grad():
        torch.testing.assert_close(layer(x, shares)[0].double(), expected, atol=1e-5, rtol=0)


def test_an_adapter_for_other_layers_changes_nothing():
    layer, other = Linear(4, 4), Linear(4, 4)
    layer.weight.data = normal(4, 4, seed=0)
    adapter = Adapter("a", {other: (LowRankUpdate(torch.ones(1, 4), torch.ones(4, 1)),)})
    x = normal(2, 3, 4, seed=1)
    assert torch.equal(layer(x, [(adapter, slice(None))]), layer(x))


def test_gradients_reach_the_factors_and_no_other_tokens():
    layer = Linear(4, 4)
    layer.weight.data = normal(4, 4, seed=0)
    down, up = normal(2, 4, seed=1).requires_grad_(), normal(4, 2, seed=2).requires_grad_()
    adapter = Adapter("a", {layer: (LowRankUpdate(down, up),)})
    x = normal(1, 5, 4, seed=3)
    layer(x, [(adapter, slice(0, 2))])[:, 2:].sum().backward()
    assert down.grad.abs().sum() == up.grad.abs().sum() == 0
    layer(x, [(adapter, slice(0, 2))]).sum().backward()
    torch.testing.assert_close(up.grad, (x[0, :2] @ down.detach().T).sum(0).expand(4, 2))
