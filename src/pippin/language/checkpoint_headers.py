"""The headers of a checkpoint, GGUF file or folder: what it holds, compared with what its configuration needs.

Notable here:
- names and shapes are compared before the first weight is read: a checkpoint fits completely or is refused
- what a header gives are functions that read one tensor, in the form in which it is wanted
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from pippin.core import native
from pippin.core.errors import CorruptedFile, InvalidArgument
from pippin.core.formats.checkpoint import open_folder
from pippin.core.formats.ggml_quants import dequantize_blocks, kernel_kind, ternary_codes, to_q8_0
from pippin.core.formats.gguf import open_gguf
from pippin.core.store.reference import Resolved
from pippin.data.text.tokenizer import Tokenizer
from pippin.language import families
from pippin.language.decoder import Decoder
from pippin.language.decoder_config import DecoderConfig
from pippin.language.quantized import Packable, QuantizedMatrix, is_setting
from pippin.language.quantized_checkpoint import METHOD, StoredMatrix, quantized_matrices
from pippin.language.weight_packing import stored_kind
from pippin.nn.quantization.codes import Codes
from pippin.nn.quantization.palette import Palette

Transform = Callable[[DecoderConfig], DecoderConfig]
"""Maps the config of a checkpoint's decoder to that of the decoder to build."""
_KINDS: Final = {"F32": torch.float32, "BF16": torch.bfloat16}
LISTED = 20
"""Maximum number of tensors that a message names."""


@dataclass(frozen=True)
class TensorPlace:
    """Where a matrix lies in one piece.

    Attributes:
        path: the file.
        offset: where it begins.
        nbytes: its size.
        kind: ggml's name of its type.
    """

    path: Path
    offset: int
    nbytes: int
    kind: str


