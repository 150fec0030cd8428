"""Checkpoints whose GGUF files are compared with those of llama.cpp's converter; run as a program, it records them.

    python tests/shape/export/gguf_checkpoints.py LLAMA_CPP [CASE...]    # LLAMA_CPP: a copy of ggml-org/llama.cpp

Weights depend on names alone, so the record outlives versions of torch and transformers. The record has no weights: it
holds the metadata, the shapes, and a digest of all names and bytes in float32.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

RECORD = Path(__file__).with_name("llama_cpp_converter.json")
SIZES = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEADS, _LOCAL = {"head_dim": 8}, {"sliding_window": 6}
_HALF = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}}
_EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_FIRST_DENSE = {
    **{"n_routed_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1},
    **{"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5},
}
_STRETCHED = {
    **{"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 32,
}
_LONG = {
    **{"rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 64},
    **{"short_factor": [1.5, 1.25, 2.0, 3.0], "long_factor": [1.5, 1.25, 2.0, 3.0]},
}
_YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
_DELTA = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": 16}
_NEMOTRON = {
    **{"head_dim": 8, "ssm_state_size": 16, "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2},
    "chunk_size": 16,
}
_PLAIN = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
_LATENT = {
    **{"num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 20, "qk_rope_head_dim": 8},
    **{"qk_nope_head_dim": 32, "v_head_dim": 12},
}
_LATENT_YARN = {**_YARN, "beta_fast": 16.0, "beta_slow": 2.0}
CASES: dict[str, dict[str, Any]] = {
    "apertus": {"head_dim": 16, "rope_parameters": _STRETCHED},
    "arcee": {},
    "cohere": {"logit_scale": 0.3},
    "cohere2": {**_LOCAL, "logit_scale": 0.3},
    "ernie4_5": {"head_dim": 16},
    # llama.cpp knows the models without latent vectors of queries by their number of layers
    "deepseek_v2": {**_FIRST_DENSE, **_LATENT, "q_lora_rank": None, "num_hidden_layers": 26, "topk_method": "greedy"}
    | {"rope_parameters": {**_LATENT_YARN, "mscale": 0.707, "mscale_all_dim": 0.707}, "norm_topk_prob": False},
    "deepseek_v2, latent queries": {**_FIRST_DENSE, **_LATENT, "topk_method": "greedy", "norm_topk_prob": False}
    | _PLAIN,
    "deepseek_v3": {**_FIRST_DENSE, **_LATENT, "n_routed_experts": 6, "n_group": 3, "topk_group": 2}
    | {"rope_parameters": {**_LATENT_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, "norm_topk_prob": True},
    "glm4_moe_lite": {**_FIRST_DENSE, **_LATENT, "n_shared_experts": 2, "num_nextn_predict_layers": 0},
    "dots1": {**_FIRST_DENSE, **_HEADS, "num_key_value_heads": 4, "norm_topk_prob": True},
    "ernie4_5_moe": {
        **{"head_dim": 16, "moe_num_experts": 3, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 1},
        "moe_layer_start_index": 1,
    },
    "exaone4": {"sliding_window": None, "layer_types": ["full_attention"] * 4},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64, "mamba_rms_norm": True, "mamba_norm_before_gate": False, **_HEADS},
    "gemma": {"head_dim": 16},
    "gemma2": {**_LOCAL, **_HEADS, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0},
    "gemma3_text": {**_LOCAL, "head_dim": 16, "num_hidden_layers": 6, "query_pre_attn_scalar": 16},
    "gemma3n_text": {
        **{**_HEADS, **_LOCAL, "num_hidden_layers": 25, "intermediate_size": [1024] * 25, "num_kv_shared_layers": 5},
        **{"vocab_size_per_layer_input": 260, "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 5},
        "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 15,
    },
    "gemma4_text": {
        **{**_HEADS, **_LOCAL, "num_hidden_layers": 6, "global_head_dim": 16, "num_kv_shared_layers": 3},
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        **{"hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 260, "use_double_wide_mlp": True},
        "final_logit_softcapping": 3.0,
    },
    "gemma4_text, experts": {
        **{**_HEADS, **_LOCAL, "global_head_dim": 16, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0},
        **{"layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]},
        **{"attention_k_eq_v": True, "num_global_key_value_heads": 1, "enable_moe_block": True},
        **{"num_experts": 3, "top_k_experts": 2, "moe_intermediate_size": 16},
    },
    "glm": {**_HEADS, "attention_bias": True},
    "glm4": {"head_dim": 16, "attention_bias": True},
    "glm4_moe": {**_FIRST_DENSE, "head_dim": 16, "attention_bias": True, "use_qk_norm": True}
    | {"num_nextn_predict_layers": 0},
    "gpt2": {},
    "gpt_neox": {**_HALF, "num_key_value_heads": 4},
    "gpt_oss": {**_LOCAL, **_PLAIN, "head_dim": 16, "num_local_experts": 3, "num_experts_per_tok": 2},
    "granite": {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "attention_multiplier": 0.2},
    "granitemoe": {"num_local_experts": 3, "num_experts_per_tok": 2, "logits_scaling": 2.0},
    "granitemoeshared": {"num_local_experts": 3, "num_experts_per_tok": 2, "shared_intermediate_size": 24},
    "granitemoehybrid": {**_MAMBA, "num_local_experts": 0, "shared_intermediate_size": 48, "logits_scaling": 2.0}
    | {"layer_types": ["mamba", "attention", "mamba", "mamba"], "attention_multiplier": 0.2},
    "granitemoehybrid, experts": {**_MAMBA, "num_local_experts": 3, "num_experts_per_tok": 2, "intermediate_size": 16}
    | {"shared_intermediate_size": 48, "layer_types": ["mamba", "attention", "mamba", "mamba"], "logits_scaling": 2.0},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {**_PLAIN, "head_dim": 16, "num_experts": 3, "moe_topk": [2] * 4},
    "kimi_linear": {
        **{**_LATENT, "q_lora_rank": None, "linear_num_heads": 4, "linear_head_dim": 16, "model_max_length": 128},
        **{"num_experts": 6, "num_experts_per_token": 2, "num_expert_group": 3, "topk_group": 2},
        **{"moe_intermediate_size": 16, "num_shared_experts": 2, "routed_scaling_factor": 1.5},
        "rms_norm_eps": 1e-6,  # llama.cpp has it for the length of keys, too, where the model always has 1e-6
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "conv"], "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {**_EXPERTS, "num_dense_layers": 1, "layer_types": ["conv", "full_attention", "conv", "conv"]},
    "llama": {"attention_bias": True, "mlp_bias": True},
    "llama, stretched": {"rope_parameters": _STRETCHED},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 2, "chunk_size": 16},
    "minimax_m2": {**_HALF, **_HEADS, "num_local_experts": 3, "num_experts_per_tok": 2},
    "mistral": {"sliding_window": None, "head_dim": 16},
    "ministral3": {
        "rope_parameters": {**_LATENT_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3},
        **{"sliding_window": None, "head_dim": 16},
    },
    "mixtral": {"sliding_window": None, "num_local_experts": 3},
    "nemotron": _HALF,
    "nemotron_h": {**_NEMOTRON, "layers_block_type": ["mlp", "linear_attention", "full_attention", "mlp"]},
    "nemotron_h, experts": {
        **{**_NEMOTRON, "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]},
        **{"n_routed_experts": 6, "moe_intermediate_size": 20, "moe_shared_expert_intermediate_size": 24},
        **{"n_group": 3, "topk_group": 2, "routed_scaling_factor": 2.5},
    },
    "olmo": {},
    "olmo2": {},
    "olmo3": _LOCAL,
    "olmoe": {"num_experts": 3, "num_experts_per_tok": 2, "num_key_value_heads": 4},
    "phi3": {**_HALF, "sliding_window": None, "original_max_position_embeddings": 128},
    "phi3, long": {"rope_parameters": _LONG, "max_position_embeddings": 64, "sliding_window": None}
    | {"original_max_position_embeddings": 64},
    "qwen2": {},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 24},
    "qwen3": {"head_dim": 16},
    "qwen3, yarn": {"head_dim": 16, "rope_parameters": _YARN},
    "qwen3_moe": {**_HEADS, **_EXPERTS, "norm_topk_prob": True},
    "qwen3_5_moe_text": {**_HEADS, **_EXPERTS, **_DELTA, "shared_expert_intermediate_size": 24},
    "qwen3_5_text": {**_HEADS, **_DELTA},
    "qwen3_next": {**_HEADS, **_EXPERTS, **_DELTA, "shared_expert_intermediate_size": 24, "norm_topk_prob": True},
    "seed_oss": _HEADS,
    "smollm3": {},
    "stablelm": {**_HALF, "use_qkv_bias": True},
    "stablelm, parallel": {**_HALF, "use_parallel_residual": True},
    "starcoder2": {"sliding_window": None},
}
"""By family, and what is special about it: what differs from `SIZES` and the family's own values."""


