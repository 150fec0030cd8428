"""Budgets of layers: their sensitivity against transformers with a mask, and how a budget is divided."""

from itertools import pairwise

import pytest
import torch

from pippin.core import native
from pippin.core.errors import InvalidArgument
from pippin.engine import Engine
from pippin.engine.kv_eviction import H2O, allocate_budgets, measure_layer_sensitivity

IDS = torch.randint(260, (400,), generator=torch.Generator().manual_seed(5)).tolist()
KERNELS = pytest.mark.skipif(native.library() is None, reason="the native kernels are not built")


@pytest.fixture(scope="module")
def theirs(random_llama):
    return random_llama(4)


def keys_under(theirs, ids, mask):
    bias = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)[None, None]
    with torch.no_grad():
        done = theirs(torch.tensor([ids]), attention_mask=bias)
    return [layer.keys[0] for layer in done.past_key_values.layers]


@pytest.mark.parametrize("pack", [pytest.param(True, marks=KERNELS), False])
def test_sensitivity_is_the_change_of_keys_under_a_mask_of_blocks(theirs, as_model, pack):
    with Engine(as_model(theirs, pack=pack), max_num_seqs=1) as engine:
        found = measure_layer_sensitivity(engine, IDS, block_size=60, sink_tokens=10, overlap=0.5)
    whole = 41 + (400 - 41) // 60 * 60
    mask = torch.ones(whole, whole, dtype=torch.bool).tril()
    for end in range(41 + 60, whole, 60):  # behind each block the first 10 and the last 31 tokens stay
        mask[end:, 10 : end - 31] = False
    full, blocks = (keys_under(theirs, IDS[:whole], each) for each in (torch.ones_like(mask).tril(), mask))
    wanted = [1 - torch.cosine_similarity(one, other, dim=-1).mean() for one, other in zip(full, blocks, strict=True)]
    torch.testing.assert_close(torch.tensor(found), torch.stack(wanted), rtol=1e-3, atol=1e-5)
    assert found[0] < 1e-5 < min(found[1:])  # keys of the first layer depend on no other token


def test_a_short_text_loses_nothing(tiny):
    with (
        Engine(tiny, max_num_seqs=1) as engine,
        pytest.raises(InvalidArgument, match="a text of 400 tokens loses nothing; give more than 1,665"),
    ):
        measure_layer_sensitivity(engine, IDS)


@pytest.mark.parametrize("budget", [64, 100, 333])
@pytest.mark.parametrize("alpha", [0.0, 1.0, 2.0, 8.0])
@pytest.mark.parametrize("floor", [0.0, 0.25, 0.9])
def test_the_whole_is_given_out_and_nobody_gets_less_than_the_floor(budget, alpha, floor):
    sensitivity = torch.rand(24, generator=torch.Generator().manual_seed(1)).tolist()
    found = allocate_budgets(sensitivity, budget, alpha=alpha, floor=floor)
    assert sum(found) == 24 * budget
    assert min(found) >= int(floor * budget)
    order = sorted(range(24), key=sensitivity.__getitem__)
    assert all(found[one] <= found[other] + 1 for one, other in pairwise(order))
    if alpha == 0:
        assert set(found) == {budget}
    H2O(budget=1000, layer_budgets=allocate_budgets(sensitivity, 1000, alpha=alpha, floor=0.25))


def test_equal_layers_get_the_same():
    assert allocate_budgets([0.0, 0.0], 50) == (50, 50)
    assert allocate_budgets([0.3, 0.3], 50) == (50, 50)


@pytest.mark.parametrize("bad", [[], [0.1, -1.0], [float("nan")]])
def test_bad_sensitivities_are_refused(bad):
    with pytest.raises(InvalidArgument, match=r"layer|finite"):
        allocate_budgets(bad, 50)
