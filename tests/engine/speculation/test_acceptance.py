"""The rules of acceptance against the distributions that they promise, written out; thousands of draws each."""

import pytest
import torch

from pippin.core.errors import DecodingFailure, InvalidArgument
from pippin.engine.decoding.sampling import sample_index
from pippin.engine.speculation import CoarseAcceptance, ExactAcceptance, TokenGroups, verify
from pippin.engine.speculation.acceptance import decide

DRAWS = 6000


def distributions(seed, size=10, sharp=3.0):
    """Two distributions that have something in common; some tokens are impossible under one or both."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(size, generator=generator)
    both = []
    for _ in range(2):
        distribution = (sharp * (base + torch.randn(size, generator=generator)) / 2).double().softmax(-1)
        distribution[torch.randperm(size, generator=generator)[:2]] = 0
        both.append(distribution / distribution.sum())
    return both


def overlapping(seed, size=10, theta=0.35):
    weight = torch.randn(size, 3, generator=torch.Generator().manual_seed(seed))
    return TokenGroups.from_embeddings(weight, theta)


def run(q, p, groups, max_thinning=64, draws=DRAWS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [decide(sample_index(q, generator), q, p, generator, groups, max_thinning) for _ in range(draws)]


def count(values, size=10):
    return torch.bincount(torch.tensor(values), minlength=size)


@pytest.mark.parametrize("max_thinning", [64, 1, 0])
@pytest.mark.parametrize("seed", range(2))
def test_tokens_follow_the_target_whatever_the_draft(seed, max_thinning, chi_square):
    q, p = distributions(seed)
    decisions = run(q, p, None, max_thinning)
    assert chi_square(count([one.token for one in decisions]), p) > 0.001
    accepted = sum(one.accepted for one in decisions) / DRAWS
    assert accepted == pytest.approx(float(torch.minimum(p, q).sum()), abs=4 * (0.25 / DRAWS) ** 0.5)


@pytest.mark.parametrize("max_thinning", [64, 1, 0])
@pytest.mark.parametrize("seed", range(2))
def test_groups_follow_the_target_and_tokens_the_distribution_that_is_reported(seed, max_thinning, chi_square):
    q, p = distributions(seed)
    groups = overlapping(seed)
    assert groups.stats()["max_size"] >= 3
    decisions = run(q, p, groups, max_thinning)
    # written out over all pairs: w[k, t] is the share of token t that group k gets
    member = torch.zeros(10, 10, dtype=torch.float64)
    for token in range(10):
        member[groups.group_of(token), token] = 1
    w = member / member.sum(0)
    coarse_p, coarse_q = w @ p, w @ q
    assert chi_square(count([one.group for one in decisions]), coarse_p) > 0.001
    both, rest = torch.minimum(coarse_p, coarse_q), (coarse_p - coarse_q).clamp(min=0)
    inside = [(w * distribution / (w @ distribution)[:, None]).nan_to_num(0.0) for distribution in (q, p)]
    tokens = both @ inside[0] + rest @ inside[1]
    assert chi_square(count([one.token for one in decisions]), tokens) > 0.001
    accepted = sum(one.accepted for one in decisions) / DRAWS
    assert accepted == pytest.approx(float(both.sum()), abs=4 * (0.25 / DRAWS) ** 0.5)
    assert float(both.sum()) >= float(torch.minimum(p, q).sum()) - 1e-12  # data processing
    assert all(member[one.group, one.token] for one in decisions)


def test_disjoint_families_keep_their_law(chi_square):
    """A family is what a listener hears: with disjoint groups it can be read off the token itself."""
    q, p = distributions(3, size=12)
    family = torch.arange(12) // 3
    weight = torch.eye(4)[family]
    decisions = run(q, p, TokenGroups.from_embeddings(weight, 0.5))
    heard = family[torch.tensor([one.token for one in decisions])]
    distribution = torch.zeros(4, dtype=torch.float64).index_add_(0, family, p)
    assert chi_square(torch.bincount(heard, minlength=4), distribution) > 0.001


@pytest.mark.parametrize("seed", range(5))
def test_with_each_token_on_its_own_the_rules_agree_draw_for_draw(seed):
    q, p = distributions(seed)
    alone = TokenGroups.from_embeddings(torch.randn(10, 3), 1.0)
    for max_thinning in (64, 0):
        assert run(q, p, alone, max_thinning, 300) == run(q, p, None, max_thinning, 300)


def test_a_guess_that_was_not_drawn_is_checked_by_the_target_s_own_draw():
    _, p = distributions(0)
    one, other = (torch.Generator().manual_seed(5) for _ in range(2))
    for _ in range(200):
        token, accepted = ExactAcceptance().step(3, None, p, one)
        assert token == sample_index(p, other)
        assert accepted == (token == 3)


def test_a_greedy_target_takes_guesses_from_the_groups_of_its_choice():
    groups = TokenGroups.from_embeddings(torch.eye(4)[torch.arange(12) // 3], 0.5)
    p = torch.zeros(12, dtype=torch.float64).index_fill_(0, torch.tensor(4), 1.0)
    generator = torch.Generator().manual_seed(0)
    rule = CoarseAcceptance(groups)
    assert [rule.step(token, None, p, generator) for token in (3, 4, 5)] == [(3, True), (4, True), (5, True)]
    assert [rule.step(token, None, p, generator) for token in (0, 6, 11)] == [(4, False)] * 3


def test_a_draft_equal_to_the_target_always_stays():
    q, _ = distributions(0)
    assert all(one.accepted for one in run(q, q.clone(), None, draws=500))
    assert all(one.accepted for one in run(q, q.clone(), overlapping(0), draws=500))


def test_a_draft_without_anything_in_common_never_stays():
    q = torch.tensor([0.5, 0.5, 0, 0], dtype=torch.float64)
    assert {one.token for one in run(q, q.flip(0), None, 0, 200)} == {2, 3}
    assert {one.token for one in run(q, q.flip(0), None, 64, 200)} == {2, 3}


def test_a_whole_draft_ends_at_its_first_rejection_or_with_one_more_token(chi_square):
    q, p = distributions(0), distributions(1)
    drafts, targets = torch.stack(q), torch.stack([*p, distributions(2)[0]])
    generator = torch.Generator().manual_seed(0)
    results = []
    for _ in range(3000):
        tokens = [sample_index(distribution, generator) for distribution in drafts]
        results.append(ExactAcceptance()(tokens, drafts, targets, generator))
        assert results[-1].accepted == len(results[-1].tokens) - 1
        assert list(results[-1].tokens[:-1]) == tokens[: results[-1].accepted]
    for place in range(3):
        drawn = [one.tokens[place] for one in results if len(one.tokens) > place]
        assert chi_square(count(drawn), targets[place]) > 0.001
    assert {one.exact for one in results} == {"token"}
    assert CoarseAcceptance(overlapping(0))([0], drafts[:1].clamp(min=0.0), targets[:2], generator).exact == "group"


def test_what_does_not_fit_is_refused():
    q, p = distributions(0)
    generator = torch.Generator()
    rule = ExactAcceptance()
    with pytest.raises(InvalidArgument, match="2 guesses need as many distributions"):
        rule([1, 2], q[None], p[None], generator)
    with pytest.raises(InvalidArgument, match="sum of 2"):
        rule([1], 2 * q[None], p.expand(2, -1), generator)
    with pytest.raises(InvalidArgument, match="token id 10 is outside"):
        rule([10], q[None], p.expand(2, -1), generator)
    with pytest.raises(InvalidArgument, match="are of 3 tokens, the model's vocabulary has 10"):
        CoarseAcceptance(TokenGroups.from_embeddings(torch.eye(3), 0.5))([1], q[None], p.expand(2, -1), generator)
    impossible = int((q == 0).nonzero()[0])
    with pytest.raises(DecodingFailure, match=f"the draft gave token {impossible}"):
        verify(rule, [impossible], q[None], p.expand(2, -1), generator)
