"""What a sample is to show: a class, a text, a drawn map, a vector, or several of them, for each sample of a batch.

Notable here:
- each part has a form that says nothing: a model learns with and without it, and guidance can compare the two
- the vector of no class is the mean of all classes and what is learnt on top: it is there even where none was dropped
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from pippin.core.errors import InvalidArgument
from pippin.nn.linear import Linear


@dataclass(frozen=True)
class ConditionSpec:
    """Which conditions a model reads; all zero for none.

    Attributes:
        classes: labels from 0 to below this.
        text: width of the embeddings of a text's tokens.
        map: channels of a map as large as the sample.
        vector: numbers of a vector.
        null: whether it was trained with conditions left out, too, as guidance needs.
    """

    classes: int = 0
    text: int = 0
    map: int = 0
    vector: int = 0
    null: bool = False

    def __post_init__(self) -> None:
        for name in ("classes", "text", "map", "vector"):
            if getattr(self, name) < 0:
                raise InvalidArgument(f"ConditionSpec: {name} is {getattr(self, name)}; give 0 or more")

    @property
    def empty(self) -> bool:
        """Whether the model reads no condition."""
        return not (self.classes or self.text or self.map or self.vector)

    def nothing(self, n: int, size: tuple[int, int] = (1, 1), device: torch.device | str = "cpu") -> Condition:
        """A condition of this form that says nothing of any of ``n`` samples of ``size`` (height, width)."""
        zeros = torch.zeros
        return Condition(
            labels=torch.full((n,), -1, device=device) if self.classes else None,
            text=zeros(n, 1, self.text, device=device) if self.text else None,
            text_mask=zeros(n, 1, dtype=torch.bool, device=device) if self.text else None,
            map=zeros(n, self.map, *size, device=device) if self.map else None,
            vector=zeros(n, self.vector, device=device) if self.vector else None,
        )

    def check(self, condition: Condition) -> None:
        """Refuse what the model does not read.

        Raises:
            InvalidArgument: a part that is missing, too many, of another width, or a label out of range.
        """
        for name in ("classes", "text", "map", "vector"):
            part = condition.labels if name == "classes" else getattr(condition, name)
            if (part is not None) != bool(getattr(self, name)):
                has = [f.name for f in dataclasses.fields(self)[:4] if getattr(self, f.name)]
                raise InvalidArgument(f"the model reads {has or 'no condition'}, the condition has {condition.parts}")
        if condition.labels is not None:
            labels = condition.labels
            bad = labels[(labels < -1) | (labels >= self.classes)]
            if len(bad):
                raise InvalidArgument(
                    f"label {int(bad[0])} is outside 0 to {self.classes - 1} (-1 stands for no label)"
                )
        widths = {"text": (condition.text, -1), "map": (condition.map, 1), "vector": (condition.vector, -1)}
        for name, (part, axis) in widths.items():
            if part is not None and part.shape[axis] != getattr(self, name):
                raise InvalidArgument(
                    f"the condition's {name} has {part.shape[axis]} channels, the model reads {getattr(self, name)}"
                )


@dataclass(frozen=True)
class Condition:
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

    def rows(self, index: slice | Int[Tensor, chosen]) -> Condition:
        """The condition of some of the samples.

        >>> Condition(labels=torch.tensor([4, 5, 6])).rows(slice(1, 3)).labels.tolist()
        [5, 6]
        """
        return self._each(lambda part: part[index])

    def to(self, device: torch.device | str) -> Condition:
        """The same on another device."""
        return self._each(lambda part: part.to(device))

    def null(self) -> Condition:
        """As many samples, of which nothing is said."""
        return self.dropped(torch.zeros(len(self), dtype=torch.bool))

    def dropped(self, keep: Bool[Tensor, n]) -> Condition:
        """Say nothing of the samples that are not kept."""

        def where(part: Tensor, empty: float) -> Tensor:
            kept = keep.to(part.device).view(-1, *[1] * (part.ndim - 1))
            return torch.where(kept, part, torch.full((), empty, dtype=part.dtype, device=part.device))

        return Condition(
            labels=None if self.labels is None else where(self.labels, -1),
            text=self.text,
            text_mask=None if self.text_mask is None else where(self.text_mask, 0),
            map=None if self.map is None else where(self.map, 0),
            vector=None if self.vector is None else where(self.vector, 0),
        )

    @staticmethod
    def joined(conditions: Sequence[Condition]) -> Condition:
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

        return Condition(**{f.name: one(f.name) for f in dataclasses.fields(Condition)})

    def _tensors(self) -> list[Tensor]:
        return [getattr(self, name) for name in self.parts]

    def _each(self, function: Callable[[Tensor], Tensor]) -> Condition:
        return Condition(**{name: function(getattr(self, name)) for name in self.parts})


@dataclass(frozen=True)
class Samples:
    """A batch that a generator learns from: samples and what they show.

    Attributes:
        x: the samples, in the range that the model documents (pictures: -1 to 1).
        condition: None for models without one.
    """

    x: Float[Tensor, "n ..."]
    condition: Condition | None = None

    def __len__(self) -> int:
        return len(self.x)


@dataclass(frozen=True)
class Embedded:
    """A condition as a network reads it.

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


class ConditionEmbedding(nn.Module):
    """Reads conditions of one form.

    Args:
        spec: the form.
        width: of the vectors that come out.
    """

    def __init__(self, spec: ConditionSpec, width: int) -> None:
        super().__init__()
        self.spec, self.width = spec, width
        self.classes = nn.Parameter(torch.zeros(spec.classes, width)) if spec.classes else None
        self.no_class = nn.Parameter(torch.zeros(width)) if spec.classes else None
        self.text = Linear(spec.text, width, bias=True) if spec.text else None
        self.no_text = nn.Parameter(torch.zeros(width)) if spec.text else None
        self.vector = Linear(spec.vector, width, bias=True) if spec.vector else None

    @torch.no_grad()
    def initialise(self, generator: torch.Generator, *, size: float = 0.02) -> ConditionEmbedding:
        """Random weights, class vectors of about ``size``."""
        if self.classes is not None and self.no_class is not None:
            self.classes.normal_(0.0, size, generator=generator)
            self.no_class.zero_()
        for layer in (self.text, self.vector):
            if layer is not None and layer.weight is not None and layer.bias is not None:
                layer.weight.normal_(0.0, layer.inputs**-0.5, generator=generator)
                layer.bias.zero_()
        return self

    def forward(self, condition: Condition | None, n: int) -> Embedded:
        """Embed the conditions of ``n`` samples; None says nothing of any of them.

        Raises:
            InvalidArgument: as `ConditionSpec.check`, or a condition of another number of samples.
        """
        device = next(self.parameters()).device if any(True for _ in self.parameters()) else None
        if condition is None:
            if self.spec.map:
                raise InvalidArgument("the model reads a map; give a Condition with one (zero says nothing)")
            condition = self.spec.nothing(n, device=device or "cpu") if not self.spec.empty else None
        if condition is None:
            return Embedded(torch.zeros(n, self.width, device=device))
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
        return Embedded(total, tokens, mask, condition.map)
