"""Opening a folder through transformers.

Notable here:
- code in a checkpoint never runs, and neither do kernels from the hub; weights are safetensors, never pickles
- sizes are bounded before modules are built, and every tensor of the model must come from the file
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch

from pippin.core import device as devices
from pippin.core.errors import CorruptedFile, UnsupportedModel
from pippin.core.formats.checkpoint import Checkpoint, open_folder
from pippin.data.text.tokenizer import Tokenizer
from pippin.language.families.sizes import MAX_EXPERTS, MAX_LAYERS, check_size, contradictions
from pippin.language.transformers_models.network import TransformersNetwork

OLDEST: Final = (5, 24)
"""The oldest version of transformers whose caches are known here."""
_MAX_SIZE = 1 << 24
_CONTEXT = 2048
"""Tokens of context of a model whose configuration names no number."""
_CONTEXT_NAMES = ("max_position_embeddings", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx")
_TEXT_NAMES = {
    r"^(model\.)?language_model\.model\.": "model.",
    r"^(model\.)?language_model\.lm_head\.": "lm_head.",
    r"^(model\.)?(language_model|text_model)\.": "model.",
}
"""Names of the text part of a multimodal model, and what they are in the text model alone."""
_BESIDE = ("vision", "visual", "audio", "multi_modal", "multimodal", "mm_", "mtp", "image", "speech", "talker")
"""Beginnings of the names of parts that a text needs not."""


def obstacle(config: Mapping[str, Any]) -> str:
    """Why transformers does not open a model with this `config.json`, as the end of a sentence; empty if it does."""
    family = config.get("model_type")
    try:
        found = version("transformers")
    except PackageNotFoundError:
        return "with `pip install 'pippin[transformers]'`, families that transformers has open through it"
    if tuple(map(int, re.findall(r"\d+", found)[:2])) < OLDEST:
        return f"other families open through transformers {OLDEST[0]}.{OLDEST[1]} or later, and {found} is installed"
    known, causal = _known_families()
    if family not in known:
        remote = " and the code in the checkpoint is not run" if "auto_map" in config else ""
        return f"transformers {found} does not have it either{remote}"
    if family not in causal and _text_part(config) is None:
        return "transformers has it, but not as a causal language model"
    if "quantization_config" in config:
        return "and of the families that open through transformers, quantized checkpoints are not read"
    return ""


def _text_part(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The configuration of the causal language model inside a multimodal one; None where the whole is opened."""
    _, causal = _known_families()
    text = config.get("text_config")
    whole = causal.get(config["model_type"], "ForConditionalGeneration")
    inside = isinstance(text, dict) and text.get("model_type") in causal
    if not inside or not whole.endswith("ConditionalGeneration"):
        return None
    assert isinstance(text, dict)
    tied = {name: config[name] for name in ("tie_word_embeddings",) if name in config}
    return text | tied


def open_network(path: Path, device: torch.device, dtype: str) -> tuple[TransformersNetwork, Tokenizer]:
    """Open a folder in Hugging Face layout through transformers.

    Args:
        path: a folder with config, safetensors and tokenizer.
        device: where the weights go.
        dtype: precision of the weights; "auto" for bfloat16 where the device is fast in it, or float32 does not fit
            in memory, and float32 elsewhere.

    Raises:
        CorruptedFile: a damaged file, or one whose tensors do not fit its configuration.
        UnsupportedModel: transformers cannot compute it.
        UnsafeCheckpoint: the weights are a pickle.
    """
    checkpoint = open_folder(path)
    with contradictions("config.json"):
        _check_sizes(checkpoint.config)
    tokenizer = _tokenizer(path)
    model = _load(path, checkpoint, device, _precision(checkpoint, device, dtype))
    text = model.config.get_text_config(decoder=True)
    found = (getattr(text, name, None) for name in _CONTEXT_NAMES)
    context = min(next((size for size in found if isinstance(size, int) and size > 0), _CONTEXT), _same_rotation(text))
    from pippin.language.transformers_models.probe import probed  # imports transformers

    with _quiet():
        return probed(model, context), tokenizer


