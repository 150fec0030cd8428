"""Rotary position embeddings (RoPE) and methods to extend them beyond the trained context length.

Notable here:
- tables of cosine and sine are computed once, in float32, and indexed by position
- the sine table includes the sign of each half, so that a rotation is a product, a roll and a fused multiply-add
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from pippin.core.errors import InvalidArgument


@dataclass(frozen=True)
class Rotary:
    """The angles of a rotary position embedding.

    Args:
        theta: base of the geometric progression of wavelengths.
        scaling: "none"; "linear" divides positions by ``factor``; "llama3" scales long wavelengths only; "yarn"
            interpolates between both by wavelength and scales the attention logits.
        factor: factor by which the context is extended.
        original_max_position_embeddings: trained context length, used by "llama3" and "yarn".
        low: "llama3": low frequency factor; "yarn": beta_slow.
        high: "llama3": high frequency factor; "yarn": beta_fast.
        attention_factor: multiplier on cosine and sine; None means that of "yarn" (see `magnitude`) and 1 otherwise.
        truncate: "yarn": whether the range of interpolated dimensions begins and ends at whole ones.
        mscale: "yarn": weight of ``ln(factor)`` in the multiplier on cosine and sine; 0 for 1.
        mscale_all_dim: "yarn": likewise in the multiplier on all dimensions of a head; 0 for none.
        divisors: one divisor for each frequency, for checkpoints that store the scaling as a table.
        long_divisors: those of sequences that are longer than the trained context (LongRoPE), whose first position is
            given as ``original_max_position_embeddings``; None if there are none.
        long_attention_factor: ``attention_factor`` of such sequences; None for the same.
        dims: number of dimensions that are rotated, even; the others have frequency 0. None for all. The rotated pairs
            are (i, i + head_dim / 2) for i < dims / 2.
        proportional: whether the frequencies of ``dims`` rotated dimensions are the first ones of the whole head.
        axes: for each frequency, the axis of the position that it rotates by (0 time, 1 height, 2 width), for tokens
            with positions on several axes; None if positions are numbers.

    Source: Su et al. 2021, arXiv:2104.09864; YaRN arXiv:2309.00071; Llama 3 arXiv:2407.21783;
    LongRoPE arXiv:2402.13753; several axes: Qwen2-VL arXiv:2409.12191.
    """

    theta: float = 10_000.0
    scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    factor: float = 1.0
    original_max_position_embeddings: int = 8192
    low: float = 1.0
    high: float = 4.0
    attention_factor: float | None = None
    truncate: bool = True
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    divisors: tuple[float, ...] | None = None
    long_divisors: tuple[float, ...] | None = None
    long_attention_factor: float | None = None
    dims: int | None = None
    proportional: bool = False
    axes: tuple[int, ...] | None = None

    def frequencies(self, head_dim: int) -> Float[Tensor, half]:
        """Angle per position of each pair of dimensions, in radians."""
        if self.dims is not None and self.proportional:
            return F.pad(self._frequencies(head_dim)[: self.dims // 2], (0, (head_dim - self.dims) // 2))
        if self.dims is not None and self.dims < head_dim:
            return F.pad(self._frequencies(self.dims), (0, (head_dim - self.dims) // 2))
        return self._frequencies(head_dim)

    def _frequencies(self, head_dim: int) -> Float[Tensor, half]:
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        frequency = 1.0 / self.theta**exponent
        if self.divisors is not None:
            return frequency / torch.tensor(self.divisors)
        if self.scaling == "linear":
            return frequency / self.factor
        if self.scaling == "llama3":
            # 0 for wavelengths that fit `high` times into the trained context, 1 for those that fit at most `low` times
            turns = self.original_max_position_embeddings * frequency / (2 * math.pi)
            stretched = ((self.high - turns) / (self.high - self.low)).clamp(0, 1)
            return frequency * (1 - stretched) + frequency / self.factor * stretched
        if self.scaling == "yarn":
            first, last = (self._dimension_with(turns, head_dim) for turns in (self.high, self.low))
            if self.truncate:
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, head_dim - 1)
            ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - first) / max(last - first, 0.001)
            stretched = ramp.clamp(0, 1)
            return frequency * (1 - stretched) + frequency / self.factor * stretched
        return frequency

    def _dimension_with(self, turns: float, head_dim: int) -> float:
        """The (fractional) pair of dimensions that makes ``turns`` rotations over the trained context."""
        return (
            head_dim
            * math.log(self.original_max_position_embeddings / (turns * 2 * math.pi))
            / (2 * math.log(self.theta))
        )

    @property
    def magnitude(self) -> float:
        """Factor of cosine and sine; other than 1 for YaRN, or where `attention_factor` says so.

        With both ``mscale`` and ``mscale_all_dim`` it is the ratio of their multipliers, as attention then multiplies
        all scores by the latter (`score_scale`).
        """
        if self.attention_factor is not None:
            return self.attention_factor
        if self.scaling != "yarn":
            return 1.0
        if self.mscale and self.mscale_all_dim:
            return self._multiplier(self.mscale) / self._multiplier(self.mscale_all_dim)
        return self._multiplier(1.0)

    @property
    def score_scale(self) -> float:
        """Factor of the scores of latent attention, over all dimensions of a head.

        Source: DeepSeek-V2, arXiv:2405.04434, section 3.1.4.
        """
        return self._multiplier(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def _multiplier(self, weight: float) -> float:
        return 0.1 * weight * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    def tables(
        self, positions: Int[Tensor, "*batch seq"], head_dim: int
    ) -> tuple[Float[Tensor, "*batch seq dim"], Float[Tensor, "*batch seq dim"]]:
        """Cosine and signed sine of every position, float32."""
        if self.long_divisors is not None:
            return self._tables_of_both(positions, head_dim)
        angles = positions[..., None].float() * self.frequencies(head_dim).to(positions.device)
        cos, sin = angles.cos() * self.magnitude, angles.sin() * self.magnitude
        if self.dims is not None:
            cos[..., self.dims // 2 :] = 1.0  # the magnitude is that of rotated dimensions
        return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)

    def _tables_of_both(self, positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
        """Tables of positions of short sequences and, from the trained context on, of long ones."""
        factor = self.long_attention_factor
        short = replace(self, long_divisors=None)
        long = replace(
            short, divisors=self.long_divisors, attention_factor=self.attention_factor if factor is None else factor
        )
        start = self.original_max_position_embeddings
        tables = zip(short.tables(positions, head_dim), long.tables(positions - start, head_dim), strict=True)
        cos, sin = (torch.where(positions[..., None] < start, near, far) for near, far in tables)
        return cos, sin

    def turn(self, x: Float[Tensor, "*batch dim"], by: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch dim"]:
        """Move vectors that are already rotated to positions that are ``by`` further.

        >>> rotary, x = Rotary(), torch.tensor([[1.0, 0.5, -2.0, 3.0]])
        >>> near, far = (apply_rotary(x, *rotary.tables(torch.tensor([at]), 4)) for at in (2, 7))
        >>> torch.allclose(rotary.turn(near, torch.tensor([5])), far, atol=1e-6)
        True
        """
        angles = by[..., None].float() * self.frequencies(x.shape[-1]).to(x.device)
        cos, sin = angles.cos(), angles.sin()
        return apply_rotary(x, torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1))

    def at(
        self, table: Float[Tensor, "size dim"], positions: Int[Tensor, "*axes seq"]
    ) -> Float[Tensor, "*batch seq dim"]:
        """The rows of a table of `tables` for some positions: (seq,), (batch, seq), or (axes, batch, seq).

        >>> rotary = Rotary(axes=(0, 1))
        >>> table = rotary.tables(torch.arange(8), 4)[0]
        >>> same = rotary.at(table, torch.full((2, 1, 1), 5))
        >>> torch.equal(same, table[5].view(1, 1, 4))
        True
        """
        if positions.ndim < 3:
            return table[positions]
        if self.axes is None:  # the first axis counts the tokens
            return table[positions[0]]
        axes = torch.tensor([*self.axes, *self.axes], device=positions.device)
        rows = positions[axes].movedim(0, -1)  # (batch, seq, dim): the position that each dimension is rotated by
        return table[rows, torch.arange(len(axes), device=positions.device)]


def long_positions(positions: Int[Tensor, "*batch seq"], original: int) -> Int[Tensor, "*batch seq"]:
    """Positions in the tables of `Rotary` with ``long_divisors``: those of a longer sequence begin at ``original``.

    Args:
        positions: position of each token; a sequence begins at each 0, and one that does not is in a cache up to there.
        original: the trained context; a sequence that reaches beyond it is rotated by the long divisors.

    Raises:
        InvalidArgument: what a cache has of a sequence was rotated by the short divisors, and now it is longer.

    >>> long_positions(torch.tensor([0, 1, 0, 1, 2]), original=2)
    tensor([0, 1, 2, 3, 4])
    """
    rows = positions.reshape(-1, positions.shape[-1])
    sequence = (rows == 0).cumsum(-1)
    furthest = rows.new_zeros(len(rows), int(sequence.max()) + 1).scatter_reduce(1, sequence, rows, "amax")
    is_long = furthest.gather(1, sequence) >= original
    cached = rows[is_long & (sequence == 0) & (rows <= original)]
    if len(cached):
        raise InvalidArgument(
            f"the {int(cached.min())} tokens in the cache are rotated for sequences of at most {original} tokens; "
            "compute a longer one from its beginning"
        )
    return torch.where(is_long, rows + original, rows).view_as(positions)


def apply_rotary(
    x: Float[Tensor, "*batch seq dim"], cos: Float[Tensor, "*#batch seq dim"], sin: Float[Tensor, "*#batch seq dim"]
) -> Float[Tensor, "*batch seq dim"]:
    """Rotate each pair (i, i + dim/2) by its angle; ``cos`` and ``sin`` come from `Rotary.tables`.

    >>> cos, sin = Rotary().tables(torch.tensor([0, 3]), 2)
    >>> apply_rotary(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), cos, sin)
    tensor([[ 1.0000,  0.0000],
            [-0.9900,  0.1411]])
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
