"""Documents that show old values beside the new ones."""

from __future__ import annotations

from random import Random

from pippin.data.synthetic.documents.blocks import (
    TABLES,
    boilerplate,
    cell,
    label,
    labeled,
    list_block,
    order,
    plain,
    table,
    title,
)
from pippin.data.synthetic.documents.contents import Contents, Piece
from pippin.data.synthetic.documents.sentences import Pieces


def superseded(contents: Contents) -> tuple[Contents, list[str]]:
    """Older values of the same fields, and the paths of those that have changed since."""
    old = Contents(contents.kind, contents.language, Random(contents.rng.getrandbits(32)))
    old.style = contents.style
    common = [path for path in old.leaves if path in contents.leaves and old.leaves[path].form.kind != "flag"]
    return old, [path for path in common if old.leaves[path].raw != contents.leaves[path].raw]


def amended(contents: Contents) -> Pieces:
    """New values beside the old ones: in columns of a table, in one line, in lines of their own, or in two blocks."""
    old, paths = superseded(contents)
    changed = [path for path in paths if contents.rng.random() < 0.7]
    write = contents.rng.choice((_columns, _one_line, _two_lines, _blocks))
    out = [*title(contents), Piece("\n\n"), *write(contents, old, changed)]
    for name in contents.lists:
        out += plain("\n") + list_block(contents, name)
    return out + plain("\n") + boilerplate(contents)


def _columns(contents: Contents, old: Contents, changed: list[str]) -> Pieces:
    new_first = contents.rng.random() < 0.5
    rows = [[plain(contents.word("value_field")), *_marks(contents)]]
    for path in order(contents):
        before = cell(old, old.leaves[path]) if path in changed else []
        rows.append([[label(contents, path)], cell(contents, contents.leaves[path]), before])
    if not new_first:
        rows = [[name, before, new] for name, new, before in rows]
    return table(rows, contents.rng.choice(TABLES), header=True)


def _one_line(contents: Contents, old: Contents, changed: list[str]) -> Pieces:
    (_, was), arrow = _marks(contents), contents.rng.choice(("", " -> ", " → ", " => "))
    out: Pieces = []
    for path in order(contents):
        if path not in changed:
            out += labeled(contents, path, ": ") + plain("\n")
            continue
        new, before = cell(contents, contents.leaves[path]), cell(old, old.leaves[path])
        out += [label(contents, path), Piece(": ")]
        out += [*before, Piece(arrow), *new] if arrow else [*new, Piece(" ("), *was, Piece(": "), *before, Piece(")")]
        out += plain("\n")
    return out


def _two_lines(contents: Contents, old: Contents, changed: list[str]) -> Pieces:
    (now, was), new_first = _marks(contents), contents.rng.random() < 0.5
    out: Pieces = []
    for path in order(contents):
        if path not in changed:
            out += labeled(contents, path, ": ") + plain("\n")
            continue
        pairs = (now, cell(contents, contents.leaves[path])), (was, cell(old, old.leaves[path]))
        for mark, value in pairs if new_first else pairs[::-1]:
            out += [label(contents, path), Piece(" ("), *mark, Piece("): "), *value, Piece("\n")]
    return out


def _blocks(contents: Contents, old: Contents, changed: list[str]) -> Pieces:
    now, was = _marks(contents)
    new = [now, *(labeled(contents, path, ": ") for path in order(contents))]
    before = [was, *(labeled(old, path, ": ") for path in changed)]
    lines = [*new, [], *before] if contents.rng.random() < 0.5 else [*before, [], *new]
    return [each for line in lines for each in (*line, Piece("\n"))]


def _marks(contents: Contents) -> tuple[Pieces, Pieces]:
    """Words for what is valid now, and for what was."""
    now, was = ([Piece(contents.word(each), None, "label")] for each in ("value_new", "value_old"))
    return now, was
