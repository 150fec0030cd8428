"""`pippin.load`: from a model reference to a decoder, its tokenizer and its chat template.

Notable here:
- safetensors are mapped, not read; a GGUF tensor stays in the format of its file where the native kernels have it, and
  is dequantised once, into the precision that will run, where they have not
- the decoder is built without memory, on torch's meta device, and filled layer by layer, so nothing is held twice: what
  was read of the file is given back after each layer
- names and shapes are compared before the first weight is touched: a checkpoint fits completely or is refused
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pippin.core import device as devices, memory, native, reference
from pippin.core.checkpoint import open_folder, save_folder
from pippin.core.errors import CorruptedFile, InvalidArgument, ModelNotFound
from pippin.core.ggml_quants import dequantize_blocks
from pippin.core.gguf import open_gguf
from pippin.core.reference import Resolved
from pippin.data.chat import ChatTemplate
from pippin.data.tokenizer import Tokenizer
from pippin.language import families
from pippin.language.kv_routing import led, unread, warn_untrained
from pippin.language.packing import Packing, choose_packing, group_of, stored_kind
from pippin.language.stored import StoredMatrix, stored_matrices
from pippin.language.transformer import Decoder, DecoderConfig, DecoderLayer
from pippin.nn.codes import Codes
from pippin.nn.embedding import Embedding
from pippin.nn.linear import Linear
from pippin.nn.lora import Adapter
from pippin.nn.packed import NativeWeight, quantise
from pippin.nn.palette import Palette
from pippin.nn.triton_matvec import TritonWeight

LISTED = 20
"""Tensors that a message names, at most."""


@dataclass(frozen=True)
class LanguageModel:
    """A decoder with all that turns text into its tokens and back.

    ``template`` is None for a base model, which continues text but knows no turns of a conversation. ``source`` is the
    file or folder that it was read from, None for a model made in memory. ``adapters`` are those that are loaded, by
    name.
    """

    name: str
    module: Decoder
    tokenizer: Tokenizer
    template: ChatTemplate | None
    source: Path | None = None
    adapters: dict[str, Adapter] = field(default_factory=dict, compare=False, repr=False)

    @property
    def config(self) -> DecoderConfig:
        """The decoder's description."""
        return self.module.config

    @property
    def context_size(self) -> int:
        """Longest sequence, prompt and answer together, in tokens."""
        return self.config.max_context

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.module.embed_tokens.device

    @property
    def dtype(self) -> torch.dtype:
        """Precision of activations, and of weights that are not packed in a format of their own."""
        return self.module.embed_tokens.dtype

    def adapter(self, name: str | None) -> Adapter | None:
        """The loaded adapter of this name; None for None.

        Raises:
            ModelNotFound: no adapter of this name is loaded.
        """
        if name is None or name in self.adapters:
            return None if name is None else self.adapters[name]
        loaded = ", ".join(self.adapters) or "none"
        raise ModelNotFound(f"{self.name} has no adapter {name!r} loaded; loaded: {loaded}; see `load_adapter`")

    def load_adapter(self, name: str, folder: str | Path) -> Adapter:
        """Load a LoRA adapter (see `pippin.language.adapters`); requests that name it are answered with it.

        An adapter of the same name is replaced; requests that run already finish with the one they began with.

        Raises:
            ModelNotFound: there is no adapter in the folder.
            AdapterMismatch: it was made for another base model.
            UnsupportedModel: it needs something that is not supported; the message names the setting.
            UnsafeCheckpoint: its weights are a pickle.
            CorruptedFile: a file is damaged, or the weights do not fit the configuration.
            InvalidArgument: an empty name.
        """
        from pippin.language.adapters import load_adapter  # which builds on this module

        self.adapters[name] = load_adapter(self, name, folder)
        return self.adapters[name]

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter; requests that run with it finish with it.

        Raises:
            ModelNotFound: no adapter of this name is loaded.
        """
        self.adapter(name)
        self.adapters.pop(name, None)

    def save(self, folder: str | Path, *, note: Mapping[str, Any] | None = None) -> None:
        """Write the model in Hugging Face layout; transformers and `load` read it back.

        Args:
            folder: created where it does not exist.
            note: further fields of `config.json`, or others in place of those that it would have.

        Raises:
            InvalidArgument: the weights were packed for inference; load with ``pack=False``.
            UnsupportedModel: rotary frequencies that have no Hugging Face configuration.
        """
        tensors = dict(self.module.state_dict())
        if any(getattr(module, "packed", None) is not None for module in self.module.modules()):
            raise InvalidArgument(f"{self.name} is packed for inference; load it with pack=False to save it")
        if self.config.tied:
            del tensors["lm_head.weight"]
        stored = {}
        for name, tensor in tensors.items():
            offset = families.norm_offset(name, self.config)
            stored[families.to_hf_name(name)] = tensor - offset if offset else tensor
        eos = list(self.tokenizer.eos_ids)
        generation = {"eos_token_id": eos, "bos_token_id": self.tokenizer.bos_id}
        dtype = {"dtype": str(self.dtype).removeprefix("torch.")}
        config = families.to_hf(self.config) | generation | dtype | dict(note or {})
        save_folder(Path(folder), config=config, tensors=stored, tokenizer=self.tokenizer, generation_config=generation)


def load(
    ref: str | Path = "smollm2-135m",
    *,
    device: str | None = None,
    dtype: str = "auto",
    bits: int | None = None,
    pack: bool = True,
    retention: float | None = None,
    leaders: Sequence[int] | None = None,
) -> LanguageModel:
    """Load a language model.

    Args:
        ref: a catalogue name (fetched if it is not in the cache yet), a `.gguf` file, a folder in Hugging Face layout,
            or a hub repository such as "Qwen/Qwen3-0.6B".
        device: "cpu", "cuda", "cuda:1", "mps"; None takes the best there is.
        dtype: precision of weights and activations. On a CPU with the native kernels, activations are always float32;
            "auto" leaves the weights of a GGUF file or a quantised folder as they are stored and takes others as
            bfloat16; "float32" and "bfloat16" are for all weights. Elsewhere "auto" is bfloat16 where the device
            computes in it quickly and float32 where it does not; for training (``pack=False``) it is float32.
        bits: 2, 3, 4 or 8: quantise the matrices to so many bits (plus 16 for every 64 weights), the embedding to at
            least 4. This needs no data and takes seconds, and below 4 bits it costs quality. None leaves them alone.
        pack: put weights into the layout that decodes fastest. A packed model can be neither trained nor saved.
        retention: share of the layers that keep keys and values, above 0, at most 1, spread evenly; the others read the
            nearest one before. For models that were trained for it (`pippin.language.kv_routing`); projections that
            would make no keys or values are not read from the file.
        leaders: or instead: which layers keep theirs, in ascending order.

    Raises:
        ModelNotFound: nothing answers to ``ref``.
        DownloadFailed: the model had to be fetched, and could not be.
        CorruptedFile: a damaged file, or one whose tensors do not fit its configuration.
        UnsupportedModel: an architecture or a number format that Pippin does not have.
        UnsafeCheckpoint: the weights are a pickle.
        InvalidArgument: an unknown device, precision or number of bits; bits where nothing computes with them, or that
            do not fit the model; weights to be quantised that are not finite; a retention or leaders that the model
            cannot have, or both.

    Warns:
        UntrainedSharing: fewer caches than layers in a model that was not trained for it.
    """
    where = devices.choose(device)
    packing = choose_packing(dtype, where, bits=bits, pack=pack)
    found = reference.resolve(ref)
    seen = led_by(survey(found), retention, leaders)
    if retention is not None or leaders is not None:
        warn_untrained(seen.module.config)
    model = assemble(found, seen, packing, pack=pack)
    del seen
    memory.trim()  # the mapping of the file is gone, too
    return model


def assemble(found: Resolved, seen: Survey, packing: Packing, *, pack: bool) -> LanguageModel:
    """The model that a survey found, with its weights in place; errors as of `load`."""
    if packing.bits is not None:
        packing.nbytes(seen.module, seen.kinds)  # which refuses matrices that cannot be quantised
    tokenizer = seen.tokenizer()
    _fill(seen, packing, pack)
    template = ChatTemplate(tokenizer.chat_template, tokenizer) if tokenizer.chat_template else None
    return LanguageModel(found.name, seen.module, tokenizer, template, found.path)


@dataclass(frozen=True)
class Survey:
    """What the headers of a checkpoint tell: the decoder, still without memory, and how to fill it."""

    module: Decoder
    """On torch's meta device."""
    names: tuple[str, ...]
    """Every tensor by our name, in the order of the files."""
    tensor: Callable[[str, torch.dtype], Tensor]
    """Reads one tensor in a precision."""
    tokenizer: Callable[[], Tokenizer]
    """Builds the tokenizer."""
    release: Callable[[Iterable[str]], None]
    """Takes what was read of tensors out of this process's memory."""
    kinds: Mapping[str, str] = field(default_factory=dict)
    """Of a GGUF file: ggml's name of the type of each tensor; of a quantised folder: ours, where kernels have it."""
    blocks: Callable[[str], Tensor] | None = None
    """Of a GGUF file: reads the rows of one tensor as they are stored, in our order."""
    codes: Callable[[str], Codes | Palette] | None = None
    """Of a quantised folder: reads one matrix as it is stored."""


