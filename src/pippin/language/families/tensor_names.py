"""Which stored tensors a decoder's tensors are made of, by the rules of its family.

Notable here:
- the search goes from Pippin's names to those of the file, so one stored tensor may be several of ours; what is left
  over in the file was not expected
- a family may list several rules for a tensor, for the layouts of older and newer files; the first that the file has
  is taken, and the first is what is written
- mlx-lm stores the gate, up and down matrices of all experts as three tensors, beside the router of every family;
  those of experts without gates are called fc1 and fc2 there
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pippin.core.errors import UnsupportedModel
from pippin.language.decoder_config import DecoderConfig
from pippin.language.families.experts import stacked
from pippin.language.families.family import Family, TensorRule, same

PREFIXES = (
    "language_model.model.",
    "model.language_model.",
    "model.text_model.",
    "language_model.",
    "model.",
    "transformer.",
    "gpt_neox.",
    "backbone.",
)
"""What names in checkpoints may begin with, that of wrappers around a decoder included."""
_HEADS = ("lm_head.", "embed_out.")


@dataclass(frozen=True)
class TensorSource:
    """A stored tensor that contains one of Pippin's.

    Args:
        stored: its name, without the prefix of its family.
        index: which part of it is meant.
        rule: the rule that splits it; None for a tensor that is the same in the file.
    """

    stored: str
    index: int = 0
    rule: TensorRule | None = None

    def take(self, tensor: Tensor, config: DecoderConfig) -> Tensor:
        """The part of the stored tensor."""
        return tensor if self.rule is None else self.rule.split(tensor, config)[self.index]

    def shape(self, stored: tuple[int, ...], config: DecoderConfig) -> tuple[int, ...]:
        """The part's shape, for the stored tensor's; that of the whole if it cannot be split."""
        if self.rule is None:
            return stored
        try:
            return tuple(self.take(_without_data(stored), config).shape)
        except (RuntimeError, ValueError, IndexError):  # a tensor of a wrong size, which is reported with its own shape
            return stored


def _without_data(shape: tuple[int, ...]) -> Tensor:
    """A tensor of a shape that takes no memory: vectors are one number over and over, and not on the meta device,
    because torch imports its compiler (90 MB) for arithmetic there."""
    if len(shape) == 1 and shape[0] <= 1 << 20:
        return torch.ones(1).expand(shape)
    return torch.empty(shape, device="meta")


def without_prefix(name: str, family: Family | None = None) -> str:
    """A stored name without the prefix of its family or of a wrapper; names of Pippin's own layers stay."""
    prefixes = PREFIXES if family is None else (family.prefix, *PREFIXES)
    longest = max((prefix for prefix in prefixes if name.startswith(prefix)), key=len, default="")
    return name.removeprefix(longest)


class TensorSources:
    """Where a family's files hold the tensors of a decoder.

    Args:
        family: the family of the file; None for a file with Pippin's own names.
        config: the decoder.
    """

    def __init__(self, family: Family | None, config: DecoderConfig) -> None:
        self._layers = "layers" if family is None else family.layers
        self._rules: dict[str, list[tuple[TensorRule, int]]] = {}
        for rule in () if family is None else family.rules(config):
            for index, ours in enumerate(rule.ours):
                self._rules.setdefault(ours, []).append((rule, index))
        for rule in self._of_mlx():
            for index, ours in enumerate(rule.ours):
                self._rules[ours].append((rule, index))

    def _of_mlx(self) -> Iterable[TensorRule]:
        """The rules of experts in folders of mlx-lm, after those of the family."""
        count = next(index for index in itertools.count() if f"mlp.experts.{index}.down_proj" not in self._rules)
        routers = [rule.stored for rule, _ in self._rules.get("mlp.gate", ()) if "weight" in rule.leaves] or [
            "mlp.gate"
        ]
        rooms = dict.fromkeys(router.rpartition(".")[0] for router in routers)
        parts = {part: part for part in ("gate_proj", "up_proj", "down_proj")} | {"fc1": "up_proj", "fc2": "down_proj"}
        for room, name, theirs, leaf in itertools.product(rooms, ("switch_mlp", "experts"), parts, ("weight", "bias")):
            ours = tuple(f"mlp.experts.{index}.{parts[theirs]}" for index in range(count))
            if count and ours[0] in self._rules:
                yield stacked(f"{room}.{name}.{theirs}.{leaf}", ours, lambda all_, at: all_[at], torch.stack, leaf)

    def __call__(self, name: str) -> list[TensorSource]:
        """The stored tensors that may contain one of a decoder's, the preferred one first."""
        layer, stem, leaf = _split(name)
        there = "" if layer is None else f"{self._layers}.{layer}."
        found = [
            TensorSource(f"{there}{rule.stored}" if rule.whole else f"{there}{rule.stored}.{leaf}", index, rule)
            for rule, index in self._rules.get(stem, ())
            if leaf in rule.leaves
        ]
        same_name = f"{stem}.{leaf}" if stem else leaf
        return found or [TensorSource(name if layer is None else f"{there}{same_name}")]


