"""Adapters that PEFT makes for families with fused matrices or rows in another order, and those that Pippin saves."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from pippin.core.errors import UnsupportedModel
from pippin.language import LanguageModel, families
from pippin.language.adapter_files import read_factors, save_adapter

from .checkpoints import read, save_random

# PEFT asks models for an attribute that transformers renames, and says which layout it finds in GPT-2
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning"),
]
IDS = torch.randint(0, 97, (2, 20), generator=torch.Generator().manual_seed(1))
# fused matrices; pairs that are interleaved, exchanged or rotated in part; inputs as rows; latent vectors
TARGETS = {
    "cohere": ["q_proj", "k_proj"],
    "deepseek_v3": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"],
    "gemma3n_text": ["q_proj", "k_proj", "o_proj", "linear_left", "linear_right", "per_layer_input_gate"],
    "gemma4_text": ["q_proj", "k_proj", "v_proj", "o_proj", "per_layer_input_gate", "per_layer_projection"],
    "glm": ["q_proj", "k_proj", "v_proj", "gate_up_proj", "down_proj"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "gpt_neox": ["query_key_value", "dense_h_to_4h"],
    "nanochat": ["q_proj", "k_proj", "fc1"],
    "phi3": ["qkv_proj", "gate_up_proj"],
    "stablelm": ["q_proj", "k_proj"],
    "starcoder2": ["c_fc", "q_proj"],
}


@pytest.fixture(params=TARGETS)
def adapted(request, tmp_path, tiny):
    """The family, a reference with a random adapter, its folder, and the model without it."""
    reference = save_random(request.param, tmp_path / "base")
    torch.manual_seed(3)
    config = LoraConfig(r=3, lora_alpha=5, target_modules=TARGETS[request.param], init_lora_weights=False)
    theirs = get_peft_model(reference, config).eval()
    theirs.save_pretrained(tmp_path / "adapter")
    model = LanguageModel("small", read(tmp_path / "base"), tiny.tokenizer, None)
    return request.param, theirs, tmp_path, model


@torch.inference_mode()
def test_an_adapter_of_peft_changes_what_it_changes_there(adapted, support):
    name, theirs, folder, model = adapted
    adapter = model.load_adapter("a", folder / "adapter")
    expected = theirs(IDS).logits
    torch.testing.assert_close(model.module(IDS, adapters=[(adapter, slice(None))]), expected, rtol=1e-5, atol=5e-5)
    assert (model.module(IDS) - expected).abs().max() > 0.1
    if name == "gemma3n_text":  # others are recorded where kernels compute them
        support(name, "LoRA")


@torch.inference_mode()
@pytest.mark.parametrize("rslora", [False, True])
def test_what_pippin_saves_is_read_by_peft(adapted, rslora):
    name, theirs, folder, model = adapted
    factors = read_factors(model, folder / "adapter")
    plain = {layer: (down, up / (5 / 3**0.5 if rslora else 5 / 3)) for layer, (down, up) in factors.items()}
    # a part of a fused layer may have no adapter
    del plain[next(layer for layer in plain if layer.endswith(("self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj")))]
    save_adapter(folder / "saved", plain, model=model, alpha=5, rslora=rslora)
    again = PeftModel.from_pretrained(save_random(name, folder / "second"), folder / "saved").eval()
    adapter = model.load_adapter("a", folder / "saved")
    ours = model.module(IDS, adapters=[(adapter, slice(None))])
    torch.testing.assert_close(again(IDS).logits, ours, rtol=1e-5, atol=5e-5)
    assert (ours - theirs(IDS).logits).abs().max() > 1e-3


def test_layers_that_are_more_than_reordered_are_refused_by_name(tmp_path):
    save_random("gemma", tmp_path)
    config = read(tmp_path).config
    family = families.FAMILIES["gemma"]
    with pytest.raises(UnsupportedModel, match=r"adapters of model.layers.1.input_layernorm are not supported"):
        families.parts_of(family, config, "model.layers.1.input_layernorm", 64)


def test_a_fused_layer_of_another_size_is_refused_by_its_parts(tmp_path):
    save_random("phi3", tmp_path)
    parts = families.parts_of(families.FAMILIES["phi3"], read(tmp_path).config, "model.layers.1.self_attn.qkv_proj", 7)
    assert [part.layer.rpartition(".")[2] for part in parts] == ["q_proj", "k_proj", "v_proj"]
    assert all(part.rows is None for part in parts)
