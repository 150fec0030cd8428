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
