"""Where the keys and values of a sequence lie whose heads have lost tokens, each head others.

Notable here:
- a head-block holds 16 tokens of one head; it takes the room of any head in a block of the pool, so the blocks that a
  sequence has are divided among its heads as their lengths need it, and nothing is wasted but the end of the last one
- what is left of a head lies in the order of the tokens, without gaps. Slots still count what was lost: positions and
  rotations are those of the whole sequence
- a head of a layer with a sliding window has lost the oldest tokens alone, so that its slots still say what it sees
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int, Int8, Int32
from torch import Tensor

from pippin.language.decoder_config import DecoderConfig


@dataclass(frozen=True, eq=False)
class HeadTables:
    """The head-blocks of a sequence.

    Attributes:
        tables: of each head its head-blocks, in order; what is behind the last one is not read. Head-block ``n`` is
            number ``n % heads`` in block ``n // heads`` of the pool, for a pool whose blocks have so many heads.
        lost: tokens of the sequence that each head no longer has.
    """

    tables: Int32[Tensor, "layers kv_heads blocks"]
    lost: Int32[Tensor, "layers kv_heads"]

    @property
    def least_lost(self) -> int:
        """Tokens that every head has lost."""
        return int(self.lost.min())


@dataclass(frozen=True, eq=False)
class HeadTokens:
    """Keys and values of some tokens in one head, in the precision of the cache.

    Attributes:
        keys: of each token, already rotated to its position.
        values: likewise.
        key_scales: with 8-bit codes, the factor of each key.
        value_scales: likewise.
    """

    keys: Tensor
    values: Tensor
    key_scales: Float[Tensor, tokens] | None = None
    value_scales: Float[Tensor, tokens] | None = None

    def __len__(self) -> int:
        return len(self.keys)

    def at(self, index: Int[Tensor, kept]) -> HeadTokens:
        """Some of the tokens."""
        scales = (self.key_scales, self.value_scales)
        return HeadTokens(
            self.keys[index], self.values[index], *(None if each is None else each[index] for each in scales)
        )

    def with_keys(self, keys: Float[Tensor, "tokens head_dim"]) -> HeadTokens:
        """With other keys, in the precision of these."""
        if self.key_scales is None:
            return replace(self, keys=keys.to(self.keys.dtype))
        codes, scales = int8_codes(keys)
        return replace(self, keys=codes, key_scales=scales)

    def dense(self) -> tuple[Float[Tensor, "tokens head_dim"], Float[Tensor, "tokens head_dim"]]:
        """Keys and values in float32."""
        pairs = ((self.keys, self.key_scales), (self.values, self.value_scales))
        keys, values = (part.float() if scale is None else part.float() * scale[:, None] for part, scale in pairs)
        return keys, values


def heads_alike(config: DecoderConfig) -> bool:
    """Whether heads can lie apart: all layers with keys of their own have heads of one size.

    Args:
        config: of the decoder.
    """
    layers = [config.layers[layer].attention for layer in config.cached_layers]
    shape = (config.num_key_value_heads, config.head_dim)
    alike = all((each.num_key_value_heads or shape[0], each.head_dim or shape[1]) == shape for each in layers)
    return bool(layers) and alike and all(each.latent is None for each in layers)


def int8_codes(
    vectors: Float[Tensor, "*batch dim"],
) -> tuple[Int8[Tensor, "*batch dim"], Float[Tensor, "*batch"]]:
    """Vectors as 8-bit codes with a factor each.

    >>> int8_codes(torch.tensor([[0.5, -1.0], [0.0, 0.0]]))[0].tolist()
    [[64, -127], [0, 0]]
    """
    scales = vectors.float().abs().amax(-1) / 127
    # the scale of a zero vector is 0; divide by 1 instead
    return (vectors / torch.where(scales > 0, scales, 1.0)[..., None]).round_().to(torch.int8), scales


def padded(part: Tensor, tokens: int) -> Tensor:
    """Zeros behind the last token, up to so many."""
    return torch.cat([part, part.new_zeros(tokens - len(part), *part.shape[1:])]) if len(part) < tokens else part
