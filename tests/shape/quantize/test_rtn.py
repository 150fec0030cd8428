"""Oracles: exhaustive search of scales, brute-force nearest levels, brute-force budgets, gradients of single rows."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from pippin.core.errors import InvalidArgument
from pippin.language import LanguageModel
from pippin.nn.quantization.codes import Codes
from pippin.shape.quantize import mixed_precision, rtn
from pippin.shape.quantize.calibration import matrices
from pippin.shape.quantize.config import QuantizationConfig


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("levels", ["balanced", "unbalanced"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("granularity", ["group", "channel", "tensor"])
@pytest.mark.parametrize("init", ["newton", "absmax"])
def test_every_code_is_that_of_the_nearest_level(bits, levels, granularity, init):
    weight = normal(4, 128)
    settings = QuantizationConfig(bits=bits, levels=levels, granularity=granularity, init=init)
    found = rtn.round_weight(weight, bits, settings)
    scale = found.scales.float().repeat_interleave(128 // found.scales.shape[1], 1).expand(4, -1)
    values = (torch.arange(2**bits) - rtn.zero_of(bits, settings)) * scale[..., None]
    distance = (values - weight[..., None]).abs()
    chosen = distance.gather(2, found.codes.long()[..., None])[..., 0]
    torch.testing.assert_close(chosen, distance.amin(-1), rtol=0, atol=1e-6)
    assert found.scales.shape == {"group": (4, 2), "channel": (4, 1), "tensor": (1, 1)}[granularity]


@pytest.mark.parametrize("levels", ["balanced", "unbalanced"])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_searched_scales_are_close_to_the_best_of_a_fine_grid(bits, levels):
    weight = normal(32, 64, seed=bits)
    settings = QuantizationConfig(bits=bits, levels=levels)
    zero = rtn.zero_of(bits, settings)

    def error(scales):
        return (rtn_dense(weight, scales, bits, zero) - weight).square().sum(-1)

    grid = torch.stack([error(weight.abs().amax(-1, keepdim=True) * s / zero) for s in torch.linspace(0.1, 1.2, 400)])
    found = (rtn.round_weight(weight, bits, settings).dense() - weight).square().sum(-1)
    absmax = rtn.round_weight(weight, bits, QuantizationConfig(bits=bits, levels=levels, init="absmax"))
    assert found.sum() < 1.06 * grid.amin(0).sum()
    assert found.sum() < (absmax.dense() - weight).square().sum()


def rtn_dense(weight, scales, bits, zero):
    return ((weight / scales + zero).round().clamp(0, 2**bits - 1) - zero) * scales


def test_gaussian_error_is_that_of_the_best_balanced_levels():
    weight = normal(100, 4096)
    settings = QuantizationConfig(granularity="tensor")
    found = rtn.round_weight(weight, 2, settings)
    assert (found.dense() - weight).square().mean().item() == pytest.approx(0.119, abs=2e-3)  # Max 1960, table I
    unbalanced = rtn.round_weight(weight, 2, QuantizationConfig(granularity="tensor", levels="unbalanced"))
    assert (unbalanced.dense() - weight).square().mean().item() == pytest.approx(0.150, abs=2e-3)


def test_clipped_share_counts_what_lies_beyond_the_levels():
    weight = torch.tensor([[-2.0, -1.9, 0.4, 1.0, 2.1, 2.0, 0.0, 9.0]])
    codes = Codes(torch.zeros(1, 8, dtype=torch.uint8), torch.ones(1, 1).half(), bits=2, zero_point=1.5)
    assert rtn.clipped_share(weight, codes) == 2 / 8  # beyond 1.5 + 0.5 there are 2.1 and 9


def test_a_model_gets_the_widths_that_were_asked_for(tiny):
    settings = QuantizationConfig(bits=2, granularity="channel", embedding_bits=8, skip=("layers.0.mlp.up_proj",))
    codes = rtn.quantize(tiny, settings, bits={"layers.1.self_attn.q_proj": 4})
    assert codes.keys() == matrices(tiny.module).keys() - {"layers.0.mlp.up_proj"}
    wanted = {"embed_tokens": 8, "layers.1.self_attn.q_proj": 4}
    assert {name: matrix.bits for name, matrix in codes.items() if matrix.bits != 2} == wanted


@pytest.mark.parametrize(
    ("weight", "fields", "message"),
    [
        (torch.zeros(2, 64), {}, "layer is all zero"),
        (torch.full((2, 64), torch.nan), {}, "layer holds values that are not finite"),
        (torch.ones(2, 50), {}, "layer has rows of 50 weights, which groups of 64 do not divide"),
        (torch.full((2, 64), 1e6), {"init": "absmax"}, "holds 1e.06, too large"),
    ],
)
def test_weights_that_have_no_codes_are_named(weight, fields, message):
    with pytest.raises(InvalidArgument, match=message):
        rtn.round_weight(weight, 4, QuantizationConfig(**fields), name="layer")


def test_packed_and_empty_models_are_refused(tiny):
    import copy

    packed = copy.deepcopy(tiny.module).pack()
    with pytest.raises(InvalidArgument, match="packed for inference; load the model with pack=False"):
        rtn.quantize(LanguageModel("packed", packed, tiny.tokenizer, None), QuantizationConfig())
    with torch.device("meta"):
        empty = type(tiny.module)(tiny.config)
    with pytest.raises(InvalidArgument, match="meta device"):
        rtn.quantize(LanguageModel("empty", empty, tiny.tokenizer, None), QuantizationConfig())


# --- mixed widths -----------------------------------------------------------------------------------------------------


def test_energies_are_the_squared_gradients_of_single_rows(tiny):
    ids = torch.randint(0, 256, (3, 10), generator=torch.Generator().manual_seed(0))
    name = "layers.1.mlp.down_proj"
    wanted = torch.zeros_like(tiny.module.get_submodule(name).weight)
    tiny.module.requires_grad_(True)
    for row in ids:
        loss = F.cross_entropy(tiny.module(row[None])[0, :-1], row[1:], reduction="sum")
        wanted += torch.autograd.grad(loss, tiny.module.get_submodule(name).weight)[0].square()
    found = mixed_precision.squared_gradients(tiny, QuantizationConfig(), ids)
    torch.testing.assert_close(found[name], wanted)
    assert all(parameter.requires_grad for parameter in tiny.module.parameters())
    assert "embed_tokens" not in found


@pytest.mark.parametrize("seed", range(5))
def test_no_other_choice_of_the_same_size_costs_less(seed):
    generator = torch.Generator().manual_seed(seed)
    names = "abcd"
    scale = {name: torch.rand(1, generator=generator).item() + 0.01 for name in names}
    costs = {name: {bits: scale[name] * 4.0**-bits for bits in (2, 3, 4, 8)} for name in names}
    found = mixed_precision.allocate(costs, dict.fromkeys(names, 10), average_bits=3.25)
    spent = sum(found.values())
    assert spent <= 13
    total = sum(costs[name][bits] for name, bits in found.items())
    for other in itertools.product((2, 3, 4, 8), repeat=4):
        if sum(other) <= spent:
            assert total <= sum(costs[name][bits] for name, bits in zip(names, other, strict=True)) + 1e-12


def test_sensitive_matrices_get_more_bits(tiny):
    settings = QuantizationConfig(granularity="channel")
    ids = torch.randint(0, 256, (4, 16), generator=torch.Generator().manual_seed(0))
    seen = []
    costs = mixed_precision.sensitivities(tiny, settings, ids, on_matrix=seen.append)
    assert seen == list(costs)
    assert all(by[2] > by[3] > by[4] > by[8] >= 0 for by in costs.values())
    widths = mixed_precision.choose_bits(tiny, settings, ids, average_bits=3.0)
    sizes = {name: matrices(tiny.module)[name].weight.numel() for name in widths}
    assert sum(widths[name] * sizes[name] for name in widths) <= 3.0 * sum(sizes.values())
    assert len(set(widths.values())) > 1


def test_an_average_that_no_width_gives_is_refused():
    with pytest.raises(InvalidArgument, match="average_bits must be from 2 to 8"):
        mixed_precision.allocate({}, {}, 1.5)
