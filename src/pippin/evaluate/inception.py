"""The Inception-v3 network whose features the Fréchet Inception distance is measured in.

Notable here:
- its weights are read as plain numbers, in the order in which the layers stand: no pickle is opened and no program that
  came with them is run; the catalogue has checked the file by its hash before
- pictures of any size are first resized to 299 by 299, with antialiasing; published distances were often measured with
  other resizing, so figures are comparable only among themselves
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

from pippin.core import store
from pippin.core.errors import AssetError, CorruptedFile, InvalidInput

NAME: Final = "inception-fid"
"""The catalogue's name of the weights: `pippin pull inception-fid`."""
_PREFIX = "out_jit_module/data/"


class InceptionFeatures(nn.Module):
    """Features of the last pooling, as `pippin.evaluate.features.Features`.

    Source: Szegedy et al. 2015, arXiv:1512.00567; the weights of Heusel et al. 2017, arXiv:1706.08500.

    Attributes:
        name: says what was measured in.
        dim: features of a picture.
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
        """The features of pictures from -1 to 1; grey ones are shown on all three channels.

        Raises:
            InvalidInput: pictures of other than one or three channels.
        """
        if x.ndim != 4 or x.shape[1] not in (1, 3):
            raise InvalidInput(f"Inception reads pictures of 1 or 3 channels, got a shape of {tuple(x.shape)}")
        shown = ((x.clamp(-1, 1) * 127.5 - 0.5) / 128).expand(-1, 3, -1, -1)  # (level - 128) / 128
        shown = F.interpolate(shown, (299, 299), mode="bilinear", antialias=True, align_corners=False)
        out: Tensor = self.mixed(self.stem(shown)).mean((2, 3))
        return out


class _Conv(nn.Module):
    """A convolution without bias, its batch statistics, and the positive part."""

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


class _Beside(nn.Module):
    """Several towers over the same input, their channels side by side."""

    def __init__(self, *towers: nn.Module) -> None:
        super().__init__()
        self.towers = nn.ModuleList(towers)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([tower(x) for tower in self.towers], 1)


def _average() -> nn.Module:
    return nn.AvgPool2d(3, 1, 1, count_include_pad=False)


def _a(inputs: int, pooled: int) -> nn.Module:
    return _Beside(
        _Conv(inputs, 64, 1),
        nn.Sequential(_Conv(inputs, 48, 1), _Conv(48, 64, 5, padding=2)),
        nn.Sequential(_Conv(inputs, 64, 1), _Conv(64, 96, 3, padding=1), _Conv(96, 96, 3, padding=1)),
        nn.Sequential(_average(), _Conv(inputs, pooled, 1)),
    )


def _b(inputs: int) -> nn.Module:
    return _Beside(
        _Conv(inputs, 384, 3, stride=2),
        nn.Sequential(_Conv(inputs, 64, 1), _Conv(64, 96, 3, padding=1), _Conv(96, 96, 3, stride=2)),
        nn.MaxPool2d(3, 2),
    )


def _c(width: int) -> nn.Module:
    def wide(inputs: int, outputs: int) -> _Conv:
        return _Conv(inputs, outputs, (1, 7), padding=(0, 3))

    def high(inputs: int, outputs: int) -> _Conv:
        return _Conv(inputs, outputs, (7, 1), padding=(3, 0))

    return _Beside(
        _Conv(768, 192, 1),
        nn.Sequential(_Conv(768, width, 1), wide(width, width), high(width, 192)),
        nn.Sequential(
            _Conv(768, width, 1), high(width, width), wide(width, width), high(width, width), wide(width, 192)
        ),
        nn.Sequential(_average(), _Conv(768, 192, 1)),
    )


def _d() -> nn.Module:
    seven = [_Conv(192, 192, (1, 7), padding=(0, 3)), _Conv(192, 192, (7, 1), padding=(3, 0))]
    return _Beside(
        nn.Sequential(_Conv(768, 192, 1), _Conv(192, 320, 3, stride=2)),
        nn.Sequential(_Conv(768, 192, 1), *seven, _Conv(192, 192, 3, stride=2)),
        nn.MaxPool2d(3, 2),
    )


class _E(nn.Module):
    """Towers that part once more at their end."""

    def __init__(self, inputs: int, pool: nn.Module) -> None:
        super().__init__()

        def parted() -> nn.Module:
            return _Beside(_Conv(384, 384, (1, 3), padding=(0, 1)), _Conv(384, 384, (3, 1), padding=(1, 0)))

        self.one = _Conv(inputs, 320, 1)
        self.two, self.two_parts = _Conv(inputs, 384, 1), parted()
        self.three = nn.Sequential(_Conv(inputs, 448, 1), _Conv(448, 384, 3, padding=1))
        self.three_parts = parted()
        self.pool, self.four = pool, _Conv(inputs, 192, 1)

    def forward(self, x: Tensor) -> Tensor:
        two, three = self.two_parts(self.two(x)), self.three_parts(self.three(x))
        return torch.cat([self.one(x), two, three, self.four(self.pool(x))], 1)


def inception(path: str | Path | None = None) -> InceptionFeatures:
    """The network with its weights.

    Args:
        path: the file; None takes what `pippin pull inception-fid` has put into the cache, and fetches nothing.

    Raises:
        AssetError: the weights are not there; the message says how to get them.
        CorruptedFile: the file holds something else.
    """
    file = store.find(NAME) if path is None else Path(path)
    if file is None or not file.is_file():
        raise AssetError(f"the Inception weights are not here: pippin pull {NAME}")
    network = InceptionFeatures().requires_grad_(False).eval()
    try:
        with zipfile.ZipFile(file) as archive:
            for number, (name, tensor) in enumerate(_tensors(network)):
                raw = archive.read(f"{_PREFIX}{number}")
                if len(raw) != tensor.nbytes:
                    raise CorruptedFile(f"{file}: {name} has {len(raw)} bytes, wanted {tensor.nbytes}")
                tensor.copy_(torch.from_numpy(np.frombuffer(raw, "<f4").copy()).view_as(tensor))
    except (zipfile.BadZipFile, KeyError, OSError) as error:
        raise CorruptedFile(f"{file} is no archive of the Inception weights: {error}; pull it again") from error
    return network


def _tensors(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All numbers of the layers in their order: weight, shift, mean, variance."""
    for name, module in network.named_modules():
        if isinstance(module, _Conv):
            for part in ("weight", "beta", "mean", "variance"):
                yield f"{name}.{part}", getattr(module, part).data
