"""The Inception-v3 network whose features the Fréchet Inception distance (FID) uses.

Notable here:
- weights are read as raw arrays in the order of the layers: no pickle is opened and none of the archive's code is run;
  the catalog has checked the file's hash before
- images of any size are first resized to 299 by 299, with antialiasing; published distances often use other resizing,
  so figures are comparable only with each other
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from pippin.core.errors import AssetError, CorruptedFile, InvalidInput
from pippin.core.store import store

NAME: Final = "inception-fid"
"""The catalog's name of the weights: `pippin pull inception-fid`."""
_PREFIX = "out_jit_module/data/"


class InceptionFeatures(nn.Module):
    """Features of the last pooling layer; implements `pippin.evaluate.images.features.Features`.

    Source: Szegedy et al. 2015, arXiv:1512.00567; the weights of Heusel et al. 2017, arXiv:1706.08500.

    Attributes:
        name: the extractor's name in reports.
        dim: number of features of an image.
    """

    name = "Inception-v3 (2,048 features, antialiased to 299)"
    dim = 2048

    def __init__(self) -> None:
        super().__init__()
        stem = [_Conv(3, 32, 3, stride=2), _Conv(32, 32, 3), _Conv(32, 64, 3, padding=1)]
        self.stem = nn.Sequential(*stem, nn.MaxPool2d(3, 2), _Conv(64, 80, 1), _Conv(80, 192, 3), nn.MaxPool2d(3, 2))
        mixed: list[nn.Module] = [_a(192, 32), _a(256, 64), _a(288, 64), _b(288)]
        mixed += [_c(width) for width in (128, 160, 160, 192)]
        mixed += [_d(), _E(1280, nn.AvgPool2d(3, 1, 1, count_include_pad=False)), _E(2048, nn.MaxPool2d(3, 1, 1))]
        self.mixed = nn.Sequential(*mixed)

    @torch.no_grad()
    def forward(self, x: Float[Tensor, "n channels h w"]) -> Float[Tensor, "n 2048"]:
        """The features of images with values from -1 to 1; grayscale images are repeated on three channels.

        Raises:
            InvalidInput: images without one or three channels.
        """
        if x.ndim != 4 or x.shape[1] not in (1, 3):
            raise InvalidInput(f"Inception takes images of 1 or 3 channels, got a shape of {tuple(x.shape)}")
        scaled = ((x.clamp(-1, 1) * 127.5 - 0.5) / 128).expand(-1, 3, -1, -1)  # (level - 128) / 128, as in training
        scaled = F.interpolate(scaled, (299, 299), mode="bilinear", antialias=True, align_corners=False)
        out: Tensor = self.mixed(self.stem(scaled)).mean((2, 3))
        return out


