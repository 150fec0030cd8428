"""Reads folders that `pippin shape quantize --to` wrote with the libraries that they are for.

Usage: python tests/shape/export/check_written.py FOLDER..., where the packages of
tests/language/quantized/make_fixtures.py are installed, and mlx-lm 0.32.2. Every matrix of a GPTQ or AWQ folder is
dequantized by AutoGPTQ or AutoAWQ and compared bit by bit; one of MLX is run by mlx-lm, and its logits are compared.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

import pippin
from pippin.core.formats.checkpoint import open_folder
from pippin.language.quantized_checkpoint import quantized_matrices

sys.path.append(str(Path(__file__).resolve().parents[2] / "language" / "quantized"))
from make_fixtures import file_of


def dequantized(settings: dict[str, Any], parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """A matrix (outputs, inputs), half precision, by the library that the layout is of."""
    if settings["quant_method"] == "awq":
        packing = file_of("awq", "utils.packing_utils")
        values = [parts[part] for part in ("qweight", "qzeros", "scales")]
        matrix: torch.Tensor = packing.dequantize_gemm(*values, 4, settings["group_size"]).t()
        return matrix
    quantizer = file_of("auto_gptq", "nn_modules.qlinear.qlinear_cuda").QuantLinear
    inputs, outputs = len(parts["g_idx"]), parts["scales"].shape[1]
    layer = quantizer(settings["bits"], settings["group_size"], inputs, outputs, False, weight_dtype=torch.float16)
    layer.load_state_dict(parts)
    return layer(torch.eye(inputs).half()).t()


def check_matrices(folder: Path) -> str:
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    tensors = load_file(folder / "model.safetensors")
    _, matrices = quantized_matrices(open_folder(folder))
    for name, matrix in matrices.items():
        stem = name.removesuffix("weight")
        parts = {part.removeprefix(stem): tensors[part] for part in matrix.parts}
        assert torch.equal(dequantized(settings, parts), matrix.dense().half()), name
    return f"{len(matrices)} matrices are bit-identical"


def check_logits(folder: Path) -> str:
    import mlx.core as mx
    from mlx_lm.utils import load_model

    mx.set_default_device(mx.cpu)
    theirs, _ = load_model(folder)
    theirs.set_dtype(mx.float32)  # of scales and biases, exactly; in half precision the computation would differ
    ours = pippin.load(folder, device="cpu", dtype="float32", pack=False)
    ids = ours.tokenizer.encode("The library on Mill Street opens at nine.")
    expected = np.array(theirs(mx.array([ids])).astype(mx.float32))[0]
    with torch.no_grad():
        found = ours.module(torch.tensor([ids]))[0].numpy()
    away = np.abs(found - expected).max()
    assert away < 1e-4 * np.abs(expected).max(), away
    return f"logits differ by {away:.2g} at most, of up to {np.abs(expected).max():.3g}"


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        path = Path(argument)
        is_mlx = "quantization" in json.loads((path / "config.json").read_text())
        print(path, check_logits(path) if is_mlx else check_matrices(path))
