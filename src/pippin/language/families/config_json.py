"""`config.json` of Hugging Face's layout to a `DecoderConfig` and back.

Notable here:
- decoders with KV sharing or Pippin's own recurrent layers are saved under model types of their own, so that other
  libraries refuse them instead of initializing the missing weights
- an unknown family is refused with the nearest names
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from pippin.core.errors import CorruptedFile, UnsupportedModel
from pippin.core.formats.model_types import MODEL_TYPES
from pippin.language.decoder_config import DecoderConfig, LayerSpec
from pippin.language.families import (
    apertus,
    arcee,
    cohere,
    deepseek,
    ernie,
    exaone4,
    falcon_h1,
    gemma,
    gemma3n,
    gemma4,
    glm,
    gpt2,
    gpt_neox,
    gpt_oss,
    granite,
    granite_hybrid,
    helium,
    hunyuan,
    kimi_linear,
    lfm2,
    llama,
    mamba2,
    minimax,
    mistral,
    mixtral,
    nanochat,
    nemotron,
    nemotron_h,
    olmo,
    olmo_hybrid,
    parallel_track,
    phi,
    qwen,
    qwen_hybrid,
    recurrent_gemma,
    seed_oss,
    smollm3,
    stablelm,
    starcoder2,
)
from pippin.language.families.family import Family, common_fields
from pippin.language.families.sizes import bounded, contradictions
from pippin.nn.recurrent.layer import RecurrentSpec

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        llama.LLAMA,
        mistral.MISTRAL,
        mistral.MINISTRAL,
        mistral.MINISTRAL3,
        smollm3.SMOLLM3,
        qwen.QWEN2,
        qwen.QWEN3,
        qwen.QWEN2_MOE,
        qwen.QWEN3_MOE,
        gemma.GEMMA,
        gemma.GEMMA2,
        gemma.GEMMA3,
        gemma3n.GEMMA3N,
        gemma4.GEMMA4,
        apertus.APERTUS,
        arcee.ARCEE,
        cohere.COHERE,
        cohere.COHERE2,
        deepseek.DEEPSEEK_V2,
        deepseek.DEEPSEEK_V3,
        deepseek.DOTS1,
        deepseek.GLM4_MOE_LITE,
        ernie.ERNIE4_5,
        ernie.ERNIE4_5_MOE,
        exaone4.EXAONE4,
        falcon_h1.FALCON_H1,
        glm.GLM,
        glm.GLM4,
        glm.GLM4_MOE,
        gpt2.GPT2,
        gpt_neox.GPT_NEOX,
        gpt_oss.GPT_OSS,
        granite.GRANITE,
        granite.GRANITE_MOE,
        granite.GRANITE_MOE_SHARED,
        helium.HELIUM,
        hunyuan.HUNYUAN,
        hunyuan.HUNYUAN_MOE,
        minimax.MINIMAX_M2,
        granite_hybrid.GRANITE_HYBRID,
        kimi_linear.KIMI_LINEAR,
        lfm2.LFM2,
        lfm2.LFM2_MOE,
        mamba2.MAMBA2,
        mixtral.MIXTRAL,
        nanochat.NANOCHAT,
        nemotron.NEMOTRON,
        nemotron_h.NEMOTRON_H,
        olmo.OLMO,
        olmo.OLMO2,
        olmo.OLMO3,
        olmo.OLMOE,
        olmo_hybrid.OLMO_HYBRID,
        parallel_track.PT_MOE,
        phi.PHI3,
        phi.PHIMOE,
        qwen_hybrid.QWEN3_NEXT,
        qwen_hybrid.QWEN3_5,
        qwen_hybrid.QWEN3_5_MOE,
        recurrent_gemma.RECURRENT_GEMMA,
        seed_oss.SEED_OSS,
        stablelm.STABLELM,
        starcoder2.STARCODER2,
    )
}
"""The families by their model type."""
SHARED_FAMILIES = {name: family for name, family in FAMILIES.items() if not family.pippin_only}
"""Those that other libraries have, too."""
WRAPPERS = {
    "aya_vision": "cohere2",
    "cohere2_vision": "cohere2",
    "deepseek_vl": "llama",
    "deepseek_vl_hybrid": "llama",
    "exaone4_5": "exaone4",
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "glmasr": "llama",
    "got_ocr2": "qwen2",
    "granite_speech": "granite",
    "granite_speech_plus": "granite",
    "idefics2": "mistral",
    "idefics3": "llama",
    "internvl": "qwen2",
    "lfm2_vl": "lfm2",
    "lighton_ocr": "qwen3",
    "llava": "llama",
    "llava_next": "llama",
    "llava_next_video": "llama",
    "llava_onevision": "qwen2",
    "minicpm_ocr": "qwen3_5_text",
    "minicpmv4_6": "qwen3_5_text",
    "minicpmv4_7": "qwen3_5_text",
    "mistral3": "mistral",
    "omniasr": "llama",
    "ovis2": "qwen2",
    "qwen2_audio": "qwen2",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_asr": "qwen3",
    "smolvlm": "llama",
    "video_llama_3": "qwen2",
    "video_llava": "llama",
    "vipllava": "llama",
    "voxtral": "llama",
}
"""Multimodal models, whose text part is the decoder, with its model type where the file does not say it."""
KV_SHARED = "pippin_kv_shared"
"""The model type of decoders with KV-sharing layers; ``base_model_type`` is their family."""
RECURRENT = "pippin_recurrent"
"""The model type of decoders with Pippin's own recurrent layers; ``base_model_type`` is their family."""


