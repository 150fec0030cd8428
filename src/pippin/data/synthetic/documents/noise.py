"""Noise in the text around facts: typing and reading errors, odd spacing and casing, lost punctuation, blank lines.

Notable here:
- facts keep every letter, and so do pieces marked "fixed"
- digits are never changed, so no other number becomes the value of a fact
- letters beside a fact stay, so that the fact does not grow into the next word
"""

from __future__ import annotations

import re
from random import Random

from pippin.data.synthetic.documents.contents import Piece

MISREAD = {
    "l": "1I",
    "O": "0",
    "o": "0",
    "e": "c",
    "m": "rn",
    "S": "5",
    "B": "8",
    "ü": "u",
    "ä": "a",
    "ö": "o",
    "é": "e",
    "è": "e",
    "ñ": "n",
    "à": "a",
    "i": "1l",
    "h": "b",
    "a": "o",
    "t": "f",
}
WORD = re.compile(r"[^\W\d_]{4,}")


def noisy(pieces: list[Piece], noise: float, rng: Random) -> list[Piece]:
    """The pieces with errors at a rate of `noise` (0 to 1): at 1 about every third word of the rest has one."""
    shout = rng.random() < noise * 0.3
    misread = rng.random() < 0.5
    out = []
    for piece in pieces:
        if piece.leaf is not None or piece.role == "fixed" or not piece.text:
            out.append(piece)
            continue
        text = piece.text
        if piece.role == "label" and (shout or rng.random() < noise * 0.25):
            text = rng.choice((text.upper(), text.lower(), text.title(), text.swapcase()))
        text = WORD.sub(lambda found: _word(found[0], noise, misread, rng), text)
        out.append(piece._replace(text=_spacing(text, noise, rng)))
    return out


def _word(word: str, noise: float, misread: bool, rng: Random) -> str:
    if rng.random() > noise * 0.33:
        return word
    at = rng.randrange(1, len(word) - 1)
    if misread:
        places = [i for i in range(1, len(word) - 1) if word[i] in MISREAD]
        if places:
            at = rng.choice(places)
            return word[:at] + rng.choice((MISREAD[word[at]], MISREAD[word[at]][0])) + word[at + 1 :]
    chance = rng.random()
    if chance < 0.35:
        return word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    if chance < 0.7:
        return word[:at] + word[at + 1 :]
    if chance < 0.9:
        return word[:at] + word[at] + word[at:]
    return word.lower() if word[0].isupper() else word.capitalize()


def _spacing(text: str, noise: float, rng: Random) -> str:
    chance = rng.random()
    if chance > noise * 0.5:
        return text
    if chance < noise * 0.15 and " " in text:
        at = rng.choice([i for i, each in enumerate(text) if each == " "])
        return text[:at] + rng.choice(("  ", "   ", " ")) + text[at + 1 :]
    if chance < noise * 0.25 and "\n" in text:
        return text.replace("\n", rng.choice(("\n\n", " \n", "\n \n")), 1)
    if chance < noise * 0.4:
        # a mark inside the text, followed by a space: the words around it stay apart
        return re.sub(r"[.,;:](?= )", "", text, count=1)
    return (
        text.replace(". ", " . ", 1) if chance < noise * 0.45 else text.replace(": ", " :", 1).replace(" :", " : ", 1)
    )
