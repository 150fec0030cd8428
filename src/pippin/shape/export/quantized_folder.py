r"""A quantized model as a folder that other libraries read: AutoGPTQ's layout, AutoAWQ's or MLX's.

Notable here:
- codes, scales and zero points go over as they are: the weights are bit-identical
- GPTQ and AWQ have whole zero points, so levels are unbalanced; MLX's bias is then $-2^{b-1} s$, exact in half
  precision
- GPTQ and AWQ quantize the layers alone; embedding and output matrix stay as they are. MLX quantizes them too, each
  with bits of its own
- matrices are laid out as the family's files have them (fused rows, their order), by the family's own rules
- what is not quantized is stored in half precision where that is exact, else in bfloat16, else in float32

Source: `auto_gptq.nn_modules.qlinear`, `awq.modules.linear.gemm`, `mlx.core.quantize`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
from torch import Tensor

from pippin.core.checks import checked
from pippin.core.errors import InvalidArgument, UnsupportedModel
from pippin.core.formats.checkpoint import save_folder
from pippin.language import families
from pippin.language.language_model import LanguageModel
from pippin.language.model_license import find_license
from pippin.language.quantized.awq import ORDER
from pippin.language.quantized_checkpoint import matrix_shapes
from pippin.nn.quantization.codes import Codes

Layout = Literal["awq", "gptq", "mlx"]
_BITS: Final[dict[str, tuple[int, ...]]] = {"awq": (4,), "gptq": (2, 3, 4, 8), "mlx": (2, 3, 4, 8)}


@checked
def save_quantized_as(layout: Layout, path: str | Path, model: LanguageModel, codes: Mapping[str, Codes]) -> None:
    """Write a model whose matrices are quantized, in the layout of another library; `pippin.load` reads it too.

    Args:
        layout: "gptq" (AutoGPTQ, version 1), "awq" (AutoAWQ, "gemm") or "mlx".
        path: created where it does not exist; a checkpoint already in it is replaced.
        model: the model that the codes belong to; its other weights are stored as they are.
        codes: the quantized matrices by the names of their layers, in groups of one size.

    Raises:
        InvalidArgument: codes that are no matrix of the model, or that the layout has no form for: bits, groups or zero
            points of its own, an embedding, layers without codes.
        UnsupportedModel: a family whose files lay matrices out in another way, or that has no configuration on disk.
        DiskFull: there is less free space than needed; nothing was changed.
    """
    config = model.config
    family = families.FAMILIES[config.family]
    fields = families.to_hf(config)
    group, zeros = _check(layout, model, codes)
    stored = _stored(family, config, {name: each.codes for name, each in codes.items()})
    scales = _stored(family, config, {name: each.scales.expand(len(each.codes), -1) for name, each in codes.items()})
    bits = _stored_bits(family, config, codes)
    tensors: dict[str, Tensor] = {}
    write: Callable[..., dict[str, Tensor]] = {"awq": _awq, "gptq": _gptq, "mlx": _mlx}[layout]
    for stem, values in stored.items():
        if values.ndim != 2:
            raise UnsupportedModel(f"{family.model_type} files lay {stem} out in a way that {layout} has no form for")
        # a family that stores inputs as rows (GPT-2): quantizers store outputs as rows, whatever the family
        rows_first = len(values) == len(scales[stem])
        matrix = [each if rows_first else each.t().contiguous() for each in (values, scales[stem])]
        for part, tensor in write(*matrix, bits[stem], zeros).items():
            tensors[f"{stem}.{part}"] = tensor
    plain = {
        name: each for name, each in model.module.state_dict().items() if name.removesuffix(".weight") not in codes
    }
    if config.tie_word_embeddings:
        plain.pop("lm_head.weight", None)
    tensors |= {name: _smallest(each) for name, each in families.to_stored(family, config, plain).items()}
    generation = {"eos_token_id": list(model.tokenizer.eos_ids), "bos_token_id": model.tokenizer.bos_id}
    fields |= generation | _settings(layout, group, bits) | {"dtype": "float16"}
    if (license_name := find_license(model)) is not None:
        fields["license"] = license_name
    save_folder(Path(path), config=fields, tensors=tensors, tokenizer=model.tokenizer, generation_config=generation)


def _check(layout: Layout, model: LanguageModel, codes: Mapping[str, Codes]) -> tuple[int, Callable[[int], int]]:
    """The group size of all matrices, and the zero point for each number of bits."""
    shapes = matrix_shapes(model)
    for name, each in codes.items():
        if shapes.get(name) != each.shape:
            raise InvalidArgument(f"{model.name} has no matrix {name!r} of {each.shape}")
        if each.bits not in _BITS[layout]:
            known = ", ".join(map(str, _BITS[layout]))
            raise InvalidArgument(f"{name} has {each.bits} bits, {layout} folders have {known}")
        if each.zero_point != 1 << (each.bits - 1):
            raise InvalidArgument(
                f"{name} has balanced levels (zero point {each.zero_point}), and {layout} folders hold unbalanced "
                "ones: quantize with levels 'unbalanced' (--levels unbalanced)"
            )
    sizes = {each.group_size for each in codes.values()}
    if len(sizes) != 1:
        raise InvalidArgument(f"{layout} folders have groups of one size, the codes have {sorted(sizes) or 'none'}")
    if layout != "mlx":
        if outer := [name for name in codes if not name.startswith("layers.")]:
            raise InvalidArgument(f"{layout} folders hold {outer[0]} as it is: leave it out (--embedding-bits 16)")
        if len({each.bits for each in codes.values()}) > 1:
            raise InvalidArgument(f"{layout} folders have one number of bits for all matrices; give bits (--bits)")
        layers = [name for name in shapes if name.startswith("layers.") and not name.endswith(".mlp.gate")]
        if left := [name for name in layers if name not in codes]:
            raise InvalidArgument(f"{left[0]} has no codes; {layout} folders quantize every layer")
        if odd := [name for name, each in codes.items() if each.shape[0] % 32]:
            raise InvalidArgument(
                f"{odd[0]} has {codes[odd[0]].shape[0]} outputs, which words of 32 bits do not divide"
            )
    elif sizes - {32, 64, 128}:
        raise InvalidArgument(f"mlx folders have groups of 32, 64 or 128, the codes have {sizes.pop()}")
    elif any(layer.feedforward.num_experts for layer in model.config.layers):
        raise UnsupportedModel("mlx folders of models with experts are not written; gptq and awq folders are")
    return sizes.pop(), lambda bits: 1 << (bits - 1)


def _stored(family: families.Family, config: Any, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Values of matrices, row by row, under the names and in the layout of the family's files, without ".weight"."""
    joined = families.to_stored(family, config, {f"{name}.weight": part for name, part in parts.items()})
    return {name.removesuffix(".weight"): part.contiguous() for name, part in joined.items()}


