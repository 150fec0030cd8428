"""What the data of all task adapters has in common: a sampler of examples, a split, and the choices of an answer.

Notable here:
- a sampler is a function of a random generator: the data is as long as the training, and no example is stored
- the tokens that count are those at which the grammar of inference leaves a choice
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from pippin.language.constrained_objective import ConstrainedExample

if TYPE_CHECKING:
    from pippin.engine.grammar.constraint import Grammar, GrammarTokenizer

ExampleSampler: TypeAlias = "Callable[[random.Random], ConstrainedExample | None]"
"""Returns a random example, or None where the drawn one is too long or has no answer."""


@dataclass(frozen=True)
class ExampleSplit:
    """The part of the data that examples come from.

    Attributes:
        kinds: kinds of documents; all without any.
        layouts: layouts of documents that may occur; all without any.
        languages: their languages; all without any.
        held_out: whether this is the part that is evaluated on, for data that is split by a hash of its names.
    """

    kinds: tuple[str, ...] = ()
    layouts: tuple[str, ...] = ()
    languages: tuple[str, ...] = ()
    held_out: bool = False

    def layouts_of(self, kind: str) -> list[str]:
        """The layouts of a kind that may occur; all where none of them may."""
        from pippin.data.synthetic import documents

        every = documents.layouts(kind)
        return [name for name in every if name in self.layouts] or list(every)


def constrained_example(
    prompt: Sequence[int], answer: Sequence[int], grammar: Grammar, tokenizer: GrammarTokenizer
) -> ConstrainedExample | None:
    """An answer under a grammar as an example; None if the grammar does not allow it or leaves no choice in it.

    Args:
        prompt: the tokens before the answer.
        answer: its tokens.
        grammar: holds the answer at inference.
        tokenizer: of the model.
    """
    constraint = grammar.start(tokenizer)
    places: list[int] = []
    allowed: list[np.ndarray] = []
    forced: list[int] = []
    for index, token in enumerate(answer):
        forced = forced or constraint.forced()
        if forced and forced[0] == token:
            forced = forced[1:]
        else:
            forced = []
            if not constraint.allows(token):
                return None
            bits = constraint.mask().view(np.uint8)
            if int(np.unpackbits(bits).sum()) > 1:
                places.append(index)
                allowed.append(bits.copy())
        constraint.accept(token)
    if not places or not constraint.may_end:
        return None
    at = np.array(places)
    return ConstrainedExample((*prompt, *answer), at + len(prompt) - 1, np.array(answer)[at], np.stack(allowed))
