"""Two tasks for latent space optimization: the largest area of a square, and an expression close to a function.

Notable here:
- squares: the largest area rewards any bright image, so whether an image still is a square can be asked, too
- expressions, in prefix form: rule 0 is padding; 1-3 join two expressions (+, *, /), 4-5 change one (sin, exp), 6-9 are
  x, 1, 2, 3
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from pippin.bayes.latent.weighted_retraining import LatentVAE

LENGTH, RULES = 15, 10
"""Rules of one expression at most, and kinds of rules with the one that fills up."""
_WANTS = (0, 2, 2, 2, 1, 1, 0, 0, 0, 0)


def squares(side: int) -> Tensor:
    """Filled squares in every row, left edge at a quarter of the image, six copies of each, [n, side * side]."""
    import torch

    found = []
    for edge in range(1, side // 2 + 1):
        for top in range(side - edge + 1):
            image = torch.zeros(side, side)
            image[top : top + edge, side // 4 : side // 4 + edge] = 1
            found.append(image.flatten())
    return torch.stack(found).repeat_interleave(6, 0)


def area(x: Tensor) -> Tensor:
    """Sum of the pixels of each image."""
    return x.flatten(1).sum(-1)


def are_squares(x: Tensor, side: int) -> Tensor:
    """Whether each image is one filled square in the column of `squares`, and nothing else."""
    lit = x.view(-1, side, side) > 0.5
    rows, columns = lit.any(2), lit.any(1)
    filled = (lit == (rows[:, :, None] & columns[:, None, :])).flatten(1).all(1)

    def one_run(line: Tensor) -> Tensor:
        return (line[:, 1:] & ~line[:, :-1]).sum(1) + line[:, 0].long() == 1

    left = columns.long().argmax(1) == side // 4
    return filled & left & one_run(rows) & one_run(columns) & (rows.sum(1) == columns.sum(1))


def sampled(count: int, generator: torch.Generator) -> list[list[int]]:
    """Distinct random expressions of at most 15 rules."""
    import torch

    chances = torch.tensor([0.0, 1.2, 0.9, 0.5, 0.9, 0.3, 1.5, 0.5, 0.4, 0.4])
    found: dict[tuple[int, ...], None] = {}
    while len(found) < count:
        rules: list[int] = []
        wanted = 1
        while wanted and len(rules) < LENGTH:
            rules.append(int(torch.multinomial(chances, 1, generator=generator)))
            wanted += _WANTS[rules[-1]] - 1
        if not wanted:
            found[tuple(rules)] = None
    return [list(rules) for rules in found]


def one_hot(expressions: list[list[int]]) -> Tensor:
    """Expressions as one-hot vectors [n, 15, 10]."""
    import torch
    import torch.nn.functional as F

    rules = torch.zeros(len(expressions), LENGTH, dtype=torch.long)
    for row, expression in enumerate(expressions):
        rules[row, : len(expression)] = torch.tensor(expression)
    return F.one_hot(rules, RULES).float()


def _value(rules: list[int], x: Any) -> Any:
    """Value of an expression at x; None if it is incomplete or has rules left over."""
    import numpy as np

    changes: dict[int, Callable[..., Any]] = {1: np.add, 2: np.multiply, 3: np.divide, 4: np.sin, 5: np.exp}
    stack: list[Any] = []
    for rule in reversed(rules):
        if rule >= 6:
            stack.append(x if rule == 6 else np.full_like(x, rule - 6.0))
            continue
        if len(stack) < _WANTS[rule]:
            return None
        parts = [stack.pop() for _ in range(_WANTS[rule])]
        stack.append(changes[rule](*parts))
    return stack[0] if len(stack) == 1 else None


def scores(x: Tensor) -> Tensor:
    """min(7, log(1 + MSE)) on 1,000 points of [-10, 10]; NaN for an invalid expression."""
    import numpy as np
    import torch

    points = np.linspace(-10, 10, 1000)
    target = 1 / 3 + points + np.sin(points * points)
    found = []
    for row in x.argmax(-1).tolist():
        rules = [rule for rule in row if rule]
        with np.errstate(all="ignore"):
            value = _value(rules, points)
            score = math.nan if value is None else float(np.log1p(np.mean((value - target) ** 2)))
        broken = value is not None and not math.isfinite(score)
        found.append(7.0 if broken else min(score, 7.0))
    return torch.tensor(found, dtype=torch.float64)


def grammatical(base: type[LatentVAE]) -> type[LatentVAE]:
    """The adapter, with decodings padded after the end of the expression; one without an end stays invalid."""
    import torch
    import torch.nn.functional as F

    class Grammatical(base):  # type: ignore[misc,valid-type]
        def decode(self, z: Tensor) -> Tensor:
            with torch.no_grad():
                likely = self.vae.decode(z.to(next(self.vae.parameters()).device)).cpu()
            rules = likely[..., 1:].argmax(-1) + 1  # what fills up is never a choice
            wants = torch.tensor(_WANTS)[rules] - 1
            ended = (wants.cumsum(1) + 1 <= 0).cumsum(1) - (wants.cumsum(1) + 1 <= 0).long() > 0
            return F.one_hot(torch.where(ended, 0, rules), RULES).float()

    return Grammatical
