"""Check digits of numbers that people must not publish by mistake: payment cards and bank accounts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final


def luhn(text: str) -> bool:
    """Whether the digits end in the right check digit and begin like a payment card's.

    Source: ISO/IEC 7812-1, annex B.

    >>> luhn("4111 1111 1111 1111"), luhn("4111 1111 1111 1112")
    (True, False)
    """
    digits = [int(c) for c in text if c in "0123456789"]
    doubled = [d if n % 2 else (2 * d - 9 if d > 4 else 2 * d) for n, d in enumerate(reversed(digits), 1)]
    return 13 <= len(digits) <= 19 and digits[0] in (2, 3, 4, 5, 6) and sum(doubled) % 10 == 0 and len(set(digits)) > 1


def iban(text: str) -> bool:
    """Whether an international bank account number has the right check digits.

    Source: ISO 13616, by ISO/IEC 7064 modulo 97.

    >>> iban("de89 3704 0044 0532 0130 00"), iban("de88 3704 0044 0532 0130 00")
    (True, False)
    """
    plain = "".join(text.split()).upper()
    if not (15 <= len(plain) <= 34 and plain.isascii() and plain.isalnum()):
        return False
    return int("".join(str(int(c, 36)) for c in plain[4:] + plain[:4])) % 97 == 1


CHECKS: Final[Mapping[str, Callable[[str], bool]]] = {"luhn": luhn, "iban": iban}
