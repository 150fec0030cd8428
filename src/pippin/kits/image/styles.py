"""Styles: a template of the description, a guidance, and postprocessing of the finished image.

Notable here:
- a template works only with a model that was trained on its words; styles without a template work with every model:
  they postprocess the image
- a model may define styles in its metadata; an unknown name raises an error that lists the available ones
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from pippin.core.checks import NonNegativeFloat, checked
from pippin.core.errors import CorruptedFile, InvalidArgument

Finish = Literal["none", "gray", "poster", "sketch", "sepia"]


@checked
@dataclass(frozen=True)
class Style:
    """One style.

    Attributes:
        name: name of the style.
        template: text given to the model; ``{prompt}`` stands for the description.
        guidance: scale of classifier-free guidance; 1 for no guidance, None for the creator's own.
        finish: postprocessing of the finished image.

    Raises:
        InvalidArgument: a template without ``{prompt}``, an unknown finish, or a negative guidance.
    """

    name: str
    template: str = "{prompt}"
    guidance: NonNegativeFloat | None = None
    finish: Finish = "none"

    def __post_init__(self) -> None:
        if "{prompt}" not in self.template:
            raise InvalidArgument(f"style {self.name!r}: the template {self.template!r} has no {{prompt}}")

    def apply(self, prompt: str) -> str:
        """The description in the template; an empty one stays empty."""
        return self.template.replace("{prompt}", prompt) if prompt else ""


def _gray(x: Tensor) -> Tensor:
    if x.shape[-3] == 1:
        return x
    weights = x.new_tensor((0.299, 0.587, 0.114)).view(3, 1, 1)
    return (x * weights).sum(-3, keepdim=True).expand_as(x)


def _poster(x: Tensor) -> Tensor:
    """Posterize to four levels."""
    return ((x.clamp(-1, 1) + 1) * 1.5).round() / 1.5 - 1


def _sketch(x: Tensor) -> Tensor:
    """Dark edges on white, by Sobel's operator."""
    gray = _gray(x)[..., :1, :, :]
    flat = F.pad(gray.reshape(-1, 1, *gray.shape[-2:]), (1, 1, 1, 1), mode="replicate")
    kernel = x.new_tensor([[1.0, 2.0, 1.0], [0.0, 0.0, 0.0], [-1.0, -2.0, -1.0]]) / 4
    down, right = (F.conv2d(flat, k[None, None]) for k in (kernel, kernel.T))
    edge = (down.square() + right.square()).sqrt().clamp(0, 1).reshape(gray.shape)
    return (1 - 2 * edge).expand_as(x)


def _sepia(x: Tensor) -> Tensor:
    tint = x.new_tensor((1.0, 0.84, 0.64)).view(3, 1, 1) if x.shape[-3] == 3 else x.new_ones(1, 1, 1)
    return (_gray(x) + 1) * tint - 1


FINISHES: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "none": lambda x: x,
    "gray": _gray,
    "poster": _poster,
    "sketch": _sketch,
    "sepia": _sepia,
}
PLAIN: Final = Style("plain")
COMMON: Final = (PLAIN, *(Style(name, finish=name) for name in ("gray", "poster", "sketch", "sepia")))
"""Built-in styles of every model."""


def finished(x: Float[Tensor, "*n channels height width"], style: Style) -> Float[Tensor, "*n channels height width"]:
    """An image or a video, from -1 to 1, with its style's postprocessing.

    >>> import torch
    >>> finished(torch.tensor([[[-0.9, 0.1]]]), Style("poster", finish="poster")).tolist()
    [[[-1.0, 0.3333333730697632]]]
    """
    return FINISHES[style.finish](x)


def styles_of(metadata: Mapping[str, Any]) -> tuple[Style, ...]:
    """The styles of a model: the built-in ones, and those of its metadata ("styles": name -> template, guidance).

    Raises:
        CorruptedFile: the metadata's styles are invalid.
    """
    own = metadata.get("styles", {})
    try:
        return (*COMMON, *(Style(name, **fields) for name, fields in own.items()))
    except (AttributeError, TypeError, InvalidArgument) as error:
        raise CorruptedFile(f"the model's metadata describe styles that are none: {error}") from error


def choose(name: str, styles: tuple[Style, ...]) -> Style:
    """The style with this name.

    Raises:
        InvalidArgument: there is none; the message lists the available ones.
    """
    names = [style.name for style in styles]
    if name not in names:
        near = difflib.get_close_matches(name, names, 1)
        raise InvalidArgument(
            f"style {name!r} is not available; choose one of {', '.join(names)}"
            + (f" (did you mean {near[0]!r}?)" if near else "")
        )
    return styles[names.index(name)]
