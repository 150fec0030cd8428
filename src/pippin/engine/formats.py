"""The string formats that can be enforced, as regular expressions.

Notable here:
- dates are real (29 February only in leap years), seconds stop at 59 and years start at 1, so that Python can read them
- addresses and host names are written in a plain subset of their standards that every parser reads alike: lower case,
  ASCII, a name for a top-level domain; what is written is always valid, but not all that is valid is written
"""

from __future__ import annotations

import functools
from typing import Final

from pippin.core.errors import UnsupportedGuide
from pippin.engine import regular

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


FORMATS: Final = {
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
}
"""By name; each matches the whole of a string."""


@functools.cache
def terminal(name: str) -> str:
    """The JSON strings of a format, as a terminal.

    Raises:
        UnsupportedGuide: a format that is not in `FORMATS`.

    >>> regular.matches(terminal("date"), '"2024-02-29"'), regular.matches(terminal("date"), '"2023-02-29"')
    (True, False)
    """
    if name not in FORMATS:
        known = ", ".join(sorted(FORMATS))
        raise UnsupportedGuide(f"the format {name!r} cannot be enforced; known are {known}", guide="format")
    return f"/{regular.search(f'^(?:{FORMATS[name]})$')}/"
