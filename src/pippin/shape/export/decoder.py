"""Capturing a language model: a pass over whole sequences, and a decoding step with keys and values as inputs.

Notable here:
- the cache of the step is two tensors, inputs and outputs of the program, so it runs in every backend
- a window that the longest sequence fits into needs no mask; another is masked at every length, since a program cannot
  ask how long its input is
- rotary tables are computed for the longest sequence beforehand, so that they are constants of the program
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import torch
from annotated_types import Ge
from jaxtyping import Float, Int
from torch import Tensor, nn

from pippin.core.checks import checked
from pippin.core.errors import InvalidArgument
from pippin.nn.kv_cache import KeyValues, NoCache
from pippin.shape.export.exported_model import ExportedFunction, ExportedModel
from pippin.shape.export.signature import SizeRange

if TYPE_CHECKING:
    from pippin.language.decoder import Decoder


@checked
def capture_decoder(
    decoder: Decoder,
    *,
    context: Annotated[int, Ge(4)] = 1024,
    max_batch_size: Annotated[int, Ge(2)] = 8,
    step: bool = True,
) -> ExportedModel:
    """Capture a decoder with dynamic batch and length.

    "main" takes ``ids`` (batch, length) and gives ``logits`` (batch, length, vocabulary). "step" takes one new token of
    each row, ``ids`` (batch, 1), with the ``keys`` and ``values`` of the tokens before, each (layers, batch, heads,
    past, head width), and gives logits and the keys and values with the new token. The keys and values of the first
    tokens, at least one, must be computed otherwise, as "main" returns only logits.

    Args:
        decoder: a decoder with dense weights on the CPU.
        context: maximum length of a sequence, from 4 to the decoder's own.
        max_batch_size: maximum batch size, at least 2.
        step: whether to capture "step" too.

    Raises:
        InvalidArgument: packed weights, recurrent layers, or a longer context than the decoder's own.
    """
    if any(getattr(module, "packed", None) is not None for module in decoder.modules()):
        raise InvalidArgument("the decoder is packed for inference; load it with pack=False to export it")
    if decoder.config.recurrent_layers:
        raise InvalidArgument(
            f"layer {decoder.config.recurrent_layers[0]} is recurrent, and exported programs keep keys and values but "
            "no states"
        )
    if context > decoder.config.max_position_embeddings:
        raise InvalidArgument(f"context must be at most {decoder.config.max_position_embeddings}, got {context}")
    decoder.ensure_tables(context, decoder.embed_tokens.dtype, decoder.embed_tokens.device)
    rows, vocabulary = SizeRange("batch", 1, max_batch_size), decoder.config.vocab_size
    length, past = SizeRange("length", 2, context), SizeRange("past", 1, context - 1)
    # the example spans the vocabulary, so that inputs sampled from its range do too
    ids = torch.linspace(0, vocabulary - 1, 2 * 3).long().view(2, 3)
    functions = {}
    if step:
        config = decoder.config
        store = torch.randn(len(config.cached_layers), 2, config.num_key_value_heads, 5, config.head_dim).to(
            decoder.embed_tokens.dtype
        )
        functions["step"] = ExportedFunction(
            _Step(decoder),
            {"ids": ids[:, ::2][:, :1].contiguous(), "keys": store, "values": store.clone()},
            {"ids": {0: rows}, "keys": {1: rows, 3: past}, "values": {1: rows, 3: past}},
            ("logits", "keys", "values"),
        )
    dynamic = {"ids": {0: rows, 1: length}}
    whole = _Whole(decoder, context)
    return ExportedModel.capture(whole, {"ids": ids}, dynamic, outputs=("logits",), functions=functions)


class _Whole(nn.Module):
    """All tokens at once."""

    def __init__(self, decoder: Decoder, context: int) -> None:
        super().__init__()
        self.decoder, self.context = decoder, context

    def forward(self, ids: Int[Tensor, "batch length"]) -> Float[Tensor, "batch length vocab"]:
        """Logits of every position."""
        logits: Tensor = self.decoder(ids, cache=_RepeatedHeads(self.decoder.config.num_attention_heads, self.context))
        return logits


class _RepeatedHeads(NoCache):
    """Keys and values repeated for every query head: several backends have no attention with shared heads."""

    def __init__(self, heads: int, context: int) -> None:
        super().__init__()
        self.heads, self.context = heads, context

    def append(self, layer: int, k: Tensor, v: Tensor, window: int | None) -> KeyValues:
        """As `NoCache`, with as many heads as there are queries."""
        times = self.heads // k.shape[1]
        mask = None
        if window is not None and window < self.context:
            ages = torch.arange(k.shape[2])[:, None] - torch.arange(k.shape[2])
            mask = ((ages >= 0) & (ages < window))[None, None]
        return k.repeat_interleave(times, 1), v.repeat_interleave(times, 1), mask


class _Step(nn.Module):
    """One more token."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, ids: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of the new token, and keys and values with it."""
        cache = _TensorCache(self.decoder.config.cached_layers, keys, values)
        logits = self.decoder(ids, cache=cache)
        return logits, torch.stack(cache.new_keys), torch.stack(cache.new_values)


class _TensorCache:
    """A cache made of two tensors; one new token at a time."""

    positions: None = None

    def __init__(self, layers: tuple[int, ...], keys: Tensor, values: Tensor) -> None:
        self.index = {layer: index for index, layer in enumerate(layers)}
        self.keys, self.values = keys, values
        self.new_keys: list[Tensor] = []
        self.new_values: list[Tensor] = []

    @property
    def length(self) -> int:
        """Tokens of the past."""
        return self.keys.shape[3]

    def append(self, layer: int, k: Tensor, v: Tensor, window: int | None) -> KeyValues:
        """The past with the new token; with a window, a mask that is false for tokens outside it."""
        index = self.index[layer]
        keys, values = torch.cat([self.keys[index], k], 2), torch.cat([self.values[index], v], 2)
        self.new_keys.append(keys)
        self.new_values.append(values)
        if window is None:
            return keys, values, None
        return keys, values, (torch.arange(self.length + 1) > self.length - window)[None, None, None]

    def advance(self, new: int) -> None:
        """Do nothing: the caller stores the returned keys and values."""
