"""Blocks of a page: labels with values, tables in several manners, lists, and lines that state nothing asked."""

from __future__ import annotations

from pippin.data.synthetic.documents import names
from pippin.data.synthetic.documents.contents import Contents, Leaf, Piece
from pippin.data.synthetic.documents.grammar import draws
from pippin.data.synthetic.documents.sentences import Pieces, capitalized, item_pieces

SEPARATORS = (": ", ": ", ": ", ":\t", " - ", ":  ", " … ", " ")


def plain(text: str) -> Pieces:
    """Text of no fact."""
    return [Piece(text)] if text else []


def width(pieces: Pieces) -> int:
    """Number of characters of a line."""
    return sum(len(each.text) for each in pieces)


def order(contents: Contents) -> list[str]:
    """Paths of the present values: as the kind lists them, or shuffled."""
    paths = list(contents.leaves)
    chance = contents.rng.random()
    if chance < 0.6:
        contents.rng.shuffle(paths)
    elif chance < 0.7:
        paths.reverse()
    return paths


def label(contents: Contents, path: str, manner: str = "") -> Piece:
    """The label of a value, perhaps in capitals."""
    text = contents.label(contents.leaves[path].form)
    return Piece(text.upper() if manner == "upper" else text[:1].upper() + text[1:], None, "label")


def separator(contents: Contents) -> str:
    """What stands between labels and values in one document."""
    chosen = contents.rng.choice(SEPARATORS)
    return chosen.replace(":", " :") if contents.language == "fr" and ":" in chosen else chosen


def labeled(contents: Contents, path: str, between: str, manner: str = "") -> Pieces:
    """A label and its value; a clause of its own for a flag, now and then."""
    leaf = contents.leaves[path]
    if leaf.form.kind == "flag" and contents.rng.random() < 0.35:
        return capitalized(contents.pieces(leaf, "sentence"))
    value = contents.pieces(leaf, "label")
    if value[0].text == "\n":
        between = between.rstrip()
    return [label(contents, path, manner), Piece(between), *value]


def cell(contents: Contents, leaf: Leaf) -> Pieces:
    """A value in a table."""
    return contents.pieces(leaf, "cell")


def table(rows: list[list[Pieces]], manner: str, *, header: bool) -> Pieces:
    """Rows of cells: between bars, tabs or semicolons, in Markdown, or in aligned columns."""
    out: Pieces = []
    widths = [max(width(row[i]) for row in rows) for i in range(len(rows[0]))]
    for number, row in enumerate(rows):
        if manner in ("bars", "markdown"):
            out += plain("| ")
        for i, pieces in enumerate(row):
            out += pieces
            last = i == len(row) - 1
            if manner == "aligned" and not last:
                out += plain(" " * (widths[i] - width(pieces) + 2))
            elif manner == "bars" and last:
                out += plain(" |")
            elif manner == "markdown":
                out += plain(" |" if last else " | ")
            elif not last:
                out += plain({"tabs": "\t", "semicolons": ";", "bars": " | ", "loose": " | "}.get(manner, "  "))
        out += plain("\n")
        if number == 0 and header and manner == "markdown":
            out += plain("|" + "|".join("---" for _ in row) + "|\n")
        elif number == 0 and header and manner == "aligned":
            out += plain("-" * (sum(widths) + 2 * len(widths) - 2) + "\n")
    return out


TABLES = ("bars", "tabs", "semicolons", "aligned", "aligned", "loose", "markdown")


def list_block(contents: Contents, name: str, manner: str = "") -> Pieces:
    """A list with its heading: as a table, with bullets or numbers, or as blocks of labels and values."""
    rng = contents.rng
    form = next(each for each in contents.kind.fields if each.name == name)
    rows = contents.lists[name]
    heading = contents.label(form)
    heading = heading[:1].upper() + heading[1:]
    colon = " :" if contents.language == "fr" else ":"
    if not rows:
        return [Piece(f"{heading}{colon} ", None, "label"), Piece(contents.word("none")), Piece("\n")]
    manner = manner or rng.choice(("table", "table", "bullets", "numbers", "blocks"))
    mark = "## " if manner == "markdown" else ""
    out = [Piece(mark), Piece(heading + ("" if mark else rng.choice((colon, "", colon))), None, "label"), Piece("\n")]
    if manner in ("table", "markdown") and len(rows[0]) > 1:
        head: list[Pieces] = [[Piece(contents.label(leaf.form), None, "label")] for leaf in rows[0].values()]
        body = [[cell(contents, leaf) for leaf in row.values()] for row in rows]
        return out + table([head, *body], "markdown" if mark else rng.choice(TABLES), header=True)
    if manner == "blocks" and len(rows[0]) > 1:
        heads = [contents.label(leaf.form) for leaf in rows[0].values()]
        for row in rows:
            for text, leaf in zip(heads, row.values(), strict=True):
                out += [Piece(f"  {text}{colon} ", None, "label"), *cell(contents, leaf), Piece("\n")]
            out.append(Piece("\n"))
        return out
    bullet = rng.choice(("- ", "* ", "• ", "– ", "  "))
    for i, row in enumerate(rows, 1):
        out += [Piece(f"{i}. " if manner == "numbers" else bullet, None, "fixed")]
        out += [*item_pieces(contents, name, row), Piece("\n")]
    return out


def title(contents: Contents) -> Pieces:
    """The title of the document, in one of its wordings."""
    text = contents.written(contents.rng.choice(contents.kind.titles[contents.language]))
    text = text[:1].upper() + text[1:]
    return [Piece(text.upper() if contents.rng.random() < 0.2 else text, None, "label")]


def boilerplate(contents: Contents, most: int = 3) -> Pieces:
    """Up to so many lines that no field asks for: footers, advertisements, legal text."""
    rng = contents.rng
    out: Pieces = []
    for _ in range(rng.randint(0, most)):
        out += plain(other_line(contents) + "\n")
    return out


def other_line(contents: Contents) -> str:
    """One line that no field asks for, of the kind or of any."""
    _rng, chance = contents.rng, contents.rng.random()
    own = contents.kind.fillers[contents.language]
    if chance < 0.5 and own:
        return contents.unsaid(own)
    # what a kind avoids could be taken for one of its facts
    avoided = set(contents.kind.settings.get("avoid", "").split())
    listed = names.words(contents.language)["footer" if chance < 0.75 else "legal_text" if chance < 0.9 else "ad"]
    return contents.unsaid([each for each in listed if not avoided & draws(each)])
