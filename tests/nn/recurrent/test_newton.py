"""Newton's method for recurrences against plain loops, torch's own cells and central differences; what it does when
it fails."""

import copy
import warnings

import jaxtyping
import pytest
import torch
from torch import nn

from pippin.core.errors import InvalidArgument, NewtonDivergence, NewtonFallback
from pippin.nn.recurrent.cells import SHORT, WIDE, ParaGRU, ParallelCell, ParaLSTM
from pippin.nn.recurrent.newton import Newton, parallel_recurrence

CELLS = [ParaGRU, ParaLSTM]
EXACT = Newton(max_iterations=60, tolerance=1e-13)


def loop(cell, x, state=None, starts=None):
    """Step by step, by the cell's own `step`, with torch's own gradients."""
    state = cell.initial_state(len(x), dtype=x.dtype) if state is None else state
    outputs = []
    for t in range(x.shape[1]):
        if starts is not None:
            state = torch.where(starts[:, t].view(-1, *[1] * (state.ndim - 1)), 0.0, state)
        y, state = cell.step(x[:, t], state)
        outputs.append(y)
    return torch.stack(outputs, 1), state


def make(kind, *, inputs=6, size=8, scale=1.0, seed=0, dtype=torch.float64, **settings):
    cell = kind(inputs, size, **settings)
    cell.initialize(torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for matrix in (cell.recurrent, cell.peephole):
            if matrix is not None:
                matrix.mul_(scale)
    return cell.to(dtype)


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("time", [1, 2, 37, 256])
@pytest.mark.parametrize(
    ("heads", "window", "mode"), [(1, None, "parallel"), (2, 16, "parallel"), (2, None, "sequential")]
)
def test_outputs_and_all_gradients_are_those_of_the_loop(kind, time, heads, window, mode):
    newton = Newton(60, 1e-13, window=window)
    cell = make(kind, heads=heads, newton=newton, mode=mode, scale=3.0)
    x, before = random(3, time, 6).requires_grad_(), (random(3, *cell.state_shape, seed=1) * 0.5).requires_grad_()
    starts = torch.rand(3, time, generator=torch.Generator().manual_seed(2)) < 0.1
    weight, given = random(3, time, 8, seed=3), [x, before, *cell.parameters()]

    def results(run):
        y, state = run()
        return [y, state, *torch.autograd.grad((y * weight).sum() + state.square().sum(), given)]

    ours = results(lambda: cell(x, before, starts=starts))
    theirs = results(lambda: loop(cell, x, before, starts))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", CELLS)
def test_the_loop_itself_has_the_gradients_of_differences(kind):
    cell = make(kind, inputs=3, size=4, scale=2.0, newton=EXACT, mode="parallel")
    names = [name for name, _ in cell.named_parameters()]

    def outputs(x, *values):
        y, state = torch.func.functional_call(cell, dict(zip(names, values, strict=True)), (x,))
        return y, state

    assert torch.autograd.gradcheck(outputs, [random(2, 5, 3).requires_grad_(), *cell.parameters()], fast_mode=True)


def gru(cell, x):
    """The published equations, gate by gate, in double loops over heads and channels."""
    heads, inputs, _ = cell.weight.shape
    width = cell.size // heads
    weight = cell.weight.view(heads, inputs, 3, width)
    h = torch.zeros(cell.size, dtype=x.dtype)
    for x_t in x:
        new = h.clone()
        for channel in range(cell.size):
            head, place = divmod(channel, width)
            part = x_t[head * inputs : (head + 1) * inputs]
            u = [part @ weight[head, :, gate, place] + cell.bias[gate, 0, channel] for gate in range(3)]
            a = cell.recurrent[:, 0, channel]
            z, r = torch.sigmoid(a[0] * h[channel] + u[0]), torch.sigmoid(a[1] * h[channel] + u[1])
            n = torch.tanh(a[2] * (h[channel] * r) + u[2])
            new[channel] = (1 - z) * h[channel] + z * n
        h = new
    return h


def test_the_cell_is_the_published_one():
    cell, x = make(ParaGRU, heads=2, scale=2.0), random(1, 5, 6)
    with torch.no_grad():
        torch.testing.assert_close(loop(cell, x)[1][0], gru(cell, x[0]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", CELLS)
def test_after_k_iterations_the_first_k_plus_1_states_are_exact_and_no_more_is_promised(kind):
    cell = make(kind, scale=8.0, mode="parallel")
    x = 3 * random(2, 30, 6)
    exact = loop(cell, x)[0]
    wrong = []
    for k in (1, 4, 9):
        cell.newton = Newton(k, 0.0, "keep")
        error = (cell(x)[0] - exact).detach().abs().amax((0, 2))
        assert error[: k + 1].max() < 1e-12
        wrong.append(float(error.max()))
    assert wrong[0] > 1e-3
    cell.newton = Newton(30, 0.0, "keep")
    torch.testing.assert_close(cell(x)[0], exact, rtol=1e-10, atol=1e-10)


def test_errors_fall_as_published_and_the_residual_ends_the_solve():
    """A width of 128, float32, random weights as they are: 4e-2, 1e-4, 2e-7 after 1, 2, 3 iterations (the card)."""
    cell, x = make(ParaGRU, inputs=64, size=128, dtype=torch.float32, mode="parallel"), random(2, 256, 64).float()
    exact = loop(cell, x)[0].detach()
    for k, most in ((1, 6e-2), (2, 3e-4), (3, 1e-6)):
        cell.newton = Newton(k, 0.0, "keep")
        assert (cell(x)[0] - exact).abs().max() < most
    assert (cell(x)[0] - exact).abs().max() < 1e-6
    cell.newton = Newton()
    assert (cell(x)[0] - exact).abs().max() < 1e-5
    assert cell.last_solve.iterations == 3
    assert cell.last_solve.residual < 1e-6
    assert not cell.last_solve.fell_back


@pytest.mark.parametrize("kind", CELLS)
def test_an_unsolved_recurrence_falls_back_says_so_and_is_exact(kind):
    cell = make(kind, size=16, scale=6.0, mode="parallel", newton=Newton(2, 1e-12, window=50))
    x = random(2, 120, 6)
    starts = torch.zeros(2, 120, dtype=torch.bool)
    starts[1, 70] = True
    with pytest.warns(NewtonFallback, match=r"residual of .* after 2 iterations .* steps from \d+ on were computed"):
        y, state = cell(x, starts=starts)
    assert cell.last_solve.fell_back
    cell(x, starts=starts)  # says it once
    assert cell.last_solve.fell_back
    expected, last = loop(cell, x, starts=starts)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-9)
    torch.testing.assert_close(state, last, rtol=0, atol=1e-9)
    ours, theirs = (torch.autograd.grad(one.square().sum(), cell.weight)[0] for one in (y, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("kind", CELLS)
def test_four_times_the_recurrence_stays_finite_and_right(kind):
    cell = make(kind, size=64, scale=4.0, dtype=torch.float32, mode="parallel")
    x = random(2, 200, 6).float()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NewtonFallback)
        y, _ = cell(x)
    assert (y - loop(cell, x)[0]).abs().max() < 1e-5
    cell.newton = Newton(2, 0.0, "keep")
    assert cell(x)[0].isfinite().all()


def test_divergence_can_be_an_error():
    cell = make(ParaGRU, scale=60.0, mode="parallel", newton=Newton(2, on_failure="raise"))
    with pytest.raises(NewtonDivergence, match="allow more iterations") as caught:
        cell(random(2, 100, 6))
    assert caught.value.iterations == 2
    assert caught.value.residual > 1e-6


def test_damping_changes_the_way_and_not_the_states():
    x, plain = random(2, 80, 6), make(ParaGRU, scale=2.0, mode="parallel", newton=EXACT)
    damped = copy.deepcopy(plain)
    damped.newton = Newton(100, 1e-13, damping=0.5)
    torch.testing.assert_close(damped(x)[0], plain(x)[0], rtol=1e-11, atol=1e-11)
    assert damped.last_solve.iterations > plain.last_solve.iterations


def test_nonfinite_iterates_of_an_unbounded_function_end_in_the_loop():
    """A map whose linear predictions overflow: h -> h^2 / 2 + x from a start that is far off the solution."""

    def f(h, x):
        return torch.exp(6 * torch.sin(3 * h)) * 0.01 + x

    x = random(1, 400, 2) * 0.3
    with pytest.warns(NewtonFallback):
        states, report = parallel_recurrence(f, x, torch.zeros(1, 2).double(), newton=Newton(30))
    assert report.fell_back
    torch.testing.assert_close(states[:, 1:], f(states[:, :-1], x[:, 1:]), rtol=1e-9, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "state", "step"),
    [
        (nn.GRUCell, None, None),
        (nn.RNNCell, None, None),
        (nn.LSTMCell, (2, 5), lambda cell, x, state: torch.stack(cell(x, tuple(state.unbind(1))), 1)),
    ],
)
def test_torchs_own_cells_through_the_dense_path(kind, state, step):
    torch.manual_seed(0)
    cell = kind(3, 5).double()
    whole = {nn.GRUCell: nn.GRU, nn.RNNCell: nn.RNN, nn.LSTMCell: nn.LSTM}[kind](3, 5, batch_first=True).double()
    for name, parameter in cell.named_parameters():
        getattr(whole, f"{name}_l0").data.copy_(parameter.data)
    parallel = ParallelCell(cell, state, step=step, newton=EXACT)
    x = random(2, 40, 3).requires_grad_()
    y = parallel(x)[0] if state is None else parallel(x)[0][:, :, 0]
    expected = whole(x)[0]
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    ours = torch.autograd.grad(y.square().sum(), [x, *cell.parameters()])
    theirs = torch.autograd.grad(
        expected.square().sum(), [x, *(getattr(whole, f"{n}_l0") for n, _ in cell.named_parameters())]
    )
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_blocks_through_the_generic_path_are_the_lstm():
    cell = make(ParaLSTM, scale=2.0, newton=EXACT, mode="parallel")
    x = random(2, 30, 6)

    def f(state, pre, a, peephole):
        return cell._after(pre, state, [a, peephole])

    given = [one.detach().requires_grad_() for one in cell._recurrence(torch.float64)]
    pre = cell._pre(x).detach()
    states, _ = parallel_recurrence(
        f, pre, cell.initial_state(2, dtype=torch.float64), given, jacobian=("block", 2), newton=EXACT
    )
    torch.testing.assert_close(states[:, :, 1], cell(x)[0], rtol=1e-11, atol=1e-11)
    ours = torch.autograd.grad(states[:, :, 1].square().sum(), given)
    theirs = torch.autograd.grad(cell(x)[0].square().sum(), [cell.recurrent, cell.peephole])
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other[:, 0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", CELLS)
def test_what_lies_to_the_right_or_in_another_document_is_not_seen(kind):
    cell = make(kind, mode="parallel", newton=EXACT, scale=3.0)
    x, starts = random(1, 50, 6), torch.zeros(1, 50, dtype=torch.bool)
    starts[0, 20] = True
    both = cell(x, starts=starts)[0]
    torch.testing.assert_close(both[:, :20], cell(x[:, :20])[0], rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(both[:, 20:], cell(x[:, 20:])[0], rtol=1e-11, atol=1e-11)
    # in two calls, the second with the state of the first
    first, state = cell(x[:, :30])
    second, _ = cell(x[:, 30:], state)
    torch.testing.assert_close(torch.cat([first, second], 1), cell(x)[0], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("kind", CELLS)
def test_precision_is_float32_inside_and_the_inputs_outside(kind):
    cell = make(kind, size=16, dtype=torch.bfloat16, mode="parallel")
    x = random(2, 100, 6).bfloat16()
    y, state = cell(x)
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(y, loop(cell, x, cell.initial_state(2))[0], rtol=0.01, atol=0.01)
    wide = copy.deepcopy(cell).float()
    with torch.autocast("cpu", torch.bfloat16):
        y, state = wide(x)
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    y.float().sum().backward()
    assert all(one.grad is not None and one.grad.isfinite().all() for one in wide.parameters())


def test_auto_takes_the_way_that_is_quicker():
    cell = make(ParaGRU)
    cell(random(1, SHORT, 6))
    assert cell.last_solve.iterations == 0
    cell(random(1, SHORT + 1, 6))
    assert cell.last_solve.iterations > 0
    cell(random(WIDE // 8 + 1, SHORT + 1, 6))
    assert cell.last_solve.iterations == 0


def test_cells_are_made_without_memory_and_from_a_generator():
    with torch.device("meta"):
        empty = ParaLSTM(4, 8)
    full = ParaLSTM(4, 8)
    full.initialize(torch.Generator().manual_seed(3))
    empty.load_state_dict(full.state_dict(), assign=True)
    x = random(1, 20, 4).float()
    assert torch.equal(empty(x)[0], full(x)[0])
    again = ParaLSTM(4, 8)
    again.initialize(torch.Generator().manual_seed(3))
    assert torch.equal(again.weight, full.weight)
    assert all(one.no_decay for one in (full.recurrent, full.peephole, full.bias))
    # the weights as they are released
    wide = ParaGRU(4, 5000)
    wide.initialize(torch.Generator().manual_seed(0))
    assert wide.recurrent.std().item() == pytest.approx(2 / (5 * 5000) ** 0.5, rel=0.05)
    assert (wide.bias[0, 0, 0].item(), wide.bias[0, 0, -1].item(), wide.bias[1:].abs().max().item()) == (0, -1, 0)


@pytest.fixture
def unchecked(monkeypatch):
    """As a user has it, without the tests' own look at types."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("make_it", "message"),
    [
        (lambda: ParaGRU(6, 8, heads=4), "4 heads do not divide 6 inputs and 8 states"),
        (lambda: ParaLSTM(6, 0), "size must be at least 1, got 0"),
        (lambda: ParaGRU(6, 8, mode="fast"), "mode must be .*, got 'fast'"),
        (lambda: Newton(tolerance=float("nan")), "tolerance must be at least 0, got nan"),
        (lambda: ParaGRU(6, 8)(torch.zeros(2, 0, 6)), "have no steps"),
        (lambda: ParaGRU(6, 8)(torch.zeros(2, 3, 5)), "6 inputs was given 5"),
        (
            lambda: ParaGRU(6, 8)(torch.zeros(2, 3, 6), torch.zeros(2, 7)),
            r"shape \(2, 7\); for 2 sequences it is \(2, 8\)",
        ),
        (lambda: ParaLSTM(6, 8).step(torch.zeros(2, 6), torch.zeros(1, 2, 8)), r"it is \(2, 2, 8\)"),
        (lambda: ParallelCell(nn.Linear(3, 3)), "Linear has no hidden_size"),
    ],
)
def test_bad_arguments_are_named(make_it, message):
    with pytest.raises(InvalidArgument, match=message):
        make_it()


@pytest.mark.usefixtures("unchecked")
def test_bad_functions_are_named():
    x, zeros, weight = torch.zeros(2, 5, 3), torch.zeros(2, 3), torch.eye(3).roll(1, 0)

    def solve(f, initial=zeros, **settings):
        return parallel_recurrence(f, x, initial, **settings)

    with pytest.raises(InvalidArgument, match="the Jacobian of f is not diagonal"):
        solve(lambda h, x: torch.tanh(h @ weight + x))
    with pytest.raises(InvalidArgument, match=r"not \('block', 2\)"):
        solve(lambda h, x: torch.tanh(h.roll(1, -1)), torch.zeros(2, 2, 3), jacobian=("block", 2))
    with pytest.raises(InvalidArgument, match="not among its arguments"):
        solve(lambda h, x: h * nn.Parameter(torch.ones(3)) + x)
    with pytest.raises(InvalidArgument, match=r"f makes states of shape \(2,\) of \(3,\)"):
        solve(lambda h, x: h[:, :2])
    with pytest.raises(InvalidArgument, match="jacobian must be 'diagonal' or 'dense', got 'sparse'"):
        solve(lambda h, x: h, jacobian="sparse")
    with pytest.raises(InvalidArgument, match="not blocks of 4 x channels"):
        solve(lambda h, x: h, jacobian=("block", 4))
    with pytest.raises(InvalidArgument, match="3 initial states were given for 2 sequences"):
        solve(lambda h, x: h, torch.zeros(3, 3))
    with pytest.raises(InvalidArgument, match=r"starts of shape \(2, 4\) do not fit"):
        ParaGRU(3, 3)(x, starts=torch.zeros(2, 4, dtype=torch.bool))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kind", CELLS)
def test_on_a_gpu_the_states_are_those_of_the_loop(kind):
    cell = make(kind, size=64, dtype=torch.float32, mode="parallel").cuda()
    x = random(2, 1000, 6).float().cuda()
    torch.testing.assert_close(cell(x)[0], loop(cell, x, cell.initial_state(2, "cuda"))[0], rtol=0, atol=1e-5)
