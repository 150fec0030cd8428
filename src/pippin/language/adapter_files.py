r"""LoRA adapters on disk: the layout of Hugging Face's PEFT, with the hash of the base model.

Notable here:
- a folder contains `adapter_config.json`, `adapter_model.safetensors` and, if Pippin wrote it, `base_model.json` with
  the SHA-256 of the base model; PEFT reads the first two and ignores the third
- only plain LoRA is supported, $W x + \frac{\alpha}{r} B A x$, or with $\frac{\alpha}{\sqrt r}$; a setting that would
  change this formula is refused by name
- layers that a file fuses, or whose rows it orders otherwise, are split and ordered with their $B$; saved, the
  parts of a fused layer are one adapter of it, whose rank is that of all parts together
- the hash, all names and all shapes are checked before anything is attached
- an adapter of a quantized model belongs to the quantized file or folder: the hash is that of the codes
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from pippin.core.errors import (
    AdapterMismatch,
    CorruptedFile,
    InvalidArgument,
    ModelNotFound,
    UnsafeCheckpoint,
    UnsupportedModel,
)
from pippin.core.files import disk_errors, sha256_of, sync_folder
from pippin.core.formats.checkpoint import read_json
from pippin.language import families
from pippin.language.decoder import Decoder
from pippin.language.decoder_config import DecoderConfig
from pippin.language.decoder_layer import DecoderLayer
from pippin.nn.attention.attention import Attention
from pippin.nn.attention.latent_attention import LatentAttention
from pippin.nn.feedforward.feedforward import FeedForward
from pippin.nn.linear import Linear
from pippin.nn.lora import Adapter, LowRankUpdate, combine
from pippin.nn.packed_layers import PackedLinear, PackedTokenEmbedding

CONFIG, WEIGHTS, BASE = "adapter_config.json", "adapter_model.safetensors", "base_model.json"
_PICKLE = "adapter_model.bin"
_TENSOR = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<which>[AB])(?:\.default)?\.weight")

# Settings about the training, or that are handled below. Any other that is set would change the formula.
# fmt: off
_HARMLESS = frozenset((
    "auto_mapping", "base_model_name_or_path", "bias", "eva_config", "exclude_modules", "fan_in_fan_out",
    "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha",
    "lora_dropout", "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r", "revision",
    "runtime_config", "target_modules", "task_type", "use_rslora",
))
# fmt: on
# Initializations that do not change the base model's weights.
_PLAIN_BEGINNINGS = (True, False, None, "gaussian", "orthogonal", "eva")

Factors = tuple[Tensor, Tensor]
"""$A$ (rank x inputs) and $B$ (outputs x rank)."""


@runtime_checkable
class AdaptedModel(Protocol):
    """The interface of an adapter's base model, usually a `pippin.language.LanguageModel`."""

    @property
    def name(self) -> str:
        """Name of the model in messages."""

    @property
    def module(self) -> Decoder:
        """The decoder, packed or not."""

    @property
    def source(self) -> Path | None:
        """The file or folder that it was read from; None for a model created in memory."""

    @property
    def adapters(self) -> dict[str, Adapter]:
        """The loaded adapters by name."""


class TargetModule(NamedTuple):
    """The module that computes a layer that adapters may change; packing may have fused it with its neighbors."""

    linear: Linear
    start: int
    """The first of its outputs."""
    outputs: int


