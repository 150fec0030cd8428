"""What each layer needs for rows of its weights' Jacobian: the input it read, and what came back to its output.

Notable here:
- rows of a matrix are outer products, and sums of their squares are sums of products of squares: where an example has
  one position, no row is ever made
- the factor of a convolution's patches is made from shifted pictures, without the patches, where it keeps their size
- where a call keeps its examples (first dimension, second, or several positions of one example laid end to end) is not
  assumed: `Call.settle` looks which parts of the output answer to which example
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pippin.core.errors import InvalidArgument

CHUNK = 1 << 22
"""Numbers that a temporary may hold: 16 MiB in float32."""
CACHE = 1 << 18
"""Numbers that a temporary may hold which is read again at once: 1 MiB in float32, about a core's own cache."""


@dataclass(eq=False)
class Call:
    """One use of parameters by a function that has a rule.

    Args:
        weight: name of the parameter that multiplies, None if it is not among the chosen.
        bias: name of the parameter that is added, likewise.
        x: the input.
        options: what else the rule needs.
        shape: of the weight (of the bias, where no weight is chosen).
    """

    weight: str | None
    bias: str | None
    x: Tensor
    options: dict[str, Any]
    shape: tuple[int, ...]
    edge: GradientEdge = field(init=False)
    output: tuple[int, ...] = field(init=False)
    version: int = field(init=False)
    second: bool = False
    """Whether examples lie along the second dimension."""
    factor: float = 1.0
    """What the weight was multiplied with before it was used."""
    kept: Tensor | None = None
    """The input in the form that rows need, once it was made."""

    trailing: ClassVar[bool] = True
    """Whether the features lie along the last dimensions, not along the second."""

    def record(self, result: Tensor) -> None:
        """Remember where the result stands in the graph, before anything is done to it in place."""
        self.edge, self.output, self.version = get_gradient_edge(result), tuple(result.shape), self.x._version

    @property
    def names(self) -> list[str]:
        """The chosen parameters of this call."""
        return [name for name in (self.weight, self.bias) if name is not None]

    def settle(self, probe: Tensor, touched: Tensor) -> bool:
        """Find where the examples lie, from what comes back when only some were ``touched``; False if nowhere."""
        n, best = len(touched), -1
        for second in (False, True):
            if second and not (self.trailing and len(self.output) > 2):
                continue
            moved = probe.transpose(0, 1) if second else probe
            if len(moved) % n:
                continue
            answers = (moved.reshape(n, -1) != 0).any(1)
            if not (answers & ~touched).any() and int(answers.sum()) > best:
                best, self.second = int(answers.sum()), second
        return best >= 0

    def check(self) -> None:
        """Raise if the input was overwritten since."""
        if self.x._version != self.version:
            raise InvalidArgument(
                f"the input of the layer of {self.names[0]} is overwritten in place after the layer read it; "
                "take inplace=True (or +=) out of the operation after it"
            )

    def rows(self, name: str, g: Tensor, n: int) -> Tensor:
        """Rows of one parameter.

        Args:
            name: of the parameter.
            g: what came back to the output, for each column: [columns, *output].
            n: examples.

        Returns:
            [columns, n, *shape of the parameter]
        """
        self.check()
        g = g.transpose(1, 2) if self.second else g
        return self.bias_rows(g, n) if name == self.bias else self.weight_rows(g, n)

    def diagonal(self, name: str, g: Tensor, n: int) -> Tensor:
        """Sum over examples and columns of the squared rows of one parameter, flat."""
        rows = self.rows(name, g, n)
        return rows.reshape(len(g) * n, -1).square().sum(0)

    def factors(self, name: str) -> tuple[str, int]:
        """Which Kronecker factors a parameter has: the kind of its use, and how many numbers they are."""
        del name
        return "other", math.prod(self.shape[-1:]) ** 2

    def weight_rows(self, g: Tensor, n: int) -> Tensor:
        """Rows of the weight."""
        raise NotImplementedError

    def bias_rows(self, g: Tensor, n: int) -> Tensor:
        """Rows of the bias: what came back, summed over positions."""
        return self.gathered(g, n)

    def gathered(self, g: Tensor, n: int) -> Tensor:
        """Sum over all positions of an example: [columns, n, features]."""
        r = len(g)
        if self.trailing:
            return g.reshape(r, n, -1, g.shape[-1]).sum(2)
        return g.reshape(r, n, -1, g.shape[2], math.prod(g.shape[3:])).sum((2, 4))

    def _input(self) -> Tensor:
        return self.x.transpose(0, 1) if self.second else self.x


