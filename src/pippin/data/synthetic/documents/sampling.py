"""Sampling of synthetic documents with known facts.

Notable here:
- a document is written piece by piece, so the place of each fact is counted, never searched
- the same arguments give the same document; kinds, languages and layouts are independent of each other
- about a quarter of the facts are absent: their value is None and the text says nothing about them
"""

from __future__ import annotations

from random import Random
from typing import Any, Final

from pippin.core.errors import InvalidArgument
from pippin.data.synthetic.documents import kind_files
from pippin.data.synthetic.documents.blocks import other_line
from pippin.data.synthetic.documents.contents import Contents, Leaf, Piece, normalized
from pippin.data.synthetic.documents.kind_files import FieldForm
from pippin.data.synthetic.documents.layout_writers import LAYOUTS, stated
from pippin.data.synthetic.documents.noise import noisy
from pippin.data.synthetic.documents.schema import Document, Fact, FieldSpec

KINDS: Final[tuple[str, ...]] = kind_files.kinds()
LANGUAGES: Final[tuple[str, ...]] = kind_files.LANGUAGES
SHORTEST = 40


def layouts(kind: str) -> tuple[str, ...]:
    """Names of the layouts of a kind.

    Raises:
        InvalidArgument: an unknown kind.
    """
    return _kind(kind).layouts


def fields(kind: str) -> tuple[FieldSpec, ...]:
    """Everything a user could ask of documents of a kind.

    Raises:
        InvalidArgument: an unknown kind.
    """
    return _kind(kind).specs


def _kind(name: str) -> kind_files.KindForm:
    if name not in KINDS:
        raise InvalidArgument(f"kind={name!r} is none of {', '.join(KINDS)}")
    return kind_files.load(name)


def sample(kind: str, *, language: str, layout: str | None = None, seed: int | Random, noise: float = 0.0) -> Document:
    """A random document.

    Args:
        kind: one of `KINDS`.
        language: one of `LANGUAGES`.
        layout: one of `layouts(kind)`; a random one if not given.
        seed: of everything random, or a generator, which is advanced.
        noise: rate of errors in the text outside facts, from 0 (none) to 1 (about every third word).

    Raises:
        InvalidArgument: an unknown kind, language or layout, or a rate out of range.
    """
    form = _kind(kind)
    if language not in LANGUAGES:
        raise InvalidArgument(f"language={language!r} is none of {', '.join(LANGUAGES)}")
    if layout is not None and layout not in form.layouts:
        raise InvalidArgument(f"layout={layout!r} of {kind} is none of {', '.join(form.layouts)}")
    if not 0 <= noise <= 1:
        raise InvalidArgument(f"noise={noise} is not between 0 and 1")
    rng = seed if isinstance(seed, Random) else Random(f"{kind} {language} {layout} {seed}")
    name = layout or rng.choice(form.layouts)
    contents = Contents(form, language, rng)
    pieces = _completed(LAYOUTS[name](contents), contents)
    if noise:
        pieces = noisy(pieces, noise, rng)
    text = _finish(pieces)
    facts = {each.name: _fact(each, contents) for each in form.fields}
    return Document(text, kind, language, name, form.specs, facts)


def _completed(pieces: list[Piece], contents: Contents) -> list[Piece]:
    """The pieces with lines that state nothing asked until the text is long enough."""
    done = stated(pieces)
    missing = [path for path, leaf in contents.leaves.items() if id(leaf) not in done]
    missing += [
        name for name, rows in contents.lists.items() for row in rows for leaf in row.values() if id(leaf) not in done
    ]
    assert not missing, f"{contents.kind.name}: {missing} are not written"
    count = len("".join(each.text for each in pieces).split())
    while count < SHORTEST:
        line = other_line(contents)
        pieces.append(Piece(("" if pieces[-1].text.endswith("\n") else "\n") + line + "\n"))
        count += len(line.split())
    return pieces


def _finish(pieces: list[Piece]) -> str:
    """The text; every leaf gets its fact, at the first place that states it."""
    position = 0
    for piece in pieces:
        leaf, end = piece.leaf, position + len(piece.text)
        if leaf is not None and leaf.fact is None:
            leaf.fact = Fact(piece.text, position, end, normalized(leaf, piece.text))
        position = end
    return "".join(each.text for each in pieces).rstrip()


def _fact(form: FieldForm, contents: Contents) -> Any:
    if form.kind == "list":
        rows = contents.lists.get(form.name)
        if rows is None:
            return None
        if [each.name for each in form.fields] == [""]:
            return [row[""].fact for row in rows]
        return [{each.name: row[each.name].fact if each.name in row else None for each in form.fields} for row in rows]
    if form.kind == "record":
        found = {each.name: _leaf_fact(contents.leaves.get(f"{form.name}.{each.name}")) for each in form.fields}
        return found if any(each is not None for each in found.values()) else None
    return _leaf_fact(contents.leaves.get(form.name))


def _leaf_fact(leaf: Leaf | None) -> Fact | None:
    return leaf.fact if leaf else None