def _same_rotation(config: Any) -> int:
    """Tokens up to which a sequence is rotated by the same angles; a longer one changes the tables of all others."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") not in ("longrope", "dynamic"):
        return _MAX_SIZE
    return int(rope.get("original_max_position_embeddings") or config.max_position_embeddings)


def notes(network: TransformersNetwork, reason: str = "") -> tuple[str, ...]:
    """What a person should know about a model that opens this way.

    Args:
        network: the model.
        reason: why Pippin does not compute it; empty for a family that Pippin does not have.
    """
    why = reason or f"Pippin has no decoder for {network.config.family!r} models"
    slow = f"{why}; transformers {version('transformers')} computes this one: the slow path (docs/tutorials/models.md)"
    again = "every token is computed from the beginning of the text, as the model has no cache that fits: "
    return (slow,) if network.config.layers else (slow, again + network.config.uncached)


def memory_of(path: Path, device: torch.device, dtype: str) -> tuple[int, int, int]:
    """Bytes of the weights of a folder once loaded, bytes of cache for one token (an estimate from the configuration),
    and the longest context in tokens."""
    checkpoint = open_folder(path)
    with contradictions("config.json"):
        _check_sizes(checkpoint.config)
    itemsize = _precision(checkpoint, device, dtype).itemsize
    config = checkpoint.config.get("text_config") or checkpoint.config

    def size(*names: str) -> int:
        return next((config[name] for name in names if isinstance(config.get(name), int)), 0)

    heads = size("num_attention_heads", "n_head", "num_heads")
    head = size("head_dim") or size("hidden_size", "n_embd", "d_model") // max(1, heads)
    vectors = 2 * size("num_hidden_layers", "n_layer", "num_layers") * (size("num_key_value_heads") or heads) * head
    return _elements(checkpoint) * itemsize, vectors * itemsize, size(*_CONTEXT_NAMES, "n_positions") or _CONTEXT


def _load(path: Path, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> Any:
    """The model with its weights.

    Raises:
        CorruptedFile: the configuration or the tensors do not fit.
    """
    transformers = _library()
    text, given = _text_part(checkpoint.config), {}
    with _quiet():
        try:
            if text is not None:
                given = {"config": transformers.AutoConfig.for_model(**text), "key_mapping": _TEXT_NAMES}
            model, report = transformers.AutoModelForCausalLM.from_pretrained(
                path,
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                attn_implementation=_attention((text or checkpoint.config)["model_type"]),
                output_loading_info=True,
                **given,
            )
        except Exception as error:  # its own errors, torch's and those of the model's code
            raise CorruptedFile(f"{path}: transformers cannot open it: {error}") from error
    unread = [name for name in report["unexpected_keys"] if not any(part in name for part in _BESIDE)]
    problems = [f"{name!r} is missing" for name in sorted(report["missing_keys"])]
    problems += [f"{name!r} is not expected" for name in sorted(unread)]
    problems += [f"{each} has another shape" for each in report["mismatched_keys"]]
    if problems:
        more = [f"and {len(problems) - 20} more"] if len(problems) > 20 else []
        raise CorruptedFile(f"{path} does not fit its configuration: {'; '.join(problems[:20] + more)}")
    return model.to(device).eval().requires_grad_(False)


def _attention(family: str) -> str:
    """How attention is computed; named here, because a configuration may name a kernel of the hub."""
    _, causal = _known_families()
    name = causal[family]
    found = getattr(_library(), name if isinstance(name, str) else name[0])
    return "sdpa" if found._supports_sdpa else "eager"


def _precision(checkpoint: Checkpoint, device: torch.device, dtype: str) -> torch.dtype:
    """The precision of the weights."""
    if dtype != "auto":
        return {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[dtype]
    if device.type != "cpu" or devices.has_fast_bf16():
        return torch.bfloat16
    return torch.float32 if 4 * _elements(checkpoint) < devices.memory().available else torch.bfloat16


def _elements(checkpoint: Checkpoint) -> int:
    return sum(prod(checkpoint.shape(name)) for name in checkpoint.names())


def _tokenizer(path: Path) -> Tokenizer:
    """The tokenizer; one that only transformers reads is converted by it.

    Raises:
        CorruptedFile: it cannot be read.
        ModelNotFound: there is none.
    """
    try:
        return Tokenizer.from_folder(path)
    except UnsupportedModel as error:
        transformers = _library()
        with tempfile.TemporaryDirectory() as converted, _quiet():
            try:
                found = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
                found.save_pretrained(converted)
            except Exception as inner:  # its own errors and those of other libraries
                raise CorruptedFile(f"{path}: transformers cannot read the tokenizer: {inner}") from error
            return Tokenizer.from_folder(converted)


def _check_sizes(config: Mapping[str, Any]) -> None:
    """Refuse impossible sizes before modules are built, which takes time and memory.

    Raises:
        ValueError: a size is impossible.
    """
    for name, value in config.items():
        if isinstance(value, Mapping):
            _check_sizes(value)
        elif isinstance(value, int) and not isinstance(value, bool) and value > 0:
            layers = "layer" in name and name.startswith(("n_", "num_"))
            experts = "expert" in name and name.startswith(("n_", "num_", "moe_num"))
            check_size(name, value, MAX_LAYERS if layers else MAX_EXPERTS if experts else _MAX_SIZE << 7)
            if name.endswith(("_size", "_dim", "_embd", "_heads", "_head")):
                check_size(name, value, _MAX_SIZE)


# --- the library ------------------------------------------------------------------------------------------------------


def _library() -> ModuleType:
    """Transformers, without kernels from the hub, which are code."""
    os.environ["USE_HUB_KERNELS"] = "OFF"  # read at its first import
    import transformers
    from transformers.integrations import hub_kernels

    hub_kernels._kernels_enabled = False  # where it was imported before
    return transformers


def _known_families() -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The model types of transformers, and the classes of those that are causal language models."""
    _library()
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the progress bars and warnings of transformers."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
