"""Decoders to be trained from nothing: a few sizes of the usual form, or with recurrent layers, for any vocabulary."""

from __future__ import annotations

from typing import Final, NamedTuple, cast, get_args

from pippin.core.errors import InvalidArgument
from pippin.language.transformer import DecoderConfig, LayerSpec
from pippin.nn.attention import AttentionSpec
from pippin.nn.feedforward import FeedForwardSpec
from pippin.nn.recurrent import CellName, RecurrentSpec


class Size(NamedTuple):
    """What tells one preset from another."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    feedforward: int


SIZES: Final = {
    "nano": Size(4, 128, 4, 2, 352),
    "small": Size(12, 384, 6, 2, 1024),
    "base": Size(30, 576, 9, 3, 1536),
}
"""0.7 M, 19 M and 106 M parameters in the layers; the embedding adds vocabulary times width."""

RECURRENT: Final = get_args(CellName)
"""Endings of a preset's name that put recurrent layers in attention's place."""
NAMES: Final = (*SIZES, *(f"{size}-{cell}" for cell in RECURRENT for size in SIZES))


def preset(name: str, vocab_size: int, *, context: int = 2048) -> DecoderConfig:
    """A decoder of Llama's form: gated feed-forward, rotary positions, RMS norms, tied embedding.

    Args:
        name: "nano" trains in minutes on a laptop, "small" in hours, "base" is SmolLM2 135M's form. With "-gru" or
            "-lstm" behind it ("nano-gru"), every layer has a recurrence in attention's place.
        vocab_size: of the tokenizer.
        context: longest sequence, in tokens.

    Raises:
        InvalidArgument: another name.

    >>> preset("nano", 300).width, preset("nano-gru", 300).recurrent_layers
    (128, (0, 1, 2, 3))
    """
    if name not in NAMES:
        raise InvalidArgument(f"there is no preset {name!r}; choose {', '.join(NAMES)}")
    form, _, cell = name.partition("-")
    size = SIZES[form]
    feedforward = FeedForwardSpec(size.feedforward)
    if cell in RECURRENT:
        layer = LayerSpec.recurring(RecurrentSpec(cast(CellName, cell)), feedforward)
    else:
        layer = LayerSpec(AttentionSpec(), feedforward)
    return DecoderConfig(
        "llama",
        vocab_size,
        size.width,
        (layer,) * size.layers,
        heads=size.heads,
        kv_heads=size.kv_heads,
        head_dim=size.width // size.heads,
        max_context=context,
        eps=1e-5,
    )
