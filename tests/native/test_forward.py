"""A pass against formulas in float64, against pippin's own decoder, and against itself, cut and mixed in every way."""

import ctypes
import os
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from pippin.core import native
from pippin.core.errors import InvalidArgument

from .decoders import NativeDecoder, Reference, Weights, Work, random_changes, random_decoder

pytestmark = pytest.mark.skipif(native.library() is None, reason=native.unavailable_reason())

FORMS = ["F32", "BF16", "INT2", "INT4"]
CACHES = ["float32", "bfloat16", "int8"]
MIXTURE = {"experts": 4, "active": 2}
FEATURES = {
    "plain": [{"rope": 0}, {"rope": 0}],
    "no position": [{}, {}],
    "biases": [{"rope": 0, "biases": True}] * 2,
    "norms on heads": [{"rope": 0, "qk_norm": True}] * 2,
    "post norms": [{"rope": 0, "post_norms": True, "activation": "gelu_tanh"}] * 2,
    "window": [{"rope": 0, "window": 5}, {"rope": 1}, {"rope": 0, "window": 1}],
    "shared": [{"rope": 0}, {"rope": 0, "source": 0}, {}, {"rope": 1, "source": 0}, {"rope": 0, "source": 2}],
    "shared window": [{"rope": 0, "window": 7}, {"rope": 0, "source": 0}],
    "ungated": [{"rope": 0, "gated": False, "activation": "relu"}, {"gated": False, "activation": "gelu"}],
    "mixture": [{"rope": 0, **MIXTURE}, {"rope": 0, **MIXTURE, "active": 1, "renormalize": False}],
    "ungated mixture": [{"rope": 0, **MIXTURE, "gated": False, "activation": "gelu", "active": 4}],
    "everything": [
        {"rope": 0, "biases": True, "qk_norm": True, "post_norms": True, "window": 9, **MIXTURE},
        {"rope": 1, "biases": True, "qk_norm": True, "post_norms": True, "source": 0, "activation": "gelu"},
    ],
}
THETAS = (10_000.0, 500.0)
COMPILER = shutil.which("c++") or shutil.which("g++")

REFUSING = """
#include <malloc.h>
extern "C" int refuse = 0;
extern "C" void *aligned_alloc(size_t alignment, size_t size) noexcept {
    return refuse ? nullptr : memalign(alignment, size);
}
"""
# A pass over as many tokens as the one before, which needs more memory only where attention works on several threads.
REFUSED = """
import ctypes
from decoders import NativeDecoder, Work, native, random_decoder
from pippin.core.errors import NotEnoughMemory

native.library().call("set_threads", 2, 0)
decoder, ids = NativeDecoder(random_decoder(0, layers=[{"rope": 0}] * 2)), [i % 50 for i in range(64)]
decoder.forward([Work([token], 0, [block], [0]) for block, token in enumerate(ids)])
refuse = ctypes.c_int.in_dll(ctypes.CDLL(None), "refuse")
refuse.value = 1
try:
    decoder.whole(ids)
except NotEnoughMemory as error:
    print(error)
refuse.value = 0
found = decoder.whole(ids)[0]
native.library().call("set_threads", 1, 0)
print((found == decoder.whole(ids)[0]).all())
"""


def ids_of(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 50, count).tolist()


def close(found: np.ndarray, expected: np.ndarray, tolerance: float = 2e-5) -> None:
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * max(1.0, np.abs(expected).max()))


def use(threads: int) -> None:
    """So many threads, even on a machine with fewer cores."""
    library = native.library()
    library.check(library.call("set_threads", threads, 0))


@pytest.fixture
def two_threads():
    before = native.threads()
    use(2)
    yield
    use(before)


