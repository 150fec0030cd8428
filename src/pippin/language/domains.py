r"""Domains of a corpus: clusters of its documents, and how a few documents of somebody's spread over them.

Notable here:
- a domain is a centroid of k-means over vectors of documents, weights are a histogram of nearest centroids: a handful
  of documents says what mixture of the corpus is like them, and nobody has to name anything
- vectors come from a sentence encoder, or from hashed n-grams of bytes, which need no model
- centroids stay with the name of what made the vectors, so that later documents are measured by the same rule
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from pippin.core.errors import InvalidArgument, InvalidInput
from pippin.data.records import Record, read_records

NGRAMS: Final = "n-grams"
"""The name of `HashedNGrams`; any other name is that of a sentence encoder."""
TOLERANCE: Final = 1e-4
"""How far from 1 the sum of weights may be."""


@runtime_checkable
class Embedding(Protocol):
    """What turns documents into vectors."""

    def embed(self, texts: Sequence[str], /) -> Float[Tensor, "texts width"]:
        """One vector for each text, of length 1."""


@dataclass(frozen=True)
class HashedNGrams:
    """Signed roots of counts of hashed byte n-grams, scaled to length 1.

    Attributes:
        width: numbers in a vector.
        longest: bytes of the longest n-grams.

    Source: feature hashing with signs, Weinberger et al. 2009, arXiv:0902.2206.

    >>> one, same, other = HashedNGrams().embed(["a cat, a cat", "a cat", "0x7f3a"])
    >>> float(one @ same) > float(one @ other)
    True
    """

    width: int = 512
    longest: int = 3

    def __post_init__(self) -> None:
        if self.width < 1 or not 1 <= self.longest <= 7:
            raise InvalidArgument(f"width ({self.width}) must be at least 1 and longest ({self.longest}) from 1 to 7")

    def embed(self, texts: Sequence[str]) -> Float[Tensor, "texts width"]:
        """One vector for each text, of length 1.

        Raises:
            InvalidInput: an empty text.
        """
        return torch.stack([self._vector(index, text) for index, text in enumerate(texts)])

    def _vector(self, index: int, text: str) -> Tensor:
        values = np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8).astype(np.uint64)
        if not len(values):
            raise InvalidInput(f"text {index} is empty; leave it out")
        counts = np.zeros(self.width)
        codes = np.zeros(len(values), np.uint64)
        for size in range(1, min(self.longest, len(values)) + 1):
            codes = (codes[: len(values) - size + 1] << np.uint64(8)) | values[size - 1 :]
            # Fibonacci hashing: the upper half of a product is well mixed
            mixed = ((codes + np.uint64(size << 56)) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)
            place, sign = (mixed >> np.uint64(1)) % np.uint64(self.width), 1.0 - 2.0 * (mixed & np.uint64(1))
            counts += np.bincount(place.astype(np.int64), sign, self.width)
        vector = torch.from_numpy(np.sign(counts) * np.sqrt(np.abs(counts))).float()
        return F.normalize(vector, dim=0)


@dataclass(frozen=True)
class Sentences:
    """A sentence encoder of `load_encoder`; of a text that is too long it reads the beginning."""

    ref: str = "all-minilm-l6-v2"

    def embed(self, texts: Sequence[str]) -> Float[Tensor, "texts width"]:
        """One vector for each text, of length 1; errors of `load_encoder` and `TextEncoder.embed`."""
        vectors: Tensor = _encoder(self.ref).embed(texts, truncate=True)
        return vectors


@cache
def _encoder(ref: str) -> Any:
    from pippin.language.encoder import load_encoder

    return load_encoder(ref)


def embedding(name: str) -> Embedding:
    """What makes vectors under this name: `NGRAMS`, or a sentence encoder as `load_encoder` takes it."""
    return HashedNGrams() if name == NGRAMS else Sentences(name)


def kmeans(
    vectors: Float[Tensor, "items width"], count: int, *, seed: int = 0, tries: int = 4, iterations: int = 100
) -> Float[Tensor, "count width"]:
    """Centroids with a small sum of squared distances: Lloyd's iterations from starts that are spread out.

    A cluster that loses all its items goes on from the item that is farthest from its centroid.

    Args:
        vectors: at least ``count`` different ones.
        count: number of clusters.
        seed: of the starts.
        tries: starts, of which the best is taken.
        iterations: of each, at most; they end where nothing moves.

    Raises:
        InvalidArgument: numbers out of range, fewer different vectors than clusters, or vectors that are not finite.

    Source: starts by k-means++, Arthur and Vassilvitskii 2007, algorithm 1.

    >>> points = torch.tensor([[0.0], [1.0], [10.0], [11.0]])
    >>> kmeans(points, 2).flatten().sort().values.tolist()
    [0.5, 10.5]
    """
    if count < 1 or tries < 1 or iterations < 1:
        raise InvalidArgument(f"count ({count}), tries ({tries}) and iterations ({iterations}) must be at least 1")
    if not bool(vectors.isfinite().all()):
        raise InvalidArgument("vectors to be clustered must be finite")
    different = len(torch.unique(vectors, dim=0))
    if different < count:
        raise InvalidArgument(
            f"{count} clusters need as many different items, and there are {different}; ask for fewer, or give more"
        )
    generator = torch.Generator().manual_seed(seed)
    best, least = vectors[:count], float("inf")
    for _ in range(tries):
        centroids = _spread(vectors, count, generator)
        for _ in range(iterations):
            moved = _moved(vectors, centroids)
            if torch.equal(moved, centroids):
                break
            centroids = moved
        total = float(torch.cdist(vectors, centroids).amin(1).square().sum())
        if total < least:
            best, least = centroids, total
    return best


def _spread(vectors: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Starts: each next one drawn with a chance that grows with the squared distance to those before."""
    chosen = [int(torch.randint(len(vectors), (), generator=generator))]
    apart = (vectors - vectors[chosen[0]]).square().sum(1)
    while len(chosen) < count:
        chosen.append(int(torch.multinomial(apart, 1, generator=generator)))
        apart = torch.minimum(apart, (vectors - vectors[chosen[-1]]).square().sum(1))
    return vectors[chosen]


