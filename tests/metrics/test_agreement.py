"""Agreement against scikit-learn."""

import pytest
from hypothesis import given, strategies as st
from sklearn import metrics as oracle

from pippin import metrics
from pippin.core.errors import InvalidInput

LABELS = st.sampled_from(["harmful", "refused", "partial", "helpful"])


@given(st.lists(st.tuples(LABELS, LABELS), min_size=2, max_size=60))
def test_kappa_is_scikit_learns(pairs):
    first, second = zip(*pairs, strict=True)
    if len(set(first) | set(second)) == 1:
        assert metrics.cohen_kappa(first, second) == 1.0
    else:
        assert metrics.cohen_kappa(first, second) == pytest.approx(oracle.cohen_kappa_score(first, second), abs=1e-9)


@pytest.mark.parametrize(("first", "second", "message"), [([], [], "0 and 0"), ("ab", "a", "2 and 1")])
def test_kappa_needs_the_same_cases(first, second, message):
    with pytest.raises(InvalidInput, match=message):
        metrics.cohen_kappa(first, second)


VOTES = st.one_of(st.none(), LABELS)


@given(st.lists(st.lists(VOTES, min_size=3, max_size=3), min_size=2, max_size=12))
def test_alpha_is_one_less_the_share_of_pairs_that_differ_over_that_of_chance(cases):
    """Brute force over pairs, as Krippendorff defines it."""
    paired = [[label for label in case if label is not None] for case in cases]
    paired = [case for case in paired if len(case) > 1]
    if not paired:
        with pytest.raises(InvalidInput, match="two labels or more"):
            metrics.krippendorff_alpha(cases)
        return
    everything = [label for case in paired for label in case]
    n = len(everything)
    within = sum(
        sum(a != b for i, a in enumerate(case) for j, b in enumerate(case) if i != j) / (len(case) - 1)
        for case in paired
    )
    chance = sum(a != b for i, a in enumerate(everything) for j, b in enumerate(everything) if i != j)
    expected = 1.0 if chance == 0 else 1 - (within / n) / (chance / (n * (n - 1)))
    assert metrics.krippendorff_alpha(cases) == pytest.approx(expected)


def test_alpha_of_krippendorffs_own_example():
    """Four observers, twelve units, with missing labels: 0.743 (Computing Krippendorff's Alpha-Reliability, 2011)."""
    rows = [
        [1, 2, 3, 3, 2, 1, 4, 1, 2, None, None, None],
        [1, 2, 3, 3, 2, 2, 4, 1, 2, 5, None, 3],
        [None, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, None],
        [1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, None],
    ]
    assert metrics.krippendorff_alpha(list(zip(*rows, strict=True))) == pytest.approx(0.743, abs=5e-4)
