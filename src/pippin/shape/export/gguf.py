r"""A model as a GGUF file, which llama.cpp and what is built on it run.

Notable here:
- unbalanced codes are kept exactly: $w = d\,(q - 8)$ is Q4_0, which holds two to four bits, and $w = d\,q$ is Q8_0
- balanced codes of up to four bits become Q4_1, $w = d\,q + m$, with $d = s$ and $m = -z s$: nothing is rounded but
  $m$, to half precision, by at most $2^{-11} z s$, a 270th of a step at four bits
- balanced codes of eight bits are rounded anew to Q8_0, whose levels are whole multiples of its step
- tokenizer, chat template, special tokens and license go along, so that the file answers as the folder did
- written tensor by tensor under another name, and renamed when it is whole

Source: the GGUF specification, ggml-org/ggml docs/gguf.md; the names are those of llama.cpp's converter.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
from torch import Tensor, nn

from pippin.core import progress
from pippin.core.checks import checked
from pippin.core.errors import InvalidArgument, MissingDependency, UnsupportedModel
from pippin.core.files import disk_errors, require_free_space, sync_folder
from pippin.core.formats.ggml_quants import FORMATS, BlockFormat
from pippin.core.store.reference import Resolved
from pippin.language import families
from pippin.language.decoder import Decoder, DecoderConfig
from pippin.language.kept_metadata import sampling_metadata
from pippin.language.language_model import LanguageModel, read_headers
from pippin.language.model_license import find_license
from pippin.nn.embedding import TokenEmbedding
from pippin.nn.linear import Linear
from pippin.nn.norm import RMSNorm
from pippin.nn.quantization.codes import Codes
from pippin.nn.rotary import Rotary

GGUFKind = Literal["F32", "F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0"]
_BLOCK: Final = 32  # weights of one block, in every quantized kind here
_ARCHITECTURES: Final = {family: name for name, family in families.GGUF_FAMILIES.items()} | {"mistral": "llama"}
# llama.cpp's number for "mostly of this kind"
_FILE_TYPES: Final = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "BF16": 32}


@checked
def export_gguf(
    model: LanguageModel,
    path: str | Path,
    kind: GGUFKind = "Q8_0",
    *,
    codes: Mapping[str, Codes] | None = None,
    show_progress: bool = True,
) -> Path:
    """Write a model as a GGUF file; llama.cpp and `pippin.load` read it.

    Args:
        model: any whose family llama.cpp has; loaded with ``pack=False``, or for the native kernels.
        path: the file; an older one is replaced.
        kind: of the matrices that have no codes: "F32", "F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1" or "Q4_0". Where
            it has fewer than eight bits, the embedding and the output matrix are Q8_0. Matrices whose rows are no
            multiple of 32 are F16. Norms and biases are F32.
        codes: quantized matrices by the names of their layers; None for those of the folder that the model was read
            from (see `stored_codes`). Codes of up to four bits become Q4_0 (unbalanced) or Q4_1, of eight bits Q8_0.
        show_progress: whether progress is shown.

    Returns:
        The path.

    Raises:
        MissingDependency: the library gguf is not installed.
        InvalidArgument: codes that are no matrix of the model.
        UnsupportedModel: a decoder or a tokenizer that GGUF, or llama.cpp, has no form for.
        DiskFull: there is less free space than the file needs; nothing was changed.
    """
    gguf = _library()
    path, config = Path(path), model.config
    metadata = describe(config) | model.tokenizer.to_gguf(config.vocab_size) | sampling_metadata(model)
    codes = stored_codes(model) if codes is None else codes
    entries = _entries(model.module, kind, codes)
    total = sum(entry.nbytes for entry in entries)
    require_free_space(path.absolute().parent, total)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    writer = gguf.GGUFWriter(temporary, _architecture(config))
    writer.add_name(model.name)
    if license_name := find_license(model):
        writer.add_license(license_name)
    writer.add_file_type(_FILE_TYPES[kind])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for key, value in metadata.items():
        _add(writer, key, value)
    try:
        with disk_errors(path), progress.bar(total, f"writing {path.name}", show_progress=show_progress) as bar:
            _write(writer, gguf, entries, bar)
        os.replace(temporary, path)
    finally:
        writer.close()
        temporary.unlink(missing_ok=True)
    sync_folder(path.absolute().parent)
    return path


def describe(config: DecoderConfig) -> dict[str, Any]:
    """The metadata that tell llama.cpp what a decoder is, by key.

    Raises:
        UnsupportedModel: llama.cpp has no such decoder: shared keys, experts, windows or positions unlike its family's.
    """
    name, first = _architecture(config), config.layers[0]
    _check_layers(config)
    fields: dict[str, Any] = {
        "block_count": len(config.layers),
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": first.feedforward.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.dimension_count": config.head_dim,
        "vocab_size": config.vocab_size,
    }
    windows = {layer.attention.window for layer in config.layers} - {None}
    if windows:
        fields["attention.sliding_window"] = windows.pop()
    rotary = _global_rotary(config)
    fields["rope.freq_base"] = float(rotary.theta)
    if rotary.scaling in ("linear", "yarn") and rotary.divisors is None:
        fields["rope.scaling.type"] = rotary.scaling
        fields["rope.scaling.factor"] = float(rotary.factor)
        fields["rope.scaling.original_context_length"] = rotary.original_max_position_embeddings
    return {f"{name}.{key}": value for key, value in fields.items()}


def blocks(codes: Codes, kind: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Codes as blocks of ggml: rows of bytes.

    A block is the step in half precision (in Q4_1 also what is added), and then one signed byte a weight in Q8_0, or 16
    bytes of two codes each, of weights i and i + 16.

    Args:
        codes: whose groups 32 divides.
        kind: "Q4_1" for up to four bits, "Q4_0" for those of an unbalanced set, "Q8_0" for eight bits unbalanced.
    """
    rows, columns = codes.shape
    count = columns // _BLOCK
    scales = codes.scales.repeat_interleave(codes.group_size // _BLOCK, dim=1).expand(rows, count)
    ends = [scales, (scales.float() * -codes.zero_point).half()] if kind == "Q4_1" else [scales]
    values = codes.codes.view(rows, count, _BLOCK)
    if kind == "Q8_0":
        values = values - int(codes.zero_point)  # wraps around, as two's complement does
    else:
        values = values if kind == "Q4_1" else values + (8 - int(codes.zero_point))
        values = values[:, :, : _BLOCK // 2] | (values[:, :, _BLOCK // 2 :] << 4)
    stored: np.ndarray[Any, np.dtype[np.uint8]]
    stored = torch.cat([torch.stack(ends, -1).contiguous().view(torch.uint8), values], -1).view(rows, -1).numpy()
    return stored


@dataclass(frozen=True)
class _Entry:
    """One tensor of the file to be."""

    name: str
    form: BlockFormat
    shape: tuple[int, ...]
    owner: nn.Module
    leaf: str
    codes: Codes | None
    heads: int | None
    """Heads whose rows lie in another order in the file."""

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return int(np.prod(self.shape)) // self.form.size * self.form.nbytes

    def stored(self, gguf: Any) -> np.ndarray[Any, Any]:
        """The tensor as it lies in the file: rows of bytes, or numbers of F32 and F16."""
        codes = self.codes
        if codes is not None and codes.group_size % _BLOCK == 0 and (codes.bits <= 4 or codes.zero_point == 128):
            scales = codes.scales.expand(len(codes.codes), -1)
            ordered = Codes(self._order(codes.codes), self._order(scales), codes.bits, codes.zero_point)
            return blocks(ordered, self.form.name)
        values = self._order(self._values()).float().contiguous().numpy()
        if self.form.name in ("F32", "F16"):
            return values.astype(np.float32 if self.form.name == "F32" else np.float16)
        packed: np.ndarray[Any, Any] = gguf.quants.quantize(values, gguf.GGMLQuantizationType[self.form.name])
        return packed

    def _values(self) -> Tensor:
        if self.codes is not None:
            return self.codes.dense()
        if self.leaf == "weight" and isinstance(self.owner, Linear | TokenEmbedding):
            return self.owner.dense_weight().detach().cpu()
        values: Tensor = getattr(self.owner, self.leaf)
        return values.detach().cpu()

    def _order(self, rows: Tensor) -> Tensor:
        """Rows in the order of the file: the inverse of `pippin.language.families.gguf_tensor`."""
        if self.heads is None:
            return rows
        halves = rows.reshape(self.heads, 2, rows.shape[0] // self.heads // 2, *rows.shape[1:])
        return halves.transpose(1, 2).reshape(rows.shape)


def _entries(module: Decoder, kind: str, codes: Mapping[str, Codes]) -> list[_Entry]:
    """Every tensor of the file, in the order of the layers."""
    config = module.config
    forms = {form.name: form for form in FORMATS.values()}
    names = families.GEMMA_GGUF_NAMES if config.family == "gemma3_text" else families.GGUF_NAMES
    theirs = {ours: name for name, ours in names.items()}
    permuted = _architecture(config) in families.PERMUTED
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads} if permuted else {}
    entries, left = [], dict(codes)
    for name, part in module.named_modules():
        if not isinstance(part, Linear | TokenEmbedding | RMSNorm) or (
            name == "lm_head" and config.tie_word_embeddings
        ):
            continue
        inner = name.split(".", 2)[2] if name.startswith("layers.") else name
        if inner not in theirs:
            raise InvalidArgument(f"{name} was fused with others when it was packed; load the model with pack=False")
        stem = theirs[inner] if inner == name else f"blk.{name.split('.')[1]}.{theirs[inner]}"
        matrix = left.pop(name, None)
        shape = _shape(part)
        if matrix is not None and matrix.shape != shape:
            raise InvalidArgument(f"codes of {name} have shape {matrix.shape}, the layer is {shape}")
        form, turned = forms[_kind(name, shape, kind, matrix)], heads.get(inner.rpartition(".")[2])
        entries.append(_Entry(f"{stem}.weight", form, shape, part, "weight", matrix, turned))
        if isinstance(part, Linear) and part.bias is not None:
            entries.append(_Entry(f"{stem}.bias", forms["F32"], shape[:1], part, "bias", None, turned))
    if left:
        raise InvalidArgument(f"the model has no matrix {next(iter(left))!r}, for which codes were given")
    return entries + _table(config, forms["F32"])


def _table(config: DecoderConfig, form: BlockFormat) -> list[_Entry]:
    """The tensor of a stretching that GGUF stores as a table."""
    rotary = _global_rotary(config)
    if rotary.divisors is None and rotary.scaling != "llama3":
        return []
    plain = type(rotary)(rotary.theta).frequencies(config.head_dim)
    holder = nn.Module()
    holder.register_buffer("divisors", plain / rotary.frequencies(config.head_dim))
    return [_Entry("rope_freqs.weight", form, (config.head_dim // 2,), holder, "divisors", None, None)]


def _shape(part: nn.Module) -> tuple[int, ...]:
    if isinstance(part, Linear):
        return part.outputs, part.inputs
    if isinstance(part, TokenEmbedding):
        return part.rows, part.width
    assert isinstance(part, RMSNorm)
    return tuple(part.weight.shape)


def _kind(name: str, shape: tuple[int, ...], kind: str, codes: Codes | None) -> str:
    """What one tensor is stored as."""
    if len(shape) == 1:
        return "F32"
    if codes is not None and codes.group_size % _BLOCK == 0:
        return "Q8_0" if codes.bits > 4 else "Q4_0" if codes.zero_point == 1 << (codes.bits - 1) else "Q4_1"
    if name in ("embed_tokens", "lm_head") and kind.startswith(("Q4", "Q5")):
        kind = "Q8_0"
    return "F16" if kind.startswith("Q") and shape[1] % _BLOCK else kind


def stored_codes(model: LanguageModel) -> dict[str, Codes]:
    """The codes of the quantized folder that a model was read from; none of other models.

    Of a folder that another library quantized, those of the matrices that have one zero point.
    """
    if model.source is None or not model.source.is_dir():
        return {}
    headers = read_headers(Resolved(model.name, "folder", model.source))
    found = {}
    for name in headers.reasons:
        assert headers.codes is not None
        values = headers.codes(name)
        if isinstance(values, Codes):
            found[name.removesuffix(".weight")] = values
    return found


def _architecture(config: DecoderConfig) -> str:
    if config.family not in _ARCHITECTURES:
        raise UnsupportedModel(
            f"a decoder of the {config.family} family has no form in GGUF that Pippin writes; "
            f"supported are {', '.join(_ARCHITECTURES)}"
        )
    return _ARCHITECTURES[config.family]


def _check_layers(config: DecoderConfig) -> None:
    """Raise where llama.cpp would compute something else than the layers say."""
    gemma, family = config.family == "gemma3_text", config.family
    first = config.layers[0].feedforward
    for index, layer in enumerate(config.layers):
        attention, local = layer.attention, gemma and (index + 1) % 6 != 0
        if layer.recurrent is not None:
            raise UnsupportedModel(f"layer {index} is recurrent, in a way that GGUF cannot say")
        if attention.kv_source is not None:
            raise UnsupportedModel(
                f"layer {index} reads the keys of layer {attention.kv_source}, which GGUF cannot say"
            )
        if layer.feedforward.num_experts or not layer.feedforward.gated:
            raise UnsupportedModel(f"layer {index} has experts or no gate, which Pippin does not write to GGUF")
        if layer.feedforward != first or first.activation != ("gelu_tanh" if gemma else "silu"):
            raise UnsupportedModel(f"the feed-forward part of layer {index} is unlike that of a {family} model in GGUF")
        if (attention.window is not None) != local:
            raise UnsupportedModel(f"layer {index} has window {attention.window}, unlike a {family} model in GGUF")
        if (attention.rotary is None) != (family == "smollm3" and (index + 1) % 4 == 0):
            raise UnsupportedModel(f"layer {index} rotates unlike a {family} model in GGUF")
        wanted = Rotary(10_000.0) if local else _global_rotary(config)
        if attention.rotary not in (None, wanted):
            raise UnsupportedModel(f"layer {index} has positions of its own, which GGUF cannot say: {attention.rotary}")
    if config.attention_scale is not None and not (gemma and len(config.layers) == 62):
        raise UnsupportedModel(f"scores scaled by {config.attention_scale} are unlike a {family} model in GGUF")
    rotary = _global_rotary(config)
    if rotary.scaling == "yarn" and (rotary.low, rotary.high, rotary.attention_factor) != (1.0, 32.0, None):
        raise UnsupportedModel(f"yarn with settings of its own is not written to GGUF: {rotary}")


def _global_rotary(config: DecoderConfig) -> Rotary:
    """Positions of the layers that see everything."""
    rotaries = [spec.attention.rotary for spec in config.layers if spec.attention.window is None]
    return next((rotary for rotary in rotaries if rotary is not None), Rotary())


def _add(writer: Any, key: str, value: Any) -> None:
    """One pair of metadata, in the type that llama.cpp expects."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _write(writer: Any, gguf: Any, entries: list[_Entry], bar: progress.Bar) -> None:
    """Header and tensors, one in memory at a time."""
    plain = {"F32": np.float32, "F16": np.float16}
    for entry in entries:
        if entry.form.name in plain:
            writer.add_tensor_info(entry.name, entry.shape, np.dtype(plain[entry.form.name]), entry.nbytes)
            continue
        rows = (*entry.shape[:-1], entry.shape[-1] // entry.form.size * entry.form.nbytes)
        kind = gguf.GGMLQuantizationType[entry.form.name]
        writer.add_tensor_info(entry.name, rows, np.dtype(np.uint8), entry.nbytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for entry in entries:
        writer.write_tensor_data(entry.stored(gguf))
        bar.advance(entry.nbytes)
    for file in writer.fout:
        file.flush()
        os.fsync(file.fileno())


def _library() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise MissingDependency("writing GGUF files needs the library gguf: pip install 'pippin[export]'") from error
    return gguf
