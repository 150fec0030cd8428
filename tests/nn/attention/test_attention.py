"""One layer of attention: its formula head by head, its adapters, and queries that are cut to some tokens."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from pippin.nn import matmul
from pippin.nn.attention import blocked_attention
from pippin.nn.attention.attention import Attention, AttentionSpec, PositionScale
from pippin.nn.attention.rotary import Rotary, apply_rotary
from pippin.nn.context import LayerContext
from pippin.nn.kv_cache import NoCache, PackedDocuments, QuerySelection
from pippin.nn.linear import Linear
from pippin.nn.lora import Adapter, LowRankUpdate


class Narrowed(NoCache):
    """Causal order, seen from some of the tokens."""

    def __init__(self, rows: torch.Tensor) -> None:
        super().__init__()
        self.rows = rows

    def append(self, layer, k, v, window):
        order = torch.arange(k.shape[2])
        return k, v, (order[self.rows][:, None] >= order)[None, None]


def normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_layer(spec, **options):
    layer = Attention(spec, hidden_size=12, num_attention_heads=4, num_key_value_heads=2, head_dim=4, **options)
    layer = layer.double().requires_grad_(False)
    for seed, weight in enumerate(layer.parameters()):
        weight.copy_(normal(*weight.shape, seed=seed))
    return layer


@pytest.fixture
def attention():
    return random_layer(AttentionSpec())


def written_out(layer, x, cos_sin, *, scale=0.5, eps=1e-6, window=None, bound=None, qk_norm=None):
    """The output of a layer with 4 heads of width 4 that share 2 heads of keys: each query by itself."""

    def heads(projection):
        return F.linear(x, projection.weight, projection.bias).unflatten(-1, (-1, 4)).transpose(1, 2)

    def normalized(y, norm):
        over = (1, 3) if qk_norm == "full" else 3
        weight = norm.weight.view(-1, 1, 4) if qk_norm == "full" else norm.weight
        return weight * y / (y.square().mean(over, keepdim=True) + eps).sqrt()

    q, k, v = heads(layer.q_proj), heads(layer.k_proj), heads(layer.v_proj)
    if qk_norm in ("head", "full"):
        q, k = normalized(q, layer.q_norm), normalized(k, layer.k_norm)
    if cos_sin is not None:
        q, k = apply_rotary(q, *cos_sin), apply_rotary(k, *cos_sin)
    if qk_norm == "rotated head":
        q, k = normalized(q, layer.q_norm), normalized(k, layer.k_norm)
    y = torch.zeros_like(q)
    for head in range(4):
        for at in range(x.shape[1]):
            first = 0 if window is None else max(0, at - window + 1)
            seen = slice(first, at + 1)
            scores = scale * torch.einsum("bd,bkd->bk", q[:, head, at], k[:, head // 2, seen])
            scores = scores if bound is None else bound * torch.tanh(scores / bound)
            total = scores.exp().sum(-1) + (0 if layer.sinks is None else layer.sinks[head].exp())
            y[:, head, at] = torch.einsum("bk,bkd->bd", scores.exp() / total[:, None], v[:, head // 2, seen])
    return F.linear(y.transpose(1, 2).flatten(2), layer.o_proj.weight, layer.o_proj.bias)


PROJECTIONS = {"q_proj.weight", "o_proj.weight", "k_proj.weight", "v_proj.weight"}


@pytest.mark.parametrize("new", [1, 7])
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize(
    ("options", "more", "window"),
    [
        ({}, set(), None),
        ({}, set(), 3),
        ({"bias": True}, {"q_proj.bias", "k_proj.bias", "v_proj.bias"}, None),
        ({"output_bias": True}, {"o_proj.bias"}, None),
        ({"qk_norm": "head"}, {"q_norm.weight", "k_norm.weight"}, None),
        ({"qk_norm": "head", "eps": 0.5}, {"q_norm.weight", "k_norm.weight"}, 3),
        ({"qk_norm": "full"}, {"q_norm.weight", "k_norm.weight"}, None),
        ({"qk_norm": "full", "eps": 0.5}, {"q_norm.weight", "k_norm.weight"}, 3),
        ({"qk_norm": "rotated head", "eps": 0.5}, {"q_norm.weight", "k_norm.weight"}, None),
        ({"scale": 2.0}, set(), None),
    ],
)
def test_a_layer_is_its_formula_head_by_head(options, more, window, rotated, new):
    layer = random_layer(AttentionSpec(window=window), **options)
    assert {name for name, _ in layer.named_parameters()} == PROJECTIONS | more
    x = normal(2, new, 12, seed=9)
    cos_sin = Rotary().tables(torch.arange(new), 4) if rotated else None
    cos_sin = None if cos_sin is None else (cos_sin[0].double(), cos_sin[1].double())
    found, (keys, values, _) = layer(x, LayerContext(NoCache(), cos_sin=cos_sin))
    given = {"scale": 0.5, "window": window} | {name: options[name] for name in options if "bias" not in name}
    torch.testing.assert_close(found, written_out(layer, x, cos_sin, **given), rtol=1e-9, atol=1e-9)
    assert keys.shape == values.shape == (2, 2, new, 4)


@pytest.mark.parametrize("most", [1, 1 << 25])
@pytest.mark.parametrize("new", [1, 7])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("bound", "sinks"), [(0.7, False), (None, True), (0.7, True)])
def test_bounded_scores_and_sinks_are_their_formula_in_blocks_of_any_size(monkeypatch, bound, sinks, window, new, most):
    monkeypatch.setattr("pippin.nn.attention.attention._MAX_SCORES", most)
    layer = random_layer(AttentionSpec(window=window, softcap=bound, sinks=sinks))
    x = normal(2, new, 12, seed=9)
    found, _ = layer(x, LayerContext(NoCache()))
    torch.testing.assert_close(found, written_out(layer, x, None, window=window, bound=bound), rtol=1e-9, atol=1e-9)


def test_causal_masks_of_torch_are_understood_without_a_fused_kernel():
    layer = random_layer(AttentionSpec(sinks=True))
    x = normal(1, 7, 12, seed=9)
    whole, _ = layer(x, LayerContext(NoCache()))

    class Later(NoCache):
        def append(self, layer, k, v, window):
            return k, v, causal_lower_right(3, 7)

    rows = torch.arange(4, 7)
    found, _ = layer(x, LayerContext(Later(), selection=QuerySelection(0, rows)))
    torch.testing.assert_close(found, whole[:, 4:])


def test_queries_grow_with_their_position_beyond_the_trained_context():
    scaled = random_layer(AttentionSpec(position_scale=PositionScale(0.5, 4)))
    plain = random_layer(AttentionSpec())
    x = normal(1, 9, 12, seed=9)
    found, _ = scaled(x, LayerContext(NoCache(), positions=torch.arange(9)))
    for at in range(9):
        plain.scale = 0.5 * (1 + 0.5 * math.log(1 + at // 4))
        row, _ = plain(x[:, : at + 1], LayerContext(NoCache()))
        torch.testing.assert_close(found[:, at], row[:, at], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("heads", "size"), [(1, 8), (2, 8), (1, 4), (4, 4)])
def test_heads_of_a_layers_own_are_stored_as_those_of_the_cache(heads, size):
    """The cache stores 4 heads of 4; outputs are those of a layer whose cache stores its own heads."""

    def make(spec, kv_heads, head_dim):
        layer = Attention(
            spec, hidden_size=12, num_attention_heads=4, num_key_value_heads=kv_heads, head_dim=head_dim, qk_norm="head"
        ).double()
        for seed, weight in enumerate(layer.requires_grad_(False).parameters()):
            weight.copy_(normal(*weight.shape, seed=seed))
        return layer

    own = make(AttentionSpec(num_key_value_heads=heads, head_dim=size), 4, 4)
    plain = make(AttentionSpec(), heads, size)
    x = normal(1, 7, 12, seed=9)
    expected, _ = plain(x, LayerContext(NoCache()))
    found, (keys, values, _) = own(x, LayerContext(NoCache()))
    torch.testing.assert_close(found, expected)
    assert keys.shape == values.shape == (1, 4, 7, 4)
    together, _ = own(x, LayerContext(PackedDocuments([3, 4])))
    torch.testing.assert_close(together[:, :3], expected[:, :3])


def test_normalized_values_are_those_of_the_key_projection_before_its_norm():
    layer = random_layer(AttentionSpec(keys_are_values=True, value_norm=True), qk_norm="head")
    assert {name for name, _ in layer.named_parameters()} == (PROJECTIONS | {"q_norm.weight", "k_norm.weight"}) - {
        "v_proj.weight"
    }
    x = normal(1, 7, 12, seed=9)
    _, (_, values, _) = layer(x, LayerContext(NoCache()))
    raw = F.linear(x, layer.k_proj.weight).unflatten(-1, (2, 4)).transpose(1, 2)
    torch.testing.assert_close(values, raw / (raw.square().mean(-1, keepdim=True) + 1e-6).sqrt())


def test_a_layer_that_reads_anothers_keys_has_projections_for_queries_and_output_only():
    reader = random_layer(AttentionSpec(kv_source=0), qk_norm="head")
    assert {name for name, _ in reader.named_parameters()} == {"q_proj.weight", "o_proj.weight", "q_norm.weight"}
    x = normal(1, 5, 12, seed=9)
    source = random_layer(AttentionSpec(), qk_norm="head")
    _, shared = source(normal(1, 5, 12, seed=8), LayerContext(NoCache()))
    found, read = reader(x, LayerContext(NoCache(), layer=1, shared=shared))
    assert read is shared
    source.q_proj, source.q_norm, source.o_proj = reader.q_proj, reader.q_norm, reader.o_proj
    keys, values = (projected(normal(1, 5, 12, seed=8), each) for each in (source.k_proj, source.v_proj))
    keys = source.k_norm(keys)
    q = reader.q_norm(projected(x, reader.q_proj))
    y = F.scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(found, reader.o_proj(y.transpose(1, 2).flatten(2)), rtol=1e-9, atol=1e-9)


def projected(x, projection):
    return projection(x).unflatten(-1, (-1, 4)).transpose(1, 2)


@pytest.mark.parametrize("window", [None, 2])
def test_sequences_end_to_end_are_each_sequence_alone(window):
    layer = random_layer(AttentionSpec(window=window), scale=2.0)
    x = normal(1, 9, 12, seed=9)
    found, _ = layer(x, LayerContext(PackedDocuments([3, 1, 5])))
    alone = [layer(part, LayerContext(NoCache()))[0] for part in x.split([3, 1, 5], 1)]
    torch.testing.assert_close(found, torch.cat(alone, 1), rtol=1e-9, atol=1e-9)


class Reader(NoCache):
    """A cache that attends by itself; here, to the query alone."""

    def append(self, layer, k, v, window):
        self.given = (layer, k, v, window)
        return self

    def attend(self, q, scale):
        self.asked = (q, scale)
        return q.transpose(1, 2).flatten(2)


def test_a_cache_that_attends_by_itself_is_given_queries_keys_and_scale():
    layer = random_layer(AttentionSpec(window=7), scale=2.0)
    x, cache = normal(1, 3, 12, seed=9), Reader()
    found, read = layer(x, LayerContext(cache, layer=4))
    assert read is cache
    number, k, v, window = cache.given
    assert (number, window, cache.asked[1]) == (4, 7, 2.0)
    for got, projection in ((cache.asked[0], layer.q_proj), (k, layer.k_proj), (v, layer.v_proj)):
        torch.testing.assert_close(got, projected(x, projection), rtol=0, atol=0)
    torch.testing.assert_close(found, layer.o_proj(layer.q_proj(x)), rtol=1e-9, atol=1e-9)


def test_rows_that_are_read_without_keys_name_the_layer_that_is_missing():
    with pytest.raises(AssertionError, match="layer 3 reads layer 2, which was not given"):
        random_layer(AttentionSpec(kv_source=2))(normal(1, 2, 12, seed=9), LayerContext(NoCache(), layer=3))


@pytest.mark.parametrize(("window", "taken"), [(None, 1), (9, 0)])
@pytest.mark.parametrize("scale", [None, 2.0])
def test_training_by_blocks_gives_what_the_layer_gives_without_gradients(monkeypatch, window, taken, scale):
    if not torch.backends.mkldnn.is_available():
        pytest.skip("torch was built without oneDNN")
    calls, attend = [], blocked_attention.attend
    monkeypatch.setattr(blocked_attention, "attend", lambda *each: (calls.append(1), attend(*each))[1])
    monkeypatch.setattr(blocked_attention, "slow_blas", lambda: True)
    monkeypatch.setattr(blocked_attention, "MIN_ELEMENTS", 0)
    monkeypatch.setattr(matmul, "slow_blas", lambda: False)
    layer = random_layer(AttentionSpec(window=window), scale=scale).float().requires_grad_(True)
    x = normal(2, blocked_attention.MIN_TOKENS + 3, 12, seed=9).float()
    found, _ = layer(x, LayerContext(NoCache()))
    assert len(calls) == taken  # the blocks know causal order only, no window
    with torch.no_grad():
        expected, _ = layer(x, LayerContext(NoCache()))
    assert len(calls) == taken
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def adapter(attention, seed):
    """A change of each of the four projections."""
    changes = {}
    for number, layer in enumerate((attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)):
        rows, columns = layer.weight.shape
        down, up = normal(2, columns, seed=seed + number), normal(rows, 2, seed=seed + 10 + number)
        changes[layer] = (LowRankUpdate(down, up),)
    return Adapter(f"{seed}", changes)


def merged(attention, adapter):
    """The layer with an adapter's changes added to its weights."""
    layer = random_layer(AttentionSpec())
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        (change,) = adapter.changes[getattr(attention, name)]
        getattr(layer, name).weight.add_(change.up @ change.down)
    return layer


