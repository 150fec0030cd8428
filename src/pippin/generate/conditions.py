"""Conditions of generators: a class, a text, a map, a vector, or several of them, for each sample of a batch.

Notable here:
- each part has a null value: a model trained with and without its condition can use classifier-free guidance
- the null class embedding is the mean of all classes plus a trained offset, so it is defined without dropout, too
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
"""The parts of a condition, and the field that says how large each is (0: the model does not read it)."""


@checked
@dataclass(frozen=True)
class ConditioningSpec:
    """Which conditions a model reads, and their sizes; all zero for an unconditional model.

    Attributes:
        num_classes: number of classes; labels are from 0 to below this.
        text_dim: width of the embeddings of a text's tokens.
        map_channels: channels of a map as large as the sample.
        vector_dim: numbers of a vector.
        null: whether it was trained with conditions left out, too, as guidance needs.
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
        """A condition of this form that says nothing of any of ``n`` samples of ``size`` (height, width)."""
        zeros = torch.zeros
        return Conditioning(
            labels=torch.full((n,), -1, device=device) if self.num_classes else None,
            text=zeros(n, 1, self.text_dim, device=device) if self.text_dim else None,
            text_mask=zeros(n, 1, dtype=torch.bool, device=device) if self.text_dim else None,
            map=zeros(n, self.map_channels, *size, device=device) if self.map_channels else None,
            vector=zeros(n, self.vector_dim, device=device) if self.vector_dim else None,
        )

    def check(self, condition: Conditioning) -> None:
        """Refuse what the model does not read.

        Raises:
            InvalidArgument: a part that is missing, too many, of another width, or a label out of range.
        """
        for name, size in _SIZES.items():
            if (getattr(condition, name) is not None) != bool(getattr(self, size)):
                has = [part for part, given in _SIZES.items() if getattr(self, given)]
                raise InvalidArgument(f"the model reads {has or 'no condition'}, the condition has {condition.parts}")
        if condition.labels is not None:
            labels = condition.labels
            bad = labels[(labels < -1) | (labels >= self.num_classes)]
            if len(bad):
                raise InvalidArgument(
                    f"label {int(bad[0])} is outside 0 to {self.num_classes - 1} (-1 stands for no label)"
                )
        widths = {"text": (condition.text, -1), "map": (condition.map, 1), "vector": (condition.vector, -1)}
        for name, (part, axis) in widths.items():
            size = getattr(self, _SIZES[name])
            if part is not None and part.shape[axis] != size:
                raise InvalidArgument(f"the condition's {name} has {part.shape[axis]} channels, the model reads {size}")