def _moved(vectors: Tensor, centroids: Tensor) -> Tensor:
    """The means of the items that are nearest to each centroid."""
    apart, nearest = torch.cdist(vectors, centroids).min(1)
    sizes = torch.bincount(nearest, minlength=len(centroids))
    sums = torch.zeros_like(centroids).index_add_(0, nearest, vectors)
    moved = sums / sizes.clamp(min=1)[:, None]
    for empty in (sizes == 0).nonzero().flatten().tolist():
        far = int(apart.argmax())
        moved[empty], apart[far] = vectors[far], 0.0
    return moved


def domain_weights(
    embeddings: Float[Tensor, "texts width"], centroids: Float[Tensor, "domains columns"]
) -> Float[Tensor, domains]:
    """The share of documents that are nearest to each centroid; sums to 1.

    Raises:
        InvalidArgument: no documents, or vectors of another width than the centroids.

    >>> domain_weights(torch.tensor([[0.1], [0.9], [1.2], [1.0]]), torch.tensor([[0.0], [1.0]])).tolist()
    [0.25, 0.75]
    """
    if not len(embeddings) or embeddings.shape[1] != centroids.shape[1]:
        raise InvalidArgument(
            f"{len(embeddings)} vectors of width {embeddings.shape[1]} cannot be spread over domains of width "
            f"{centroids.shape[1]}; give at least one, made by the same rule as the centroids"
        )
    nearest = torch.cdist(embeddings, centroids).argmin(1)
    return torch.bincount(nearest, minlength=len(centroids)) / len(embeddings)


