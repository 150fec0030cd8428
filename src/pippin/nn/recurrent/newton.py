r"""Newton's method for nonlinear recurrences $h_t = f(h_{t-1}, x_t)$, parallel over time.

Notable here:
- the states of all times are the unknowns of one system. Its Jacobian has ones on the diagonal and $-J_t$ below, so a
  Newton step is a linear recurrence: $d_t = J_t d_{t-1} + r_t$ with $r_t = f(h_{t-1}, x_t) - h_t$
- after k steps the first k + 1 states are exact, whatever f is; how soon the others converge depends on f alone
- the residual is always checked: a solve ends when it is small, and never counts as converged when it is not. The rest
  is computed step by step, from the first wrong step
- long sequences are solved in windows, each from the final state of the previous one: they stay in the processor's
  cache, and a hard stretch costs only its own iterations
- the gradient is one linear scan backward in time and one reverse pass of f over all times. It does not depend on how
  the states were found, so the sequential scan needs no graph of its own either

Source: ParaRNN, arXiv:2510.21450; the method without structure is DEER, arXiv:2309.12252; scaled Jacobians are those of
arXiv:2407.19115, whose trust region they simplify.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

import torch
from annotated_types import Ge, Le
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from pippin.core.checks import PositiveInt, checked
from pippin.core.errors import InvalidArgument, NewtonDivergence, NewtonFallback
from pippin.nn.recurrent.scan import scan, times

Jacobian = Literal["diagonal", "dense"] | tuple[Literal["block"], PositiveInt]
_WINDOW = 1 << 18
"""Approximate elements of the states of a window on a CPU; a megabyte."""
_SHORTEST = 64
"""Minimum steps of a window on a CPU."""


@checked
@dataclass(frozen=True)
class Newton:
    """Settings of the solver, and what happens if it does not converge.

    Args:
        max_iterations: maximum Newton steps in each window. As many as a window has steps always suffice.
        tolerance: a window is solved when no state differs from f of the one before it by more than this, in units of
            the largest state or 1, whichever is larger. float32 cannot reach much less than 1e-6.
        on_failure: "sequential" computes what is not solved step by step, with a `NewtonFallback` warning; "raise"
            raises `NewtonDivergence`; "keep" returns the current states.
        damping: Jacobians are multiplied by 1 minus this: 0 is Newton's method, 1 fixed-point iteration. The solution
            is the same, and so is the exact beginning after k steps.
        window: steps of the sequence that are solved together; None for all on a GPU, and on a CPU for as many as fit
            into its cache.
    """

    max_iterations: PositiveInt = 10
    tolerance: Annotated[float, Ge(0)] = 1e-6
    on_failure: Literal["sequential", "raise", "keep"] = "sequential"
    damping: Annotated[float, Ge(0), Le(1)] = 0.0
    window: PositiveInt | None = None


@dataclass(frozen=True)
class SolveReport:
    """Report of a solve.

    Attributes:
        iterations: Newton iterations in the window with the most; 0 if everything was computed step by step.
        residual: the largest residual of a window, in the units of the tolerance; NaN if states were NaN.
        fell_back: whether a part had to be computed step by step.
    """

    iterations: int
    residual: float
    fell_back: bool


class Scratch:
    """Named buffers that every window reuses: fresh pages take longer than the arithmetic on them."""

    def __init__(self, like: Tensor) -> None:
        self._like, self._held = like, dict[str, Tensor]()

    def __call__(self, name: str, *shape: int) -> Tensor:
        """A tensor of this shape, uninitialized."""
        held, size = self._held.get(name), math.prod(shape)
        if held is None or held.numel() < size:
            held = self._held[name] = self._like.new_empty(size)
        return held[:size].view(shape)


@runtime_checkable
class RecurrenceRule(Protocol):
    """One step of a recurrence with its derivatives, for many times at once.

    States are (batch, time, *state) with the dimensions of `pippin.nn.recurrent.scan.linear_scan`,
    inputs (batch, time, ...).
    """

    def value(self, before: Tensor, x: Tensor, parameters: Sequence[Tensor], scratch: Scratch) -> tuple[Tensor, Any]:
        """f, and the intermediate values for its derivatives; both are valid until the next call."""

    def slope(self, found: Any, scratch: Scratch) -> Tensor:
        """The Jacobian of f with respect to the state, as matrices for a scan."""

    def pull(self, found: Any, worth: Tensor, of_x: Tensor, scratch: Scratch) -> list[Tensor]:
        """Gradients of the inputs (written into ``of_x``) and of the parameters (returned) from those of the states."""

    def walk(
        self, states: Tensor, x: Tensor, parameters: Sequence[Tensor], steps: range, starts: Tensor | None
    ) -> None:
        """Fill ``states[:, t + 1]`` from ``states[:, t]`` for each of the steps; a true ``starts[:, t]`` forgets."""

    def bound(self, initial: Tensor) -> float | None:
        """A bound on all states, given the first; None if there is none."""


def solve(
    rule: RecurrenceRule,
    x: Tensor,
    initial: Tensor,
    parameters: Sequence[Tensor],
    newton: Newton | None,
    starts: Tensor | None = None,
    *,
    quiet: bool = False,
) -> tuple[Tensor, SolveReport]:
    """All states of a recurrence, with gradients; ``newton`` None uses a sequential scan, ``quiet`` disables warnings.

    Raises:
        NewtonDivergence: a window did not converge, and ``newton`` says to raise.
    """
    kept: list[SolveReport] = []
    with torch.autocast(x.device.type, enabled=False):
        states: Tensor = _Solve.apply(rule, newton, quiet, kept, starts, initial, x, *parameters)  # type: ignore[no-untyped-call]
    return states, kept[0]


class _Solve(torch.autograd.Function):
    """Forward: by Newton's method, or step by step. Backward: the same for both. Saves inputs and states."""

    @staticmethod
    def forward(
        ctx: Any,
        rule: RecurrenceRule,
        newton: Newton | None,
        quiet: bool,
        kept: list[SolveReport],
        starts: Tensor | None,
        initial: Tensor,
        x: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        batch, time = x.shape[:2]
        # one place more than there are steps: the states and the previous states are two views
        states = initial.new_empty(batch, time + 1, *initial.shape[1:])
        states[:, 0] = initial
        if newton is None:
            rule.walk(states, x, parameters, range(time), starts)
            kept.append(SolveReport(0, 0.0, False))
        else:
            kept.append(_Solver(rule, newton, states, x, parameters, starts).run(quiet))
        ctx.rule, ctx.newton = rule, newton or Newton()
        ctx.save_for_backward(states, starts, x, *parameters)
        return states[:, 1:]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        states, starts, x, *parameters = ctx.saved_tensors
        with torch.autocast(x.device.type, enabled=False):
            solver = _Solver(ctx.rule, ctx.newton, states, x, parameters, starts)
            of_initial, of_x, of_parameters = solver.pull(outer[0])
        return None, None, None, None, None, of_initial, of_x, *of_parameters


class _Solver:
    """A recurrence and a buffer for its states, whose first is given; (batch, time + 1, *state)."""

    def __init__(
        self,
        rule: RecurrenceRule,
        newton: Newton,
        states: Tensor,
        x: Tensor,
        parameters: Sequence[Tensor],
        starts: Tensor | None,
    ) -> None:
        self.rule, self.newton, self.states, self.x = rule, newton, states, x
        self.parameters, self.starts, self.scratch = parameters, starts, Scratch(states)
        self.time, window = x.shape[1], newton.window
        if window is None:
            size = max(1, states[:, 0].numel())
            window = self.time if states.device.type != "cpu" else max(_SHORTEST, _WINDOW // size)
        begins = range(0, self.time, window)
        self.windows = [slice(begin, min(begin + window, self.time)) for begin in begins]

    def run(self, quiet: bool) -> SolveReport:
        """Fill the states, window by window."""
        newton, most, worst = self.newton, 0, 0.0
        bound = self.rule.bound(self.states[:, 0])
        for part in self.windows:
            iterations, residual = self._solve(part, bound)
            most, worst = max(most, iterations), residual if math.isnan(residual) else max(worst, residual)
            if residual <= newton.tolerance or newton.on_failure == "keep":
                continue
            message = (
                f"Newton's method left a residual of {residual:.3g} after {iterations} iterations on steps "
                f"{part.start} to {part.stop - 1} of {self.time} (tolerance {newton.tolerance:.3g})"
            )
            if newton.on_failure == "raise":
                raise NewtonDivergence(
                    f"{message}; allow more iterations, take a smaller window, damp it, keep the recurrent weights "
                    "small, or set on_failure='sequential'",
                    iterations=iterations,
                    residual=residual,
                )
            begin = part.start + self._first_wrong(part)
            if not quiet:
                warnings.warn(
                    f"{message}; steps from {begin} on were computed one by one", NewtonFallback, stacklevel=2
                )
            self.rule.walk(self.states, self.x, self.parameters, range(begin, self.time), self.starts)
            return SolveReport(most, worst, True)
        return SolveReport(most, worst, False)

    def pull(self, g: Tensor) -> tuple[Tensor | None, Tensor, list[Tensor]]:
        """Gradients of the first state, the inputs and the parameters from those of the states."""
        of_x, totals, after = torch.empty_like(self.x), list[Tensor](), None
        for part in reversed(self.windows):
            found = self._value(part)[1]
            j = self._forget(self.rule.slope(found, self.scratch), part)
            worth = self.scratch("worth", *g[:, part].shape)
            torch.add(g[:, part.stop - 1], 0 if after is None else after, out=worth[:, -1])
            diagonal = j.ndim == worth.ndim
            turned = j if diagonal else j.transpose(2, 3)
            if worth.shape[1] > 1:
                direct = g[:, part.start : part.stop - 1]
                scan(turned[:, 1:], direct, worth[:, -1], reverse=True, out=worth[:, :-1])
            after = times(turned[:, 0], worth[:, 0], diagonal)
            more = self.rule.pull(found, worth, of_x[:, part], self.scratch)
            totals = [total.add_(one) for total, one in zip(totals, more, strict=True)] if totals else more
        return after, of_x, totals

    def _value(self, part: slice) -> tuple[Tensor, Any]:
        before = self._forget(self.states[:, part], part)
        return self.rule.value(before, self.x[:, part], self.parameters, self.scratch)

    def _forget(self, values: Tensor, part: slice) -> Tensor:
        """The states, with zeros where a new sequence begins."""
        if self.starts is None:
            return values
        return values.masked_fill(self.starts[:, part].view(*values.shape[:2], *[1] * (values.ndim - 2)), 0.0)

    def _solve(self, part: slice, bound: float | None) -> tuple[int, float]:
        """Fill one window; returns the number of iterations and the residual."""
        now = self.states[:, part.start + 1 : part.stop + 1]
        # only the state before the window is known; zero is as good a guess as any for the others
        guess = self.scratch("guess", *now.shape).zero_()
        guess[:, 0] = self.states[:, part.start]
        guess = self._forget(guess, part)
        now.copy_(self.rule.value(guess, self.x[:, part], self.parameters, self.scratch)[0])
        for iteration in range(self.newton.max_iterations + 1):
            value, found = self._value(part)
            residual = value.sub_(now)
            left = _largest(residual) / max(1.0, _largest(now) if bound is None else bound)
            if left <= self.newton.tolerance or iteration == self.newton.max_iterations:
                break
            if bound is None and not math.isfinite(left):
                break  # it cannot recover
            j = self._forget(self.rule.slope(found, self.scratch), part)
            if self.newton.damping:
                j.mul_(1 - self.newton.damping)
            now.add_(scan(j, residual, None, out=self.scratch("change", *now.shape)))
            if bound is not None:  # the range of the true states; overflowed ones are reset
                now.nan_to_num_(0.0).clamp_(-bound, bound)
        return iteration, left

    def _first_wrong(self, part: slice) -> int:
        """The first step of a window whose state is not f of the one before it."""
        error = self._value(part)[0].sub_(self.states[:, part.start + 1 : part.stop + 1]).abs_()
        solved = (error <= self.newton.tolerance).movedim(1, 0).flatten(1).all(1)
        return int((~solved).nonzero()[0])


def _largest(x: Tensor) -> float:
    """max|x|; NaN if there is one."""
    return max(float(x.amax()), -float(x.amin())) if x.numel() else 0.0


# --- any function -----------------------------------------------------------------------------------------------------


class _Traced:
    """Derivatives of a function of rows, by reverse passes; ``size`` of them for the Jacobian."""

    def __init__(self, f: Callable[..., Tensor], shape: torch.Size, jacobian: Jacobian) -> None:
        self.f, self.shape, self.jacobian = f, shape, jacobian

    def value(
        self, before: Tensor, x: Tensor, parameters: Sequence[Tensor], scratch: Scratch | None = None
    ) -> tuple[Tensor, Any]:
        with torch.enable_grad():
            before = before.reshape(-1, *self.shape).detach().requires_grad_()
            inputs = [x.flatten(0, 1).detach(), *(parameter.detach() for parameter in parameters)]
            inputs = [one.requires_grad_() if one.is_floating_point() else one for one in inputs]
            out = self.f(before, *inputs)
        return out.detach().view(*x.shape[:2], *self._state).clone(), (out, before, inputs, x.shape[:2])

    def slope(self, found: Any, scratch: Scratch | None = None) -> Tensor:
        out, before, _, lead = found
        if self.jacobian == "diagonal":
            return self._pass(out, before, torch.ones_like(out)).view(*lead, *self._state)
        rows = len(self._state) and self._state[0]
        flat = out.view(len(out), *self._state)
        columns = []
        for row in range(rows):
            seed = torch.zeros_like(flat)
            seed[:, row] = 1
            columns.append(self._pass(out, before, seed.view_as(out)).view(flat.shape))
        return torch.stack(columns, 1).view(*lead, rows, *self._state)

    def pull(self, found: Any, worth: Tensor, of_x: Tensor, scratch: Scratch | None = None) -> list[Tensor]:
        out, _, inputs, _ = found
        wanted = [one for one in inputs if one.requires_grad]
        grads = torch.autograd.grad(out, wanted, worth.reshape(out.shape), allow_unused=True)
        by_input = dict(zip(map(id, wanted), grads, strict=True))
        first, *others = (by_input.get(id(one)) for one in inputs)
        of_x.zero_() if first is None else of_x.copy_(first.view(of_x.shape))
        return [torch.zeros_like(one) if g is None else g for one, g in zip(inputs[1:], others, strict=True)]

    def walk(
        self, states: Tensor, x: Tensor, parameters: Sequence[Tensor], steps: range, starts: Tensor | None
    ) -> None:
        for t in steps:
            before = states[:, t].reshape(-1, *self.shape)
            if starts is not None:
                before = before.masked_fill(starts[:, t].view(-1, *[1] * len(self.shape)), 0.0)
            states[:, t + 1] = self.f(before, x[:, t], *parameters).view(states[:, t].shape)

    def bound(self, initial: Tensor) -> float | None:
        return None

    @property
    def _state(self) -> tuple[int, ...]:
        """The dimensions of the state in a scan."""
        return (self.shape.numel(), 1) if self.jacobian == "dense" else tuple(self.shape)

    @staticmethod
    def _pass(out: Tensor, before: Tensor, seed: Tensor) -> Tensor:
        (grad,) = torch.autograd.grad(out, before, seed, retain_graph=True, allow_unused=True)
        return torch.zeros_like(before) if grad is None else grad

    def check(self, x: Tensor, initial: Tensor, parameters: Sequence[Tensor]) -> None:
        """Check one step of the first row: shapes, gradients that would be lost, and the declared structure of J."""
        state = torch.linspace(-0.9, 0.8, initial[0].numel(), dtype=initial.dtype, device=initial.device)
        with torch.enable_grad():
            plain = self.f(state.view(1, *self.shape), x[:1, 0].detach(), *(one.detach() for one in parameters))
        if plain.shape != (1, *self.shape):
            raise InvalidArgument(f"f makes states of shape {tuple(plain.shape[1:])} of {tuple(self.shape)}")
        if plain.requires_grad:
            raise InvalidArgument(
                "f reads tensors that want gradients and are not among its arguments, so they would get none: give "
                "them as parameters"
            )
        found = self.value(state.view(1, 1, *self._state), x[:1, :1], parameters)[1]
        j = self.slope(found)[:, 0]
        seed = torch.linspace(0.5, 1.5, state.numel(), dtype=state.dtype, device=state.device).view(1, *self._state)
        true = self._pass(found[0], found[1], seed.view(1, *self.shape)).view(1, *self._state)
        diagonal = self.jacobian == "diagonal"
        told = times(j if diagonal else j.transpose(1, 2), seed, diagonal)
        if not torch.allclose(told, true, rtol=1e-3, atol=1e-4):
            raise InvalidArgument(
                f"the Jacobian of f is not {self.jacobian}: states depend on others before them; say 'dense', or "
                "('block', m) where only the m of one channel do"
            )


@checked
def parallel_recurrence(
    f: Callable[..., Tensor],
    x: Float[Tensor, "batch time ..."],
    initial: Float[Tensor, " batch *state"],
    parameters: Sequence[Tensor] = (),
    *,
    jacobian: Jacobian = "diagonal",
    newton: Newton = Newton(),
    starts: Bool[Tensor, "batch time"] | None = None,
) -> tuple[Float[Tensor, "batch time *state"], SolveReport]:
    """All states of h_t = f(h_{t-1}, x_t, *parameters), solved in parallel; differentiable in all but f.

    Args:
        f: function of states (rows, *state) and inputs (rows, ...) that returns states; rows are independent.
        x: inputs.
        initial: $h_0$.
        parameters: further arguments of f that need gradients.
        jacobian: structure of the Jacobian. "diagonal": each state depends on itself alone. ("block", m): states are m
            x channels, and those of a channel depend on each other. "dense": any structure, at a cost that grows with
            the cube of their number.
        newton: settings of the solver.
        starts: true where the state before the step is zero, for example at a new document.

    Returns:
        The states, and the report.

    Raises:
        InvalidArgument: shapes that do not fit, no steps, a Jacobian with another structure than declared (checked in
            one step), or an f that reads tensors with gradients that are not its arguments.
        NewtonDivergence: it did not converge, and ``newton`` says to raise.

    >>> x = torch.randn(2, 100, 3, generator=torch.Generator().manual_seed(0))
    >>> weight = torch.tensor([0.5, -0.8, 0.9])
    >>> states, report = parallel_recurrence(lambda h, x, w: torch.tanh(w * h + x), x, torch.zeros(2, 3), [weight])
    >>> residual = states[:, 1:] - torch.tanh(weight * states[:, :-1] + x[:, 1:])
    >>> bool(residual.abs().max() < 1e-6), report.iterations < 10
    (True, True)
    """
    check_steps(x, starts)
    if len(initial) != len(x):
        raise InvalidArgument(f"{len(initial)} initial states were given for {len(x)} sequences")
    block = jacobian[1] if isinstance(jacobian, tuple) else None
    if block is not None and (initial.ndim != 3 or initial.shape[1] != block):
        raise InvalidArgument(f"states of shape {tuple(initial.shape[1:])} are not blocks of {block} x channels")
    rule = _Traced(f, initial.shape[1:], jacobian)
    rule.check(x, initial, parameters)
    states, report = solve(rule, x, initial.reshape(len(x), *rule._state), list(parameters), newton, starts)
    return states.reshape(*x.shape[:2], *initial.shape[1:]), report


def check_steps(x: Tensor, starts: Tensor | None) -> None:
    """Check that there are steps, and that ``starts`` fits them.

    Raises:
        InvalidArgument: there are none, or ``starts`` has another shape.
    """
    if x.ndim < 2 or x.shape[1] == 0:
        raise InvalidArgument(f"inputs of shape {tuple(x.shape)} have no steps; they are batch, time and the rest")
    if starts is not None and starts.shape != x.shape[:2]:
        raise InvalidArgument(f"starts of shape {tuple(starts.shape)} do not fit inputs of shape {tuple(x.shape)}")