@dataclass(frozen=True)
class Conditioning:
    """What each of n samples is to show; the parts that a model reads, and no others.

    Attributes:
        labels: class of each sample; -1 for none.
        text: embeddings of the tokens of each text.
        text_mask: which of them are there; a text of none says nothing.
        map: drawn conditions, as large as the samples; zero says nothing.
        vector: a vector for each sample; zero says nothing.
    """

    labels: Int[Tensor, n] | None = None
    text: Float[Tensor, "n tokens width"] | None = None
    text_mask: Bool[Tensor, "n tokens"] | None = None
    map: Float[Tensor, "n channels rows columns"] | None = None
    vector: Float[Tensor, "n numbers"] | None = None

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
        """The names of the parts that are there."""
        return [f.name for f in dataclasses.fields(self) if getattr(self, f.name) is not None]

    def select(self, index: slice | Int[Tensor, chosen]) -> Conditioning:
        """The condition of some of the samples.

        >>> Conditioning(labels=torch.tensor([4, 5, 6])).select(slice(1, 3)).labels.tolist()
        [5, 6]
        """
        return self._each(lambda part: part[index])

    def expand(self, n: int) -> Conditioning:
        """The condition of one sample for n samples; one of n samples as it is."""
        return self if len(self) == n else self.select(torch.zeros(n, dtype=torch.long))

    def to(self, device: torch.device | str) -> Conditioning:
        """The same on another device."""
        return self._each(lambda part: part.to(device))

    def null(self) -> Conditioning:
        """As many samples, of which nothing is said."""
        return self.dropped(torch.zeros(len(self), dtype=torch.bool))

    def dropped(self, keep: Bool[Tensor, n]) -> Conditioning:
        """Say nothing of the samples that are not kept."""

        def where(part: Tensor, empty: float) -> Tensor:
            kept = keep.to(part.device).view(-1, *[1] * (part.ndim - 1))
            return torch.where(kept, part, torch.full((), empty, dtype=part.dtype, device=part.device))

        return Conditioning(
            labels=None if self.labels is None else where(self.labels, -1),
            text=self.text,
            text_mask=None if self.text_mask is None else where(self.text_mask, 0),
            map=None if self.map is None else where(self.map, 0),
            vector=None if self.vector is None else where(self.vector, 0),
        )

    def dropout(self, probability: float, generator: torch.Generator) -> Conditioning:
        """Each sample's condition replaced by the null condition with this probability."""
        return self.dropped(torch.rand(len(self), generator=generator, device=generator.device) >= probability)

    @staticmethod
    def concatenate(conditions: Sequence[Conditioning]) -> Conditioning:
        """One batch of several; texts are filled up to the longest."""
        first = conditions[0]
        if any(other.parts != first.parts for other in conditions):
            raise InvalidArgument(f"conditions with {[c.parts for c in conditions]} cannot be one batch")
        longest = max((0 if c.text is None else c.text.shape[1]) for c in conditions)

        def one(name: str) -> Tensor | None:
            found = [getattr(c, name) for c in conditions]
            if found[0] is None:
                return None
            if name in ("text", "text_mask"):
                found = [F.pad(part, (0, 0) * (part.ndim - 2) + (0, longest - part.shape[1])) for part in found]
            return torch.cat(found)

        return Conditioning(**{f.name: one(f.name) for f in dataclasses.fields(Conditioning)})

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
    """A condition after `ConditionEmbedding`.

    Attributes:
        vector: one vector for each sample: class, pooled text and vector, added.
        tokens: of the text, each of the network's width; None without text.
        mask: which of them are there.
        map: as it came; None without one.
    """

    vector: Float[Tensor, "n width"]
    tokens: Float[Tensor, "n tokens width"] | None = None
    mask: Bool[Tensor, "n tokens"] | None = None
    map: Float[Tensor, "n channels rows columns"] | None = None

    @classmethod
    def zeros(cls, n: int, hidden_size: int, device: torch.device | str = "cpu") -> EmbeddedConditioning:
        """For blocks without a condition."""
        return cls(torch.zeros(n, hidden_size, device=device))


class ConditionEmbedding(nn.Module):
    """Embeds conditions.

    Args:
        spec: the conditions that it reads.
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
        """Random weights, class vectors of about ``size``."""
        if self.classes is not None and self.no_class is not None:
            self.classes.normal_(0.0, size, generator=generator)
            self.no_class.zero_()
        for layer in (self.text, self.vector):
            if layer is not None and layer.weight is not None and layer.bias is not None:
                layer.weight.normal_(0.0, layer.inputs**-0.5, generator=generator)
                layer.bias.zero_()
        return self

    def forward(self, condition: Conditioning | None, n: int) -> EmbeddedConditioning:
        """Embed the conditions of ``n`` samples; None says nothing of any of them.

        Raises:
            InvalidArgument: as `ConditionSpec.check`, or a condition of another number of samples.
        """
        device = next(self.parameters()).device if any(True for _ in self.parameters()) else None
        if condition is None:
            if self.spec.map_channels:
                raise InvalidArgument("the model reads a map; give a Condition with one (zero says nothing)")
            condition = self.spec.null_condition(n, device=device or "cpu") if not self.spec.empty else None
        if condition is None:
            return EmbeddedConditioning(torch.zeros(n, self.width, device=device))
        self.spec.check(condition)
        if len(condition) != n:
            raise InvalidArgument(f"a condition of {len(condition)} samples for {n} samples")
        part = condition._tensors()[0]
        total = torch.zeros(n, self.width, device=part.device)
        tokens = None
        if self.classes is not None and self.no_class is not None and condition.labels is not None:
            table = torch.cat([self.classes, (self.classes.mean(0) + self.no_class)[None]])
            total = total + table[condition.labels]
        if self.vector is not None and condition.vector is not None:
            total = total + self.vector(condition.vector)
        mask = condition.text_mask
        if self.text is not None and self.no_text is not None and condition.text is not None and mask is not None:
            tokens = self.text(condition.text) * mask[..., None]
            # a text of no tokens still shows one, so that no attention looks at nothing
            nobody = ~mask.any(1)
            first = torch.where(nobody[:, None], self.no_text, tokens[:, 0])
            tokens = torch.cat([first[:, None], tokens[:, 1:]], 1)
            mask = torch.cat([mask[:, :1] | nobody[:, None], mask[:, 1:]], 1)
            total = total + (tokens * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return EmbeddedConditioning(total, tokens, mask, condition.map)
