"""Weights of a checkpoint into a decoder, layer by layer: as ordinary tensors, packed, or left in their file."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pippin.core import native
from pippin.language.checkpoint_headers import CheckpointHeaders
from pippin.language.decoder_layer import DecoderLayer
from pippin.language.quantized import Blocks
from pippin.language.weight_packing import Packing, group_of, stored_kind
from pippin.nn.embedding import TokenEmbedding
from pippin.nn.linear import Linear
from pippin.nn.packed_layers import PackedLinear, PackedTokenEmbedding, pack as pack_module, replace_submodule
from pippin.nn.quantization.affine import AffineCodes
from pippin.nn.quantization.codes import Codes
from pippin.nn.quantization.packed import BITS, AbsentWeight, NativeWeight, quantize
from pippin.nn.triton.triton_matvec import TritonWeight


def fill(
    headers: CheckpointHeaders, packing: Packing, pack: bool, absent: Mapping[str, AbsentWeight] | None = None
) -> None:
    """Read the weights layer by layer; each is packed before the next is read, so the peak is one dense layer.

    Args:
        headers: of the checkpoint.
        packing: the formats of the weights.
        pack: whether layers are packed for inference.
        absent: what stands for matrices that stay in a file, by name.
    """
    absent = absent or {}
    layers: dict[str, list[str]] = {}
    for name in headers.names:
        parts = name.split(".")
        layers.setdefault(".".join(parts[: 2 if parts[0] == "layers" else 1]), []).append(name)
    for prefix, members in layers.items():
        plain = {}
        for name in members:
            owner = headers.module.get_submodule(name.rpartition(".")[0])
            form = packing.format(owner, name, headers.kinds.get(name))
            if form is None:
                # rounding the bias of a choice changes the choice
                dtype = torch.float32 if name.endswith(".e_score_correction_bias") else packing.dtype
                tensor = headers.tensor(name, dtype).to(packing.device)
                # a view would keep the whole file in memory for the sake of a norm
                plain[name.removeprefix(f"{prefix}.")] = tensor.clone() if packing.native else tensor
            else:
                weight = read_packed(headers, packing, name, form) if name not in absent else absent[name]
                if isinstance(owner, TokenEmbedding):
                    packed: torch.nn.Module = PackedTokenEmbedding(weight, owner.rows, owner.width)
                else:
                    assert isinstance(owner, Linear)
                    packed = PackedLinear(weight, owner.inputs, owner.outputs, owner.bias)
                replace_submodule(headers.module, name.rpartition(".")[0], packed)
        part = headers.module.get_submodule(prefix)
        part.load_state_dict(plain, assign=True)
        if pack and isinstance(part, DecoderLayer):
            pack_module(part)
        if packing.native:
            headers.release(name for name in members if name not in absent)  # others were not touched
    headers.module.tie_weights()
    if pack:
        headers.module.pack_head()
        headers.module.requires_grad_(False).eval()


def read_packed(headers: CheckpointHeaders, packing: Packing, name: str, form: int) -> NativeWeight | TritonWeight:
    """Read one matrix and pack it in the kernels' format with number ``form``."""
    kind = headers.kinds.get(name, "")
    in_codes = bool(kind) if headers.blocks is None else stored_kind(kind) is not None
    if packing.bits is None and headers.codes is not None and in_codes and packing.keep:
        stored = headers.codes(name)
        assert isinstance(stored, Codes | AffineCodes | Blocks)
        return stored.pack()
    if form in native.GROUP_FORMATS.values():
        bits = next(bits for bits in BITS if native.GROUP_FORMATS[bits] == form)
        weight = headers.tensor(name, torch.float32).to(packing.device)
        group = group_of(name, weight.shape[1])
        codes, scales = quantize(weight, bits, group, name=name)
        if packing.native:
            return NativeWeight.from_codes(codes, scales, bits, group)
        return TritonWeight.from_codes(codes, scales, bits, group, dtype=packing.dtype)
    in_blocks = kind not in ("F32", "BF16") and native.GGML_FORMATS.get(kind) == form
    if packing.keep and headers.blocks is not None and in_blocks:
        return NativeWeight.from_ggml(headers.blocks(name), kind)
    dense = torch.float32 if form == native.GGML_FORMATS["F32"] else torch.bfloat16
    return NativeWeight.from_dense(headers.tensor(name, dense))
