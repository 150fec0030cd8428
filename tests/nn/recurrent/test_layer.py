"""The recurrent layer against a loop over single tokens in float64, and sequences against themselves alone."""

from dataclasses import replace

import pytest
import torch

from pippin.core.errors import InvalidArgument
from pippin.nn.context import LayerContext
from pippin.nn.kv_cache import MaskedCache, NoCache, PackedDocuments, PastKeyValues, QuerySelection
from pippin.nn.recurrent.layer import Recurrent, RecurrentSpec
from pippin.nn.recurrent.states import RecurrentState

WIDTH = 12
SPECS = {
    "gru": RecurrentSpec("gru"),
    "lstm": RecurrentSpec("lstm", heads=3),
    "wide": RecurrentSpec("gru", heads=4, conv=7, expand=2),
    "no convolution": RecurrentSpec("lstm", heads=1, conv=1),
}


def build(spec, seed=0):
    """A layer whose every part matters: biases and gains are random too."""
    generator = torch.Generator().manual_seed(seed)
    layer = Recurrent(spec, WIDTH, eps=1e-6)
    layer.initialize(generator)
    with torch.no_grad():
        for linear in (layer.in_proj, layer.out_proj):
            linear.weight.normal_(0, 0.7, generator=generator)
        layer.conv_bias.normal_(0, 0.5, generator=generator)
        layer.norm.weight.uniform_(0.5, 2.0, generator=generator)
    return layer


@pytest.fixture(params=SPECS)
def layer(request):
    return build(SPECS[request.param])


def values(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def by_hand(layer, x):
    """One sequence (time, width), token by token from the definition; only the cell's step is the layer's own."""
    kernel, spec, inner, eps = layer.conv_weight[:, 0], layer.spec, layer.inner, layer.norm.eps
    projected = x @ layer.in_proj.weight.T
    u, gate = projected[:, :inner], projected[:, inner:]
    state = torch.zeros(1, *layer.cell.state_shape, dtype=torch.float64)
    outputs = []
    for t in range(len(x)):
        v = layer.conv_bias.clone()
        for tap in range(spec.conv):
            past = t - (spec.conv - 1 - tap)
            if past >= 0:
                v = v + kernel[:, tap] * u[past]
        y, state = layer.cell.step((v * torch.sigmoid(v))[None], state)
        gated = y[0] * gate[t] * torch.sigmoid(gate[t])
        normed = layer.norm.weight * gated / (gated.square().mean() + eps).sqrt()
        outputs.append(layer.out_proj.weight @ normed)
    return torch.stack(outputs)


def test_whole_sequences_and_their_gradients_equal_the_loop(layer):
    """In float64, where the cell solves what the loop steps through."""
    layer, worth = layer.double(), values(19, WIDTH, seed=2).double()
    layer.cell.newton = replace(layer.cell.newton, tolerance=1e-12)
    found = []
    for run in (lambda x: layer(x[None], LayerContext(NoCache()))[0], lambda x: by_hand(layer, x)):
        x = values(19, WIDTH).double().requires_grad_()
        y = run(x)
        gradients = torch.autograd.grad((y * worth).sum(), [x, *layer.parameters()])
        found.append((y, *gradients))
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-9, rtol=1e-9)
    assert layer.cell.last_solve.iterations > 1


@pytest.mark.parametrize("cuts", [[1] * 21, [7, 1, 1, 12], [3, 18], [20, 1]])
def test_a_sequence_in_parts_equals_the_whole(layer, cuts):
    x, cache = values(2, 21, WIDTH), RecurrentState()
    with torch.no_grad():
        expected, parts = layer(x, LayerContext(NoCache())), []
        for part in x.split(cuts, 1):
            parts.append(layer(part, LayerContext(cache)))
            cache.advance(part.shape[1])
    torch.testing.assert_close(torch.cat(parts, 1), expected, atol=2e-5, rtol=1e-4)
    assert cache.states[0].shape == (2, layer.spec.state_size(WIDTH)) == (2, layer.state_size)
    assert cache.length == 21


def test_a_pass_that_is_interrupted_leaves_no_trace(layer):
    x, cache = values(1, 9, WIDTH), RecurrentState()
    with torch.no_grad():
        layer(x[:, :5], LayerContext(cache))
        cache.advance(5)
        layer(values(1, 3, WIDTH, seed=9), LayerContext(cache))  # and nothing follows
        y = layer(x[:, 5:], LayerContext(cache))
    torch.testing.assert_close(y, layer(x, LayerContext(NoCache()))[:, 5:], atol=2e-5, rtol=1e-4)


def test_documents_end_to_end_are_those_of_each_alone(layer):
    """Values and all gradients; documents shorter than the convolution among them."""
    counts = [6, 1, 2, 11, 1, 4]
    x, weight = values(1, sum(counts), WIDTH), values(1, sum(counts), WIDTH, seed=2)
    together = x.clone().requires_grad_()
    (layer(together, LayerContext(PackedDocuments(counts))) * weight).sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}
    layer.zero_grad()
    alone = x.clone().requires_grad_()
    for part, w in zip(alone.split(counts, 1), weight.split(counts, 1), strict=True):
        (layer(part, LayerContext(NoCache())) * w).sum().backward()
    torch.testing.assert_close(together.grad, alone.grad, atol=1e-4, rtol=1e-3)
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-3, rtol=1e-3, msg=name)


def test_pads_on_the_left_change_nothing(layer):
    x = values(3, 10, WIDTH)
    y = layer(x, LayerContext(NoCache(torch.tensor([0, 4, 9]))))
    for row, pads in enumerate((0, 4, 9)):
        expected = layer(x[row : row + 1, pads:], LayerContext(NoCache()))
        torch.testing.assert_close(y[row : row + 1, pads:], expected, atol=2e-5, rtol=1e-4)


def test_a_cut_gives_the_wanted_tokens(layer):
    x, rows = values(1, 9, WIDTH), torch.tensor([2, 8])
    cut = layer(x, LayerContext(NoCache(), selection=QuerySelection(0, rows)))
    torch.testing.assert_close(cut, layer(x, LayerContext(NoCache()))[:, rows])


def test_nothing_sees_what_comes_later(layer):
    x = values(1, 16, WIDTH).requires_grad_()
    layer(x, LayerContext(NoCache()))[0, 9].sum().backward()
    seen = x.grad[0].abs().amax(-1)
    assert bool((seen[:10] > 0).all())
    assert float(seen[10:].max()) == 0.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"conv": 0}, "conv must be at least 1, got 0"),
        ({"heads": 5}, "5 heads of a recurrent layer do not divide its inner width, 12"),
    ],
)
def test_impossible_layers_are_refused(fields, message):
    with pytest.raises(InvalidArgument, match=message):
        Recurrent(RecurrentSpec(**fields), WIDTH, eps=1e-6)


def test_a_mask_and_misplaced_documents_are_refused():
    layer, x = build(SPECS["gru"]), values(1, 4, WIDTH)
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    with pytest.raises(InvalidArgument, match="layer 3 is recurrent, and a MaskedCache keeps no states"):
        layer(x, LayerContext(MaskedCache(mask, PastKeyValues()), 3))
    with pytest.raises(InvalidArgument, match="documents of 5 tokens were given 1 rows of 4"):
        layer(x, LayerContext(PackedDocuments([2, 3])))
