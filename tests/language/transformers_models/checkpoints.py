"""Tiny random checkpoints of families that Pippin has no decoder for, as transformers saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny_model import CHATML
from transformers import AutoConfig, AutoModelForCausalLM

_SIZES = {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_OLD_SIZES = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256, "vocab_size": 259, "eos_token_id": 2}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 40,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": 24,
}
_GLOBAL_LOCAL = {
    "attention_types": [[["global", "local"], 2]],
    "window_size": 6,
    "num_layers": 4,
    "num_heads": 4,
}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_INDEXER = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 64, "n_routed_experts": 4, "num_experts_per_tok": 2}
CHECKPOINTS: dict[str, dict[str, Any]] = {
    # rotated in part, parallel layers, biases everywhere
    "phi": {**_SIZES, "partial_rotary_factor": 0.5},
    "gptj": {**_OLD_SIZES, "rotary_dim": 8},
    # learned positions, counted from the mask
    "opt": {**_SIZES, "ffn_dim": 96, "word_embed_proj_dim": 64},
    # slopes instead of positions
    "bloom": {"vocab_size": 259, "hidden_size": 64, "n_layer": 3, "n_head": 4},
    "mpt": {"vocab_size": 259, "d_model": 64, "n_layers": 3, "n_heads": 4, "max_seq_len": 256},
    # windows, by the model's own code and by the masks of transformers
    "gpt_neo": {**_SIZES, **_GLOBAL_LOCAL},
    "vaultgemma": {**_SIZES, "head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 20},
    # attention in chunks, experts
    "llama4_text": {**_SIZES, **_EXPERTS, "head_dim": 16, "attention_chunk_size": 8, "intermediate_size_mlp": 96},
    # latent attention; and with an indexer, whose keys are cached too
    "minicpm3": {**_SIZES, **_LATENT},
    "glm_moe_dsa": {**_SIZES, **_LATENT, **_INDEXER},
    # states: with attention in other layers, and alone; these take one token after others, but not several
    "jamba": {**_SIZES, **_EXPERTS, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8},
    "mamba": {"vocab_size": 259, "hidden_size": 64, "num_hidden_layers": 3, "state_size": 8},
    # a convolution that takes several
    "lfm3": _SIZES,
    # without a cache that fits: every pass begins at the first token
    "rwkv": {"vocab_size": 259, "hidden_size": 64, "num_hidden_layers": 3, "context_length": 256},
    "openai-gpt": _OLD_SIZES,
    # positions that count padding: never batched
    "roberta": {**_SIZES, "is_decoder": True, "type_vocab_size": 1},
}
"""Of each kind of cache, positions and masks."""
UNCACHED = ("rwkv", "openai-gpt")
RECURRENT = ("jamba", "mamba", "lfm3", *UNCACHED)
ALONE = ("roberta", *UNCACHED)


def save_random(model_type: str, folder: Path, tokenizer: Any, **changes: Any) -> Any:
    """Save a random checkpoint; return the model of transformers."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **CHECKPOINTS[model_type], **changes)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # sharper than the initial weights, with biases and norms of their own
            noise = torch.randn_like(parameter)
            parameter.copy_(0.08 * noise) if parameter.ndim > 1 else parameter.add_(0.05 * noise)
    model.save_pretrained(folder)
    tokenizer.save(folder)
    (folder / "chat_template.jinja").write_text(CHATML)
    return model
