"""A small network, captured once."""

import pytest
import torch
from torch import nn

from pippin.shape.export import ExportedModel, SizeRange


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.fc1 = nn.Linear(512, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, picture):
        return self.fc2(self.fc1(self.conv(picture).relu().flatten(1)).relu())


@pytest.fixture(scope="session")
def network():
    torch.manual_seed(0)
    return Network().eval()


@pytest.fixture(scope="session")
def asset(network):
    example = {"picture": torch.randn(2, 1, 8, 8)}
    return ExportedModel.capture(network, example, {"picture": {0: SizeRange("batch", 1, 64)}}, outputs=("logits",))