@dataclass(frozen=True, eq=False)
class Domains:
    """Names of domains, and where the documents of each are to be found.

    Attributes:
        names: all different.
        centroids: the middle of each; None where documents cannot be sorted into them.
        embedding: the name of what made the vectors.
        sizes: share of the corpus in each domain; empty where that is not known.

    Raises:
        InvalidArgument: no names, two the same, or not one centroid and one size for each.
    """

    names: tuple[str, ...]
    centroids: Float[Tensor, "domains width"] | None = None
    embedding: str = NGRAMS
    sizes: tuple[float, ...] = field(default=())

    def __post_init__(self) -> None:
        if not self.names or len(set(self.names)) < len(self.names):
            raise InvalidArgument(f"domains need names that are all different, got {list(self.names)}")
        for what in (self.centroids, self.sizes or None):
            if what is not None and len(what) != len(self.names):
                raise InvalidArgument(f"{len(self.names)} domains were given {len(what)} centroids or sizes")

    def __len__(self) -> int:
        return len(self.names)

    @classmethod
    def cluster(
        cls, texts: Sequence[str], count: int, *, embedding: str = NGRAMS, seed: int = 0, labels: Sequence[str] = ()
    ) -> tuple[Domains, Int[Tensor, texts]]:
        """Find domains in a corpus.

        Args:
            texts: its documents.
            count: how many domains.
            embedding: `NGRAMS`, or a sentence encoder.
            seed: of k-means.
            labels: of each document, to name a domain by the one that is nearest to its middle.

        Returns:
            The domains, and the index of the domain of each document.

        Raises:
            InvalidArgument: fewer different documents than domains.
            InvalidInput: an empty document.
        """
        vectors = _vectors(texts, embedding)
        centroids = kmeans(vectors, count, seed=seed)
        apart = torch.cdist(vectors, centroids)
        nearest = apart.argmin(1)
        sizes = torch.bincount(nearest, minlength=count) / len(vectors)
        middle = apart.argmin(0).tolist()
        names = [f"{index}-{labels[at]}" if labels else str(index) for index, at in enumerate(middle)]
        return cls(tuple(names), centroids, embedding, tuple(sizes.tolist())), nearest

    @classmethod
    def given(cls, texts: Mapping[str, Sequence[str]], *, embedding: str = NGRAMS) -> Domains:
        """Domains that are known by name; the centroid of each is the mean of its documents' vectors."""
        centroids = [_vectors(documents, embedding).mean(0) for documents in texts.values()]
        total = sum(map(len, texts.values()))
        sizes = tuple(len(documents) / total for documents in texts.values())
        return cls(tuple(texts), torch.stack(centroids), embedding, sizes)

    def weights(self, texts: Sequence[str]) -> Float[Tensor, domains]:
        """How documents spread over the domains.

        Raises:
            InvalidArgument: no documents, or domains without centroids.
            InvalidInput: an empty document.
        """
        if self.centroids is None:
            raise InvalidArgument("these domains have no centroids to sort documents by; give weights instead")
        return domain_weights(_vectors(texts, self.embedding), self.centroids)

    def of_files(self, paths: Sequence[str | Path]) -> Float[Tensor, domains]:
        """How the documents of files and folders spread over the domains; they are read as `read_records` does.

        Raises:
            InvalidArgument: a path that does not exist, or of an unknown kind; domains without centroids.
            InvalidRecord: a file that cannot be read.
        """
        return self.weights([text for _, text in texts_of(read_records(paths))])

    def parsed(self, text: str) -> Float[Tensor, domains]:
        """Weights that a line of text says: "news=0.5,code=0.5"; a domain's number does for its name.

        Raises:
            InvalidArgument: text of another form, an unknown name, or weights that do not sum to 1.

        >>> Domains(("news", "code")).parsed("code=0.75,0=0.25").tolist()
        [0.25, 0.75]
        """
        shares: dict[str, float] = {}
        for part in text.split(","):
            name, equals, number = (word.strip() for word in part.rpartition("="))
            if name.isdigit() and name not in self.names and int(name) < len(self):
                name = self.names[int(name)]
            try:
                shares[name] = shares.get(name, 0.0) + float(number if equals else "")
            except ValueError as error:
                raise InvalidArgument(f"weights are written as news=0.5,code=0.5, not {part!r}") from error
        return self.checked(shares)

    def checked(self, weights: Any) -> Float[Tensor, domains]:
        """Weights as a tensor: from numbers in the order of the names, or a mapping from names (others get 0).

        Raises:
            InvalidArgument: an unknown name, a wrong number of weights, or weights that are negative, not finite or do
                not sum to 1.
        """
        if isinstance(weights, Mapping):
            if unknown := [name for name in weights if name not in self.names]:
                raise InvalidArgument(f"there is no domain {unknown[0]!r}; there are {', '.join(self.names)}")
            weights = [float(weights.get(name, 0.0)) for name in self.names]
        values = torch.as_tensor(weights, dtype=torch.float32)
        if values.shape != (len(self),):
            raise InvalidArgument(f"{len(self)} domains need as many weights, got shape {tuple(values.shape)}")
        lowest, total = torch.stack([values.min(), values.sum()]).tolist()
        if not (lowest >= 0.0 and abs(total - 1.0) <= TOLERANCE):
            raise InvalidArgument(
                f"weights of domains are not negative and sum to 1; the lowest is {lowest:.6g}, the sum {total:.6g}"
            )
        return values


def _vectors(texts: Sequence[str], name: str) -> Tensor:
    if not texts:
        raise InvalidArgument("there are no documents; give at least one")
    return embedding(name).embed(texts)


def texts_of(records: Iterable[Record]) -> list[tuple[Record, str]]:
    """What is written in each record that is not blank: its text, its prompt and completion, or all of its turns."""
    found = []
    for record in records:
        turns = [str(message.get("content", "")) for message in record.messages]
        text = "\n".join([*([record.prompt] if record.prompt else []), *turns, record.text]).strip()
        if text:
            found.append((record, text))
    return found