def survey(found: Resolved, config: Mapping[str, Any] | None = None) -> Survey:
    """Read the headers of a model on disk and compare them with its configuration; no weight is touched.

    Args:
        found: where it is.
        config: of a folder, read in place of its `config.json`; for models that hold a decoder and more.

    Raises:
        CorruptedFile: a damaged file, or one whose tensors do not fit its configuration.
        UnsupportedModel: an architecture or a number format that Pippin does not have.
        UnsafeCheckpoint: the weights are a pickle.
    """
    return _read_gguf(found.path) if found.kind == "gguf" else _read_folder(found.path, config)


def led_by(seen: Survey, retention: float | None, leaders: Sequence[int] | None) -> Survey:
    """The same model with fewer caches, if either is given; see `pippin.language.kv_routing.led`.

    The projections of layers that read another one are left in the file.
    """
    if retention is None and leaders is None:
        return seen
    config = led(seen.module.config, retention, leaders)
    with torch.device("meta"):
        module = Decoder(config)
    return replace(seen, module=module, names=tuple(name for name in seen.names if not unread(name, config)))


def _read_gguf(path: Path) -> Survey:
    file = open_gguf(path)
    config = families.from_gguf(file)
    names = {families.gguf_name(name, config): name for name in file.tensors if name != "rope_freqs.weight"}
    for kind in {form.type for form in file.tensors.values()}:  # a type that cannot be read is refused now, not later
        dequantize_blocks(torch.empty(0, 2, dtype=torch.uint8), kind, torch.float32)

    def tensor(name: str, dtype: torch.dtype) -> Tensor:
        values = file.dequantize(names[name], dtype)
        return families.gguf_tensor(name, values, config, file.architecture)

    def blocks(name: str) -> Tensor:
        return families.gguf_tensor(name, file.raw(names[name]), config, file.architecture)

    return Survey(
        _module(config, {ours: file.tensors[theirs].shape for ours, theirs in names.items()}, path),
        tuple(names),
        tensor,
        tokenizer=lambda: Tokenizer.from_gguf(file),
        release=lambda _: file.release(),
        kinds={ours: file.tensors[theirs].type for ours, theirs in names.items()},
        blocks=blocks,
    )


