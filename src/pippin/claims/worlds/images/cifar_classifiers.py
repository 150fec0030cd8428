"""The ResNet-56 and the VGG-16 of the catalog, trained by others on CIFAR-10: networks of known accuracy (93 %).

Notable here:
- the files are pickled modules, pinned by hash; torch's restricted unpickler rebuilds them from the classes of `_SAVED`
  alone, and their weights go into the layers below
- images go in as levels divided by 255, not normalized
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pippin.core.errors import UnsupportedModel
from pippin.core.store import store

_SET = "cifar-10-classifiers"
Net = TypeVar("Net", bound=nn.Module)


class _Anything(nn.Module):
    """Placeholder for the classes of the files that torch does not have; only its attributes are read."""


_SAVED: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    (_Anything, "resnet.ResNet"),
    (_Anything, "resnet.BasicBlock"),
    (_Anything, "torchvision.models.vgg.VGG"),
    *(
        nn.Sequential,
        nn.Conv2d,
        nn.BatchNorm2d,
        nn.BatchNorm1d,
        nn.Linear,
        nn.ReLU,
        nn.MaxPool2d,
        nn.Dropout,
        nn.Identity,
    ),
]


class Residual(nn.Module):
    """Residual block: two convolutions and a shortcut.

    Source: He, Zhang, Ren, Sun, arXiv:1512.03385, section 4.2.
    """

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = nn.Sequential()
        if stride > 1:
            self.shortcut = nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        """Feature maps in, feature maps out."""
        inner = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(inner)) + self.shortcut(x))


class ResNet(nn.Module):
    """ResNet with three groups of residual blocks of 16, 32 and 64 channels, for images of 32 by 32."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(*(Residual(16, 16, 1) for _ in range(blocks)))
        self.layer2 = nn.Sequential(Residual(16, 32, 2), *(Residual(32, 32, 1) for _ in range(blocks - 1)))
        self.layer3 = nn.Sequential(Residual(32, 64, 2), *(Residual(64, 64, 1) for _ in range(blocks - 1)))
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Images (n, 3, 32, 32) in 0..1 to logits (n, 10)."""
        maps = self.layer3(self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x))))))
        logits: Tensor = self.linear(maps.mean((2, 3)))
        return logits


class VGG(nn.Module):
    """VGG with thirteen convolutions and two linear layers, batch norm and dropout.

    Source: Simonyan and Zisserman, arXiv:1409.1556, configuration D.
    """

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 3
        for width, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
            for i in range(depth):
                layers += [nn.Conv2d(before, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
                layers.append(nn.MaxPool2d(2) if i == depth - 1 else nn.Dropout(0.4))
                before = width
        self.features = nn.Sequential(*layers)
        head = [nn.Dropout(0.5), nn.Linear(512, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Dropout(0.5)]
        self.classifier = nn.Sequential(*head, nn.Linear(512, 10))

    def forward(self, x: Tensor) -> Tensor:
        """Images (n, 3, 32, 32) in 0..1 to logits (n, 10)."""
        logits: Tensor = self.classifier(self.features(x).flatten(1))
        return logits


def resnet56() -> ResNet:
    """ResNet-56 with its trained weights, in evaluation mode: 0.86 million weights.

    Raises:
        AssetError: the set "cifar-10-classifiers" can be neither found nor fetched.
    """
    return _filled(ResNet(9), "resnet56.pth")


def vgg16() -> VGG:
    """VGG-16 with its trained weights, in evaluation mode: 15 million weights.

    Raises:
        AssetError: the set "cifar-10-classifiers" can be neither found nor fetched.
    """
    return _filled(VGG(), "vgg16.pth")


def _filled(net: Net, name: str) -> Net:
    path = store.pull(_SET, show_progress=False) / name
    with torch.serialization.safe_globals(_SAVED):
        saved: nn.Module = torch.load(path, weights_only=True)
    try:
        net.load_state_dict(saved.state_dict())
    except RuntimeError as error:
        raise UnsupportedModel(f"{path} is not the network that it was: {error}") from error
    return net.eval()
