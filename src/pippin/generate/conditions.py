"""Conditioning of generators: a class, a text, a map, a vector, or several of them, for each sample of a batch.

Notable here:
- each part has a null value, so a model that is trained with condition dropout can use classifier-free guidance
- the null class embedding is the mean of all class embeddings plus a trained offset, so it is defined without condition
  dropout, too
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from pippin.core.checks import NonNegativeInt, checked
from pippin.core.errors import InvalidArgument
from pippin.nn.linear import Linear

_SIZES = {"labels": "num_classes", "text": "text_dim", "map": "map_channels", "vector": "vector_dim"}
"""Each part of a `Conditioning`, and the field of `ConditioningSpec` with its size (0: the model does not read it)."""


@checked
@dataclass(frozen=True)
class ConditioningSpec:
    """Which conditions a model reads, and their sizes; all zero for an unconditional model.

    Attributes:
        num_classes: number of classes; labels are from 0 to ``num_classes - 1``.
        text_dim: dimension of the embeddings of a text's tokens.
        map_channels: channels of a map of the sample's height and width.
        vector_dim: dimension of a vector.
        null: whether the model is trained with condition dropout, as classifier-free guidance needs.
    """

    num_classes: NonNegativeInt = 0
    text_dim: NonNegativeInt = 0
    map_channels: NonNegativeInt = 0
    vector_dim: NonNegativeInt = 0
    null: bool = False

    @property
    def empty(self) -> bool:
        """Whether the model reads no condition."""
        return not (self.num_classes or self.text_dim or self.map_channels or self.vector_dim)

    def null_condition(
        self, n: int, size: tuple[int, int] = (1, 1), device: torch.device | str = "cpu"
    ) -> Conditioning:
        """The null condition of ``n`` samples of ``size`` (height, width)."""
        zeros = torch.zeros
        return Conditioning(
            labels=torch.full((n,), -1, device=device) if self.num_classes else None,
            text=zeros(n, 1, self.text_dim, device=device) if self.text_dim else None,
            text_mask=zeros(n, 1, dtype=torch.bool, device=device) if self.text_dim else None,
            map=zeros(n, self.map_channels, *size, device=device) if self.map_channels else None,
            vector=zeros(n, self.vector_dim, device=device) if self.vector_dim else None,
        )

    def check(self, condition: Conditioning) -> None:
        """Refuse a condition that the model does not read.

        Raises:
            InvalidArgument: a part is missing, not read by the model or of another size, or a label is out of range.
        """
        for name, size in _SIZES.items():
            if (getattr(condition, name) is not None) != bool(getattr(self, size)):
                expected = [part for part, field in _SIZES.items() if getattr(self, field)]
                raise InvalidArgument(
                    f"the model reads {expected or 'no condition'}, the condition has {condition.parts}"
                )
        if condition.labels is not None:
            labels = condition.labels
            invalid = labels[(labels < -1) | (labels >= self.num_classes)]
            if len(invalid):
                raise InvalidArgument(
                    f"label {int(invalid[0])} is outside 0 to {self.num_classes - 1} (-1 stands for no label)"
                )
        channel_axes = {"text": (condition.text, -1), "map": (condition.map, 1), "vector": (condition.vector, -1)}
        for name, (part, axis) in channel_axes.items():
            size = getattr(self, _SIZES[name])
            if part is not None and part.shape[axis] != size:
                raise InvalidArgument(f"the condition's {name} has {part.shape[axis]} channels, the model reads {size}")


@dataclass(frozen=True)
class Conditioning:
    """The conditions of n samples: the parts that a model reads, and no others.

    Attributes:
        labels: class of each sample; the null value is -1.
        text: embeddings of the tokens of each text, padded to the longest.
        text_mask: true for tokens, false for padding; a text of padding alone is the null value.
        map: an image of conditions for each sample, of the sample's height and width; the null value is zero.
        vector: a vector for each sample; the null value is zero.

    Raises:
        InvalidArgument: no part, parts of different numbers of samples, or a text without its mask.
    """

    labels: Int[Tensor, n] | None = None
    text: Float[Tensor, "n tokens text_dim"] | None = None
    text_mask: Bool[Tensor, "n tokens"] | None = None
    map: Float[Tensor, "n channels height width"] | None = None
    vector: Float[Tensor, "n vector_dim"] | None = None

    def __post_init__(self) -> None:
        if (self.text is None) != (self.text_mask is None):
            raise InvalidArgument("a condition's text comes with its text_mask (true where a token is)")
        counts = {len(part) for part in self._tensors()}
        if not counts:
            raise InvalidArgument("a condition without any part: give labels, text, map or vector; or no condition")
        if len(counts) != 1:
            raise InvalidArgument(f"the parts of a condition are of {sorted(counts)} samples; they must agree")

    def __len__(self) -> int:
        return len(self._tensors()[0])

    @property
    def parts(self) -> list[str]:
        """Names of the parts that are given."""
        return [f.name for f in dataclasses.fields(self) if getattr(self, f.name) is not None]

    def select(self, index: slice | Int[Tensor, chosen]) -> Conditioning:
        """The condition of the samples with these indices.

        >>> Conditioning(labels=torch.tensor([4, 5, 6])).select(slice(1, 3)).labels.tolist()
        [5, 6]
        """
        return self._each(lambda part: part[index])

    def expand(self, n: int) -> Conditioning:
        """Repeat the condition of one sample for n samples; a condition of n samples is returned as it is."""
        return self if len(self) == n else self.select(torch.zeros(n, dtype=torch.long))

    def to(self, device: torch.device | str) -> Conditioning:
        """A copy on another device."""
        return self._each(lambda part: part.to(device))

    def null(self) -> Conditioning:
        """The null condition of the same samples."""
        return self.dropped(torch.zeros(len(self), dtype=torch.bool))

    def dropped(self, keep: Bool[Tensor, n]) -> Conditioning:
        """Replace the conditions of the samples where ``keep`` is false by the null condition."""

        def where(part: Tensor, null: float) -> Tensor:
            mask = keep.to(part.device).view(-1, *[1] * (part.ndim - 1))  # (n, 1, ...), to broadcast
            return torch.where(mask, part, torch.full((), null, dtype=part.dtype, device=part.device))

        return Conditioning(
            labels=None if self.labels is None else where(self.labels, -1),
            text=self.text,
            text_mask=None if self.text_mask is None else where(self.text_mask, 0),
            map=None if self.map is None else where(self.map, 0),
            vector=None if self.vector is None else where(self.vector, 0),
        )

    def dropout(self, probability: float, generator: torch.Generator) -> Conditioning:
        """Condition dropout: replace each sample's condition by the null condition with this probability."""
        return self.dropped(torch.rand(len(self), generator=generator, device=generator.device) >= probability)

    @staticmethod
    def concatenate(conditions: Sequence[Conditioning]) -> Conditioning:
        """Concatenate conditions to one batch; texts are padded to the longest.

        Raises:
            InvalidArgument: conditions with different parts.
        """
        first = conditions[0]
        if any(other.parts != first.parts for other in conditions):
            raise InvalidArgument(f"conditions with {[c.parts for c in conditions]} cannot be one batch")
        max_length = max((0 if c.text is None else c.text.shape[1]) for c in conditions)

        def concatenated(name: str) -> Tensor | None:
            parts = [getattr(c, name) for c in conditions]
            if parts[0] is None:
                return None
            if name in ("text", "text_mask"):  # (n, tokens, ...): pad the tokens
                parts = [F.pad(part, (0, 0) * (part.ndim - 2) + (0, max_length - part.shape[1])) for part in parts]
            return torch.cat(parts)

        return Conditioning(**{f.name: concatenated(f.name) for f in dataclasses.fields(Conditioning)})

    def _tensors(self) -> list[Tensor]:
        return [getattr(self, name) for name in self.parts]

    def _each(self, function: Callable[[Tensor], Tensor]) -> Conditioning:
        return Conditioning(**{name: function(getattr(self, name)) for name in self.parts})


