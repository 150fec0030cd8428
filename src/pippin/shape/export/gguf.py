r"""A model as a GGUF file, which llama.cpp and what is built on it run.

Notable here:
- unbalanced codes are kept exactly: $w = d\,(q - 8)$ is Q4_0, which holds two to four bits, and $w = d\,q$ is Q8_0
- balanced codes of up to four bits become Q4_1, $w = d\,q + m$, with $d = s$ and $m = -z s$: nothing is rounded but
  $m$, to half precision, by at most $2^{-11} z s$, a 270th of a step at four bits
- balanced codes of eight bits are rounded anew to Q8_0, whose levels are whole multiples of its step
- tensors are joined as llama.cpp has them (the experts of a layer; queries, keys and values) once they are quantized,
  which works as blocks never cross the end of a row
- tokenizer, chat template, special tokens and license go along, so that the file answers as the folder did
- written tensor by tensor under another name, and renamed when it is whole

Source: the GGUF specification, ggml-org/ggml docs/gguf.md; the names are those of llama.cpp's converter.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
from pippin.language.checkpoint_headers import read_headers
from pippin.language.decoder import Decoder
from pippin.language.decoder_config import DecoderConfig
from pippin.language.kept_metadata import sampling_metadata
from pippin.language.language_model import LanguageModel
from pippin.language.model_license import find_license
from pippin.nn.embedding import TokenEmbedding
from pippin.nn.linear import Linear
from pippin.nn.quantization.codes import Codes

GGUFKind = Literal["F32", "F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0"]
_BLOCK: Final = 32  # weights of one block, in every quantized kind here
_FORMS: Final = {form.name: form for form in FORMATS.values()}
# small, and F32 in every file, as norms are; "conv" is the convolution of LFM2
_EXACT: Final = ("ffn_gate_inp", "ffn_gate_inp_shexp", "position_embd", "conv")
_EXACT_STARTS: Final = ("ssm_conv1d", "altup_router", "altup_predict", "altup_correct")
_NOT_IN_BLOCKS: Final = ("altup_proj", "altup_unembd_proj", "laurel_l", "laurel_r")
"""Small matrices of the residual path, which llama.cpp does not quantize either."""
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
            multiple of 32 are F16. Norms, biases and convolutions are F32.
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
    layout = families.layout_of(config)
    codes = stored_codes(model) if codes is None else codes
    entries = _entries(model.module, kind, codes)
    metadata = _describe(config, entries) | sampling_metadata(model)
    metadata |= _learned_numbers(model.module)
    metadata |= model.tokenizer.to_gguf(config.vocab_size, with_merges=layout.merges)
    if not layout.windows and any(layer.attention.window for layer in config.layers):
        progress.note(
            f"llama.cpp has no windows for {layout.name_of(config)} models: beyond the window it answers otherwise",
            show_progress=show_progress,
        )
    total = sum(entry.nbytes for entry in entries)
    require_free_space(path.absolute().parent, total)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    writer = gguf.GGUFWriter(temporary, layout.name_of(config))
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


def _describe(config: DecoderConfig, entries: Sequence[_Entry]) -> dict[str, Any]:
    """The metadata of a decoder, which are checked to be read as the same decoder again.

    Raises:
        UnsupportedModel: llama.cpp has no such decoder.
    """
    metadata = families.to_gguf(config)
    tables = {name: table.float() for name, table in families.layout_of(config).tables(config).items()}
    header = families.GGUFHeader(
        where="the model",
        metadata=metadata | {"general.architecture": families.layout_of(config).name_of(config)},
        shapes={entry.name: entry.shape for entry in entries},
        read=tables.__getitem__,
    )
    families.check_gguf(config, header)
    return metadata


def _learned_numbers(module: Decoder) -> dict[str, list[float]]:
    """The decoder's tensors that are numbers in the metadata: those of all layers, by key."""
    tensors = module.state_dict()
    return {
        key: [float(tensors[f"layers.{index}.{name}"]) for index in range(len(module.config.layers))]
        for key, name in families.layout_of(module.config).numbers.items()
    }


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
class _Part:
    """One of the decoder's tensors."""

    owner: nn.Module
    leaf: str
    codes: Codes | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape; of a packed matrix, too."""
        if self.leaf == "weight" and isinstance(self.owner, Linear):
            return self.owner.outputs, self.owner.inputs
        if self.leaf == "weight" and isinstance(self.owner, TokenEmbedding):
            return self.owner.rows, self.owner.width
        return tuple(getattr(self.owner, self.leaf).shape)

    def rows(self, form: BlockFormat, gguf: Any) -> Tensor:
        """The tensor as numbers of F32 and F16, or as bytes of blocks."""
        codes = self.codes
        kept = codes is not None and (codes.bits <= 4 or codes.zero_point == 128)  # Q8_0 has no zero of its own
        if codes is not None and kept and _codes_kind(codes) == form.name:
            return torch.from_numpy(blocks(codes, form.name))
        return _numbers(self.values(), form, gguf)

    def values(self) -> Tensor:
        """The tensor as it is computed with."""
        if self.codes is not None:
            return self.codes.dense()
        if self.leaf == "weight" and isinstance(self.owner, Linear | TokenEmbedding):
            return self.owner.dense_weight().detach().cpu()
        values: Tensor = getattr(self.owner, self.leaf)
        return values.detach().cpu()


def _numbers(values: Tensor, form: BlockFormat, gguf: Any) -> Tensor:
    """Values as numbers of F32 and F16, or as bytes of blocks."""
    values = values.float().contiguous()
    if form.name in ("F32", "F16"):
        return values if form.name == "F32" else values.half()
    return torch.from_numpy(gguf.quants.quantize(values.numpy(), gguf.GGMLQuantizationType[form.name]))


@dataclass(frozen=True)
class _Entry:
    """One tensor of the file to be, of one or more of the decoder's."""

    name: str
    form: BlockFormat
    parts: tuple[_Part, ...]
    rule: families.TensorRule | None
    config: DecoderConfig

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the format's library is told."""
        return tuple(self._join([torch.empty(part.shape, device="meta") for part in self.parts]).shape)

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) // self.form.size * self.form.nbytes

    def stored(self, gguf: Any) -> np.ndarray[Any, Any]:
        """The tensor as it lies in the file: rows of bytes, or numbers of F32 and F16."""
        if self.rule is not None and self.rule.across:
            joined = _numbers(self._join([part.values() for part in self.parts]), self.form, gguf)
        else:
            joined = self._join([part.rows(self.form, gguf) for part in self.parts])
        values: np.ndarray[Any, Any] = joined.contiguous().numpy()
        return values

    def _join(self, parts: list[Tensor]) -> Tensor:
        return parts[0] if self.rule is None else self.rule.join(parts, self.config)


