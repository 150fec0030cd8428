"""A word list from the vocabulary of a language model.

Notable here:
- a byte-pair vocabulary holds frequent words whole, in order of frequency: a word list with ranks
- words near a misspelling are found through deletions that both have in common, not by trying all words
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Literal

from pippin.data.text.tokenizer import Tokenizer
from pippin.kits.text.edits import edit_distance
from pippin.kits.text.english_words import CAPITALIZED, CONTRACTIONS, FUNCTION_WORDS, word_set

Familiarity = Literal["known", "derived", "unknown"]

_SHORT = word_set(
    """
    a i ad ah am an as at ax be by do eh ex go ha he hi ho id if in is it ma me my no of oh ok on or ox pa so to tv uh
    uk up us vs we
    """
)
_SUFFIXES = (
    "s",
    "es",
    "ed",
    "d",
    "ing",
    "ly",
    "er",
    "ers",
    "r",
    "rs",
    "est",
    "ness",
    "less",
    "able",
    "ful",
    "ment",
    "ish",
    "th",
)


class Lexicon:
    """Words with ranks.

    Args:
        words: the most frequent first; capitalized only if they are never written in lower case.

    >>> lexicon = Lexicon(["the", "their", "they", "receive"])
    >>> lexicon.nearest("recieve"), lexicon.familiarity("received")
    (['receive'], 'derived')
    """

    def __init__(self, words: Iterable[str]) -> None:
        self.ranks: dict[str, int] = {}
        for word in (*FUNCTION_WORDS, *words):
            self.ranks.setdefault(word, len(self.ranks))
        self._index: dict[str, list[str]] = defaultdict(list)
        for word in self.ranks:
            if len(word) > 1:
                for short in (word.lower(), *_deletions(word.lower())):
                    self._index[short].append(word)

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int) -> Lexicon:
        """The words of a vocabulary of that size: tokens that are a space and letters of the Latin alphabet."""
        small: dict[str, None] = {}
        capital: dict[str, None] = {}
        for index in range(vocab_size):
            token = tokenizer.token_bytes(index)
            word = token[1:].decode("ascii", "ignore")
            if token[:1] != b" " or len(word) != len(token) - 1 or not word.isalpha():
                continue
            if word.islower() and (len(word) > 2 or word in _SHORT):
                small[word] = None
            elif word.istitle() and len(word) > 2:
                capital[word] = None
        return cls([*small, *(word for word in capital if word.lower() not in small)])

    def familiarity(self, word: str) -> Familiarity:
        """Whether a word is in the list, derived from one that is (as "walked" from "walk"), or neither."""
        small = word.lower().replace("’", "'")
        if small in self.ranks or small.capitalize() in self.ranks or small in _SHORT or small in CONTRACTIONS.values():
            return "known"
        if small.endswith("'s") or small.endswith("s'"):
            return "known" if self.familiarity(small[:-2]) == "known" else self.familiarity(small[:-2])
        return "derived" if any(stem in self.ranks for stem in _stems(small)) else "unknown"

    def is_name(self, word: str) -> bool:
        """Whether a word is only known with a capital letter.

        >>> Lexicon(["London", "city"]).is_name("london")
        True
        """
        small = word.lower()
        return small in CAPITALIZED or (small not in self.ranks and small.capitalize() in self.ranks)

    def nearest(self, word: str, *, max_distance: int = 2) -> list[str]:
        """Words within that edit distance (at most 2), nearest first and then most frequent first."""
        small = word.lower()
        seen: set[str] = set()
        queries = {small, *_deletions(small)}
        if max_distance > 1:
            queries |= {shorter for query in list(queries) for shorter in _deletions(query)}
        for query in queries:
            seen.update(self._index.get(query, ()))
        found = [
            (edit_distance(small, other.lower(), max_distance=max_distance), self.ranks[other], other) for other in seen
        ]
        return [other for gap, _, other in sorted(found) if 0 < gap <= max_distance or (gap == 0 and other != word)]

    def splits(self, word: str) -> Iterator[str]:
        """Two words that make this one when the space is missing.

        >>> list(Lexicon(["lot"]).splits("alot"))
        ['a lot']
        """
        for at in range(1, len(word)):
            one, other = word[:at].lower(), word[at:]
            if ((one in self.ranks and len(one) > 2) or one in _SHORT) and (
                (other in self.ranks and len(other) > 2) or other in _SHORT
            ):
                yield f"{word[:at]} {other}"


def _deletions(word: str) -> Iterator[str]:
    return (word[:at] + word[at + 1 :] for at in range(len(word))) if len(word) > 1 else iter(())


def _stems(word: str) -> Iterator[str]:
    """Stems before a suffix: "stopped" gives "stop", "tries" gives "try", "using" gives "use"."""
    for suffix in _SUFFIXES:
        stem = word.removesuffix(suffix)
        if stem == word or len(stem) < 2:
            continue
        if len(stem) > 2:
            yield stem
        if suffix[0] in "eia":
            yield stem + "e"
        if stem[-1] == "i":
            yield stem[:-1] + "y"
        if len(stem) > 3 and stem[-1] == stem[-2]:
            yield stem[:-1]
    for prefix in ("un", "re", "non", "over", "under", "pre", "mis", "dis", "out"):
        if word.startswith(prefix) and len(word) > len(prefix) + 2:
            yield word.removeprefix(prefix)
