"""The page about model families, from what tests have shown of each (`docs/models.json`).

`pytest tests/language/families tests/shape/export --write-support` writes that file; without the option the same tests
compare what they show with it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pippin.language import families

ROOT = Path(__file__).resolve().parents[1]
SUPPORT = ROOT / "docs" / "models.json"

# Models that people search for, of each family.
NAMES = {
    "apertus": "Apertus",
    "arcee": "AFM 4.5B (Arcee)",
    "cohere": "Command R, Aya 23, Aya Expanse",
    "cohere2": "Command R7B, Command A",
    "deepseek_v2": "DeepSeek V2, V2 Lite, Coder V2",
    "deepseek_v3": "DeepSeek V3, V3.1, R1, Kimi K2, Moonlight",
    "dots1": "dots.llm1",
    "ernie4_5": "ERNIE 4.5 0.3B",
    "ernie4_5_moe": "ERNIE 4.5 21B-A3B, 300B-A47B",
    "exaone4": "EXAONE 4",
    "falcon_h1": "Falcon-H1",
    "gemma": "Gemma, CodeGemma",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3",
    "gemma3n_text": "Gemma 3n",
    "gemma4_text": "Gemma 4",
    "glm": "GLM-4 9B (2024), GLM-Edge",
    "glm4": "GLM-4 and GLM-Z1 (0414)",
    "glm4_moe": "GLM-4.5, GLM-4.6, GLM-4.7",
    "glm4_moe_lite": "GLM-4.7-Flash",
    "gpt2": "GPT-2, DistilGPT-2",
    "gpt_neox": "Pythia, GPT-NeoX 20B, StableLM Alpha, Dolly 2",
    "gpt_oss": "gpt-oss 20B and 120B",
    "granite": "Granite 3",
    "granitemoe": "Granite 3 1B-A400M, 3B-A800M",
    "granitemoehybrid": "Granite 4",
    "granitemoeshared": "Granite with shared experts",
    "helium": "Helium 1",
    "hunyuan_v1_dense": "Hunyuan 0.5B to 7B",
    "hunyuan_v1_moe": "Hunyuan A13B",
    "kimi_linear": "Kimi Linear",
    "lfm2": "LFM2",
    "lfm2_moe": "LFM2 8B-A1B",
    "llama": "Llama 1 to 3.3, SmolLM, SmolLM2, TinyLlama, Yi, Vicuna, DeepSeek Coder and R1 distills",
    "mamba2": "Mamba 2, Codestral Mamba",
    "minimax_m2": "MiniMax M2",
    "ministral": "Ministral 8B",
    "ministral3": "Ministral 3",
    "mistral": "Mistral 7B, Nemo, Small, Devstral, Codestral",
    "mixtral": "Mixtral 8x7B, 8x22B",
    "nanochat": "nanochat",
    "nemotron": "Nemotron 4, Minitron",
    "nemotron_h": "Nemotron-H, Nemotron Nano 2, Nemotron 3",
    "olmo": "OLMo",
    "olmo2": "OLMo 2",
    "olmo3": "OLMo 3",
    "olmo_hybrid": "OLMo Hybrid",
    "olmoe": "OLMoE",
    "phi3": "Phi-3, Phi-3.5, Phi-4, Phi-4-mini",
    "phimoe": "Phi-3.5-MoE",
    "qwen2": "Qwen 1.5, 2, 2.5, QwQ, R1 distills",
    "qwen2_moe": "Qwen1.5-MoE, Qwen2 57B-A14B",
    "qwen3": "Qwen3",
    "qwen3_5_moe_text": "Qwen 3.5 with experts",
    "qwen3_5_text": "Qwen 3.5",
    "qwen3_moe": "Qwen3 30B-A3B, 235B-A22B, Qwen3-Coder",
    "qwen3_next": "Qwen3-Next, Qwen3-Coder-Next",
    "recurrent_gemma": "RecurrentGemma",
    "seed_oss": "Seed-OSS",
    "smollm3": "SmolLM3",
    "stablelm": "StableLM 2, StableLM Zephyr",
    "starcoder2": "StarCoder 2",
}

# Columns: what the tests call them, the heading, what a yes means.
COLUMNS = {
    "opens": ("opens", "logits equal those of transformers on a random checkpoint, to 1e-5"),
    "kernels": ("CPU kernels", "the native kernels give these logits too, in chunks, in batches and token by token"),
    "batches": ("batches", "sequences of different lengths are computed in one pass, with the same logits"),
    "prefixes": ("prefixes", "a second request reuses the tokens that it shares with the first, with the same answer"),
    "LoRA": ("LoRA", "adapters of every matrix, for some requests of a batch only, in torch and in the kernels"),
    "2 to 8 bits": ("2 to 8 bits", "`bits` packs the matrices, and the kernels compute what the packed weights say"),
    "reads GGUF": ("reads GGUF", "a GGUF file has the logits of the checkpoint that it was written from"),
    "writes GGUF": ("writes GGUF", "the file has the tensors and metadata of llama.cpp's own converter"),
}


def is_there(nodeid: str) -> bool:
    """Whether there is a test function of this name."""
    path, _, name = nodeid.partition("::")
    return (ROOT / path).is_file() and f"def {name}(" in (ROOT / path).read_text(encoding="utf-8")


def page() -> str:
    """`docs/models.md`.

    Raises:
        SystemExit: `NAMES` does not have the families of Pippin.
    """
    if wrong := NAMES.keys() ^ families.SHARED_FAMILIES.keys():
        raise SystemExit(f"NAMES in tools/model_table.py and the families differ: {', '.join(sorted(wrong))}")
    kept = json.loads(SUPPORT.read_text(encoding="utf-8"))
    head = " | ".join(heading for heading, _ in COLUMNS.values())
    rows = [
        f"| {NAMES[family]} | `{family}` | {' | '.join(_cell(kept[family], column) for column in COLUMNS)} |"
        for family in sorted(kept, key=lambda family: NAMES[family].lower())
    ]
    wrappers = sorted(families.WRAPPERS)
    return "\n".join([
        "# Models",
        "",
        f"{len(kept)} families of language models open in Pippin itself. Every cell comes from a test that ran, on",
        "tiny random checkpoints with norms, biases and sinks that are not trivial. `model_type` is what the",
        "`config.json` of a model says.",
        "",
        f"| models | `model_type` | {head} |",
        f"|---|---|{'|'.join(':-:' for _ in COLUMNS)}|",
        *rows,
        "",
        *(f"- **{heading}**: {meaning}." for heading, meaning in COLUMNS.values()),
        "",
        "A dash means that it is refused, by an error that says so; without kernels torch computes it. Folders that",
        "other libraries quantized (AWQ, GPTQ, compressed-tensors, FP8, MXFP4, NVFP4, bitsandbytes, MLX) open too:",
        "[formats](tutorials/models.md#quantized-folders).",
        "",
        "## Models for images and sound",
        "",
        f"Of {len(wrappers)} kinds of multimodal models the decoder opens, and answers text; its row above says what",
        "it can:",
        "",
        ", ".join(f"`{name}`" for name in wrappers) + ".",
        "",
        "## Other models",
        "",
        "Every other causal language model that transformers has opens through the extra `transformers`, more slowly,",
        "to be run and not to be changed: [other families](tutorials/models.md#other-families-through-transformers).",
        "",
    ])  # fmt: skip


def _cell(cells: dict[str, Any], column: str) -> str:
    value: str = cells[column]["value"]
    return {"yes": "yes", "no": "–"}.get(value, value)
