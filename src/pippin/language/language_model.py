"""`LanguageModel`: from a model reference to a decoder, its tokenizer and its chat template.

Notable here:
- safetensors are memory-mapped; a GGUF tensor stays in the format of its file if the native kernels support it, or in
  one that holds the same values, and is dequantized once otherwise, which is said
- the decoder is built on torch's meta device and filled layer by layer, and pages of the file are released after each
  layer, so that no weight is in memory twice
- names and shapes are compared before the first weight is read: a checkpoint fits completely or is refused
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, overload

import torch

from pippin.core import device as devices
from pippin.core.checks import checked
from pippin.core.errors import CorruptedFile, InvalidArgument, ModelNotFound, UnsupportedModel
from pippin.core.formats.checkpoint import open_folder, save_folder
from pippin.core.formats.model_types import MODEL_TYPES
from pippin.core.memory import MemoryBudget, trim
from pippin.core.store import reference
from pippin.core.store.reference import Resolved
from pippin.data.text.chat_template import ChatTemplate
from pippin.data.text.tokenizer import Tokenizer
from pippin.data.text.tool_dialect_name import ToolDialectName
from pippin.language import adapter_files, families, kept_metadata
from pippin.language.checkpoint_headers import CheckpointHeaders, Transform, read_headers, transformed
from pippin.language.decoder import Decoder
from pippin.language.decoder_config import DecoderConfig
from pippin.language.memory_placement import Placement, place
from pippin.language.transformers_models import open as transformers_folder
from pippin.language.transformers_models.network import TransformersConfig, TransformersNetwork
from pippin.language.weight_loading import fill
from pippin.language.weight_packing import DType, Packing, choose_packing, quantization_notes
from pippin.nn.lora import Adapter
from pippin.nn.quantization.packed import Bits

if TYPE_CHECKING:
    from pippin.engine.generation import Generation, Prompt
    from pippin.language.neuron_predictor import NeuronPredictor


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
        placement: for a model with a memory budget, what of it is in memory and what stays in storage.
    """

    name: str
    network: Decoder | TransformersNetwork
    tokenizer: Tokenizer
    template: ChatTemplate | None
    source: Path | None = None
    adapters: dict[str, Adapter] = field(default_factory=dict, compare=False, repr=False)
    notes: tuple[str, ...] = field(default=(), compare=False, repr=False)
    tool_dialect: ToolDialectName | None = None
    placement: Placement | None = field(default=None, compare=False, repr=False)

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
    memory: int | str | MemoryBudget | None = None,
    neuron_predictor: str | Path | None = None,
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
        memory: the most resident memory that the model adds to this process, with caches and all that computes with
            it: bytes or a size such as "400MB"; "auto" for 80 % of what is free. What does not fit stays in its file,
            which is possible for experts of mixtures and neurons of layers with ReLU; they are read when they are
            needed (docs/tutorials/memory.md). None for all in memory.
        neuron_predictor: folder of a predictor that `pippin train neuron-predictor` wrote for this model: with
            ``memory``, it says which neurons of layers with ReLU fire, so that all their weights may stay in storage;
            what it misses counts as zero. It is not used where all fits. None keeps the matrix in memory whose sign
            decides.
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
            the checkpoint does not have; memory that is no size, or without native kernels; a
            predictor without memory, or one of another model.
        NotEnoughMemory: the memory is less than the least that works, which the message names.
    """
    budget = None if memory is None else MemoryBudget.of(memory)
    predictor = _predictor(neuron_predictor, budget)
    where = devices.choose(device)
    packing = choose_packing(dtype, where, bits=bits, pack=pack)
    found = reference.resolve(ref)
    try:
        headers = transformed(read_headers(found), transform)
    except UnsupportedModel as error:
        check_transformers(found, error, only_run=pack and bits is None and transform is None and budget is None)
        model = _through_transformers(found, where, dtype, str(error))
        return model if tool_dialect is None else replace(model, tool_dialect=tool_dialect)
    model = assemble(found, headers, packing, pack=pack, budget=budget, predictor=predictor)
    del headers
    trim()  # the mapping of the file is released as well
    return model if tool_dialect is None else replace(model, tool_dialect=tool_dialect)


def _predictor(folder: str | Path | None, budget: MemoryBudget | None) -> NeuronPredictor | None:
    """The predictor in a folder, for a model with a budget; errors as of `load`."""
    if folder is None:
        return None
    if budget is None:
        raise InvalidArgument("neuron_predictor says which neurons to read from storage; give memory as well")
    from pippin.language.neuron_predictor import NeuronPredictor

    return NeuronPredictor.load(folder)


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
            f"{error}; it opens through transformers, but only to be run: leave bits, memory, transform and pack=False "
            "out"
        ) from error


def _through_transformers(found: Resolved, device: torch.device, dtype: DType, reason: str) -> LanguageModel:
    """Open a model that Pippin does not have for a reason; errors as of `load`."""
    network, tokenizer = transformers_folder.open_network(found.path, device, dtype)
    template = ChatTemplate(tokenizer.chat_template, tokenizer) if tokenizer.chat_template else None
    known = open_folder(found.path).config.get("model_type") in families.FAMILIES
    notes = transformers_folder.notes(network, reason if known else "")
    dialect = _stored_dialect(found)
    return LanguageModel(found.name, network, tokenizer, template, found.path, notes=notes, tool_dialect=dialect)


def assemble(
    found: Resolved,
    headers: CheckpointHeaders,
    packing: Packing,
    *,
    pack: bool,
    budget: MemoryBudget | None = None,
    predictor: NeuronPredictor | None = None,
) -> LanguageModel:
    """Read the weights of a checkpoint whose headers were read; errors as of `load`."""
    if packing.bits is not None:
        packing.nbytes(headers.module, headers.kinds)  # refuses matrices that cannot be quantized
    tokenizer = headers.tokenizer()
    reasons = {name: headers.reasons[name] for name in headers.names if name in headers.reasons}
    notes = quantization_notes(headers.quantized, headers.module, headers.kinds, reasons, packing)
    placement, absent = (None, {}) if budget is None else place(found, headers, packing, budget, predictor)
    fill(headers, packing, pack, absent)
    template = ChatTemplate(tokenizer.chat_template, tokenizer) if tokenizer.chat_template else None
    dialect = _stored_dialect(found)
    return LanguageModel(
        found.name,
        headers.module,
        tokenizer,
        template,
        found.path,
        notes=notes,
        tool_dialect=dialect,
        placement=placement,
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
