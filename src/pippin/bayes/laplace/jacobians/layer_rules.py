"""Rules for the Jacobian rows of each layer's weights, from the layer's input and the gradient at its output.

Notable here:
- rows of a matrix are outer products of input and gradient, so sums of their squares are products of squares: with one
  position per example, no row is ever formed
- the patch factor of a size-preserving convolution is computed from shifted images, without forming patches
- the example dimension of a call (first, second, or flattened with the positions) is not assumed: `Call.settle` tests
  which parts of the output depend on which example
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
"""Largest number of elements of a temporary: 16 MiB in float32."""
CACHE = 1 << 18
"""Largest number of elements of a temporary that is read again at once: 1 MiB in float32, about a core's L2 cache."""


@dataclass(eq=False)
class Call:
    """One use of parameters by a function that has a rule.

    Args:
        weight: name of the parameter that multiplies; None if it is not selected.
        bias: name of the parameter that is added; None if it is not selected.
        x: the input.
        options: further arguments that the rule needs.
        shape: shape of the weight, or of the bias if the weight is not selected.
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
    """Whether examples are along the second dimension."""
    factor: float = 1.0
    """A scalar that the weight was multiplied by before its use."""
    kept: Tensor | None = None
    """The cached result of `inputs`."""

    trailing: ClassVar[bool] = True
    """Whether features are along the last dimensions, not along the second."""

    def record(self, result: Tensor) -> None:
        """Store the result's edge in the autograd graph, before any in-place operation on the result."""
        self.edge, self.output, self.version = get_gradient_edge(result), tuple(result.shape), self.x._version

    @property
    def names(self) -> list[str]:
        """The selected parameters of this call."""
        return [name for name in (self.weight, self.bias) if name is not None]

    def settle(self, probe: Tensor, touched: Tensor) -> bool:
        """Find the example dimension from gradients of only the ``touched`` examples; False if there is none."""
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
        """Check that the input was not overwritten in place.

        Raises:
            InvalidArgument: it was.
        """
        if self.x._version != self.version:
            raise InvalidArgument(
                f"the input of the layer of {self.names[0]} is overwritten in place after the layer used it; "
                "take inplace=True (or +=) out of the operation after it"
            )

    def rows(self, name: str, g: Tensor, n: int) -> Tensor:
        """Jacobian rows of one parameter.

        Args:
            name: name of the parameter.
            g: gradients at the output, for each column: [columns, *output].
            n: number of examples.

        Returns:
            Rows [columns, n, *shape of the parameter].
        """
        self.check()
        g = g.transpose(1, 2) if self.second else g
        return self.bias_rows(g, n) if name == self.bias else self.weight_rows(g, n)

    def diagonal(self, name: str, g: Tensor, n: int) -> Tensor:
        """Sum over examples and columns of the squared rows of one parameter, flat."""
        rows = self.rows(name, g, n)
        return rows.reshape(len(g) * n, -1).square().sum(0)

    def factors(self, name: str) -> tuple[str, int]:
        """The kind of a parameter's Kronecker factors ("matrix", "table" or "other"), and their number of elements."""
        del name
        return "other", math.prod(self.shape[-1:]) ** 2

    def weight_rows(self, g: Tensor, n: int) -> Tensor:
        """Rows of the weight."""
        raise NotImplementedError

    def bias_rows(self, g: Tensor, n: int) -> Tensor:
        """Rows of the bias: gradients summed over positions."""
        return self.gathered(g, n)

    def gathered(self, g: Tensor, n: int) -> Tensor:
        """Sum over all positions of an example: [columns, n, features]."""
        r = len(g)
        if self.trailing:
            return g.reshape(r, n, -1, g.shape[-1]).sum(2)
        return g.reshape(r, n, -1, g.shape[2], math.prod(g.shape[3:])).sum((2, 4))

    def _input(self) -> Tensor:
        return self.x.transpose(0, 1) if self.second else self.x


