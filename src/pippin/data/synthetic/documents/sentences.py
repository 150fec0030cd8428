"""Sentences around facts: which of a kind's sentences a document has, and what a language changes where words meet.

Notable here:
- a sentence is used when all its facts are present and none of them has been stated yet
- what no sentence states is written with its label
- "de Anna" becomes "d'Anna", "a accountant" becomes "an accountant", "il 8 marzo" becomes "l'8 marzo"
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from pippin.data.synthetic.documents.contents import Contents, Leaf, Piece
from pippin.data.synthetic.documents.grammar import Draw, Phrase, Placeholder, expand, slots
from pippin.data.synthetic.documents.names import words

Pieces = list[Piece]
VOWELS = "aeiouyàâäéèêëîïôöùûüáíóú"
DAY = re.compile(r"(8|11)(?!\d)")
ITALIAN = {"il ": "l'", "del ": "dell'", "dal ": "dall'", "al ": "all'", "nel ": "nell'"}
FRENCH = {"de ": "d'", "que ": "qu'", "De ": "D'"}


def meet(before: str, leaf: Leaf, text: str, language: str) -> str:
    """The text before a value, changed as the language asks for where they meet."""
    low = text[:1].lower()
    if language == "it" and leaf.form.kind == "date" and DAY.match(text):
        for plain, short in ITALIAN.items():
            if before.endswith(" " + plain) or before == plain:
                return before[: -len(plain)] + short
    elif language == "fr" and leaf.form.kind == "text" and low in VOWELS and low:
        for plain, short in FRENCH.items():
            if before.endswith(" " + plain) or before == plain:
                return before[: -len(plain)] + short
    elif language == "en" and leaf.form.kind in ("text", "choice") and low in "aeio" and low:
        if re.search(r"(^|\s)[Aa] $", before):
            return before[:-1] + "n "
    elif language == "es" and leaf.form.kind == "text" and re.match(r"h?[ií](?!e)", text.lower()):
        return re.sub(r" y $", " e ", before)
    return before


def capitalized(pieces: Pieces) -> Pieces:
    """Pieces that begin with a capital letter."""
    for i, piece in enumerate(pieces):
        if piece.text.strip(" ¿¡\"'"):
            plain_name = piece.leaf is not None and piece.leaf.form.kind in ("text", "amount")
            if not plain_name:
                at = len(piece.text) - len(piece.text.lstrip(" ¿¡"))
                text = piece.text[:at] + piece.text[at : at + 1].upper() + piece.text[at + 1 :]
                pieces = [*pieces[:i], piece._replace(text=text), *pieces[i + 1 :]]
            break
    return pieces


def joined(contents: Contents, parts: Iterable[str | Placeholder | Draw | Pieces]) -> Pieces:
    """Parts of a phrase with values in the places of facts."""
    out: Pieces = []
    for part in parts:
        if isinstance(part, Draw):
            out.append(Piece(contents.draw(part.name)))
        elif isinstance(part, list):
            out += part
        elif isinstance(part, Placeholder):
            if part.name in contents.lists:
                out += in_a_row(contents, part.name)
                continue
            leaf = contents.leaves[part.name]
            written = contents.pieces(leaf, "sentence")
            if out and out[-1].leaf is None and written[0].leaf is leaf:
                out[-1] = out[-1]._replace(text=meet(out[-1].text, leaf, written[0].text, contents.language))
            out += written
        elif out and out[-1].leaf is None and out[-1].role == "text":
            out[-1] = out[-1]._replace(text=out[-1].text + part)
        else:
            out.append(Piece(part))
    return out


def item_pieces(contents: Contents, name: str, row: dict[str, Leaf]) -> Pieces:
    """One item of a list in a line: in one of its patterns, or the values in a row."""
    rng = contents.rng
    form = next(each for each in contents.kind.fields if each.name == name)
    fitting = [each for each in form.items if slots(each) == set(row)]
    if fitting and rng.random() < 0.9:
        out: Pieces = []
        for part in expand(rng.choice(fitting), rng):
            if isinstance(part, Placeholder):
                out += contents.pieces(row[part.name], "cell")
            else:
                out.append(Piece(contents.draw(part.name) if isinstance(part, Draw) else part))
        return out
    out = []
    order = list(row.values())
    for i, leaf in enumerate(order):
        if i:
            out.append(Piece(rng.choice((", ", ", ", " – "))))
        if leaf.form.kind not in ("text", "choice", "flag") or (leaf.form.kind == "flag"):
            out.append(Piece(contents.label(leaf.form) + ": ", None, "label"))
        out += contents.pieces(leaf, "cell")
    return out


def in_a_row(contents: Contents, name: str) -> Pieces:
    """The items of a list, one after another within a sentence."""
    rows = contents.lists[name]
    if not rows:
        return [Piece(contents.word("none").lower())]
    out: Pieces = []
    separator = "; " if len(rows[0]) > 1 else ", "
    for i, row in enumerate(rows):
        if i:
            last = i == len(rows) - 1
            out.append(Piece(f" {contents.word('and')} " if last else separator))
        out += item_pieces(contents, name, row)
    return out


def sentences(contents: Contents, paths: Iterable[str], *, openings: bool = True) -> tuple[list[Pieces], list[str]]:
    """Sentences that state facts of `paths`, in random order, and the paths that none of them states."""
    rng, kind, language = contents.rng, contents.kind, contents.language
    left = list(paths)
    known = set(left)
    out: list[Pieces] = []
    candidates = list(kind.sentences[language])
    rng.shuffle(candidates)
    if openings and kind.openings[language]:
        first = list(kind.openings[language])
        rng.shuffle(first)
        candidates = [next((each for each in first if each.slots <= known), candidates[0]), *candidates]
    for each in candidates:
        if not (each.slots <= known) or (not each.slots and out and rng.random() < 0.6):
            continue
        parts = expand(each.phrase, rng)
        used = {part.name for part in parts if isinstance(part, Placeholder)}
        if each.slots and not used:
            continue
        out.append(capitalized(joined(contents, parts)))
        known -= used
    return out, [path for path in left if path in known]


def labeled_sentence(contents: Contents, path: str) -> Pieces:
    """A fact that no sentence states: a clause of its own for a flag, else its label and its value."""
    leaf = contents.leaves[path]
    if leaf.form.kind == "flag":
        return [*capitalized(contents.pieces(leaf, "sentence")), Piece(".")]
    colon = " : " if contents.language == "fr" else ": "
    label = contents.label(leaf.form)
    return [Piece(label + colon, None, "label"), *contents.pieces(leaf, "sentence"), Piece(".")]


def filler(contents: Contents, name: str = "") -> str:
    """A sentence without facts: of the kind, or of the language's list `name`."""
    own = contents.kind.fillers[contents.language]
    if own and not name:
        return contents.unsaid(own)
    return contents.unsaid(words(contents.language)[name or contents.rng.choice(("legal_text", "ad"))])


def written(phrase: Phrase, contents: Contents, name: Pieces) -> Pieces:
    """A greeting with a name in its only slot."""
    return joined(contents, [name if isinstance(each, Placeholder) else each for each in expand(phrase, contents.rng)])
