"""Styles: how a description is put to a model, how closely it is followed, and what is done to the finished picture.

Notable here:
- a style works with a model only where the model has learnt what its words mean; those that do not need words work
  with every one: they change the finished picture
- a model brings its own styles in its facts; a name that is none of the list is refused, with the list
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from pippin.core.errors import CorruptedFile, InvalidArgument

Finish = Literal["none", "grey", "poster", "sketch", "sepia"]


@dataclass(frozen=True)
class Style:
    """One style.

    Attributes:
        name: by which it is asked for.
        template: what is said to the model; ``{prompt}`` stands for the description.
        guidance: how closely the description is followed; 1 for no guidance, None for the creator's own.
        finish: what is done to the finished picture.

    Raises:
        InvalidArgument: a template without ``{prompt}``, an unknown finish, or a negative guidance.
    """

    name: str
    template: str = "{prompt}"
    guidance: float | None = None
    finish: Finish = "none"

    def __post_init__(self) -> None:
        if "{prompt}" not in self.template:
            raise InvalidArgument(f"style {self.name!r}: the template {self.template!r} has no {{prompt}}")
        if self.finish not in FINISHES:
            raise InvalidArgument(f"style {self.name!r}: finish {self.finish!r}; choose one of {', '.join(FINISHES)}")
        if self.guidance is not None and not self.guidance >= 0:
            raise InvalidArgument(f"style {self.name!r}: guidance is {self.guidance}; give 0 or more, 1 for none")

    def say(self, prompt: str) -> str:
        """The description as the model gets it; an empty one stays empty."""
        return self.template.replace("{prompt}", prompt) if prompt else ""


def _grey(x: Tensor) -> Tensor:
    if x.shape[-3] == 1:
        return x
    weights = x.new_tensor((0.299, 0.587, 0.114)).view(3, 1, 1)
    return (x * weights).sum(-3, keepdim=True).expand_as(x)


def _poster(x: Tensor) -> Tensor:
    """Four levels."""
    return ((x.clamp(-1, 1) + 1) * 1.5).round() / 1.5 - 1


def _sketch(x: Tensor) -> Tensor:
    """Dark lines on white, where the picture changes: Sobel's operator."""
    grey = _grey(x)[..., :1, :, :]
    flat = F.pad(grey.reshape(-1, 1, *grey.shape[-2:]), (1, 1, 1, 1), mode="replicate")
    kernel = x.new_tensor([[1.0, 2.0, 1.0], [0.0, 0.0, 0.0], [-1.0, -2.0, -1.0]]) / 4
    down, right = (F.conv2d(flat, k[None, None]) for k in (kernel, kernel.T))
    edge = (down.square() + right.square()).sqrt().clamp(0, 1).reshape(grey.shape)
    return (1 - 2 * edge).expand_as(x)


def _sepia(x: Tensor) -> Tensor:
    tint = x.new_tensor((1.0, 0.84, 0.64)).view(3, 1, 1) if x.shape[-3] == 3 else x.new_ones(1, 1, 1)
    return (_grey(x) + 1) * tint - 1


FINISHES: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "none": lambda x: x,
    "grey": _grey,
    "poster": _poster,
    "sketch": _sketch,
    "sepia": _sepia,
}
PLAIN: Final = Style("plain")
COMMON: Final = (PLAIN, *(Style(name, finish=name) for name in ("grey", "poster", "sketch", "sepia")))
"""Styles that every model has."""


def finished(x: Float[Tensor, "*n channels height width"], style: Style) -> Float[Tensor, "*n channels height width"]:
    """A picture or a clip, from -1 to 1, with its style's finish.

    >>> import torch
    >>> finished(torch.tensor([[[-0.9, 0.1]]]), Style("poster", finish="poster")).tolist()
    [[[-1.0, 0.3333333730697632]]]
    """
    return FINISHES[style.finish](x)


def styles_of(facts: Mapping[str, Any]) -> tuple[Style, ...]:
    """The styles that a model has: the common ones, and those of its facts ("styles": name -> template, guidance).

    Raises:
        CorruptedFile: the facts' styles are no styles.
    """
    own = facts.get("styles", {})
    try:
        return (*COMMON, *(Style(name, **fields) for name, fields in own.items()))
    except (AttributeError, TypeError, InvalidArgument) as error:
        raise CorruptedFile(f"the model's facts describe styles that are none: {error}") from error


def choose(name: str, styles: tuple[Style, ...]) -> Style:
    """The style of a name.

    Raises:
        InvalidArgument: there is none; those that are there are listed.
    """
    names = [style.name for style in styles]
    if name not in names:
        near = difflib.get_close_matches(name, names, 1)
        raise InvalidArgument(
            f"style {name!r} is not available; choose one of {', '.join(names)}"
            + (f" (did you mean {near[0]!r}?)" if near else "")
        )
    return styles[names.index(name)]
