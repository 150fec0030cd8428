"""How dates, times, amounts of money and numbers are written, by language and region.

Notable here:
- a document keeps to one style of each; the style is sampled with the region
- dates of English documents are never ambiguous: one like 03/04/2024 is written with the name of its month
- a space inside an amount may be a plain, a no-break or a narrow no-break space
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from random import Random
from typing import Final, TypeAlias

Date: TypeAlias = date

_MONTHS: Final = {
    "en": "January February March April May June July August September October November December",
    "de": "Januar Februar März April Mai Juni Juli August September Oktober November Dezember",
    "fr": "janvier février mars avril mai juin juillet août septembre octobre novembre décembre",
    "es": "enero febrero marzo abril mayo junio julio agosto septiembre octubre noviembre diciembre",
    "it": "gennaio febbraio marzo aprile maggio giugno luglio agosto settembre ottobre novembre dicembre",
}
MONTHS: Final = {language: tuple(names.split()) for language, names in _MONTHS.items()}
SHORT_MONTHS: Final[dict[str, tuple[str, ...]]] = {
    "en": tuple(["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"]),
    "de": tuple(["Jan.", "Feb.", "März", "Apr.", "Mai", "Juni", "Juli", "Aug.", "Sept.", "Okt.", "Nov.", "Dez."]),
    "fr": tuple(["janv.", "févr.", "mars", "avr.", "mai", "juin", "juil.", "août", "sept.", "oct.", "nov.", "déc."]),
    "es": tuple(["ene", "feb", "mar", "abr", "may", "jun", "jul", "ago", "sept", "oct", "nov", "dic"]),
    "it": tuple(["gen", "feb", "mar", "apr", "mag", "giu", "lug", "ago", "set", "ott", "nov", "dic"]),
}
WEEKDAYS: Final[dict[str, tuple[str, ...]]] = {
    "en": tuple(["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]),
    "de": tuple(["Montag", "Dienstag", "Mittwoch", "Donnerstag", "Freitag", "Samstag", "Sonntag"]),
    "fr": tuple(["lundi", "mardi", "mercredi", "jeudi", "vendredi", "samedi", "dimanche"]),
    "es": tuple(["lunes", "martes", "miércoles", "jueves", "viernes", "sábado", "domingo"]),
    "it": tuple(["lunedì", "martedì", "mercoledì", "giovedì", "venerdì", "sabato", "domenica"]),
}
ISO = "{y}-{mm}-{dd}"
DATE_STYLES: Final[dict[str, tuple[str, ...]]] = {
    "us": (
        "{month} {d}, {y}",
        "{mon} {d}, {y}",
        "{mm}/{dd}/{y}",
        "{m}/{d}/{yy}",
        ISO,
        "{month} {nth}, {y}",
        "{mon}. {d}, {y}",
    ),
    "en": (
        "{d} {month} {y}",
        "{d} {mon} {y}",
        "{dd}/{mm}/{y}",
        "{dd}/{mm}/{yy}",
        ISO,
        "{nth} {month} {y}",
        "{d} {mon} '{yy}",
        "{dd}-{mon}-{y}",
        "{dd}.{mm}.{y}",
        "{month} {d}, {y}",
    ),
    "de": ("{dd}.{mm}.{y}", "{d}. {month} {y}", "{d}.{m}.{y}", "{dd}.{mm}.{yy}", "{d}. {mon} {y}", ISO, "{d}.{m}.{yy}"),
    "fr": ("{dd}/{mm}/{y}", "{first} {month} {y}", "{first} {mon} {y}", "{dd}/{mm}/{yy}", ISO, "{dd}.{mm}.{y}"),
    "es": ("{d} de {month} de {y}", "{dd}/{mm}/{y}", "{d}/{m}/{y}", "{dd}-{mm}-{y}", "{d} {mon} {y}", ISO),
    "it": ("{d} {month} {y}", "{dd}/{mm}/{y}", "{d}/{m}/{y}", "{dd}.{mm}.{y}", "{d} {mon} {y}", ISO, "{dd}/{mm}/{yy}"),
}
# {n} is the number, and what stands before and after it is written with the currency's sign or its code
AMOUNT_STYLES: Final[dict[str, tuple[str, ...]]] = {
    "us": ("{s}{n}", "{s}{n}", "{c} {n}", "{s} {n}", "{n} {c}"),
    "uk": ("{s}{n}", "{s}{n}", "{c} {n}", "{n} {c}"),
    "en": ("{s}{n}", "{c} {n}", "{n} {c}", "{s} {n}"),
    "euro": ("{n} {s}", "{n} {s}", "{n} {c}", "{c} {n}", "{s} {n}", "{n}{s}"),
    "swiss": ("{c} {n}", "{n} {c}", "{c} {n}"),
}
TIME_STYLES: Final[dict[str, tuple[str, ...]]] = {
    "us": ("{h12}:{mm} {ampm}", "{h12}:{mm} {AMPM}", "{h12}:{mm}{ampm}", "{h12}:{mm} {a.m.}"),
    "en": ("{hh}:{mm}", "{h12}:{mm} {ampm}", "{h12}.{mm}{ampm}", "{hh}:{mm}"),
    "de": ("{hh}:{mm}", "{hh}.{mm}", "{h}:{mm}"),
    "fr": ("{h}h{mm}", "{hh}:{mm}", "{h} h {mm}", "{hh}h{mm}"),
    "es": ("{hh}:{mm}", "{h}:{mm}", "{hh}.{mm}"),
    "it": ("{hh}:{mm}", "{hh}.{mm}", "{h}:{mm}"),
}
REGIONS: Final[dict[str, tuple[str, ...]]] = {
    "en": ("us", "us", "uk", "uk", "ie"),
    "de": ("de", "de", "de", "at", "ch"),
    "fr": ("fr", "fr", "fr", "be", "ch"),
    "es": ("es",),
    "it": ("it", "it", "it", "ch"),
}
CURRENCIES: Final = {"us": ("$", "USD"), "uk": ("£", "GBP"), "ch": ("CHF", "CHF")}
COUNT_WORDS: Final[dict[str, tuple[str, ...]]] = {
    "en": tuple(["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]),
    "de": tuple(["zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun", "zehn", "elf", "zwölf"]),
    "fr": tuple(["deux", "trois", "quatre", "cinq", "six", "sept", "huit", "neuf", "dix", "onze", "douze"]),
    "es": tuple(["dos", "tres", "cuatro", "cinco", "seis", "siete", "ocho", "nueve", "diez", "once", "doce"]),
    "it": tuple(["due", "tre", "quattro", "cinque", "sei", "sette", "otto", "nove", "dieci", "undici", "dodici"]),
}


@dataclass
class ValueStyle:
    """How one document writes its values."""

    language: str
    region: str
    date: str
    amount: str
    time: str
    group: str
    decimal: str
    space: str
    symbol: str
    code: str
    today: Date


def sample_style(language: str, rng: Random) -> ValueStyle:
    """A region where the language is spoken, and a style of each kind of value that is usual there."""
    region = rng.choice(REGIONS[language])
    symbol, code = CURRENCIES.get(region, ("€", "EUR"))
    dates = DATE_STYLES["us" if region == "us" else language]
    times = TIME_STYLES["us" if region == "us" else language]
    if region == "ch":
        amounts, separators = AMOUNT_STYLES["swiss"], [("'", "."), ("’", "."), ("", ".")]
    elif language == "en":
        amounts, separators = AMOUNT_STYLES.get(region, AMOUNT_STYLES["en"]), [(",", "."), (",", "."), ("", ".")]
    elif language == "fr":
        amounts, separators = AMOUNT_STYLES["euro"], [(" ", ","), ("\u202f", ","), ("\xa0", ","), ("", ",")]
    else:
        amounts, separators = AMOUNT_STYLES["euro"], [(".", ","), (".", ","), ("", ",")]
    group, decimal = rng.choice(separators)
    space = rng.choice((" ", " ", " ", "\xa0"))
    today = date(2014, 1, 1) + timedelta(days=rng.randrange(5000))
    patterns = rng.choice(dates), rng.choice(amounts), rng.choice(times)
    return ValueStyle(language, region, *patterns, group, decimal, space, symbol, code, today)


def ordinal(number: int) -> str:
    """1st, 2nd, 3rd, 4th."""
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def date_text(day: date, pattern: str, language: str) -> str:
    """A day as `pattern` says; an English one that could be read in two ways, with the name of its month."""
    if language == "en" and "{mm}" in pattern and pattern != ISO and day.day <= 12:
        pattern = "{d} {month} {y}" if pattern.startswith("{d") else "{month} {d}, {y}"
    elif language == "en" and "{m}" in pattern and day.day <= 12:
        pattern = "{mon} {d}, {y}"
    return pattern.format(
        d=day.day,
        dd=f"{day.day:02}",
        m=day.month,
        mm=f"{day.month:02}",
        y=day.year,
        yy=f"{day.year % 100:02}",
        month=MONTHS[language][day.month - 1],
        mon=SHORT_MONTHS[language][day.month - 1].removesuffix("." if pattern.startswith("{mon}.") else "\n"),
        nth=ordinal(day.day),
        first="1er" if day.day == 1 else day.day,
    ).replace("May.", "May")


def time_text(moment: time, pattern: str, *, words: bool = False) -> str:
    """A time of the day as `pattern` says; with `words` a full hour may lose its minutes ("3 pm", "15h")."""
    if words and moment.minute == 0:
        pattern = pattern.replace(":{mm}", "").replace(".{mm}", "") if "{h12}" in pattern else pattern
        pattern = pattern.replace("h{mm}", "h").replace(" h {mm}", " h")
    half = "am" if moment.hour < 12 else "pm"
    values = {
        "h": str(moment.hour),
        "hh": f"{moment.hour:02}",
        "h12": str(moment.hour % 12 or 12),
        "mm": f"{moment.minute:02}",
        "ampm": half,
        "AMPM": half.upper(),
        "a.m.": f"{half[0]}.m.",
    }
    for name, value in values.items():
        pattern = pattern.replace("{" + name + "}", value)
    return pattern


def grouped(digits: str, separator: str, language: str) -> str:
    """Digits in groups of three; Spanish leaves four digits together."""
    if len(digits) <= (4 if language == "es" else 3) or not separator:
        return digits
    head = len(digits) % 3 or 3
    return digits[:head] + "".join(separator + digits[i : i + 3] for i in range(head, len(digits), 3))


def number_text(number: Decimal | float, places: int, style: ValueStyle) -> str:
    """A number with so many decimal places."""
    sign = "-" if number < 0 else ""
    whole, _, fraction = f"{abs(number):.{places}f}".partition(".")
    text = sign + grouped(whole, style.group, style.language)
    return text + style.decimal + fraction if fraction else text


def amount_text(amount: Decimal, style: ValueStyle, *, whole: bool = False) -> tuple[str, str]:
    """An amount of money, and the sign or code of its currency in it. With `whole`, full amounts lose their cents."""
    places = 0 if whole and amount == amount.to_integral_value() else 2
    number = number_text(amount, places, style)
    mark = style.symbol if "{s}" in style.amount else style.code
    text = style.amount.replace("{n}", number).replace(" ", style.space).replace("{s}", mark).replace("{c}", mark)
    return text, mark