def fused(attention, adapter):
    """The layer with one projection in place of three, as packing makes it, and the adapter for it."""
    layer, start, changes = random_layer(AttentionSpec()), 0, []
    parts = [attention.q_proj, attention.k_proj, attention.v_proj]
    layer.qkv_proj = Linear(12, sum(part.outputs for part in parts)).double().requires_grad_(False)
    layer.qkv_proj.weight.copy_(torch.cat([part.weight for part in parts]))
    for part in parts:
        (change,) = adapter.changes[part]
        changes.append(LowRankUpdate(change.down, change.up, start))
        start += part.outputs
    del layer.q_proj, layer.k_proj, layer.v_proj
    return layer, Adapter("fused", {layer.qkv_proj: tuple(changes), layer.o_proj: adapter.changes[attention.o_proj]})


@pytest.mark.parametrize("new", [1, 5])
def test_an_adapter_is_a_change_of_all_four_weights(attention, new):
    one = adapter(attention, 100)
    x = normal(1, new, 12, seed=9)
    expected, _ = merged(attention, one)(x, LayerContext(NoCache()))
    found, _ = attention(x, LayerContext(NoCache(), adapters=[(one, slice(None))]))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    layer, changes = fused(attention, one)
    found, _ = layer(x, LayerContext(NoCache(), adapters=[(changes, slice(None))]))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(expected, attention(x, LayerContext(NoCache()))[0])


