r"""Domains of a corpus: clusters of its documents, and the domain weights of a few documents of a user.

Notable here:
- a domain is a centroid of k-means over document embeddings, domain weights are a histogram of nearest centroids: a
  few documents determine a mixture, without labels
- embeddings are from a sentence encoder, or from hashed n-grams of bytes, which need no model
- centroids are stored with the name of their embedding, so that later documents are embedded in the same way
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, Protocol, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from annotated_types import Ge, Le
from jaxtyping import Float, Int
from torch import Tensor

from pippin.core.checks import PositiveInt, checked
from pippin.core.errors import InvalidArgument, InvalidInput
from pippin.data.records import TrainingRecord, read_records

NGRAMS: Final = "n-grams"
"""The name of `HashedNGrams`; any other name is that of a sentence encoder."""
TOLERANCE: Final = 1e-4
"""Maximum difference of the sum of weights from 1."""


@runtime_checkable
class DocumentEmbedding(Protocol):
    """The interface of document embeddings."""

    def embed(self, texts: Sequence[str], /) -> Float[Tensor, "texts width"]:
        """One vector for each text, of length 1."""


@checked
@dataclass(frozen=True)
class HashedNGrams:
    """Signed roots of counts of hashed byte n-grams, scaled to length 1.

    Attributes:
        size: dimensions of a vector.
        max_n: bytes of the longest n-grams, at most 7.

    Source: feature hashing with signs, Weinberger et al. 2009, arXiv:0902.2206.

    >>> one, same, other = HashedNGrams().embed(["a cat, a cat", "a cat", "0x7f3a"])
    >>> float(one @ same) > float(one @ other)
    True
    """

    size: PositiveInt = 512
    max_n: Annotated[int, Ge(1), Le(7)] = 3

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
        counts = np.zeros(self.size)
        codes = np.zeros(len(values), np.uint64)
        for size in range(1, min(self.max_n, len(values)) + 1):
            codes = (codes[: len(values) - size + 1] << np.uint64(8)) | values[size - 1 :]
            # Fibonacci hashing: the upper half of a product is well mixed
            mixed = ((codes + np.uint64(size << 56)) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)
            bucket, sign = (mixed >> np.uint64(1)) % np.uint64(self.size), 1.0 - 2.0 * (mixed & np.uint64(1))
            counts += np.bincount(bucket.astype(np.int64), sign, self.size)
        vector = torch.from_numpy(np.sign(counts) * np.sqrt(np.abs(counts))).float()
        return F.normalize(vector, dim=0)


@dataclass(frozen=True)
class SentenceEmbedding:
    """A sentence encoder of `load_encoder`; texts that are too long are truncated."""

    ref: str = "all-minilm-l6-v2"

    def embed(self, texts: Sequence[str]) -> Float[Tensor, "texts width"]:
        """One vector for each text, of length 1; errors of `load_encoder` and `TextEncoder.embed`."""
        vectors: Tensor = _encoder(self.ref).embed(texts, truncate=True)
        return vectors


@cache
def _encoder(ref: str) -> Any:
    from pippin.language.encoder import load_encoder

    return load_encoder(ref)


def embedding(name: str) -> DocumentEmbedding:
    """The document embedding of a name: `NGRAMS`, or a reference for `load_encoder`."""
    return HashedNGrams() if name == NGRAMS else SentenceEmbedding(name)


@checked
def kmeans(
    vectors: Float[Tensor, "items width"],
    num_clusters: PositiveInt,
    *,
    seed: int = 0,
    num_init: PositiveInt = 4,
    max_iterations: PositiveInt = 100,
) -> Float[Tensor, "count width"]:
    """Centroids of k-means: Lloyd's iterations, initialized by k-means++.

    A cluster that loses all its items continues from the item that is farthest from its centroid.

    Args:
        vectors: at least ``num_clusters`` different ones.
        num_clusters: number of clusters.
        seed: seed of the initializations.
        num_init: number of initializations, of which the best result is returned.
        max_iterations: maximum iterations of each; they end when no centroid changes.

    Raises:
        InvalidArgument: numbers out of range, fewer different vectors than clusters, or vectors that are not finite.

    Source: k-means++, Arthur and Vassilvitskii 2007, algorithm 1.

    >>> points = torch.tensor([[0.0], [1.0], [10.0], [11.0]])
    >>> kmeans(points, 2).flatten().sort().values.tolist()
    [0.5, 10.5]
    """
    if not bool(vectors.isfinite().all()):
        raise InvalidArgument("vectors to be clustered must be finite")
    different = len(torch.unique(vectors, dim=0))
    if different < num_clusters:
        raise InvalidArgument(
            f"{num_clusters} clusters need as many different items, and there are {different}; ask for fewer, or give "
            "more"
        )
    generator = torch.Generator().manual_seed(seed)
    best, least = vectors[:num_clusters], float("inf")
    for _ in range(num_init):
        centroids = _kmeans_plus_plus(vectors, num_clusters, generator)
        for _ in range(max_iterations):
            means = _cluster_means(vectors, centroids)
            if torch.equal(means, centroids):
                break
            centroids = means
        total = float(torch.cdist(vectors, centroids).amin(1).square().sum())
        if total < least:
            best, least = centroids, total
    return best


def _kmeans_plus_plus(vectors: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Initial centroids, each sampled with probability proportional to the squared distance to the nearest one."""
    chosen = [int(torch.randint(len(vectors), (), generator=generator))]
    distances = (vectors - vectors[chosen[0]]).square().sum(1)
    while len(chosen) < count:
        chosen.append(int(torch.multinomial(distances, 1, generator=generator)))
        distances = torch.minimum(distances, (vectors - vectors[chosen[-1]]).square().sum(1))
    return vectors[chosen]


