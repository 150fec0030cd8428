r"""How much of a training run should be quantisation-aware.

Notable here:
- the answer grows with the tokens per byte of parameters: a short run has no time to spare, a long one has
- it is a fit to other people's runs (86 million to 2.2 billion parameters), not a law

Source: "Compute-Optimal Quantization-Aware Training", arXiv:2509.22935: the best share is about
$\exp(-a / \ln S)$ with $S = D / (N B / 8)$ and $a = 6.73$ (mean absolute error 0.09 over 757 runs).
"""

from __future__ import annotations

import math
from typing import Final

from pippin.core.errors import InvalidArgument

_SLOPE: Final = 6.73


def optimal_qat_fraction(tokens: float, parameters: float, bits: float) -> float:
    """The share of all training tokens that is best spent on quantisation-aware training, 0 to 1.

    Args:
        tokens: of the whole run, full precision and quantised together.
        parameters: of the model.
        bits: of a weight in the second part.

    Raises:
        InvalidArgument: numbers that are not positive, or no more than one token for each byte of parameters, of which
            the fit says nothing.

    >>> round(optimal_qat_fraction(100e9, 1e9, bits=2), 2), round(optimal_qat_fraction(2e9, 86e6, bits=2), 2)
    (0.33, 0.23)
    """
    for name, value in (("tokens", tokens), ("parameters", parameters), ("bits", bits)):
        if not (value > 0 and math.isfinite(value)):
            raise InvalidArgument(f"{name} is {value}; give a positive number")
    per_byte = tokens / (parameters * bits / 8)
    if per_byte <= 1:
        raise InvalidArgument(
            f"{tokens:.3g} tokens are {per_byte:.3g} for each byte of {parameters:.3g} parameters at {bits} bits; the "
            "fit holds above 1"
        )
    return math.exp(-_SLOPE / math.log(per_byte))