class Matrix(Call):
    """A weight that is a matrix for each group: inputs [n, groups, a, positions], columns [n, groups, r, b, positions].

    The weight, flat, is [groups, b, a].
    """

    def matrices(self) -> tuple[int, int, int]:
        """Groups, outputs of each, and inputs of each."""
        groups = self.options.get("groups", 1)
        return groups, self.shape[0] // groups, math.prod(self.shape[1:])

    def factors(self, name: str) -> tuple[str, int]:
        """Two factors for each group; a bias has its own block."""
        groups, b, a = self.matrices()
        return ("matrix", groups * (a * a + b * b)) if name == self.weight else ("other", (groups * b) ** 2)

    def inputs(self, n: int) -> Tensor:
        """What the weight multiplied: [n, groups, a, positions]."""
        raise NotImplementedError

    def columns(self, g: Tensor, n: int) -> Tensor:
        """What came back: [n, groups, r, b, positions]."""
        raise NotImplementedError

    def kept_inputs(self, n: int) -> Tensor:
        """The inputs, kept for the columns to come unless they are very large."""
        if self.kept is None:
            x = self.inputs(n)
            if x.numel() > 8 * CHUNK:
                return x
            self.kept = x
        return self.kept

    def output_factor(self, g: Tensor, n: int) -> Tensor:
        """Sum over examples, columns and positions of outer products of what came back: [groups, b, b]."""
        raise NotImplementedError

    def add_inputs(self, total: Tensor, n: int) -> int:
        """Add the outer products of the inputs of all positions to [groups, a, a]; return how many were added."""
        raise NotImplementedError

    def order(self) -> Tensor | None:
        """Where each input of the weight stands in `add_inputs`; None where it stands there in its own order."""
        return None

    def weight_rows(self, g: Tensor, n: int) -> Tensor:
        """Rows of the weight."""
        columns, x = self.columns(g, n), self.kept_inputs(n)
        _, groups, r, b, positions = columns.shape
        if positions == 1:
            rows = columns * x[:, :, None, None, :, 0]
        else:
            rows = (columns.flatten(2, 3) @ x.mT).view(n, groups, r, b, x.shape[2])
        return rows.permute(2, 0, 1, 3, 4).reshape(r, n, *self.shape)

    def chosen_rows(self, g: Tensor, n: int, chosen: Tensor) -> Tensor:
        """Rows of some entries of the weight, numbered flat: [r, n, entries]."""
        self.check()
        g = g.transpose(1, 2) if self.second else g
        columns, x = self.columns(g, n), self.kept_inputs(n)
        groups, b, a = columns.shape[1], columns.shape[3], x.shape[2]
        if len(chosen) * x.shape[3] > groups * b * a:
            return self.weight_rows(g, n).flatten(2)[..., chosen]
        group, out, into = chosen // (b * a), chosen // a % b, chosen % a
        left = columns.permute(1, 3, 2, 0, 4)[group, out]
        right = x.permute(1, 2, 0, 3)[group, into]
        return (left * right[:, None]).sum(-1).permute(1, 2, 0)

    def diagonal(self, name: str, g: Tensor, n: int) -> Tensor:
        """Sum over examples and columns of the squared rows, without keeping them."""
        if name == self.bias:
            return super().diagonal(name, g, n)
        self.check()
        g = g.transpose(1, 2) if self.second else g
        columns, x = self.columns(g, n), self.kept_inputs(n)
        _, groups, r, b, positions = columns.shape
        if positions == 1:
            strength = columns[..., 0].square().sum(2)
            return torch.einsum("ngb,nga->gba", strength, x[..., 0].square()).flatten()
        columns = columns.flatten(2, 3)
        step = max(1, CACHE // (groups * r * b * x.shape[2]))
        total = g.new_zeros(groups, b, x.shape[2])
        for start in range(0, n, step):
            part = columns[start : start + step] @ x[start : start + step].mT
            part = part.view(-1, groups, r, b, x.shape[2])
            total += part.square_().sum((0, 2))
        return total.flatten()


class LinearCall(Matrix):
    """`F.linear`."""

    def inputs(self, n: int) -> Tensor:
        """The input itself."""
        x = self._input()
        return x.reshape(n, 1, -1, x.shape[-1]).mT

    def columns(self, g: Tensor, n: int) -> Tensor:
        """What came back."""
        return g.reshape(len(g), n, 1, -1, g.shape[-1]).permute(1, 2, 0, 4, 3)

    def output_factor(self, g: Tensor, n: int) -> Tensor:
        """Without a copy: features are last already."""
        flat = g.reshape(-1, g.shape[-1])
        return (flat.mT @ flat)[None]

    def add_inputs(self, total: Tensor, n: int) -> int:
        """Without a copy."""
        flat = self.x.reshape(-1, self.x.shape[-1])
        total[0].addmm_(flat.mT, flat)
        return len(flat)


class ConvolutionCall(Matrix):
    """`conv1d`, `conv2d` and `conv3d`, with stride, padding, dilation and groups."""

    trailing = False

    def inputs(self, n: int) -> Tensor:
        """The patches that each output position read."""
        patches = self.patches()
        groups = self.options["groups"]
        a = math.prod(self.shape[1:])
        if len(patches) == n:
            return patches.view(n, groups, a, -1)
        return patches.view(n, -1, groups, a, patches.shape[-1]).permute(0, 2, 3, 1, 4).flatten(3)

    def patches(self, examples_first: bool = True) -> Tensor:
        """Patches as `F.unfold` gives them, in any number of dimensions: [batch, channels x kernel, places].

        Args:
            examples_first: False lays all places of all examples side by side: [kernel x channels, batch x places].
        """
        kernel, options = self.shape[2:], self.options
        x = F.pad(self.x, options["padding"]) if any(options["padding"]) else self.x
        steps = zip(kernel, options["stride"], options["dilation"], strict=True)
        for dim, (size, stride, dilation) in enumerate(steps):
            x = x.unfold(2 + dim, dilation * (size - 1) + 1, stride)[..., ::dilation]
        dims = len(kernel)
        places, offsets = range(2, 2 + dims), range(2 + dims, 2 + 2 * dims)
        if not examples_first:
            return x.permute(*offsets, 1, 0, *places).reshape(x.shape[1] * math.prod(kernel), -1)
        return x.permute(0, 1, *offsets, *places).reshape(len(x), x.shape[1] * math.prod(kernel), -1)

    def add_inputs(self, total: Tensor, n: int) -> int:
        """Add the outer products of all patches: from shifted pictures where neighbouring patches share most of theirs.

        Without groups, the channel is the last index of a patch, as it is quicker to make; `order` has the weight's.
        """
        self.check()
        count = self.output[0] * math.prod(self.output[2:])
        if self._keeps_size():
            _add_patches(total[0], self.x, self.shape[2:], self.options["padding"])
        elif self.options["groups"] > 1:
            flat = self.inputs(n).permute(1, 2, 0, 3).flatten(2)
            total.baddbmm_(flat, flat.mT)
        else:
            flat = self.patches(examples_first=False)
            total[0].addmm_(flat, flat.mT)
        return count

    def output_factor(self, g: Tensor, n: int) -> Tensor:
        """A product for each picture where that is no larger than what came back, which needs no copy."""
        groups, b, _ = self.matrices()
        flat = g.reshape(-1, groups, b, math.prod(g.shape[3:]))
        if b <= flat.shape[3]:
            return (flat @ flat.mT).sum(0)
        flat = flat.permute(1, 2, 0, 3).flatten(2)
        return flat @ flat.mT

    def order(self) -> Tensor | None:
        """Where each input of the weight stands in `add_inputs`; None where it stands there in its own order."""
        channels, offsets = self.shape[1], math.prod(self.shape[2:])
        if self.options["groups"] > 1 or offsets == 1:
            return None
        return torch.arange(channels * offsets, device=self.x.device).view(offsets, channels).mT.flatten()

    def _keeps_size(self) -> bool:
        options, kernel = self.options, self.shape[2:]
        plain = options["groups"] == 1 and set(options["stride"]) | set(options["dilation"]) == {1}
        same = [size for k in reversed(kernel) for size in (k // 2, k // 2)] == options["padding"]
        odd = len(kernel) == 2 and all(k % 2 for k in kernel) and max(kernel) > 1
        return plain and same and odd and all(size >= k for size, k in zip(self.x.shape[2:], kernel, strict=True))

    def columns(self, g: Tensor, n: int) -> Tensor:
        """What came back."""
        groups, r = self.options["groups"], len(g)
        b = self.shape[0] // groups
        if g.shape[1] == n:
            return g.reshape(r, n, groups, b, -1).permute(1, 2, 0, 3, 4)
        return g.reshape(r, n, -1, groups, b, math.prod(g.shape[3:])).permute(1, 3, 0, 4, 2, 5).flatten(4)


def _add_patches(factor: Tensor, x: Tensor, kernel: Sequence[int], padding: Sequence[int]) -> None:
    """Add the outer products of all k x k patches of a padded picture, without making the patches.

    What two places of a patch contribute depends on their distance only, but for places at the border: with zeros
    around the picture, laid flat, each distance is one product of the picture with itself shifted, and rows and columns
    at the border are taken off. That is (2k - 1)^2 / 2 products instead of k^4.
    """
    high, wide = kernel
    up, left = high // 2, wide // 2
    padded = F.pad(x, list(padding)).transpose(0, 1).contiguous()
    flat, columns = padded.flatten(1), padded.shape[3]
    channels, _, rows, _ = padded.shape
    total = factor.view(high, wide, channels, high, wide, channels)

    def outer(top: slice, across: slice, dy: int, dx: int) -> Tensor:
        """Sum over some places of what is there times what is (dy, dx) away."""
        first, last = max(across.start, -dx), min(across.stop, columns - dx)
        here = padded[:, :, top, first:last].reshape(channels, -1)
        there = padded[:, :, top.start + dy : top.stop + dy, first + dx : last + dx].reshape(channels, -1)
        return here @ there.mT

    everywhere = slice(left, columns - left)
    for dy in range(high):
        for dx in range(-wide + 1, wide):
            shift = dy * columns + dx
            if shift < 0:
                continue
            full = flat[:, : flat.shape[1] - shift] @ flat[:, shift:].mT
            vertical = {ky: _border(ky, up, rows, dy) for ky in range(high - dy)}
            horizontal = {kx: _border(kx, left, columns, 0) for kx in range(max(0, -dx), wide - max(0, dx))}
            inside = slice(up, rows - up - max(0, dy - up))
            off_rows = {ky: outer(s, everywhere, dy, dx) if s else 0 for ky, s in vertical.items()}
            off_columns = {kx: outer(inside, s, dy, dx) if s else 0 for kx, s in horizontal.items()}
            for ky, some in vertical.items():
                for kx, across in horizontal.items():
                    both = outer(some, across, dy, dx) if some and across else 0
                    value = full - off_rows[ky] - off_columns[kx] + both
                    total[ky, kx, :, ky + dy, kx + dx] += value
                    if shift:
                        total[ky + dy, kx + dx, :, ky, kx] += value.mT


def _border(offset: int, centre: int, size: int, shift: int) -> slice | None:
    """The places within the picture that no patch reads at this offset, as far as their partner is within, too."""
    if offset == centre:
        return None
    if offset > centre:
        return slice(centre, min(offset, size - shift))
    return slice(size - 2 * centre + offset, min(size - centre, size - shift))


class EmbeddingCall(Call):
    """`F.embedding`."""

    def factors(self, name: str) -> tuple[str, int]:
        """One number for each entry, and a factor of what came back."""
        del name
        return "table", self.shape[0] + self.shape[1] ** 2

    def weight_rows(self, g: Tensor, n: int) -> Tensor:
        """Rows of the table."""
        where, example, inverse, summed = self.compressed(g, n)
        del inverse
        rows = g.new_zeros(len(g), n, *self.shape)
        rows[:, example, where] = summed
        return rows

    def compressed(self, g: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What came back to each entry that an example read, once for each pair of both.

        Returns:
            The entries, the examples, which pair each position belongs to, and what came back [r, pairs, width].
        """
        ids = self._input().reshape(n, -1)
        example = torch.arange(n, device=ids.device)[:, None].expand_as(ids)
        pairs, inverse = torch.unique(example * self.shape[0] + ids, return_inverse=True)
        flat = g.reshape(len(g), -1, g.shape[-1])
        summed = flat.new_zeros(len(g), len(pairs), g.shape[-1]).index_add_(1, inverse.flatten(), flat)
        where = pairs % self.shape[0]
        if (padding := self.options["padding"]) is not None:
            summed[:, where == padding] = 0  # as torch has it: the entry for padding is never changed
        return where, pairs // self.shape[0], inverse, summed

    def diagonal(self, name: str, g: Tensor, n: int) -> Tensor:
        """Only the entries that were read."""
        g = g.transpose(1, 2) if self.second else g
        where, _, _, summed = self.compressed(g, n)
        return g.new_zeros(self.shape).index_add_(0, where, summed.square().sum(0)).flatten()


class NormCall(Call):
    """Layer, RMS, batch and group normalisation: the weight multiplies what `options["plain"]` gives for the input."""

    def weight_rows(self, g: Tensor, n: int) -> Tensor:
        """Rows of the weight."""
        return self._summed(g * self.options["plain"](self.x).transpose(0, int(self.second)), n)

    def bias_rows(self, g: Tensor, n: int) -> Tensor:
        """Rows of the bias."""
        return self._summed(g, n)

    def _summed(self, g: Tensor, n: int) -> Tensor:
        if not self.trailing:
            return self.gathered(g, n)
        return g.reshape(len(g), n, -1, *self.shape).sum(2)


class ChannelNormCall(NormCall):
    """Normalisation with a weight for each channel, along the second dimension."""

    trailing = False


class BroadcastCall(Call):
    """A parameter that is added to a tensor or multiplies it, the same for all examples."""

    trailing = False

    def weight_rows(self, g: Tensor, n: int) -> Tensor:
        """Rows of a parameter that multiplies."""
        return self.bias_rows(g * self.x, n)

    def bias_rows(self, g: Tensor, n: int) -> Tensor:
        """Rows of a parameter that is added."""
        padded = (1,) * (g.ndim - 1 - len(self.shape)) + self.shape
        shared = [1 + dim for dim, size in enumerate(padded) if dim and size == 1]
        g = g.sum(shared, keepdim=True) if shared else g
        return g.reshape(len(g), n, -1, *self.shape).sum(2)
