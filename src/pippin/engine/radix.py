"""What has been computed before: a radix tree over token ids, whose digits are blocks of the cache.

Notable here:
- a node is a block: its way from the root spells the tokens that its keys and values were computed for
- full blocks are shared by all who begin alike; of a block in which two texts part, or which ended half full, the
  common beginning is copied, so that not one token is computed twice
- trees are apart for each owner and adapter: nothing computed for one is found by another
- a block is given up when nobody uses it, the longest unused first, ends before beginnings
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pippin.engine.blocks import BlockPool
from pippin.engine.runner import BLOCK
from pippin.engine.writer import common_prefix
from pippin.nn.lora import Adapter

Key = tuple[str, Adapter | None]
"""Whose tokens they are, and what they were computed with."""
# An adapter that is unloaded is not kept in memory by what was computed with it.
_WeakKey = tuple[str, "weakref.ref[Adapter] | None"]


class Node:
    """One block of the tree: 16 tokens, or fewer at the end of a sequence. A root has no block."""

    __slots__ = ("block", "children", "key", "parent", "tails", "tokens")

    def __init__(self, key: _WeakKey, parent: Node | None, tokens: tuple[int, ...], block: int) -> None:
        self.key, self.parent, self.tokens, self.block = key, parent, tokens, block
        self.children: dict[tuple[int, ...], Node] = {}
        self.tails: dict[tuple[int, ...], Node] = {}


class Match(NamedTuple):
    """What the tree holds of a prompt's beginning."""

    node: Node
    """The last full block, or the root."""
    blocks: list[int]
    """The full blocks."""
    part: int
    """A block that goes on like the prompt for a while; meaningless if ``tokens`` is 0."""
    tokens: int
    """For how many tokens it does."""


class PrefixTree:
    """The prompts and answers whose blocks are still there. Used by one thread.

    Args:
        pool: counts the blocks.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._roots: dict[_WeakKey, Node] = {}
        self._nodes: dict[int, Node] = {}

    def __len__(self) -> int:
        """Blocks that the tree holds."""
        return len(self._nodes)

    def root(self, key: Key) -> Node:
        """Where the sequences of one owner and adapter begin; not to be kept: an empty one is made anew."""
        weak = (key[0], None if key[1] is None else weakref.ref(key[1]))
        return self._roots.get(weak) or Node(weak, None, (), -1)

    def match(self, key: Key, ids: Sequence[int], limit: int) -> Match:
        """The longest beginning of ``ids[:limit]`` that is held; nothing is taken hold of."""
        node, blocks, at = self.root(key), [], 0
        while at + BLOCK <= limit:
            child = node.children.get(tuple(ids[at : at + BLOCK]))
            if child is None:
                break
            node, at = child, at + BLOCK
            blocks.append(child.block)
        rest = tuple(ids[at : min(at + BLOCK, limit)])
        best, tokens = -1, 0
        if rest:
            for branch in (node.children, node.tails):
                for spelled, child in branch.items():
                    if spelled[0] == rest[0] and (common := common_prefix(spelled, rest)) > tokens:
                        best, tokens = child.block, common
        return Match(node, blocks, best, tokens)

    def follow(self, node: Node, tokens: tuple[int, ...]) -> Node | None:
        """The full block after ``node`` that holds these tokens, if there is one."""
        return node.children.get(tokens)

    def add(self, parent: Node, tokens: tuple[int, ...], block: int) -> Node:
        """Keep a block behind another, of 16 tokens or, at an end, fewer.

        If the tree holds such a block already, that one stays and is returned: the caller should use it instead. Ends
        that the new block goes on from are given up.
        """
        full = len(tokens) == BLOCK
        there = (parent.children if full else parent.tails).get(tokens)
        if there is not None:
            return there
        if not full and any(spelled[: len(tokens)] == tokens for spelled in (*parent.children, *parent.tails)):
            return parent  # a longer one says all that this one does
        for spelled in [spelled for spelled in parent.tails if tokens[: len(spelled)] == spelled]:
            self._remove(parent.tails[spelled])
        node = Node(parent.key, parent, tokens, block)
        (parent.children if full else parent.tails)[tokens] = node
        if parent.parent is None:  # it may be new, or have just lost its last end
            self._roots[parent.key] = parent
        self._nodes[block] = node
        self._pool.keep(block)
        return node

    def evict(self) -> None:
        """Give up the block that has been idle longest; there must be one. It is an end: ends go idle first."""
        self._remove(self._nodes[next(iter(self._pool.idle))])

    def sequences(self) -> Iterator[tuple[Key, list[int], list[int]]]:
        """Key, token ids and blocks of everything that is held, from the root to each end; longest unused first."""
        ages = {block: age for age, block in enumerate(self._pool.idle)}
        ends = [node for node in self._nodes.values() if not node.children and not node.tails]
        for end in sorted(ends, key=lambda node: ages.get(node.block, len(ages))):
            owner, weak = end.key
            adapter = None if weak is None else weak()
            if weak is not None and adapter is None:
                continue
            path, node = [end], end.parent
            while node is not None and node.parent is not None:
                path.append(node)
                node = node.parent
            path.reverse()
            yield (owner, adapter), [id for node in path for id in node.tokens], [node.block for node in path]

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        assert not node.children
        assert not node.tails
        del (parent.children if len(node.tokens) == BLOCK else parent.tails)[node.tokens]
        del self._nodes[node.block]
        self._pool.forget(node.block)
        if parent.parent is None and not parent.children and not parent.tails:
            self._roots.pop(parent.key, None)
