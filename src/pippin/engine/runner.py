"""What computes a pass for the scheduler: one interface, and behind it native kernels or torch.

Notable here:
- a runner owns the memory of the cache (blocks of 16 tokens) and knows nothing of requests; who holds which block, and
  what is in it, is the scheduler's matter
- states of recurrent layers are no part of the pool: they lie with the sequence, which brings them along
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from jaxtyping import Float, UInt8
from torch import Tensor

from pippin.nn.lora import Adapter

if TYPE_CHECKING:
    from pippin.engine.native_runner import NativeRunner
    from pippin.engine.torch_runner import TorchRunner
    from pippin.language.load import LanguageModel

BLOCK = 16
"""Tokens of one block of the cache."""

CacheType = Literal["float32", "bfloat16", "int8"]
"""Precision of keys and values in the cache; int8 has a scale for each token and head."""


@dataclass
class Work:
    """The share of one sequence in a pass.

    Args:
        ids: new tokens, at least one.
        held: tokens that the cache holds of this sequence, which is the position of the first new one.
        table: its blocks, in order; room for ``held + len(ids)`` tokens at least. The new tokens are written there.
        outputs: for which of ``ids`` logits are wanted (indices, ascending); may be empty.
        adapter: what to compute it with.
        depth: stop after so many layers (early exit through final norm and head); None for all.
        residual: (len(ids), width): with ``depth``, filled with what left the last layer computed; without, what
            enters layer ``resume``, where a pass that stopped there goes on.
        resume: the first layer to compute; 0 to begin with the embeddings.
        states: of the recurrent layers, by layer, after the ``held`` tokens: empty at the beginning. A pass puts others
            in their place and changes none, so a copy of the mapping is a copy of the states.
    """

    ids: Sequence[int]
    held: int
    table: Sequence[int]
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
    def cache_type(self) -> CacheType:
        """Precision of keys and values."""

    @property
    def invariant(self) -> bool:
        """Whether a token's logits are the same to the bit whatever else is in the pass, however the prompt is cut and
        whatever was cached.
        """

    def forward(self, works: Sequence[Work]) -> list[Float[Tensor, "outputs vocab"]]:
        """One pass over the new tokens of several sequences; float32 logits on the CPU, in memory of their own."""

    def copy(self, source: int, target: int) -> None:
        """Copy one block over another."""

    def read(self, blocks: Sequence[int]) -> UInt8[Tensor, "blocks bytes"]:
        """The contents of blocks, as bytes on the CPU."""

    def write(self, blocks: Sequence[int], data: UInt8[Tensor, "blocks bytes"]) -> None:
        """Fill blocks with what `read` gave."""

    def close(self) -> None:
        """Free the pool."""


def runner_class(model: LanguageModel) -> type[NativeRunner | TorchRunner]:
    """What can compute this model fastest here: native kernels where its weights are packed for them, else torch."""
    from pippin.engine.native_runner import NativeRunner

    if NativeRunner.supports(model):
        return NativeRunner
    from pippin.engine.torch_runner import TorchRunner  # and with it 60 MB of torch that nothing else needs

    return TorchRunner


def make_runner(model: LanguageModel, blocks: int, cache_type: CacheType | Literal["auto"] = "auto") -> Runner:
    """A runner with a pool of its own.

    Args:
        model: what `pippin.load` returned.
        blocks: blocks in the pool.
        cache_type: precision of keys and values; "auto" for what suits the model.

    Raises:
        InvalidArgument: fewer than one block, or an unknown precision.
        NotEnoughMemory: the device cannot hold so many blocks.
    """
    return runner_class(model)(model, blocks, cache_type)
