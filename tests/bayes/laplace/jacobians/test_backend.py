"""Rows layer by layer against Jacobians from autograd, one output of one example at a time."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pippin.bayes.laplace.jacobians.backend import JacobianBackend
from pippin.bayes.weight_subset import All, LastLayer, Named, Subnetwork
from pippin.core.errors import InvalidArgument, InvalidInput, UnsupportedLayer

N = 4


class Flattened(nn.Module):
    """A stack whose outputs are laid flat."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).flatten(1)


class Tokens(nn.Module):
    """Embedding, positions, attention (whose weights are used by hand) and norms; reads the first position."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 6, padding_idx=0)
        self.place = nn.Embedding(N, 6)
        self.scale = nn.Parameter(torch.rand(6) + 0.5)
        self.shift = nn.Parameter(torch.rand(1, N, 6))
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.norm = nn.LayerNorm(6)
        self.rms = nn.RMSNorm(6)
        self.head = nn.Linear(6, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) * self.scale + self.place(torch.arange(ids.shape[1])) + self.shift
        x = x + self.attention(self.norm(x), self.norm(x), self.norm(x), need_weights=False)[0]
        return self.head(self.rms(x)[:, 0])


class PositionsFirst(nn.Module):
    """Positions along the first dimension within, as many as examples, and only the first is read."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 5)
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(torch.tanh(self.inner(x.transpose(0, 1)))).cumsum(0)[0] ** 2)


