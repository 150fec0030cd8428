"""Training data of LaDiR as text: problems with written solutions.

Notable here:
- the format is that of fine-tuning on chains of thought: a prompt, and a completion that ends in "The answer is …"
- each sentence of the solution becomes one block of thought
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from pippin.core.errors import InvalidInput
from pippin.data.records import read_records

_ANSWER = re.compile(r"\s*(?:####|[Tt]he (?:final )?answer is:?)\s*")
_SENTENCE = re.compile(r"(?<=[.!?;])\s+|\s*\n\s*")


class Problem(NamedTuple):
    """A question, the sentences of a solution, and the answer."""

    question: str
    steps: tuple[str, ...]
    answer: str


def split_solution(text: str) -> tuple[tuple[str, ...], str]:
    """The sentences of a written solution, and the answer after "The answer is" or "####" (the last one in the text).

    Raises:
        InvalidInput: there is no such marker, nothing before it, or nothing after it.

    >>> split_solution("3 + 8 = 11. 11 - 5 = 6.\\nThe answer is 6.")
    (('3 + 8 = 11.', '11 - 5 = 6.'), '6')
    """
    markers = list(_ANSWER.finditer(text))
    if not markers:
        raise InvalidInput(f"no 'The answer is …' and no '#### …' in the solution {text[:60]!r}")
    before, answer = text[: markers[-1].start()], text[markers[-1].end() :].strip().removesuffix(".")
    steps = tuple(step for step in _SENTENCE.split(before.strip()) if step)
    if not steps or not answer:
        raise InvalidInput(f"no {'answer after' if steps else 'reasoning before'} the marker in {text[:60]!r}")
    return steps, answer


def read_problems(
    paths: str | Path | Iterable[str | Path], *, fields: Mapping[str, str] | None = None
) -> list[Problem]:
    """The problems of some files: prompts, and completions as `split_solution` reads them.

    Args:
        paths: as `pippin.data.records.read_records` takes them.
        fields: as there.

    Raises:
        InvalidRecord: a record without a prompt, or whose completion has no marked answer; it names file and line.
        InvalidArgument: as there.
    """
    problems = []
    for record in read_records(paths, fields=fields):
        if record.prompt is None or not record.prompt.strip():
            raise record.error("a problem needs a prompt, the question, and a completion, its solution")
        try:
            problems.append(Problem(record.prompt, *split_solution(record.text)))
        except InvalidInput as error:
            raise record.error(str(error)) from error
    return problems
