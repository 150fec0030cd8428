r"""Fewer bytes of weights, decided once, in the program itself, so that every back end runs the same numbers.

Notable here:
- a weight is replaced by its codes and the few operators that turn them back, so sizes shrink in every format, and no
  back end quantises anything itself
- two-, four- and one-bit codes are unpacked by multiplications and floors, which every back end has; bit shifts are not
- scales and palettes stay floating-point weights of the program: `ModelAsset.module` trains them

With $s = \max|w| / (2^{b-1} - 1)$ for a row or a group of a row, linear codes are $q = \mathrm{round}(w / s)$; a palette
is k-means with $2^b$ centres per group of rows; pruning keeps the largest share of $|w|$ as one bit each and values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, OutputSpec, TensorArgument
from torch.fx import Graph, Node

from pippin.core.errors import InvalidArgument
from pippin.nn import kmeans_placeholder  # noqa
