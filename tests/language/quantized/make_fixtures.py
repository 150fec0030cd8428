"""Writes `fixtures/`: small quantized matrices as other libraries store them, and what they say their values are.

Usage: python tests/language/quantized/make_fixtures.py [METHOD...], where these packages are installed beside torch and
transformers (none of them is a dependency; `pip install --no-deps` is enough, and no GPU is used): auto-gptq 0.7.1,
autoawq 0.2.9, gptqmodel 7.3.4, compressed-tensors 0.20.0, mlx 0.32.4 with mlx-cpu, bitsandbytes 0.50.2,
nvidia-modelopt 0.47.0.

A fixture holds the tensors of one matrix under their names in a folder, its `quantization_config`, and the SHA-256 of
the reference's values in the reference's own precision (with 0 for -0), of which the first row is kept too.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.machinery
import importlib.util
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

FOLDER = Path(__file__).parent / "fixtures"
STEM = "model.layers.0.mlp.up_proj"
ROWS, COLUMNS = 32, 64
Fixture = tuple[str, dict[str, Tensor], dict[str, Any], Tensor]


def file_of(package: str, module: str) -> Any:
    """A module of a package, without running the packages above it, which ask for a GPU or for other versions."""
    spec = importlib.machinery.PathFinder.find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations
    root = Path(spec.submodule_search_locations[0])
    names = f"{package}.{module}".split(".")
    for depth in range(1, len(names)):
        name = ".".join(names[:depth])
        if name not in sys.modules:
            bare = types.ModuleType(name)
            bare.__path__ = [str(root.joinpath(*names[1:depth]))]
            sys.modules[name] = bare
    return importlib.import_module(f"{package}.{module}")


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def grid(weight: Tensor, bits: int, group: int, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Half-precision scales and zero points (rows, groups) of a matrix."""
    parts = weight.view(len(weight), -1, group)
    top = 2**bits - 1
    if symmetric:
        scales = parts.abs().amax(-1) * 2 / top
        return scales.half().float(), torch.full_like(scales, 2 ** (bits - 1))
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    scales = ((high - low) / top).half().float()
    return scales, (-low / scales).round().clamp(1, top)  # version 1 has no zero point of 0


def gptq() -> Iterator[Fixture]:
    quantizer = file_of("auto_gptq", "nn_modules.qlinear.qlinear_cuda").QuantLinear
    cases = [(bits, 32, False, False) for bits in (2, 3, 4, 8)]
    cases += [(4, 32, True, False), (8, -1, True, False), (4, 32, False, True)]
    for bits, group, symmetric, ordered in cases:
        weight = random(bits, ROWS, COLUMNS)
        size = COLUMNS if group == -1 else group
        groups = torch.arange(COLUMNS) // size
        if ordered:
            groups = groups[torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(1))]
        scales, zeros = grid(weight[:, groups.argsort(stable=True)], bits, size, symmetric)
        linear = torch.nn.Linear(COLUMNS, ROWS, bias=False).half()
        linear.weight.data = weight.half()
        layer = quantizer(bits, group, COLUMNS, ROWS, False, weight_dtype=torch.float16)
        layer.pack(linear, scales.clone(), zeros.clone(), groups.int())
        # the reference multiplies by its weights: the identity gives them
        reference = layer(torch.eye(COLUMNS).half()).t()
        name = f"gptq-{bits}" + "-symmetric" * symmetric + "-act-order" * ordered + "-channel" * (group == -1)
        settings = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": ordered, "sym": symmetric}
        yield (
            name,
            {part: getattr(layer, part) for part in ("qweight", "qzeros", "scales", "g_idx")},
            settings,
            reference,
        )