# --- against the reference ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FEATURES)
def test_equals_the_formulas(name):
    weights = random_decoder(1, layers=FEATURES[name], thetas=THETAS, embedding_scale=3.0, scale=0.3)
    ids = ids_of(37)
    expected = Reference(weights).run(ids)
    logits, hidden = NativeDecoder(weights).whole(ids)
    close(logits, expected[0])
    close(hidden, expected[1])


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    group=st.integers(1, 5),
    kv_heads=st.integers(1, 3),
    half=st.integers(1, 20),
    width=st.integers(1, 70),
    size=st.integers(1, 70),
    vocab=st.integers(50, 70),
    tokens=st.integers(1, 60),
    eps=st.sampled_from([1e-6, 1e-2]),
)
def test_equals_the_formulas_for_any_shape(seed, group, kv_heads, half, width, size, vocab, tokens, eps):
    shape = {"heads": group * kv_heads, "kv_heads": kv_heads, "head_dim": 2 * half, "width": width, "size": size}
    layers = [{"rope": 0, "qk_norm": seed % 2 == 0}, {"window": seed % 30, "rope": 0}]
    weights = random_decoder(seed, layers=layers, vocab=vocab, eps=eps, **shape)
    ids = ids_of(tokens, seed)
    expected = Reference(weights).run(ids)
    logits, hidden = NativeDecoder(weights).whole(ids)
    close(logits, expected[0], 1e-4)
    close(hidden, expected[1], 1e-4)


@pytest.mark.parametrize("form", ["BF16", "INT2", "INT3", "INT4", "INT8"])
def test_packed_weights_come_close(form):
    # what is left is the rounding of the activations: 2^-9 of each in bfloat16, 1/254 of the largest of 32 in 8 bits
    weights = random_decoder(2, layers=[{"rope": 0}] * 2, width=64, size=96)
    decoder = NativeDecoder(weights, form)
    ids = ids_of(20)
    expected, _, _ = Reference(weights).run(ids)
    error = np.sqrt(np.mean((decoder.whole(ids)[0] - expected) ** 2) / np.mean(expected**2))
    assert 0 < error < 0.03


def test_equals_the_decoder_in_torch():
    """The same checkpoint in pippin's own decoder, mapped here by hand."""
    import torch

    from pippin.language import Decoder, DecoderConfig, LayerSpec
    from pippin.nn.attention.attention import AttentionSpec
    from pippin.nn.attention.rotary import Rotary
    from pippin.nn.feedforward.feedforward import FeedForwardSpec

    rotary = Rotary()
    specs = (
        LayerSpec(AttentionSpec(window=6, rotary=rotary), FeedForwardSpec(64, "gelu_tanh")),
        LayerSpec(AttentionSpec(window=6, rotary=rotary, kv_source=0), FeedForwardSpec(64, "gelu_tanh")),
        LayerSpec(AttentionSpec(rotary=None), FeedForwardSpec(64, "gelu_tanh", num_experts=3, num_experts_per_tok=2)),
    )
    options = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512}
    norms = {"qk_norm": "head", "residual": "pre and post", "qkv_bias": True, "embedding_scale": 5.0}
    config = DecoderConfig("gemma3_text", 50, 32, specs, tie_word_embeddings=False, **options, **norms)
    module = Decoder(config).initialize(seed=3).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(3).add_(0.1 * torch.randn(parameter.shape, generator=generator))
    common = {"biases": True, "qk_norm": True, "post_norms": True, "activation": "gelu_tanh"}
    layers = [{"rope": 0, "window": 6}, {"rope": 0, "source": 0}, {"experts": 3, "active": 2}]
    weights = random_decoder(0, layers=[{**common, **layer} for layer in layers], embedding_scale=5.0)
    take_over(weights, {name: tensor.detach().numpy() for name, tensor in module.named_parameters()})
    ids = ids_of(40)
    with torch.inference_mode():
        expected = module(torch.tensor([ids]))[0].numpy()
    close(NativeDecoder(weights).whole(ids)[0], expected, 1e-4)


