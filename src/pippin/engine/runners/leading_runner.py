"""A runner whose passes several processes compute together: the first one leads, the others follow.

Notable here:
- only rank 0 has an engine; before each call of its runner it sends the call to the others, which make it too, on their
  own part of the model and their own part of the cache (`pippin.language.parallel.divide_model`)
- what is sent is pickled, between processes that one user started; weights and caches are never sent
- followers wait without end between two requests; when the leader closes its runner, they return. Rank 0 waits for a
  follower for `TIMEOUT` only
- an error of a pass is raised in every process, after as many sums in each: a follower forgets it and waits for the
  next call, and rank 0 waits until all have. What is not everyone's (memory) ends a follower
- once a follower has ended or does not answer, every pass is an error: nothing is known of its part of the cache
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from jaxtyping import Float, UInt8
from torch import Tensor

from pippin.core.errors import GenerationError, InvalidArgument
from pippin.engine.head_tables import HeadTokens
from pippin.engine.model_runner import KVCacheDtypeChoice, ModelInput
from pippin.engine.runners.torch_runner import TorchRunner
from pippin.nn.parallel.collectives import lost_connection

if TYPE_CHECKING:
    from pippin.language.language_model import LanguageModel

_FOR_EVER: Final = timedelta(days=365)
TIMEOUT: Final = timedelta(minutes=5)
"""How long rank 0 waits for the others to take a call, which they do once they have computed the one before."""


class LeadingRunner:
    """The runner of rank 0; the others run `follow`.

    Args:
        model: a model whose decoder is a part of one.
        blocks: blocks in the pool of each process.
        kv_cache_dtype: precision of keys and values.
        groups: as for `TorchRunner`.

    Raises:
        InvalidArgument: this process is not rank 0; or as `TorchRunner`.
        NotEnoughMemory: the device cannot hold so many blocks.
    """

    invariant: Final = False
    heads_in_block: Final = 0

    def __init__(
        self,
        model: LanguageModel,
        blocks: int,
        kv_cache_dtype: KVCacheDtypeChoice = "auto",
        groups: Sequence[Sequence[int]] | None = None,
    ) -> None:
        if dist.get_rank() != 0:
            raise InvalidArgument("only rank 0 has an engine; the other processes call follow(model)")
        self._group = _group(TIMEOUT)
        self._lost: str | None = None  # what is known of a process that has ended
        self._own = TorchRunner(model, blocks, kv_cache_dtype, groups)
        self.block_bytes, self.windows = self._own.block_bytes, self._own.windows
        self.kv_cache_dtype = self._own.kv_cache_dtype
        self._send("open", blocks, self.kv_cache_dtype, groups)

    @staticmethod
    def block_bytes_of(model: LanguageModel, kv_cache_dtype: KVCacheDtypeChoice = "auto") -> int:
        """Bytes of 16 tokens in this process's layers, without a pool."""
        return TorchRunner.block_bytes_of(model, kv_cache_dtype)

    @property
    def blocks(self) -> int:
        """Blocks in the pool; 0 once it is closed."""
        return self._own.blocks

    def forward(self, inputs: Sequence[ModelInput]) -> list[Float[Tensor, "outputs vocab"]]:
        """See `Runner.forward`.

        Raises:
            InvalidArgument: as `TorchRunner.forward`.
            GenerationError: another process has ended, or does not answer.
        """
        self._own.check(inputs)  # what is refused here is not sent
        self._send("forward", list(inputs))
        try:
            with self._connected():
                return self._own.forward(inputs)
        except Exception:
            if self._lost is None:
                self._send("agree")
                with self._connected():
                    dist.barrier(group=self._group)
            raise

    def copy(self, source: int, target: int) -> None:
        """Copy one block over another."""
        self._send("copy", source, target)
        self._own.copy(source, target)

    def read(self, blocks: Sequence[int]) -> UInt8[Tensor, "blocks bytes"]:
        """See `Runner.read`.

        Raises:
            InvalidArgument: always; every process has a part of a block.
        """
        raise InvalidArgument("cached prompts of a model in several processes can be neither saved nor loaded")

    def write(self, blocks: Sequence[int], data: UInt8[Tensor, "blocks bytes"]) -> None:
        """See `Runner.write`.

        Raises:
            InvalidArgument: always; see `read`.
        """
        self.read(blocks)

    def give_back(self, blocks: Sequence[int]) -> None:
        """See `Runner.give_back`; as `TorchRunner`."""

    def read_head(self, head_blocks: Sequence[int], tokens: int) -> HeadTokens:
        """See `Runner.read_head`.

        Raises:
            InvalidArgument: always: no heads lie apart.
        """
        raise InvalidArgument("the heads of a model in several processes cannot lie apart in the cache")

    def write_head(self, head_blocks: Sequence[int], data: HeadTokens) -> None:
        """See `Runner.write_head`.

        Raises:
            InvalidArgument: always: no heads lie apart.
        """
        self.read_head(head_blocks, 0)

    def close(self) -> None:
        """Free the pools of all processes; `follow` returns."""
        if self._own.blocks:
            self._own.close()
            with suppress(GenerationError):  # then there is nobody to be told
                self._send("close")

    def _send(self, *call: Any) -> None:
        """Let the others make a call."""
        with self._connected():
            dist.broadcast_object_list([call], src=0, group=self._group)

    @contextmanager
    def _connected(self) -> Iterator[None]:
        """Raise `GenerationError` where another process does not answer, now and ever after."""
        if self._lost is not None:
            raise GenerationError(self._lost)
        try:
            yield
        except RuntimeError as error:
            if (reason := lost_connection(error)) is None:
                raise
            self._lost = (
                f"one of the {dist.get_world_size()} processes that compute this model together has ended or does not "
                f"answer ({reason}); its own message says why. Start all of them again"
            )
            raise GenerationError(self._lost) from error


def follow(model: LanguageModel) -> None:
    """Compute this process's part of every pass of the engine on rank 0, until that is closed.

    Args:
        model: the model of this process, a part of that of all.

    Raises:
        InvalidArgument: this process is rank 0, or the model is no part of one.
        GenerationError: rank 0 has ended without closing its engine.
    """
    if model.module.collectives is None:
        raise InvalidArgument(f"{model.name} is whole; divide(model, collectives) gives a process its part")
    if dist.get_rank() == 0:
        raise InvalidArgument("rank 0 leads: give its part of the model to an Engine")
    try:
        _follow(model)
    except RuntimeError as error:
        if (reason := lost_connection(error)) is None:
            raise
        raise GenerationError(
            f"process {dist.get_rank()} follows rank 0, which has ended or does not answer ({reason})"
        ) from error


def _follow(model: LanguageModel) -> None:
    group = _group(_FOR_EVER)
    runner: TorchRunner | None = None
    while True:
        sent: list[Any] = [None]
        dist.broadcast_object_list(sent, src=0, group=group)
        name, *arguments = sent[0]
        if name == "open":
            runner = TorchRunner(model, *arguments)
        elif name == "agree":
            dist.barrier(group=group)
        elif runner is not None:
            try:
                getattr(runner, name)(*arguments)
            except Exception as error:  # which rank 0 raises, too
                if lost_connection(error) or _is_of_memory(error):
                    raise
        if name == "close":
            return


def _group(timeout: timedelta) -> Any:
    """The group for calls, made by all processes once all have read their part of the model."""
    dist.barrier()
    return dist.new_group(timeout=timeout, backend="gloo")


def _is_of_memory(error: Exception) -> bool:
    """Whether an error says that this process has too little memory; others may have more."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in str(error)
