"""Oracles: Python's own parsers, and Pydantic's, for every format."""

import datetime
import ipaddress
import json
import random
import re
import uuid

import pytest
from pydantic import AnyUrl, TypeAdapter

from pippin.core.errors import UnsupportedGuide
from pippin.engine.grammar import regex, string_formats


@pytest.mark.parametrize("day", ["2024-02-29", "2000-02-29", "0001-01-01", "9999-12-31", "2023-04-30"])
def test_real_days(day):
    assert regex.matches(string_formats.terminal("date"), f'"{day}"')
    datetime.date.fromisoformat(day)


@pytest.mark.parametrize("day", ["2023-02-29", "1900-02-29", "0000-01-01", "2023-04-31", "2023-13-01", "2023-1-1"])
def test_unreal_days(day):
    assert not regex.matches(string_formats.terminal("date"), f'"{day}"')


def test_every_february_ends_when_it_does():
    for year in (*range(1, 9999, 7), 4, 100, 400, 1600, 1900, 2000):
        leap = year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
        assert regex.matches(string_formats.terminal("date"), f'"{year:04d}-02-29"') is leap


def test_every_compressed_address_is_one_that_python_reads():
    rng = random.Random(0)
    accepted = 0
    for _ in range(2000):
        text = ":".join(rng.choice(["", "0", "1f", "abcd"]) for _ in range(rng.randint(2, 9)))
        if regex.matches(string_formats.terminal("ipv6"), f'"{text}"'):
            accepted += 1
            ipaddress.IPv6Address(text)
    assert accepted > 50
    assert regex.matches(string_formats.terminal("ipv6"), '"::"')


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
        PARSERS[name](_member(rng, string_formats.terminal(name, parsed=True)))


def _member(rng: random.Random, terminal: str) -> str:
    """A random string of a terminal, byte by byte, preferring to end."""
    from llguidance import LLMatcher

    matcher = LLMatcher(regex.byte_tokenizer(), f"start: TEXT\nTEXT: {terminal}")
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
    with pytest.raises(UnsupportedGuide, match=re.escape("the format 'color' cannot be enforced")):
        string_formats.terminal("color")


@pytest.mark.parametrize(
    ("name", "members", "others"),
    [
        ("uri", ["irc://irc.example.com/a", "mailto:a@b.c", "urn:isbn:1", "file:///tmp/x", "http://[::1]:80/"],
         ["http://", "a/b", "//a", "http://ü.de", "http://a b", "1:a", "http://a/%g0"]),
        ("uri-reference", ["a/b", "/a", "#x", "?q", "", "./a:b", "http://a"], ["1:2", "a b", "\\"]),
        ("iri", ["http://ü.de/ä?ö#ß"], ["ü", "http://ü .de"]),
        ("email", ["Joe.Bloggs@example.COM", '"joe bloggs"@example.com', "a@[127.0.0.1]", "a@[IPv6:::1]"],
         ["a..b@c.de", ".a@b", "a@-b.c", "a@b-", "a b@c", "@a"]),
        ("hostname", ["a.b", "A-1.de", "a" * 63], ["-a", "a-", "a_b", "", "a..b", "ab--c.de", "a" * 64]),
        ("ipv6", ["::", "::1", "1::", "::ffff:1.2.3.4", "1:2:3:4:5:6:7:8", "1:2:3:4:5:6:7::", "1:2:3:4:5:6:1.2.3.4"],
         ["12345::", "1::2::3", "1:2:3:4:5:6:7", "1:2:3:4:5:6:7:8:9", "::1.2.3", "1:2:3:4:5:6:7:1.2.3.4"]),
        ("uri-template", ["http://a/{term:1}/{term*}{?q,r}"], ["{a", "a}", "{}", "{a:0}"]),
        ("regex", ["^[a-z]+$", "^\\w{3,16}$", "a{3,3}", "(a|b){3}", "((a)b)+?", ""],
         ["a(", "[z-a]", "*", "\\a", "(?<=a)b", "[", "a{2,1}"]),
        ("date-time", ["2024-02-29t10:00:00.123456789z"], ["2024-02-30T10:00:00Z", "2024-02-29T24:00:00Z"]),
        ("relative-json-pointer", ["0", "1#", "12/a/~0"], ["-1", "01", "1#a", "/a"]),
    ],
)  # fmt: skip
def test_the_syntax_of_the_standards(name, members, others):
    for text, wanted in [(member, True) for member in members] + [(other, False) for other in others]:
        assert regex.matches(string_formats.terminal(name), json.dumps(text, ensure_ascii=False)) is wanted, text


def test_standard_addresses_are_those_that_python_reads():
    rng = random.Random(1)
    for _ in range(2000):
        text = ":".join(rng.choice(["", "0", "1F", "abcd", "1.2.3.4"]) for _ in range(rng.randint(2, 9)))
        try:
            ipaddress.IPv6Address(text)
            wanted = True
        except ValueError:
            wanted = False
        assert regex.matches(string_formats.terminal("ipv6"), f'"{text}"') is wanted, text