def take_over(weights: Weights, names: dict[str, np.ndarray]) -> None:
    """Fill the decoder with a checkpoint's weights."""
    weights.embedding[:], weights.head[:] = names["embed_tokens.weight"], names["lm_head.weight"]
    weights.final_norm[:] = names["norm.weight"]
    projections = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "output": "o_proj"}
    norms = {"attention": "input", "post_attention": "post_attention"}
    norms |= {"feedforward": "pre_feedforward", "post_feedforward": "post_feedforward"}
    for index, layer in enumerate(weights.layers):
        prefix = f"layers.{index}."
        for role, name in projections.items():
            if role in layer.matrices:
                layer.matrices[role][:] = names[f"{prefix}self_attn.{name}.weight"]
                layer.vectors[f"{role}_bias"][:] = names.get(f"{prefix}self_attn.{name}.bias", 0)
        for name in ("q_norm", "k_norm"):
            if f"{prefix}self_attn.{name}.weight" in names:
                layer.vectors[name][:] = names[f"{prefix}self_attn.{name}.weight"]
        for ours, theirs in norms.items():
            layer.vectors[f"{ours}_norm"][:] = names[f"{prefix}{theirs}_layernorm.weight"]
        for role in ("gate", "up", "down"):
            if role in layer.matrices:
                layer.matrices[role][:] = names[f"{prefix}mlp.{role}_proj.weight"]
            for number, expert in enumerate(layer.experts):
                expert[role][:] = names[f"{prefix}mlp.experts.{number}.{role}_proj.weight"]
        if layer.router is not None:
            layer.router[:] = names[f"{prefix}mlp.gate.weight"]


# --- against itself -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("form", FORMS)
def test_the_same_bits_however_a_prompt_is_cut(form, cache, two_threads):
    weights = random_decoder(4, layers=FEATURES["window"], thetas=THETAS)
    decoder = NativeDecoder(weights, form, cache=cache)
    ids, table = ids_of(150), list(range(10))
    whole = decoder.whole(ids)[0]
    rng = np.random.default_rng(0)
    for pieces in (1, 2, 5):
        cuts = [0, *sorted(rng.choice(np.arange(1, 150), pieces, replace=False).tolist()), 150]
        decoder.pool[:] = 0xFF
        parts = [
            decoder.forward([Work(ids[begin:end], begin, table, list(range(end - begin)))])[0]
            for begin, end in pairwise(cuts)
        ]
        np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("name", FEATURES)
