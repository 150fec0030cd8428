"""Errors of configurations that contradict themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pippin.core.errors import CorruptedFile


@contextmanager
def contradictions(what: str) -> Iterator[None]:
    """Raise `CorruptedFile` for a field that is missing, of the wrong type or impossible."""
    try:
        yield
    except KeyError as error:
        raise CorruptedFile(f"{what} has no {error.args[0]!r}, which the model needs") from error
    except (TypeError, ValueError, ArithmeticError, IndexError) as error:
        raise CorruptedFile(f"{what} contradicts itself: {error}") from error
