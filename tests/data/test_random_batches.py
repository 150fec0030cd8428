"""Random batches against the loops that they replace, and taken up again in the middle."""

import itertools
import json

import pytest
import torch

from pippin.core.errors import InvalidArgument
from pippin.data.random_batches import RandomBatches, resampled
from pippin.data.streams import DataStream

X = torch.arange(7.0)


def test_rows_are_those_of_a_loop_over_randint():
    def noisy(index, generator):
        return X[index] + torch.rand(3, generator=generator)

    generator = torch.Generator().manual_seed(5)
    for batch in itertools.islice(resampled(7, 3, noisy, seed=5), 4):
        index = torch.randint(7, (3,), generator=generator)
        assert torch.equal(batch, X[index] + torch.rand(3, generator=generator))


def test_rows_are_as_likely_as_their_weights():
    weights = torch.tensor([0.0, 1.0, 3.0])
    batch = next(iter(resampled(3, 8000, lambda index, _: index, weights=weights, seed=1)))
    share = torch.bincount(batch, minlength=3) / 8000
    torch.testing.assert_close(share, weights / 4, rtol=0, atol=0.02)


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_a_stream_goes_on_where_its_state_says(taken):
    def stream():
        return resampled(7, 4, lambda index, _: index.tolist(), seed=2)

    whole = list(itertools.islice(stream(), 6))
    first = stream()
    assert isinstance(first, DataStream)
    begun = list(itertools.islice(first, taken))
    second = stream()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert begun + list(itertools.islice(second, 6 - taken)) == whole


def test_two_iterations_of_one_stream_share_its_cursor():
    stream = RandomBatches(lambda generator: int(torch.randint(1000, (), generator=generator)), seed=0)
    one = list(itertools.islice(stream, 3))
    again = RandomBatches(stream.make, seed=0)
    assert [next(iter(again)) for _ in range(3)] == one


@pytest.mark.parametrize("arguments", [{"n": 0}, {"batch_size": 0}, {"weights": torch.ones(3)}])
def test_numbers_that_do_not_fit_are_refused(arguments):
    with pytest.raises(InvalidArgument):
        resampled(**({"n": 7, "batch_size": 2} | arguments), make=lambda index, _: index)
