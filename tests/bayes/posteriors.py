"""Small networks and data that several tests of posteriors share."""

import torch
from torch import nn

from pippin.bayes.laplace.functional import Functional
from pippin.bayes.laplace.low_rank import LowRank

STRUCTURES = ["full", "diag", "kron", LowRank(5), Functional(10)]


def net(outputs=3, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, outputs)).to(dtype).eval()


def classes(n=40, k=3, dtype=torch.float64):
    x = torch.randn(n, 2, generator=torch.Generator().manual_seed(1), dtype=dtype)
    return [(x[: n // 2], (torch.arange(n) % k)[: n // 2]), (x[n // 2 :], (torch.arange(n) % k)[n // 2 :])]


def line(n=40, sigma=0.3):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    w = torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64)
    y = x @ w + sigma * torch.randn(n, 1, generator=generator, dtype=torch.float64)
    return x, y


def ridge(x, y, precision, sigma):
    """The mode of a linear model without bias."""
    model = nn.Linear(x.shape[1], 1, bias=False).double()
    gram = x.T @ x / sigma**2 + precision * torch.eye(x.shape[1], dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.linalg.solve(gram, x.T @ y / sigma**2).T)
    return model