def _cluster_means(vectors: Tensor, centroids: Tensor) -> Tensor:
    """The means of the items that are nearest to each centroid."""
    distances, nearest = torch.cdist(vectors, centroids).min(1)
    sizes = torch.bincount(nearest, minlength=len(centroids))
    sums = torch.zeros_like(centroids).index_add_(0, nearest, vectors)
    means = sums / sizes.clamp(min=1)[:, None]
    for empty in (sizes == 0).nonzero().flatten().tolist():
        far = int(distances.argmax())
        means[empty], distances[far] = vectors[far], 0.0
    return means


def domain_weights(
    embeddings: Float[Tensor, "texts width"], centroids: Float[Tensor, "domains columns"]
) -> Float[Tensor, domains]:
    """The fraction of documents that are nearest to each centroid; sums to 1.

    Raises:
        InvalidArgument: no documents, or vectors of another width than the centroids.

    >>> domain_weights(torch.tensor([[0.1], [0.9], [1.2], [1.0]]), torch.tensor([[0.0], [1.0]])).tolist()
    [0.25, 0.75]
    """
    if not len(embeddings) or embeddings.shape[1] != centroids.shape[1]:
        raise InvalidArgument(
            f"{len(embeddings)} vectors of width {embeddings.shape[1]} cannot be assigned to centroids of width "
            f"{centroids.shape[1]}; give at least one, made by the same embedding as the centroids"
        )
    nearest = torch.cdist(embeddings, centroids).argmin(1)
    return torch.bincount(nearest, minlength=len(centroids)) / len(embeddings)


@dataclass(frozen=True, eq=False)
class Domains:
    """Domains of a corpus: their names, and the centroids of their documents.

    Attributes:
        names: distinct names.
        centroids: centroid of each domain; None if documents cannot be assigned to them.
        embedding: name of the document embedding.
        sizes: fraction of the corpus in each domain; empty if it is not known.

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
            texts: documents of the corpus.
            count: number of domains.
            embedding: `NGRAMS`, or a sentence encoder.
            seed: seed of k-means.
            labels: a label of each document; a domain is named by the label of the document nearest to its centroid.

        Returns:
            The domains, and the index of the domain of each document.

        Raises:
            InvalidArgument: fewer different documents than domains.
            InvalidInput: an empty document.
        """
        vectors = _vectors(texts, embedding)
        centroids = kmeans(vectors, count, seed=seed)
        distances = torch.cdist(vectors, centroids)
        nearest = distances.argmin(1)
        sizes = torch.bincount(nearest, minlength=count) / len(vectors)
        middle = distances.argmin(0).tolist()
        names = [f"{index}-{labels[at]}" if labels else str(index) for index, at in enumerate(middle)]
        return cls(tuple(names), centroids, embedding, tuple(sizes.tolist())), nearest

    @classmethod
    def given(cls, texts: Mapping[str, Sequence[str]], *, embedding: str = NGRAMS) -> Domains:
        """Domains with given documents; the centroid of each is the mean of its documents' vectors."""
        centroids = [_vectors(documents, embedding).mean(0) for documents in texts.values()]
        total = sum(map(len, texts.values()))
        sizes = tuple(len(documents) / total for documents in texts.values())
        return cls(tuple(texts), torch.stack(centroids), embedding, sizes)

    def weights(self, texts: Sequence[str]) -> Float[Tensor, domains]:
        """The domain weights of documents.

        Raises:
            InvalidArgument: no documents, or domains without centroids.
            InvalidInput: an empty document.
        """
        if self.centroids is None:
            raise InvalidArgument("these domains have no centroids to assign documents to; give weights instead")
        return domain_weights(_vectors(texts, self.embedding), self.centroids)

    def of_files(self, paths: Sequence[str | Path]) -> Float[Tensor, domains]:
        """The domain weights of the documents in files and folders, which `read_records` reads.

        Raises:
            InvalidArgument: a path that does not exist, or of an unknown kind; domains without centroids.
            InvalidRecord: a file that cannot be read.
        """
        return self.weights([text for _, text in texts_of(read_records(paths))])

    def parse_weights(self, text: str) -> Float[Tensor, domains]:
        """Parse weights such as "news=0.5,code=0.5"; a domain may be given by its number.

        Raises:
            InvalidArgument: text in another format, an unknown name, or weights that do not sum to 1.

        >>> Domains(("news", "code")).parse_weights("code=0.75,0=0.25").tolist()
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
        return self.check_weights(shares)

    def check_weights(self, weights: Any) -> Float[Tensor, domains]:
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


def texts_of(records: Iterable[TrainingRecord]) -> list[tuple[TrainingRecord, str]]:
    """The text of each record that is not blank: its text, its prompt and completion, or all of its messages."""
    found = []
    for record in records:
        turns = [str(message.get("content", "")) for message in record.messages]
        text = "\n".join([*([record.prompt] if record.prompt else []), *turns, record.text]).strip()
        if text:
            found.append((record, text))
    return found