def _entries(module: Decoder, kind: str, codes: Mapping[str, Codes]) -> list[_Entry]:
    """Every tensor of the file, in the order of the layers."""
    config = module.config
    sources = families.TensorSources(families.in_gguf(config), config)
    found: dict[str, tuple[families.TensorRule, dict[int, _Part]]] = {}
    numbers = tuple(f".{name}" for name in families.layout_of(config).numbers.values())
    for name, part in _parts(module, codes):
        if name.endswith(numbers):
            continue
        source = sources(name)[0]
        if source.rule is None and getattr(part.owner, "packed", None) is not None:
            raise InvalidArgument(f"{name} was fused with others when it was packed; load the model with pack=False")
        if source.rule is None:
            raise UnsupportedModel(f"GGUF has no place for {name} of a {config.family} model")
        found.setdefault(source.stored, (source.rule, {}))[1][source.index] = part
    entries = []
    for stored, (rule, members) in found.items():
        if len(members) != len(rule.ours):
            raise UnsupportedModel(f"{stored} would lack parts of {', '.join(rule.ours)}, so GGUF cannot hold it")
        parts = tuple(members[index] for index in sorted(members))
        plain = _Entry(stored, _FORMS["F32"], parts, rule, config)
        entries.append(replace(plain, form=_FORMS[_kind(stored, plain.shape, kind, [part.codes for part in parts])]))
    for name, table in families.layout_of(config).tables(config).items():
        holder = nn.Module()
        holder.register_buffer("table", table)
        form = _FORMS[_kind(name, tuple(table.shape), kind, [None])]
        entries.append(_Entry(name, form, (_Part(holder, "table"),), None, config))
    return entries


def _parts(module: Decoder, codes: Mapping[str, Codes]) -> Iterator[tuple[str, _Part]]:
    """The decoder's tensors by name, with the codes of those that have some."""
    config, left, saved = module.config, dict(codes), module.state_dict().keys()
    tied = config.tie_word_embeddings and not families.layout_of(config).own_output
    for name, part in module.named_modules():
        if name == "lm_head" and tied:
            continue
        matrix = left.pop("embed_tokens" if name == "lm_head" and config.tie_word_embeddings else name, None)
        owned = (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False))
        leaves = [leaf for leaf, _ in owned if f"{name}.{leaf}" in saved]  # without tables that are computed
        if isinstance(part, Linear | TokenEmbedding) and "weight" not in leaves:  # a packed one, or the embedding again
            leaves.append("weight")
        for leaf in leaves:
            found = _Part(part, leaf, matrix if leaf == "weight" else None)
            if found.codes is not None and found.codes.shape != found.shape:
                raise InvalidArgument(f"codes of {name} have shape {found.codes.shape}, the layer is {found.shape}")
            yield f"{name}.{leaf}", found
    if left:
        raise InvalidArgument(f"the model has no matrix {next(iter(left))!r}, for which codes were given")


def _kind(name: str, shape: tuple[int, ...], kind: str, codes: Sequence[Codes | None]) -> str:
    """What one tensor of the file is stored as."""
    stem = name.removesuffix(".weight").rpartition(".")[2]
    exact = stem in _EXACT or stem.startswith(_EXACT_STARTS) or stem.endswith("_norm")
    if len(shape) == 1 or exact or not name.endswith(".weight"):
        return "F32"
    kinds = {None if each is None else _codes_kind(each) for each in codes}
    if kinds != {None}:
        return kinds.pop() or kind if len(kinds) == 1 else "Q8_0"
    if stem in ("token_embd", "output") and kind.startswith(("Q4", "Q5")):
        kind = "Q8_0"
    return "F16" if kind.startswith("Q") and (shape[-1] % _BLOCK or stem in _NOT_IN_BLOCKS) else kind


def _codes_kind(codes: Codes) -> str | None:
    """The kind of blocks that hold codes as they are; None where there is none."""
    if codes.group_size % _BLOCK:
        return None
    return "Q8_0" if codes.bits > 4 else "Q4_0" if codes.zero_point == 1 << (codes.bits - 1) else "Q4_1"


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
