"""`LanguageModel`: from a model reference to a decoder, its tokenizer and its chat template.

Notable here:
- safetensors are memory-mapped; a GGUF tensor stays in the format of its file if the native kernels support it, or in
  one that holds the same values, and is dequantized once otherwise, which is said
- the decoder is built on torch's meta device and filled layer by layer, and pages of the file are released after each
  layer, so that no weight is in memory twice
- names and shapes are compared before the first weight is read: a checkpoint fits completely or is refused
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, overload

import torch
from torch import Tensor

from pippin.core import device as devices, memory, native
from pippin.core.checks import checked
from pippin.core.errors import CorruptedFile, InvalidArgument, ModelNotFound, UnsupportedModel
from pippin.core.formats.checkpoint import open_folder, save_folder
from pippin.core.formats.ggml_quants import dequantize_blocks, kernel_kind, ternary_codes, to_q8_0
from pippin.core.formats.gguf import open_gguf
from pippin.core.formats.model_types import MODEL_TYPES
from pippin.core.store import reference
from pippin.core.store.reference import Resolved
from pippin.data.text.chat_template import ChatTemplate
from pippin.data.text.tokenizer import Tokenizer
from pippin.data.text.tool_dialect_name import ToolDialectName
from pippin.language import adapter_files, families, kept_metadata
from pippin.language.decoder import Decoder
from pippin.language.decoder_config import DecoderConfig
from pippin.language.decoder_layer import DecoderLayer
from pippin.language.quantized import Blocks, Packable, QuantizedMatrix, is_setting
from pippin.language.quantized_checkpoint import METHOD, StoredMatrix, quantized_matrices
from pippin.language.transformers_models import open as transformers_folder
from pippin.language.transformers_models.network import TransformersConfig, TransformersNetwork
from pippin.language.weight_packing import DType, Packing, choose_packing, group_of, quantization_notes, stored_kind
from pippin.nn.embedding import TokenEmbedding
from pippin.nn.linear import Linear
from pippin.nn.lora import Adapter
from pippin.nn.packed_layers import PackedLinear, PackedTokenEmbedding, pack as pack_module, replace_submodule
from pippin.nn.quantization.affine import AffineCodes
from pippin.nn.quantization.codes import Codes
from pippin.nn.quantization.packed import BITS, Bits, NativeWeight, quantize
from pippin.nn.quantization.palette import Palette
from pippin.nn.triton.triton_matvec import TritonWeight

if TYPE_CHECKING:
    from pippin.engine.generation import Generation, Prompt

Transform = Callable[[DecoderConfig], DecoderConfig]
"""Maps the config of a checkpoint's decoder to that of the decoder to build."""
LISTED = 20
"""Maximum number of tensors that a message names."""


