"""The cache of one sequence within the budget of a policy: which tokens each head still has, and where they lie.

Notable here:
- all blocks that it will ever need are taken at once, so it never grows, and a long prompt never has more than its
  budget and one block of tokens in memory: it is computed piece by piece, and pruned behind each piece
- the blocks are divided among heads anew at each eviction; between two of them the tables do not change
- where it does not run, it is bytes outside the pool
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from threading import Lock

import torch
from jaxtyping import UInt8
from torch import Tensor

from pippin.core.errors import InvalidArgument, NotEnoughMemory, UnsupportedModel
from pippin.engine.cache.prefix_tree import CacheKey
from pippin.engine.head_tables import HeadTables
from pippin.engine.kv_eviction.policy import ALWAYS, CachePolicy, HeadView
from pippin.engine.model_runner import BLOCK_SIZE, Capture, Runner
from pippin.language.decoder_config import DecoderConfig
from pippin.language.language_model import LanguageModel
from pippin.nn.attention_capture import AttentionCapture


class _Head:
    """One head: the positions of its tokens, the attention that they received, and its head-blocks."""

    def __init__(self) -> None:
        self.positions, self.received = torch.empty(0, dtype=torch.int64), torch.empty(0)
        self.blocks: list[int] = []

    def __len__(self) -> int:
        return len(self.positions)


class BoundedCache:
    """The cache of one sequence.

    Args:
        policy: what stays.
        config: of the decoder, whose heads can lie apart (`pippin.engine.head_tables.heads_alike`).
        runner: has the pool.

    Attributes:
        token_ids: tokens of the sequence that were computed.
        key: whose they are, of which adapter and weights; None before the first request.
        in_use: whether a request holds it.
        blocks: its blocks of the pool; none where it does not run.
    """

    def __init__(self, policy: CachePolicy, config: DecoderConfig, runner: Runner) -> None:
        self.policy, self.layers, self._runner = policy, config.cached_layers, runner
        self._shape = (len(self.layers), config.num_key_value_heads)
        self.blocks: Sequence[int] = ()
        self.in_use, self._lock = False, Lock()
        self.clear()

    def clear(self) -> None:
        """Forget all tokens; it keeps its blocks."""
        layers, heads = self._shape
        self._heads = [[_Head() for _ in range(heads)] for _ in range(layers)]
        self._free = list(range(self.num_blocks * self._runner.heads_in_block))[::-1]
        self._data: UInt8[Tensor, "blocks bytes"] | None = None
        self._tables: HeadTables | None = None
        self.token_ids: list[int] = []
        self.key: CacheKey | None = None
        self._room = self.policy.budget + self.policy.block_size
        self._divide()

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence that were computed, also those that were given up."""
        return len(self.token_ids)

    @cached_property
    def num_blocks(self) -> int:
        """Blocks of the pool that it needs, whatever stays: the last block of each head may be partly full."""
        return -(-(self.policy.budget + self.policy.block_size) // BLOCK_SIZE) + 1

    @property
    def lengths(self) -> list[list[int]]:
        """Tokens that each head has, by layer."""
        return [[len(head) for head in layer] for layer in self._heads]

    def belongs_to(self, runner: Runner) -> bool:
        """Whether its blocks are those of a runner."""
        return self._runner is runner

    def begin(self, prompt: Sequence[int], key: CacheKey) -> None:
        """Begin a request: forget all tokens if its prompt does not go on from them, or others computed them.

        Args:
            prompt: token ids.
            key: whose prompt it is, with which adapter and weights.

        Raises:
            InvalidArgument: another request has not ended yet.
        """
        with self._lock:
            if self.in_use:
                raise InvalidArgument("another request holds this cache; wait for its end, or take another cache")
            self.in_use = True
        if self.key != key or len(prompt) <= self.num_tokens or list(prompt[: self.num_tokens]) != self.token_ids:
            self.clear()
        self.key = key

    def end(self) -> None:
        """End the request."""
        self.in_use = False

    def positions(self, layer: int, head: int) -> Tensor:
        """Positions of the tokens that a head still has; ``layer`` counts those with keys of their own."""
        return self._heads[layer][head].positions

    def attach(self, blocks: Sequence[int]) -> None:
        """Take blocks of a pool, to which what it holds is written.

        Raises:
            InvalidArgument: another number of blocks than `num_blocks`.
        """
        if len(blocks) != self.num_blocks:
            raise InvalidArgument(f"the cache needs {self.num_blocks} blocks, got {len(blocks)}")
        self.blocks, self._tables = blocks, None
        if self._data is not None:
            self._runner.write(blocks, self._data)
            self._data = None

    def detach(self) -> Sequence[int]:
        """Copy what it holds out of the pool; the blocks, which are no longer its own."""
        blocks, self.blocks = self.blocks, ()
        self._data = self._runner.read(blocks)
        return blocks

    def chunk(self, tokens: int) -> int:
        """How many of the next tokens one pass may compute."""
        watched = self.policy.observed_tokens
        return min(tokens, self._room if self._room <= watched else self._room - watched)

    def capture(self) -> Capture | None:
        """What the next pass has to observe."""
        if self._room > self.policy.observed_tokens:
            return None
        return Capture(attention=AttentionCapture("sum"))

    def tables(self) -> HeadTables:
        """Where its heads lie in the pool."""
        if self._tables is None:
            longest = max(len(head.blocks) for layer in self._heads for head in layer)
            tables = torch.full((*self._shape, longest), -1, dtype=torch.int32)
            for index, layer in enumerate(self._heads):
                for number, head in enumerate(layer):
                    tables[index, number, : len(head.blocks)] = torch.tensor(self._in_pool(head.blocks))
            lost = self.num_tokens - torch.tensor(self.lengths, dtype=torch.int32)
            self._tables = HeadTables(tables, lost)
        return self._tables

    def advance(self, token_ids: Sequence[int], capture: Capture | None) -> None:
        """Note that some tokens more were computed; behind a block, what is worth least is given up.

        Args:
            token_ids: as many as `chunk` allowed, or fewer.
            capture: what the pass observed, as `capture` asked for it.
        """
        tokens = len(token_ids)
        new = torch.arange(self.num_tokens, self.num_tokens + tokens)
        for index, layer in enumerate(self._heads):
            for number, head in enumerate(layer):
                head.positions = torch.cat([head.positions, new])
                head.received = torch.cat([head.received, torch.zeros(tokens)])
                if capture is not None and capture.attention is not None:
                    head.received += capture.attention.received[self.layers[index]][number][: len(head)]
        self.token_ids += token_ids
        self._room -= tokens
        if not self._room:
            self._evict()

    def _evict(self) -> None:
        """Give up what is worth least, and divide the blocks anew."""
        for layer in self._heads:
            for head, kept in zip(layer, self.policy.keep([self._view(head) for head in layer]), strict=True):
                if len(kept) < len(head):
                    ids = self._in_pool(head.blocks)
                    self._runner.write_head(ids, self._runner.read_head(ids, len(head)).at(kept))
                    head.positions, head.received = head.positions[kept], head.received[kept]
                if self.policy.observed_tokens != ALWAYS:
                    head.received = torch.zeros(len(head))
        self._room = self.policy.block_size
        self._divide()

    def _view(self, head: _Head) -> HeadView:
        def read() -> tuple[Tensor, Tensor]:
            return self._runner.read_head(self._in_pool(head.blocks), len(head)).dense()

        return HeadView(head.positions, head.received, read)

    def _in_pool(self, own: Sequence[int]) -> list[int]:
        """Head-blocks of the pool for those that are counted within its own blocks."""
        heads = self._runner.heads_in_block
        return [self.blocks[each // heads] * heads + each % heads for each in own]

    def _divide(self) -> None:
        """Give each head the head-blocks for what it has and for the tokens up to the next eviction."""
        heads = [head for layer in self._heads for head in layer]
        needed = [-(-(len(head) + self._room) // BLOCK_SIZE) for head in heads]
        for head, count in zip(heads, needed, strict=True):
            self._free += head.blocks[count:]
            del head.blocks[count:]
        for head, count in zip(heads, needed, strict=True):
            while len(head.blocks) < count:
                head.blocks.append(self._free.pop())
        self._tables = None


def make_bounded(policy: CachePolicy, model: LanguageModel, runner: Runner) -> BoundedCache:
    """A cache in the pool of a runner; see `pippin.engine.engine.Engine.bounded_cache`.

    Args:
        policy: what stays.
        model: what the runner computes.
        runner: has the pool.

    Raises:
        UnsupportedModel: layers of this model have sliding windows, states, or heads of several sizes.
        NotEnoughMemory: the pool has less room than the budget.
    """
    layout = model.cache_layout
    if not runner.heads_in_block or layout.recurrent_layers or layout.original_max_position_embeddings:
        raise UnsupportedModel(
            f"{model.name} has sliding windows, states, heads of several sizes or positions that depend on the length; "
            "a bounded cache is for models whose layers all see the whole text"
        )
    made = BoundedCache(policy, model.config, runner)
    if made.num_blocks > runner.blocks:
        raise NotEnoughMemory(
            f"a budget of {policy.budget:,} tokens and a block of {policy.block_size:,} need {made.num_blocks:,} cache "
            f"blocks of {BLOCK_SIZE} tokens, the engine has {runner.blocks:,}; take a smaller budget"
        )
    return made
