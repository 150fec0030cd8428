"""Which method quantized a folder, and the matrices that it holds.

Notable here:
- a configuration names its method (`quant_method`), but for MLX's (`quantization` or no name) and ModelOpt's, which may
  lie in a file of its own
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from pippin.core.errors import CorruptedFile, UnsupportedModel
from pippin.core.formats.checkpoint import Checkpoint, read_json
from pippin.language.quantized import awq, bitsandbytes, compressed_tensors, float8, gptq, mlx
from pippin.language.quantized.float4 import mxfp4, nvfp4
from pippin.language.quantized.matrix import QuantizedMatrix, require_choice

Reader = Callable[[Checkpoint, Mapping[str, Any]], list[QuantizedMatrix]]
_MODELOPT: Final = "hf_quant_config.json"


def _gpt_oss(checkpoint: Checkpoint, settings: Mapping[str, Any]) -> list[QuantizedMatrix]:
    """The experts of gpt-oss."""
    names = [name.removesuffix("_blocks") for name in checkpoint.names() if name.endswith("_blocks")]
    return [mxfp4(checkpoint, name, f"{name}_blocks", f"{name}_scales") for name in names]


def _modelopt(checkpoint: Checkpoint, settings: Mapping[str, Any]) -> list[QuantizedMatrix]:
    """NVFP4 and FP8 of NVIDIA's ModelOpt."""
    require_choice(checkpoint, "quant_algo", settings.get("quant_algo"), ("NVFP4", "FP8"))
    found = []
    for name in checkpoint.names():
        if name.endswith(".weight") and checkpoint.dtype(name) in float8.DTYPES:
            found.append(float8.float8(checkpoint, name, f"{name}_scale", None))
        elif name.endswith(".weight") and checkpoint.dtype(name) == "U8":
            scales = f"{name}_scale", f"{name}_scale_2"
            found.append(nvfp4(checkpoint, name, name, *scales, divided=False))
    return found


METHODS: Final[dict[str, Reader]] = {
    "awq": awq.read,
    "bitsandbytes": bitsandbytes.read,
    "compressed-tensors": compressed_tensors.read,
    "fp8": float8.read,
    "gptq": gptq.read,
    "mlx": mlx.read,
    "modelopt": _modelopt,
    "mxfp4": _gpt_oss,
}
"""The methods whose folders open, by their name in `quantization_config` (and "mlx")."""


def settings_of(checkpoint: Checkpoint) -> tuple[str, Mapping[str, Any]] | None:
    """The method that quantized a folder, and its settings; None for a folder that is not quantized.

    Raises:
        CorruptedFile: the settings are no JSON object.
    """
    config = checkpoint.config
    text = config.get("text_config")
    for described in (
        config.get("quantization_config"),
        config.get("quantization"),
        text.get("quantization_config") if isinstance(text, dict) else None,
    ):
        if described is None:
            continue
        if not isinstance(described, dict):
            raise CorruptedFile(f"{checkpoint.folder}: quantization_config is {described!r:.40}, not an object")
        method = described.get("quant_method")
        if method is None and "group_size" in described and "bits" in described:
            method = "mlx"
        if method is None and "quant_algo" in described:
            method = "modelopt"
        return str(method), described
    if (checkpoint.folder / _MODELOPT).is_file():
        described = read_json(checkpoint.folder / _MODELOPT).get("quantization")
        if not isinstance(described, dict):
            raise CorruptedFile(f"{checkpoint.folder / _MODELOPT} has no object 'quantization'; download it again")
        return "modelopt", described
    return None


def read_matrices(checkpoint: Checkpoint, method: str, settings: Mapping[str, Any]) -> dict[str, QuantizedMatrix]:
    """The quantized matrices of a folder, by the names of the tensors that they stand for; scales are checked.

    Args:
        checkpoint: an open folder.
        method: the name of the method, one of `METHODS`.
        settings: what the configuration says of it.

    Raises:
        UnsupportedModel: a method, version or number of bits that is not known.
        CorruptedFile: parts are missing, contradict each other or the configuration, or a scale is not usable.
    """
    if method not in METHODS:
        raise UnsupportedModel(
            f"{checkpoint.folder} holds weights quantized by {method}, which is not supported (supported are "
            f"{', '.join(METHODS)}); take the unquantized folder or a GGUF file"
        )
    try:
        found = {matrix.name: matrix for matrix in METHODS[method](checkpoint, settings)}
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, re.error) as error:
        raise CorruptedFile(f"{checkpoint.folder}: quantization_config contradicts itself: {error}") from error
    if not found:
        raise CorruptedFile(f"{checkpoint.folder} says that {method} quantized it, and holds no quantized matrix")
    return found
