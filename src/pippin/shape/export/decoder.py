"""Capturing a language model: a pass over whole sequences, and a step whose keys and values come in and go out.

Notable here:
- the step is the same decoder with a cache that is two tensors of the caller's, so it runs in every back end
- rotary tables are made for the longest sequence beforehand, so that the captured program holds them as constants
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from pippin.core.errors import InvalidArgument
from pippin.nn.cache import NoCache, Read
from pippin.shape.export.asset import Function, ModelAsset
from pippin.shape.export.signature import Range

if TYPE_CHECKING:
    from pippin.language.transformer import Decoder


def capture_decoder(decoder: Decoder, *, context: int = 1024, batch: int = 8, step: bool = True) -> ModelAsset:
    """Capture a decoder with dynamic batch and length.

    "main" takes ``ids`` (batch, length) and gives ``logits`` (batch, length, vocabulary). "step" takes one new token of
    each row, ``ids`` (batch, 1), with the ``keys`` and ``values`` of the tokens before, each (layers, batch, heads,
    past, head width), and gives logits and the keys and values with the new token. The first past, of at least one
    token, has to come from elsewhere: "main" gives logits only.

    Args:
        decoder: with ordinary weights, on the CPU.
        context: longest sequence, from 4 to the decoder's own.
        batch: most rows, at least 2.
        step: whether "step" is captured too.

    Raises:
        InvalidArgument: packed weights, recurrent layers, or a context or batch out of range.
    """
    if any(getattr(module, "packed", None) is not None for module in decoder.modules()):
        raise InvalidArgument("the decoder is packed for inference; load it with pack=False to export it")
    if decoder.config.recurrent_layers:
        raise InvalidArgument(
            f"layer {decoder.config.recurrent_layers[0]} is recurrent and is solved by iterations that end when they "
            "have converged, which no exported program can say"
        )
    if not 4 <= context <= decoder.config.max_context or batch < 2:
        raise InvalidArgument(
            f"context must lie within 4..{decoder.config.max_context} and batch be 2 or more, got {context} and {batch}"
        )
    for rotary in {spec.attention.rotary for spec in decoder.config.layers} - {None}:
        assert rotary is not None
        decoder._table(rotary, context, decoder.embed_tokens.dtype, decoder.embed_tokens.device)
    rows, vocabulary = Range("batch", 1, batch), decoder.config.vocab_size
    length, past = Range("length", 2, context), Range("past", 1, context - 1)
    # the example spans the vocabulary, so that inputs drawn from its range do too
    ids = torch.linspace(0, vocabulary - 1, 2 * 3).long().view(2, 3)
    functions = {}
    if step:
        config = decoder.config
        store = torch.randn(len(config.cached_layers), 2, config.kv_heads, 5, config.head_dim).to(
            decoder.embed_tokens.dtype
        )
        functions["step"] = Function(
            _Step(decoder),
            {"ids": ids[:, ::2][:, :1].contiguous(), "keys": store, "values": store.clone()},
            {"ids": {0: rows}, "keys": {1: rows, 3: past}, "values": {1: rows, 3: past}},
            ("logits", "keys", "values"),
        )
    dynamic = {"ids": {0: rows, 1: length}}
    return ModelAsset.capture(_Whole(decoder), {"ids": ids}, dynamic, outputs=("logits",), functions=functions)


class _Whole(nn.Module):
    """All tokens at once."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, ids: Int[Tensor, "batch length"]) -> Float[Tensor, "batch length vocab"]:
        """Logits of every position."""
        logits: Tensor = self.decoder(ids, cache=_Repeated(self.decoder.config.heads))
        return logits


class _Repeated(NoCache):
    """Keys and values repeated for every query head: several back ends have no attention with shared heads."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def append(self, layer: int, k: Tensor, v: Tensor, window: int | None) -> Read:
        """As `NoCache`, with as many heads as there are queries."""
        keys, values, mask = super().append(layer, k, v, window)
        times = self.heads // keys.shape[1]
        return keys.repeat_interleave(times, 1), values.repeat_interleave(times, 1), mask


class _Step(nn.Module):
    """One more token."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, ids: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of the new token, and keys and values with it."""
        cache = _Explicit(self.decoder.config.cached_layers, keys, values)
        logits = self.decoder(ids, cache=cache)
        return logits, torch.stack(cache.new_keys), torch.stack(cache.new_values)


class _Explicit:
    """A cache made of two tensors; one new token at a time."""

    positions: None = None

    def __init__(self, layers: tuple[int, ...], keys: Tensor, values: Tensor) -> None:
        self.index = {layer: place for place, layer in enumerate(layers)}
        self.keys, self.values = keys, values
        self.new_keys: list[Tensor] = []
        self.new_values: list[Tensor] = []

    @property
    def length(self) -> int:
        """Tokens of the past."""
        return self.keys.shape[3]

    def append(self, layer: int, k: Tensor, v: Tensor, window: int | None) -> Read:
        """The past with the new token; under a window, a mask that hides what is too old."""
        place = self.index[layer]
        keys, values = torch.cat([self.keys[place], k], 2), torch.cat([self.values[place], v], 2)
        self.new_keys.append(keys)
        self.new_values.append(values)
        if window is None:
            return keys, values, None
        return keys, values, (torch.arange(self.length + 1) > self.length - window)[None, None, None]

    def advance(self, new: int) -> None:
        """The caller keeps what came out."""