class MatrixCall(Call):
    """A call whose weight is a matrix [b, a] for each group.

    Inputs are [n, groups, a, positions], gradient columns [n, groups, r, b, positions], the weight [groups, b, a].
    """

    def matrices(self) -> tuple[int, int, int]:
        """The number of groups, and outputs b and inputs a of each group."""
        groups = self.options.get("groups", 1)
        return groups, self.shape[0] // groups, math.prod(self.shape[1:])

    def factors(self, name: str) -> tuple[str, int]:
        """Two factors for each group of a weight; a bias has a block of its own."""
        groups, b, a = self.matrices()
        return ("matrix", groups * (a * a + b * b)) if name == self.weight else ("other", (groups * b) ** 2)

    def inputs(self, n: int) -> Tensor:
        """The vectors that the weight multiplied: [n, groups, a, positions]."""
        raise NotImplementedError

    def columns(self, g: Tensor, n: int) -> Tensor:
        """The gradients at the output: [n, groups, r, b, positions]."""
        raise NotImplementedError

    def kept_inputs(self, n: int) -> Tensor:
        """`inputs`, cached for further columns unless they are very large."""
        if self.kept is None:
            x = self.inputs(n)
            if x.numel() > 8 * CHUNK:
                return x
            self.kept = x
        return self.kept

    def output_factor(self, g: Tensor, n: int) -> Tensor:
        """Sum of the outer products of gradients over examples, columns and positions: [groups, b, b]."""
        raise NotImplementedError

    def add_inputs(self, total: Tensor, n: int) -> int:
        """Add the outer products of the inputs at all positions to [groups, a, a]; returns their number."""
        raise NotImplementedError

    def order(self) -> Tensor | None:
        """The index in `add_inputs` of each input of the weight; None if the order is the same."""
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
        """Rows of some elements of the weight, given by flat indices: [r, n, elements]."""
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
        """Sum over examples and columns of the squared rows, without storing them."""
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


class LinearCall(MatrixCall):
    """`F.linear`."""

    def inputs(self, n: int) -> Tensor:
        """The input, one vector for each position."""
        x = self._input()
        return x.reshape(n, 1, -1, x.shape[-1]).mT

    def columns(self, g: Tensor, n: int) -> Tensor:
        """The gradients at the output."""
        return g.reshape(len(g), n, 1, -1, g.shape[-1]).permute(1, 2, 0, 4, 3)

    def output_factor(self, g: Tensor, n: int) -> Tensor:
        """The sum of outer products, without a copy as features are last."""
        flat = g.reshape(-1, g.shape[-1])
        return (flat.mT @ flat)[None]

    def add_inputs(self, total: Tensor, n: int) -> int:
        """Add the outer products of all inputs, without a copy."""
        flat = self.x.reshape(-1, self.x.shape[-1])
        total[0].addmm_(flat.mT, flat)
        return len(flat)


