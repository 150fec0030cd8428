"""Optimizers against torch's own, rates and decays of single parameters, averages in closed form."""

import copy

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from pippin.core.errors import InvalidArgument
from pippin.train import EMA, AdamW, Muon


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8, bias=False)
        self.norm = nn.LayerNorm(8)
        self.lm_head = nn.Linear(8, 7, bias=False)

    def forward(self, ids):
        return self.lm_head(self.norm(self.down(self.up(self.embed(ids)).relu())))


def descend(model, optimizers, steps=5):
    for step in range(steps):
        ids = torch.arange(step, step + 6) % 7
        nn.functional.cross_entropy(model(ids), (ids + 1) % 7).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def test_adamw_is_torchs_with_vectors_undecayed():
    ours, theirs = Net(), Net()
    matrices = [p for p in theirs.parameters() if p.ndim > 1]
    vectors = [p for p in theirs.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9), eps=1e-6, fused=True)
    same(
        descend(ours, AdamW(lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3).build(ours)),
        descend(theirs, [reference]),
    )


def test_muon_is_torchs_for_hidden_matrices_and_adamw_for_the_rest():
    ours, theirs = Net(), Net()
    muon = torch.optim.Muon(
        [theirs.up.weight, theirs.down.weight], lr=0.02, momentum=0.9, weight_decay=0.2, adjust_lr_fn="match_rms_adamw"
    )
    rest = [
        {"params": [theirs.embed.weight, theirs.lm_head.weight], "weight_decay": 0.1},
        {"params": [theirs.up.bias, theirs.norm.weight, theirs.norm.bias], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(rest, lr=0.005, betas=(0.9, 0.95), fused=True)
    built = Muon(lr=0.02, momentum=0.9, weight_decay=0.2, other=AdamW(lr=0.005)).build(ours)
    same(descend(ours, built), descend(theirs, [muon, adamw]))


def test_muon_alone_where_all_matrices_are_hidden():
    (optimizer,) = Muon().build(nn.Linear(3, 4, bias=False))
    assert isinstance(optimizer, torch.optim.Muon)


@pytest.mark.parametrize("optimizer", [AdamW(lr=0.01), Muon(lr=0.01, other=AdamW(lr=0.01))])
def test_a_parameter_with_its_own_scale_moves_as_if_the_rate_were_that(optimizer):
    scaled, plain = Net(), Net()
    scaled.up.weight.lr_scale = 4.0
    faster = copy.deepcopy(plain)
    moved = descend(scaled, optimizer.build(scaled), steps=1)
    alone = descend(plain, optimizer.build(plain), steps=1)
    at_four = type(optimizer)(lr=0.04, **({"other": AdamW(lr=0.04)} if isinstance(optimizer, Muon) else {}))
    fast = descend(faster, at_four.build(faster), steps=1)
    assert torch.equal(moved["up.weight"], fast["up.weight"])
    assert torch.equal(moved["down.weight"], alone["down.weight"])


def test_a_parameter_that_says_so_is_not_decayed():
    model = nn.Linear(3, 3, bias=False)
    model.weight.no_decay = True
    before = model.weight.detach().clone()
    (optimizer,) = AdamW(lr=0.1, weight_decay=0.5).build(model)
    model.weight.grad = torch.zeros_like(model.weight)
    optimizer.step()
    assert torch.equal(model.weight, before)


def test_a_frozen_parameter_is_left_out_and_a_frozen_model_is_refused():
    model = Net()
    model.embed.requires_grad_(False)
    (optimizer,) = AdamW().build(model)
    assert all(p is not model.embed.weight for group in optimizer.param_groups for p in group["params"])
    with pytest.raises(InvalidArgument, match=r"Net has no trainable parameter.*requires_grad_\(True\)"):
        Muon().build(model.requires_grad_(False))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AdamW(lr=0.0), "lr must be above 0 and finite, got 0.0"),
        (lambda: AdamW(betas=(0.9, 1.0)), r"betas\[1\] must be from 0 to below 1, got 1.0"),
        (lambda: AdamW(weight_decay=-0.1), "weight_decay .* got -0.1"),
        (lambda: AdamW(lr=float("nan")), "lr .* got nan"),
        (lambda: Muon(momentum=1.5), "momentum .* got 1.5"),
        (lambda: Muon(newton_schulz_steps=0), "newton_schulz_steps must be at least 1"),
        (lambda: EMA(nn.Linear(1, 1), 1.0), "decay .* got 1.0"),
    ],
)
def test_a_setting_outside_its_range_is_refused(make, message):
    with pytest.raises(InvalidArgument, match=message):
        make()


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=8), st.floats(0, 0.999))
def test_averages_have_their_closed_form(values, decay):
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(model.weight, 2.0)
    ema = EMA(model, decay)
    for value in values:
        nn.init.constant_(model.weight, value)
        ema.update(model)
    n = len(values)
    expected = decay**n * 2.0 + sum((1 - decay) * decay ** (n - 1 - i) * value for i, value in enumerate(values))
    assert ema.averages["weight"].item() == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_averages_are_lent_and_taken_back_even_after_an_error():
    model = Net()
    ema = EMA(model, 0.5)
    averaged = {name: tensor.clone() for name, tensor in ema.averages.items()}
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    trained = {name: p.detach().clone() for name, p in model.named_parameters()}

    def fail():
        with ema.applied(model):
            same({name: p.detach() for name, p in model.named_parameters()}, averaged)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    same({name: p.detach() for name, p in model.named_parameters()}, trained)
    same(ema.averages, averaged)