def test_the_same_bits_token_by_token(name):
    weights = random_decoder(5, layers=FEATURES[name], thetas=THETAS)
    decoder = NativeDecoder(weights, {"gate": "INT4", "v": "BF16", "embedding": "INT8"}, cache="bfloat16")
    ids = ids_of(20)
    whole = decoder.whole(ids)[0]
    decoder.pool[:] = 0xFF
    for at, token in enumerate(ids):
        np.testing.assert_array_equal(decoder.forward([Work([token], at, [0, 1], [0])])[0][0], whole[at])


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_the_same_bits_in_any_company(data):
    """Several sequences with histories of their own, in one pass, with scattered blocks."""
    lengths = data.draw(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30)), min_size=1, max_size=6))
    weights = random_decoder(6, layers=FEATURES["everything"], thetas=THETAS)
    decoder = NativeDecoder(weights, "INT4", cache=data.draw(st.sampled_from(CACHES)))
    blocks = np.random.default_rng(data.draw(st.integers(0, 99))).permutation(decoder.blocks).tolist()
    texts, tables, alone = [], [], []
    for number, (held, new) in enumerate(lengths):
        texts.append(ids_of(held + new, number))
        tables.append([blocks.pop() for _ in range(-(-(held + new) // native.BLOCK))])
        alone.append(decoder.whole(texts[-1], tables[-1])[0][held:])
    decoder.pool[:] = 0xFF
    for (held, _), text, table in zip(lengths, texts, tables, strict=True):
        if held:
            decoder.forward([Work(text[:held], 0, table, [])])
    works = [
        Work(text[held:], held, table, list(range(new)))
        for (held, new), text, table in zip(lengths, texts, tables, strict=True)
    ]
    np.testing.assert_array_equal(decoder.forward(works)[0], np.concatenate(alone))


@pytest.mark.parametrize("form", FORMS)
def test_the_same_bits_on_any_number_of_threads(form, two_threads):
    weights = random_decoder(7, layers=FEATURES["everything"], thetas=THETAS, width=96, size=160, vocab=999)
    decoder = NativeDecoder(weights, form, cache="bfloat16")
    ids, last = ids_of(400), Work([3], 400, list(range(26)), [0])
    many = [*decoder.whole(ids), *decoder.forward([last])]
    use(1)
    decoder.pool[:] = 0xFF
    for one, other in zip(many, [*decoder.whole(ids), *decoder.forward([last])], strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", ["plain", "shared", "everything", "mixture"])
def test_only_the_wanted_rows_are_given(name):
    weights = random_decoder(8, layers=FEATURES[name], thetas=THETAS)
    decoder = NativeDecoder(weights, "INT4")
    ids, table = ids_of(141), list(range(9))
    whole = decoder.whole(ids)
    for rows in ([139], [0, 5, 77], [], list(range(1, 140))):
        decoder.pool[:] = 0xFF
        logits, hidden = decoder.forward([Work(ids[:140], 0, table, rows)])
        np.testing.assert_array_equal(logits, whole[0][rows])
        np.testing.assert_array_equal(hidden, whole[1][rows])
        # and nothing is missing in the cache
        np.testing.assert_array_equal(decoder.forward([Work(ids[140:], 140, table, [0])])[0][0], whole[0][140])


def test_a_copied_block_is_as_good_as_the_original():
    decoder = NativeDecoder(random_decoder(9), "INT4", cache="int8")
    ids = ids_of(40)
    whole = decoder.whole(ids)[0]
    decoder.pool[[20, 30, 25]] = decoder.pool[[0, 1, 2]]  # two full blocks and a partial one
    decoder.pool[[0, 1, 2]] = 0xFF
    fork = decoder.forward([Work(ids[36:], 36, [20, 30, 25], [0, 1, 2, 3])])[0]
    np.testing.assert_array_equal(fork, whole[36:])


# --- leaving early, going on, adapters ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "shared", "everything", "mixture"])
def test_an_early_exit_and_its_continuation(name):
    weights = random_decoder(10, layers=FEATURES[name], thetas=THETAS)
    decoder = NativeDecoder(weights)
    ids, table = ids_of(30), [3, 1]
    whole = decoder.whole(ids, table)[0]
    for depth in range(1, len(weights.layers)):
        decoder.pool[:] = 0xFF
        left = np.full((30, 32), np.nan, np.float32)
        early, _ = decoder.forward([Work(ids, 0, table, [4, 29])], end=depth, residual=left)
        expected, _, residual = Reference(weights).run(ids, depth)
        close(early, expected[[4, 29]])
        close(left, residual)
        np.testing.assert_array_equal(decoder.forward([Work(ids, 0, table, [4, 29])], end=depth)[0], early)
        rest, _ = decoder.forward([Work(ids, 0, table, list(range(30)))], begin=depth, residual=left)
        np.testing.assert_array_equal(rest, whole)


def test_an_early_exit_can_be_resumed_layer_by_layer():
    decoder = NativeDecoder(random_decoder(11, layers=FEATURES["shared"], thetas=THETAS))
    ids, left = ids_of(12), np.zeros((12, 32), np.float32)
    whole = decoder.whole(ids, [0])[0]
    for layer in range(4):
        decoder.forward([Work(ids, 0, [0], [])], begin=layer, end=layer + 1, residual=left)
    np.testing.assert_array_equal(decoder.forward([Work(ids, 0, [0], [11])], begin=4, residual=left)[0], whole[[11]])


@pytest.mark.parametrize("tokens", [1, 30, 150])
def test_an_adapter_works_on_its_tokens_only(tokens):
    weights = random_decoder(12, layers=[{"rope": 0, "biases": True}, {"rope": 0, "gated": False}])
    decoder = NativeDecoder(weights, blocks=96)
    first, second = random_changes(weights, 1, 3), random_changes(weights, 2, 17)
    works, expected = [], []
    for number, changes in enumerate((first, None, second, first)):
        ids, table = ids_of(tokens, number), list(range(10 * number, 10 * number + 10))
        rows = sorted({0, tokens - 1})
        works.append(Work(ids, 0, table, rows, changes))
        expected.append(Reference(weights, changes).run(ids)[0][rows])
    found = decoder.forward(works)[0]
    close(found, np.concatenate(expected), 5e-5)
    for work, part in zip(works, np.split(found, 4), strict=True):
        np.testing.assert_array_equal(decoder.forward([work])[0], part)


# --- what is refused ----------------------------------------------------------------------------------------------

BAD_BATCHES = {
    "token 50 is not in": {"ids": [1, 50]},
    "token -1 is not in": {"ids": [1, -1]},
    "a pass over 0 tokens": {"tokens": 0},
    "sequences cover": {"starts": [0, 1]},
    "has tokens 0 to 0": {"sequences": 2, "starts": [0, 0, 2], "held": [0, 0], "table_starts": [0, 0, 3]},
    "holds -1 tokens": {"held": [-1]},
    "needs 4 blocks for 52 tokens": {"held": [50]},
    "block 64 of a pool of 64": {"tables": [64, 1, 2]},
    "block -1 of a pool": {"tables": [-1, 1, 2]},
    "written twice": {"sequences": 2, "starts": [0, 1, 2], "held": [0, 0], "table_starts": [0, 1, 2], "tables": [5, 5]},
    "row 2 of 2 tokens": {"rows": [2]},
    "out of order": {"rows": [1, 1], "outputs": 2},
    "-1 outputs": {"outputs": -1},
    "layers 0 to 3 of 2": {"end": 3},
    "layers 1 to 1": {"begin": 1, "end": 1},
    "needs a residual": {"begin": 1},
    "rotary table 0 has 40 positions": {"held": [40]},
    "0 sequences": {"sequences": 0},
}


def pass_of(decoder: NativeDecoder, batch: native.NativeBatch, pool: int = 0, blocks: int = 64, cache: int = 0) -> None:
    """A pass with a pool that begins so many bytes too late."""
    address = decoder.pool.ctypes.data + pool
    decoder.library.check(decoder.library.forward(decoder.handle, address, blocks, cache, ctypes.byref(batch)))


@pytest.mark.parametrize("says", BAD_BATCHES)
def test_a_bad_batch_is_refused_before_anything_is_done(says):
    decoder = NativeDecoder(random_decoder(13, layers=[{"rope": 0}] * 2), positions=40)
    batch, _, _ = decoder.batch([Work([1, 2], 0, [0, 1, 2], [1])])
    kept = []
    for name, value in BAD_BATCHES[says].items():
        if isinstance(value, list):
            kept.append(np.asarray(value, np.int32))
            value = kept[-1].ctypes.data
        setattr(batch, name, value)
    with pytest.raises(InvalidArgument, match=says):
        pass_of(decoder, batch)
    assert (decoder.pool == 0xFF).all()


@pytest.mark.parametrize(
    ("says", "pool", "blocks", "cache"),
    [("a multiple of 64", 8, 64, 0), ("pool of 0", 0, 0, 0), ("of the cache: 3", 0, 64, 3), ("cache: -1", 0, 64, -1)],
)
def test_a_bad_pool_is_refused(says, pool, blocks, cache):
    decoder = NativeDecoder(random_decoder(13))
    with pytest.raises(InvalidArgument, match=says):
        pass_of(decoder, decoder.batch([Work([1], 0, [0], [0])])[0], pool, blocks, cache)


@pytest.mark.parametrize(
    ("says", "changes"),
    [
        ("no multiple of", {"kv_heads": 3}),
        ("even number of dimensions", {"head_dim": 7}),
        ("even number of dimensions", {"head_dim": 1026}),
        ("a decoder of 0 layers", {"layers": 0}),
        ("no final norm", {"final_norm": None}),
        ("embedding is 50 x 32, but 51 x 32", {"vocab": 51}),
        ("layer 0: q is 32 x 32, but 64 x 32", {"heads": 8}),
    ],
)
def test_a_bad_configuration_is_refused(says, changes):
    decoder = NativeDecoder(random_decoder(14))
    for name, value in changes.items():
        setattr(decoder.config, name, value)
    with pytest.raises(InvalidArgument, match=says):
        decoder.library.model_new(decoder.config, decoder.layers)


@pytest.mark.parametrize(
    ("says", "changes"),
    [
        ("not an earlier one with its own keys", {"source": 1}),
        ("rotary table 1 of 1", {"rope": 1}),
        ("window -1", {"window": -1}),
        ("activation 7", {"activation": 7}),
        ("has no norms", {"attention_norm": None}),
        ("3 of 2 experts", {"experts": 2, "active": 3}),
        ("or no router", {"experts": 2, "active": 1}),
        ("output has no data", {"output": native.NativeMatrix(0, 0, 32, 32, 0, 0, None)}),
        ("q is 32 x 16", {"q": native.NativeMatrix(0, 0, 32, 16, 0, 0, 64)}),
    ],
)
def test_a_bad_layer_is_refused(says, changes):
    decoder = NativeDecoder(random_decoder(14))
    for name, value in changes.items():
        setattr(decoder.layers[1], name, value)
    with pytest.raises(InvalidArgument, match=says):
        decoder.library.model_new(decoder.config, decoder.layers)


def test_a_bad_adapter_is_refused():
    weights = random_decoder(15)
    decoder = NativeDecoder(weights)
    other = random_changes(random_decoder(15, width=64), 1, 2)
    with pytest.raises(InvalidArgument, match="does not fit"):
        decoder.forward([Work([1], 0, [0], [0], other)])
    batch, _, _ = decoder.batch([Work([1], 0, [0], [0], random_changes(weights, 1, 2))])
    batch.share[0].end = 2
    with pytest.raises(InvalidArgument, match="tokens 0 to 2 of 1"):
        pass_of(decoder, batch)


def test_a_bad_rotary_table_is_refused():
    decoder = NativeDecoder(random_decoder(15))
    address = decoder.pool.ctypes.data
    with pytest.raises(InvalidArgument, match="no rotary table 1"):
        decoder.library.model_rope(decoder.handle, 1, address, address, 1)
    with pytest.raises(InvalidArgument, match="0 positions"):
        decoder.library.model_rope(decoder.handle, 0, address, address, 0)


def test_numbers_that_overflow_harm_nobody_else():
    """A sequence whose adapter overflows gets nonsense; its neighbor gets what it always gets."""
    weights = random_decoder(16)
    decoder = NativeDecoder(weights, "INT4", cache="int8")
    broken = random_changes(weights, 1, 2)
    for layer in broken:
        for change in layer.values():
            change.up[:] = np.inf
    alone = decoder.forward([Work(ids_of(20), 0, [0, 1], [19])])[0][0]
    works = [Work(ids_of(20), 0, [2, 3], [19], broken), Work(ids_of(20), 0, [0, 1], [19])]
    found = decoder.forward(works)[0]
    assert np.isnan(found[0]).any()
    np.testing.assert_array_equal(found[1], alone)


@pytest.mark.skipif(COMPILER is None or sys.platform != "linux", reason="no compiler, or nothing to load in advance")
def test_memory_that_runs_out_in_any_thread_is_an_error(tmp_path):
    source, library = tmp_path / "refusing.cpp", tmp_path / "refusing.so"
    source.write_text(REFUSING)
    subprocess.run([COMPILER, "-shared", "-fPIC", str(source), "-o", str(library)], check=True, timeout=60)
    environment = {**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", REFUSED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    said = "native kernels: no memory to compute a pass of 64 tokens\nTrue\n"
    assert (done.returncode, done.stdout) == (0, said), done.stderr