def load_adapter(model: AdaptedModel, name: str, path: str | Path) -> Adapter:
    """Read an adapter for a model; `LanguageModel.load_adapter` also makes it available to requests.

    Args:
        model: the base model, packed or not.
        name: name of the adapter in requests.
        path: a folder in PEFT's layout.

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
    return attach(model, name, read_factors(model, path))


def load_adapters(
    model: AdaptedModel, name: str, paths: Sequence[str | Path], weights: Sequence[float] | None = None
) -> Adapter:
    """Load adapters as one, their weighted sum; requests to the model find it under this name.

    Args:
        model: the base model, packed or not.
        name: name of the sum in requests.
        paths: folders of the adapters.
        weights: one for each adapter; None for 1.

    Raises:
        InvalidArgument: not one weight for each adapter.
        ModelNotFound, CheckpointError: as `load_adapter`.
    """
    weights = weights or [1.0] * len(paths)
    if len(weights) != len(paths):
        raise InvalidArgument(f"{len(weights)} weights were given for {len(paths)} adapters; give one for each")
    parts = [(load_adapter(model, str(path), path), weight) for path, weight in zip(paths, weights, strict=True)]
    model.adapters[name] = combine(name, parts)
    return model.adapters[name]


def read_factors(model: AdaptedModel, path: str | Path) -> dict[str, Factors]:
    """The factors of an adapter for a model, float32, by the names of the layers that they change.

    $B$ includes the adapter's scale, so that the change of a weight is $B A$ for any rank and alpha. Arguments and
    errors are those of `load_adapter`.
    """
    path = Path(path)
    config = read_json(_find(path))
    scale = _scale(config, path)
    pairs = _pairs(path, int(config["r"]), model.module.config)
    _compare_base(model, path)
    targets = dict(target_modules(model.module))
    for layer, (down, up) in pairs.items():
        linear, _, outputs = _target(targets, layer, model, path)
        if (up.shape[0], down.shape[1]) != (outputs, linear.inputs):
            raise AdapterMismatch(
                f"{path}: the adapter changes {layer} as a matrix of {up.shape[0]} x {down.shape[1]}, {model.name} "
                f"has {outputs} x {linear.inputs} there; the adapter was made for another model"
            )
    return {layer: (down.float(), up.float() * scale) for layer, (down, up) in pairs.items()}


def attach(model: AdaptedModel, name: str, factors: Mapping[str, Factors]) -> Adapter:
    """An adapter for the engine, from factors by the names of their layers.

    Args:
        model: the base model, packed or not.
        name: name of the adapter in requests.
        factors: $A$ and $B$, with the scale included in $B$; copied to the model's device and precision.

    Raises:
        KeyError: a layer that the model does not have.
    """
    targets = dict(target_modules(model.module))
    table = model.module.embed_tokens
    changes: dict[torch.nn.Module, list[LowRankUpdate]] = {}
    nbytes = 0
    for layer, pair in factors.items():
        linear, start, _ = targets[layer]
        down, up = (factor.detach().to(table.device, table.dtype, copy=True).contiguous() for factor in pair)
        changes.setdefault(linear, []).append(LowRankUpdate(down, up, start))
        nbytes += down.nbytes + up.nbytes
    return Adapter(name, {linear: tuple(parts) for linear, parts in changes.items()}, nbytes)


def save_adapter(
    path: str | Path,
    factors: Mapping[str, tuple[Tensor, Tensor]],
    *,
    model: AdaptedModel,
    alpha: float,
    rslora: bool = False,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Write an adapter in PEFT's layout, with the hash of its base model. An adapter already in the folder is replaced.

    Args:
        path: created where it does not exist.
        factors: by the name of the layer ("layers.0.self_attn.q_proj"), the pair of A (rank x inputs) and
            B (outputs x rank), all of one rank.
        model: the base model.
        alpha: numerator of the scale.
        rslora: whether the scale is alpha / sqrt(rank) rather than alpha / rank.
        metadata: metadata of the training (data, steps, losses), JSON values only; stored in `base_model.json`.

    Raises:
        InvalidArgument: no weights, or ranks that differ.
        AdapterMismatch: a layer that the model does not have.
        DiskFull: there is not enough space; nothing was changed.
    """
    path = Path(path)
    ranks = {size for down, up in factors.values() for size in (down.shape[0], up.shape[1])}
    if len(ranks) != 1:
        raise InvalidArgument(f"an adapter needs weights of one rank, got {sorted(ranks) or 'no weights'}")
    targets = dict(target_modules(model.module))
    decoder, tensors = model.module.config, {}
    for layer in factors:
        _target(targets, layer, model, path)
    fused, rank = _fused(factors, families.FAMILIES[decoder.family], decoder, targets)
    own = next(iter(ranks))
    for layer, pair in fused.items():
        for which, tensor in zip("AB", pair, strict=True):
            tensors[f"base_model.model.{layer}.lora_{which}.weight"] = tensor.detach().cpu().contiguous().clone()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.name,
        "r": rank,
        # the scale is that of the given rank
        "lora_alpha": alpha if rank == own else alpha * (math.sqrt(rank / own) if rslora else rank / own),
        "use_rslora": rslora,
        "target_modules": _target_names(fused.keys(), model.module, targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    base: dict[str, Any] = {"name": model.name, "sha256": base_sha256(model)}
    if metadata:
        base["made"] = dict(metadata)
    path.mkdir(parents=True, exist_ok=True)
    with disk_errors(path), tempfile.TemporaryDirectory(dir=path, prefix=".partial-") as temporary:
        fresh = Path(temporary)
        save_file(tensors, str(fresh / WEIGHTS), metadata={"format": "pt"})
        for file, content in ((BASE, base), (CONFIG, config)):
            (fresh / file).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        (path / CONFIG).unlink(missing_ok=True)  # without it, a partially written folder is refused
        for file in (WEIGHTS, BASE, CONFIG):
            os.replace(fresh / file, path / file)
    sync_folder(path)


def base_sha256(model: AdaptedModel) -> str:
    """The hash that identifies a base model.

    It is the SHA-256 of the file of weights that the model was read from, as `sha256sum` prints it; of several files,
    that of the lines ``HASH  NAME`` in the order of the names; of a model created in memory, that of its weights.
    """
    if model.source is None:
        digest = hashlib.sha256()
        for name, tensor in sorted(model.module.state_dict().items()):
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
            digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        for part in model.module.modules():
            if isinstance(part, PackedLinear | PackedTokenEmbedding):
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
    """Hash of a file, cached until the file changes."""
    return sha256_of(Path(path))


def _find(folder: Path) -> Path:
    """Path of the adapter's config, after a check that its weights exist."""
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
    """The factor of B A, alpha / r or alpha / sqrt(r); settings that are not supported are refused."""
    kind = config.get("peft_type")
    if kind != "LORA":
        raise UnsupportedModel(f"{folder}: peft_type {kind!r} is not supported, only 'LORA' is")
    refused = {key: value for key, value in config.items() if value and key not in _HARMLESS}
    for key, plain in (("bias", (None, "none")), ("task_type", (None, "CAUSAL_LM"))):
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


def _pairs(folder: Path, rank: int, config: DecoderConfig) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B of each layer, by the layer's name in the decoder."""
    try:
        tensors = load_file(str(folder / WEIGHTS))
    except (SafetensorError, OSError, ValueError) as error:
        raise CorruptedFile(f"{folder / WEIGHTS}: damaged or truncated: {error}; download it again") from error
    stored: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise UnsupportedModel(f"{folder}: the tensor {name!r} is not part of a plain LoRA adapter")
        stored.setdefault(match["layer"], {})[match["which"]] = tensor
    if not stored:
        raise CorruptedFile(f"{folder}: {WEIGHTS} holds no tensors")
    family, found = families.FAMILIES[config.family], {}
    for layer, pair in stored.items():
        if missing := {"A", "B"} - pair.keys():
            raise CorruptedFile(f"{folder}: {layer} has no lora_{missing.pop()}")
        shapes = tuple(pair["A"].shape), tuple(pair["B"].shape)
        if len(shapes[0]) != 2 or len(shapes[1]) != 2 or not shapes[0][0] == shapes[1][1] == rank:
            raise CorruptedFile(f"{folder}: {layer} has shapes {shapes[0]} and {shapes[1]}, {CONFIG} says rank {rank}")
        for part in families.parts_of(family, config, layer, len(pair["B"])):
            found[part.layer] = pair["A"], pair["B"] if part.rows is None else pair["B"][part.rows]
    return found


def _fused(
    factors: Mapping[str, Factors], family: families.Family, config: DecoderConfig, targets: Mapping[str, TargetModule]
) -> tuple[dict[str, Factors], int]:
    """Factors by the full names of a family's files, and their rank.

    The parts of a fused layer have an $A$ each, which become one; all are filled up with zeros to the same rank.
    """
    found: dict[str, Factors] = {}
    for layer in factors:
        name, parts = families.stored_parts(family, config, layer, lambda one: targets[one].outputs)
        given = [(factors[part.layer], part.rows) for part in parts if part.layer in factors]
        outputs = sum(targets[part.layer].outputs for part in parts)
        ups = []
        for (_, up), rows in given:
            ups.append(up if rows is None else up.new_zeros(outputs, up.shape[1]).index_copy(0, rows.to(up.device), up))
        found[name] = torch.cat([down for (down, _), _ in given]), torch.cat(ups, 1)
    rank = max(len(down) for down, _ in found.values())
    filled = {
        name: (F.pad(down, (0, 0, 0, rank - len(down))), F.pad(up, (0, rank - len(down))))
        for name, (down, up) in found.items()
    }
    return filled, rank


def _target_names(stored: Set[str], decoder: Decoder, targets: Mapping[str, TargetModule]) -> list[str]:
    """The `target_modules` of PEFT's configuration for layers by the full names of a family's files.

    PEFT adapts every module whose name ends with a target. The last parts of the names are therefore enough only
    where all layers of such a name have an adapter; otherwise the full names are given.
    """
    config = decoder.config
    family = families.FAMILIES[config.family]
    try:
        every = {families.stored_parts(family, config, layer, lambda one: targets[one].outputs)[0] for layer in targets}
    except UnsupportedModel:  # a layer that files store in another form, whose name there may end with a target
        return sorted(stored)
    short = {layer.rpartition(".")[2] for layer in stored}
    # experts have layers of the same names as dense layers, and are no targets
    experts = any(layer.feeds and not isinstance(layer.mlp, FeedForward) for layer in decoder.layers)
    if experts or any(layer.rpartition(".")[2] in short for layer in every - stored):
        return sorted(stored)
    return sorted(short)


def _compare_base(model: AdaptedModel, folder: Path) -> None:
    """Raise if the folder names another base model than this one."""
    if not (folder / BASE).is_file():
        return
    expected, ours = read_json(folder / BASE), base_sha256(model)
    if expected.get("sha256") != ours:
        raise AdapterMismatch(
            f"{folder}: the adapter was made for {expected.get('name', 'a model')!r} with SHA-256 "
            f"{expected.get('sha256')}, {model.name} has {ours}; load that model, or train the adapter on this one"
        )


def target_modules(module: Decoder) -> Iterator[tuple[str, TargetModule]]:
    """The layers of a decoder that an adapter may change, by name, with the module that computes each.

    KV-sharing layers have no key and value projections. Experts, and the convolution and the cell of recurrent layers,
    cannot be adapted.
    """
    config = module.config
    for index, layer in enumerate(module.layers):
        assert isinstance(layer, DecoderLayer)
        prefix = f"layers.{index}"
        if layer.recurrent is not None:
            for name, linear in layer.recurrent.named_modules(prefix=f"{prefix}.recurrent"):
                if isinstance(linear, Linear):
                    yield name, TargetModule(linear, 0, linear.outputs)
        if layer.attends:
            yield from _of_attention(f"{prefix}.self_attn", layer.self_attn)
        if layer.feeds and isinstance(layer.mlp, FeedForward):
            size, fused = layer.mlp.spec.intermediate_size, layer.mlp.gate_up_proj
            for name, start in (("gate_proj", 0), ("up_proj", 0 if fused is None else size)):
                matrix = fused or getattr(layer.mlp, name)
                if matrix is not None:
                    yield f"{prefix}.mlp.{name}", TargetModule(matrix, start, size)
            yield f"{prefix}.mlp.down_proj", TargetModule(layer.mlp.down_proj, 0, config.hidden_size)
        for name in ("laurel.left", "laurel.right", "layer_input.gate", "layer_input.proj"):
            if getattr(layer, name.partition(".")[0]) is not None:
                linear = layer.get_submodule(name)
                assert isinstance(linear, Linear)
                yield f"{prefix}.{name}", TargetModule(linear, 0, linear.outputs)


def _of_attention(prefix: str, attention: Attention | LatentAttention) -> Iterator[tuple[str, TargetModule]]:
    """The projections of an attention layer."""
    if isinstance(attention, LatentAttention):
        for name in ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"):
            projection: Linear | None = getattr(attention, name, None)
            if projection is not None:
                yield f"{prefix}.{name}", TargetModule(projection, 0, projection.outputs)
        return
    sizes = {"q_proj": attention.heads, "k_proj": attention.kv_heads, "v_proj": attention.kv_heads}
    start = 0
    for name, heads in sizes.items():
        size = heads * attention.head_dim
        linear: Linear | None = attention.qkv_proj or getattr(attention, name, None)
        if linear is not None:
            yield f"{prefix}.{name}", TargetModule(linear, start, size)
        start += 0 if attention.qkv_proj is None else size
    if attention.gate_proj is not None:
        yield f"{prefix}.gate_proj", TargetModule(attention.gate_proj, 0, attention.gate_proj.outputs)
    yield f"{prefix}.o_proj", TargetModule(attention.o_proj, 0, attention.o_proj.outputs)


def _target(targets: dict[str, TargetModule], layer: str, model: AdaptedModel, folder: Path) -> TargetModule:
    if layer in targets:
        return targets[layer]
    if layer.endswith(("embed_tokens", "lm_head", "mlp.gate", "k_b_proj", "v_b_proj")) or "expert" in layer:
        raise UnsupportedModel(
            f"{folder}: an adapter of {layer!r} is not supported; only attention and dense layers are"
        )
    raise AdapterMismatch(f"{folder}: the adapter changes {layer!r}, which {model.name} does not have")
