"""Prefix caching: a radix tree over token ids, each node of which is a block of the cache.

Notable here:
- a node is a block: the path from the root gives the tokens that its keys and values were computed for
- full blocks are shared by all sequences with the same prefix; of a block in which two sequences diverge, or which is
  not full, the common part is copied, so that no token is computed twice
- each `CacheKey` has a separate tree: whatever changes a block's keys and values, beside its tokens, is part of the key
- unused blocks are evicted, the least recently used first, leaves before their parents
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pippin.engine.cache.block_pool import BlockPool
from pippin.engine.model_runner import BLOCK_SIZE
from pippin.engine.token_ids import common_prefix
from pippin.nn.lora import Adapter


class CacheKey(NamedTuple):
    """What the keys and values of a sequence depend on beside its tokens, and who may reuse them."""

    owner: str
    """Owner of the request; nobody else reuses its blocks."""
    adapter: Adapter | None
    """The adapter that it is computed with; None for the base model."""
    weights_version: int = 0
    """Grows with every change of the weights: blocks of older weights are never reused."""


# a weak reference, so that the tree does not keep an unloaded adapter in memory
_WeakKey = tuple[str, "weakref.ref[Adapter] | None", int]


class PrefixNode:
    """One block of the tree: 16 tokens, or fewer at the end of a sequence. A root has no block."""

    __slots__ = ("block", "children", "key", "parent", "tails", "tokens")

    def __init__(self, key: _WeakKey, parent: PrefixNode | None, tokens: tuple[int, ...], block: int) -> None:
        self.key, self.parent, self.tokens, self.block = key, parent, tokens, block
        self.children: dict[tuple[int, ...], PrefixNode] = {}
        self.tails: dict[tuple[int, ...], PrefixNode] = {}


class PrefixMatch(NamedTuple):
    """The cached prefix of a prompt."""

    node: PrefixNode
    """The last full block, or the root."""
    blocks: list[int]
    """The full blocks."""
    partial_block: int
    """A block that begins with the next tokens of the prompt; meaningless if ``num_partial_tokens`` is 0."""
    num_partial_tokens: int
    """How many of its tokens agree with the prompt."""


class PrefixTree:
    """The blocks of earlier prompts and answers. Used by one thread.

    Args:
        pool: counts the references to the blocks.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._roots: dict[_WeakKey, PrefixNode] = {}
        self._nodes: dict[int, PrefixNode] = {}

    def __len__(self) -> int:
        """Number of blocks in the tree."""
        return len(self._nodes)

    def root(self, key: CacheKey) -> PrefixNode:
        """The root of one key; do not store it, since an empty root is replaced."""
        weak = (key.owner, None if key.adapter is None else weakref.ref(key.adapter), key.weights_version)
        return self._roots.get(weak) or PrefixNode(weak, None, (), -1)

    def match(self, key: CacheKey, token_ids: Sequence[int], limit: int) -> PrefixMatch:
        """The longest cached prefix of ``token_ids[:limit]``; no references are added."""
        node, blocks, at = self.root(key), [], 0
        while at + BLOCK_SIZE <= limit:
            child = node.children.get(tuple(token_ids[at : at + BLOCK_SIZE]))
            if child is None:
                break
            node, at = child, at + BLOCK_SIZE
            blocks.append(child.block)
        rest = tuple(token_ids[at : min(at + BLOCK_SIZE, limit)])
        best, tokens = -1, 0
        if rest:
            for branch in (node.children, node.tails):
                for spelled, child in branch.items():
                    if spelled[0] == rest[0] and (common := common_prefix(spelled, rest)) > tokens:
                        best, tokens = child.block, common
        return PrefixMatch(node, blocks, best, tokens)

    def find_child(self, node: PrefixNode, tokens: tuple[int, ...]) -> PrefixNode | None:
        """The full block after ``node`` with these tokens, if there is one."""
        return node.children.get(tokens)

    def add(self, parent: PrefixNode, tokens: tuple[int, ...], block: int) -> PrefixNode:
        """Add a block after another, of 16 tokens or, at the end of a sequence, fewer.

        If the tree has an equal block already, that one is returned and the caller should use it instead. Partial
        blocks that the new one extends are removed.
        """
        full = len(tokens) == BLOCK_SIZE
        there = (parent.children if full else parent.tails).get(tokens)
        if there is not None:
            return there
        if not full and any(spelled[: len(tokens)] == tokens for spelled in (*parent.children, *parent.tails)):
            return parent  # a longer one covers it
        for spelled in [spelled for spelled in parent.tails if tokens[: len(spelled)] == spelled]:
            self._remove(parent.tails[spelled])
        node = PrefixNode(parent.key, parent, tokens, block)
        (parent.children if full else parent.tails)[tokens] = node
        if parent.parent is None:  # it may be new, or have just lost its last child
            self._roots[parent.key] = parent
        self._nodes[block] = node
        self._pool.mark_cached(block)
        return node

    def evict(self) -> None:
        """Evict the least recently used idle block, which is a leaf."""
        self._remove(self._nodes[next(iter(self._pool.idle))])

    def sequences(self) -> Iterator[tuple[CacheKey, list[int], list[int]]]:
        """Key, token ids and blocks of each path from the root to a leaf, the least recently used first."""
        ages = {block: age for age, block in enumerate(self._pool.idle)}
        ends = [node for node in self._nodes.values() if not node.children and not node.tails]
        for end in sorted(ends, key=lambda node: ages.get(node.block, len(ages))):
            owner, weak, weights_version = end.key
            adapter = None if weak is None else weak()
            if weak is not None and adapter is None:
                continue
            path, node = [end], end.parent
            while node is not None and node.parent is not None:
                path.append(node)
                node = node.parent
            path.reverse()
            key = CacheKey(owner, adapter, weights_version)
            yield key, [id for node in path for id in node.tokens], [node.block for node in path]

    def _remove(self, node: PrefixNode) -> None:
        parent = node.parent
        assert parent is not None
        assert not node.children
        assert not node.tails
        del (parent.children if len(node.tokens) == BLOCK_SIZE else parent.tails)[node.tokens]
        del self._nodes[node.block]
        self._pool.unmark_cached(node.block)
        if parent.parent is None and not parent.children and not parent.tails:
            del self._roots[parent.key]