def locate(
    family: Family | None, config: DecoderConfig, ours: Iterable[str], stored: Iterable[str]
) -> tuple[dict[str, TensorSource], set[str]]:
    """Where each of a decoder's tensors is in a file.

    Args:
        family: the family of the file; None for a file with Pippin's own names.
        config: the decoder.
        ours: names of its tensors.
        stored: names in the file, without prefix.

    Returns:
        The source of each tensor that the file has, and the names in the file that are the source of none.
    """
    there = set(stored)
    found: dict[str, TensorSource] = {}
    sources = TensorSources(family, config)
    for name in ours:
        source = next((one for one in sources(name) if one.stored in there), None)
        if source is not None:
            found[name] = source
    return found, there - {source.stored for source in found.values()}


def to_stored(family: Family, config: DecoderConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A decoder's tensors as they are stored.

    Args:
        family: the family of the file.
        config: the decoder.
        tensors: its tensors by name.
    """
    parts: dict[str, dict[int, Tensor]] = {}
    rules: dict[str, TensorRule | None] = {}
    sources = TensorSources(family, config)
    for name, tensor in tensors.items():
        source = sources(name)[0]
        parts.setdefault(source.stored, {})[source.index] = tensor
        rules[source.stored] = source.rule
    joined = {}
    for name, found in parts.items():
        rule = rules[name]
        ordered = [found[index] for index in sorted(found)]
        joined[_full(family, name)] = ordered[0] if rule is None else rule.join(ordered, config)
    return joined


def stored_name(family: Family, config: DecoderConfig, name: str) -> str:
    """The full name in a file of the tensor that one of a decoder's is stored in, alone or with others."""
    return _full(family, TensorSources(family, config)(name)[0].stored)


def _full(family: Family, name: str) -> str:
    return name if name.startswith(_HEADS) else f"{family.prefix}{name}"


@dataclass(frozen=True)
class LayerPart:
    """One of Pippin's layers, as rows of a stored layer.

    Args:
        layer: its name.
        rows: for each of its rows the row of the stored layer; None if both are the same.
    """

    layer: str
    rows: Tensor | None = None


def parts_of(family: Family, config: DecoderConfig, stored: str, outputs: int) -> list[LayerPart]:
    """Pippin's layers that a stored layer consists of, such as the targets of an adapter.

    Args:
        family: the family of the file.
        config: the decoder.
        stored: name of the layer in the file, without ".weight".
        outputs: its number of rows; one that it cannot have gives parts without rows.

    Raises:
        UnsupportedModel: its rows are more than reordered.
    """
    layer, stem, _ = _split(f"{without_prefix(stored, family)}.weight".replace(f"{family.layers}.", "layers.", 1))
    prefix = "" if layer is None else f"layers.{layer}."
    rule = next((one for one in family.rules(config) if one.stored == stem and "weight" in one.leaves), None)
    if rule is None or rule.split is same:
        return [LayerPart(f"{prefix}{stem if rule is None else rule.ours[0]}")]
    numbers = torch.arange(outputs)
    try:
        parts = rule.split(numbers, config)  # as it would split a bias
    except (RuntimeError, ValueError, IndexError):
        return [LayerPart(f"{prefix}{ours}") for ours in rule.ours]
    if any(part.dtype != numbers.dtype for part in parts):
        raise UnsupportedModel(
            f"adapters of {stored} are not supported: {family.model_type} models store it in another form"
        )
    return [LayerPart(f"{prefix}{ours}", part) for ours, part in zip(rule.ours, parts, strict=True)]


def stored_parts(
    family: Family, config: DecoderConfig, layer: str, outputs: Callable[[str], int]
) -> tuple[str, list[LayerPart]]:
    """The full name in a file of the layer that contains one of Pippin's, and all parts of it.

    Args:
        family: the family of the file.
        config: the decoder.
        layer: Pippin's name of the layer.
        outputs: number of rows of one of Pippin's layers.

    Raises:
        UnsupportedModel: as `parts_of`; or it is stored together with other experts.
    """
    source = TensorSources(family, config)(f"{layer}.weight")[0]
    if source.rule is not None and source.rule.whole:
        raise UnsupportedModel(
            f"adapters of {layer} are not supported: {family.model_type} models store experts as one"
        )
    stored = source.stored.removesuffix(".weight")
    prefix = "".join(f"{part}." for part in layer.split(".")[:2]) if layer.startswith("layers.") else ""
    ours = [layer] if source.rule is None else [f"{prefix}{name}" for name in source.rule.ours]
    parts = parts_of(family, config, stored, sum(outputs(name) for name in ours))
    return (stored if f"{stored}.".startswith(_HEADS) else f"{family.prefix}{stored}"), parts


def _split(name: str) -> tuple[str | None, str, str]:
    """Index of its layer (None outside the layers), name of its module, and "weight" or "bias".

    >>> _split("layers.3.mlp.up_proj.weight")
    ('3', 'mlp.up_proj', 'weight')
    >>> _split("layers.3.layer_scalar")
    ('3', '', 'layer_scalar')
    >>> _split("embed_tokens.weight")
    (None, 'embed_tokens', 'weight')
    """
    stem, _, leaf = name.rpartition(".")
    if not stem.startswith("layers."):
        return None, stem, leaf
    _, layer, stem = (*stem.split(".", 2), "")[:3]
    return layer, stem, leaf
