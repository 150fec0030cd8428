"""Configs of decoders for training from scratch, in a few sizes, with attention, recurrent layers or mixtures."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, cast, get_args

from pippin.core.checks import checked
from pippin.language.decoder_config import DecoderConfig, LayerSpec
from pippin.language.parallel.pt_moe import PTMoEConfig
from pippin.nn.attention.attention import AttentionSpec
from pippin.nn.feedforward.feedforward import FeedForwardSpec
from pippin.nn.recurrent.layer import CellName, RecurrentSpec


class PresetSize(NamedTuple):
    """Sizes in which presets differ."""

    layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int


SIZES: Final = {
    "nano": PresetSize(4, 128, 4, 2, 352),
    "small": PresetSize(12, 384, 6, 2, 1024),
    "base": PresetSize(30, 576, 9, 3, 1536),
}
"""0.7 M, 19 M and 106 M parameters in the layers; the embedding adds vocabulary times width."""

RECURRENT: Final = get_args(CellName)
"""Suffixes of preset names with recurrent layers instead of attention."""
EXPERTS: Final = 8
"""Experts of each layer of the presets with mixtures."""
ACTIVE: Final = 2
"""How many of them a token takes."""
TRACKS: Final = 4
"""Tracks of the presets with tracks."""
TRACK_BLOCK_DEPTH: Final = 2
"""Layers between two of their joins."""
PresetName = Literal[
    "nano",
    "small",
    "base",
    "nano-gru",
    "small-gru",
    "base-gru",
    "nano-lstm",
    "small-lstm",
    "base-lstm",
    "nano-moe",
    "small-moe",
    "base-moe",
    "nano-pt-moe",
    "small-pt-moe",
    "base-pt-moe",
]


@checked
def preset(preset: PresetName, vocab_size: int, *, max_position_embeddings: int = 2048) -> DecoderConfig:
    """The config of a decoder with Llama's architecture: gated feed-forward, rotary positions, RMS norms, tied
    embedding.

    Args:
        preset: "nano" trains in minutes on a laptop, "small" in hours, "base" has SmolLM2 135M's sizes. With the suffix
            "-gru" or "-lstm" ("nano-gru"), every layer has a recurrence instead of attention; with "-moe" it has a
            mixture of 8 experts, of which a token takes 2, with as many parameters for a token; with "-pt-moe" it has 4
            parallel tracks of half the width that are joined after every second layer, a mixture in every second layer
            and global attention in every fourth (`PTMoEConfig`).
        vocab_size: size of the tokenizer's vocabulary.
        max_position_embeddings: longest sequence, in tokens.

    >>> preset("nano", 300).hidden_size, preset("nano-gru", 300).recurrent_layers
    (128, (0, 1, 2, 3))
    """
    form, _, cell = preset.partition("-")
    size = SIZES[form]
    if cell == "pt-moe":
        return _with_tracks(size, vocab_size, max_position_embeddings)
    feedforward = FeedForwardSpec(size.intermediate_size)
    if cell == "moe":
        inner = size.intermediate_size // ACTIVE
        layer = LayerSpec(AttentionSpec(), FeedForwardSpec(inner, num_experts=EXPERTS, num_experts_per_tok=ACTIVE))
    elif cell in RECURRENT:
        layer = LayerSpec.recurring(RecurrentSpec(cast(CellName, cell)), feedforward)
    else:
        layer = LayerSpec(AttentionSpec(), feedforward)
    return DecoderConfig(
        "mixtral" if cell == "moe" else "llama",
        vocab_size,
        size.hidden_size,
        (layer,) * size.layers,
        num_attention_heads=size.num_attention_heads,
        num_key_value_heads=size.num_key_value_heads,
        head_dim=size.hidden_size // size.num_attention_heads,
        max_position_embeddings=max_position_embeddings,
        rms_norm_eps=1e-5,
    )


def _with_tracks(size: PresetSize, vocab_size: int, max_position_embeddings: int) -> DecoderConfig:
    """Tracks with experts, with about as many parameters for a token as a dense decoder of the size."""
    return PTMoEConfig(
        vocab_size=vocab_size,
        hidden_size=size.hidden_size // 2,
        num_hidden_layers=size.layers,
        num_tracks=TRACKS,
        block_depth=TRACK_BLOCK_DEPTH,
        num_attention_heads=max(1, size.num_attention_heads // 2),
        num_key_value_heads=1,
        head_dim=size.hidden_size // size.num_attention_heads,
        intermediate_size=size.intermediate_size // 2,
        num_experts=EXPERTS,
        num_experts_per_tok=ACTIVE,
        moe_intermediate_size=size.intermediate_size // 2 // ACTIVE,
        window=max(1, max_position_embeddings // 8),
        rope_theta=10_000.0,
        max_position_embeddings=max_position_embeddings,
    ).decoder()
