"""Kronecker factors against dense matrices built from their definition, and against laplace-torch."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pippin.bayes.laplace import memory_check
from pippin.bayes.laplace.jacobians.backend import JacobianBackend
from pippin.bayes.laplace.kron import Kron, KronState
from pippin.bayes.weight_subset import All, LastLayer, Named, Subnetwork
from pippin.core.errors import InvalidArgument, NotEnoughMemory, SingularPosterior, UnsupportedLayer

N = 6


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3, padding_idx=0)
        self.norm = nn.LayerNorm(3)
        self.head = nn.Linear(3, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.table(ids)))).sum(1)


class Twice(nn.Module):
    """A layer that reads and is read again: its weight has two uses, its bias too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)))


def made(name: str) -> tuple[nn.Module, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        if name == "words":
            return Words().double(), torch.randint(0, 5, (N, 4))
        if name == "twice":
            return Twice().double(), torch.randn(N, 3, dtype=torch.float64)
        layers = {
            "mlp": [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)],
            "conv": [nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(), nn.Linear(48, 2)],
            "groups": [nn.Conv2d(2, 4, 2, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(36, 2)],
            "sequence": [nn.Linear(4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(24, 2)],
        }[name]
        shape = (3,) if name == "mlp" else (8, 4) if name == "sequence" else (2, 4, 4)
        return nn.Sequential(*layers).double().eval(), torch.randn(N, *shape, dtype=torch.float64)


def root_of(outputs: Tensor) -> Tensor:
    q = outputs.softmax(-1).sqrt()
    return torch.diag_embed(q) - q.square()[:, :, None] * q[:, None]


def fitted(
    model: nn.Module, x: Tensor, batch: int = N, structure: Kron | None = None
) -> tuple[KronState, JacobianBackend]:
    selection = All().resolve(model)
    state = (structure or Kron()).start(selection, next(model.parameters()))
    rows = JacobianBackend(model, selection)
    for part in x.split(batch):
        with rows.forward(part) as p:
            state.add(p, root_of(p.outputs))
    state.finish()
    return state, rows


def uses(model: nn.Module, x: Tensor) -> tuple[dict[nn.Module, list[Tensor]], dict[nn.Module, list[Tensor]]]:
    """What each layer read, and what came back for each column of the root, by module hooks."""
    read: dict[nn.Module, list[Tensor]] = {}
    made: dict[nn.Module, list[Tensor]] = {}
    handles = [
        part.register_forward_hook(
            lambda m, args, out: (read.setdefault(m, []).append(args[0]), made.setdefault(m, []).append(out), None)[-1]
        )
        for part in model.modules()
        if not list(part.children())
    ]
    outputs = model(x)
    for handle in handles:
        handle.remove()
    root = root_of(outputs.detach())
    flat = [out for outs in made.values() for out in outs]
    came = [torch.autograd.grad(outputs, flat, s, retain_graph=True, allow_unused=True) for s in root.unbind(2)]
    stacked = iter([torch.stack([c[i] for c in came]) for i in range(len(flat))])
    return read, {m: [next(stacked) for _ in outs] for m, outs in made.items()}


def dense(model: nn.Module, x: Tensor) -> Tensor:
    """The block-diagonal curvature from its definition."""
    selection = All().resolve(model)
    with JacobianBackend(model, selection).forward(x) as p:
        exact = p.gram(root_of(p.outputs))
    full = torch.zeros_like(exact)
    read, came = uses(model, x)
    for name, parameter in model.named_parameters():
        where = selection.of(name)
        module = model.get_submodule(name.rpartition(".")[0])
        if parameter.ndim == 1:
            full[where, where] = exact[where, where]
            continue
        g, inputs = came[module], read[module]
        if isinstance(module, nn.Linear):
            a = torch.cat([i.reshape(-1, i.shape[-1]) for i in inputs])
            b = torch.cat([c.reshape(-1, c.shape[-1]) for c in g])
            full[where, where] = torch.kron(b.mT @ b, a.mT @ a / len(a))
        elif isinstance(module, nn.Embedding):
            a = F.one_hot(inputs[0].flatten(), 5).double()
            b = g[0].reshape(-1, 3)
            kept = inputs[0].flatten() != 0
            a, b = a * kept[:, None], b * kept.repeat(len(g[0]))[:, None]
            full[where, where] = torch.kron(a.mT @ a / len(a), b.mT @ b)
        else:
            patches = F.unfold(inputs[0], module.kernel_size, padding=module.padding).transpose(1, 2)
            for group in range(module.groups):
                a = patches.flatten(0, 1).chunk(module.groups, 1)[group]
                b = g[0].movedim(2, -1).flatten(0, -2).chunk(module.groups, 1)[group]
                block = torch.kron(b.mT @ b, a.mT @ a / len(a))
                start = where.start + group * len(block)
                full[start : start + len(block), start : start + len(block)] = block
    return full


NAMES = ["mlp", "conv", "groups", "sequence", "words", "twice"]


@pytest.mark.parametrize("name", NAMES)
def test_the_gaussian_is_that_of_the_dense_matrix(name):
    model, x = made(name)
    curvature = dense(model, x)
    state, rows = fitted(model, x)
    prior, scale = torch.tensor(0.7, dtype=torch.float64), torch.tensor(1.3, dtype=torch.float64)
    size = rows.selection.size
    eye = torch.eye(size, dtype=torch.float64)
    precision = scale * curvature + prior * eye
    posterior = state.posterior(prior.expand(size), scale)
    torch.testing.assert_close(posterior.log_det, precision.logdet())
    torch.testing.assert_close(posterior.solve(eye), precision.inverse())
    torch.testing.assert_close(posterior.quadratic(eye), precision.diagonal())
    torch.testing.assert_close(posterior.variances(), precision.inverse().diagonal())
    with rows.forward(x) as p:
        jacobian = p.jacobian()
        torch.testing.assert_close(posterior.covariance(p), jacobian @ precision.inverse() @ jacobian.mT)
        flat = jacobian.flatten(0, 1)
        torch.testing.assert_close(posterior.covariance(p, joint=True), flat @ precision.inverse() @ flat.mT)


@pytest.mark.parametrize("name", NAMES)
def test_batches_of_any_size_and_later_data_give_the_same_factors(name):
    model, x = made(name)
    whole = state_values(fitted(model, x)[0])
    torch.testing.assert_close(state_values(fitted(model, x, batch=4)[0]), whole)
    state, rows = fitted(model, x[:3])
    with rows.forward(x[3:]) as p:
        state.add(p, root_of(p.outputs))
    state.finish()
    torch.testing.assert_close(state_values(state), whole)
    again = KronState(Kron(), rows.selection, x.new_zeros(1, dtype=torch.float64))
    again.load_tensors(state.tensors())
    assert torch.equal(state_values(again), state_values(state))


def state_values(state: KronState) -> Tensor:
    size = state.selection.size
    prior = torch.ones((), dtype=torch.float64).expand(size)
    return state.posterior(prior, prior[0]).solve(torch.eye(size, dtype=torch.float64))


def test_one_example_and_one_column_make_the_factors_exact():
    model, x = made("mlp")
    selection = All().resolve(model)
    state, rows = Kron().start(selection, x), JacobianBackend(model, selection)
    with rows.forward(x[:1]) as p:
        root = root_of(p.outputs)[..., :1]
        state.add(p, root)
        exact = p.gram(root)
    state.finish()
    for name in selection.names:
        where = selection.of(name)
        block = state.blocks[name]
        values = torch.linalg.eigvalsh(exact[where, where])
        torch.testing.assert_close(block.values.flatten().sort()[0], values, atol=1e-10, rtol=1e-8)


def test_damping_adds_the_prior_to_each_factor():
    model, x = made("mlp")
    state, rows = fitted(model, x, structure=Kron(damping=True))
    size = rows.selection.size
    one = torch.ones((), dtype=torch.float64)
    posterior = state.posterior((4 * one).expand(size), one)
    read, came = uses(model, x)
    total = torch.zeros((), dtype=torch.float64)
    with rows.forward(x) as p:
        gram = p.gram(root_of(p.outputs))
    for module, where in ((model[0], "0"), (model[2], "2")):
        a, b = read[module][0], came[module][0].flatten(0, 1)
        eye = lambda m: 2 * torch.eye(m.shape[1], dtype=torch.float64)  # noqa: E731
        total += torch.kron(b.mT @ b + eye(b), a.mT @ a / len(a) + eye(a)).logdet()
        bias = rows.selection.of(f"{where}.bias")
        total += (gram[bias, bias] + 2 * eye(b)).logdet()
    torch.testing.assert_close(posterior.log_det, total)


def test_log_det_is_differentiable_in_prior_and_scale():
    model, x = made("conv")
    state, _ = fitted(model, x)
    groups = torch.cat([torch.full((p.numel(),), i) for i, p in enumerate(model.parameters())])

    def log_det(log_prior: Tensor, scale: Tensor) -> Tensor:
        return state.posterior(log_prior.exp()[groups], scale).log_det

    log_prior = torch.linspace(-1, 1, int(groups.max()) + 1, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(log_det, (log_prior, torch.tensor(0.8, dtype=torch.float64, requires_grad=True)))


def test_the_evidence_needs_no_eigenvectors_and_is_the_same_with_them():
    model, x = made("groups")
    state, rows = fitted(model, x)
    one = torch.ones((), dtype=torch.float64)
    posterior = state.posterior(one.expand(rows.selection.size), one)
    before = posterior.log_det
    assert all(block.eigen is None for block in state.blocks.values())
    posterior.sample(1)
    assert all(block.eigen is not None for block in state.blocks.values())
    torch.testing.assert_close(posterior.log_det, before, atol=1e-12, rtol=1e-12)


def test_data_added_after_an_evidence_counts():
    model, x = made("groups")
    one = torch.ones((), dtype=torch.float64)
    state, rows = fitted(model, x)
    prior = one.expand(rows.selection.size)
    whole = state.posterior(prior, one).log_det
    state, _ = fitted(model, x[:2])
    state.posterior(prior, one).log_det  # noqa: B018
    with rows.forward(x[2:]) as p:
        state.add(p, root_of(p.outputs))
    state.finish()
    torch.testing.assert_close(state.posterior(prior, one).log_det, whole)


def test_samples_have_the_posterior_covariance():
    model, x = made("groups")
    state, rows = fitted(model, x)
    one = torch.ones((), dtype=torch.float64)
    posterior = state.posterior(one.expand(rows.selection.size), one)
    first = posterior.sample(20_000, torch.Generator().manual_seed(1))
    assert torch.equal(first, posterior.sample(20_000, torch.Generator().manual_seed(1)))
    expected = posterior.solve(torch.eye(rows.selection.size, dtype=torch.float64))
    torch.testing.assert_close(first.mT @ first / len(first), expected, atol=0.04, rtol=0)


@pytest.mark.parametrize("name", ["mlp", "convolutions"])
@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_laplace_torch_agrees(name, subset):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer = pytest.importorskip("laplace")
        from torch.utils.data import DataLoader, TensorDataset

        with torch.random.fork_rng():
            torch.manual_seed(0)
            # the peer shares what came back over positions for a convolution's bias, too; ours is exact
            layers = {
                "mlp": [nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)],
                "convolutions": [
                    *(nn.Conv2d(1, 3, 3, padding=1, bias=False), nn.ReLU(), nn.Conv2d(3, 4, 3, stride=2, bias=False)),
                    *(nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)),
                ],
            }[name]
            model = nn.Sequential(*layers)
            x = torch.randn(20, *((3,) if name == "mlp" else (1, 6, 6)))
            y = torch.randint(0, 3, (20,))
        theirs = peer.Laplace(model, "classification", subset_of_weights=subset, hessian_structure="kron")
        theirs.fit(DataLoader(TensorDataset(x, y), batch_size=8))
        log_det = theirs.log_det_posterior_precision
        covariance = theirs._glm_predictive_distribution(x[:7])[1].detach()
    selection = (All() if subset == "all" else LastLayer()).resolve(model)
    state, rows = Kron().start(selection, x), JacobianBackend(model, selection)
    for part in x.split(8):
        with rows.forward(part) as p:
            state.add(p, root_of(p.outputs))
    state.finish()
    posterior = state.posterior(torch.ones(()).expand(selection.size), torch.ones(()))
    torch.testing.assert_close(posterior.log_det.float(), log_det.detach().reshape(()), rtol=1e-4, atol=1e-4)
    with rows.forward(x[:7]) as p:
        torch.testing.assert_close(posterior.covariance(p), covariance, rtol=1e-4, atol=1e-4)


def test_weights_without_effect_keep_their_prior():
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "idle": nn.Linear(2, 1)})
    model.forward = lambda x: model["used"](x)
    state, rows = fitted(model, torch.ones(3, 2))
    posterior = state.posterior(torch.tensor(4.0).expand(rows.selection.size), torch.tensor(1.0))
    torch.testing.assert_close(posterior.variances()[rows.selection.of("idle.weight")], torch.full((2,), 0.25))