def _stored_bits(family: families.Family, config: Any, codes: Mapping[str, Codes]) -> dict[str, int]:
    """Bits of each stored matrix, by its name without ".weight"."""
    bits: dict[str, int] = {}
    for name, each in codes.items():
        stored = families.stored_name(family, config, f"{name}.weight").removesuffix(".weight")
        if bits.setdefault(stored, each.bits) != each.bits:
            raise InvalidArgument(f"{stored} holds several matrices, and their bits differ; give bits (--bits)")
    return bits


def _words(codes: Tensor, bits: int) -> Tensor:
    """Rows of codes as little-endian bit streams in 32-bit words."""
    return Codes(codes.contiguous(), torch.ones(1, 1).half(), bits, 0.0).words()  # type: ignore[arg-type]


def _gptq(codes: Tensor, scales: Tensor, bits: int, zeros: Callable[[int], int]) -> dict[str, Tensor]:
    rows, columns = codes.shape
    groups = scales.shape[1]
    stored_zeros = torch.full((groups, rows), zeros(bits) - 1, dtype=torch.uint8)  # version 1: minus one
    return {
        "qweight": _words(codes, bits).t().contiguous(),
        "qzeros": _words(stored_zeros, bits),
        "scales": scales.t().contiguous(),
        "g_idx": torch.arange(columns, dtype=torch.int32) // (columns // groups),
    }


def _awq(codes: Tensor, scales: Tensor, bits: int, zeros: Callable[[int], int]) -> dict[str, Tensor]:
    def packed(values: Tensor) -> Tensor:
        return _words(values.view(len(values), -1, 8)[:, :, torch.tensor(ORDER)].flatten(1), bits)

    stored_zeros = torch.full((scales.shape[1], len(codes)), zeros(bits), dtype=torch.uint8)
    return {
        "qweight": packed(codes.t().contiguous()),
        "qzeros": packed(stored_zeros),
        "scales": scales.t().contiguous(),
    }


def _mlx(codes: Tensor, scales: Tensor, bits: int, zeros: Callable[[int], int]) -> dict[str, Tensor]:
    words = torch.from_numpy(_words(codes, bits).numpy().view(np.uint32))
    return {"weight": words, "scales": scales.contiguous(), "biases": -float(zeros(bits)) * scales}


def _settings(layout: Layout, group: int, bits: Mapping[str, int]) -> dict[str, Any]:
    """What `config.json` says of the quantization."""
    most = max(bits.values(), key=list(bits.values()).count)
    if layout == "mlx":
        own = {stem: {"group_size": group, "bits": each} for stem, each in bits.items() if each != most}
        settings: dict[str, Any] = {"group_size": group, "bits": most, "mode": "affine", **own}
        return {"quantization": settings, "quantization_config": settings}
    shared = {"quant_method": layout, "bits": most, "group_size": group}
    if layout == "awq":
        own_awq = {"version": "gemm", "zero_point": True, "modules_to_not_convert": ["lm_head"]}
        return {"quantization_config": shared | own_awq}
    own_gptq = {"desc_act": False, "sym": True, "lm_head": False, "true_sequential": False, "pack_dtype": "int32"}
    return {"quantization_config": shared | own_gptq | {"checkpoint_format": "gptq"}}


def _smallest(tensor: Tensor) -> Tensor:
    """The tensor in the first of half precision, bfloat16 and float32 that is exact."""
    for dtype in (torch.float16, torch.bfloat16):
        if torch.equal(tensor.to(dtype).to(tensor.dtype), tensor):
            return tensor.detach().to(dtype)
    return tensor.detach()