@dataclass(frozen=True)
class LanguageModel:
    """A decoder with its tokenizer, chat template and adapters.

    Args:
        name: name of the model in messages and adapters.
        network: the decoder; or for a family that Pippin does not have, the model of transformers.
        tokenizer: text to token ids and back.
        template: the chat template; None for a base model, which continues text but has no conversation format.
        source: the file or folder that it was read from; None for a model created in memory.
        adapters: loaded adapters by name.
        notes: for a model that another library quantized: which matrices are computed in the format that they are
            stored in, and which are widened, with the memory that both take; for one that transformers computes: that
            this is slower, and why.
        tool_dialect: how the model writes calls of tools (`pippin.session.tool_dialects`); None for what its template
            shows.
    """

    name: str
    network: Decoder | TransformersNetwork
    tokenizer: Tokenizer
    template: ChatTemplate | None
    source: Path | None = None
    adapters: dict[str, Adapter] = field(default_factory=dict, compare=False, repr=False)
    notes: tuple[str, ...] = field(default=(), compare=False, repr=False)
    tool_dialect: ToolDialectName | None = None

    @property
    def module(self) -> Decoder:
        """The decoder.

        Raises:
            UnsupportedModel: the model is computed by transformers.
        """
        if isinstance(self.network, TransformersNetwork):
            raise UnsupportedModel(
                f"{self.name} is a {self.network.config.family!r} model, which transformers computes: it answers and "
                "scores, but has no weights that Pippin knows. Adapters, steering, training, quantization, pruning and "
                "export need one of the families in docs/tutorials/models.md"
            )
        return self.network

    @property
    def config(self) -> DecoderConfig:
        """The config of the decoder.

        Raises:
            UnsupportedModel: the model is computed by transformers.
        """
        return self.module.config

    @property
    def cache_layout(self) -> DecoderConfig | TransformersConfig:
        """What the layers keep of a sequence: keys and values in groups, and states."""
        return self.network.config

    @property
    def vocab_size(self) -> int:
        """Number of logits; at least the size of the tokenizer's vocabulary."""
        return self.network.config.vocab_size

    @property
    def context_size(self) -> int:
        """Longest sequence, prompt and answer together, in tokens."""
        return self.network.config.max_position_embeddings

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        if isinstance(self.network, TransformersNetwork):
            return self.network.device
        return self.network.embed_tokens.device

    @property
    def dtype(self) -> torch.dtype:
        """Precision of activations, and of weights that are not packed."""
        if isinstance(self.network, TransformersNetwork):
            return self.network.dtype
        return self.network.embed_tokens.dtype

    def adapter(self, name: str | None) -> Adapter | None:
        """The loaded adapter of this name; None for None.

        Raises:
            ModelNotFound: no adapter of this name is loaded.
        """
        if name is None or name in self.adapters:
            return None if name is None else self.adapters[name]
        loaded = ", ".join(self.adapters) or "none"
        raise ModelNotFound(f"{self.name} has no adapter {name!r} loaded; loaded: {loaded}; see `load_adapter`")

    def load_adapter(self, name: str, path: str | Path) -> Adapter:
        """Load a LoRA adapter (see `pippin.language.adapter_files`); requests that name it are answered with it.

        An adapter of the same name is replaced; requests that run already finish with the one they began with.

        Raises:
            ModelNotFound: there is no adapter in the folder.
            AdapterMismatch: it was made for another base model.
            UnsupportedModel: it needs something that is not supported; the message names the setting.
            UnsafeCheckpoint: its weights are a pickle.
            CorruptedFile: a file is damaged, or the weights do not fit the configuration.
            InvalidArgument: an empty name.
        """
        _ = self.module  # a model of transformers is refused before the folder is read
        self.adapters[name] = adapter_files.load_adapter(self, name, path)
        return self.adapters[name]

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter; running requests with it finish with it.

        Raises:
            ModelNotFound: no adapter of this name is loaded.
        """
        self.adapter(name)
        self.adapters.pop(name, None)

    @overload
    def generate(self, prompt: str, *, adapter: str | None = None, **options: Any) -> Generation: ...
    @overload
    def generate(self, prompt: Sequence[Prompt], *, adapter: str | None = None, **options: Any) -> list[Generation]: ...
    def generate(self, prompt: str | Sequence[Any], *, adapter: str | None = None, **options: Any) -> Any:
        """Generate text: `pippin.engine.generation.generate` with this model; arguments and errors are its own."""
        # The engine imports this module, so it is imported only here.
        return import_module("pippin.engine.generation").generate(self, prompt, adapter=adapter, **options)

    def save(self, path: str | Path, *, metadata: Mapping[str, Any] | None = None) -> None:
        """Write the model in Hugging Face layout; transformers and `load` read it back.

        The chat template, the recommended sampling, the license and the tool dialect go with it.

        Args:
            path: created where it does not exist.
            metadata: further fields of `config.json`; they override its own.

        Raises:
            InvalidArgument: the weights were packed for inference; load with ``pack=False``.
            UnsupportedModel: rotary frequencies that have no Hugging Face configuration.
        """
        tensors = dict(self.module.state_dict())
        if any(getattr(module, "packed", None) is not None for module in self.module.modules()):
            raise InvalidArgument(f"{self.name} is packed for inference; load it with pack=False to save it")
        if self.config.tie_word_embeddings:
            del tensors["lm_head.weight"]
        stored = families.to_stored(families.FAMILIES[self.config.family], self.config, tensors)
        dtype = {"dtype": str(self.dtype).removeprefix("torch.")}
        kept = kept_metadata.token_ids(self.tokenizer) | dtype | kept_metadata.config_fields(self)
        config = families.to_hf(self.config) | kept | dict(metadata or {})
        generation = kept_metadata.generation_config(self)
        save_folder(Path(path), config=config, tensors=stored, tokenizer=self.tokenizer, generation_config=generation)


@checked
def load(
    ref: str | Path = "smollm2-135m",
    *,
    device: str | None = None,
    dtype: DType = "auto",
    bits: Bits | None = None,
    pack: bool = True,
    transform: Transform | None = None,
    tool_dialect: ToolDialectName | None = None,
) -> LanguageModel:
    """Load a language model.

    Args:
        ref: a catalog name (fetched if it is not in the cache yet), a `.gguf` file, a folder in Hugging Face layout,
            or a hub repository such as "Qwen/Qwen3-0.6B".
        device: "cpu", "cuda", "cuda:1", "mps"; None takes the best there is.
        dtype: precision of weights and activations. On a CPU with the native kernels, activations are always float32;
            "auto" leaves the weights of a GGUF file or a quantized folder as they are stored and takes others as
            bfloat16; "float32" and "bfloat16" are for all weights. Elsewhere "auto" is bfloat16 if the device is fast
            in it and float32 otherwise; for training (``pack=False``) it is float32.
        bits: 2, 3, 4 or 8: quantize the matrices to this many bits (plus 16 for every 64 weights), the embedding to at
            least 4. This needs no data and takes seconds; below 4 bits it costs quality. None does not quantize.
        pack: convert weights to the layout that decodes fastest. A packed model can be neither trained nor saved.
        transform: maps the config in the checkpoint to the config of the decoder to build, such as
            `pippin.language.methods.kv_routing.fewer_caches`. It is called before weights are read; tensors that the
            new decoder does not use are not read.
        tool_dialect: how the model writes calls of tools, such as "hermes" (docs/tutorials/tools.md lists them); None
            for what the folder or the chat template says.

    Raises:
        ModelNotFound: nothing answers to ``ref``.
        DownloadFailed: the model had to be fetched, and could not be.
        CorruptedFile: a damaged file, or one whose tensors do not fit its configuration.
        UnsupportedModel: an architecture or a number format that neither Pippin nor transformers (extra
            `transformers`) has; or one of transformers that is to be trained, quantized or transformed.
        UnsafeCheckpoint: the weights are a pickle.
        InvalidArgument: an unknown device, precision or number of bits; bits where nothing computes with them, or that
            do not fit the model; weights to be quantized that are not finite; a transform that asks for tensors that
            the checkpoint does not have.
    """
    where = devices.choose(device)
    packing = choose_packing(dtype, where, bits=bits, pack=pack)
    found = reference.resolve(ref)
    try:
        headers = transformed(read_headers(found), transform)
    except UnsupportedModel as error:
        check_transformers(found, error, only_run=pack and bits is None and transform is None)
        model = _through_transformers(found, where, dtype, str(error))
        return model if tool_dialect is None else replace(model, tool_dialect=tool_dialect)
    model = assemble(found, headers, packing, pack=pack)
    del headers
    memory.trim()  # the mapping of the file is released as well
    return model if tool_dialect is None else replace(model, tool_dialect=tool_dialect)


def check_transformers(found: Resolved, error: UnsupportedModel, *, only_run: bool) -> None:
    """Check that a model that Pippin does not have opens through transformers.

    Args:
        found: the resolved reference.
        error: why Pippin does not have it.
        only_run: whether it is to be run as it is, and not trained, quantized or changed.

    Raises:
        UnsupportedModel: transformers does not open it either, or it is not only to be run.
    """
    config = {} if found.kind == "gguf" else open_folder(found.path).config
    family = config.get("model_type")
    if not config or family in MODEL_TYPES or (family in families.FAMILIES and "quantization_config" in config):
        raise error
    if reason := transformers_folder.obstacle(config):
        raise UnsupportedModel(f"{error}; {reason}") from error
    if not only_run:
        raise UnsupportedModel(
            f"{error}; it opens through transformers, but only to be run: leave bits, transform and pack=False out"
        ) from error


def _through_transformers(found: Resolved, device: torch.device, dtype: DType, reason: str) -> LanguageModel:
    """Open a model that Pippin does not have for a reason; errors as of `load`."""
    network, tokenizer = transformers_folder.open_network(found.path, device, dtype)
    template = ChatTemplate(tokenizer.chat_template, tokenizer) if tokenizer.chat_template else None
    known = open_folder(found.path).config.get("model_type") in families.FAMILIES
    notes = transformers_folder.notes(network, reason if known else "")
    dialect = _stored_dialect(found)
    return LanguageModel(found.name, network, tokenizer, template, found.path, notes=notes, tool_dialect=dialect)


def assemble(found: Resolved, headers: CheckpointHeaders, packing: Packing, *, pack: bool) -> LanguageModel:
    """Read the weights of a checkpoint whose headers were read; errors as of `load`."""
    if packing.bits is not None:
        packing.nbytes(headers.module, headers.kinds)  # refuses matrices that cannot be quantized
    tokenizer = headers.tokenizer()
    reasons = {name: headers.reasons[name] for name in headers.names if name in headers.reasons}
    notes = quantization_notes(headers.quantized, headers.module, headers.kinds, reasons, packing)
    _fill(headers, packing, pack)
    template = ChatTemplate(tokenizer.chat_template, tokenizer) if tokenizer.chat_template else None
    return LanguageModel(
        found.name, headers.module, tokenizer, template, found.path, notes=notes, tool_dialect=_stored_dialect(found)
    )


def _stored_dialect(found: Resolved) -> ToolDialectName | None:
    """The tool dialect that a folder was saved with.

    Raises:
        CorruptedFile: there is no dialect of that name.
    """
    name = None if found.kind == "gguf" else open_folder(found.path).config.get("tool_dialect")
    if name is not None and name not in (known := get_args(ToolDialectName)):
        raise CorruptedFile(f"{found.path}: config.json: tool_dialect is {name!r}; there are {', '.join(known)}")
    return name


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
    )


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
    )


def _fill(headers: CheckpointHeaders, packing: Packing, pack: bool) -> None:
    """Read the weights layer by layer; each is packed before the next is read, so the peak is one dense layer."""
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
                weight = _packed(headers, packing, name, form)
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
            headers.release(members)
    headers.module.tie_weights()
    if pack:
        headers.module.pack_head()
        headers.module.requires_grad_(False).eval()


def _packed(headers: CheckpointHeaders, packing: Packing, name: str, form: int) -> NativeWeight | TritonWeight:
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
