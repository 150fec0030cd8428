"""Folders of mlx-lm that store a family otherwise than transformers does: convolutions, and what weights include.

Notable here:
- mlx-lm has the taps of a convolution before its dimension of size 1, (channels, taps, 1), which shows its folders
- of families whose norms multiply by one plus a weight, it stores the sum for those with convolutions alone
- of Falcon-H1 it folds the multipliers into the weights and keeps them in the configuration

Source: `sanitize` of the models of mlx-lm 0.32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from torch import Tensor

from pippin.core.errors import CorruptedFile
from pippin.language.families.family import Family

_SUMS: Final = ("norm", "input_layernorm", "post_attention_layernorm", "q_norm", "k_norm")


class MLXLayout:
    """How the tensors of a folder are stored, if mlx-lm has written it.

    Args:
        family: the family of the folder; None for one with Pippin's own names, which is as it should be.
        names: of its tensors, without prefix.
        shape: the shape of each.
        where: the folder, for messages.

    Raises:
        CorruptedFile: its configuration has what its weights include already.
    """

    def __init__(
        self, family: Family | None, names: Iterable[str], shape: Callable[[str], tuple[int, ...]], where: str
    ) -> None:
        layers = "" if family is None else f"{family.layers}."  # towers for sound have convolutions of their own
        own = (name for name in names if name.startswith(layers) and "conv" in name)
        self.is_there = family is not None and any(_has_taps_first(name, shape(name)) for name in own)
        self._has_sums = self.is_there and family is not None and family.mlx_lm == "norms as they multiply"
        if self.is_there and family is not None and family.mlx_lm == "multipliers in weights":
            raise CorruptedFile(
                f"{where}: mlx-lm writes {family.model_type} models with their multipliers in the weights, and the "
                "configuration still has them; open the folder that it was made from"
            )

    def shape(self, name: str, stored: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a tensor as transformers has it."""
        return (stored[0], stored[2], stored[1]) if self.is_there and _has_taps_first(name, stored) else stored

    def tensor(self, name: str, stored: Tensor) -> Tensor:
        """A tensor as transformers has it."""
        if not self.is_there:
            return stored
        if _has_taps_first(name, tuple(stored.shape)):
            return stored.mT
        stem = name.removesuffix(".weight").rpartition(".")
        if self._has_sums and stem[2] in _SUMS and not stem[0].endswith("linear_attn"):
            return stored.float() - 1.0
        return stored


def _has_taps_first(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is a convolution with one channel a group whose taps are in the middle."""
    return "conv" in name and len(shape) == 3 and shape[2] == 1 < shape[1]
