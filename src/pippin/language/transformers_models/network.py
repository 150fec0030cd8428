"""A causal language model of transformers, and what its layers keep of a sequence."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn


@dataclass(frozen=True)
class LayerCache:
    """What one layer keeps of a sequence.

    Args:
        vectors: heads and size of the vectors that are kept of each token: keys, values, and the keys of an indexer;
            empty if the layer has no keys of its own.
        states: kind ("conv" or "recurrent"), number, shape and precision of states of constant size.
        begun: numbers of the states that count as present after the first token.
    """

    vectors: tuple[tuple[int, int], ...] = ()
    states: tuple[tuple[str, int, tuple[int, ...], torch.dtype], ...] = ()
    begun: tuple[int, ...] = ()


@dataclass(frozen=True)
class TransformersConfig:
    """Sizes of a model that transformers computes.

    Args:
        family: its `model_type`.
        vocab_size: number of logits.
        max_position_embeddings: longest sequence, in tokens.
        layers: what each layer keeps of a sequence; empty if each pass begins at the first token.
        continues: whether several tokens may follow others; if not, one may, and a pass over several begins at the
            first token of the sequence, whose tokens are kept as a state.
        uncached: why layers keep nothing; empty if they do.
        batched: whether sequences of different lengths may be decoded in one pass.
    """

    family: str
    vocab_size: int
    max_position_embeddings: int
    layers: tuple[LayerCache, ...] = ()
    continues: bool = False
    uncached: str = ""
    batched: bool = False

    @property
    def original_max_position_embeddings(self) -> None:
        """None: a model whose rotation depends on the length is opened for the lengths with one."""
        return None

    @property
    def cached_layers(self) -> tuple[int, ...]:
        """Indices of layers with keys and values of their own."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.vectors)

    @property
    def cache_groups(self) -> tuple[tuple[int, ...], ...]:
        """All of these layers in one group: sliding windows are masks here, and give no blocks back."""
        return (self.cached_layers,)

    def group_window(self, layers: Sequence[int]) -> int | None:
        """None: every group keeps the whole context."""
        return None

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """Indices of layers with a state; one more, behind the last layer, for the tokens where they are a state."""
        found = tuple(index for index, layer in enumerate(self.layers) if layer.states)
        return found if self.continues else (*found, len(self.layers))

    @property
    def state_bytes(self) -> int:
        """Bytes of all states of one sequence."""
        tokens = 0 if self.continues else 8 * self.max_position_embeddings
        return tokens + 4 * sum(prod(shape) for layer in self.layers for _, _, shape, _ in layer.states)


class TransformersNetwork(nn.Module):
    """A causal language model of transformers, in place of a `pippin.language.decoder.Decoder`.

    Args:
        model: a `transformers.PreTrainedModel` with logits, on its device.
        config: its sizes, and what its layers keep.
    """

    def __init__(self, model: Any, config: TransformersConfig) -> None:
        super().__init__()
        self.model, self.config = model, config
        self._accepted = frozenset(inspect.signature(model.forward).parameters)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        device: torch.device = next(self.model.parameters()).device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the weights."""
        dtype: torch.dtype = next(self.model.parameters()).dtype
        return dtype

    @torch.inference_mode()
    def logits(
        self,
        ids: Int[Tensor, "batch new"],
        cache: Any = None,
        *,
        rows: Sequence[int] | None = None,
        mask: Bool[Tensor, "batch tokens"] | None = None,
    ) -> Float[Tensor, "batch rows vocab"]:
        """Logits after some of the new tokens.

        Args:
            ids: new tokens.
            cache: a `transformers.Cache` of the tokens before them; None for none.
            rows: indices of the tokens whose logits are returned; None for all.
            mask: which tokens, cached and new, are there; the others are padding on the left. None for all.
        """
        given: dict[str, Any] = {"input_ids": ids.to(self.device)}
        if cache is not None:
            given["cache"] = cache
        if "use_cache" in self._accepted:
            given["use_cache"] = cache is not None
        if mask is not None:
            given["attention_mask"] = mask.to(self.device, torch.int64)
            if "position_ids" in self._accepted:
                positions = given["attention_mask"].cumsum(1) - 1
                given["position_ids"] = positions.clamp(min=0)[:, -ids.shape[1] :]
        kept = rows is not None and "logits_to_keep" in self._accepted
        if kept:
            given["logits_to_keep"] = torch.tensor(rows, device=self.device)
        logits: Tensor = self.model(**given).logits
        return logits if kept or rows is None else logits[:, list(rows)]
