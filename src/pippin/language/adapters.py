r"""LoRA adapters on disk: the layout of Hugging Face's PEFT, with the base model's hash beside it.

Notable here:
- a folder holds `adapter_config.json`, `adapter_model.safetensors` and, where we wrote it, `base_model.json` with the
  SHA-256 of the model that it was trained on; PEFT reads the first two and passes over the third
- only plain LoRA is read, $W x + \frac{\alpha}{r} B A x$, or with $\frac{\alpha}{\sqrt r}$; a setting that would change
  this formula is refused by its name, and never passed over
- everything is checked before anything is attached: the hash, each name, each shape
- an adapter over a quantised model belongs to the quantised file or folder: its hash is that of the codes
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from pippin.core.checkpoint import read_json
from pippin.core.errors import (
    AdapterMismatch,
    CorruptedFile,
    InvalidArgument,
    ModelNotFound,
    UnsafeCheckpoint,
    UnsupportedModel,
)
from pippin.core.files import disk_errors, sha256_of, sync_folder
from pippin.language import families
from pippin.language.load import LanguageModel
from pippin.language.transformer import Decoder, DecoderConfig, DecoderLayer
from pippin.nn.attention import Attention
from pippin.nn.embedding import Embedding
from pippin.nn.feedforward import FeedForward
from pippin.nn.linear import Linear
from pippin.nn.lora import Adapter, LowRank

CONFIG, WEIGHTS, BASE = "adapter_config.json", "adapter_model.safetensors", "base_model.json"
_PICKLE = "adapter_model.bin"
_TENSOR = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<which>[AB])(?:\.default)?\.weight")

# Settings that say how the adapter was trained, or that are read below. Any other that is set would change the formula.
# fmt: off
_HARMLESS = frozenset((
    "auto_mapping", "base_model_name_or_path", "bias", "eva_config", "exclude_modules", "fan_in_fan_out",
    "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha",
    "lora_dropout", "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r", "revision",
    "runtime_config", "target_modules", "task_type", "use_rslora",
))
# fmt: on
# Ways to begin that leave the base model's weights as they are.
_PLAIN_BEGINNINGS = (True, False, None, "gaussian", "orthogonal", "eva")

Pair = tuple[Tensor, Tensor]
"""$A$ (rank x inputs) and $B$ (outputs x rank)."""


class Target(NamedTuple):
    """Where a layer that adapters may change is computed: packing may have fused it with its neighbours."""

    linear: Linear
    start: int
    """The first of its outputs."""
    outputs: int


def load_adapter(model: LanguageModel, name: str, folder: str | Path) -> Adapter:
    """Read an adapter for a model; `LanguageModel.load_adapter` also makes it available to requests.

    Args:
        model: the base model, packed or not.
        name: what requests will call it.
        folder: in PEFT's layout.

    Raises:
        ModelNotFound: there is no adapter in the folder.
        AdapterMismatch: it was made for another base model: another hash, another shape, a layer that is not there.
        UnsupportedModel: a kind of adapter or a setting that is not supported; the message names it.
        UnsafeCheckpoint: its weights are a pickle.
        CorruptedFile: a file is damaged, or the weights do not fit the configuration.
        InvalidArgument: an empty name.
    """
    if not name:
        raise InvalidArgument("an adapter needs a name that is not empty")
    return attach(model, name, read_pairs(model, folder))


def read_pairs(model: LanguageModel, folder: str | Path) -> dict[str, Pair]:
    """The factors of an adapter for a model, float32, by the names of the layers that they change.

    $B$ has the adapter's scale in it, so that the change of a weight is $B A$ whatever rank and alpha were. Arguments
    and errors are those of `load_adapter`.
    """
    folder = Path(folder)
    config = read_json(_find(folder))
    scale = _scale(config, folder)
    pairs = _pairs(folder, int(config["r"]))
    _compare_base(model, folder)
    places = dict(targets(model.module))
    for layer, (down, up) in pairs.items():
        linear, _, outputs = _target(places, layer, model, folder)
        if (up.shape[0], down.shape[1]) != (outputs, linear.inputs):
            raise AdapterMismatch(
                f"{folder}: the adapter changes {layer} as a matrix of {up.shape[0]} x {down.shape[1]}, {model.name} "
                f"has {outputs} x {linear.inputs} there; the adapter was made for another model"
            )
    return {layer: (down.float(), up.float() * scale) for layer, (down, up) in pairs.items()}


def attach(model: LanguageModel, name: str, pairs: Mapping[str, Pair]) -> Adapter:
    """The adapter, as the engine takes it, of factors by the names of their layers.

    Args:
        model: the base model, packed or not.
        name: what requests will call it.
        pairs: $A$ and $B$, the scale already in $B$; copied to the model's device and precision.

    Raises:
        KeyError: a layer that the model does not have.
    """
    places = dict(targets(model.module))
    changes: dict[torch.nn.Module, list[LowRank]] = {}
    nbytes = 0
    for layer, pair in pairs.items():
        linear, start, _ = places[layer]
        down, up = (factor.detach().to(model.device, model.dtype, copy=True).contiguous() for factor in pair)
        changes.setdefault(linear, []).append(LowRank(down, up, start))
        nbytes += down.nbytes + up.nbytes
    return Adapter(name, {linear: tuple(parts) for linear, parts in changes.items()}, nbytes)


def save_adapter(
    folder: str | Path,
    weights: Mapping[str, tuple[Tensor, Tensor]],
    *,
    model: LanguageModel,
    alpha: float,
    rslora: bool = False,
    note: Mapping[str, Any] | None = None,
) -> None:
    """Write an adapter in PEFT's layout, with the hash of its base model. An adapter already in the folder is replaced.

    Args:
        folder: created where it does not exist.
        weights: by the name of the layer ("layers.0.self_attn.q_proj"), the pair of A (rank x inputs) and
            B (outputs x rank), all of one rank.
        model: the base model.
        alpha: numerator of the scale.
        rslora: whether the scale is alpha / sqrt(rank) rather than alpha / rank.
        note: how it was made (data, steps, losses), JSON values only; kept beside the base model's hash.

    Raises:
        InvalidArgument: no weights, or ranks that differ.
        AdapterMismatch: a layer that the model does not have.
        DiskFull: there is not enough space; nothing was changed.
    """
    folder = Path(folder)
    ranks = {size for down, up in weights.values() for size in (down.shape[0], up.shape[1])}
    if len(ranks) != 1:
        raise InvalidArgument(f"an adapter needs weights of one rank, got {sorted(ranks) or 'no weights'}")
    places = dict(targets(model.module))
    tensors = {}
    for layer, pair in weights.items():
        _target(places, layer, model, folder)
        for which, tensor in zip("AB", pair, strict=True):
            key = f"base_model.model.{families.to_hf_name(layer)}.lora_{which}.weight"
            tensors[key] = tensor.detach().cpu().contiguous().clone()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.name,
        "r": ranks.pop(),
        "lora_alpha": alpha,
        "use_rslora": rslora,
        "target_modules": sorted({layer.rpartition(".")[2] for layer in weights}),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    base: dict[str, Any] = {"name": model.name, "sha256": base_sha256(model)}
    if note:
        base["made"] = dict(note)
    folder.mkdir(parents=True, exist_ok=True)
    with disk_errors(folder), tempfile.TemporaryDirectory(dir=folder, prefix=".partial-") as temporary:
        fresh = Path(temporary)
        save_file(tensors, str(fresh / WEIGHTS), metadata={"format": "pt"})
        for file, content in ((BASE, base), (CONFIG, config)):
            (fresh / file).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        (folder / CONFIG).unlink(missing_ok=True)  # without it nobody opens a folder that is half written
        for file in (WEIGHTS, BASE, CONFIG):
            os.replace(fresh / file, folder / file)
    sync_folder(folder)


def base_sha256(model: LanguageModel) -> str:
    """The hash that tells base models apart.

    It is the SHA-256 of the file of weights that the model was read from, as `sha256sum` prints it; of several files,
    that of the lines ``HASH  NAME`` in the order of the names; of a model made in memory, that of its weights.
    """
    if model.source is None:
        digest = hashlib.sha256()
        for name, tensor in sorted(model.module.state_dict().items()):
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
            digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        for part in model.module.modules():
            if isinstance(part, Linear | Embedding) and part.packed is not None:
                digest.update(part.dense_weight().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()
    files = [model.source] if model.source.is_file() else sorted(model.source.glob("*.safetensors"))
    hashes = [_hash(str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in files]
    if len(hashes) == 1:
        return hashes[0]
    lines = "".join(f"{each}  {path.name}\n" for each, path in zip(hashes, files, strict=True))
    return hashlib.sha256(lines.encode()).hexdigest()


@lru_cache(maxsize=64)
def _hash(path: str, changed: int, size: int) -> str:
    """Hash of a file; kept until the file changes."""
    return sha256_of(Path(path))


def _find(folder: Path) -> Path:
    """The configuration of an adapter whose weights are there, too."""
    if not (folder / CONFIG).is_file():
        raise ModelNotFound(f"{folder} holds no {CONFIG}, so it is no LoRA adapter in PEFT's layout")
    if not (folder / WEIGHTS).is_file():
        if (folder / _PICKLE).is_file():
            raise UnsafeCheckpoint(
                f"{folder}: {_PICKLE!r} is a pickle, which can run code when it is opened; refused. Save the adapter "
                "with PEFT as safetensors, which is its default"
            )
        raise ModelNotFound(f"{folder} holds no {WEIGHTS}")
    return folder / CONFIG


def _scale(config: dict[str, Any], folder: Path) -> float:
    """What B A is multiplied by; settings that are not supported are refused."""
    kind = config.get("peft_type")
    if kind != "LORA":
        raise UnsupportedModel(f"{folder}: peft_type {kind!r} is not supported, only 'LORA' is")
    refused = {key: value for key, value in config.items() if value and key not in _HARMLESS}
    for key, plain in (("bias", (None, "none")), ("fan_in_fan_out", (None, False)), ("task_type", (None, "CAUSAL_LM"))):
        if config.get(key) not in plain:
            refused[key] = config[key]
    if config.get("init_lora_weights") not in _PLAIN_BEGINNINGS:
        refused["init_lora_weights"] = config["init_lora_weights"]
    if refused:
        named = ", ".join(f"{key} = {value!r:.60}" for key, value in refused.items())
        raise UnsupportedModel(f"{folder}: not supported in an adapter: {named}")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise CorruptedFile(f"{folder}: {CONFIG} has r = {rank!r} and lora_alpha = {alpha!r}; both must be numbers")
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _pairs(folder: Path, rank: int) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B by our name of the layer."""
    try:
        tensors = load_file(str(folder / WEIGHTS))
    except (SafetensorError, OSError, ValueError) as error:
        raise CorruptedFile(f"{folder / WEIGHTS}: damaged or truncated: {error}; download it again") from error
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise UnsupportedModel(f"{folder}: the tensor {name!r} is not part of a plain LoRA adapter")
        found.setdefault(families.hf_name(match["layer"]) or match["layer"], {})[match["which"]] = tensor
    if not found:
        raise CorruptedFile(f"{folder}: {WEIGHTS} holds no tensors")
    for layer, pair in found.items():
        if missing := {"A", "B"} - pair.keys():
            raise CorruptedFile(f"{folder}: {layer} has no lora_{missing.pop()}")
        shapes = tuple(pair["A"].shape), tuple(pair["B"].shape)
        if len(shapes[0]) != 2 or len(shapes[1]) != 2 or not shapes[0][0] == shapes[1][1] == rank:
            raise CorruptedFile(f"{folder}: {layer} has shapes {shapes[0]} and {shapes[1]}, {CONFIG} says rank {rank}")
    return {layer: (pair["A"], pair["B"]) for layer, pair in found.items()}


