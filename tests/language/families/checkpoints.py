"""Tiny random checkpoints of every family, as transformers saves them, and their decoders as Pippin reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from pippin.language import Decoder, families

SMALL = {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_HALF = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}}
_LOCAL = {"sliding_window": 6}
_BESIDE = {**_EXPERTS, "shared_expert_intermediate_size": 64}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 3,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 24, "mamba_n_groups": 2, "mamba_chunk_size": 16}
_HEADS = {"head_dim": 16}
_YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 16}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 40,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
_SHARED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 2}
# what makes each family itself: windows shorter than the text, norms, bounds, biases, multipliers
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": _LOCAL,
    "ministral": {**_HEADS, **_LOCAL, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "smollm3": {},
    "qwen2": {},
    "qwen3": {**_HEADS, "attention_bias": True},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 48},
    "qwen3_moe": {**_HEADS, **_EXPERTS},
    "gemma": _HEADS,
    "gemma2": {
        **_HEADS,
        **_LOCAL,
        "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": {**_HEADS, **_LOCAL, "query_pre_attn_scalar": 20},
    "apertus": _HEADS,
    "gemma3n_text": {
        **_HEADS,
        **_LOCAL,
        "num_hidden_layers": 6,
        "intermediate_size": [96, 96, 96, 128, 128, 128],
        "num_kv_shared_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "hidden_size_per_layer_input": 12,
        "vocab_size_per_layer_input": 250,
        "activation_sparsity_pattern": [0.8, 0.8, 0.0, 0.5, 0.0, 0.0],
        "altup_num_inputs": 3,
        "laurel_rank": 8,
        "final_logit_softcapping": 3.0,
    },
    "gemma4_text": {
        **_HEADS,
        **_LOCAL,
        "num_hidden_layers": 6,
        "global_head_dim": 32,
        "num_kv_shared_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "hidden_size_per_layer_input": 12,
        "vocab_size_per_layer_input": 259,
        "use_double_wide_mlp": True,
        "final_logit_softcapping": 3.0,
    },
    "arcee": {"mlp_bias": True},
    "cohere": {"logit_scale": 0.3},
    "cohere2": {**_LOCAL, "logit_scale": 0.3},
    "deepseek_v2": {
        **_LATENT,
        **_SHARED,
        "q_lora_rank": None,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 1.5,
        "rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
        "first_k_dense_replace": 1,
    },
    "deepseek_v3": {
        **_LATENT,
        **_SHARED,
        "n_group": 4,
        "topk_group": 2,
        "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
        "first_k_dense_replace": 1,
        "attention_bias": True,
    },
    "dots1": {
        **_HEADS,
        **_SHARED,
        **_LOCAL,
        "first_k_dense_replace": 1,
        "max_window_layers": 2,
        "attention_bias": True,
    },
    "glm4_moe_lite": {**_LATENT, **_SHARED, "routed_scaling_factor": 1.8},
    "ernie4_5_moe": {
        **_HEADS,
        "moe_num_experts": 6,
        "moe_k": 2,
        "moe_num_shared_experts": 2,
        "moe_intermediate_size": 32,
    },
    "ernie4_5": {**_HEADS, "use_bias": True},
    "exaone4": _LOCAL,
    "falcon_h1": {
        **_MAMBA,
        "mamba_d_ssm": 128,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        "attention_bias": True,
        "mlp_bias": True,
        "mamba_proj_bias": True,
        "projectors_bias": True,
        "lm_head_multiplier": 0.7,
        "embedding_multiplier": 2.0,
        "mlp_multipliers": [0.6, 0.8],
        "key_multiplier": 0.5,
        "attention_in_multiplier": 1.3,
        "attention_out_multiplier": 0.9,
        "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
        "ssm_in_multiplier": 1.25,
        "ssm_out_multiplier": 0.75,
    },
    "glm": _HEADS,
    "glm4": _HEADS,
    "glm4_moe": {**_HEADS, **_SHARED, **_HALF, "use_qk_norm": True, "attention_bias": True, "n_group": 2},
    "gpt2": {},
    "gpt_neox": _HALF,
    "gpt_oss": {
        **_HEADS,
        **_LOCAL,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "swiglu_limit": 0.7,
        "rope_parameters": {**_YARN, "truncate": False},
    },
    "granitemoe": {"num_local_experts": 6, "residual_multiplier": 0.5, "attention_multiplier": 0.2},
    "granitemoeshared": {"num_local_experts": 6, "shared_intermediate_size": 48, "attention_multiplier": 0.2},
    "granite": {
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
    },
    "granitemoehybrid": {
        **_MAMBA,
        "shared_intermediate_size": 96,
        "num_local_experts": 0,
        "layer_types": ["mamba", "attention", "mamba", "mamba"],
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
    },
    "helium": _HEADS,
    "hunyuan_v1_dense": {
        **_HEADS,
        "rope_parameters": {"rope_type": "dynamic", "alpha": 100.0, "factor": 1.0, "rope_theta": 10_000.0},
    },
    "kimi_linear": {
        "num_key_value_heads": 4,
        "num_experts": 6,
        "num_experts_per_token": 2,
        "num_expert_group": 3,
        "topk_group": 2,
        "moe_intermediate_size": 32,
        "kv_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 12,
        "v_head_dim": 16,
        "linear_num_heads": 4,
        "linear_head_dim": 32,
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        "model_max_length": 512,
    },
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention", "conv", "conv"],
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "num_dense_layers": 1,
    },
    "lfm2": {"conv_bias": True, "layer_types": ["conv", "full_attention", "conv", "conv"], "block_multiple_of": 16},
    "mamba2": {
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 24,
        "n_groups": 2,
        "chunk_size": 16,
        "use_bias": True,
        "time_step_limit": (0.1, 2.0),
    },
    "hunyuan_v1_moe": {**_HEADS, "num_experts": 6, "moe_topk": 2},
    "minimax_m2": {**_HEADS, **_HALF, "num_local_experts": 6, "num_experts_per_tok": 2},
    "ministral3": {
        **_HEADS,
        "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3},
    },
    "nanochat": {"final_logit_softcapping": 3.0},
    "mixtral": {**_LOCAL, "num_local_experts": 6},
    "nemotron": {},
    "nemotron_h": {
        "layers_block_type": ["mlp", "linear_attention", "linear_attention", "full_attention", "mlp", "full_attention"],
        "head_dim": 16,
        "mlp_bias": True,
        "use_bias": True,
        "ssm_state_size": 24,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "chunk_size": 16,
        "time_step_min": 1e-9,
    },
    "olmo": {},
    "olmo2": {},
    "olmo3": _LOCAL,
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True},
    "olmo_hybrid": {**_DELTA, "linear_num_key_heads": 4, "linear_value_head_dim": 16},
    "phi3": {**_HALF, **_LOCAL},
    "phimoe": {"num_local_experts": 6, "attention_bias": True, "lm_head_bias": True, "router_jitter_noise": 0.2},
    "qwen3_5_moe_text": {**_HEADS, **_BESIDE, **_DELTA},
    "qwen3_5_text": {**_HEADS, **_DELTA, "attention_bias": True},
    "qwen3_next": {**_HEADS, **_BESIDE, **_DELTA, "mlp_only_layers": [1]},
    "recurrent_gemma": {
        "intermediate_size": 128,
        "attention_window_size": 6,
        "lru_width": 64,
        "num_key_value_heads": 1,
        "logits_soft_cap": 3.0,
    },
    "seed_oss": {**_HEADS, "attention_out_bias": True, "mlp_bias": True},
    "stablelm": {"use_qkv_bias": True},
    "starcoder2": _LOCAL,
}


# a second kind of a family, under its name and what is special
MORE = {
    "gemma4_text with experts and keys as values": {
        **CHECKPOINTS["gemma4_text"],
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
        "rms_norm_eps": 1e-2,
    },
    "deepseek_v2 without groups": {**CHECKPOINTS["deepseek_v2"], "topk_method": "greedy", "q_lora_rank": 32},
    "gpt_neox in sequence": {**CHECKPOINTS["gpt_neox"], "use_parallel_residual": False},
}
CHECKPOINTS |= MORE

NEMOTRON_EXPERTS: dict[str, Any] = {
    "layers_block_type": ["moe", "linear_attention", "full_attention", "moe", "mlp"],
    "mlp_bias": False,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
    "n_group": 3,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
}
GRANITE_EXPERTS: dict[str, Any] = {"num_local_experts": 6, "num_experts_per_tok": 2, "shared_intermediate_size": 48}


def save_random(model_type: str, folder: Path, **changes: Any) -> Any:
    """Save a random model of a family; every norm and bias is far from its trivial value."""
    torch.manual_seed(0)
    known = SMALL | CHECKPOINTS.get(model_type, {}) | changes
    config = AutoConfig.for_model(model_type.partition(" ")[0], **known)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.copy_(0.5 * torch.randn_like(parameter) - 1)  # states that remember more than a few tokens
            elif parameter.ndim == 1:
                parameter += 0.3 * torch.randn_like(parameter)
            else:
                parameter.copy_(0.15 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "layer_scalar")):
                buffer += 0.3 * torch.randn_like(buffer)
    model.save_pretrained(folder)
    return model


def read(folder: Path) -> Decoder:
    """The decoder of a folder, in float32, read by the rules of its family."""
    config = families.from_hf(json.loads((folder / "config.json").read_text()))
    family = families.FAMILIES[config.family]
    stored = {
        families.without_prefix(name, family): value for name, value in load_file(folder / "model.safetensors").items()
    }
    decoder = Decoder(config)
    sources, _ = families.locate(family, config, decoder.state_dict(), stored)
    state = {name: source.take(stored[source.stored], config) for name, source in sources.items()}
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["embed_tokens.weight"]
    decoder.load_state_dict(state)
    return decoder.eval()
