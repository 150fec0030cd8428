"""The cache of one sequence within the budget of a policy: which tokens each head still has, and where they lie.

Notable here:
- all blocks that it will ever need are taken at once, so it never grows, and a long prompt never has more than its
  budget and one block of tokens in memory: it is computed piece by piece, and pruned behind each piece
- the blocks are divided among heads anew at each eviction; between two of them the tables do not change
- keys keep the rotation of their positions until the trained context ends; then what is left moves up to the beginning,
  as StreamingLLM counts positions within the cache, so that a conversation may go on for ever
- layers with a sliding window keep what they can still see, whatever the policy says
- where it does not run, it is bytes outside the pool
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from threading import Event, Lock
from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor

from pippin.core.errors import CorruptedFile, InvalidArgument, NotEnoughMemory, UnsupportedModel
from pippin.engine.cache.prefix_tree import CacheKey
from pippin.engine.decoding.token_ids import common_prefix
from pippin.engine.head_tables import HeadTables
from pippin.engine.kv_eviction.policy import ALWAYS, CachePolicy, HeadView
from pippin.engine.model_runner import BLOCK_SIZE, Capture, Runner
from pippin.language.decoder_config import DecoderConfig
from pippin.language.language_model import LanguageModel
from pippin.nn.attention.attention_capture import AttentionCapture


class _Head:
    """One head: its tokens' positions in the sequence, those of their rotations, the attention that they received, and
    its head-blocks."""

    def __init__(self) -> None:
        self.positions, self.rotations = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
        self.received = torch.empty(0)
        self.blocks: list[int] = []

    def __len__(self) -> int:
        return len(self.positions)

    def append(self, position: int, rotation: int, count: int) -> None:
        """New tokens."""
        self.positions = torch.cat([self.positions, torch.arange(position, position + count)])
        self.rotations = torch.cat([self.rotations, torch.arange(rotation, rotation + count)])
        self.received = torch.cat([self.received, torch.zeros(count)])

    def select(self, kept: Tensor) -> None:
        """Keep some of the tokens, by index or mask."""
        self.positions, self.rotations, self.received = (
            self.positions[kept],
            self.rotations[kept],
            self.received[kept],
        )


class BoundedCache:
    """The cache of one sequence.

    Args:
        policy: what stays.
        config: of the decoder, whose heads can lie apart (`pippin.engine.head_tables.heads_alike`).
        runner: has the pool.

    Attributes:
        token_ids: tokens of the sequence that were computed.
        max_tokens: longest sequence; None where there is no limit, as with rotary positions.
        key: whose they are, of which adapter and weights; None before the first request.
        idle: set while no request holds it.
        blocks: its blocks of the pool; none where it does not run.
    """

    def __init__(self, policy: CachePolicy, config: DecoderConfig, runner: Runner) -> None:
        self.policy, self.layers, self._runner = policy, config.cached_layers, runner
        self._shape = (len(self.layers), config.num_key_value_heads)
        self._probe = policy.probe()
        self._rotaries = [config.layers[layer].attention.rotary for layer in self.layers]
        self._windows = [config.window_of(layer) for layer in self.layers]
        self._context_size = config.max_position_embeddings
        turned = not config.learned_positions and all(each is None or each.axes is None for each in self._rotaries)
        self.max_tokens = None if turned else self._context_size
        self.blocks: Sequence[int] = ()
        self.idle, self._lock = Event(), Lock()
        self.idle.set()
        self.clear()

    def clear(self) -> None:
        """Forget all tokens; it keeps its blocks."""
        layers, heads = self._shape
        self._heads = [[_Head() for _ in range(heads)] for _ in range(layers)]
        self._free = self._free_at_first()
        self._data: UInt8[Tensor, "blocks bytes"] | None = None
        self._tables: HeadTables | None = None
        self._probed: int | None
        self.token_ids: list[int] = []
        self.key: CacheKey | None = None
        # layers with windows give up what they cannot see any more behind every block, from the first on
        budget = 0 if any(self._windows) else self.policy.budget
        self._room, self._rotation = budget + self.policy.block_size, 0
        self._new = 0  # newest tokens that the heads have and have not noted yet
        self._settled, self._observed, self._probed = 0, False, None
        self._divide()

    def _free_at_first(self) -> list[int]:
        return list(range(self.num_blocks * self._runner.heads_in_block))[::-1]

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence that were computed, also those that were given up."""
        return len(self.token_ids)

    @cached_property
    def num_blocks(self) -> int:
        """Blocks of the pool that it needs, whatever stays: the last block of each head may be partly full."""
        policy, ahead = self.policy, self.policy.block_size + len(self._probe)
        own = policy.layer_budgets or [policy.budget] * len(self.layers)
        whole = [budget for budget, window in zip(own, self._windows, strict=True) if window is None]
        budgets = [-(-sum(whole) // len(whole))] * len(whole) if whole else []  # which layers share as they like
        most = [*budgets, *(window - 1 for window in self._windows if window is not None)]
        rows = sum(-(-(tokens + ahead) // BLOCK_SIZE) + 1 for tokens in most)
        return -(-rows * self._shape[1] // self._runner.heads_in_block)

    @property
    def lengths(self) -> list[list[int]]:
        """Tokens that each head has, by layer."""
        return [[len(head) + self._new for head in layer] for layer in self._heads]

    def belongs_to(self, runner: Runner) -> bool:
        """Whether its blocks are those of a runner."""
        return self._runner is runner

    def begin(self, prompt: Sequence[int], key: CacheKey) -> None:
        """Begin a request: forget the tokens from which its prompt does not go on, or that others computed.

        What came since the last eviction can be forgotten alone; else all are.

        Args:
            prompt: token ids.
            key: whose prompt it is, with which adapter and weights.

        Raises:
            InvalidArgument: another request has not ended yet.
        """
        with self._lock:
            if self.in_use:
                raise InvalidArgument("another request holds this cache; wait for its end, or take another cache")
            self.idle.clear()
        if self.key != key:
            self.clear()
        elif (same := min(common_prefix(prompt, self.token_ids), len(prompt) - 1)) < self.num_tokens:
            self._drop(same)
        self.key = key

    def end(self) -> None:
        """End the request."""
        self.idle.set()

    @property
    def in_use(self) -> bool:
        """Whether a request holds it."""
        return not self.idle.is_set()

    def positions(self, layer: int, head: int) -> Tensor:
        """Positions of the tokens that a head still has; ``layer`` counts those with keys of their own."""
        self._note_new()
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

    def probe(self, most: int) -> Sequence[int]:
        """The next tokens of the policy's probe, which has to be computed before other tokens; empty without one."""
        return () if self._probed is None else self._probe[self._probed : self._probed + most]

    @property
    def num_slots(self) -> int:
        """The slot of the next token, which is the position of its rotation."""
        return self._rotation + (self._probed or 0)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All that it holds, as tensors and as JSON; for `restore`. It must not be in the pool."""
        self._note_new()
        heads = [head for layer in self._heads for head in layer]
        tensors = {
            "token_ids": torch.tensor(self.token_ids, dtype=torch.int64),
            "lengths": torch.tensor([len(head) for head in heads]),
            "num_blocks": torch.tensor([len(head.blocks) for head in heads]),
            "blocks": torch.tensor([block for head in heads for block in head.blocks], dtype=torch.int64),
            "positions": torch.cat([head.positions for head in heads]),
            "rotations": torch.cat([head.rotations for head in heads]),
            "received": torch.cat([head.received for head in heads]),
        }
        if self._data is not None:
            tensors["data"] = self._data
        names = ("_room", "_rotation", "_settled", "_observed", "_probed")
        return tensors, {name.removeprefix("_"): getattr(self, name) for name in names}

    def restore(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        """Take what `state` of a cache with the same policy gave.

        Raises:
            CorruptedFile: it contradicts itself.
        """
        if not self._is_state(tensors, numbers):
            raise CorruptedFile("the cache contradicts itself, as a damaged file does; begin the conversation anew")
        heads = [head for layer in self._heads for head in layer]
        sizes, counts = tensors["lengths"].tolist(), tensors["num_blocks"].tolist()
        parts = [tensors[name].split(sizes) for name in ("positions", "rotations", "received")]
        for head, positions, rotations, received, blocks in zip(
            heads, *parts, tensors["blocks"].split(counts), strict=True
        ):
            head.positions, head.rotations, head.received, head.blocks = positions, rotations, received, blocks.tolist()
        used = set(tensors["blocks"].tolist())
        self._free = [each for each in self._free_at_first() if each not in used]
        self.token_ids, self._data, self._tables = tensors["token_ids"].tolist(), tensors.get("data"), None
        self._new = 0
        self._room, self._rotation, self._settled = (int(numbers[name]) for name in ("room", "rotation", "settled"))
        self._observed, self._probed = bool(numbers["observed"]), numbers["probed"]

    def _is_state(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> bool:
        """Whether `restore` can take it: kernels would read wherever it says."""
        names = {"token_ids", "lengths", "num_blocks", "blocks", "positions", "rotations", "received"}
        if not names <= set(tensors) or set(numbers) != {"room", "rotation", "settled", "observed", "probed"}:
            return False
        if any(tensors[name].ndim != 1 or tensors[name].is_floating_point() for name in names - {"received"}):
            return False
        tokens, blocks, probed = len(tensors["token_ids"]), tensors["blocks"], numbers["probed"]
        lengths, counts = tensors["lengths"], tensors["num_blocks"]
        numbered = [numbers[name] for name in ("room", "rotation", "settled")] + [0 if probed is None else probed]
        if not all(isinstance(each, int) and each >= 0 for each in numbered):
            return False
        heads, room, total = self._shape[0] * self._shape[1], len(self._probe), int(lengths.sum())
        ahead = numbers["room"] if probed is None else room
        data = tensors.get("data")
        return (
            len(lengths) == len(counts) == heads
            and len(blocks) == int(counts.sum()) == len(blocks.unique())
            and bool((lengths >= 0).all() and (counts * BLOCK_SIZE >= lengths + ahead).all())
            and (not len(blocks) or 0 <= int(blocks.min()) <= int(blocks.max()) < len(self._free_at_first()))
            and all(len(tensors[name]) == total for name in ("positions", "rotations", "received"))
            and int(lengths.max()) <= numbers["rotation"] <= self._context_size
            and (probed is None) == (numbers["room"] > 0)
            and (probed is None or probed < room)
            and (data is None if not tokens else _is_data(data, self.num_blocks, self._runner.block_bytes))
        )

    def chunk(self, tokens: int) -> int:
        """How many of the next tokens one pass may compute."""
        watched = self.policy.observed_tokens
        return min(tokens, self._room if self._room <= watched else self._room - watched)

    def capture(self) -> Capture | None:
        """What the next pass has to observe."""
        if self._probed is not None:
            return Capture(attention=AttentionCapture("max", before=self._rotation))
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
            self._tables = HeadTables(tables, self._rotation - torch.tensor(self.lengths, dtype=torch.int32))
        return self._tables

    def advance(self, token_ids: Sequence[int], capture: Capture | None) -> None:
        """Note that some tokens more were computed; behind a block, what is worth least is given up.

        Args:
            token_ids: as many as `chunk` allowed, or fewer.
            capture: what the pass observed, as `capture` asked for it.
        """
        tokens = len(token_ids)
        self.token_ids += token_ids
        self._rotation, self._room, self._new = self._rotation + tokens, self._room - tokens, self._new + tokens
        if capture is not None:
            self._note_new()
            for head, received in self._received(capture):
                head.received += received[: len(head)]
            self._observed = True
        if not self._room and self._probe:
            self._note_new()
            self._probed, self._observed = 0, True
            self._divide()
        elif not self._room:
            self._evict()

    def advance_probe(self, count: int, capture: Capture | None) -> None:
        """Note that some tokens of the probe were computed; behind the last one, what is worth least is given up."""
        assert self._probed is not None
        assert capture is not None
        for head, received in self._received(capture):
            torch.maximum(head.received, received[: len(head)], out=head.received)
        self._probed += count
        if self._probed == len(self._probe):
            self._evict()

    def _received(self, capture: Capture) -> Iterator[tuple[_Head, Tensor]]:
        """Each head, and the attention that its tokens received in a pass."""
        assert capture.attention is not None
        for index, layer in zip(self.layers, self._heads, strict=True):
            for number, head in enumerate(layer):
                yield head, capture.attention.received[index][number]

    def _note_new(self) -> None:
        """Note the newest tokens in each head, which has all of them."""
        if self._new:
            for layer in self._heads:
                for head in layer:
                    head.append(self.num_tokens - self._new, self._rotation - self._new, self._new)
            self._new = 0

    def _evict(self) -> None:
        """Give up what is worth least, and divide the blocks anew."""
        self._note_new()
        ahead = self.policy.block_size + len(self._probe)
        most = self._context_size - ahead
        for index, (layer, window) in enumerate(zip(self._heads, self._windows, strict=True)):
            if window is None:
                stays = self.policy.keep([self._view(head) for head in layer], index)
            else:
                stays = [torch.arange(max(0, len(head) - window + 1), len(head)) for head in layer]
            for head, kept in zip(layer, stays, strict=True):
                if len(kept) > most and self.max_tokens is None:  # more than the trained context has positions for
                    sinks = self.policy.sink_tokens
                    kept = torch.cat([kept[:sinks], kept[len(kept) - most + sinks :]])
                if len(kept) < len(head):
                    ids = self._in_pool(head.blocks)
                    self._runner.write_head(ids, self._runner.read_head(ids, len(head)).at(kept))
                    head.select(kept)
                if self.policy.observed_tokens != ALWAYS:
                    head.received = torch.zeros(len(head))
        if self._rotation > most and self.max_tokens is None:
            self._move_up()
        self._room, self._settled, self._observed, self._probed = self.policy.block_size, self.num_tokens, False, None
        self._divide()

    def _move_up(self) -> None:
        """Rotate what is left to the first positions, each head's tokens without gaps."""
        longest = max(len(head) for layer in self._heads for head in layer)
        for rotary, layer in zip(self._rotaries, self._heads, strict=True):
            for head in layer:
                new = torch.arange(longest - len(head), longest)
                if rotary is not None and len(head):
                    ids = self._in_pool(head.blocks)
                    data = self._runner.read_head(ids, len(head))
                    turned = rotary.turn(data.dense()[0], new - head.rotations)
                    self._runner.write_head(ids, data.with_keys(turned))
                head.rotations = new
        self._rotation = longest

    def _drop(self, tokens: int) -> None:
        """Forget all but the first tokens, or all where what these have received is not known any more."""
        if tokens < self._settled or (self._observed and self._probed is None) or not tokens:
            self.clear()
            return
        self._note_new()
        dropped = self.num_tokens - tokens
        for layer in self._heads:
            for head in layer:
                head.select(head.positions < tokens)
        if self._probed is not None:  # begins anew behind the block
            self._probed, self._observed = None, False
            for layer in self._heads:
                for head in layer:
                    head.received = torch.zeros(len(head))
        self._rotation, self._room = self._rotation - dropped, self._room + dropped
        del self.token_ids[tokens:]
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
        """Give each head the head-blocks for what it has and for the tokens up to the next eviction, or the probe."""
        heads = [head for layer in self._heads for head in layer]
        ahead = self._room if self._probed is None else len(self._probe)
        needed = [-(-(len(head) + ahead) // BLOCK_SIZE) for head in heads]
        for head, count in zip(heads, needed, strict=True):
            self._free += head.blocks[count:]
            del head.blocks[count:]
        for head, count in zip(heads, needed, strict=True):
            while len(head.blocks) < count:
                head.blocks.append(self._free.pop())
        self._tables = None


def _is_data(data: Tensor | None, blocks: int, block_bytes: int) -> bool:
    return data is not None and data.dtype == torch.uint8 and data.shape == (blocks, block_bytes)


def make_bounded(policy: CachePolicy, model: LanguageModel, runner: Runner) -> BoundedCache:
    """A cache in the pool of a runner; see `pippin.engine.engine.Engine.bounded_cache`.

    Args:
        policy: what stays.
        model: what the runner computes.
        runner: has the pool.

    Raises:
        UnsupportedModel: this model has states, heads of several sizes, or positions that depend on the length.
        InvalidArgument: budgets for another number of layers, or a budget and a block longer than the context.
        NotEnoughMemory: the pool has less room than the budget.
    """
    layout = model.cache_layout
    if not runner.heads_in_block or layout.recurrent_layers or layout.original_max_position_embeddings:
        raise UnsupportedModel(
            f"{model.name} has states, heads of several sizes or positions that depend on the length; bounded caches "
            "are for models of attention whose heads are alike"
        )
    layers, own = len(model.config.cached_layers), policy.layer_budgets
    if own is not None and len(own) != layers:
        raise InvalidArgument(f"layer_budgets are those of {len(own)} layers, {model.name} has {layers} with keys")
    need = policy.budget + policy.block_size + len(policy.probe())
    if need > model.context_size:
        raise InvalidArgument(
            f"a budget of {policy.budget:,} tokens and a block with its probe need {need:,} positions, the context of "
            f"{model.name} has {model.context_size:,}; take a smaller budget"
        )
    made = BoundedCache(policy, model.config, runner)
    if made.num_blocks > runner.blocks:
        raise NotEnoughMemory(
            f"a budget of {policy.budget:,} tokens and a block of {policy.block_size:,} need {made.num_blocks:,} cache "
            f"blocks of {BLOCK_SIZE} tokens, the engine has {runner.blocks:,}; take a smaller budget"
        )
    return made