def gptq_v2() -> Iterator[Fixture]:
    quantizer = importlib.import_module("gptqmodel.nn_modules.qlinear.torch").TorchLinear
    for bits in (3, 4):
        weight = random(bits, ROWS, COLUMNS)
        scales, zeros = grid(weight, bits, 32, False)
        linear = torch.nn.Linear(COLUMNS, ROWS, bias=False)
        linear.weight.data = weight
        layer = quantizer(bits, 32, False, False, COLUMNS, ROWS, register_buffers=True)
        layer.pack(linear, scales, zeros, (torch.arange(COLUMNS) // 32).int())
        layer.eval()
        tensors = {part: getattr(layer, part) for part in ("qweight", "qzeros", "scales", "g_idx")}
        settings = {"quant_method": "gptq", "bits": bits, "group_size": 32, "checkpoint_format": "gptq_v2"}
        yield f"gptq-v2-{bits}", tensors, settings, layer.dequantize_weight().t().half()


def awq() -> Iterator[Fixture]:
    packing = file_of("awq", "utils.packing_utils")
    for name, group, symmetric in (("32", 32, False), ("64", 64, False), ("symmetric", 32, True)):
        weight = random(group, ROWS, COLUMNS)
        scales, zeros = grid(weight, 4, group, symmetric)
        wide = [values.repeat_interleave(group, 1) for values in (scales, zeros)]
        codes = (weight / wide[0] + wide[1]).round().clamp(0, 15).int()

        def packed(values: Tensor) -> Tensor:  # as WQLinear_GEMM.from_linear does it
            words = torch.zeros(len(values), values.shape[1] // 8, dtype=torch.int32)
            for nibble, output in enumerate(packing.AWQ_ORDER):
                words |= values[:, output::8] << (4 * nibble)
            return words

        tensors = {"qweight": packed(codes.t()), "qzeros": packed(zeros.t().int()), "scales": scales.t().half()}
        reference = packing.dequantize_gemm(*tensors.values(), 4, group).t()
        settings = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
        yield f"awq-{name}", tensors, settings, reference


def compressed_tensors() -> Iterator[Fixture]:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    cases: list[tuple[str, str, dict[str, Any], torch.dtype]] = [
        ("int4", "pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}, torch.bfloat16),
        (
            "int4-asymmetric",
            "pack-quantized",
            {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
            torch.bfloat16,
        ),
        ("int3", "pack-quantized", {"num_bits": 3, "strategy": "group", "group_size": 32}, torch.float16),
        ("int8-packed", "pack-quantized", {"num_bits": 8, "strategy": "channel"}, torch.float16),
        ("int8", "int-quantized", {"num_bits": 8, "strategy": "channel"}, torch.bfloat16),
        ("int8-tensor", "int-quantized", {"num_bits": 8, "strategy": "tensor"}, torch.bfloat16),
        (
            "int8-asymmetric",
            "int-quantized",
            {"num_bits": 8, "strategy": "channel", "symmetric": False},
            torch.bfloat16,
        ),
        ("fp8", "float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, torch.bfloat16),
        ("fp8-tensor", "float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}, torch.float32),
        (
            "fp8-block",
            "float-quantized",
            {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [24, 48]},
            torch.bfloat16,
        ),
        (
            "nvfp4",
            "nvfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
            torch.bfloat16,
        ),
        (
            "mxfp4",
            "mxfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
            torch.bfloat16,
        ),
    ]
    for name, form, weights, dtype in cases:
        scheme = QuantizationScheme(targets=["Linear"], weights=weights)
        args = scheme.weights
        weight = (random(len(name), ROWS, COLUMNS) + 0.2).to(dtype)
        state = {"weight": weight}
        if args.strategy in ("group", "tensor_group"):
            parts = weight.view(ROWS, -1, args.group_size)
        elif args.strategy == "block":
            height, width = args.block_structure
            padded = torch.nn.functional.pad(weight, (0, -COLUMNS % width, 0, -ROWS % height))
            parts = padded.view(padded.shape[0] // height, height, -1, width).transpose(1, 2).flatten(2)
        else:
            parts = weight.view(ROWS, 1, -1) if args.strategy == "channel" else weight.view(1, 1, -1)
        extra = {}
        if name == "nvfp4":
            extra["global_scale"] = state["weight_global_scale"] = (448 * 6 / weight.abs().max().float()).view(1)
        scale, zero = calculate_qparams(parts.amin(-1), parts.amax(-1), args, **extra)
        state["weight_scale"], state["weight_zero_point"] = scale, zero
        compressor = BaseCompressor.get_value_from_registry(form)
        stored = compressor.compress(state, scheme)
        reference = compressor.decompress(dict(stored), scheme)["weight"]
        stored = {part: value for part, value in stored.items() if part != "weight_zero_point" or not args.symmetric}
        settings = {
            "quant_method": "compressed-tensors",
            "format": form,
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": args.model_dump(mode="json")}},
            "ignore": ["lm_head"],
        }
        yield f"compressed-tensors-{name}", stored, settings, reference


def mlx() -> Iterator[Fixture]:
    import mlx.core as mx

    def to_torch(array: Any) -> Tensor:
        if array.dtype == mx.bfloat16:
            return torch.from_numpy(np.array(array.view(mx.uint16))).view(torch.bfloat16)
        return torch.from_numpy(np.array(array))

    cases = [(2, 32, mx.float32), (3, 64, mx.float16), (4, 64, mx.bfloat16), (4, 32, mx.float16)]
    cases += [(5, 32, mx.float32), (6, 64, mx.bfloat16), (8, 64, mx.float16)]
    for bits, group, dtype in cases:
        weight = mx.array(random(bits + group, ROWS, COLUMNS).numpy()).astype(dtype)
        words, scales, biases = mx.quantize(weight, group_size=group, bits=bits)
        # in float32, as its kernels compute; in half precision its dequantizer rounds each product, too
        wide = scales.astype(mx.float32), biases.astype(mx.float32)
        reference = to_torch(mx.dequantize(words, *wide, group_size=group, bits=bits))
        tensors = {"weight": to_torch(words), "scales": to_torch(scales), "biases": to_torch(biases)}
        name = f"mlx-{bits}-{group}-{str(dtype).rpartition('.')[2]}"
        yield name, tensors, {"group_size": group, "bits": bits, "mode": "affine"}, reference
    weight = mx.array(random(9, ROWS, COLUMNS).numpy())
    words, scales = mx.quantize(weight, group_size=32, bits=4, mode="mxfp4")
    reference = to_torch(mx.dequantize(words, scales, group_size=32, bits=4, mode="mxfp4"))
    tensors = {"weight": to_torch(words), "scales": to_torch(scales)}
    yield "mlx-mxfp4", tensors, {"group_size": 32, "bits": 4, "mode": "mxfp4"}, reference


def fp8() -> Iterator[Fixture]:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    weight = (random(8, ROWS, COLUMNS) * 100).to(torch.float8_e4m3fn)
    for name, block, shape in (("block", [16, 32], (2, 2)), ("tensor", None, ())):
        scales = random(2, *shape).abs() / 300
        reference = Fp8Dequantize(None)._dequantize_one(weight, scales, torch.float32)
        settings = {"quant_method": "fp8", "weight_block_size": block, "activation_scheme": "dynamic", "fmt": "e4m3"}
        yield f"fp8-{name}", {"weight": weight, "weight_scale_inv": scales}, settings, reference


def mxfp4() -> Iterator[Fixture]:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(4)
    for name, low, high in (("", 104, 144), ("-wide", 1, 255)):
        blocks = torch.randint(0, 256, (2, ROWS, 2, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(low, high, (2, ROWS, 2), generator=generator).to(torch.uint8)
        reference = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
        tensors = {"gate_up_proj_blocks": blocks, "gate_up_proj_scales": scales}
        yield f"mxfp4{name}", tensors, {"quant_method": "mxfp4"}, reference.flatten(0, 1)


def bitsandbytes() -> Iterator[Fixture]:
    from bitsandbytes import functional

    weight = random(6, ROWS, COLUMNS)
    for kind, nested in (("nf4", False), ("nf4", True), ("fp4", False)):
        packed, state = functional.quantize_4bit(weight, quant_type=kind, blocksize=64, compress_statistics=nested)
        reference = functional.dequantize_4bit(packed, state)
        tensors = {"weight": packed} | {f"weight.{part}": value for part, value in state.as_dict(packed=True).items()}
        settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
        yield f"bitsandbytes-{kind}" + "-nested" * nested, tensors, settings, reference
    codes, scales, _ = functional.int8_vectorwise_quant(weight.half())
    reference = functional.int8_vectorwise_dequant(codes, scales)
    tensors = {"weight": codes, "SCB": scales, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    yield "bitsandbytes-int8", tensors, {"quant_method": "bitsandbytes", "load_in_8bit": True}, reference


def modelopt() -> Iterator[Fixture]:
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    weight = random(7, ROWS, COLUMNS)
    packed, scales, factor = NVFP4QTensor.quantize(weight, 16)
    reference = packed.dequantize(torch.float32, scale=scales, double_scale=factor, block_sizes={-1: 16})
    tensors = {
        "weight": packed._quantized_data,
        "weight_scale": scales,
        "weight_scale_2": factor.float(),
        "input_scale": torch.tensor(0.1),
    }
    yield "modelopt-nvfp4", tensors, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, reference


METHODS = (gptq, gptq_v2, awq, compressed_tensors, mlx, fp8, mxfp4, bitsandbytes, modelopt)


def digest(values: Tensor) -> str:
    """SHA-256 of values, with 0 for -0."""
    return hashlib.sha256((values + 0).contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def main() -> None:
    wanted = sys.argv[1:]
    for method in METHODS:
        if wanted and method.__name__ not in wanted:
            continue
        for name, parts, settings, reference in method():
            stem = "model.layers.0.mlp.experts" if method is mxfp4 else STEM
            tensors = {f"{stem}.{part}": value.detach().clone().contiguous() for part, value in parts.items()}
            reference = reference.detach().contiguous()
            metadata = {"sha256": digest(reference), "dtype": str(reference.dtype).removeprefix("torch.")}
            metadata |= {"first_row": json.dumps(reference[0].tolist()), "quantization_config": json.dumps(settings)}
            save_file(tensors, FOLDER / f"{name}.safetensors", metadata)
            print(name, tuple(reference.shape), metadata["dtype"])


if __name__ == "__main__":
    main()
