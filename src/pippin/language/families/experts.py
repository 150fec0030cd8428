"""Where the experts of a mixture lie: one by one, or all in one tensor.

Notable here:
- files written by transformers before version 5 hold a matrix for each expert, as Pippin does; its models now hold all
  experts in one tensor of three dimensions, and some files do too
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pippin.language.decoder_config import DecoderConfig
from pippin.language.families.family import TensorRule


class _Parts(Sequence[Tensor]):
    """The parts of a tensor, each taken when it is asked for: there are thousands."""

    def __init__(self, count: int, part: Callable[[int], Tensor]) -> None:
        self._count, self._part = count, part

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        return self._part(range(self._count)[index])


def expert_rules(
    single: dict[str, str] | None = None,
    router: str = "mlp.gate",
    fused: tuple[str, str] = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
) -> Callable[[DecoderConfig], Sequence[TensorRule]]:
    """Rules of a family's experts.

    Args:
        single: stored names of an expert's matrices where they lie one by one, with "{}" for its number, by Pippin's
            name of the matrix; None for those that are the same; none if they are never one by one.
        router: stored name of the router.
        fused: stored names of all experts' gate and up matrices, and of their down matrices.
    """
    names = {part: f"mlp.experts.{{}}.{part}" for part in _MATRICES} if single is None else single

    def rules(config: DecoderConfig) -> list[TensorRule]:
        count = most_experts(config)
        found = [TensorRule(router, ("mlp.gate",))]
        for part, stored in names.items():
            found += [TensorRule(stored.format(index), (f"mlp.experts.{index}.{part}",)) for index in range(count)]
        return [*found, *fused_experts(fused, count)]

    return rules


def fused_experts(stored: tuple[str, str] | str, count: int, room: str = "mlp.experts") -> list[TensorRule]:
    """Rules of all experts in two tensors, (experts, gate and up rows, width) and (experts, width, inner size).

    Args:
        stored: names of both; or of what they are in.
        count: number of experts.
        room: Pippin's name of what the experts are in.
    """
    names = stored if isinstance(stored, tuple) else (f"{stored}.gate_up_proj", f"{stored}.down_proj")
    gate_up = stacked(
        names[0],
        gates_and_ups(count, room),
        lambda tensor, at: tensor[at // 2].chunk(2)[at % 2],
        lambda parts: torch.stack([torch.cat(pair) for pair in zip(parts[0::2], parts[1::2], strict=True)]),
    )
    return [gate_up, stacked(names[1], downs(count, room), lambda tensor, at: tensor[at], torch.stack)]


_MATRICES = ("gate_proj", "up_proj", "down_proj")


def most_experts(config: DecoderConfig) -> int:
    """Experts of the layer with most."""
    return max(layer.feedforward.num_experts for layer in config.layers)


def gates_and_ups(count: int, room: str = "mlp.experts") -> tuple[str, ...]:
    """Pippin's names of the gate and up matrices of all experts, one expert after the other."""
    return tuple(f"{room}.{index}.{part}" for index in range(count) for part in _MATRICES[:2])


def downs(count: int, room: str = "mlp.experts") -> tuple[str, ...]:
    """Pippin's names of the down matrices of all experts."""
    return tuple(f"{room}.{index}.down_proj" for index in range(count))


def stacked(
    stored: str,
    ours: tuple[str, ...],
    part: Callable[[Tensor, int], Tensor],
    join: Callable[[list[Tensor]], Tensor],
    leaf: str = "weight",
) -> TensorRule:
    """A rule for a tensor that holds those of all experts.

    Args:
        stored: its whole name.
        ours: Pippin's names of the parts.
        part: the part of the stored tensor with this index.
        join: the stored tensor of all parts.
        leaf: whether they are weights or biases.
    """
    return TensorRule(
        stored,
        ours,
        lambda tensor, config: _Parts(len(ours), lambda at: part(tensor, at)),
        lambda parts, config: join(list(parts)),
        leaves=(leaf,),
        whole=True,
    )


def shared_expert(stored: str = "mlp.shared_experts") -> list[TensorRule]:
    """Rules of a shared expert that is stored under another name."""
    return [TensorRule(f"{stored}.{part}", (f"mlp.shared_expert.{part}",)) for part in _MATRICES]
