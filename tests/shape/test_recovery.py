"""Starts of recovery adapters against torch's full decomposition and the closed form of what they leave."""

import copy

import pytest
import torch
from hypothesis import given, settings, strategies as st

from pippin.core import native
from pippin.core.errors import InvalidArgument, InvalidInput
from pippin.data.token_batches import TokenBatch
from pippin.language import Decoder
from pippin.language.methods.distillation import Distillation
from pippin.nn.linear import Linear
from pippin.nn.quantization.packed import dequantize, middle_code, quantize
from pippin.shape.lora import select_targets
from pippin.shape.recovery import recovery_adapter, residual_pairs, split_singular_vectors, truncated_svd
from pippin.train import AdamW, Trainer

IDS = torch.randint(0, 256, (2, 33), generator=torch.Generator().manual_seed(0))


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).float()


def rounded(weight: torch.Tensor, bits: int = 2) -> torch.Tensor:
    codes, scales = quantize(weight, bits, 16)
    return dequantize(codes, scales, middle_code(bits))


@pytest.fixture
def pair(tiny) -> tuple[Decoder, Decoder]:
    """A decoder, and the same with two-bit matrices."""
    original, quantized = copy.deepcopy(tiny.module), copy.deepcopy(tiny.module)
    for layer in quantized.layers.modules():
        if isinstance(layer, Linear):
            layer.weight.data = rounded(layer.weight.data)
    return original, quantized


@given(st.integers(1, 24), st.integers(1, 24), st.data(), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_the_best_pair_leaves_the_tail_of_the_singular_values(rows, columns, data, seed):
    rank = data.draw(st.integers(1, min(rows, columns)))
    weight = normal(rows, columns, seed=seed)
    down, up = truncated_svd(weight, rank)
    sizes = torch.linalg.svdvals(weight.double())
    left = (weight.double() - up.double() @ down.double()).norm()
    torch.testing.assert_close(left, sizes[rank:].norm(), atol=1e-5, rtol=1e-5)
    # both factors carry the roots, so that they learn at one rate
    torch.testing.assert_close(down.double().norm(dim=1), sizes[:rank].sqrt(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(up.double().norm(dim=0), sizes[:rank].sqrt(), atol=1e-4, rtol=1e-4)


def test_a_matrix_of_small_rank_is_found_whole_and_zero_stays_zero():
    weight = normal(20, 3) @ normal(3, 30, seed=1)
    down, up = truncated_svd(weight, 5)
    torch.testing.assert_close(up @ down, weight, atol=1e-4, rtol=0)
    down, up = truncated_svd(torch.zeros(4, 6), 2)
    assert torch.equal(up @ down, torch.zeros(4, 6))


def test_the_error_of_every_matrix_falls_by_what_the_decomposition_says(pair):
    original, quantized = pair
    adapted = recovery_adapter(original, quantized, rank=4, alpha=8)
    changes = adapted.changes()
    assert len(changes) == 14
    for layer in changes:
        before, after = (module.get_submodule(layer).weight.data.double() for module in (original, quantized))
        error = before - after
        down, up = (factor.double() for factor in changes[layer])
        left = float((error - up @ down).norm())
        assert left == pytest.approx(float(torch.linalg.svdvals(error)[4:].norm()), rel=1e-5)
        assert left < 0.95 * float(error.norm())


def test_the_adapted_model_begins_nearer_to_the_original_and_learns_to_be_nearer_still(pair):
    original, quantized = pair
    batch = TokenBatch(IDS[:, :-1], IDS[:, 1:])
    objective = Distillation(original, weight=1.0)
    distances = []
    for svd in (False, True):
        adapted = recovery_adapter(original if svd else None, quantized, rank=4, svd_init=svd)
        loss = objective(adapted, batch, torch.Generator())
        distances.append(float(loss.metrics["divergence"]) / loss.count)
    assert 0 < distances[1] < 0.8 * distances[0]
    Trainer(
        adapted, objective, [batch] * 15, steps=15, optimizer=AdamW(lr=3e-3, weight_decay=0.0), show_progress=False
    ).fit()
    loss = objective(adapted, batch, torch.Generator())
    assert float(loss.metrics["divergence"]) / loss.count < 0.7 * distances[1]


@pytest.mark.skipif(native.library() is None, reason="the native kernels are not built")
def test_the_start_over_packed_weights_is_that_over_dense_ones(tiny):
    original, packed = copy.deepcopy(tiny.module), copy.deepcopy(tiny.module).bfloat16()
    dense = copy.deepcopy(packed).float()
    packed.pack()
    expected = residual_pairs(original, dense, 3)
    for layer, (down, up) in residual_pairs(original, packed, 3).items():
        torch.testing.assert_close(up @ down, expected[layer][1] @ expected[layer][0], atol=1e-6, rtol=1e-3)


def test_what_stays_after_the_largest_vectors_moved_is_easier_to_quantize():
    outliers = 3 * normal(48, 2) @ normal(2, 64, seed=1)
    weight = normal(48, 64, seed=2) + outliers
    (down, up), rest = split_singular_vectors(weight, 2)
    torch.testing.assert_close(up @ down + rest, weight, atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.linalg.svdvals(rest)[:46], torch.linalg.svdvals(weight)[2:], atol=1e-3, rtol=0)
    together = (up @ down + rounded(rest) - weight).norm()
    assert float(together) < 0.7 * float((rounded(weight) - weight).norm())


def test_what_makes_no_sense_is_refused_by_name(pair, tiny):
    original, quantized = pair
    with pytest.raises(InvalidArgument, match="needs the model before quantization"):
        recovery_adapter(None, quantized)
    for rank in (0, 5):
        with pytest.raises(
            InvalidArgument, match=rf"the weight is \(4, 6\), which has fewer than {rank} singular vectors"
        ):
            truncated_svd(torch.ones(4, 6), rank)
    other = copy.deepcopy(original)
    del other.layers[1]
    with pytest.raises(InvalidArgument, match="the original has 7 of the target matrices, the quantized one 14"):
        residual_pairs(other, quantized, 2)
    original.layers[1].mlp.up_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(InvalidInput, match=r"layers\.1\.mlp\.up_proj holds values that are not finite"):
        residual_pairs(original, quantized, 2)
    original.layers[0].mlp.up_proj.weight.data = torch.zeros(7, 32)
    with pytest.raises(InvalidArgument, match=r"layers\.0\.mlp\.up_proj is \(7, 32\) in one decoder and \(48, 32\)"):
        residual_pairs(original, quantized, 2)
    assert len(select_targets(quantized, "up_proj", 2)) == 2
