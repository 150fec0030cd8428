"""Merkle trees of append-only logs: roots, inclusion proofs and consistency proofs.

Notable here:
- the tree of RFC 6962: leaves and nodes are hashed with different prefixes, so a node can never be taken for a leaf
- an inclusion proof shows that an entry is in the log with a given root; a consistency proof, that a log only grew

Source: B. Laurie, A. Langley, E. Kasper, "Certificate Transparency", RFC 6962, section 2.1; the checks follow
RFC 9162, sections 2.1.3.2 and 2.1.4.2.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from pippin.core.errors import InvalidArgument


def leaf_hash(entry: bytes) -> bytes:
    """The hash of one entry, 32 bytes."""
    return hashlib.sha256(b"\x00" + entry).digest()


def root_hash(entries: Sequence[bytes]) -> bytes:
    """The root over all entries, 32 bytes; of an empty log the hash of nothing.

    >>> root_hash([]).hex()[:16]
    'e3b0c44298fc1c14'
    """
    return _root([leaf_hash(entry) for entry in entries])


def root_hashes(entries: Sequence[bytes]) -> list[bytes]:
    """The roots of all prefixes of a log: of no entry, of the first, of the first two, and so on.

    >>> root_hashes([b"a", b"b"]) == [root_hash([]), root_hash([b"a"]), root_hash([b"a", b"b"])]
    True
    """
    roots = [_root([])]
    subtrees: list[tuple[int, bytes]] = []  # size and root of the perfect subtrees so far, largest first
    for entry in entries:
        size, top = 1, leaf_hash(entry)
        while subtrees and subtrees[-1][0] == size:
            size, top = 2 * size, _node(subtrees.pop()[1], top)
        subtrees.append((size, top))
        root = top
        for _, left in reversed(subtrees[:-1]):
            root = _node(left, root)
        roots.append(root)
    return roots


def prove_inclusion(entries: Sequence[bytes], index: int) -> list[bytes]:
    """The sibling hashes on the path from entry ``index`` to the root, lowest first.

    Raises:
        InvalidArgument: there is no such entry.

    >>> verify_inclusion(b"b", 1, 3, prove_inclusion([b"a", b"b", b"c"], 1), root_hash([b"a", b"b", b"c"]))
    True
    """
    if not 0 <= index < len(entries):
        raise InvalidArgument(f"index must be 0 to {len(entries) - 1} in a log of {len(entries)}, got {index}")
    leaves = [leaf_hash(entry) for entry in entries]
    proof: list[bytes] = []
    while len(leaves) > 1:
        split = _split(len(leaves))
        left = index < split
        proof.append(_root(leaves[split:] if left else leaves[:split]))
        leaves, index = (leaves[:split], index) if left else (leaves[split:], index - split)
    return proof[::-1]


def verify_inclusion(entry: bytes, index: int, size: int, proof: Sequence[bytes], root: bytes) -> bool:
    """Verify that ``entry`` is at ``index`` in the log of ``size`` entries with this root."""
    if not 0 <= index < size:
        return False
    here, last, found = index, size - 1, leaf_hash(entry)
    for other in proof:
        if last == 0:
            return False
        if here % 2 or here == last:
            found = _node(other, found)
            while here % 2 == 0 and here:
                here, last = here >> 1, last >> 1
        else:
            found = _node(found, other)
        here, last = here >> 1, last >> 1
    return last == 0 and found == root


def prove_consistency(entries: Sequence[bytes], old_size: int) -> list[bytes]:
    """The hashes that prove that the log of the first ``old_size`` entries is a prefix of this one.

    Raises:
        InvalidArgument: ``old_size`` is 0 or more than the number of entries.
    """
    if not 0 < old_size <= len(entries):
        raise InvalidArgument(f"old_size must be 1 to {len(entries)}, got {old_size}")
    return _subproof([leaf_hash(entry) for entry in entries], old_size, is_old_tree=True)


def verify_consistency(old_size: int, new_size: int, old_root: bytes, new_root: bytes, proof: Sequence[bytes]) -> bool:
    """Verify that the log with ``old_root`` is a prefix of the log with ``new_root``.

    >>> log = [b"a", b"b", b"c"]
    >>> verify_consistency(2, 3, root_hash(log[:2]), root_hash(log), prove_consistency(log, 2))
    True
    """
    if not 0 < old_size <= new_size:
        return False
    if old_size == new_size:
        return not proof and old_root == new_root
    path = [old_root, *proof] if old_size & (old_size - 1) == 0 else list(proof)
    if not path:
        return False
    here, last = old_size - 1, new_size - 1
    while here % 2:
        here, last = here >> 1, last >> 1
    old = new = path[0]
    for other in path[1:]:
        if last == 0:
            return False
        if here % 2 or here == last:
            old, new = _node(other, old), _node(other, new)
            while here % 2 == 0 and here:
                here, last = here >> 1, last >> 1
        else:
            new = _node(new, other)
        here, last = here >> 1, last >> 1
    return last == 0 and old == old_root and new == new_root


def _node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\x01" + left + right).digest()


def _split(size: int) -> int:
    """The largest power of two below ``size``."""
    return 1 << ((size - 1).bit_length() - 1)


def _root(leaves: Sequence[bytes]) -> bytes:
    if not leaves:
        return hashlib.sha256(b"").digest()
    if len(leaves) == 1:
        return leaves[0]
    split = _split(len(leaves))
    return _node(_root(leaves[:split]), _root(leaves[split:]))


def _subproof(leaves: Sequence[bytes], size: int, *, is_old_tree: bool) -> list[bytes]:
    """SUBPROOF of RFC 6962; ``is_old_tree`` is its flag b: the subtree may be the complete old tree."""
    if size == len(leaves):
        return [] if is_old_tree else [_root(leaves)]
    split = _split(len(leaves))
    if size <= split:
        return [*_subproof(leaves[:split], size, is_old_tree=is_old_tree), _root(leaves[split:])]
    return [*_subproof(leaves[split:], size - split, is_old_tree=False), _root(leaves[:split])]