@dataclass(frozen=True)
class Samples:
    """A training batch of a generator: samples and their conditions.

    Attributes:
        x: the samples, in the range that the model documents (images: -1 to 1).
        condition: None for models without one.
    """

    x: Float[Tensor, "n ..."]
    condition: Conditioning | None = None

    def __len__(self) -> int:
        return len(self.x)


@dataclass(frozen=True)
class EmbeddedConditioning:
    """The output of `ConditionEmbedding`.

    Attributes:
        vector: the sum of the embeddings of class, pooled text and vector.
        tokens: embeddings of the text's tokens; None without text.
        mask: true for tokens, false for padding.
        map: the map, unchanged; None without one.
    """

    vector: Float[Tensor, "n hidden"]
    tokens: Float[Tensor, "n tokens hidden"] | None = None
    mask: Bool[Tensor, "n tokens"] | None = None
    map: Float[Tensor, "n channels height width"] | None = None

    @classmethod
    def zeros(cls, n: int, hidden_size: int, device: torch.device | str = "cpu") -> EmbeddedConditioning:
        """A zero vector for each of ``n`` samples, for blocks without a condition."""
        return cls(torch.zeros(n, hidden_size, device=device))


class ConditionEmbedding(nn.Module):
    """Embeds class, text and vector of a `Conditioning`.

    Args:
        spec: the conditions that the model reads.
        width: dimension of the embeddings.
    """

    def __init__(self, spec: ConditioningSpec, width: int) -> None:
        super().__init__()
        self.spec, self.width = spec, width
        self.classes = nn.Parameter(torch.zeros(spec.num_classes, width)) if spec.num_classes else None
        self.no_class = nn.Parameter(torch.zeros(width)) if spec.num_classes else None
        self.text = Linear(spec.text_dim, width, bias=True) if spec.text_dim else None
        self.no_text = nn.Parameter(torch.zeros(width)) if spec.text_dim else None
        self.vector = Linear(spec.vector_dim, width, bias=True) if spec.vector_dim else None

    @torch.no_grad()
    def initialize(self, generator: torch.Generator, *, size: float = 0.02) -> ConditionEmbedding:
        """Set random weights; ``size`` is the standard deviation of the class embeddings."""
        if self.classes is not None and self.no_class is not None:
            self.classes.normal_(0.0, size, generator=generator)
            self.no_class.zero_()
        for layer in (self.text, self.vector):
            if layer is not None and layer.weight is not None and layer.bias is not None:
                layer.weight.normal_(0.0, layer.inputs**-0.5, generator=generator)
                layer.bias.zero_()
        return self

    def forward(self, condition: Conditioning | None, n: int) -> EmbeddedConditioning:
        """Embed the conditions of ``n`` samples; None for the null condition.

        Raises:
            InvalidArgument: as `ConditioningSpec.check`, a condition of another number of samples, or none where the
                model reads a map.
        """
        device = next(self.parameters()).device if any(True for _ in self.parameters()) else None
        if condition is None:
            if self.spec.map_channels:
                raise InvalidArgument("the model reads a map; give a Conditioning with one (zeros for no condition)")
            condition = self.spec.null_condition(n, device=device or "cpu") if not self.spec.empty else None
        if condition is None:
            return EmbeddedConditioning(torch.zeros(n, self.width, device=device))
        self.spec.check(condition)
        if len(condition) != n:
            raise InvalidArgument(f"a condition of {len(condition)} samples for {n} samples; give one for each sample")
        part = condition._tensors()[0]
        total = torch.zeros(n, self.width, device=part.device)
        tokens = None
        if self.classes is not None and self.no_class is not None and condition.labels is not None:
            table = torch.cat([self.classes, (self.classes.mean(0) + self.no_class)[None]])
            total = total + table[condition.labels]  # label -1 selects the last row, the null class
        if self.vector is not None and condition.vector is not None:
            total = total + self.vector(condition.vector)
        mask = condition.text_mask
        if self.text is not None and self.no_text is not None and condition.text is not None and mask is not None:
            tokens = self.text(condition.text) * mask[..., None]
            # an empty text becomes one learned token: attention over padding alone would be NaN
            empty = ~mask.any(1)
            first = torch.where(empty[:, None], self.no_text, tokens[:, 0])
            tokens = torch.cat([first[:, None], tokens[:, 1:]], 1)  # (n, tokens, width)
            mask = torch.cat([mask[:, :1] | empty[:, None], mask[:, 1:]], 1)
            total = total + (tokens * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)  # mean over tokens
        return EmbeddedConditioning(total, tokens, mask, condition.map)
