import pytest
import torch

from pippin.core.errors import InvalidArgument
from pippin.data.token_batches import IGNORE, TokenBatch


def test_what_is_ignored_is_not_counted():
    targets = torch.tensor([[1, IGNORE, 2], [IGNORE, IGNORE, IGNORE]])
    assert TokenBatch(torch.zeros(2, 3, dtype=torch.long), targets).learned == 2


@pytest.mark.parametrize(
    ("documents", "message"), [((3, 2), "documents of 5 tokens"), ((6, 0), "shortest has 0"), ((), "documents of 0")]
)
def test_documents_that_do_not_fill_the_rows_are_refused(documents, message):
    ids = torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(InvalidArgument, match=message):
        TokenBatch(ids, ids, documents)
