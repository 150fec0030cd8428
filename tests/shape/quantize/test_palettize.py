"""Palettes: means that Lloyd's algorithm would not move, the published error, and widths that fit an average."""

import numpy as np
import pytest
import torch

import pippin
from pippin.core.errors import InvalidArgument
from pippin.language.quantized_checkpoint import save_quantized
from pippin.shape.quantize import mixed_precision
from pippin.shape.quantize.palettize import PalettizationConfig, palette_of, palettize


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# Source: the card of arXiv:2507.13575 and Max 1960, table I: the best four and eight values for a normal law.
@pytest.mark.parametrize(("bits", "error", "largest"), [(2, 0.1175, 1.510), (3, 0.03454, 2.152)])
def test_a_normal_law_gets_the_best_values_that_are_known(bits, error, largest):
    found = palette_of(normal(400, 1000), bits, group=400, max_iterations=150)
    assert float((found.dense() - normal(400, 1000)).square().mean()) == pytest.approx(error, abs=0.001)
    assert float(found.tables.max()) == pytest.approx(largest, abs=0.03)


@pytest.mark.parametrize("weighted", [False, True])
def test_values_are_the_weighted_means_of_what_points_to_them(weighted):
    weight = normal(1, 500).double().float()
    felt = torch.rand(1, 500, generator=torch.Generator().manual_seed(1)) if weighted else torch.ones(1, 500)
    found = palette_of(weight, 2, group=1, importance=felt if weighted else None, max_iterations=200)
    x, w, table = weight[0].numpy(), felt[0].numpy() + 1e-3 * felt.mean().item(), found.tables[0].float().numpy()
    nearest = np.abs(x[:, None] - table).argmin(1)
    assert (found.indices[0].numpy() == nearest).all()
    for k in range(4):
        assert table[k] == pytest.approx(np.average(x[nearest == k], weights=w[nearest == k]), abs=2e-3)


def test_a_weight_that_is_felt_is_kept_better():
    weight, felt = normal(16, 64), torch.full((16, 64), 1e-3)
    felt[:, :4] = 1000.0
    error = {
        name: (palette_of(weight, 2, importance=pull).dense() - weight)[:, :4].square().mean()
        for name, pull in (("alike", None), ("felt", felt))
    }
    assert error["felt"] < 0.5 * error["alike"]


@pytest.mark.parametrize("axis", ["rows", "columns"])
def test_groups_at_the_edge_are_smaller_and_have_a_table_of_their_own(axis):
    weight = normal(20, 20)
    weight[16:] *= 100 if axis == "rows" else 1
    found = palette_of(weight, 4, axis, 16)
    assert found.tables.shape == (2, 16)
    other = palette_of(weight.T.contiguous(), 4, "columns" if axis == "rows" else "rows", 16)
    assert torch.equal(found.dense(), other.dense().T)
    assert (found.dense() - weight)[:16].abs().max() < 1


def test_a_model_of_tables_is_saved_and_loaded(tiny, tmp_path):
    import copy
    from dataclasses import replace

    model = replace(tiny, network=copy.deepcopy(tiny.module))
    ids = torch.randint(0, 255, (3, 24), generator=torch.Generator().manual_seed(0))
    settings = PalettizationConfig(average_bits=3.0, group=16)
    found = palettize(model, settings, ids)
    inner = {name: one for name, one in found.items() if name != "embed_tokens"}
    sizes = {name: one.indices.numel() for name, one in inner.items()}
    spent = sum(one.bits * sizes[name] for name, one in inner.items()) / sum(sizes.values())
    assert {one.bits for one in inner.values()} == {2, 4}
    assert 2.5 < spent <= 3.0
    assert found["embed_tokens"].bits == 4
    save_quantized(tmp_path, model, found)
    loaded = pippin.load(tmp_path, device="cpu", pack=False)
    for name, one in found.items():
        assert torch.equal(loaded.module.get_submodule(name).weight, one.dense())
    # those whose loss falls most for a bit got four
    felt = mixed_precision.squared_gradients(model, pippin.shape.quantize.config.QuantizationConfig(), ids)
    assert set(felt) == set(inner)


def test_what_cannot_be_done_is_refused(tiny):
    with pytest.raises(InvalidArgument, match="average_bits must be from 2 to 4, got 5"):
        PalettizationConfig(average_bits=5.0)
    with pytest.raises(InvalidArgument, match="needs calibration text"):
        palettize(tiny, PalettizationConfig(average_bits=3.5))
    with pytest.raises(InvalidArgument, match="q_proj holds values that half precision cannot"):
        palette_of(torch.full((2, 2), 1e6), 2, name="q_proj")
    with pytest.raises(InvalidArgument, match="bits must be 2, 3, 4 or 8, got 6"):
        palette_of(torch.ones(2, 2), 6)