def _compare_base(model: LanguageModel, folder: Path) -> None:
    """Raise if the folder names another base model than this one."""
    if not (folder / BASE).is_file():
        return
    expected, ours = read_json(folder / BASE), base_sha256(model)
    if expected.get("sha256") != ours:
        raise AdapterMismatch(
            f"{folder}: the adapter was made for {expected.get('name', 'a model')!r} with SHA-256 "
            f"{expected.get('sha256')}, {model.name} has {ours}; load that model, or train the adapter on this one"
        )


def targets(module: Decoder) -> Iterator[tuple[str, Target]]:
    """The layers of a decoder that an adapter may change, by name, and where each is computed.

    Layers that share the keys and values of another have no such projections; experts have no adapters, and of a
    recurrent layer neither have the convolution and the cell.
    """
    config = module.config
    for index, layer in enumerate(module.layers):
        assert isinstance(layer, DecoderLayer)
        prefix = f"layers.{index}"
        if layer.recurrent is not None:
            for name, linear in (("in_proj", layer.recurrent.in_proj), ("out_proj", layer.recurrent.out_proj)):
                yield f"{prefix}.recurrent.{name}", Target(linear, 0, linear.outputs)
        else:
            yield from _of_attention(f"{prefix}.self_attn", layer.self_attn, config)
        if isinstance(layer.mlp, FeedForward):
            size, fused = layer.mlp.spec.size, layer.mlp.gate_up_proj
            for name, start in (("gate_proj", 0), ("up_proj", 0 if fused is None else size)):
                matrix = fused or getattr(layer.mlp, name)
                if matrix is not None:
                    yield f"{prefix}.mlp.{name}", Target(matrix, start, size)
            yield f"{prefix}.mlp.down_proj", Target(layer.mlp.down_proj, 0, config.width)


def _of_attention(prefix: str, attention: Attention, config: DecoderConfig) -> Iterator[tuple[str, Target]]:
    """The projections of an attention layer."""
    sizes = {"q_proj": config.heads, "k_proj": config.kv_heads, "v_proj": config.kv_heads}
    start = 0
    for name, heads in sizes.items():
        linear: Linear | None = attention.qkv_proj or getattr(attention, name, None)
        if linear is not None:
            yield f"{prefix}.{name}", Target(linear, start, heads * config.head_dim)
        start += 0 if attention.qkv_proj is None else heads * config.head_dim
    yield f"{prefix}.o_proj", Target(attention.o_proj, 0, config.width)


def _target(places: dict[str, Target], layer: str, model: LanguageModel, folder: Path) -> Target:
    if layer in places:
        return places[layer]
    if layer.endswith(("embed_tokens", "lm_head")) or ".experts." in layer or layer.endswith("mlp.gate"):
        raise UnsupportedModel(
            f"{folder}: an adapter of {layer!r} is not supported; only attention and dense layers are"
        )
    raise AdapterMismatch(f"{folder}: the adapter changes {layer!r}, which {model.name} does not have")