class ConvolutionCall(MatrixCall):
    """`conv1d`, `conv2d` and `conv3d`, with stride, padding, dilation and groups."""

    trailing = False

    def inputs(self, n: int) -> Tensor:
        """The input patches of all output positions."""
        patches = self.patches()
        groups = self.options["groups"]
        a = math.prod(self.shape[1:])
        if len(patches) == n:
            return patches.view(n, groups, a, -1)
        return patches.view(n, -1, groups, a, patches.shape[-1]).permute(0, 2, 3, 1, 4).flatten(3)

    def patches(self, examples_first: bool = True) -> Tensor:
        """Patches like those of `F.unfold`, in any number of dimensions: [batch, channels x kernel, positions].

        Args:
            examples_first: if False, the shape is [kernel x channels, batch x positions].
        """
        kernel, options = self.shape[2:], self.options
        x = F.pad(self.x, options["padding"]) if any(options["padding"]) else self.x
        steps = zip(kernel, options["stride"], options["dilation"], strict=True)
        for dim, (size, stride, dilation) in enumerate(steps):
            x = x.unfold(2 + dim, dilation * (size - 1) + 1, stride)[..., ::dilation]
        dims = len(kernel)
        positions, offsets = range(2, 2 + dims), range(2 + dims, 2 + 2 * dims)
        if not examples_first:
            return x.permute(*offsets, 1, 0, *positions).reshape(x.shape[1] * math.prod(kernel), -1)
        return x.permute(0, 1, *offsets, *positions).reshape(len(x), x.shape[1] * math.prod(kernel), -1)

    def add_inputs(self, total: Tensor, n: int) -> int:
        """Add the outer products of all patches, from shifted images where the convolution preserves the size.

        Without groups the channel is the last index within a patch, which is faster; see `order`.
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
        """The sum of outer products; one product for each image, without a copy, where that is not larger."""
        groups, b, _ = self.matrices()
        flat = g.reshape(-1, groups, b, math.prod(g.shape[3:]))
        if b <= flat.shape[3]:
            return (flat @ flat.mT).sum(0)
        flat = flat.permute(1, 2, 0, 3).flatten(2)
        return flat @ flat.mT

    def order(self) -> Tensor | None:
        """The index in `add_inputs` of each input of the weight; None if the order is the same."""
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
        """The gradients at the output."""
        groups, r = self.options["groups"], len(g)
        b = self.shape[0] // groups
        if g.shape[1] == n:
            return g.reshape(r, n, groups, b, -1).permute(1, 2, 0, 3, 4)
        return g.reshape(r, n, -1, groups, b, math.prod(g.shape[3:])).permute(1, 3, 0, 4, 2, 5).flatten(4)


def _add_patches(factor: Tensor, x: Tensor, kernel: Sequence[int], padding: Sequence[int]) -> None:
    """Add the outer products of all k x k patches of a padded image, without forming the patches.

    Except at the border, the contribution of two offsets within a patch depends only on their difference: for each
    difference one product of the flattened, zero-padded image with a shifted copy of itself is computed, and the
    contributions of border rows and columns are subtracted. These are (2k - 1)^2 / 2 products instead of k^4.
    """
    high, wide = kernel
    up, left = high // 2, wide // 2
    padded = F.pad(x, list(padding)).transpose(0, 1).contiguous()
    flat, columns = padded.flatten(1), padded.shape[3]
    channels, _, rows, _ = padded.shape
    total = factor.view(high, wide, channels, high, wide, channels)

    def outer(top: slice, across: slice, dy: int, dx: int) -> Tensor:
        """Sum over some pixels of the product of a pixel with the one at offset (dy, dx)."""
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


def _border(offset: int, center: int, size: int, shift: int) -> slice | None:
    """The rows or columns of the image that no patch has at this offset and whose shifted partner is in the image."""
    if offset == center:
        return None
    if offset > center:
        return slice(center, min(offset, size - shift))
    return slice(size - 2 * center + offset, min(size - center, size - shift))


class EmbeddingCall(Call):
    """`F.embedding`."""

    def factors(self, name: str) -> tuple[str, int]:
        """A count for each entry, and a factor of the gradients."""
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
        """The gradients summed over each distinct pair of an example and an entry that it uses.

        Returns:
            The entry and the example of each pair, the pair of each position, and the gradients [r, pairs, width].
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
        """Sum over examples and columns of the squared rows, from the used entries only."""
        g = g.transpose(1, 2) if self.second else g
        where, _, _, summed = self.compressed(g, n)
        return g.new_zeros(self.shape).index_add_(0, where, summed.square().sum(0)).flatten()


class NormCall(Call):
    """Layer, RMS, batch and group normalization; `options["plain"]` computes it without weight and bias."""

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
    """Normalization with a weight for each channel, along the second dimension."""

    trailing = False


class BroadcastCall(Call):
    """A parameter that is added to a tensor, or multiplies it, with broadcasting over examples."""

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
