"""Writing samples to files: images, image grids, and videos.

Notable here:
- an image has text about its origin in its metadata
- files are written atomically
"""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import numpy as np
from annotated_types import Gt, Le
from jaxtyping import Float, UInt8
from torch import Tensor

from pippin.core.checks import checked
from pippin.core.errors import InvalidArgument, MissingDependency
from pippin.core.files import atomic_write
from pippin.data.images import open_image, to_levels

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

_LOSSLESS: Final = (".png", ".webp")
PICTURES: Final = (*_LOSSLESS, ".jpg", ".jpeg")
"""Suffixes that `write_image` supports."""
_COMMENT: Final = 0x9286
_UTF16: Final = b"UNICODE\x00"
CLIPS: Final = (".gif", ".webp", ".png", ".mp4")
"""Suffixes that `write_video` supports; .png is animated."""


def to_pil(levels: UInt8[Tensor, "channels height width"]) -> Picture:
    """As a Pillow image.

    Raises:
        InvalidArgument: other than one or three channels.
        MissingDependency: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingDependency("images need Pillow: pip install 'pippin[image]'") from error
    if levels.ndim != 3 or levels.shape[0] not in (1, 3):
        raise InvalidArgument(f"an image has 1 or 3 channels, got a shape of {tuple(levels.shape)}")
    values = levels.cpu().permute(1, 2, 0).contiguous().numpy()
    return Image.fromarray(values[..., 0] if levels.shape[0] == 1 else values)


def write_image(
    path: str | Path, sample: Float[Tensor, "channels height width"], *, text: Mapping[str, str] | None = None
) -> None:
    """Write one sample (-1 to 1, clipped) as an image.

    Args:
        path: .png, .webp or .jpg.
        sample: the image.
        text: text for its metadata; `read_text` reads it.

    Raises:
        InvalidArgument: another suffix or shape.
        DiskFull: nothing was written.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in PICTURES:
        raise InvalidArgument(f"{path.name}: images are written as {', '.join(PICTURES)}")
    image, buffer = to_pil(to_levels(sample)), io.BytesIO()
    if suffix == ".png":
        from PIL.PngImagePlugin import PngInfo

        info = PngInfo()
        for key, value in (text or {}).items():
            info.add_itxt(key, value)
        image.save(buffer, "PNG", pnginfo=info)
    else:
        from PIL import Image

        exif = Image.Exif()
        exif[_COMMENT] = _UTF16 + json.dumps(dict(text or {}), ensure_ascii=False).encode("utf-16-be")
        image.save(buffer, "WEBP" if suffix == ".webp" else "JPEG", quality=95, lossless=suffix == ".webp", exif=exif)
    with atomic_write(path) as file:
        file.write(buffer.getvalue())


def read_text(path: str | Path) -> dict[str, str]:
    """The text in the metadata of an image, as `write_image` wrote it; empty if there is none.

    Raises:
        InvalidImage: not a readable image.
    """
    image = open_image(Path(path))
    said = dict(getattr(image, "text", {}))
    comment = image.getexif().get(_COMMENT, b"")
    if isinstance(comment, bytes) and comment.startswith(_UTF16):
        with contextlib.suppress(ValueError):  # another program's comment
            said |= json.loads(comment[len(_UTF16) :].decode("utf-16-be"))
    return {str(key): str(value) for key, value in said.items()}


def image_grid(
    samples: Float[Tensor, "n channels height width"], *, columns: int | None = None, gap: int = 1, zoom: int = 1
) -> Float[Tensor, "channels rows columns"]:
    """Several samples as one image, row by row, with white gaps.

    Args:
        samples: the images.
        columns: None for about a square.
        gap: pixels between them.
        zoom: integer upscaling factor.

    >>> import torch
    >>> image_grid(torch.zeros(4, 1, 8, 8)).shape
    torch.Size([1, 17, 17])
    """
    n, channels, height, width = samples.shape
    columns = columns or math.ceil(math.sqrt(n))
    rows = math.ceil(n / columns)
    out = samples.new_ones(channels, rows * (height + gap) - gap, columns * (width + gap) - gap)
    for index, sample in enumerate(samples):
        top, left = index // columns * (height + gap), index % columns * (width + gap)
        out[:, top : top + height, left : left + width] = sample
    return out.repeat_interleave(zoom, 1).repeat_interleave(zoom, 2)


@checked
def write_video(
    path: str | Path,
    frames: Float[Tensor, "frames channels height width"],
    *,
    fps: Annotated[float, Gt(0), Le(240)] = 8.0,
    zoom: int = 1,
) -> None:
    """Write frames (-1 to 1, clipped) as a video.

    Args:
        path: .gif, .webp or .png (animated), or .mp4.
        frames: the images in order.
        fps: frames per second.
        zoom: integer upscaling factor.

    Raises:
        InvalidArgument: another suffix, or no frames.
        MissingDependency: Pillow, or for .mp4 PyAV, is not installed.
        DiskFull: nothing was written.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in CLIPS or frames.ndim != 4 or not len(frames):
        raise InvalidArgument(
            f"{path.name}: videos are (frames, channels, height, width) written as {', '.join(CLIPS)}; got a shape of "
            f"{tuple(frames.shape)}"
        )
    levels = to_levels(frames.repeat_interleave(zoom, 2).repeat_interleave(zoom, 3))
    buffer = io.BytesIO()
    if suffix == ".mp4":
        _encode(buffer, levels, fps)
    else:
        first, *rest = [to_pil(frame).convert("RGB") for frame in levels]
        kind = {".gif": "GIF", ".webp": "WEBP", ".png": "PNG"}[suffix]
        how: dict[str, Any] = {"lossless": True} if suffix == ".webp" else {}
        first.save(buffer, kind, save_all=True, append_images=rest, duration=1000 / fps, loop=0, **how)
    with atomic_write(path) as file:
        file.write(buffer.getvalue())


def _encode(buffer: io.BytesIO, levels: UInt8[Tensor, "frames channels height width"], fps: float) -> None:
    """H.264 in MP4; sides are padded to even numbers, as the codec requires."""
    from fractions import Fraction

    try:
        import av
    except ImportError as error:
        raise MissingDependency("MP4 files need PyAV: pip install 'pippin[image]'; or write a .gif") from error
    frames = levels.expand(-1, 3, -1, -1).permute(0, 2, 3, 1).contiguous().numpy()
    frames = np.pad(frames, ((0, 0), (0, frames.shape[1] % 2), (0, frames.shape[2] % 2), (0, 0)), mode="edge")
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("h264", rate=Fraction(fps).limit_denominator(1000))
        stream.height, stream.width, stream.pix_fmt = frames.shape[1], frames.shape[2], "yuv420p"
        stream.options = {"crf": "18"}
        for frame in frames:
            for packet in stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