@pytest.mark.parametrize("rows", [[4], [1, 4], [0, 2, 3], [0, 1, 2, 3, 4]])
def test_each_selected_token_keeps_its_own_adapter(attention, rows):
    one, two = adapter(attention, 100), adapter(attention, 200)
    x = normal(1, 5, 12, seed=9)
    adapters = [(one, slice(0, 3)), (two, slice(3, 5))]
    whole, _ = attention(x, LayerContext(NoCache(), adapters=adapters))
    first = sum(row < 3 for row in rows)
    wanted = torch.tensor(rows)
    kept = [(one, slice(0, first)), (two, slice(first, len(rows)))]
    selection = QuerySelection(0, wanted, kept)
    found, _ = attention(x, LayerContext(Narrowed(wanted), adapters=adapters, selection=selection))
    torch.testing.assert_close(found, whole[:, wanted], rtol=1e-9, atol=1e-9)


def test_no_selected_token_gives_no_row_and_all_keys(attention):
    x = normal(1, 5, 12, seed=9)
    none = torch.tensor([], dtype=torch.int64)
    found, (keys, _, _) = attention(x, LayerContext(Narrowed(none), selection=QuerySelection(0, none)))
    assert found.shape == (1, 0, 12)
    assert keys.shape == (1, 2, 5, 4)
