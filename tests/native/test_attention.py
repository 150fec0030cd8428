"""Attention over the paged cache: what is written there, and what is read from it, against numpy in float64.

Notable here:
- the oracle reads the pool's bytes by the layout that native/pippin.h promises, so that keys and values are exactly
  those that the kernel saw, in any precision
"""

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st

from pippin.core import native

from .decoders import NativeDecoder, Weights, Work, angles, random_decoder, round_bf16

pytestmark = pytest.mark.skipif(native.library() is None, reason=native.unavailable_reason())

CACHES = ["float32", "bfloat16", "int8"]


@pytest.fixture(params=[1, 2])
def threads(request):
    """One thread, and two (on one core too)."""
    library, before = native.library(), native.threads()
    library.check(library.call("set_threads", request.param, 0))
    yield request.param
    library.check(library.call("set_threads", before, 0))


def attention_only(seed: int, *, heads: int, kv_heads: int, head_dim: int, window: int = 0, scale: float = 1.0):
    """Two layers of which the first adds to the residual exactly what its attention read."""
    width = heads * head_dim
    layers = [{"rope": 0, "window": window, "gated": False}, {}]
    shape = {"width": width, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "size": 1}
    weights = random_decoder(seed, layers=layers, scale=scale, **shape)
    weights.layers[0].matrices["output"][:] = np.eye(width)
    weights.layers[0].matrices["down"][:] = 0
    return weights


