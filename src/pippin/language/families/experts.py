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

from pippin.language.decoder import DecoderConfig
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
    single: dict[str, str] | None = None, router: str = "mlp.gate", fused: str = "mlp.experts"
) -> Callable[[DecoderConfig], Sequence[TensorRule]]:
    """Rules of a family's experts.

    Args:
        single: stored names of an expert's matrices where they lie one by one, with "{}" for its number, by Pippin's
            name of the matrix; None for those that are the same.
        router: stored name of the router.
        fused: stored name of the room of all experts.
    """
    names = single or {part: f"mlp.experts.{{}}.{part}" for part in ("gate_proj", "up_proj", "down_proj")}

    def rules(config: DecoderConfig) -> list[TensorRule]:
        count = max(layer.feedforward.num_experts for layer in config.layers)
        found = [TensorRule(router, ("mlp.gate",))]
        for part, stored in names.items():
            found += [TensorRule(stored.format(index), (f"mlp.experts.{index}.{part}",)) for index in range(count)]
        gates = tuple(f"mlp.experts.{index}.{part}" for index in range(count) for part in ("gate_proj", "up_proj"))
        downs = tuple(f"mlp.experts.{index}.down_proj" for index in range(count))
        # (experts, gate rows and up rows, width) and (experts, width, inner size)
        found.append(
            TensorRule(
                f"{fused}.gate_up_proj",
                gates,
                lambda tensor, config: _Parts(2 * len(tensor), lambda at: tensor[at // 2].chunk(2)[at % 2]),
                lambda parts, config: torch.stack(
                    [torch.cat(pair) for pair in zip(parts[0::2], parts[1::2], strict=True)]
                ),
                whole=True,
            )
        )
        found.append(
            TensorRule(
                f"{fused}.down_proj",
                downs,
                lambda tensor, config: _Parts(len(tensor), lambda at: tensor[at]),
                lambda parts, config: torch.stack(list(parts)),
                whole=True,
            )
        )
        return found

    return rules
