"""Self-speculation against the decoder's own layers: early exit while drafting, the rest while checking."""

import pytest
import torch

from pippin.core.errors import InvalidArgument
from pippin.engine.decoding.sampling import Sampler
from pippin.engine.model_runner import ModelInput
from pippin.engine.options import SamplingOptions
from pippin.engine.runners.torch_runner import TorchRunner
from pippin.engine.speculation import CachePosition
from pippin.engine.speculation.self_draft import SelfDrafter, shared_depth

IDS = [0, 1, 2, 3, 2, 1, 0, 3]


@pytest.fixture
def model(make_small):
    """Five layers, of which the last three read the keys of earlier ones."""
    return make_small(3, size=8, layers=5, sources=(None, None, 1, 1, 0), spread=4.0)


class Counting(TorchRunner):
    """Remembers what it was asked."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.inputs = []

    def forward(self, inputs):
        self.inputs += inputs
        return super().forward(inputs)


def test_the_depth_is_that_of_the_last_layer_with_keys(model, make_small):
    assert shared_depth(model) == 2
    with pytest.raises(InvalidArgument, match="small 0 cannot draft for itself"):
        shared_depth(make_small(0, layers=3, sources=(None, 0, None)))


@pytest.mark.parametrize("held", [0, 4, 7])
@pytest.mark.parametrize("room", [1, 4])
def test_guesses_are_an_early_exit_and_the_check_goes_on_from_there(model, memo_runner, held, room):
    runner, table = Counting(model, 4), [2, 0, 3, 1]
    if held:
        runner.forward([ModelInput(IDS[:held], 0, table, [])])
        runner.inputs.clear()
    drafter = SelfDrafter(model, torch.Generator().manual_seed(0), skip_forced=True)
    draft = drafter.draft(IDS, room, Sampler(SamplingOptions(), IDS, 8), None, CachePosition(runner, table, held))
    # an oracle without a cache: the first two layers alone
    memo, longer = memo_runner(model), list(IDS)
    while len(longer) < len(IDS) + room and longer[-1] != 7:
        longer.append(int(memo.row(tuple(longer), 2).argmax()))
    assert draft.tokens == longer[len(IDS) :]
    assert draft.resume == 2
    assert all(model_input.depth == 2 for model_input in runner.inputs)
    assert sum(len(model_input.token_ids) for model_input in runner.inputs) == len(IDS) - held + len(draft.tokens)
    # checking computes only the upper layers, and gives what the whole model gives
    fed = [*IDS[held:], *draft.tokens]
    outputs = list(range(len(IDS) - held - 1, len(fed)))
    model_input = ModelInput(fed, held, table, outputs, resume=draft.resume, residual=draft.residual)
    (logits,) = runner.forward([model_input])
    for row, end in zip(logits, range(len(IDS), len(longer) + 1), strict=True):
        torch.testing.assert_close(row, memo.row(tuple(longer[:end])), atol=1e-4, rtol=1e-4)
    # and what drafting left in the cache is what a plain pass leaves there
    (after,) = runner.forward([ModelInput([5], len(longer), table, [0])])
    torch.testing.assert_close(after[0], memo.row((*longer, 5)), atol=1e-4, rtol=1e-4)


def test_without_a_place_there_is_no_draft(model):
    drafter = SelfDrafter(model, torch.Generator(), skip_forced=True)
    assert drafter.draft(IDS, 3, Sampler(SamplingOptions(), IDS, 8), None, None) is None
