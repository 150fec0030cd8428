"""Where the experts of a mixture lie: one by one, or all in one tensor.

Notable here:
- files written by transformers before version 5 hold a matrix for each expert, as Pippin does; its models now hold all
  experts in one tensor of three dimensions, and some files do too
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from pippin.language.decoder import DecoderConfig
from pippin.language.families.family import TensorRule


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
                lambda tensor, config: [half for expert in tensor for half in expert.chunk(2)],
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
                lambda tensor, config: list(tensor),
                lambda parts, config: torch.stack(list(parts)),
                whole=True,
            )
        )
        return found

    return rules
