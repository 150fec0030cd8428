"""Folders of mlx-lm with other layouts than those of transformers; the oracles are both, mlx-lm where it is installed.

`pip install mlx mlx-cpu mlx-lm` has it write the folders of the nightly test.
"""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import pippin
from pippin.core.errors import CorruptedFile

from .checkpoints import save_random

IDS = torch.randint(0, 250, (1, 24), generator=torch.Generator().manual_seed(1))
_QWEN = {
    **{"num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"]},
    **{"attention_bias": False, "tie_word_embeddings": False},
}
SIZES = {
    "lfm2": {},
    "lfm2_moe": {},
    "qwen3_next": _QWEN,
    "qwen3_5_text": _QWEN,
    "qwen3_5_moe_text": _QWEN,
    "granitemoehybrid": {},
    "granitemoehybrid, experts": {"num_local_experts": 3, "num_experts_per_tok": 2},
    "mamba2": {},
    "recurrent_gemma": {},
}
SUMS = ("norm.weight", "input_layernorm.weight", "post_attention_layernorm.weight", "q_norm.weight", "k_norm.weight")


def as_mlx_lm(family, tensors):
    """The tensors of a folder of transformers as mlx-lm stores them."""
    found = {}
    for name, tensor in tensors.items():
        if tensor.ndim == 3 and "conv" in name:
            tensor = tensor.mT
        if family.startswith("qwen3") and name.endswith(SUMS) and "linear_attn" not in name:
            tensor = tensor + 1.0
        if family == "lfm2_moe":
            for old, new in (("w1.", "gate_proj."), ("w2.", "down_proj."), ("w3.", "up_proj.")):
                name = name.replace(old, new)
        if name.endswith("shared_mlp.input_linear.weight") and "experts" not in family:
            for own, rows in zip(("gate_proj", "up_proj"), tensor.chunk(2), strict=True):
                found[name.replace("shared_mlp.input_linear", f"mlp.{own}")] = rows
            continue
        if name.endswith("block_sparse_moe.input_linear.weight"):
            for own, rows in zip(("gate_proj", "up_proj"), tensor.chunk(2, 1), strict=True):
                found[name.replace("input_linear", f"switch_mlp.{own}")] = rows
            continue
        if "experts" not in family:
            name = name.replace("shared_mlp.output_linear", "mlp.down_proj")
        found[name.replace("block_sparse_moe.output_linear", "block_sparse_moe.switch_mlp.down_proj")] = tensor
    for name in [name for name in found if ".experts.0." in name]:
        room, own = name.split(".experts.0.")
        names = [each for each in found if each.startswith(f"{room}.experts.") and each.endswith(f".{own}")]
        names.sort(key=lambda each: int(each.removeprefix(f"{room}.experts.").partition(".")[0]))
        found[f"{room}.switch_mlp.{own}"] = torch.stack([found.pop(each) for each in names])
    return {name: tensor.contiguous() for name, tensor in found.items()}


@torch.inference_mode()
@pytest.mark.parametrize("family", SIZES)
def test_what_mlx_lm_writes_gives_the_logits_of_transformers(family, tmp_path, tiny):
    model_type = family.partition(",")[0]
    theirs = save_random(model_type, tmp_path, hidden_size=64, vocab_size=288, **SIZES[family])
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    changed = as_mlx_lm(family, stored)
    assert any(stored[name].shape != changed[name].shape for name in stored.keys() & changed.keys())
    save_file(changed, file, {"format": "mlx"})
    tiny.tokenizer.save(tmp_path)
    ours = pippin.load(tmp_path, device="cpu", dtype="float32", pack=False)
    torch.testing.assert_close(ours.module(IDS), theirs(IDS).logits, rtol=1e-4, atol=1e-4)


def test_multipliers_inside_weights_are_refused_by_name(tmp_path, tiny):
    save_random("falcon_h1", tmp_path, vocab_size=288)
    file = tmp_path / "model.safetensors"
    save_file(as_mlx_lm("falcon_h1", load_file(file)), file, {"format": "mlx"})
    tiny.tokenizer.save(tmp_path)
    with pytest.raises(CorruptedFile, match="falcon_h1 models with their multipliers in the weights"):
        pippin.load(tmp_path, device="cpu")


@torch.inference_mode()
def test_convolutions_of_a_tower_for_sound_say_nothing_about_the_decoder(tmp_path, tiny):
    theirs = save_random("qwen3_5_text", tmp_path, hidden_size=64, vocab_size=288, **_QWEN)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"audio_tower.conv.weight": torch.ones(8, 4, 1)}, file, {"format": "pt"})
    tiny.tokenizer.save(tmp_path)
    ours = pippin.load(tmp_path, device="cpu", dtype="float32", pack=False)
    torch.testing.assert_close(ours.module(IDS), theirs(IDS).logits, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
@pytest.mark.nightly
@pytest.mark.parametrize("family", [family for family in SIZES if family != "qwen3_5_moe_text"])
def test_folders_of_mlx_lm_itself(family, tmp_path, tiny):
    """Mamba 2 is compared with transformers alone: mlx-lm computes something else."""
    pytest.importorskip("mlx_lm")
    import mlx.core as mx
    from mlx_lm.utils import load_model, save_config, save_model

    sizes = SIZES[family] | ({"intermediate_size": 64, "block_auto_adjust_ff_dim": False} if family == "lfm2" else {})
    theirs = save_random(family.partition(",")[0], tmp_path / "theirs", hidden_size=64, vocab_size=288, **sizes)
    path = tmp_path / "theirs" / "config.json"
    path.write_text(json.dumps(_older(family, json.loads(path.read_text()))))
    model, config = load_model(tmp_path / "theirs", lazy=False)
    (tmp_path / "mlx").mkdir()
    save_model(tmp_path / "mlx", model)
    save_config(config, tmp_path / "mlx" / "config.json")
    tiny.tokenizer.save(tmp_path / "mlx")
    ours = pippin.load(tmp_path / "mlx", device="cpu", dtype="float32", pack=False)
    expected = theirs(IDS).logits
    torch.testing.assert_close(ours.module(IDS), expected, rtol=1e-4, atol=1e-4)
    if not family.startswith(("mamba2", "granitemoehybrid")):
        computed = np.array(model(mx.array(IDS.numpy())).astype(mx.float32))
        torch.testing.assert_close(torch.from_numpy(computed), expected, rtol=1e-3, atol=1e-3)


def _older(family, fields):
    """A configuration with the fields of models on the hub, which mlx-lm reads."""
    rope = fields.get("rope_parameters") or {}
    fields.setdefault("rope_theta", rope.get("rope_theta", 10_000.0))
    fields.setdefault("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0))
    if family == "lfm2":
        fields |= {"block_dim": 64, "block_ff_dim": 64, "block_multiple_of": 1, "block_ffn_dim_multiplier": 1.0}
    if family.startswith("granitemoehybrid"):
        names = {"linear_attention": "mamba", "full_attention": "attention"}
        fields["layer_types"] = [names.get(kind, kind) for kind in fields["layer_types"]]
    if family.startswith("qwen3_5"):
        return {"model_type": family.removesuffix("_text"), "text_config": fields, "tie_word_embeddings": False}
    return fields