class Tied(nn.Module):
    """One matrix read twice, and a layer called twice; positions of all examples laid end to end."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, 4)
        flat = torch.relu(self.a(torch.tanh(self.b(torch.tanh(self.a(flat))))))
        return flat.view(len(x), -1, 4).sum(1)[:, :3]


class LowRank(nn.Module):
    """A frozen matrix with a pair beside it, positions laid end to end, as `pippin.nn.lora` computes it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 3)
        self.down, self.up = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(3, 2))
        self.other = nn.Parameter(torch.randn(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, 4)
        y = torch.addmm(self.base(flat), flat @ self.down.T, (self.up * 0.3).to(x.dtype).T)
        return (torch.tanh(y) @ self.other + y @ self.other.T * 2).view(len(x), -1, 3).sum(1)


class Residual(nn.Module):
    """In-place activations, batch norm, a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(2, 4, 3, padding=1, bias=False)
        self.n = nn.BatchNorm2d(4)
        self.b = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.n(self.a(x)), inplace=True)
        y = self.b(x)
        y += x
        return self.head(F.relu(y, inplace=True).mean((2, 3)))


def conv(**options: object) -> nn.Module:
    return Flattened(nn.Conv2d(2, 4, 3, **options), nn.Tanh(), nn.Conv2d(4, 2, 2), nn.Flatten(), nn.LazyLinear(3))


CASES = {
    "mlp": (lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)), (3,)),
    "sequence": (lambda: Flattened(nn.Linear(3, 4), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)), (3, 3)),
    "conv": (lambda: conv(), (2, 6, 6)),
    "conv stride": (lambda: conv(stride=2, padding=1), (2, 7, 7)),
    "conv dilation": (lambda: conv(dilation=2, padding=(2, 1)), (2, 7, 7)),
    "conv same": (lambda: conv(padding="same"), (2, 5, 5)),
    "conv groups": (lambda: conv(groups=2, bias=False), (2, 5, 5)),
    "conv circular": (lambda: conv(padding=1, padding_mode="circular"), (2, 5, 5)),
    "conv1d": (lambda: Flattened(nn.Conv1d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Conv1d(4, 1, 4)), (2, 6)),
    "conv3d": (lambda: Flattened(nn.Conv3d(1, 2, 2), nn.InstanceNorm3d(2, affine=True), nn.Flatten()), (1, 3, 3, 2)),
    "transposed": (lambda: Flattened(nn.ConvTranspose1d(2, 3, 2), nn.Tanh(), nn.Conv1d(3, 1, 2)), (2, 3)),
    "residual": (Residual, (2, 4, 4)),
    "recurrent": (lambda: Flattened(Last(), nn.Linear(4, 3)), (3, 2)),
    "positions first": (PositionsFirst, (N, 3)),
    "tied": (Tied, (3, 4)),
    "low rank": (LowRank, (3, 4)),
    "weight norm": (lambda: Flattened(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.Linear(4, 3)), (3,)),
}


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 4)
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
        return h


def made(name: str) -> tuple[nn.Module, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        if name == "tokens":
            return Tokens().double().eval(), torch.tensor([[1, 2, 1, 0], [3, 3, 3, 1], [0, 6, 5, 4], [2, 1, 2, 1]])
        make, shape = CASES[name]
        model = make().double()
        x = torch.randn(N, *shape, dtype=torch.float64)
        model(x)
        for part in model.modules():
            if isinstance(part, nn.BatchNorm2d | nn.GroupNorm | nn.LayerNorm):
                nn.init.uniform_(part.weight, 0.5, 1.5)
        return model.eval(), x


def brute(model: nn.Module, x: Tensor, selection) -> Tensor:
    """J, one backward pass for each output of each example."""
    own = selection.parameters(model)
    rows = []
    for example in range(len(x)):
        out = model(x[example : example + 1])[0]
        for value in out:
            grads = torch.autograd.grad(value, list(own.values()), retain_graph=True, allow_unused=True)
            flat = [torch.zeros_like(p) if g is None else g for g, p in zip(grads, own.values(), strict=True)]
            rows.append(torch.cat([g.flatten() for g in flat]))
    jacobian = torch.stack(rows).view(len(x), -1, sum(p.numel() for p in own.values()))
    return jacobian if selection.indices is None else jacobian[..., selection.indices]


@pytest.mark.parametrize("name", [*CASES, "tokens"])
@pytest.mark.parametrize("subset", ["all", "last", "some"])
def test_everything_equals_the_jacobian_from_autograd(name, subset):
    model, x = made(name)
    size = sum(p.numel() for p in model.parameters())
    chosen = {
        "all": All(),
        "last": Named([list(dict(model.named_parameters()))[-1]]),
        "some": Subnetwork(torch.arange(0, size, 3)),
    }
    selection = chosen[subset].resolve(model)
    expected = brute(model, x, selection)
    root = torch.randn(N, expected.shape[1], 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows = root.mT @ expected
    weights = torch.rand(selection.size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with JacobianBackend(model, selection).forward(x) as p:
        torch.testing.assert_close(p.outputs, model(x).detach())
        torch.testing.assert_close(p.jacobian(), expected)
        torch.testing.assert_close(p.rows(root), rows)
        torch.testing.assert_close(p.diagonal(root), rows.square().sum((0, 1)))
        torch.testing.assert_close(p.gram(root), torch.einsum("nrp,nrq->pq", rows, rows))
        torch.testing.assert_close(p.weighted_gram(weights), (expected * weights) @ expected.mT)
        flat = expected.flatten(0, 1)
        torch.testing.assert_close(p.weighted_gram(weights, joint=True), (flat * weights) @ flat.mT)


@pytest.mark.parametrize("name", ["mlp", "conv", "positions first", "tokens", "tied"])
def test_batches_of_every_size_in_one_object(name):
    model, x = made(name)
    rows = JacobianBackend(model, All().resolve(model))
    expected = brute(model, x, rows.selection)
    for part in (slice(0, 1), slice(0, 4), slice(1, 3), slice(2, 3)):
        with rows.forward(x[part]) as p:
            torch.testing.assert_close(p.jacobian(), expected[part])


def test_pairs_of_low_rank_are_matrices():
    model, x = made("low rank")
    with JacobianBackend(model, Named(["down", "up", "other"]).resolve(model)).forward(x) as p:
        assert {name: kind for name, kind, _ in p.uses()} == {"down": "matrix", "up": "matrix", "other": "other"}


def test_an_operation_with_its_own_backward_pass_goes_column_by_column():
    class Face(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.w = nn.Linear(2, 3).double(), torch.ones(3, 2, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            return Halved.apply(self.first(x)) @ self.w

    model, x = Face(), torch.randn(N, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    selection = All().resolve(model)
    with JacobianBackend(model, selection).forward(x) as p:
        torch.testing.assert_close(p.jacobian(), brute(model, x, selection))


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x / 2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        return g / 2


def test_last_layer_needs_no_gradient_of_what_lies_before():
    model, x = made("mlp")
    wanted = [p.requires_grad for p in model.requires_grad_(False).parameters()]
    selection = LastLayer().resolve(model)
    with JacobianBackend(model, selection).forward(x) as p:
        features = torch.tanh(model[0](x))
        jacobian = p.jacobian()
        assert p._graph.grad_fn.next_functions[1][0] is None  # the features have no graph
    eye = torch.eye(3, dtype=torch.float64)
    torch.testing.assert_close(jacobian[..., :15], torch.einsum("cd,nf->ncdf", eye, features).flatten(2))
    torch.testing.assert_close(jacobian[..., 15:], eye.expand(N, 3, 3))
    assert [p.requires_grad for p in model.parameters()] == wanted


def test_pieces_are_what_kronecker_factors_are_made_of():
    model, x = made("conv stride")
    root = torch.randn(N, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with JacobianBackend(model, All().resolve(model)).forward(x) as p:
        piece = next(piece for piece in p.layers(root) if "layers.0.weight" in piece.names)
        a = x.new_zeros(1, piece.call.matrices()[2], piece.call.matrices()[2])
        count = piece.call.add_inputs(a, N)
        patches = F.unfold(x, 3, padding=1, stride=2)
    assert count == N * patches.shape[-1]
    order = piece.call.order()
    torch.testing.assert_close(a[0][order][:, order], torch.einsum("nit,njt->ij", patches, patches))


@pytest.mark.parametrize(
    ("name", "options", "shape"),
    [
        ("plain", {}, (8, 9)),
        ("padding", {"padding": 1}, (5, 4)),
        ("wide padding", {"padding": (2, 1), "dilation": (2, 1)}, (7, 6)),
        ("small map", {"padding": 1}, (2, 2)),
        ("one row", {"padding": 1}, (1, 5)),
        ("stride", {"padding": 1, "stride": 2}, (6, 6)),
        ("five", {"kernel_size": 5, "padding": 2}, (6, 7)),
        ("three by five", {"kernel_size": (3, 5), "padding": (1, 2)}, (3, 5)),
    ],
)
def test_covariance_of_patches_without_patches(name, options, shape):
    del name
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 2, *shape, dtype=torch.float64, generator=generator)
    options = {"kernel_size": 3} | options
    model = Flattened(nn.Conv2d(2, 3, **options)).double()
    patches = F.unfold(x, **options)
    with JacobianBackend(model, All().resolve(model)).forward(x) as p:
        (piece,) = p.layers()
        a = x.new_zeros(1, piece.call.matrices()[2], piece.call.matrices()[2])
        count = piece.call.add_inputs(a, 3)
    assert count == 3 * patches.shape[-1]
    order = piece.call.order()
    torch.testing.assert_close(a[0][order][:, order], torch.einsum("nit,njt->ij", patches, patches))


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x - x.mean(0)) * self.head(x).sum(0)


class Overwriting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        z = self.head(y)
        y += 1
        return z + y


class Unseen(nn.Module):
    """Uses its weight in a way that cannot be watched."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        return Product.apply(x, self.w)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x)
        return x @ w

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return None, x.mT @ g


@pytest.mark.parametrize(
    ("model", "x", "error", "message"),
    [
        (nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), torch.ones(4, 3), InvalidArgument, "call model.eval"),
        (nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)), torch.ones(4, 3), InvalidArgument, "call model.eval"),
        (nn.Linear(3, 2), torch.ones(4, 5, 3), InvalidArgument, r"\(4, 5, 2\)"),
        (nn.Linear(3, 2), torch.full((4, 3), torch.nan), InvalidInput, "example 0 of the batch are not finite"),
        (Mixing(), torch.arange(12.0).view(4, 3), InvalidArgument, "depend on the other examples"),
        (Overwriting(), torch.ones(4, 3), InvalidArgument, "overwritten in place"),
        (Unseen(), torch.ones(4, 3), UnsupportedLayer, "no rule for how the model uses w"),
    ],
)
def test_what_cannot_be_done_is_refused(model, x, error, message):
    with (
        pytest.raises(error, match=message),
        JacobianBackend(model, All().resolve(model)).forward(x) as p,
    ):
        p.jacobian()


