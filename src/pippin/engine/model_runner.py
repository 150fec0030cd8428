"""The interface of a runner, which computes a pass over a batch of sequences, and its input.

Notable here:
- a runner owns the memory of the cache (blocks of 16 tokens) but does not track requests; the scheduler records which
  sequence holds which block
- states of recurrent layers are not in the pool: they are part of each sequence's input
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from jaxtyping import Float, UInt8
from torch import Tensor

from pippin.nn.lora import Adapter

BLOCK_SIZE = 16
"""Tokens of one block of the cache."""

KVCacheDtype = Literal["float32", "bfloat16", "int8"]
"""Precision of keys and values in the cache; int8 has a scale for each token and head."""

KVCacheDtypeChoice = Literal["auto", "float32", "bfloat16", "int8"]
"""A precision, or "auto" for the one that suits the model."""


@dataclass
class ModelInput:
    """The part of one sequence that a pass computes.

    Args:
        token_ids: new tokens, at least one.
        num_computed_tokens: tokens of the sequence that are in the cache; the position of the first new one.
        block_table: its blocks, in order, for ``num_computed_tokens + len(token_ids)`` tokens at least. The keys and
            values of the new tokens are written there.
        outputs: indices of the ``token_ids`` whose logits are returned, ascending; may be empty.
        adapter: the LoRA adapter to compute it with; None for the base model.
        depth: stop after so many layers (early exit through final norm and head); None for all.
        residual: (len(token_ids), hidden_size): with ``depth``, filled with the output of the last computed layer;
            without, the input of layer ``resume``, where an earlier pass stopped.
        resume: the first layer to compute; 0 to begin with the embeddings.
        states: states of the recurrent layers, by layer, after the ``num_computed_tokens`` tokens: empty at the
            beginning. A pass replaces the tensors and changes none in place, so a copy of the mapping is a copy of the
            states.
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

    def close(self) -> None:
        """Free the pool."""