def from_hf(config: Mapping[str, Any]) -> DecoderConfig:
    """Read the contents of a `config.json`.

    Raises:
        UnsupportedModel: a family, an activation or a position scheme that the decoder does not have.
        CorruptedFile: a field that every decoder needs is missing, or two contradict each other.
    """
    family = config.get("model_type")
    recurrent = family == RECURRENT
    shared = family == KV_SHARED or (recurrent and "kv_sources" in config)
    if shared or recurrent:
        family = config.get("base_model_type")
    if family in WRAPPERS:
        if not isinstance(config.get("text_config"), dict):
            raise CorruptedFile("config.json has no object 'text_config', which the model needs")
        tied = {name: config[name] for name in ("tie_word_embeddings",) if name in config}
        text = config["text_config"] | tied  # as transformers: the whole model says whether its head is the embedding
        family = text.get("model_type", WRAPPERS[family])
        config = {**text, "model_type": family}
    if isinstance(family, str) and family in MODEL_TYPES:
        name = MODEL_TYPES[family].partition(":")[2]
        raise UnsupportedModel(f"this is a {name} (model type {family!r}); open it with {name}.load")
    if not isinstance(family, str) or family not in FAMILIES:
        near = difflib.get_close_matches(str(family), FAMILIES, 3, 0.0)
        raise UnsupportedModel(
            f"model_type {family!r} is not supported; the nearest that are: {', '.join(near)}; all: "
            f"{', '.join(sorted(FAMILIES))}"
        )
    with contradictions("config.json"):
        base = bounded(FAMILIES[family].read(config))
        base = base.with_kv_sources(config["kv_sources"]) if shared else base
        return _with_recurrence(base, config["recurrent"]) if recurrent else base


def to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The `config.json` that describes this decoder to Hugging Face's transformers.

    For KV-sharing layers or Pippin's own recurrent ones, which transformers does not have, the model type is
    `KV_SHARED` or `RECURRENT`.

    Raises:
        UnsupportedModel: feed-forward layers or rotary frequencies that no family of transformers has.
    """
    fields = _fields(config)
    if from_hf(fields) != config:
        raise UnsupportedModel(
            f"this decoder differs from {config.family} models in ways that have no Hugging Face configuration"
        )
    return fields


def _fields(config: DecoderConfig) -> dict[str, Any]:
    """The fields of a configuration, not yet compared with what they are read as."""
    if any(isinstance(layer.recurrent, RecurrentSpec) for layer in config.layers):
        specs = [
            asdict(layer.recurrent) if isinstance(layer.recurrent, RecurrentSpec) else None for layer in config.layers
        ]
        base = _fields(replace(config, layers=tuple(_attending(layer) for layer in config.layers)))
        own: dict[str, Any] = {"model_type": RECURRENT, "architectures": [], "base_model_type": config.family}
        return base | own | {"recurrent": specs}
    sources = [layer.attention.kv_source for layer in config.layers]
    if any(source is not None for source in sources) and not FAMILIES[config.family].shares_kv:
        base = _fields(config.with_kv_sources([None] * len(sources)))
        own = {"model_type": KV_SHARED, "architectures": [], "base_model_type": config.family, "kv_sources": sources}
        return base | own
    family = FAMILIES[config.family]
    common = common_fields(family, config)
    return {name: value for name, value in common.items() if name not in family.omitted} | family.write(config)


def _attending(layer: LayerSpec) -> LayerSpec:
    """The layer with attention in place of a recurrence of Pippin's own."""
    return replace(layer, recurrent=None, attends=True) if isinstance(layer.recurrent, RecurrentSpec) else layer


def _with_recurrence(config: DecoderConfig, specs: Sequence[Mapping[str, Any] | None]) -> DecoderConfig:
    """The config with recurrent layers: for each layer the recurrence that replaces attention (None: attention)."""
    layers = tuple(
        layer if spec is None else LayerSpec.recurring(RecurrentSpec(**spec), layer.feedforward)
        for layer, spec in zip(config.layers, specs, strict=True)
    )
    return replace(config, layers=layers)