def test_no_gradients_or_a_root_of_another_shape_are_refused():
    model = nn.Linear(3, 2)
    model.forward = torch.no_grad()(model.forward)
    with (
        pytest.raises(InvalidArgument, match="no_grad"),
        JacobianBackend(model, All().resolve(model)).forward(torch.ones(4, 3)),
    ):
        pass
    model = nn.Linear(3, 2)
    with (
        JacobianBackend(model, All().resolve(model)).forward(torch.ones(4, 3)) as p,
        pytest.raises(InvalidArgument, match="a root of shape"),
    ):
        p.rows(torch.ones(4, 3, 1))


def test_mappings_tuples_and_logits():
    class Face(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 2)

        def forward(self, x: Tensor, shift: Tensor) -> Tensor:
            return self.head(x + shift)

    model, x = Face(), torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    shift = torch.ones(4, 3)
    found = []
    for batch in ({"x": x, "shift": shift}, (x, shift)):
        with JacobianBackend(model, All().resolve(model)).forward(batch) as p:
            found.append(p.jacobian())
    assert torch.equal(*found)
    torch.testing.assert_close(found[0][:, 0, :3], x + shift)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (torch.zeros(4, 3, dtype=torch.float64), r"float64 inputs of shape \(4, 3\)"),
        (torch.zeros(4, 5), r"\(4, 5\).*cannot be multiplied"),
        ({"x": torch.zeros(4, 3)}, "inputs named x"),
        ((torch.zeros(4, 3), torch.zeros(4, 3)), "2 inputs"),
        (torch.zeros(3), r"2 outputs for inputs of length 3.*x\[None\]"),
    ],
)
def test_inputs_that_the_model_does_not_take(inputs, message):
    model = nn.Linear(3, 2)
    with pytest.raises(InvalidInput, match=message), JacobianBackend(model, All().resolve(model)).forward(inputs):
        pass
