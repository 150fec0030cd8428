"""`pippin.load`: from a model reference to a decoder, its tokenizer and its chat template.

Notable here:
- safetensors are mapped, not read; GGUF tensors are dequantised once, into the precision that will run
- the decoder is built without memory, on torch's meta device, and filled layer by layer, so nothing is held twice
- names and shapes are compared before the first weight is touched: a checkpoint fits completely or is refused
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from pippin.core import device as devices, reference
from pippin.core.checkpoint import open_folder, save_folder
from pippin.core.errors import CorruptedFile, InvalidArgument, ModelNotFound, UnsupportedModel
from pippin.core.ggml_quants import dequantize_blocks
from pippin.core.gguf import open_gguf
from pippin.core.reference import Resolved
from pippin.data.chat import ChatTemplate
from pippin.data.tokenizer import Tokenizer
from pippin.language import families
from pippin.language.transformer import Decoder, DecoderConfig, DecoderLayer
from pippin.nn.lora import Adapter


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
        return self.module.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Precision of weights and activations."""
        return self.module.embed_tokens.weight.dtype

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

    def save(self, folder: str | Path) -> None:
        """Write the model in Hugging Face layout; transformers and `load` read it back.

        Raises:
            InvalidArgument: the weights were packed for inference; load with ``pack=False``.
            UnsupportedModel: a decoder that has no Hugging Face configuration.
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
        config = families.to_hf(self.config) | generation | dtype
        save_folder(Path(folder), config=config, tensors=stored, tokenizer=self.tokenizer, generation_config=generation)


def load(
    ref: str | Path = "smollm2-135m", *, device: str | None = None, dtype: str = "auto", pack: bool = True
) -> LanguageModel:
    """Load a language model.

    Args:
        ref: a catalogue name (fetched if it is not in the cache yet), a `.gguf` file, a folder in Hugging Face layout,
            or a hub repository such as "Qwen/Qwen3-0.6B".
        device: "cpu", "cuda", "cuda:1", "mps"; None takes the best there is.
        dtype: precision of weights and activations. "auto" is bfloat16 where the device computes in it quickly and
            float32 elsewhere; for training (``pack=False``) it is float32.
        pack: put weights into the layout that decodes fastest. A packed model can be neither trained nor saved.

    Raises:
        ModelNotFound: nothing answers to ``ref``.
        DownloadFailed: the model had to be fetched, and could not be.
        CorruptedFile: a damaged file, or one whose tensors do not fit its configuration.
        UnsupportedModel: an architecture or a number format that Pippin does not have.
        UnsafeCheckpoint: the weights are a pickle.
        InvalidArgument: an unknown device or precision.
    """
    where = devices.choose(device)
    precision = choose_precision(dtype, where, pack)
    found = reference.resolve(ref)
    seen = survey(found)
    tokenizer = seen.tokenizer()
    _fill(seen.module, seen.names, lambda name: seen.tensor(name, precision).to(where), pack)
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


def survey(found: Resolved) -> Survey:
    """Read the headers of a model on disk and compare them with its configuration; no weight is touched.

    Raises:
        CorruptedFile: a damaged file, or one whose tensors do not fit its configuration.
        UnsupportedModel: an architecture or a number format that Pippin does not have.
        UnsafeCheckpoint: the weights are a pickle.
    """
    read = _read_gguf if found.kind == "gguf" else _read_folder
    config, shapes, tensor, tokenizer = read(found.path)
    with torch.device("meta"):
        module = Decoder(config)
    _fit(module, config, shapes, found.path)
    return Survey(module, tuple(shapes), tensor, tokenizer)


def choose_precision(dtype: str, device: torch.device, pack: bool = True) -> torch.dtype:
    """The precision that `load` uses for its argument ``dtype``.

    Raises:
        InvalidArgument: an unknown name.

    >>> choose_precision("bfloat16", torch.device("cpu"))
    torch.bfloat16
    """
    names = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype == "auto":
        fast = device.type != "cpu" or devices.has_fast_bf16()
        return torch.bfloat16 if pack and fast else torch.float32
    if dtype not in names:
        raise InvalidArgument(f"dtype is {dtype!r}; choose auto, {', '.join(names)}")
    return names[dtype]


Reader = tuple[DecoderConfig, dict[str, tuple[int, ...]], Callable[[str, torch.dtype], Tensor], Callable[[], Tokenizer]]


def _read_gguf(path: Path) -> Reader:
    """Configuration, shapes by our names, a function that reads one tensor, and one that builds the tokenizer."""
    file = open_gguf(path)
    config = families.from_gguf(file)
    names = {families.gguf_name(name, config): name for name in file.tensors if name != "rope_freqs.weight"}
    for kind in {form.type for form in file.tensors.values()}:  # a type that cannot be read is refused now, not later
        dequantize_blocks(torch.empty(0, 2, dtype=torch.uint8), kind, torch.float32)

    def tensor(name: str, dtype: torch.dtype) -> Tensor:
        values = file.dequantize(names[name], dtype)
        return families.gguf_tensor(name, values, config, file.architecture)

    shapes = {ours: file.tensors[theirs].shape for ours, theirs in names.items()}
    return config, shapes, tensor, lambda: Tokenizer.from_gguf(file)


def _read_folder(path: Path) -> Reader:
    """The same for a folder in Hugging Face layout."""
    folder = open_folder(path)
    if "quantization_config" in folder.config:
        method = folder.config["quantization_config"].get("quant_method", "unknown")
        raise UnsupportedModel(
            f"{path} holds weights quantised by {method}; take the unquantised folder or a GGUF file"
        )
    config = families.from_hf(folder.config)
    names = {}
    for name in folder.names():
        ours = families.hf_name(name)
        if (
            ours is not None
            and not ours.endswith("rotary_emb.inv_freq")
            and not (config.tied and ours == "lm_head.weight")
        ):
            names[ours] = name

    def tensor(name: str, dtype: torch.dtype) -> Tensor:
        values = folder.tensor(names[name])
        offset = families.norm_offset(name, config)
        return (values.float() + offset if offset else values).to(dtype)

    shapes = {ours: tuple(folder.shape(theirs)) for ours, theirs in names.items()}
    return config, shapes, tensor, lambda: Tokenizer.from_folder(path)


def _fill(module: Decoder, names: Iterable[str], tensor: Callable[[str], Tensor], pack: bool) -> None:
    """Put the weights in place, one layer at a time, each packed before the next is read: the peak is one layer's."""
    layers: dict[str, list[str]] = {}
    for name in names:
        parts = name.split(".")
        layers.setdefault(".".join(parts[: 2 if parts[0] == "layers" else 1]), []).append(name)
    for prefix, members in layers.items():
        part = module.get_submodule(prefix)
        part.load_state_dict({name.removeprefix(f"{prefix}."): tensor(name) for name in members}, assign=True)
        if pack and isinstance(part, DecoderLayer):
            part.pack()
    module.tie()
    if pack:
        module.pack_head()
        module.requires_grad_(False).eval()


def _fit(module: nn.Module, config: DecoderConfig, shapes: dict[str, tuple[int, ...]], path: Path) -> None:
    """Compare names and shapes.

    Raises:
        CorruptedFile: a tensor is missing, left over, or of another shape than the configuration says.
    """
    wanted = {name: tuple(parameter.shape) for name, parameter in module.state_dict().items()}
    if config.tied:
        del wanted["lm_head.weight"]
    if missing := sorted(wanted.keys() - shapes.keys()):
        raise CorruptedFile(f"{path} lacks {len(missing)} tensors of its configuration, first {missing[0]!r}")
    if extra := sorted(shapes.keys() - wanted.keys()):
        raise CorruptedFile(
            f"{path} holds {len(extra)} tensors that its configuration has no place for, first {extra[0]!r}"
        )
    for name, shape in wanted.items():
        if shapes[name] != shape:
            raise CorruptedFile(f"{path}: tensor {name!r} has shape {shapes[name]}, its configuration says {shape}")
