"""The embedding table, plain and packed, against indexing."""

import pytest
import torch

from pippin.core import native
from pippin.core.errors import InvalidArgument
from pippin.nn.embedding import TokenEmbedding
from pippin.nn.packed_layers import PackedTokenEmbedding, pack
from pippin.nn.quantization.packed import NativeWeight, quantize

with_kernels = pytest.mark.skipif(native.library() is None, reason="the native kernels are not built")
IDS = torch.tensor([[4, 0, 4], [9, 1, 2]])


@pytest.fixture
def table() -> TokenEmbedding:
    made = TokenEmbedding(10, 64)
    made.weight.data = torch.randn(10, 64, generator=torch.Generator().manual_seed(0))
    return made


def test_vectors_are_the_rows(table):
    weight = table.weight.data
    assert torch.equal(table(IDS), weight[IDS])
    assert torch.equal(table.dense_weight(), weight)
    assert (table.device, table.dtype) == (torch.device("cpu"), torch.float32)
    assert table.to(torch.bfloat16).dtype == torch.bfloat16
    with pytest.raises(IndexError):
        table(torch.tensor([10]))


def test_it_is_trained(table):
    table(IDS).sum().backward()
    assert table.weight.grad.sum(1).tolist() == [64, 64, 64, 0, 128, 0, 0, 0, 0, 64]


@with_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_it_gives_the_same_vectors(table, dtype):
    weight = table.weight.data.to(dtype)
    table.weight.data = weight
    table = pack(table)
    assert table.weight is None
    assert torch.equal(table(IDS), weight[IDS].float())
    assert torch.equal(table.dense_weight(), weight.float())
    assert (table.device, table.dtype) == (torch.device("cpu"), torch.float32)
    assert list(table.parameters()) == []
    assert pack(table) is table
    with pytest.raises(InvalidArgument):
        table(torch.tensor([10]))


@with_kernels
def test_it_holds_any_packed_format(table):
    weight = NativeWeight.from_codes(*quantize(table.weight.data, 4), 4, 64)
    table = PackedTokenEmbedding(weight, table.rows, table.width)
    assert torch.equal(table(IDS), weight.dense()[IDS])


def test_what_has_no_kernels_stays_as_it_is(table):
    half = table.to(torch.float16)
    assert pack(half) is half
