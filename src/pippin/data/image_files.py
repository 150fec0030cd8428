"""Samples written to files: pictures, sheets of several, and clips.

Notable here:
- a picture carries what is known of its making as text in its metadata
- files are written whole or not at all
"""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from jaxtyping import Float, UInt8
from torch import Tensor

from pippin.core.errors import InvalidArgument, MissingDependency
from pippin.core.files import atomic_write
from pippin.data.images import open_picture, to_levels

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

_LOSSLESS: Final = (".png", ".webp")
PICTURES: Final = (*_LOSSLESS, ".jpg", ".jpeg")
"""Suffixes that `write` knows."""
_COMMENT: Final = 0x9286
_UTF16: Final = b"UNICODE\x00"
CLIPS: Final = (".gif", ".webp", ".png", ".mp4")
"""Suffixes that `write_clip` knows; .png is animated."""


def picture(levels: UInt8[Tensor, "channels height width"]) -> Picture:
    """As a Pillow image.

    Raises:
        InvalidArgument: other than one or three channels.
        MissingDependency: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingDependency("pictures need Pillow: pip install 'pippin[image]'") from error
    if levels.ndim != 3 or levels.shape[0] not in (1, 3):
        raise InvalidArgument(f"a picture has 1 or 3 channels, got a shape of {tuple(levels.shape)}")
    values = levels.cpu().permute(1, 2, 0).contiguous().numpy()
    return Image.fromarray(values[..., 0] if levels.shape[0] == 1 else values)


def write(
    path: str | Path, sample: Float[Tensor, "channels height width"], *, text: Mapping[str, str] | None = None
) -> None:
    """Write one sample (-1 to 1, clipped) as a picture.

    Args:
        path: .png, .webp or .jpg.
        sample: the picture.
        text: what its metadata say; `text_of` reads it.

    Raises:
        InvalidArgument: another suffix or shape.
        DiskFull: nothing was written.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in PICTURES:
        raise InvalidArgument(f"{path.name}: pictures are written as {', '.join(PICTURES)}")
    image, buffer = picture(to_levels(sample)), io.BytesIO()
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


def text_of(path: str | Path) -> dict[str, str]:
    """What the metadata of a picture say, as `write` put it there; empty where there is nothing.

    Raises:
        InvalidImage: no picture that can be read.
    """
    image = open_picture(Path(path))
    said = dict(getattr(image, "text", {}))
    comment = image.getexif().get(_COMMENT, b"")
    if isinstance(comment, bytes) and comment.startswith(_UTF16):
        with contextlib.suppress(ValueError):  # another program's comment
            said |= json.loads(comment[len(_UTF16) :].decode("utf-16-be"))
    return {str(key): str(value) for key, value in said.items()}


def sheet(
    samples: Float[Tensor, "n channels height width"], *, columns: int | None = None, gap: int = 1, zoom: int = 1
) -> Float[Tensor, "channels rows columns"]:
    """Several samples as one picture, row by row, white between them.

    Args:
        samples: the pictures.
        columns: None for about a square.
        gap: pixels between them.
        zoom: each pixel becomes so many squared.

    >>> import torch
    >>> sheet(torch.zeros(4, 1, 8, 8)).shape
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


def write_clip(
    path: str | Path, frames: Float[Tensor, "frames channels height width"], *, fps: float = 8.0, zoom: int = 1
) -> None:
    """Write frames (-1 to 1, clipped) as a clip.

    Args:
        path: .gif, .webp or .png (animated), or .mp4.
        frames: the pictures in order.
        fps: frames a second.
        zoom: each pixel becomes so many squared.

    Raises:
        InvalidArgument: another suffix, no frames, or a rate that is not above 0.
        MissingDependency: Pillow, or for .mp4 PyAV, is not installed.
        DiskFull: nothing was written.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in CLIPS or frames.ndim != 4 or not len(frames) or not 0 < fps <= 240:
        raise InvalidArgument(
            f"{path.name}: clips are (frames, channels, height, width) written as {', '.join(CLIPS)}, with fps above "
            f"0 and up to 240; got a shape of {tuple(frames.shape)} and {fps}"
        )
    levels = to_levels(frames.repeat_interleave(zoom, 2).repeat_interleave(zoom, 3))
    buffer = io.BytesIO()
    if suffix == ".mp4":
        _encode(buffer, levels, fps)
    else:
        first, *rest = [picture(frame).convert("RGB") for frame in levels]
        kind = {".gif": "GIF", ".webp": "WEBP", ".png": "PNG"}[suffix]
        how: dict[str, Any] = {"lossless": True} if suffix == ".webp" else {}
        first.save(buffer, kind, save_all=True, append_images=rest, duration=1000 / fps, loop=0, **how)
    with atomic_write(path) as file:
        file.write(buffer.getvalue())


def _encode(buffer: io.BytesIO, levels: UInt8[Tensor, "frames channels height width"], fps: float) -> None:
    """H.264 in MP4; sides are filled up to even numbers, as the codec wants."""
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