@dataclass(frozen=True)
class CheckpointHeaders:
    """The headers of a checkpoint: the decoder on torch's meta device, and functions that read its weights."""

    module: Decoder
    """On torch's meta device."""
    names: tuple[str, ...]
    """Pippin's names of all tensors, in the order of the files."""
    tensor: Callable[[str, torch.dtype], Tensor]
    """Reads one tensor in a precision."""
    tokenizer: Callable[[], Tokenizer]
    """Builds the tokenizer."""
    release: Callable[[Iterable[str]], None]
    """Releases the memory-mapped pages of tensors."""
    kinds: Mapping[str, str] = field(default_factory=dict)
    """Stored types by tensor name: ggml's names, and for a quantized folder Pippin's ("INT2/64", "AFFINE4/64") too."""
    blocks: Callable[[str], Tensor] | None = None
    """For a GGUF file: reads the quantized blocks of one tensor, with rows in Pippin's order."""
    codes: Callable[[str], Codes | Palette | Packable | Tensor] | None = None
    """For a quantized folder, and ternary types of a GGUF file: reads one matrix in the form that its kind names."""
    quantized: str = ""
    """For a folder that another library quantized, and a GGUF file: the method."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """For such a folder or file: why each matrix has no form in the kernels; empty where it has one."""
    place: Callable[[str], TensorPlace | None] = lambda name: None
    """Where one matrix lies; None where it does not lie in one piece."""


def read_headers(found: Resolved, config: Mapping[str, Any] | None = None) -> CheckpointHeaders:
    """Read the headers of a model on disk and compare them with its configuration; no weight is touched.

    Args:
        found: the resolved reference.
        config: for a folder, used instead of its `config.json`; for models that contain more than a decoder.

    Raises:
        CorruptedFile: a damaged file, or one whose tensors do not fit its configuration.
        UnsupportedModel: an architecture or a number format that Pippin does not have.
        UnsafeCheckpoint: the weights are a pickle.
    """
    return _read_gguf(found.path) if found.kind == "gguf" else _read_folder(found.path, config)


def transformed(headers: CheckpointHeaders, transform: Transform | None) -> CheckpointHeaders:
    """The headers for another decoder; tensors that it does not use are not read.

    Args:
        headers: headers of the checkpoint.
        transform: see `load`; None for no change.

    Raises:
        InvalidArgument: the new decoder needs a tensor that the checkpoint lacks, or one of another shape.
    """
    if transform is None:
        return headers
    config = transform(headers.module.config)
    with torch.device("meta"):
        module = Decoder(config)
    wanted, stored = (_shapes(each) for each in (module, headers.module))
    if missing := [name for name, shape in wanted.items() if stored.get(name) != shape]:
        raise InvalidArgument(f"the transformed decoder needs {missing[0]!r}, which the checkpoint lacks in that shape")
    return replace(headers, module=module, names=tuple(name for name in headers.names if name in wanted))


def _read_gguf(path: Path) -> CheckpointHeaders:
    file = open_gguf(path)
    header = families.GGUFHeader.of(file)
    config = families.from_gguf(header)
    for kind in {form.type for form in file.tensors.values()}:  # a type that cannot be read is refused now, not later
        dequantize_blocks(torch.empty(0, 2, dtype=torch.uint8), kind, torch.float32)
    module = _empty(config)
    wanted = _shapes(module)
    numbers = families.learned_numbers(config, header)
    stored = [name for name in wanted if name not in numbers]
    sources, unused = families.locate(families.in_gguf(config), config, stored, file.tensors)

    def rows(name: str) -> Tensor:
        return sources[name].take(file.raw(sources[name].stored), config)

    def tensor(name: str, dtype: torch.dtype) -> Tensor:
        if name in numbers:
            return torch.full(wanted[name], numbers[name], dtype=dtype)
        stored, rule = sources[name].stored, sources[name].rule
        matrix = len(wanted[name]) == 2 and len(file.tensors[stored].shape) > 1  # others are never in blocks
        if not matrix or (rule is not None and rule.across):
            return sources[name].take(file.dequantize(stored, dtype), config)
        return file.decode(stored, rows(name), dtype)

    def codes(name: str) -> Codes:
        values, scales = ternary_codes(rows(name), kinds[name])
        return Codes(values, scales, bits=2, zero_point=1.0)

    def place(name: str) -> TensorPlace | None:
        if name in numbers:
            return None
        stored = file.tensors[sources[name].stored]
        rows = torch.empty(
            *stored.shape[:-1], stored.nbytes // prod(stored.shape[:-1]), dtype=torch.uint8, device="meta"
        )
        return _place(file.begin(stored.name), rows, sources[name].take(rows, config), stored.type)

    left_over = [name for name in unused if not families.is_beside(name, header)]
    kinds = {name: file.tensors[source.stored].type for name, source in sources.items()}
    reasons = {name: f"there are no kernels for {kind}" for name, kind in kinds.items() if not _has_kernels(kind)}
    shapes = {name: source.shape(file.tensors[source.stored].shape, config) for name, source in sources.items()}
    _compare(module, shapes | {name: wanted[name] for name in numbers}, left_over, path)
    return CheckpointHeaders(
        module,
        (*sources, *numbers),
        tensor,
        tokenizer=lambda: Tokenizer.from_gguf(file),
        release=lambda _: file.release(),
        kinds={name: kernel_kind(kind) for name, kind in kinds.items() if name not in reasons},
        blocks=lambda name: to_q8_0(rows(name), kinds[name]),
        codes=codes,
        quantized="GGUF",
        reasons=reasons,
        place=place,
    )


def _place(begin: tuple[Path, int], whole: Tensor, part: Tensor, kind: str) -> TensorPlace | None:
    """Where a part of a stored tensor lies, both without values; None if it is no piece of it, but made from it."""
    same = part.untyped_storage()._cdata == whole.untyped_storage()._cdata
    if not (same and part.is_contiguous()):
        return None
    path, offset = begin
    return TensorPlace(path, offset + int(part.storage_offset()) * part.itemsize, part.nbytes, kind)


def _has_kernels(kind: str) -> bool:
    """Whether a type of ggml's is computed with as it is stored, or in a form that holds the same values."""
    kernel = kernel_kind(kind)
    return kernel in native.GGML_FORMATS or stored_kind(kernel) is not None


