"""Groups of tokens against brute force over all pairs."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from pippin.core.errors import CorruptedFile, InvalidArgument
from pippin.engine.speculation import TokenGroups


def random_weight(seed, size=40, width=6):
    return torch.randn(size, width, generator=torch.Generator().manual_seed(seed))


def matrix(groups):
    """Membership as a full matrix: row k holds the members of group k."""
    full = torch.zeros(groups.vocab_size, groups.vocab_size, dtype=torch.bool)
    for token in range(groups.vocab_size):
        full[token, groups.group_of(token)] = True
    return full


@given(st.integers(0, 1000), st.floats(-1.1, 1.1), st.integers(1, 50), st.sets(st.integers(0, 39)))
@settings(max_examples=40, deadline=None)
def test_groups_are_the_pairs_with_a_large_cosine(seed, theta, chunk, kept):
    weight = random_weight(seed)
    groups = TokenGroups.from_embeddings(weight, theta, token_ids=sorted(kept), batch_size=chunk)
    cosine = torch.nn.functional.cosine_similarity(weight[:, None].double(), weight[None].double(), dim=-1)
    wanted = cosine > theta
    outside = [token for token in range(40) if token not in kept]
    wanted[outside], wanted[:, outside] = False, False
    if theta >= 1:
        wanted[:] = False
    wanted |= torch.eye(40, dtype=torch.bool)
    unsure = (cosine - theta).abs() < 1e-5
    assert torch.equal(matrix(groups) | unsure, wanted | unsure)


@given(st.integers(0, 1000), st.floats(-0.5, 1.0))
@settings(max_examples=30, deadline=None)
def test_coarse_distributions_are_the_split_probabilities_added_up(seed, theta):
    groups = TokenGroups.from_embeddings(random_weight(seed), theta)
    full = matrix(groups).double()
    distribution = torch.rand(3, 40, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) ** 4
    distribution /= distribution.sum(-1, keepdim=True)
    torch.testing.assert_close(groups.coarse(distribution), (full @ (distribution / full.sum(0)).T).T)
    assert groups.coarse(distribution).sum(-1).tolist() == pytest.approx([1, 1, 1])
    assert groups.group_probability(distribution[0], 7) == pytest.approx(float(groups.coarse(distribution[0])[7]))


def test_groups_of_a_token_are_drawn_evenly(chi_square):
    groups = TokenGroups.from_embeddings(random_weight(0), 0.5)
    token = int(groups.sizes.argmax())
    generator = torch.Generator().manual_seed(0)
    drawn = torch.bincount(torch.tensor([groups.sample_group(token, generator) for _ in range(4000)]), minlength=40)
    distribution = torch.zeros(40)
    distribution[groups.group_of(token)] = 1 / len(groups.group_of(token))
    assert chi_square(drawn, distribution) > 0.001


def test_a_token_that_stands_alone_takes_no_random_number():
    groups = TokenGroups.from_embeddings(random_weight(0), 1.0)
    generator = torch.Generator().manual_seed(0)
    before = generator.get_state()
    assert [groups.sample_group(token, generator) for token in range(40)] == list(range(40))
    assert torch.equal(generator.get_state(), before)
    assert groups.stats()["singletons"] == 1


def test_shuffled_groups_have_the_same_sizes_and_overlaps_and_other_members():
    groups = TokenGroups.from_embeddings(random_weight(1), 0.6, token_ids=range(30))
    other = groups.shuffled(torch.Generator().manual_seed(0))
    assert not torch.equal(matrix(other), matrix(groups))
    assert torch.equal(other.sizes.sort().values, groups.sizes.sort().values)
    eigenvalues = [torch.linalg.eigvalsh(matrix(one).double()) for one in (groups, other)]
    torch.testing.assert_close(*eigenvalues)  # the same graph under other names
    assert (other.sizes[30:] == 1).all()


def test_stats_count():
    groups = TokenGroups(torch.tensor([0, 2, 4, 5]), torch.tensor([0, 1, 0, 1, 2]))
    assert groups.stats() == {
        "mean_size": pytest.approx(5 / 3),
        "max_size": 2,
        "singletons": pytest.approx(1 / 3),
        "bytes": 4 * 8 + 5 * 4,
    }


def test_what_is_saved_is_read_back(tmp_path):
    groups = TokenGroups.from_embeddings(random_weight(2), 0.4)
    groups.save(tmp_path / "groups.safetensors")
    again = TokenGroups.load(tmp_path / "groups.safetensors")
    assert torch.equal(matrix(again), matrix(groups))


def test_a_file_of_something_else_is_refused(tmp_path):
    from safetensors.torch import save_file

    path = tmp_path / "other.safetensors"
    save_file({"starts": torch.zeros(2)}, path)
    with pytest.raises(CorruptedFile, match="no token groups"):
        TokenGroups.load(path)
    groups = TokenGroups.from_embeddings(random_weight(2), 0.4)
    groups.save(path)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(CorruptedFile, match="is damaged"):
        TokenGroups.load(path)
    groups.neighbors[0] = 999
    groups.save(path)
    with pytest.raises(CorruptedFile, match="outside the vocabulary"):
        TokenGroups.load(path)


@pytest.mark.parametrize("theta", [float("nan"), float("inf")])
def test_a_threshold_that_is_no_number_is_refused(theta):
    with pytest.raises(InvalidArgument, match="finite"):
        TokenGroups.from_embeddings(random_weight(0), theta)


@pytest.mark.parametrize("ids", [[-1], [40]])
def test_tokens_outside_the_table_are_refused(ids):
    with pytest.raises(InvalidArgument, match="the table has 40 rows"):
        TokenGroups.from_embeddings(random_weight(0), 0.5, token_ids=ids)


def test_an_embedding_that_is_not_finite_is_refused():
    weight = random_weight(0)
    weight[3, 2] = torch.nan
    with pytest.raises(InvalidArgument, match="not finite"):
        TokenGroups.from_embeddings(weight, 0.5)


@pytest.mark.parametrize(
    ("starts", "neighbors", "message"),
    [
        ([0], [], "rise from 0"),
        ([0, 0, 1], [1], "rise from 0"),
        ([0, 1, 3], [0, 1], "rise from 0"),
        ([0, 1, 2], [0, 2], "outside the vocabulary"),
        ([0, 2, 3], [0, 1, 1], "mutual"),
        ([0, 2, 4], [1, 0, 0, 1], "sorted"),
        ([0, 1, 2], [1, 0], "its own neighbors"),
    ],
)
def test_arrays_that_are_no_groups_are_refused(starts, neighbors, message):
    with pytest.raises(InvalidArgument, match=message):
        TokenGroups(torch.tensor(starts), torch.tensor(neighbors, dtype=torch.long))


@pytest.mark.parametrize(
    ("distribution", "message"),
    [([0.5, 0.5, 0.0], "over 3 tokens"), ([1.5, -0.5], "at least 0"), ([0.5, 0.4], "sum of 0.9")],
)
def test_what_is_no_distribution_is_refused(distribution, message):
    groups = TokenGroups.from_embeddings(torch.eye(2), 0.5)
    with pytest.raises(InvalidArgument, match=message):
        groups.coarse(torch.tensor(distribution))
