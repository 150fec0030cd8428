r"""Regular expressions (JSON Schema's `pattern`) translated into terminals of a grammar.

Notable here:
- a string is constrained *as it is spelled in the JSON text*: every character has exactly one spelling there (itself,
  or its shortest escape), so lengths, patterns and exclusions are intersections and complements of plain regular
  languages, and no escape can smuggle a character past a pattern
- dialects differ (is "٣" a `\d`?); `narrow` writes the intersection of ECMA 262, Python and Rust, so that every
  generated string matches in each of them; without `narrow` it is exactly ECMA 262
- patterns are parsed by CPython's own parser (`re._parser`), since Python is one of the three dialects; a test checks
  that its node types are those that this file handles
- emptiness and membership are decided by llguidance, which decodes with the same terminals
- whether a terminal can be written within the engine's limits is tried out: no formula tells it from its text
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import re
from collections.abc import Iterable, Sequence
from re import _constants as op, _parser  # type: ignore[attr-defined]
from typing import Any, ClassVar, Final

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from pippin.core.errors import SchemaError, UnsupportedGuide
from pippin.engine.grammar.stack import with_stack

SHORT_ESCAPES: Final = {0x22: '"', 0x5C: "\\", 8: "b", 12: "f", 10: "n", 13: "r", 9: "t"}
ESCAPED: Final = frozenset(range(0x20)) | {0x22, 0x5C}
PLAIN: Final = r"[^\x{22}\x{5C}\x{0}-\x{1F}]"
CHARACTER: Final = rf"(?:{PLAIN}|\x{{5C}}(?:[\x{{22}}\x{{5C}}bfnrt]|u00(?:0[0-7be-f]|1[0-9a-f])))"
"""One character of a JSON string, in its only spelling."""

_ANY: Final = r"[\x{0}-\x{10FFFF}]"
_WORD: Final = "0-9A-Za-z_"
_BLANK: Final = r"\x{9}-\x{D}\x{20}"
_ECMA_SPACE: Final = _BLANK + r"\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}\x{FEFF}"
_WIDE_SPACE: Final = _ECMA_SPACE + r"\x{1C}-\x{1F}\x{85}"
_NOT_DOT: Final = (10, 13, 0x2028, 0x2029)

STEP_FUEL: Final = 2_000_000
"""How many expressions the engine may build for one token, ten times its own default; a tenth of a second at most."""
LIMITS: Final = LLParserLimits(verbose_errors=False, step_lexer_fuel=STEP_FUEL)
MAX_COUNTS: Final = 10_000
"""The product of a terminal's counts from which on `check_cost` tries it out."""
_TRIED_STEPS: Final = 40
_LIMIT_WORDS: Final = ("fuel", "limit", "too many", "too large", "too big", "complex", "symbols.len")
_LONGEST_TRIED: Final = 1000
_MOST_TRIED: Final = 100
_TOKENS_BETWEEN_MASKS: Final = 16
_UNIT: Final = re.compile(r"\\x\{[0-9A-F]+\}|[0-9A-Za-z]")
_HEAD: Final = re.compile(rf"\(?/((?:{_UNIT.pattern})*)(?![*+?{{|])")
_COUNTS: Final = re.compile(r"(?<!\\x)\{(\d+),?(\d*)\}")

# How each class is written where it widens the match ("small") and where, inside [^...], it narrows it ("large").
_ECMA: Final = {
    "digit": ("0-9", "0-9"),
    "not_digit": ("[^0-9]", "[^0-9]"),
    "word": (_WORD, _WORD),
    "not_word": (f"[^{_WORD}]", f"[^{_WORD}]"),
    "space": (_ECMA_SPACE, _ECMA_SPACE),
    "not_space": (f"[^{_ECMA_SPACE}]", f"[^{_ECMA_SPACE}]"),
}
_AGREED: Final = {
    "digit": ("0-9", r"\p{Nd}"),
    "not_digit": (r"[^\p{Nd}]", "[^0-9]"),
    "word": (_WORD, r"\w\p{N}"),
    "not_word": (r"[^\w\p{N}]", f"[^{_WORD}]"),
    "space": (_BLANK, _WIDE_SPACE),
    "not_space": (f"[^{_WIDE_SPACE}]", f"[^{_BLANK}]"),
}
# Text that Python interprets differently from ECMA 262 or Rust; it is refused.
_AMBIGUOUS: Final = re.compile(r"\\[AZazGhHRKXUNQE]|\\c.|\[\^?\]|\{,|(?:&&|--|~~|\|\|)(?=[^\[]*\])|\[\[")


