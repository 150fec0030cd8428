"""The string formats that can be enforced, as regular expressions.

Notable here:
- `STANDARD` has the syntax of each standard as far as a regular language goes; `PARSED` is the subset that all parsers
  accept (lower case, ASCII, http), for answers that become a value of a Python type
- dates exist (29 February only in leap years), seconds are at most 59 and years at least 1, so that Python can parse
  them
- a format without a definition here is an annotation, as the standard has it
- "verbatim" is Pippin's own: any string, until a grammar is given the text that its strings are parts of

Source: RFC 3339 (dates and times), 3986 (URI), 3987 (IRI), 4291 (IPv6), 5321 (email), 6570 (URI template), 6901 (JSON
pointer), 1123 (host names).
"""

from __future__ import annotations

import functools
from typing import Final

from pippin.core.errors import UnsupportedGuide
from pippin.engine.grammar import regex
from pippin.engine.grammar.regex import alternatives

_YEAR: Final = r"(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP: Final = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY: Final = (
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE: Final = rf"(?:{_YEAR}-{_DAY}|{_LEAP}-02-29)"
_CLOCK: Final = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?"
_ZONE: Final = r"(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_TIME_SPAN: Final = r"T(?:[0-9]{1,4}H(?:[0-9]{1,4}M(?:[0-9]{1,4}S)?)?|[0-9]{1,4}M(?:[0-9]{1,4}S)?|[0-9]{1,4}S)"
_DAY_SPAN: Final = r"(?:[0-9]{1,4}Y(?:[0-9]{1,4}M(?:[0-9]{1,4}D)?)?|[0-9]{1,4}M(?:[0-9]{1,4}D)?|[0-9]{1,4}D)"
_LABEL: Final = r"[a-z0-9]+(?:-[a-z0-9]+){0,3}"
_DOMAIN: Final = rf"(?:{_LABEL}\.){{1,4}}[a-z]{{2,12}}"
_BYTE: Final = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4: Final = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_GROUP: Final = r"[0-9a-f]{1,4}"
_HEX: Final = "[0-9a-f]"
_PATH: Final = r"(?:[a-zA-Z0-9._~!$&'()*+,;=:@-]|%[0-9a-fA-F]{2})"


VERBATIM: Final = "verbatim"
VERBATIM_TERMINAL: Final = rf"/{regex.of_length(1, None)}\x{{F8FF}}{{0}}/"
"""Any string that is not empty, with an empty mark at its end by which `Grammar.over` finds it again."""


def _ipv6() -> str:
    whole = rf"{_GROUP}(?::{_GROUP}){{7}}"
    forms = [whole]
    for before in range(8):
        left = rf"{_GROUP}(?::{_GROUP}){{{before - 1}}}" if before else ""
        right = rf"(?:{_GROUP}(?::{_GROUP}){{0,{6 - before}}})?" if before < 7 else ""
        forms.append(f"{left}::{right}")
    return "(?:" + "|".join(forms) + ")"


def _uuid(version: str) -> str:
    variant = "[89ab]" if version != "[0-9a-f]" else "[0-9a-f]"
    return rf"{_HEX}{{8}}-{_HEX}{{4}}-{version}{_HEX}{{3}}-{variant}{_HEX}{{3}}-{_HEX}{{12}}"


PARSED: Final = {
    "date": _DATE,
    "time": _CLOCK + _ZONE,
    "date-time": f"{_DATE}T{_CLOCK}{_ZONE}",
    "duration": rf"P(?:{_DAY_SPAN}(?:{_TIME_SPAN})?|{_TIME_SPAN}|[0-9]{{1,4}}W)",
    "email": rf"[a-z0-9]+(?:[._+-][a-z0-9]+){{0,5}}@{_DOMAIN}",
    "hostname": r"[a-z0-9]{1,20}(?:-[a-z0-9]{1,20}){0,2}(?:\.[a-z0-9]{1,20}(?:-[a-z0-9]{1,20}){0,2}){0,2}",
    "ipv4": _IPV4,
    "ipv6": _ipv6(),
    "uri": rf"https?://{_DOMAIN}(?::[1-9][0-9]{{0,3}})?(?:/{_PATH}*)*(?:\?{_PATH}*)?(?:#{_PATH}*)?",
    "uuid": _uuid("[0-9a-f]"),
    **{f"uuid{version}": _uuid(str(version)) for version in (1, 3, 4, 5, 6, 7, 8)},
    "json-pointer": r"(?:/(?:[^/~]|~[01])*)*",
    VERBATIM: "(?s:.+)",
}
"""Regular expressions by format name; each matches a whole string that every parser accepts."""

_UNRESERVED: Final = r"A-Za-z0-9._~\-"
_DELIMITERS: Final = r"!$&'()*+,;="
_UCS: Final = (
    "\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef\U00010000-\U0001fffd\U00020000-\U0002fffd\U00030000-\U0003fffd"
    "\U000e1000-\U000efffd"
)
_PERCENT: Final = "%[0-9A-Fa-f]{2}"


def _uri(more: str = "", *, relative: bool = False) -> str:
    """URIs (with ``more`` characters: IRIs), or with ``relative`` references, too."""
    plain = f"{_UNRESERVED}{more}{_DELIMITERS}"
    char = f"(?:[{plain}:@]|{_PERCENT})"
    segment = f"(?:/{char}*)*"
    host = rf"(?:\[{_full_ipv6()}\]|(?:[{plain}]|{_PERCENT})+)"
    authority = f"(?:(?:[{plain}:]|{_PERCENT})*@)?{host}(?::[0-9]*)?"
    # an empty host stands only before a path, as in file:///tmp
    network = f"//(?:{authority}{segment}|/{char}+{segment})"
    absolute = f"/(?:{char}+{segment})?"
    tail = rf"(?:\?(?:{char}|[/?])*)?(?:#(?:{char}|[/?])*)?"
    whole = f"[A-Za-z][A-Za-z0-9+.-]*:(?:{network}|{absolute}|{char}+{segment})?{tail}"
    if not relative:
        return whole
    first = f"(?:[{plain}@]|{_PERCENT})+"  # without a colon, which would make it a scheme
    return f"(?:{whole}|(?:{network}|{absolute}|{first}{segment})?{tail})"