def _read_folder(path: Path, given: Mapping[str, Any] | None = None) -> Survey:
    folder = open_folder(path)
    quantised = {part: matrix for matrix in stored_matrices(folder).values() for part in matrix.parts}
    config = families.from_hf(folder.config if given is None else given)
    names: dict[str, str] = {}
    matrices: dict[str, StoredMatrix] = {}
    for name in folder.names():
        matrix = quantised.get(name)
        ours = families.hf_name(name if matrix is None else f"{matrix.stem}.weight")
        if (
            ours is not None
            and not ours.endswith("rotary_emb.inv_freq")
            and not (config.tied and ours == "lm_head.weight")
        ):
            names[ours] = name
            if matrix is not None:
                matrices[ours] = matrix

    def tensor(name: str, dtype: torch.dtype) -> Tensor:
        values = matrices[name].dense() if name in matrices else folder.tensor(names[name])
        offset = families.norm_offset(name, config)
        return (values.float() + offset if offset else values).to(dtype)

    def shape(name: str) -> tuple[int, ...]:
        return matrices[name].shape if name in matrices else tuple(folder.shape(names[name]))

    def parts(name: str) -> tuple[str, ...]:
        return matrices[name].parts if name in matrices else (names[name],)

    return Survey(
        _module(config, {ours: shape(ours) for ours in names}, path),
        tuple(names),
        tensor,
        tokenizer=lambda: Tokenizer.from_folder(path),
        release=lambda done: folder.release(part for name in done for part in parts(name)),
        kinds={name: matrix.kind for name, matrix in matrices.items() if matrix.kind},
        codes=lambda name: matrices[name].read(),
    )