class _Conv(nn.Module):
    """A convolution without bias, batch normalization with fixed statistics, and a ReLU."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        size: int | tuple[int, int],
        *,
        stride: int = 1,
        padding: int | tuple[int, int] = 0,
    ) -> None:
        super().__init__()
        high, wide = (size, size) if isinstance(size, int) else size
        self.stride, self.padding = stride, padding
        self.weight = nn.Parameter(torch.empty(outputs, inputs, high, wide))
        self.beta = nn.Parameter(torch.zeros(outputs))
        self.mean = nn.Parameter(torch.zeros(outputs))
        self.variance = nn.Parameter(torch.ones(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.conv2d(x, self.weight, None, self.stride, self.padding)
        return F.batch_norm(y, self.mean, self.variance, None, self.beta, False, 0.0, 1e-3).relu_()


class _Parallel(nn.Module):
    """Several branches on the same input, concatenated along the channels."""

    def __init__(self, *towers: nn.Module) -> None:
        super().__init__()
        self.towers = nn.ModuleList(towers)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([tower(x) for tower in self.towers], 1)


def _average() -> nn.Module:
    return nn.AvgPool2d(3, 1, 1, count_include_pad=False)


def _a(inputs: int, pooled: int) -> nn.Module:
    return _Parallel(
        _Conv(inputs, 64, 1),
        nn.Sequential(_Conv(inputs, 48, 1), _Conv(48, 64, 5, padding=2)),
        nn.Sequential(_Conv(inputs, 64, 1), _Conv(64, 96, 3, padding=1), _Conv(96, 96, 3, padding=1)),
        nn.Sequential(_average(), _Conv(inputs, pooled, 1)),
    )


def _b(inputs: int) -> nn.Module:
    return _Parallel(
        _Conv(inputs, 384, 3, stride=2),
        nn.Sequential(_Conv(inputs, 64, 1), _Conv(64, 96, 3, padding=1), _Conv(96, 96, 3, stride=2)),
        nn.MaxPool2d(3, 2),
    )


def _c(width: int) -> nn.Module:
    def wide(inputs: int, outputs: int) -> _Conv:
        return _Conv(inputs, outputs, (1, 7), padding=(0, 3))

    def high(inputs: int, outputs: int) -> _Conv:
        return _Conv(inputs, outputs, (7, 1), padding=(3, 0))

    return _Parallel(
        _Conv(768, 192, 1),
        nn.Sequential(_Conv(768, width, 1), wide(width, width), high(width, 192)),
        nn.Sequential(
            _Conv(768, width, 1), high(width, width), wide(width, width), high(width, width), wide(width, 192)
        ),
        nn.Sequential(_average(), _Conv(768, 192, 1)),
    )


def _d() -> nn.Module:
    seven = [_Conv(192, 192, (1, 7), padding=(0, 3)), _Conv(192, 192, (7, 1), padding=(3, 0))]
    return _Parallel(
        nn.Sequential(_Conv(768, 192, 1), _Conv(192, 320, 3, stride=2)),
        nn.Sequential(_Conv(768, 192, 1), *seven, _Conv(192, 192, 3, stride=2)),
        nn.MaxPool2d(3, 2),
    )


class _E(nn.Module):
    """The mixed block with two branches that split once more at their end."""

    def __init__(self, inputs: int, pool: nn.Module) -> None:
        super().__init__()

        def split() -> nn.Module:
            return _Parallel(_Conv(384, 384, (1, 3), padding=(0, 1)), _Conv(384, 384, (3, 1), padding=(1, 0)))

        self.one = _Conv(inputs, 320, 1)
        self.two, self.two_parts = _Conv(inputs, 384, 1), split()
        self.three = nn.Sequential(_Conv(inputs, 448, 1), _Conv(448, 384, 3, padding=1))
        self.three_parts = split()
        self.pool, self.four = pool, _Conv(inputs, 192, 1)

    def forward(self, x: Tensor) -> Tensor:
        two, three = self.two_parts(self.two(x)), self.three_parts(self.three(x))
        return torch.cat([self.one(x), two, three, self.four(self.pool(x))], 1)


def inception(path: str | Path | None = None) -> InceptionFeatures:
    """Load the network with its pretrained weights.

    Args:
        path: the file of weights; None takes the file that `pippin pull inception-fid` put into the cache. Nothing is
            downloaded here.

    Raises:
        AssetError: there is no such file; the message says how to get it.
        CorruptedFile: the file is not an archive of these weights.
    """
    file = store.find(NAME) if path is None else Path(path)
    if file is None or not file.is_file():
        raise AssetError(f"the Inception weights are not here: pippin pull {NAME}")
    network = InceptionFeatures().requires_grad_(False).eval()
    try:
        with zipfile.ZipFile(file) as archive:
            for index, (name, tensor) in enumerate(_tensors(network)):
                raw = archive.read(f"{_PREFIX}{index}")
                if len(raw) != tensor.nbytes:
                    raise CorruptedFile(f"{file}: {name} has {len(raw)} bytes, wanted {tensor.nbytes}")
                tensor.copy_(torch.from_numpy(np.frombuffer(raw, "<f4").copy()).view_as(tensor))
    except (zipfile.BadZipFile, KeyError, OSError) as error:
        raise CorruptedFile(f"{file} is not an archive of the Inception weights: {error}; pull it again") from error
    return network


def _tensors(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of all layers in the order of the archive: weight, shift, mean and variance of each."""
    for name, module in network.named_modules():
        if isinstance(module, _Conv):
            for part in ("weight", "beta", "mean", "variance"):
                yield f"{name}.{part}", getattr(module, part).data
