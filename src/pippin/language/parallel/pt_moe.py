r"""PT-MoE: a server model of narrow decoders side by side, every second of whose layers is a mixture of experts.

Notable here:
- a track is an ordinary decoder: three layers of four attend within a window, with rotary positions, the fourth to the
  whole context without any position, so that nothing has to be extrapolated beyond the trained length
- experts belong to their track, so their tokens never leave the process that computes it
- the report has the shapes; sizes are those that the public toolkit for training adapters gives its architecture
- `pippin.nn.parallel.tracks` has the joins, and `TrackProcesses` trains in several processes

Source: Apple Intelligence Foundation Language Models 2025, arXiv:2507.13575, section 2.2; Parallel Track Transformers,
arXiv:2602.07306.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pippin.core.checks import NonNegativeInt, PositiveFloat, PositiveInt, checked
from pippin.core.errors import InvalidArgument
from pippin.language.decoder_config import DecoderConfig, LayerSpec
from pippin.nn.attention.attention import AttentionSpec
from pippin.nn.attention.rotary import Rotary
from pippin.nn.feedforward.feedforward import FeedForwardSpec
from pippin.nn.feedforward.routing import RouterSpec
from pippin.nn.parallel.tracks import TrackJoin, Tracks, side_by_side


@checked
@dataclass(frozen=True)
class PTMoEConfig:
    """Sizes of a decoder with parallel tracks; widths and heads are those of one track.

    Args:
        vocab_size: rows of the embedding, which is also the output matrix.
        hidden_size: width of a track. About as many parameters as a decoder of width d have n tracks of width
            ``d / sqrt(n)``.
        num_hidden_layers: layers of a track; a multiple of ``block_depth``.
        num_tracks: tracks side by side.
        block_depth: layers between two joins.
        join: how tracks are joined; see `Tracks`.
        num_attention_heads: query heads of a track.
        num_key_value_heads: its heads of keys and values; divides the query heads.
        head_dim: width of a head, even.
        intermediate_size: inner width of the dense feed-forward layers.
        experts_every: every how manyth layer of a track is a mixture of experts, counted from its first; 0 for none.
        num_experts: experts of each mixture.
        num_experts_per_tok: how many of them a token takes.
        moe_intermediate_size: inner width of an expert.
        attention_pattern: kinds of layers, repeated: "L" attends within the window and has rotary positions, "G" to all
            earlier tokens without positions.
        window: tokens that a layer "L" sees, its own included.
        rope_theta: base of the rotary positions.
        max_position_embeddings: longest sequence, in tokens.
        rms_norm_eps: epsilon of all norms.
        qk_norm: whether query and key heads are normalized.
        router_softcap: bound of the routers' logits; None for no bound.

    Raises:
        InvalidArgument: layers that are no whole blocks, another letter in the pattern, more experts for a token than
            there are, or heads that do not fit.

    >>> config = PTMoEConfig(vocab_size=300, hidden_size=64, num_hidden_layers=8, num_tracks=2, block_depth=4,
    ...     num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=160, num_experts=4,
    ...     num_experts_per_tok=2, moe_intermediate_size=96, window=32)
    >>> config.decoder().tracks
    Tracks(num_tracks=2, block_depth=4, join='mean')
    >>> config.collectives(), config.num_parameters, config.num_active_parameters
    (CollectivesPerPass(parallel_tracks=2, tensor_parallel=16), 1055552, 760640)
    """

    vocab_size: PositiveInt
    hidden_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    head_dim: PositiveInt
    intermediate_size: PositiveInt
    num_tracks: PositiveInt = 4
    block_depth: PositiveInt = 4
    join: TrackJoin = "mean"
    experts_every: NonNegativeInt = 2
    num_experts: PositiveInt = 16
    num_experts_per_tok: PositiveInt = 2
    moe_intermediate_size: PositiveInt = 1024
    attention_pattern: str = "LLLG"
    window: PositiveInt = 4096
    rope_theta: float = 500_000.0
    max_position_embeddings: PositiveInt = 65_536
    rms_norm_eps: float = 1e-5
    qk_norm: bool = False
    router_softcap: PositiveFloat | None = None

    def __post_init__(self) -> None:
        if not self.attention_pattern or set(self.attention_pattern) - set("LG"):
            raise InvalidArgument(f"attention_pattern must be letters L and G, got {self.attention_pattern!r}")
        if self.num_experts_per_tok > self.num_experts:
            raise InvalidArgument(
                f"num_experts_per_tok ({self.num_experts_per_tok}) must be at most num_experts ({self.num_experts})"
            )
        self.decoder()  # checks that the sizes are consistent

    @classmethod
    def server(cls) -> PTMoEConfig:
        """The published server model: 8 tracks of 48 layers, of which half have 40 experts; see the module's source.

        >>> config = PTMoEConfig.server()
        >>> config.num_parameters, config.num_active_parameters, config.collectives().parallel_tracks
        (147803703296, 15834122240, 12)
        """
        return cls(
            vocab_size=153_600,
            hidden_size=2048,
            num_hidden_layers=48,
            num_tracks=8,
            block_depth=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=128,
            intermediate_size=5888,
            num_experts=40,
            num_experts_per_tok=2,
            moe_intermediate_size=2944,
            window=4097,  # the toolkit counts the tokens before the current one
            qk_norm=True,
            router_softcap=50.0,
        )

    def decoder(self) -> DecoderConfig:
        """The config for `pippin.language.Decoder`."""
        tracks = Tracks(self.num_tracks, self.block_depth, self.join)
        return DecoderConfig(
            family="pt_moe",
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            layers=side_by_side([self._layer(index) for index in range(self.num_hidden_layers)], tracks),
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.max_position_embeddings,
            rms_norm_eps=self.rms_norm_eps,
            qk_norm="head" if self.qk_norm else None,
            tracks=tracks,
        )

    def _layer(self, index: int) -> LayerSpec:
        """A layer of a track."""
        local = self.attention_pattern[index % len(self.attention_pattern)] == "L"
        attention = AttentionSpec(self.window, Rotary(self.rope_theta)) if local else AttentionSpec(rotary=None)
        if not self._is_mixture(index):
            return LayerSpec(attention, FeedForwardSpec(self.intermediate_size))
        experts, active = self.num_experts, self.num_experts_per_tok
        return LayerSpec(
            attention,
            FeedForwardSpec(
                self.moe_intermediate_size,
                num_experts=experts,
                num_experts_per_tok=active,
                router=RouterSpec(softcap=self.router_softcap),
            ),
        )

    def _is_mixture(self, index: int) -> bool:
        """Whether a layer of a track has experts: the last of every ``experts_every``."""
        return bool(self.experts_every) and index % self.experts_every == self.experts_every - 1

    def collectives(self) -> CollectivesPerPass:
        """How often processes wait for each other in a pass."""
        layers = self.num_hidden_layers
        return CollectivesPerPass(layers // self.block_depth, 2 * layers)

    @property
    def num_parameters(self) -> int:
        """Number of parameters; the embedding, which is also the output matrix, counts once."""
        return self._parameters(self.num_experts)

    @property
    def num_active_parameters(self) -> int:
        """Parameters that a token meets."""
        return self._parameters(self.num_experts_per_tok)

    def _parameters(self, experts: int) -> int:
        d, heads = self.hidden_size, self.num_attention_heads + self.num_key_value_heads
        mixtures = sum(map(self._is_mixture, range(self.num_hidden_layers)))
        attention = 2 * d * heads * self.head_dim + 2 * d + (2 * self.head_dim if self.qk_norm else 0)
        mixture = d * self.num_experts + experts * 3 * d * self.moe_intermediate_size
        dense = 3 * d * self.intermediate_size
        track = self.num_hidden_layers * attention + mixtures * mixture + (self.num_hidden_layers - mixtures) * dense
        return self.num_tracks * track + self.vocab_size * d + d


class CollectivesPerPass(NamedTuple):
    """Sums over all processes in a pass: of parallel tracks, and of tensor parallelism with as many layers.

    A collective of parallel tracks moves the states of a track; one of tensor parallelism, in a model with as many
    parameters, states that are wider by the root of the number of tracks.
    """

    parallel_tracks: int
    tensor_parallel: int
