"""Invented persons, companies, addresses, phone numbers, accounts and numbers of documents, as a region writes them.

Notable here:
- surnames, companies and places are composed of syllables: tens of thousands in each language
- e-mail addresses and web sites end in names that are reserved for examples, or in a made-up company's domain
- IBANs have valid check digits, but belong to no bank
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from datetime import time, timedelta
from decimal import Decimal
from functools import cache
from random import Random
from typing import Final

from pippin.data.synthetic.documents.formats import ValueStyle, amount_text, date_text, time_text
from pippin.data.synthetic.documents.grammar import Draw, Phrase, expand, parse
from pippin.data.synthetic.documents.kind_files import FILES

ID_SHAPES: Final = (
    "####",
    "#####",
    "######",
    "########",
    "##-####",
    "####-##",
    "YYYY-####",
    "YYYY/###",
    "YY-#####",
    "A-#####",
    "AA######",
    "AA-####-##",
    "AAA###",
    "#A##-##A",
    "AA##.###",
    "###.###.###",
    "YYYYMM-###",
    "A##/####",
)
PHONES: Final = {
    "us": ("(3##) 5##-####", "+1 4## 5##-####", "5##-5##-####", "1-800-5##-####"),
    "uk": ("020 7### ####", "+44 20 7### ####", "01### ######", "07### ######", "+44 (0)161 ### ####"),
    "ie": ("+353 1 ### ####", "01 ### ####"),
    "de": ("0### 3#####", "+49 30 ######", "0### / ######", "+49 (0)40 ######", "01## #######", "+49-89-######"),
    "at": ("+43 1 #######", "01 / ### ## ##", "+43 660 #######"),
    "ch": ("+41 44 ### ## ##", "031 ### ## ##", "+41 (0)79 ### ## ##"),
    "fr": ("01 4# ## ## ##", "+33 1 4# ## ## ##", "06.##.##.##.##", "04 7# ## ## ##"),
    "be": ("+32 2 ### ## ##", "02/### ## ##"),
    "es": ("91 ### ## ##", "+34 93 ### ## ##", "6## ### ###", "+34 6## ## ## ##"),
    "it": ("02 #######", "+39 06 ########", "3## #######", "+39 3## ### ####", "051/######"),
}
POSTCODES: Final = {
    "us": "#####",
    "uk": "AA# #AA",
    "ie": "A## A#A#",
    "de": "#####",
    "at": "1###",
    "ch": "8###",
    "fr": "##0##",
    "be": "1###",
    "es": "28###",
    "it": "201##",
}
IBANS: Final = {"de": ("DE", 18), "at": ("AT", 16), "ch": ("CH", 17), "fr": ("FR", 23), "be": ("BE", 12)} | {
    "es": ("ES", 20),
    "it": ("IT", 23),
    "uk": ("GB", 18),
    "ie": ("IE", 18),
    "us": ("DE", 18),
}
LETTERS: Final = "ABCDEFGHJKLMNPRSTUVWXYZ"


@cache
def words(language: str) -> dict[str, tuple[Phrase, ...]]:
    """The lists of words and phrases of a language."""
    lists = {}
    for line in (FILES / "words" / f"{language}.txt").read_text(encoding="utf-8").splitlines():
        name, colon, listed = line.partition(": ")
        if colon and not line.startswith("#"):
            lists[name] = tuple(parse(each.strip()) for each in listed.split("; ") if each.strip())
    return lists


def word(name: str, style: ValueStyle, rng: Random) -> str:
    """One entry of a list, written out."""
    parts = expand(rng.choice(words(style.language)[name]), rng)
    return "".join(draw(part.name, style, rng) if isinstance(part, Draw) else str(part) for part in parts)


def draw(name: str, style: ValueStyle, rng: Random) -> str:
    """What a generator of this file, or else a list of words, gives."""
    if name.startswith("int:"):
        low, high = name[4:].split("..")
        return str(rng.randint(int(low), int(high)))
    maker = MAKERS.get(name)
    return maker(style, rng) if maker else word(name, style, rng)


def pattern(shape: str, rng: Random, year: int = 2024) -> str:
    """A number of a shape: # is a digit, A a letter, YYYY or YY the year, MM a month."""
    shape = shape.replace("YYYY", str(year)).replace("YY", f"{year % 100:02}").replace("MM", f"{rng.randint(1, 12):02}")
    return "".join(
        str(rng.randrange(10)) if each == "#" else rng.choice(LETTERS) if each == "A" else each for each in shape
    )


def identifier(prefixes: str, rng: Random, year: int) -> str:
    """The number of a document, with one of the prefixes (parted by commas) more often than not."""
    shape = pattern(rng.choice(ID_SHAPES), rng, year)
    if prefixes and rng.random() < 0.6:
        return rng.choice(prefixes.split(",")) + rng.choice(("-", "", " ", "/", "-")) + shape
    return shape


def ascii_name(text: str) -> str:
    """A name as it stands in an e-mail address."""
    for letter, plain in (("ä", "ae"), ("ö", "oe"), ("ü", "ue"), ("ß", "ss")):
        text = text.lower().replace(letter, plain)
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return "".join(each for each in plain if each.isalnum() or each in " -").strip()


def surname(style: ValueStyle, rng: Random) -> str:
    """A family name, from a list or composed."""
    if rng.random() < 0.35:
        return word("surname", style, rng)
    return word("surname_start", style, rng) + word("surname_end", style, rng)


