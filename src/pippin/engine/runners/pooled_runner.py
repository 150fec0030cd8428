"""What runners in torch share: the pool of blocks, whose contents they copy, read and write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar, runtime_checkable

from jaxtyping import UInt8
from torch import Tensor

from pippin.core.errors import InvalidArgument
from pippin.engine.head_tables import HeadTokens


@runtime_checkable
class BlockStore(Protocol):
    """The contents of all blocks."""

    def copy(self, source: int, target: int) -> None:
        """Copy one block over another."""

    def dump(self, blocks: Sequence[int]) -> UInt8[Tensor, "blocks bytes"]:
        """The contents of blocks, as bytes on the CPU."""

    def restore(self, blocks: Sequence[int], data: UInt8[Tensor, "blocks bytes"]) -> None:
        """Fill blocks with data that `dump` returned."""


Store = TypeVar("Store", bound=BlockStore)


class PooledRunner(Generic[Store]):
    """A runner with a store of blocks.

    Attributes:
        blocks: blocks in the pool; 0 once it is closed.
        block_bytes: memory of one block.
        heads_in_block: see `pippin.engine.model_runner.Runner`; here no heads lie apart.
    """

    blocks: int
    block_bytes: int
    heads_in_block: int = 0
    _store: Store | None

    def copy(self, source: int, target: int) -> None:
        """Copy one block over another.

        Raises:
            InvalidArgument: there is no such block.
        """
        self._pool([source, target]).copy(source, target)

    def read(self, blocks: Sequence[int]) -> UInt8[Tensor, "blocks bytes"]:
        """The contents of blocks, as bytes on the CPU.

        Raises:
            InvalidArgument: there is no such block.
        """
        return self._pool(blocks).dump(blocks)

    def write(self, blocks: Sequence[int], data: UInt8[Tensor, "blocks bytes"]) -> None:
        """Fill blocks with data that `read` returned.

        Raises:
            InvalidArgument: there is no such block, or the data is of another size.
        """
        if data.shape != (len(blocks), self.block_bytes):
            raise InvalidArgument(
                f"{len(blocks)} blocks of {self.block_bytes} bytes cannot hold data of shape {tuple(data.shape)}"
            )
        self._pool(blocks).restore(blocks, data)

    def give_back(self, blocks: Sequence[int]) -> None:
        """Nothing: what a block holds lies in many places."""

    def read_head(self, head_blocks: Sequence[int], tokens: int) -> HeadTokens:
        """See `pippin.engine.model_runner.Runner`.

        Raises:
            InvalidArgument: heads cannot lie apart.
        """
        raise InvalidArgument("the heads of this model cannot lie apart in the cache")

    def write_head(self, head_blocks: Sequence[int], data: HeadTokens) -> None:
        """See `pippin.engine.model_runner.Runner`.

        Raises:
            InvalidArgument: heads cannot lie apart.
        """
        raise InvalidArgument("the heads of this model cannot lie apart in the cache")

    def close(self) -> None:
        """Free the pool; the runner has no blocks from then on."""
        self._store, self.blocks = None, 0

    def _pool(self, blocks: Sequence[int]) -> Store:
        """The pool, after a check of block numbers."""
        if self._store is None:
            raise InvalidArgument("the runner is closed")
        if blocks and not (min(blocks) >= 0 and max(blocks) < self.blocks):
            raise InvalidArgument(f"the pool has blocks 0 to {self.blocks - 1}, not {min(blocks)} to {max(blocks)}")
        return self._store