def held_in(decoder: NativeDecoder, table: list[int], tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values (tokens, kv_heads, head_dim) of the first layer, out of the pool."""
    w, size = decoder.w, {0: 4, 1: 2, 2: 1}[decoder.cache]
    half = 16 * w.head_dim * size
    head_bytes = 2 * half + (128 if size == 1 else 0)
    blocks = decoder.pool[table][:, : w.kv_heads * head_bytes].reshape(len(table), w.kv_heads, head_bytes)

    def numbers(part: np.ndarray) -> np.ndarray:
        part = np.ascontiguousarray(part)
        if size == 2:
            return (part.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(float)
        return part.view(np.float32 if size == 4 else np.int8).astype(float)

    keys = numbers(blocks[..., :half]).reshape(len(table), w.kv_heads, w.head_dim, 16)
    values = numbers(blocks[..., half : 2 * half]).reshape(len(table), w.kv_heads, 16, w.head_dim)
    if size == 1:
        scales = np.ascontiguousarray(blocks[..., 2 * half :]).view(np.float32).astype(float)
        keys = keys * scales[..., None, :16]
        values = values * scales[..., 16:, None]
    keys = keys.transpose(0, 3, 1, 2).reshape(-1, w.kv_heads, w.head_dim)
    return keys[:tokens], values.transpose(0, 2, 1, 3).reshape(-1, w.kv_heads, w.head_dim)[:tokens]


def projected(w: Weights, ids: list[int], name: str) -> np.ndarray:
    """Queries, keys or values of the first layer in float64."""
    x = w.embedding[ids].astype(float)
    x = w.layers[0].vectors["attention_norm"] * x / np.sqrt((x * x).mean(-1, keepdims=True) + w.eps)
    y = (x @ w.layers[0].matrices[name].T).reshape(len(ids), -1, w.head_dim)
    if name == "v":
        return y
    angle = angles(w, 0, np.arange(len(ids)))[:, None]
    a, b = np.split(y, 2, -1)
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)


def expected_reads(w: Weights, q: np.ndarray, k: np.ndarray, v: np.ndarray, rows: list[int]) -> np.ndarray:
    """What the queries of some tokens read."""
    window, out = w.layers[0].window, []
    for i in rows:
        first = max(0, i - window + 1) if window else 0
        for head in range(w.heads):
            shared = head // (w.heads // w.kv_heads)
            score = k[first : i + 1, shared] @ q[i, head] * w.attention_scale
            weight = np.exp(score - score.max())
            out.append(weight @ v[first : i + 1, shared] / weight.sum())
    return np.reshape(out, (len(rows), -1))


def compare(weights: Weights, cache: str, tokens: int, rows: list[int]) -> None:
    """Run a prompt, then check the reads of some rows against the pool's contents."""
    needed = -(-tokens // native.BLOCK)
    decoder = NativeDecoder(weights, cache=cache, blocks=needed, positions=tokens)
    rng = np.random.default_rng(tokens)
    ids, table = rng.integers(0, 50, tokens).tolist(), rng.permutation(needed).tolist()
    residual = np.zeros((tokens, weights.embedding.shape[1]), np.float32)
    decoder.forward([Work(ids, 0, table, [])], end=1, residual=residual)
    k, v = held_in(decoder, table, tokens)
    expected = expected_reads(weights, projected(weights, ids, "q"), k, v, rows)
    # the difference of two float32 numbers around 4 carries their rounding, 2^-22
    reads = (residual - weights.embedding[ids])[rows]
    np.testing.assert_allclose(reads, expected, rtol=0, atol=1e-5 * max(1, np.abs(v).max()))


@settings(max_examples=40, deadline=None)
@given(
    cache=st.sampled_from(CACHES),
    group=st.integers(1, 14),
    kv_heads=st.integers(1, 3),
    half=st.sampled_from([1, 3, 4, 8, 12, 16, 20, 32, 40, 64]),
    window=st.sampled_from([0, 0, 1, 2, 17, 256, 300]),
    tokens=st.integers(1, 330),
    seed=st.integers(0, 999),
)
def test_any_shape(cache, group, kv_heads, half, window, tokens, seed):
    assume(group * kv_heads * half <= 512)  # or most of the time goes into the oracle
    shape = {"heads": group * kv_heads, "kv_heads": kv_heads, "head_dim": 2 * half}
    weights = attention_only(seed, **shape, window=window, scale=(2 * half) ** -0.5)
    compare(weights, cache, tokens, sorted({0, tokens // 3, tokens // 2, max(tokens - 2, 0), tokens - 1}))


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("window", [0, 700])
def test_long_contexts(cache, window, threads):
    weights = attention_only(1, heads=6, kv_heads=2, head_dim=16, window=window, scale=0.5)
    compare(weights, cache, 3000, [255, 256, 257, 511, 512, 1023, 1500, 2047, 2048, 2999])


def test_many_heads_on_one_key():
    """More query heads in a group than attention takes together for one token."""
    compare(attention_only(2, heads=53, kv_heads=1, head_dim=4), "float32", 270, [0, 100, 255, 269])


@pytest.mark.parametrize("scale", [30.0, 0.0])
def test_extreme_scores(scale):
    """Weights that are all zero but one, and weights that are all equal."""
    compare(attention_only(2, heads=2, kv_heads=1, head_dim=32, scale=scale), "float32", 600, [0, 1, 100, 300, 599])


@pytest.mark.parametrize("held", [0, 15, 16, 255, 256, 257, 1000])
def test_a_token_sees_the_same_alone_and_in_a_prompt(held, threads):
    """Across the boundaries of blocks and parts, for one thread, and for several that share out the parts."""
    decoder = NativeDecoder(attention_only(3, heads=3, kv_heads=1, head_dim=16), cache="int8", blocks=70)
    ids, table = np.random.default_rng(0).integers(0, 50, held + 5).tolist(), list(range(65))
    prompt = decoder.whole(ids, table)[0]
    decoder.pool[:] = 0xFF
    if held:
        decoder.forward([Work(ids[:held], 0, table, [])])
    for at in range(held, held + 5):
        np.testing.assert_array_equal(decoder.forward([Work([ids[at]], at, table, [0])])[0][0], prompt[at])


@pytest.mark.parametrize("head_dim", [2, 16, 24, 64])
def test_what_is_written(head_dim):
    """Keys after rotation, and values, in the layout of pippin.h; each within the rounding of its precision."""
    weights = attention_only(4, heads=2, kv_heads=2, head_dim=head_dim)
    ids = np.random.default_rng(0).integers(0, 50, 40).tolist()
    for cache in CACHES:
        decoder = NativeDecoder(weights, cache=cache)
        decoder.whole(ids, [5, 0, 7])
        for name, found in zip("kv", held_in(decoder, [5, 0, 7], 40), strict=True):
            true = projected(weights, ids, name)
            if cache == "float32":
                np.testing.assert_allclose(found, true, atol=1e-5)
            elif cache == "bfloat16":
                np.testing.assert_array_equal(round_bf16(found), found)
                np.testing.assert_allclose(found, true, rtol=2.0**-8 * 1.01, atol=1e-5)
            else:  # half a step of 1/127 of the largest of the token's head
                bound = np.abs(true).max(-1, keepdims=True) / 254 * 1.001 + 1e-5
                assert (np.abs(found - true) <= bound).all()
        untouched = np.ones(decoder.blocks, bool)
        untouched[[5, 0, 7]] = False
        assert (decoder.pool[untouched] == 0xFF).all()


def test_the_size_of_a_block():
    weights = random_decoder(0, layers=[{}, {"source": 0}, {}], heads=6, kv_heads=3, head_dim=10)
    sizes = [NativeDecoder(weights, cache=cache).block_bytes for cache in CACHES]
    assert sizes == [2 * 3 * 32 * 10 * 4, 2 * 3 * 32 * 10 * 2, 2 * 3 * (32 * 10 + 128)]


def test_eight_bits_cost_little():
    """Relative error of a decoder's logits with a cache of less precision: half a step is 1/254 of the largest of a
    head, 0.4 %, and that of bfloat16 is 2^-9; what comes out is of that order."""
    weights = random_decoder(5, layers=[{"rope": 0}] * 4, width=64, heads=4, kv_heads=2, head_dim=16)
    ids = np.random.default_rng(0).integers(0, 50, 300).tolist()
    exact = NativeDecoder(weights).whole(ids)[0]
    error = {
        cache: np.sqrt(np.mean((NativeDecoder(weights, cache=cache).whole(ids)[0] - exact) ** 2) / np.mean(exact**2))
        for cache in CACHES[1:]
    }
    assert 0 < error["bfloat16"] < 0.01
    assert 0 < error["int8"] < 0.02


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_values_that_eight_bits_cannot_hold_show(value):
    """What is not finite is not silently made a finite number."""
    weights = attention_only(6, heads=1, kv_heads=1, head_dim=4)
    weights.layers[0].matrices["v"][0] = value
    decoder = NativeDecoder(weights, cache="int8")
    residual = np.zeros((3, 4), np.float32)
    decoder.forward([Work([1, 2, 3], 0, [0], [])], end=1, residual=residual)
    assert np.isnan(residual).any(-1).all()


def test_zeros_survive_eight_bits():
    weights = attention_only(7, heads=1, kv_heads=1, head_dim=4)
    weights.layers[0].matrices["v"][:] = 0
    decoder = NativeDecoder(weights, cache="int8")
    residual = np.zeros((3, 4), np.float32)
    decoder.forward([Work([1, 2, 3], 0, [0], [])], end=1, residual=residual)
    np.testing.assert_array_equal(residual, weights.embedding[[1, 2, 3]])
