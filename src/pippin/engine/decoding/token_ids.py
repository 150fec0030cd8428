"""Checks of token ids against a vocabulary, and the common prefix of two sequences."""

from __future__ import annotations

from collections.abc import Sequence

from pippin.core.errors import InvalidArgument
from pippin.language.language_model import LanguageModel


def check_token_ids(model: LanguageModel, token_ids: Sequence[int]) -> None:
    """Raise for a token id that the model does not have.

    Raises:
        InvalidArgument: an id outside the vocabulary.
    """
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= model.vocab_size:
        raise InvalidArgument(f"token id {low if low < 0 else high} is outside the vocabulary of {model.vocab_size:,}")


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common prefix of two sequences, in tokens.

    >>> common_prefix([1, 2, 3], [1, 2, 4, 5])
    2
    """
    low, high = 0, min(len(one), len(other))
    first, second = list(one[:high]), list(other[:high])
    if first == second:
        return high
    while low + 1 < high:  # the first ``low`` are equal, the first ``high`` are not
        middle = (low + high) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle
    return low
