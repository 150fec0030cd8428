"""The interface of a runner, which computes a pass over a batch of sequences, and its input.

Notable here:
- a runner owns the memory of the cache (blocks of 16 tokens) but does not track requests; the scheduler records which
  sequence holds which block
- states of recurrent layers are not in the pool: they are part of each sequence's input
- a slot is where a token's keys and values lie, a position is what its rotation is computed from: they differ for
  images, whose positions have several axes
- layers of one group share a block table: with sliding windows, the groups that have one give blocks back
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, Protocol, runtime_checkable

from jaxtyping import Float, Int, UInt8
from torch import Tensor

from pippin.core.errors import InvalidArgument
from pippin.engine.head_tables import HeadTables, HeadTokens
from pippin.nn.attention.attention_capture import AttentionCapture
from pippin.nn.expert_mask import ExpertMask
from pippin.nn.lora import Adapter
from pippin.nn.steering import Steering

BLOCK_SIZE = 16
"""Tokens of one block of the cache."""

GIVEN_BACK = -1
"""In a block table: a block that no new token can see any more, behind a sliding window."""

KVCacheDtype = Literal["float32", "bfloat16", "int8"]
"""Precision of keys and values in the cache; int8 has a scale for each token and head."""

KVCacheDtypeChoice = Literal["auto", "float32", "bfloat16", "int8"]
"""A precision, or "auto" for the one that suits the model."""


@dataclass
class Capture:
    """What a pass returns of one sequence beside its logits.

    Args:
        hidden: whether to return the hidden states before the last norm. normalized: those after it, which the output
            matrix reads.
        attention: collects the attention that the tokens of the sequence receive; None for none.

    Attributes:
        hidden_states, normalized_states: (outputs, hidden_size), float32; filled by the pass.
    """

    hidden: bool = False
    normalized: bool = False
    attention: AttentionCapture | None = None
    hidden_states: Float[Tensor, "outputs width"] | None = None
    normalized_states: Float[Tensor, "outputs width"] | None = None


@dataclass
class ModelInput:
    """The part of one sequence that a pass computes.

    Args:
        token_ids: new tokens, at least one.
        num_computed_tokens: tokens of the sequence that are in the cache; the slot of the first new one.
        block_table: its blocks, in order, for ``num_computed_tokens + len(token_ids)`` tokens at least. The keys and
            values of the new tokens are written there. With several groups of layers, those of the first.
        outputs: indices of the ``token_ids`` whose logits are returned, ascending; may be empty.
        adapter: the LoRA adapter to compute it with; None for the base model.
        depth: stop after so many layers (early exit through final norm and head); None for all.
        residual: (len(token_ids), residual_width): with ``depth``, filled with the output of the last computed layer;
            without, the input of layer ``resume``, where an earlier pass stopped.
        resume: the first layer to compute; 0 to begin with the embeddings.
        states: states of the recurrent layers, by layer, after the ``num_computed_tokens`` tokens: empty at the
            beginning. A pass replaces the tensors and changes none in place, so a copy of the mapping is a copy of the
            states.
        other_tables: the block tables of the other groups of layers.
        positions: position of each new token, (axes, tokens); None for its slot.
        visible: the last slot that each new token sees, not decreasing and at least its own; None for its own. Tokens
            of a span that attend to each other must be computed in one pass.
        embeddings: replaces the (scaled) embeddings of new tokens: index of the first of them, and a row for each.
        experts: the experts that its tokens may be routed to; None for all.
        steering: changes of its hidden states; None for none.
        capture: what the pass returns beside logits; None for nothing.
        heads: where its keys lie if its heads have lost tokens; its block tables are then empty.
    """

    token_ids: Sequence[int]
    num_computed_tokens: int
    block_table: Sequence[int]
    outputs: Sequence[int]
    adapter: Adapter | None = None
    depth: int | None = None
    residual: Float[Tensor, "tokens width"] | None = None
    resume: int = 0
    states: dict[int, Float[Tensor, size]] = field(default_factory=dict)
    other_tables: Sequence[Sequence[int]] = ()
    positions: Int[Tensor, "axes tokens"] | None = None
    visible: Sequence[int] | None = None
    embeddings: Sequence[tuple[int, Float[Tensor, "rows width"]]] = ()
    experts: ExpertMask | None = None
    steering: Steering | None = None
    capture: Capture | None = None
    heads: HeadTables | None = None

    @property
    def tables(self) -> list[Sequence[int]]:
        """The block table of each group of layers."""
        return [self.block_table, *self.other_tables]

    def check(self, num_groups: int, hidden_size: int) -> None:
        """Check what does not depend on the runner.

        Args:
            num_groups: groups of layers with a block table each.
            hidden_size: width of the hidden states.

        Raises:
            InvalidArgument: tables for another number of groups, or positions, visible slots or embeddings that do not
                fit the tokens.
        """
        count = len(self.token_ids)
        if len(self.other_tables) != num_groups - 1:
            raise InvalidArgument(
                f"this model has {num_groups} groups of layers, the sequence {1 + len(self.other_tables)} block tables"
            )
        if self.positions is not None and (
            self.positions.ndim != 2 or self.positions.shape[1] != count or int(self.positions.min()) < 0
        ):
            shape = tuple(self.positions.shape)
            raise InvalidArgument(f"positions of {count} tokens must be (axes, {count}) and not negative, got {shape}")
        if self.visible is not None:
            last = self.num_computed_tokens + count - 1
            slots = range(self.num_computed_tokens, last + 1)
            good = len(self.visible) == count and all(
                slot <= seen <= last for slot, seen in zip(slots, self.visible, strict=True)
            )
            if not good or any(later < earlier for earlier, later in pairwise(self.visible)):
                raise InvalidArgument(
                    f"visible slots must not decrease, and lie between a token's own and the last of the pass, {last}"
                )
        for at, rows in self.embeddings:
            if at < 0 or at + len(rows) > count or rows.ndim != 2 or rows.shape[1] != hidden_size:
                raise InvalidArgument(
                    f"embeddings of shape {tuple(rows.shape)} cannot replace tokens from {at} on of {count}, in a "
                    f"model of width {hidden_size}"
                )


@runtime_checkable
class Runner(Protocol):
    """Computes passes over one model with one pool of cache blocks. Used by one thread at a time."""

    @property
    def blocks(self) -> int:
        """Blocks in the pool."""

    @property
    def block_bytes(self) -> int:
        """Memory of one block."""

    @property
    def windows(self) -> Sequence[int | None]:
        """The sliding window of each group of layers with a block table; None for one that sees all."""

    @property
    def kv_cache_dtype(self) -> KVCacheDtype:
        """Precision of keys and values."""

    @property
    def invariant(self) -> bool:
        """Whether a token's logits are bit-identical whatever the batch, the chunks of the prompt and the cache."""

    def forward(self, inputs: Sequence[ModelInput]) -> list[Float[Tensor, "outputs vocab"]]:
        """Compute one pass over the new tokens of several sequences; float32 logits on the CPU, in new memory."""

    def copy(self, source: int, target: int) -> None:
        """Copy one block over another."""

    def read(self, blocks: Sequence[int]) -> UInt8[Tensor, "blocks bytes"]:
        """The contents of blocks, as bytes on the CPU."""

    def write(self, blocks: Sequence[int], data: UInt8[Tensor, "blocks bytes"]) -> None:
        """Fill blocks with data that `read` returned."""

    def give_back(self, blocks: Sequence[int]) -> None:
        """Give the memory of blocks back to the system, where it can be; what they held is lost."""

    @property
    def heads_in_block(self) -> int:
        """Heads whose keys and values a block holds, in all layers; 0 if no sequence may have `HeadTables`."""

    def read_head(self, head_blocks: Sequence[int], tokens: int) -> HeadTokens:
        """Keys and values of the first tokens in some head-blocks."""

    def write_head(self, head_blocks: Sequence[int], data: HeadTokens) -> None:
        """Fill the beginning of some head-blocks."""

    def close(self) -> None:
        """Free the pool."""