def test_what_has_no_factors_is_refused_by_name(monkeypatch):
    model, x = made("mlp")
    with pytest.raises(InvalidArgument, match="Kronecker factors"):
        Kron().start(Subnetwork([0]).resolve(model), x)
    state, rows = fitted(model, x)
    prior = torch.linspace(1, 2, rows.selection.size, dtype=torch.float64)
    with pytest.raises(InvalidArgument, match=r"differs between weights of 0\.weight"):
        state.posterior(prior, prior[0])
    with pytest.raises(SingularPosterior, match="raise the prior"):
        _ = state.posterior(-100 * prior[:1].expand(rows.selection.size), prior[0]).log_det

    bilinear = nn.Bilinear(30, 30, 8)
    outer = nn.Sequential(nn.Linear(30, 8))
    outer.extra = bilinear
    outer.forward = lambda x: bilinear(x, x) + outer[0](x)
    with pytest.raises(UnsupportedLayer, match=r"extra\.weight"):
        fitted(outer, torch.ones(2, 30))
    with JacobianBackend(outer, Named(["0.weight"]).resolve(outer)).forward(torch.ones(2, 30)) as p:
        Kron().start(Named(["0.weight"]).resolve(outer), torch.ones(1)).add(p, root_of(p.outputs))

    monkeypatch.setattr(memory_check, "available_memory", lambda device: 100)
    with pytest.raises(NotEnoughMemory, match=r"bytes.*hessian_structure='diag'"):
        fitted(model, x)


def test_a_curvature_that_is_not_finite_is_refused():
    model, x = made("mlp")
    selection = All().resolve(model)
    state = Kron().start(selection, x)
    with JacobianBackend(model, selection).forward(x) as p:
        state.add(p, torch.full((N, 3, 1), torch.nan, dtype=torch.float64))
    with pytest.raises(SingularPosterior, match=r"0\.weight is not finite"):
        state.finish()