def literal(text: str) -> str:
    r"""The regular expression of exactly this text.

    >>> literal("a/b")
    'a\\x{2F}b'
    """
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):X}}}" for c in text)


@functools.lru_cache(maxsize=16_384)
def quoted(text: str) -> str:
    r"""The regular expression of this text's characters as they are spelled in JSON, without the quotation marks.

    Raises:
        UnsupportedGuide: half of a surrogate pair, which UTF-8 cannot carry.

    >>> quoted("é\n")
    '\\x{E9}\\x{5C}n'
    """
    if any(0xD800 <= ord(c) <= 0xDFFF for c in text):
        raise UnsupportedGuide(f"{text!r} holds half of a surrogate pair, which no UTF-8 text can spell")
    return "".join(_spell(ord(c)) if ord(c) in ESCAPED else literal(c) for c in text)


def alternatives(texts: Iterable[str]) -> str:
    """One regular expression for any of these, each given as a regular expression."""
    return "(?:" + "|".join(texts) + ")"


def of_length(low: int, high: int | None) -> str:
    r"""A JSON string of ``low`` to ``high`` characters (code points, not bytes), quotation marks included."""
    return rf"\x{{22}}{CHARACTER}{{{low},{'' if high is None else high}}}\x{{22}}"


def search(pattern: str, *, narrow: bool = True) -> str:
    r"""The JSON strings, quotation marks included, in which ``pattern`` is found.

    Args:
        pattern: a regular expression without look-around, back references, flags or word boundaries; unanchored, as
            JSON Schema has it.
        narrow: only matches on which ECMA 262, Python's `re` and Rust's `regex` agree; else exactly ECMA 262.

    Raises:
        UnsupportedGuide: the pattern is not regular, or differs between engines.
        SchemaError: it is not a regular expression.

    >>> search("^a$")
    '\\x{22}a\\x{22}'
    """
    writer = _Writer(pattern, in_json=True, narrow=narrow)
    return writer.string(list(writer.tree))