_AROUND_ONE = ("norm.weight", "layer_scalar")


def save(case: str, folder: Path) -> None:
    """Write the checkpoint of a case as transformers does, with weights that depend on their names alone."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(case.partition(",")[0], **(SIZES | CASES[case]))
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name, values in tensors.items():
        if name.endswith("act_fn.eps"):  # no weight: where a function is taken as straight
            continue
        noise = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(values.shape, dtype=np.float32)
        around = np.float32(1.0 if name.endswith(_AROUND_ONE) else 0.0)
        tensors[name] = np.asarray(noise * np.float32(0.2) + around, np.float32)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def rewritten(path: Path, target: Path, *, metadata: Any = None, tensors: Any = None, parts: int = 0) -> Path:
    """A file with some metadata (None removes a key) and tensors changed, written by the format's own library."""
    import gguf

    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(
        target, (metadata or {}).get("general.architecture", _architecture(reader)), split_max_tensors=parts
    )
    kept = {key: field for key, field in reader.fields.items() if not key.startswith(("GGUF.", "general.arch"))}
    for key, field in kept.items():
        if key not in (metadata or {}):
            writer.add_key_value(
                key, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None
            )
    for key, value in (metadata or {}).items():
        if value is not None and key != "general.architecture":
            {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}[
                type(value)
            ](key, value)
    stored = {tensor.name: tensor.data for tensor in reader.tensors}
    for name, values in (stored if tensors is None else tensors(stored)).items():
        values, kind = values if isinstance(values, tuple) else (values, None)
        writer.add_tensor(name, np.ascontiguousarray(values), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _architecture(reader: Any) -> Any:
    return reader.get_field("general.architecture").contents()


def describe(path: Path) -> dict[str, Any]:
    """What is recorded of a GGUF file."""
    import gguf

    reader = gguf.GGUFReader(path)
    architecture = _architecture(reader)
    digest = hashlib.sha256()
    tensors = sorted(reader.tensors, key=lambda tensor: tensor.name)
    for tensor in tensors:
        if not _is_computed(tensor.name):
            digest.update(f"{tensor.name} {tensor.data.shape}".encode() + np.ascontiguousarray(tensor.data).tobytes())
    keys = {key.removeprefix(f"{architecture}."): field for key, field in reader.fields.items()}
    return {
        "architecture": architecture,
        "metadata": {key: field.contents() for key, field in keys.items() if "." not in key or key[:5] in _OWN},
        "shapes": {tensor.name: list(tensor.data.shape) for tensor in tensors if _is_first(tensor.name)},
        "tables": {tensor.name: tensor.data.tolist() for tensor in tensors if _is_computed(tensor.name)},
        "digest": digest.hexdigest(),
    }


def _is_computed(name: str) -> bool:
    """Whether a tensor is not that of the checkpoint, and so bit-identical on the same processor only."""
    return name.startswith("rope_") or name.endswith(".ssm_a")


def _is_first(name: str) -> bool:
    """Whether a tensor is of the first layer, or of none."""
    return name.startswith("blk.0.") or not name.startswith("blk.")


_OWN = ("atten", "rope.", "xielu")  # what keys of an architecture's own begin with, apart from those without a dot


def _convert(folder: Path, target: Path) -> None:
    """Write a checkpoint as llama.cpp's converter does, without a tokenizer."""
    from conversion import ModelBase, ModelType, get_model_class
    from conversion.base import get_model_architecture
    from gguf import LlamaFileType

    (folder / "tokenizer.json").write_text(
        json.dumps({"model": {"vocab": dict.fromkeys(range(260))}, "added_tokens": []})
    )
    fields = ModelBase.load_hparams(folder, False)
    # fields of the models on the hub that transformers no longer writes
    rope = fields.get("rope_parameters") or {}
    fields.setdefault("rotary_pct", rope.get("partial_rotary_factor", 1.0))
    fields.setdefault("rotary_dim", int(rope.get("partial_rotary_factor", 1.0) * fields.get("head_dim", 0)))
    if "n_positions" in fields:
        fields.setdefault("n_ctx", fields["n_positions"])
    fields.setdefault("num_shared_expert", [1] * 4)
    if fields["model_type"] == "deepseek_v3":
        fields["scoring_func"] = "sigmoid"
    if fields["model_type"] == "hunyuan_v1_moe":
        fields |= {"moe_intermediate_size": [fields["intermediate_size"]] * 4}
    if fields["model_type"] == "granitemoehybrid":  # the names of older files
        names = {"linear_attention": "mamba", "full_attention": "attention"}
        fields["layer_types"] = [names.get(kind, kind) for kind in fields["layer_types"]]
    if fields["model_type"] == "mamba2":
        del fields["intermediate_size"]  # which it does not have, and the converter would believe
    if fields["model_type"] == "nemotron_h" and "moe" not in fields["layers_block_type"]:
        del fields["num_experts_per_tok"]  # a default of models with experts, by which the converter knows them
    if fields["model_type"] == "kimi_linear":
        fields |= {"n_group": fields["num_expert_group"], "moe_router_activation_func": "sigmoid"}
        fields |= {"first_k_dense_replace": 1, "linear_attn_config": _old_recurrence(fields)}
        tensors = load_file(folder / "model.safetensors")  # transformers writes a dense layer under a name of experts
        named = {name.replace("layers.0.block_sparse_moe", "layers.0.mlp"): tensors[name] for name in tensors}
        save_file(named, folder / "model.safetensors", {"format": "pt"})
    if fields["model_type"] == "gemma3n_text":  # matrices of the models on the hub, which nothing reads
        save_file(_with_unread_keys(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    kind = get_model_class(get_model_architecture(fields, ModelType.TEXT))
    kind.no_mtp = True
    converter = kind(folder, LlamaFileType.ALL_F32, target, hparams=fields)
    converter = getattr(converter, "impl", converter)
    converter.set_vocab = lambda: None
    converter.write()


def _with_unread_keys(tensors: dict[str, Any]) -> dict[str, Any]:
    """The tensors with those of a first layer's keys and values in all layers: matrices without, norms of one."""
    first = {
        name: values
        for name, values in tensors.items()
        if "layers.0.self_attn.k_" in name or "0.self_attn.v_proj" in name
    }
    for index in range(25):
        for name, values in first.items():
            empty = np.ones_like(values) if "norm" in name else np.zeros_like(values)
            tensors.setdefault(name.replace("layers.0.", f"layers.{index}."), empty)
    return tensors


def _old_recurrence(fields: dict[str, Any]) -> dict[str, Any]:
    """Kimi's description of recurrent layers, which are counted from 1."""
    attending = [index + 1 for index, kind in enumerate(fields["layer_types"]) if kind == "full_attention"]
    return {
        **{"full_attn_layers": attending, "num_heads": fields["linear_num_heads"]},
        **{"head_dim": fields["linear_head_dim"], "short_conv_kernel_size": fields["linear_conv_kernel_dim"]},
    }


if __name__ == "__main__":
    sys.path[:0] = [sys.argv[1], f"{sys.argv[1]}/gguf-py"]
    import torch

    found = json.loads(RECORD.read_text()) if sys.argv[2:] else {}
    for case in sys.argv[2:] or CASES:
        with tempfile.TemporaryDirectory() as room, torch.inference_mode():
            save(case, Path(room))
            _convert(Path(room), Path(room) / "model.gguf")
            found[case] = describe(Path(room) / "model.gguf")
    RECORD.write_text(
        "{\n" + ",\n".join(f"{json.dumps(case)}: {json.dumps(found[case])}" for case in sorted(found)) + "\n}\n"
    )