def _fill(seen: Survey, packing: Packing, pack: bool) -> None:
    """Put the weights in place, one layer at a time, each packed before the next is read: the peak is one layer's."""
    layers: dict[str, list[str]] = {}
    for name in seen.names:
        parts = name.split(".")
        layers.setdefault(".".join(parts[: 2 if parts[0] == "layers" else 1]), []).append(name)
    for prefix, members in layers.items():
        part = seen.module.get_submodule(prefix)
        plain = {}
        for name in members:
            owner = seen.module.get_submodule(name.rpartition(".")[0])
            form = packing.format(owner, name, seen.kinds.get(name))
            if form is None:
                tensor = seen.tensor(name, packing.precision).to(packing.device)
                # a view would keep the whole file in memory for the sake of a norm
                plain[name.removeprefix(f"{prefix}.")] = tensor.clone() if packing.native else tensor
            else:
                assert isinstance(owner, Linear | Embedding)
                owner.packed, owner.weight = _packed(seen, packing, name, form), None
        part.load_state_dict(plain, assign=True)
        if pack and isinstance(part, DecoderLayer):
            part.pack()
        if packing.native:
            seen.release(members)
    seen.module.tie()
    if pack:
        seen.module.pack_head()
        seen.module.requires_grad_(False).eval()


def _packed(seen: Survey, packing: Packing, name: str, form: int) -> NativeWeight | TritonWeight:
    """One matrix in a format of the kernels."""
    kind = seen.kinds.get(name, "")
    if packing.bits is None and seen.codes is not None and stored_kind(kind) is not None and packing.keep:
        stored = seen.codes(name)
        assert isinstance(stored, Codes)
        return stored.pack()
    if form in native.GROUP_FORMATS.values():
        bits = next(bits for bits, number in native.GROUP_FORMATS.items() if number == form)
        weight = seen.tensor(name, torch.float32).to(packing.device)
        group = group_of(name, weight.shape[1])
        codes, scales = quantise(weight, bits, group, name=name)
        if packing.native:
            return NativeWeight.from_codes(codes, scales, bits, group)
        return TritonWeight.from_codes(codes, scales, bits, group, dtype=packing.precision)
    if packing.keep and seen.blocks is not None and native.GGML_FORMATS.get(kind) == form:
        return NativeWeight.from_ggml(seen.blocks(name), kind)
    dense = torch.float32 if form == native.GGML_FORMATS["F32"] else torch.bfloat16
    return NativeWeight.from_dense(seen.tensor(name, dense))


def _module(config: DecoderConfig, shapes: dict[str, tuple[int, ...]], path: Path) -> Decoder:
    """The decoder without memory, after its names and shapes were compared with those of the file.

    Raises:
        CorruptedFile: a tensor is missing, left over, or of another shape than the configuration says.
    """
    with torch.device("meta"):
        module = Decoder(config)
    wanted = {name: tuple(parameter.shape) for name, parameter in module.state_dict().items()}
    if config.tied:
        del wanted["lm_head.weight"]
    wrong = [f"{name!r} is missing" for name in sorted(wanted.keys() - shapes.keys())]
    wrong += [f"{name!r} has no place{_why(name, config)}" for name in sorted(shapes.keys() - wanted.keys())]
    wrong += [
        f"{name!r} has shape {shapes[name]} instead of {shape}"
        for name, shape in wanted.items()
        if shapes.get(name, shape) != shape
    ]
    if wrong:
        more = [f"and {len(wrong) - LISTED} more"] if len(wrong) > LISTED else []
        raise CorruptedFile(
            f"{path} does not fit its configuration in {len(wrong)} tensors: {'; '.join(wrong[:LISTED] + more)}"
        )
    return module


def _why(name: str, config: DecoderConfig) -> str:
    """What is to be said of a tensor left over: whether its layer was to read another layer's keys and values."""
    parts = name.split(".")
    if parts[0] != "layers" or not parts[1].isdigit() or int(parts[1]) >= len(config.layers):
        return ""
    source = config.layers[int(parts[1])].attention.source
    own = source is not None and parts[-2] in ("k_proj", "v_proj", "k_norm")
    return f", as layer {parts[1]} reads the keys and values of layer {source}" if own else ""
