"""Prefix caching: a radix tree over token ids, each node of which is a row of blocks of the cache.

Notable here:
- a node is 16 tokens and a block for each group of layers: the path from the root gives the tokens that its keys and
  values were computed for
- full nodes are shared by all sequences with the same prefix; of a node in which two sequences diverge, or which is
  not full, the common part is copied, so that no token is computed twice
- each `CacheKey` has a separate tree: whatever changes a block's keys and values, beside its tokens, is part of the key
- unused blocks are evicted, the least recently used first, leaves before their parents
- a group with a sliding window needs the blocks of its window only: older ones go one by one, and a prefix is found
  where those of its window are there
- a recurrent layer has a state in place of blocks: a prefix is found where a snapshot of all states was stored
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from pippin.engine.cache.block_pool import BlockPool
from pippin.engine.decoding.token_ids import common_prefix
from pippin.engine.model_runner import BLOCK_SIZE, GIVEN_BACK
from pippin.nn.lora import Adapter

Row = tuple[int, ...]
"""The blocks of 16 tokens, one for each group of layers; `GIVEN_BACK` where there is none."""


class CacheKey(NamedTuple):
    """What the keys and values of a sequence depend on beside its tokens, and who may reuse them."""

    owner: str
    """Owner of the request; nobody else reuses its blocks."""
    adapter: Adapter | None
    """The adapter that it is computed with; None for the base model."""
    weights_version: int = 0
    """Grows with every change of the weights: blocks of older weights are never reused."""
    variant: str = ""
    """Digest of what else changes the computation: steering, masks of experts; empty for nothing."""


# a weak reference, so that the tree does not keep an unloaded adapter in memory
_WeakKey = tuple[str, "weakref.ref[Adapter] | None", int, str]


class PrefixNode:
    """One row of blocks of the tree: 16 tokens, or fewer at the end of a sequence. A root has no blocks."""

    __slots__ = ("blocks", "children", "key", "parent", "states", "tails", "tokens")

    def __init__(self, key: _WeakKey, parent: PrefixNode | None, tokens: tuple[int, ...], blocks: Row) -> None:
        self.key, self.parent, self.tokens, self.blocks = key, parent, tokens, list(blocks)
        self.children: dict[tuple[int, ...], PrefixNode] = {}
        self.tails: dict[tuple[int, ...], PrefixNode] = {}
        self.states: Mapping[int, Tensor] | None = None

    @property
    def whole(self) -> bool:
        """Whether it has the block of every group."""
        return GIVEN_BACK not in self.blocks


class PrefixMatch(NamedTuple):
    """The cached prefix of a prompt."""

    node: PrefixNode
    """The last full node, or the root."""
    rows: list[Row]
    """The blocks of the full nodes."""
    partial_row: Row
    """Blocks that begin with the next tokens of the prompt; meaningless if ``num_partial_tokens`` is 0."""
    num_partial_tokens: int
    """How many of their tokens agree with the prompt."""


class CachedSequence(NamedTuple):
    """A cached prompt: the path of the tree from a root to a leaf."""

    key: CacheKey
    """What it was computed with."""
    token_keys: Sequence[int]
    """The keys of its tokens."""
    rows: Sequence[Row]
    """Its blocks in each group of layers."""
    states: Mapping[int, Mapping[int, Tensor]] = {}
    """By row: the states of recurrent layers after its tokens, where a snapshot of them is stored."""


class PrefixTree:
    """The blocks of earlier prompts and answers. Used by one thread.

    Args:
        pool: counts the references to the blocks.
        windows: the sliding window of each group of layers; None for one that sees all.
        max_snapshots: snapshots of recurrent states that are stored, the least recently used replaced first; 0 for a
            model without such states. With it, prefixes end at snapshots.
    """

    def __init__(self, pool: BlockPool, windows: Sequence[int | None] = (None,), max_snapshots: int = 0) -> None:
        self._pool, self._windows, self._max_snapshots = pool, tuple(windows), max_snapshots
        self._roots: dict[_WeakKey, PrefixNode] = {}
        self._nodes: dict[int, PrefixNode] = {}
        self._snapshots: OrderedDict[PrefixNode, None] = OrderedDict()

    def __len__(self) -> int:
        """Number of blocks in the tree."""
        return len(self._nodes)

    @property
    def num_snapshots(self) -> int:
        """Number of snapshots of recurrent states."""
        return len(self._snapshots)

    def root(self, key: CacheKey) -> PrefixNode:
        """The root of one key; do not store it, since an empty root is replaced."""
        weak = (key.owner, None if key.adapter is None else weakref.ref(key.adapter), key.weights_version, key.variant)
        return self._roots.get(weak) or PrefixNode(weak, None, (), ())

    def match(self, key: CacheKey, token_ids: Sequence[int], limit: int) -> PrefixMatch:
        """The longest cached prefix of ``token_ids[:limit]``; no references are added."""
        node, path = self.root(key), list[PrefixNode]()
        while (len(path) + 1) * BLOCK_SIZE <= limit:
            child = (path[-1] if path else node).children.get(
                tuple(token_ids[len(path) * BLOCK_SIZE : (len(path) + 1) * BLOCK_SIZE])
            )
            if child is None:
                break
            path.append(child)
        depth = next((depth for depth in range(len(path), 0, -1) if self._is_usable(path, depth)), 0)
        node = path[depth - 1] if depth else node
        starts = [self._first_row(window, depth * BLOCK_SIZE) for window in self._windows]
        rows = [
            tuple(
                block if index >= start else GIVEN_BACK for block, start in zip(path[index].blocks, starts, strict=True)
            )
            for index in range(depth)
        ]
        if self._max_snapshots:
            if depth:
                self._snapshots.move_to_end(node)
            return PrefixMatch(node, rows, (), 0)
        return PrefixMatch(node, rows, *self._partial(node, token_ids, depth * BLOCK_SIZE, limit))

    def _is_usable(self, path: Sequence[PrefixNode], depth: int) -> bool:
        """Whether a sequence can continue after the first ``depth`` nodes of a path."""
        if self._max_snapshots and path[depth - 1].states is None:
            return False
        return all(
            path[index].blocks[group] != GIVEN_BACK
            for group, window in enumerate(self._windows)
            if window is not None
            for index in range(self._first_row(window, depth * BLOCK_SIZE), depth)
        )

    @staticmethod
    def _first_row(window: int | None, tokens: int) -> int:
        """The first row that a token after ``tokens`` others sees."""
        return 0 if window is None else max(0, tokens - window + 1) // BLOCK_SIZE

    def _partial(self, node: PrefixNode, token_ids: Sequence[int], at: int, limit: int) -> tuple[Row, int]:
        """The node after ``node`` that has most of the next tokens in common, and how many."""
        rest = tuple(token_ids[at : min(at + BLOCK_SIZE, limit)])
        best: Row = ()
        tokens = 0
        if rest:
            for branch in (node.children, node.tails):
                for spelled, child in branch.items():
                    if spelled[0] == rest[0] and child.whole and (common := common_prefix(spelled, rest)) > tokens:
                        best, tokens = tuple(child.blocks), common
        return best, tokens

    def find_child(self, node: PrefixNode, tokens: tuple[int, ...]) -> PrefixNode | None:
        """The full node after ``node`` with these tokens, if there is one that a sequence can continue after."""
        child = node.children.get(tokens)
        if child is None or not child.whole or (self._max_snapshots and child.states is None):
            return None
        return child

    def add(self, parent: PrefixNode, tokens: tuple[int, ...], row: Row) -> PrefixNode:
        """Add blocks after another node, of 16 tokens or, at the end of a sequence, fewer.

        If the tree has an equal node already, that one is returned, with the blocks that it did not have, and the
        caller should use its blocks instead. Partial nodes that the new one extends are removed.
        """
        full = len(tokens) == BLOCK_SIZE
        there = (parent.children if full else parent.tails).get(tokens)
        if there is not None:
            for group, block in enumerate(row):
                if there.blocks[group] == GIVEN_BACK != block:
                    there.blocks[group] = block
                    self._own(there, block)
            return there
        if not full and any(spelled[: len(tokens)] == tokens for spelled in (*parent.children, *parent.tails)):
            return parent  # a longer one covers it
        for spelled in [spelled for spelled in parent.tails if tokens[: len(spelled)] == spelled]:
            self._remove(parent.tails[spelled])
        node = PrefixNode(parent.key, parent, tokens, row)
        (parent.children if full else parent.tails)[tokens] = node
        if parent.parent is None:  # it may be new, or have just lost its last child
            self._roots[parent.key] = parent
        for block in row:
            if block != GIVEN_BACK:
                self._own(node, block)
        return node

    def snapshot(self, node: PrefixNode, states: Mapping[int, Tensor]) -> None:
        """Store the recurrent states after a full node's tokens; the oldest snapshots make room for it."""
        node.states = states
        self._snapshots[node] = None
        self._snapshots.move_to_end(node)
        while len(self._snapshots) > self._max_snapshots:
            self.drop_snapshot(next(iter(self._snapshots)))

    def drop_snapshot(self, node: PrefixNode) -> None:
        """Forget the recurrent states after a node's tokens, if they are stored."""
        node.states = None
        self._snapshots.pop(node, None)

    def evict(self) -> None:
        """Evict the least recently used idle block: with its node, which is a leaf, or alone behind a window."""
        block = next(iter(self._pool.idle))
        node = self._nodes[block]
        group = node.blocks.index(block)
        if self._windows[group] is None:
            self._remove(node)
            return
        self._disown(block)
        node.blocks[group] = GIVEN_BACK
        while node.parent is not None and not (node.children or node.tails or any(b >= 0 for b in node.blocks)):
            parent = node.parent
            self._remove(node)
            node = parent

    def sequences(self) -> Iterator[CachedSequence]:
        """Each path from the root to a leaf, the least recently used first."""
        ages = {block: age for age, block in enumerate(self._pool.idle)}
        ends = {id(node): node for node in self._nodes.values() if not node.children and not node.tails}

        def age(node: PrefixNode) -> int:
            return max(ages.get(block, len(ages)) for block in node.blocks if block != GIVEN_BACK)

        for end in sorted(ends.values(), key=age):
            owner, weak, weights_version, variant = end.key
            adapter = None if weak is None else weak()
            if weak is not None and adapter is None:
                continue
            path, node = [end], end.parent
            while node is not None and node.parent is not None:
                path.append(node)
                node = node.parent
            path.reverse()
            key = CacheKey(owner, adapter, weights_version, variant)
            yield CachedSequence(
                key,
                [id for node in path for id in node.tokens],
                [tuple(node.blocks) for node in path],
                {row: node.states for row, node in enumerate(path) if node.states is not None},
            )

    def _own(self, node: PrefixNode, block: int) -> None:
        self._nodes[block] = node
        self._pool.mark_cached(block)

    def _disown(self, block: int) -> None:
        del self._nodes[block]
        self._pool.unmark_cached(block)

    def _remove(self, node: PrefixNode) -> None:
        parent = node.parent
        assert parent is not None
        assert not node.children
        assert not node.tails
        del (parent.children if len(node.tokens) == BLOCK_SIZE else parent.tails)[node.tokens]
        self.drop_snapshot(node)
        for block in node.blocks:
            if block != GIVEN_BACK:
                self._disown(block)
        if parent.parent is None and not parent.children and not parent.tails:
            del self._roots[parent.key]
