r"""Groups of interchangeable tokens: computed from the embeddings of a model, stored sparsely.

Notable here:
- each token k is the seed of a group, all tokens t with $\cos(e_t, e_k) > \theta$; so groups overlap, and a token is
  in as many groups as it has neighbors
- a token's probability is split evenly over its groups, so that the probabilities of groups sum to 1 in spite of the
  overlap
- the cosine is symmetric: the groups of a token and the members of its own group are one list, stored once
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Float, Float64, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from pippin.core.checks import FiniteFloat, checked
from pippin.core.errors import CorruptedFile, InvalidArgument
from pippin.core.files import atomic_write

FORMAT = "pippin-token-groups-1"


class TokenGroups:
    """Overlapping groups of tokens, one for each token of a vocabulary.

    Args:
        starts: offset of each token's neighbors in ``neighbors``, and their total number; increasing from 0.
        neighbors: the tokens of each group, sorted; each token is one of its own neighbors, and the relation is
            symmetric.

    Raises:
        InvalidArgument: arrays that violate these conditions.

    >>> groups = TokenGroups.from_embeddings(torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]]), 0.9)
    >>> [groups.group_of(token).tolist() for token in range(3)]
    [[0, 1], [0, 1], [2]]
    """

    def __init__(self, starts: Int[Tensor, bounds], neighbors: Int[Tensor, members]) -> None:
        self.starts, self.neighbors = starts.long(), neighbors.int()
        self._check()
        self.sizes = self.starts.diff()

    def _check(self) -> None:
        starts, members = self.starts, self.neighbors.long()
        size = len(starts) - 1
        whole = size > 0 and int(starts[0]) == 0 and int(starts[-1]) == len(members)
        if not whole or not bool((starts.diff() > 0).all()):
            raise InvalidArgument("starts must rise from 0 to the number of neighbors; each token has at least one")
        if int(members.min()) < 0 or int(members.max()) >= size:
            raise InvalidArgument(f"a neighbor lies outside the vocabulary of {size:,} tokens")
        owner = torch.arange(size).repeat_interleave(starts.diff())
        forward, backward = owner * size + members, members * size + owner
        if not bool((forward.diff() > 0).all()) or not torch.equal(forward, backward.sort().values):
            raise InvalidArgument("neighbors must be sorted and mutual")
        if int((owner == members).sum()) != size:
            raise InvalidArgument("each token must be among its own neighbors")

    @classmethod
    @checked
    def from_embeddings(
        cls,
        weight: Float[Tensor, "vocab width"],
        theta: FiniteFloat,
        *,
        token_ids: Sequence[int] | None = None,
        batch_size: int = 1024,
    ) -> TokenGroups:
        """Group tokens with similar embeddings.

        Args:
            weight: embeddings of the target model.
            theta: a token belongs to a group if its cosine with the seed is above this; from 1 on, every group has one
                token.
            token_ids: the tokens to group; the others (special tokens, padding) are groups of one. None for all.
            batch_size: seeds compared at once; the time grows with the square of the tokens, 50,000 take about a
                minute.

        Raises:
            InvalidArgument: an id outside the table, an embedding that is not finite.

        Source: arXiv:2511.13732, section 3.
        """
        size = len(weight)
        ids = torch.arange(size) if token_ids is None else torch.tensor(sorted(set(token_ids)), dtype=torch.long)
        if len(ids) and (int(ids[0]) < 0 or int(ids[-1]) >= size):
            raise InvalidArgument(f"token_ids go from {int(ids[0])} to {int(ids[-1])}, the table has {size:,} rows")
        rows = weight.detach().float().cpu()[ids]
        if not bool(rows.isfinite().all()):
            raise InvalidArgument("an embedding is not finite; groups cannot be made from it")
        unit = torch.nn.functional.normalize(rows, dim=-1)
        pairs = [torch.arange(size)[:, None].expand(-1, 2)]
        for at in range(0, len(ids) if theta < 1 else 0, max(1, batch_size)):
            # only above the diagonal, then mirrored: the two products of a pair may round differently
            near = ((unit[at : at + batch_size] @ unit[at:].T) > theta).triu(1).nonzero() + at
            pair = ids[near]
            pairs += [pair, pair.flip(1)]
        keys = torch.cat([pair[:, 0] * size + pair[:, 1] for pair in pairs]).sort().values
        counts = torch.bincount(keys // size, minlength=size)
        return cls(torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)]), keys % size)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, which is also the number of groups."""
        return len(self.starts) - 1

    def group_of(self, token: int) -> Int[Tensor, members]:
        """The members of this token's group, which are also the seeds of the groups that contain it."""
        return self.neighbors[self.starts[token] : self.starts[token + 1]].long()

    def group_probability(self, probabilities: Float64[Tensor, vocab], group: int) -> float:
        r"""Probability of one group, $P_c(k) = \sum_{t \in G_k} p(t) / |S(t)|$."""
        members = self.group_of(group)
        return float((probabilities[members] / self.sizes[members]).sum())

    def coarse(self, probabilities: Float[Tensor, "*batch vocab"]) -> Float[Tensor, "*batch vocab"]:
        """Probabilities of all groups.

        Raises:
            InvalidArgument: another vocabulary, or not a distribution (negative, or a sum that differs from 1 by more
                than 1e-3).
        """
        check_distribution(probabilities, self.vocab_size)
        split = probabilities / self.sizes
        owner = torch.arange(self.vocab_size).repeat_interleave(self.sizes)
        members = split[..., self.neighbors.long()]
        return torch.zeros_like(split).index_add_(-1, owner, members)

    def sample_group(self, token: int, generator: torch.Generator) -> int:
        """One of the groups that contain a token, uniformly; a group of one token takes no random number."""
        start, size = int(self.starts[token]), int(self.sizes[token])
        if size == 1:
            return token
        return int(self.neighbors[start + int(torch.randint(size, (), generator=generator))])

    def shuffled(self, generator: torch.Generator) -> TokenGroups:
        """Groups of the same sizes and overlaps with randomly permuted tokens, as a control without similarity.

        Groups of one token do not change.
        """
        grouped = (self.sizes > 1).nonzero()[:, 0]
        permuted = torch.arange(self.vocab_size)
        permuted[grouped] = grouped[torch.randperm(len(grouped), generator=generator)]
        owner = torch.arange(self.vocab_size).repeat_interleave(self.sizes)
        keys = (permuted[owner] * self.vocab_size + permuted[self.neighbors.long()]).sort().values
        counts = torch.bincount(keys // self.vocab_size, minlength=self.vocab_size)
        return TokenGroups(torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)]), keys % self.vocab_size)

    def stats(self) -> dict[str, float]:
        """Mean and maximum size of a group, the fraction of groups of one token, and the bytes stored."""
        sizes = self.sizes.double()
        return {
            "mean_size": float(sizes.mean()),
            "max_size": float(sizes.max()),
            "singletons": float((sizes == 1).double().mean()),
            "bytes": float(self.starts.nbytes + self.neighbors.nbytes),
        }

    def save(self, path: str | Path) -> None:
        """Write the groups to a safetensors file."""
        tensors = {"starts": self.starts, "neighbors": self.neighbors}
        with atomic_write(Path(path)) as file:
            file.write(save(tensors, metadata={"format": FORMAT}))

    @classmethod
    def load(cls, path: str | Path) -> TokenGroups:
        """Read what `save` wrote.

        Raises:
            CorruptedFile: the file holds no token groups, or is damaged.
        """
        try:
            with safe_open(str(path), framework="pt") as file:
                if (file.metadata() or {}).get("format") != FORMAT:
                    raise CorruptedFile(f"{path} holds no token groups")
                return cls(file.get_tensor("starts"), file.get_tensor("neighbors"))
        except (SafetensorError, InvalidArgument) as error:
            raise CorruptedFile(f"{path} is damaged: {error}") from error


def check_distribution(probabilities: Float[Tensor, "*batch vocab"], size: int) -> None:
    """Check that a tensor is a distribution over a vocabulary.

    Raises:
        InvalidArgument: another size, a negative entry, or a sum that differs from 1 by more than 1e-3.
    """
    if probabilities.shape[-1] != size:
        raise InvalidArgument(
            f"a distribution over {probabilities.shape[-1]:,} tokens was given, the vocabulary has {size:,}"
        )
    total = probabilities.double().sum(-1)
    if bool((probabilities < 0).any()) or not bool(((total - 1).abs() <= 1e-3).all()):
        raise InvalidArgument(f"probabilities must be at least 0 and sum to 1, got a sum of {total.flatten()[0]:.6f}")