def person(style: ValueStyle, rng: Random) -> str:
    """First name and surname; sometimes a middle initial, a title or two surnames."""
    first = word("first_name", style, rng)
    chance = rng.random()
    if style.language == "es" and chance < 0.5:
        return f"{first} {surname(style, rng)} {surname(style, rng)}"
    if chance < 0.06:
        return f"{first} {surname(style, rng)}-{surname(style, rng)}"
    if chance < 0.12 and style.language == "en":
        return f"{first} {rng.choice(LETTERS)}. {surname(style, rng)}"
    return f"{first} {surname(style, rng)}"


def company(style: ValueStyle, rng: Random) -> str:
    """The name of a company with its legal form, more often than not."""
    chance = rng.random()
    if chance < 0.4:
        name = word("company_start", style, rng) + word("company_end", style, rng)
    elif chance < 0.6:
        name = surname(style, rng) + rng.choice((" & ", " + ", " & ")) + surname(style, rng)
    elif chance < 0.8:
        name = f"{surname(style, rng)} {word('trade', style, rng)}"
    else:
        name = f"{word('trade', style, rng)} {surname(style, rng)}"
    legal = {"us": "legal_us", "ch": "legal_ch"}.get(style.region, "legal")
    return f"{name} {word(legal, style, rng)}" if rng.random() < 0.8 else name


def city(style: ValueStyle, rng: Random) -> str:
    """A town: a known one or a composed name."""
    if rng.random() < 0.5:
        return word("city", style, rng)
    return word("town_start", style, rng) + word("town_end", style, rng)


def street(style: ValueStyle, rng: Random) -> str:
    """A street with its number."""
    return word("street", style, rng)


def address(style: ValueStyle, rng: Random) -> str:
    """Street, postcode and town, parted by ", "."""
    code, town = pattern(POSTCODES[style.region], rng), city(style, rng)
    if style.region == "us":
        return f"{street(style, rng)}, {town}, {rng.choice(('CA', 'NY', 'TX', 'OH', 'WA', 'IL', 'MA', 'CO'))} {code}"
    if style.region in ("uk", "ie"):
        return f"{street(style, rng)}, {town}, {code}" if rng.random() < 0.5 else f"{street(style, rng)}, {town} {code}"
    return f"{street(style, rng)}, {code} {town}"


def phone(style: ValueStyle, rng: Random) -> str:
    """A phone number."""
    return pattern(rng.choice(PHONES[style.region]), rng)


def domain(style: ValueStyle, rng: Random) -> str:
    """The domain of an invented company."""
    name = ascii_name(word("company_start", style, rng) + word("company_end", style, rng)).replace(" ", "")
    ending = {"us": "com", "uk": "co.uk"}.get(style.region, style.region)
    return name + rng.choice((f".{ending}", ".example", f".{ending}", ".example.com"))


def email(style: ValueStyle, rng: Random, name: str = "") -> str:
    """An e-mail address, of a person if `name` is given."""
    if not name and rng.random() < 0.4:
        return f"{word('mailbox', style, rng)}@{domain(style, rng)}"
    parts = ascii_name(name or person(style, rng)).replace("-", " ").split() or ["info"]
    first, last = parts[0], parts[-1]
    local = rng.choice((f"{first}.{last}", f"{first[0]}.{last}", f"{first}{last[0]}", last, f"{first}_{last}"))
    return f"{local}@{domain(style, rng)}"


def url(style: ValueStyle, rng: Random) -> str:
    """The address of a web site."""
    return rng.choice(("www.", "https://", "https://www.")) + domain(style, rng)


def iban(style: ValueStyle, rng: Random) -> str:
    """An account number of the region, with correct check digits, in groups of four or without spaces."""
    country, length = IBANS[style.region]
    digits = "".join(str(rng.randrange(10)) for _ in range(length))
    remainder = int("".join(str(int(each, 36)) for each in digits + country + "00")) % 97
    text = f"{country}{98 - remainder:02}{digits}"
    return " ".join(text[i : i + 4] for i in range(0, len(text), 4)) if rng.random() < 0.7 else text


def tax_number(style: ValueStyle, rng: Random) -> str:
    """A number that tax offices give to companies."""
    shapes = {
        "us": "##-#######",
        "uk": "GB### #### ##",
        "de": "DE#########",
        "at": "ATU########",
        "fr": "FR## ### ### ###",
    }
    return pattern(shapes.get(style.region, style.region.upper() + "########"), rng)


def postcode(style: ValueStyle, rng: Random) -> str:
    """A postal code of the region."""
    return pattern(POSTCODES[style.region], rng)


def other_date(style: ValueStyle, rng: Random) -> str:
    """A date within some weeks of the document's."""
    return date_text(style.today + timedelta(days=rng.randint(-20, 40)), style.date, style.language)


def other_amount(style: ValueStyle, rng: Random) -> str:
    """An amount of money up to some hundreds."""
    return amount_text(Decimal(round(500 * 80 ** rng.random())) / 100, style)[0]


Maker = Callable[[ValueStyle, Random], str]
MAKERS: Final[dict[str, Maker]] = {
    "person": person,
    "surname_full": surname,
    "company": company,
    "town": city,
    "road": street,
    "address": address,
    "postcode": postcode,
    "phone": phone,
    "email": email,
    "url": url,
    "iban": iban,
    "tax_number": tax_number,
    "id": lambda style, rng: identifier("", rng, style.today.year),
    "date": other_date,
    "time": lambda style, rng: time_text(time(rng.randint(7, 21), rng.randrange(0, 60, 5)), style.time),
    "amount": other_amount,
}