def _full_ipv6() -> str:
    group = "[0-9A-Fa-f]{1,4}"
    last = f"(?:{group}:{group}|{_IPV4})"
    forms = [f"(?:{group}:){{6}}{last}"]
    for before in range(8):  # groups before the gap
        left = f"(?:(?:{group}:){{0,{before - 1}}}{group})?" if before else ""
        after = 7 - before  # groups after it, at most
        right = f"(?:{group}:){{{after - 2}}}{last}" if after >= 2 else group if after == 1 else ""
        forms.append(f"{left}::{right}")
    return alternatives(forms)


def _uri_template() -> str:
    variable = rf"(?:[A-Za-z0-9_]|{_PERCENT})(?:\.?(?:[A-Za-z0-9_]|{_PERCENT}))*(?::[1-9][0-9]{{0,3}}|\*)?"
    literal = rf"(?:[!#$&(-;=?-\[\]_a-z~{_UCS}]|{_PERCENT})"
    return rf"(?:{literal}|\{{[+#./;?&=,!@|]?{variable}(?:,{variable})*\}})*"


def _regex() -> str:
    """Regular expressions that every engine reads: groups in groups, no look-around, no back references."""
    escape = r"\\[dDwWsSnrt.^$*+?()\[\]{}|/\\]"
    in_class = rf"(?:a-z|A-Z|0-9|a-f|A-F|[A-Za-z0-9 _.,:;=@#%!<>/+*()|$?]|{escape})"
    atom = rf"(?:[A-Za-z0-9 _,:;=@#%&~!<>/'\"-]|\.|{escape}|\[\^?{in_class}+\])"
    ordered = "|".join(f"{low},[{low}-9]" for low in range(10))  # and fewer digits before the comma than after it
    counts = f"[0-9]{{1,3}},?|{ordered}|[0-9],[1-9][0-9]{{1,2}}|[1-9][0-9],[1-9][0-9]{{2}}"
    repeat = rf"(?:(?:[*+?]|\{{(?:{counts})\}})\??)?"
    inner = f"(?:{atom}{repeat})+"
    for _ in range(2):
        group = rf"\((?:\?:)?{inner}(?:\|{inner})*\)"
        inner = f"(?:(?:{atom}|{group}){repeat})+"
    return rf"(?:\^?{inner}\$?(?:\|\^?{inner}\$?)*|\^?\$?)"


# at most 63 characters, without two hyphens in a row, which are for names in other scripts by a rule of their own
_ANY_LABEL: Final = "(?:[A-Za-z0-9]{1,63}|[A-Za-z0-9](?:-?[A-Za-z0-9]){1,31})"
_ANY_HOST: Final = rf"{_ANY_LABEL}(?:\.{_ANY_LABEL})*"
_ATOM: Final = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_QUOTED: Final = r'"(?:[ !#-\[\]-~]|\\[ -~])*"'
_MAILBOX: Final = rf"(?:{_ATOM}(?:\.{_ATOM})*|{_QUOTED})@(?:{_ANY_HOST}|\[{_IPV4}\]|\[IPv6:{_full_ipv6()}\])"
_ANY_TIME: Final = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_ANY_UUID: Final = "[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}"

STANDARD: Final = PARSED | {
    "time": _ANY_TIME,
    "date-time": f"{_DATE}[Tt]{_ANY_TIME}",
    "email": _MAILBOX,
    "idn-email": _MAILBOX,
    "hostname": _ANY_HOST,
    "idn-hostname": _ANY_HOST,
    "ipv6": _full_ipv6(),
    "uri": _uri(),
    "uri-reference": _uri(relative=True),
    "iri": _uri(_UCS),
    "iri-reference": _uri(_UCS, relative=True),
    "uri-template": _uri_template(),
    "uuid": _ANY_UUID,
    "regex": _regex(),
    "relative-json-pointer": r"(?:0|[1-9][0-9]{0,8})(?:#|(?:/(?:[^/~]|~[01])*)*)",
    # their names in draft 3
    "ip-address": _IPV4,
    "host-name": _ANY_HOST,
}
"""The same by the standards."""

_SHORTER: Final = {"hostname": 253, "idn-hostname": 253, "host-name": 253, "email": 254, "idn-email": 254}
"""The longest strings of formats, in characters."""


@functools.cache
def terminal(name: str, *, parsed: bool = False) -> str:
    """The JSON strings of a format, as a terminal.

    Args:
        name: of the format.
        parsed: only those that every parser accepts.

    Raises:
        UnsupportedGuide: a format that is in neither table.

    >>> regex.matches(terminal("date"), '"2024-02-29"'), regex.matches(terminal("date"), '"2023-02-29"')
    (True, False)
    """
    formats = PARSED if parsed else STANDARD
    if name not in formats:
        known = ", ".join(sorted(formats))
        raise UnsupportedGuide(f"the format {name!r} cannot be enforced; known are {known}", guide="format")
    if name == VERBATIM:
        return VERBATIM_TERMINAL
    found = f"/{regex.search(f'^(?:{formats[name]})$')}/"
    if parsed or name not in _SHORTER:
        return found
    return f"{found} & /{regex.of_length(0, _SHORTER[name])}/"