def _read_folder(path: Path, given: Mapping[str, Any] | None = None) -> CheckpointHeaders:
    folder = open_folder(path)
    config = families.from_hf(folder.config if given is None else given)
    method, found = quantized_matrices(folder)
    # the tensors of a folder that Pippin quantized have its own names and layouts
    family = None if method == METHOD else families.FAMILIES[config.family]
    parts_of_matrices = {part for matrix in found.values() for part in matrix.parts}
    stored = {families.without_prefix(name, family): name for name in folder.names() if name not in parts_of_matrices}
    stored = {name: full for name, full in stored.items() if method is None or not is_setting(name)}
    quantized = {families.without_prefix(name, family): matrix for name, matrix in found.items()}
    module = _empty(config)
    sources, unused = families.locate(family, config, _shapes(module), {*stored, *quantized})
    layout = families.MLXLayout(family, stored, lambda name: tuple(folder.shape(stored[name])), str(path))
    matrices: dict[str, StoredMatrix | QuantizedMatrix] = {
        name: quantized[source.stored].taken(source, config)
        for name, source in sources.items()
        if source.stored in quantized
    }

    def tensor(name: str, dtype: torch.dtype) -> Tensor:
        if name in matrices:
            return matrices[name].dense().to(dtype)
        source = sources[name]
        return source.take(layout.tensor(source.stored, folder.tensor(stored[source.stored])), config).to(dtype)

    def place(name: str) -> TensorPlace | None:
        if name in matrices:
            return None
        source = sources[name]
        stored_name = stored[source.stored]
        if (kind := folder.dtype(stored_name)) not in _KINDS:
            return None
        whole = torch.empty(folder.shape(stored_name), dtype=_KINDS[kind], device="meta")
        part = source.take(layout.tensor(source.stored, whole), config)
        return _place(folder.begin(stored_name), whole, part, kind)

    def shape(name: str) -> tuple[int, ...]:
        if name in matrices:
            return matrices[name].shape
        source = sources[name]
        return source.shape(layout.shape(source.stored, tuple(folder.shape(stored[source.stored]))), config)

    def parts(name: str) -> tuple[str, ...]:
        return matrices[name].parts if name in matrices else (stored[sources[name].stored],)

    left_over = [name for name in unused if not _may_be_left(name, config)]
    _compare(module, {name: shape(name) for name in sources}, left_over, path)
    return CheckpointHeaders(
        module,
        tuple(sources),
        tensor,
        tokenizer=lambda: Tokenizer.from_folder(path),
        release=lambda done: folder.release(part for name in done for part in parts(name)),
        kinds={name: matrix.kind for name, matrix in matrices.items() if matrix.kind},
        codes=lambda name: matrices[name].read(),
        quantized="" if method in (None, METHOD) else method,
        reasons={name: matrix.reason for name, matrix in matrices.items()},
        place=place,
    )


def _empty(config: DecoderConfig) -> Decoder:
    """The decoder on torch's meta device."""
    with torch.device("meta"):
        return Decoder(config)


_COMPUTED = ("rotary_emb.inv_freq", ".attn.bias", ".attention.bias", ".masked_bias")  # causal masks, for instance
_BESIDE = (
    *("mtp", "multi_modal_projector", "connector", "projector", "aligner", "merger"),
    *("vision_tower", "vision_model", "vision_encoder", "vision_projection", "visual", "embed_vision"),
    *("image_tower", "video_tower", "image_newline", "visual_embeddings_table"),
    *(f"high_res_vision_{part}" for part in ("alpha", "model", "neck", "proj")),
    *("audio_tower", "embed_audio", "encoder"),
)


def _may_be_left(name: str, config: DecoderConfig) -> bool:
    """Whether a stored tensor may stay unread: a table that is computed, a part beside the decoder, or one after it."""
    if name == "lm_head.weight":
        return config.tie_word_embeddings
    family = families.FAMILIES[config.family]
    first, second, *_ = (*name.split("."), "")
    after = first == "layers" and second.isdigit() and int(second) >= len(config.layers)
    source = config.layers[int(second)].attention.kv_source if first == "layers" and not after else None
    if family.shares_kv and source is not None and name.split(".")[-2] in ("k_proj", "v_proj", "k_norm", "v_norm"):
        return True
    if family.predicts_more and (after or first.startswith("mtp")):
        return True
    return name.endswith(_COMPUTED) or name.partition(".")[0] in _BESIDE


def _compare(module: Decoder, shapes: Mapping[str, tuple[int, ...]], left_over: Iterable[str], path: Path) -> None:
    """Compare a decoder with the names and shapes of a file.

    Raises:
        CorruptedFile: a tensor is missing, left over, or of another shape than the configuration says.
    """
    config, wanted = module.config, _shapes(module)
    problems = [f"{name!r} is missing" for name in sorted(wanted.keys() - shapes.keys())]
    problems += [f"{name!r} is not expected{_why(name, config)}" for name in sorted(left_over)]
    problems += [
        f"{name!r} has shape {shapes[name]} instead of {shape}"
        for name, shape in wanted.items()
        if shapes.get(name, shape) != shape
    ]
    if problems:
        more = [f"and {len(problems) - LISTED} more"] if len(problems) > LISTED else []
        raise CorruptedFile(
            f"{path} does not fit its configuration in {len(problems)} tensors: {'; '.join(problems[:LISTED] + more)}"
        )


def _shapes(module: Decoder) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that a decoder is saved as; a tied output matrix is not one of them."""
    shapes = {name: tuple(parameter.shape) for name, parameter in module.state_dict().items()}
    if module.config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    return shapes


def _why(name: str, config: DecoderConfig) -> str:
    """An explanation for an unexpected tensor: whether its layer shares the keys and values of another layer."""
    parts = name.split(".")
    if parts[0] != "layers" or not parts[1].isdigit() or int(parts[1]) >= len(config.layers):
        return ""
    source = config.layers[int(parts[1])].attention.kv_source
    own = source is not None and parts[-2] in ("k_proj", "v_proj", "k_norm")
    return f", as layer {parts[1]} reads the keys and values of layer {source}" if own else ""
