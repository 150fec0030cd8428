"""Attention over blocks against a loop in float64; without a GPU, in Triton's interpreter, and compiled for one."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from tests.nn.triton_kernels import DEVICE, GPU, compile_for_a_gpu, kernels

from pippin.core.errors import MissingDependency
from pippin.nn.triton import triton_attention, triton_matvec
from pippin.nn.triton.triton_attention import available, paged_attention


def oracle(q, values, scales, tables, positions, window, scale):
    """One sequence and one kv head after the other, in float64."""
    exact = values.double() if scales is None else values.double() * scales.double()[..., None]
    rows = []
    for query, table, position in zip(q[:, :, 0].double(), tables.tolist(), positions[:, 0].tolist(), strict=True):
        seen = range(0 if window is None else max(0, position - window + 1), position + 1)
        slots = [table[token // 16] * 16 + token % 16 for token in seen]
        keys, shown = exact[0][:, slots], exact[1][:, slots]
        groups = query.view(len(keys), -1, query.shape[-1])
        scores = groups @ keys.transpose(1, 2) * (query.shape[-1] ** -0.5 if scale is None else scale)
        rows.append((scores.softmax(-1) @ shown).flatten()[None])
    return torch.stack(rows)


@kernels
@settings(deadline=None, max_examples=60 if GPU else 25)
@given(
    dim=st.sampled_from([8, 20, 64]),
    kv_heads=st.integers(1, 3),
    groups=st.sampled_from([1, 3, 17]),
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=3),
    window=st.none() | st.integers(1, 450),
    codes=st.booleans(),
    scale=st.none() | st.just(0.3),
    busy=st.booleans(),
)
def test_it_equals_a_loop_over_sequences_and_heads(dim, kv_heads, groups, lengths, window, codes, scale, busy):
    generator = torch.Generator().manual_seed(sum(lengths))
    batch, blocks = len(lengths), 25
    q = torch.randn(batch, kv_heads * groups, 1, dim, generator=generator)
    values = torch.randn(2, kv_heads, 16 * blocks * batch, dim, generator=generator)
    scales = torch.rand(values.shape[:-1], generator=generator) if codes else None
    values = (values * 40).clamp(-127, 127).to(torch.int8) if codes else values
    # tables and positions as the engine keeps them: columns of one array
    inputs = torch.randperm(blocks * batch, generator=generator).view(batch, blocks)
    inputs = torch.cat([torch.tensor(lengths)[:, None] - 1, inputs], 1)
    wanted = oracle(q, values, scales, inputs[:, 1:], inputs[:, :1], window, scale)
    inputs = inputs.to(DEVICE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_attention, "_PROGRAMS", 1 if busy else 264)  # whether sequences are split
        y = paged_attention(
            q.to(DEVICE),
            values.to(DEVICE),
            None if scales is None else scales.to(DEVICE),
            inputs[:, 1:],
            inputs[:, :1],
            window=window,
            scale=scale,
        )
    torch.testing.assert_close(y.cpu().double(), wanted, atol=2e-5 * (40 if codes else 1), rtol=1e-4)


@kernels
def test_the_kernels_compile_for_gpus_that_are_not_here():
    script = """
from pippin.nn.triton import triton_attention

look, join = triton_attention._kernels()
types = dict.fromkeys(("sums", "peaks", "weights"), "*fp32") | {"tables": "*i64", "positions": "*i64", "factor": "fp32"}
types |= dict.fromkeys(("table_stride", "position_stride", "kv_heads", "slots", "span", "window"), "i32")
for number, stored, codes, tile in (("bf16", "bf16", False, 64), ("bf16", "i8", True, 64), ("fp32", "fp32", False, 32)):
    constants = {"DIM": 128, "SIZE": 128, "GROUPS": 4, "ROWS": 16, "TILE": tile, "BLOCK": 16, "SPLITS": 4}
    constants |= {"CODES": codes, "PRECISION": "ieee" if number == "fp32" else "tf32"}
    constants |= {"kv_heads": 1, "position_stride": 1}  # which Triton takes as constants where they are 1
    types |= {"q": "*" + number, "y": "*" + number, "keys": "*" + stored, "values": "*" + stored}
    types |= dict.fromkeys(("key_scales", "value_scales"), "*fp32" if codes else "*" + stored)
    for kernel in (look, join):
        assert compiled(kernel, types, constants).metadata.shared < 99_000, "more shared memory than a small GPU has"
"""
    compile_for_a_gpu(script)


def test_splits_cover_a_sequence():
    for programs in (1, 2, 16, 500):
        for tokens in (16, 256, 272, 8192):
            splits, span = triton_attention._split(programs, tokens)
            assert splits * span >= tokens
            assert span % 64 == 0
            assert splits & (splits - 1) == 0


def test_without_triton_or_a_gpu_it_is_not_available(monkeypatch):
    assert not available(torch.device("cpu"))
    monkeypatch.setattr(triton_matvec, "find_spec", lambda name: None)
    assert not available(torch.device("cuda"))
    triton_attention._kernels.cache_clear()
    values, table = torch.zeros(2, 1, 16, 8), torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(MissingDependency, match="triton is not installed"):
        paged_attention(torch.zeros(1, 1, 1, 8), values, None, table, table)