def conditions(
    pattern: str, *, narrow: bool = True, exclude_narrow: bool | None = None, max_length: int | None = None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    r"""The JSON strings in which ``pattern`` is found, where look-ahead right after its ``^`` is allowed.

    Such a look-ahead is a condition on the whole string of its own, so it needs no regular expression that holds both.

    Args:
        pattern, narrow: as `search`.
        exclude_narrow: the same for what must not be found; None for the opposite of ``narrow``.
        max_length: most characters that the strings may have; counts that go beyond it are left out.

    Returns:
        Expressions that all must match, and expressions of which none may.

    Raises:
        UnsupportedGuide, SchemaError: as `search`.

    >>> conditions("^(?!b)a$") == ((search("^a$"),), (search("^b"),))
    True
    """
    modes = narrow, not narrow if exclude_narrow is None else exclude_narrow
    writer, opposite = (_Writer(pattern, in_json=True, narrow=each, max_length=max_length) for each in modes)
    begin, items = (op.AT, op.AT_BEGINNING), list(writer.tree)
    include, exclude = [], []
    if items[:1] == [begin]:
        while len(items) > 1 and items[1][0] in (op.ASSERT, op.ASSERT_NOT) and items[1][1][0] == 1:
            code, (_, inner) = items.pop(1)
            if code is op.ASSERT:
                include.append(writer.string([begin, *inner]))
            else:
                exclude.append(opposite.string([begin, *inner]))
    return (*include, writer.string(items)), tuple(exclude)


def constant(pattern: str) -> str | None:
    """The only text in which ``pattern`` is found; None if there may be several.

    >>> constant("^a/b$"), constant("a/b")
    ('a/b', None)
    """
    try:
        tree = _parser.parse(pattern)
        begin, *letters, end = tree
    except (re.error, OverflowError, RecursionError, ValueError):
        return None
    plain = not tree.state.flags & ~(re.UNICODE | re.ASCII)
    ends = plain and begin == (op.AT, op.AT_BEGINNING) and end == (op.AT, op.AT_END)
    if not ends or any(code is not op.LITERAL or 0xD800 <= value <= 0xDFFF for code, value in letters):
        return None
    return "".join(chr(value) for _, value in letters)


def whole(pattern: str) -> str:
    """The plain texts (not JSON) that ``pattern`` matches from end to end; errors as `search`.

    >>> whole("^[a-c]?$")
    '(?:[a-c]){0,1}'
    """
    return _Writer(pattern, in_json=False, narrow=True).search(left=False, right=False)


class _Writer:
    """Writes one parsed pattern in the syntax of Rust's `regex`, which llguidance reads."""

    def __init__(self, pattern: str, *, in_json: bool, narrow: bool, max_length: int | None = None) -> None:
        self.pattern, self.in_json = pattern, in_json
        self.max_length = math.inf if max_length is None else max_length
        self.classes = _AGREED if narrow else _ECMA
        if found := _AMBIGUOUS.search(re.sub(r"\\[^AZazGhHRKXUNQEc]", "..", pattern)):
            raise self.refused(f"{found.group()!r} means different things to different engines")
        try:
            self.tree = _parser.parse(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            if "(?" in pattern or "\\" in pattern:
                raise self.refused(str(error)) from error
            raise SchemaError(f"{pattern!r} is not a regular expression: {error}") from error
        if self.tree.state.flags & ~(re.UNICODE | re.ASCII):
            raise self.refused("flags are not supported")

    def refused(self, reason: str) -> UnsupportedGuide:
        return UnsupportedGuide(f"the pattern {self.pattern!r} cannot be enforced: {reason}", guide="pattern")

    def string(self, items: Any) -> str:
        """The JSON strings in which the items match."""
        return rf"\x{{22}}{self.search(items)}\x{{22}}"

    def search(self, tree: Any = None, left: bool = True, right: bool = True) -> str:
        """A whole string that contains a match of the tree; ``left`` and ``right``: whether text may surround it."""
        items = list(self.tree if tree is None else tree)
        while items and items[0] == (op.AT, op.AT_BEGINNING):
            left, items = False, items[1:]
        while items and items[-1] == (op.AT, op.AT_END):
            right, items = False, items[:-1]
        if _anchored(items):
            if len(items) == 1 and items[0][0] is op.BRANCH:
                return alternatives(self.search(branch, left, right) for branch in items[0][1][1])
            if len(items) == 1 and items[0][0] is op.SUBPATTERN:
                return self.search(self.group(items[0][1]), left, right)
            raise self.refused("'^' and '$' may only stand at the two ends of an alternative")
        around = f"{CHARACTER if self.in_json else _ANY}*"
        return (around if left else "") + self.sequence(items) + (around if right else "")

    def sequence(self, items: Any) -> str:
        return "".join(self.item(code, value) for code, value in items)

    def item(self, code: Any, value: Any) -> str:
        if code is op.LITERAL:
            return self.characters([(code, value)])
        if code is op.NOT_LITERAL:
            return self.characters([(op.NEGATE, None), (op.LITERAL, value)])
        if code is op.ANY:
            return self.characters([(op.NEGATE, None), *((op.LITERAL, c) for c in _NOT_DOT)])
        if code is op.IN:
            return self.characters(value)
        if code is op.BRANCH:
            return alternatives(self.sequence(branch) for branch in value[1])
        if code is op.SUBPATTERN:
            return f"(?:{self.sequence(self.group(value))})"
        if code in (op.MAX_REPEAT, op.MIN_REPEAT):  # greediness changes which match is found, not whether there is one
            low, high, tree = value
            # a repetition that matches something takes a character, so no string has room for more than its length
            most = "" if high is op.MAXREPEAT or high >= max(self.max_length, 1) else high
            return f"(?:{self.sequence(tree)}){{{low},{most}}}"
        raise self.refused(f"{str(code).lower().replace('_', ' ')} is not a regular operation")

    def group(self, value: Any) -> Any:
        _, added, removed, tree = value
        if added or removed:
            raise self.refused("flags are not supported")
        return tree

    def characters(self, items: Sequence[tuple[Any, Any]]) -> str:
        """One character of a class; in JSON, characters that need an escape are added as alternatives."""
        negated = items[0][0] is op.NEGATE
        members = list(items[1:] if negated else items)
        if len(members) == 1 and members[0][0] is op.LITERAL and not negated:
            return _spell(members[0][1]) if self.in_json else literal(chr(members[0][1]))
        text = f"[{'^' if negated else ''}{''.join(self.member(code, value, negated) for code, value in members)}]"
        if {str(value).replace("_NOT", "") for _, value in members} < {str(value) for _, value in members}:
            text = f"[^{_ANY}]" if negated else _ANY  # [\s\S], whose halves do not meet in the narrow reading
        if not self.in_json:
            return text
        escaped = [c for c in sorted(ESCAPED) if negated != any(self.holds(*member, negated, c) for member in members)]
        return alternatives([f"[{text}&&{PLAIN}]", *map(_spell, escaped)]) if escaped else text

    def member(self, code: Any, value: Any, negated: bool) -> str:
        """One member of a class as text."""
        if code is op.LITERAL:
            return literal(chr(value))
        if code is op.RANGE:
            return f"{literal(chr(value[0]))}-{literal(chr(value[1]))}"
        return self.classes[str(value).removeprefix("CATEGORY_").lower()][negated]

    def holds(self, code: Any, value: Any, negated: bool, character: int) -> bool:
        """Whether a member of a class contains a character that JSON escapes (a quotation mark, backslash, control)."""
        if code is op.LITERAL:
            return bool(character == value)
        if code is op.RANGE:
            return bool(value[0] <= character <= value[1])
        name = str(value).removeprefix("CATEGORY_").lower()
        if "space" not in name:
            return name.startswith("not_")
        blank = 9 <= character <= 13 or (0x1C <= character <= 0x1F and r"\x{1C}" in self.classes[name][negated])
        return blank == (name == "space")


def _anchored(items: Any) -> bool:
    """Whether the tree contains '^', '$' or another assertion about the ends."""
    for code, value in items:
        if code is op.AT and value in (op.AT_BEGINNING, op.AT_END):
            return True
        if code is op.BRANCH and any(map(_anchored, value[1])):
            return True
        if code in (op.SUBPATTERN, op.MAX_REPEAT, op.MIN_REPEAT) and _anchored(value[-1]):
            return True
    return False


def _spell(code: int) -> str:
    if code in SHORT_ESCAPES:
        return r"\x{5C}" + literal(SHORT_ESCAPES[code])
    return rf"\x{{5C}}u{code:04x}" if code in ESCAPED else literal(chr(code))


# --- questions put to the engine --------------------------------------------------------------------------------------


class Bytes:
    """A vocabulary of the 256 bytes and an end token."""

    eos_token_id = 256
    bos_token_id = None
    tokens: ClassVar = [bytes([value]) for value in range(256)] + [b"<end>"]
    special_token_ids: ClassVar = [256]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


class _Pairs(Bytes):
    """A vocabulary of an end token, the 256 bytes, and all pairs of printable ASCII."""

    eos_token_id = 0
    tokens: ClassVar = [
        b"<end>",
        *Bytes.tokens[:256],
        *(bytes(p) for p in itertools.product(range(0x20, 0x7F), repeat=2)),
    ]
    special_token_ids: ClassVar = [0]

    def __call__(self, text: bytes) -> list[int]:
        return [value + 1 for value in text]


@functools.cache
def byte_tokenizer() -> LLTokenizer:
    """The tokenizer whose tokens are the 256 bytes (ids 0-255) and an end (id 256)."""
    return LLTokenizer(TokenizerWrapper(Bytes()), eos_token=256, slices=[])


@functools.cache
def _pair_tokenizer() -> LLTokenizer:
    """A tokenizer of an end, the 256 bytes and all pairs of printable ASCII, for masks as costly as a real one's."""
    return LLTokenizer(TokenizerWrapper(_Pairs()), eos_token=0, slices=[])


@functools.lru_cache(maxsize=4096)
def is_empty(terminal: str) -> bool:
    """Whether a terminal (regular expressions in slashes, joined by ``&``, ``|`` and ``~``) matches no text at all.

    Raises:
        UnsupportedGuide: it is too large for the engine to decide.

    >>> is_empty("/a+/ & /b+/")
    True
    """
    matcher = _matcher(terminal)
    if message := _failure(matcher):
        raise UnsupportedGuide(f"the engine cannot decide which texts are of this form: {message}", guide="pattern")
    return bool(matcher.is_error())


def begin_differently(terminals: Sequence[str]) -> bool:
    """Whether two of some terminals plainly have no text in common: the fixed texts with which they begin differ.

    >>> begin_differently([f"/{search('^ab')}/", f"/{search('^cd')}/"]), begin_differently(["/ab*/", "/a/"])
    (True, False)
    """
    heads = [_head(terminal) for terminal in terminals]
    return any(one[: len(other)] != other[: len(one)] for one, other in itertools.combinations(heads, 2))


@functools.lru_cache(maxsize=4096)
def _head(terminal: str) -> tuple[str, ...]:
    """Characters with which all texts of a terminal begin, as it spells them; what repeats is in a group."""
    if " | " in terminal or not (found := _HEAD.match(terminal)):
        return ()
    return tuple(_UNIT.findall(found[1]))


@functools.lru_cache(maxsize=4096)
def matches(terminal: str, text: str) -> bool:
    """Whether a terminal matches this text from end to end.

    Raises:
        UnsupportedGuide: it is too large for the engine to decide.

    >>> matches("/[ab]+/ & ~/a+/", "aba"), matches("/[ab]+/ & ~/a+/", "aa")
    (True, False)
    """
    data = list(text.encode())
    kept = _kept(terminal)
    try:
        matcher = kept.pop()
    except IndexError:
        matcher = _matcher(terminal)
    read, message = consume(matcher, data)
    found = not message and read == len(data) and matcher.is_accepting()
    if not matcher.is_error() and matcher.reset():
        kept.append(matcher)
    if message:
        raise UnsupportedGuide(f"the engine cannot decide which texts are of this form: {message}", guide="pattern")
    return found


@functools.lru_cache(maxsize=64)
def _kept(terminal: str) -> list[LLMatcher]:
    """Matchers of a terminal at their beginning, to be taken out and put back: a schema asks one about many names."""
    return []


@functools.lru_cache(maxsize=256)
def count_texts(terminal: str, enough: int) -> int:
    """How many texts a terminal matches, at most ``enough``.

    Raises:
        UnsupportedGuide: its texts are too long to be tried.

    >>> count_texts("/[ab]c?/", 3), count_texts("/[ab]c?/", 9)
    (3, 4)
    """
    found: list[str] = []
    chance = random.Random(0)
    while len(found) < enough:
        rest = f"({terminal}) & ~/{alternatives(map(literal, found))}/" if found else terminal
        if is_empty(rest):
            break
        matcher, data = _matcher(rest), bytearray()
        while not (matcher.is_accepting() or matcher.is_stopped()):
            if len(data) == _LONGEST_TRIED or len(found) == _MOST_TRIED:
                raise UnsupportedGuide("there is no telling how many texts are of this form", guide="pattern")
            bits = int.from_bytes(matcher.compute_bitmask(), "little")
            allowed = [byte for byte in range(256) if bits >> byte & 1]
            data.append(0x22 if data and 0x22 in allowed else chance.choice(allowed))
            matcher.consume_token(data[-1])
        found.append(data.decode())
    return len(found)


@functools.lru_cache(maxsize=4096)
def check_cost(terminal: str) -> None:
    """Refuse a terminal whose texts take too long to write; tried by writing one where its counts multiply to many.

    Raises:
        UnsupportedGuide: the engine's limit, a tenth of that of a real step, is reached.
    """
    counts = [int(high or low) for low, high in _COUNTS.findall(terminal)]
    if math.prod(count for count in counts if count) <= MAX_COUNTS:
        return
    limits = LLParserLimits(verbose_errors=False, step_lexer_fuel=STEP_FUEL // 10)
    matcher = _matcher(terminal, _pair_tokenizer(), limits)
    chance = random.Random(0)
    # the characters that the pattern names lead to the most states: its parts begin and end there
    named = re.sub(
        r"\\x\{[0-9A-F]+\}|\\[pw]|\{[0-9,]*\}|\[.*?\]", "", terminal.replace(CHARACTER, "").replace(PLAIN, "")
    )
    written = (int(found[1], 16) for found in re.finditer(r"\\x\{([0-9A-F]+)\}", terminal))
    favored = [token + 1 for token in (*named.encode(), *(code for code in written if 0x20 <= code < 0x7F))]
    favored = [token for token in favored if token - 1 not in ESCAPED]
    for _ in range(_TRIED_STEPS):
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little"))
        if matcher.is_error():
            raise UnsupportedGuide(
                f"the engine cannot write texts of this form within its limits: {first_line(matcher)}; "
                "shorten maxLength or the counts of the pattern",
                guide="pattern",
            )
        allowed = allowed[allowed > 0]
        if not len(allowed):
            return
        choices = np.intersect1d(allowed, favored) if chance.random() < 0.75 else allowed
        matcher.consume_token(int(chance.choice(choices if len(choices) else allowed)))


def _matcher(terminal: str, vocabulary: LLTokenizer | None = None, limits: LLParserLimits | None = None) -> LLMatcher:
    source = f"start: TEXT\nTEXT: {terminal}"
    tokens = vocabulary or byte_tokenizer()
    matcher = with_stack(source, lambda: LLMatcher(tokens, source, log_level=0, limits=limits or LIMITS))
    if matcher.is_error():
        raise UnsupportedGuide(f"the engine refuses a text of this form: {first_line(matcher)}", guide="pattern")
    return matcher


def consume(matcher: LLMatcher, tokens: Sequence[int]) -> tuple[int, str]:
    """Accept tokens up to the first that is not allowed.

    Returns:
        How many were accepted; and why the matcher has failed, or "" where the next token is simply not allowed.
    """
    for start in range(0, len(tokens), _TOKENS_BETWEEN_MASKS):
        # the engine counts its effort from one mask to the next, and says only there that it has given up
        if message := _failure(matcher):
            return start, message
        part = list(tokens[start : start + _TOKENS_BETWEEN_MASKS])
        read = int(matcher.try_consume_tokens(part))
        if read < len(part):
            return start + read, _failure(matcher)
    return len(tokens), ""


def _failure(matcher: LLMatcher) -> str:
    if not matcher.is_error() and not matcher.is_stopped():
        matcher.compute_bitmask()
    message = first_line(matcher)
    return "" if message.startswith("NoExtensionBias") else message


def reaches_limit(message: str) -> bool:
    """Whether the engine has given up because of a limit, by its message."""
    return any(word in message for word in _LIMIT_WORDS)


def first_line(matcher: LLMatcher) -> str:
    """The engine's error message, without the dump of its state or its stack."""
    return matcher.get_error().split("<state>")[0].split("<backtrace>")[0].split("<non-verbose/>")[0].strip()
