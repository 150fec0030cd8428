"""Oracles: Python's own parsers, and Pydantic's, for every format."""

import datetime
import ipaddress
import random
import re
import uuid

import pytest
from pydantic import AnyUrl, TypeAdapter

from pippin.core.errors import UnsupportedGuide
from pippin.engine import formats, regular


@pytest.mark.parametrize("day", ["2024-02-29", "2000-02-29", "0001-01-01", "9999-12-31", "2023-04-30"])
def test_real_days(day):
    assert regular.matches(formats.terminal("date"), f'"{day}"')
    datetime.date.fromisoformat(day)


@pytest.mark.parametrize("day", ["2023-02-29", "1900-02-29", "0000-01-01", "2023-04-31", "2023-13-01", "2023-1-1"])
def test_unreal_days(day):
    assert not regular.matches(formats.terminal("date"), f'"{day}"')


def test_every_february_ends_when_it_does():
    for year in (*range(1, 9999, 7), 4, 100, 400, 1600, 1900, 2000):
        leap = year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
        assert regular.matches(formats.terminal("date"), f'"{year:04d}-02-29"') is leap


def test_every_compressed_address_is_one_that_python_reads():
    rng = random.Random(0)
    accepted = 0
    for _ in range(2000):
        text = ":".join(rng.choice(["", "0", "1f", "abcd"]) for _ in range(rng.randint(2, 9)))
        if regular.matches(formats.terminal("ipv6"), f'"{text}"'):
            accepted += 1
            ipaddress.IPv6Address(text)
    assert accepted > 50
    assert regular.matches(formats.terminal("ipv6"), '"::"')


PARSERS = {
    "date-time": TypeAdapter(datetime.datetime).validate_python,
    "time": TypeAdapter(datetime.time).validate_python,
    "duration": TypeAdapter(datetime.timedelta).validate_python,
    "uri": TypeAdapter(AnyUrl).validate_python,
    "ipv4": ipaddress.IPv4Address,
    "uuid": uuid.UUID,
    "uuid4": uuid.UUID,
}


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_random_members_are_read_by_the_parsers_of_python(name):
    rng = random.Random(name)
    for _ in range(100):
        PARSERS[name](_member(rng, formats.terminal(name)))


def _member(rng: random.Random, terminal: str) -> str:
    """A random string of a terminal, byte by byte, preferring to end."""
    from llguidance import LLMatcher

    matcher = LLMatcher(regular.byte_tokenizer(), f"start: TEXT\nTEXT: {terminal}")
    text = b""
    while True:
        allowed = [i for i, bit in enumerate(matcher.compute_logit_bias()) if bit]
        if 256 in allowed:
            return text[1:-1].decode()
        likely = [i for i in allowed if i == 0x22] if rng.random() < 0.3 else []
        byte = rng.choice(likely or allowed)
        matcher.consume_token(byte)
        text += bytes([byte])


def test_unknown_formats_are_named():
    with pytest.raises(UnsupportedGuide, match=re.escape("the format 'iri' cannot be enforced")):
        formats.terminal("iri")
