"""The log's tree against the reference log's published roots, and its proofs against every change of them."""

import hashlib

import pytest
from hypothesis import given, settings, strategies as st

from pippin.core.errors import InvalidArgument
from pippin.core.trust import merkle

# the entries and roots (by size) that the tests of the Certificate Transparency reference log publish
ENTRIES = [bytes.fromhex(text) for text in (
    "", "00", "10", "2021", "3031", "40414243", "5051525354555657", "606162636465666768696a6b6c6d6e6f",
)]  # fmt: skip
ROOTS = [
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
]
logs = st.lists(st.binary(max_size=6), min_size=1, max_size=40)


def test_roots_are_the_published_ones():
    assert [merkle.root_hash(ENTRIES[: n + 1]).hex() for n in range(8)] == ROOTS
    assert merkle.root_hash([]) == hashlib.sha256(b"").digest()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=4), max_size=70))
def test_roots_on_the_way_are_those_of_each_beginning(entries):
    assert merkle.root_hashes(entries) == [merkle.root_hash(entries[:size]) for size in range(len(entries) + 1)]


def test_proofs_are_the_published_ones():
    assert [part.hex() for part in merkle.prove_inclusion(ENTRIES, 5)] == [
        "bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b",
        "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0",
        "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    ]
    assert [part.hex() for part in merkle.prove_consistency(ENTRIES, 6)] == [
        "0ebc5d3437fbe2db158b9f126a1d118e308181031d0a949f8dededebc558ef6a",
        "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0",
        "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    ]


@settings(max_examples=60, deadline=None)
@given(logs, st.data())
def test_every_entry_is_proved_and_nothing_else(entries, data):
    index = data.draw(st.integers(0, len(entries) - 1))
    root, proof = merkle.root_hash(entries), merkle.prove_inclusion(entries, index)
    assert merkle.verify_inclusion(entries[index], index, len(entries), proof, root)
    assert not merkle.verify_inclusion(entries[index] + b"x", index, len(entries), proof, root)
    assert not merkle.verify_inclusion(entries[index], index, len(entries), [*proof, root], root)
    assert not merkle.verify_inclusion(entries[index], len(entries), len(entries), proof, root)
    if proof:
        assert not merkle.verify_inclusion(entries[index], index, len(entries), proof[:-1], root)
        spoilt = [bytes([proof[0][0] ^ 1]) + proof[0][1:], *proof[1:]]
        assert not merkle.verify_inclusion(entries[index], index, len(entries), spoilt, root)


@settings(max_examples=60, deadline=None)
@given(logs, st.data())
def test_a_log_that_grew_is_told_from_one_that_changed(entries, data):
    old = data.draw(st.integers(1, len(entries)))
    before, after = merkle.root_hash(entries[:old]), merkle.root_hash(entries)
    proof = merkle.prove_consistency(entries, old)
    assert merkle.verify_consistency(old, len(entries), before, after, proof)
    changed = merkle.root_hash([b"other", *entries[1:old]]) if entries[0] != b"other" else before[::-1]
    assert not merkle.verify_consistency(old, len(entries), changed, after, proof)
    assert not merkle.verify_consistency(old, len(entries), before, after, [*proof, after])


def test_a_node_does_not_pass_for_an_entry():
    left, right = (merkle.leaf_hash(entry) for entry in (b"a", b"b"))
    root = merkle.root_hash([b"a", b"b"])
    assert not merkle.verify_inclusion(left + right, 0, 1, [], root)


@pytest.mark.parametrize("index", [-1, 8])
def test_what_is_not_in_the_log_cannot_be_proved(index):
    with pytest.raises(InvalidArgument):
        merkle.prove_inclusion(ENTRIES, index)
    with pytest.raises(InvalidArgument):
        merkle.prove_consistency(ENTRIES, 0 if index < 0 else 9)
    assert not merkle.verify_consistency(0, 8, b"", bytes.fromhex(ROOTS[-1]), [])
    assert not merkle.verify_consistency(3, 8, bytes.fromhex(ROOTS[2]), bytes.fromhex(ROOTS[-1]), [])
