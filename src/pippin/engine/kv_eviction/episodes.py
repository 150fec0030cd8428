"""Episodes of a conversation: its segments, clustered by topic, and what stands for each.

Source: Kim et al. 2025, EpiCache, arXiv:2509.17396, section 3.2.

Notable here:
- a segment is some consecutive utterances; a long utterance is cut into sentences first
- without an encoder, texts are compared by their words: counts of hashed words, weighted by how rare they are in the
  conversation; a sentence encoder also knows words that mean the same
- centroids are normalized before a question is compared with them
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

LONG_UTTERANCE: Final = 500
"""Characters from which an utterance is cut into sentences."""
_SHORTEST: Final = 10  # characters of a sentence that is more than an exclamation
_WIDTH: Final = 4096  # hashed words
_RESTARTS, _ITERATIONS = 10, 100
_WORD: Final = re.compile(r"\w+")
_SENTENCE_END: Final = re.compile(r"(?<=[.!?…。！？])\s+|\n+")  # full-width marks end sentences too


class Utterance(NamedTuple):
    """What one speaker said at once."""

    speaker: str
    text: str


@runtime_checkable
class SegmentEncoder(Protocol):
    """What `EpiCache` needs of a sentence encoder, such as `pippin.load_encoder` returns."""

    def embed(self, texts: Sequence[str], *, truncate: bool = False) -> Float[Tensor, "texts width"]:
        """Normalized vectors of texts."""


@dataclass(frozen=True)
class WordEncoder:
    """Compares texts by their words.

    Attributes:
        rarity: weight of each hashed word.

    >>> encoder = WordEncoder.fit(["The cat sleeps.", "A dog barks.", "The cat eats."])
    >>> one, other, third = encoder.embed(["my cat", "the cat", "some dog"])
    >>> bool(one @ other > one @ third)
    True
    """

    rarity: Float[Tensor, words]

    @classmethod
    def fit(cls, texts: Sequence[str]) -> WordEncoder:
        """Learn from texts which words are rare."""
        known = torch.zeros(_WIDTH)
        for text in texts:
            known[list(_words(text))] += 1
        return cls(torch.log((1 + len(texts)) / (1 + known)))  # nothing for words that are in every text

    def embed(self, texts: Sequence[str], *, truncate: bool = False) -> Float[Tensor, "texts width"]:
        """See `SegmentEncoder`."""
        counts = torch.zeros(len(texts), _WIDTH)
        for row, text in enumerate(texts):
            for word, count in _words(text).items():
                counts[row, word] = count
        return F.normalize(counts.log1p() * self.rarity, dim=-1)


def _words(text: str) -> Counter[int]:
    """Hashed words with their counts; the same in every process."""
    return Counter(zlib.crc32(word.encode()) % _WIDTH for word in _WORD.findall(text.casefold()))


def segments(utterances: Sequence[Utterance], per_segment: int) -> list[str]:
    """The conversation as segments of consecutive utterances, each a line of who said what.

    >>> segments([Utterance("user", "Hi."), Utterance("assistant", "Hello!"), Utterance("user", "Bye.")], 2)
    ['user said, "Hi."\\nassistant said, "Hello!"', 'user said, "Bye."']
    """
    lines = [
        f'{speaker} said, "{part}"'
        for speaker, text in utterances
        for part in (_sentences(text) if len(text) > LONG_UTTERANCE else [text])
        if part.strip()
    ]
    return ["\n".join(lines[at : at + per_segment]) for at in range(0, len(lines), per_segment)]


def _sentences(text: str) -> list[str]:
    return [part for part in _SENTENCE_END.split(text) if len(part) > _SHORTEST] or [text]


@dataclass(frozen=True)
class Episodes:
    """The topics of a conversation.

    Attributes:
        labels: the episode of each segment.
        centroids: normalized mean of each episode's segments.
    """

    labels: Int[Tensor, segments]
    centroids: Float[Tensor, "episodes width"]

    @classmethod
    def cluster(cls, vectors: Float[Tensor, "segments width"], count: int, *, seed: int = 0) -> Episodes:
        """Cluster segments by k-means, the best of ten beginnings; there are no more episodes than segments.

        Args:
            vectors: normalized vector of each segment, at least one.
            count: episodes.
            seed: of the beginnings.
        """
        generator = torch.Generator().manual_seed(seed)
        found = [_kmeans(vectors, min(count, len(vectors)), generator) for _ in range(_RESTARTS)]
        labels = min(found, key=lambda each: each[1])[0]
        # clusters that became empty, as with equal segments, are left out
        _, labels = labels.unique(return_inverse=True)
        sums = torch.zeros(int(labels.max()) + 1, vectors.shape[1]).index_add_(0, labels, vectors)
        return cls(labels, F.normalize(sums, dim=-1))

    def match(self, vector: Float[Tensor, width]) -> tuple[int, float]:
        """The episode that a text belongs to, and the cosine to its centroid."""
        cosines = self.centroids @ F.normalize(vector, dim=0)
        best = int(cosines.argmax())
        return best, float(cosines[best])

    def medoids(self, vectors: Float[Tensor, "segments width"], episode: int, count: int) -> list[int]:
        """The segments nearest to the centroid of an episode, in the order of the conversation."""
        members = (self.labels == episode).nonzero().flatten()
        # rounded, or the last bits of equal ones would decide, which differ between processors
        similar = (vectors[members] @ self.centroids[episode]).mul(1e5).round()
        nearest = similar.argsort(descending=True, stable=True)[:count]
        return sorted(members[nearest].tolist())

    def add(self, vector: Float[Tensor, width]) -> Episodes:
        """With one more episode, which has no segment yet."""
        return Episodes(self.labels, torch.cat([self.centroids, F.normalize(vector, dim=0)[None]]))


def _kmeans(
    vectors: Float[Tensor, "segments width"], count: int, generator: torch.Generator
) -> tuple[Int[Tensor, segments], float]:
    """Labels, and the sum of squared distances, of k-means that begins as k-means++ does.

    Source: Arthur and Vassilvitskii 2007.
    """
    chosen = [int(torch.randint(len(vectors), (), generator=generator))]
    for _ in range(count - 1):
        distances = torch.cdist(vectors, vectors[chosen]).amin(1).square()
        weights = distances if distances.sum() > 0 else torch.ones_like(distances)
        chosen.append(int(torch.multinomial(weights, 1, generator=generator)))
    centers = vectors[chosen]
    labels = torch.full((len(vectors),), -1)
    for _ in range(_ITERATIONS):
        nearest = torch.cdist(vectors, centers).argmin(1)
        if torch.equal(nearest, labels):
            break
        labels = nearest
        sizes = labels.bincount(minlength=count)
        sums = torch.zeros_like(centers).index_add_(0, labels, vectors)
        centers = torch.where(sizes[:, None] > 0, sums / sizes.clamp(min=1)[:, None], centers)
    return labels, float((vectors - centers[labels]).square().sum())
