"""The decoders of models for images and sound, against the whole models of transformers, which are asked with text."""

import pytest
import torch
import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import pippin
from pippin.language import families

from .checkpoints import CHECKPOINTS, SMALL

# a tower of one layer, in the words of all of them
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "embed_dim": 32,
    "depth": 1,
    "num_heads": 2,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "d_model": 32,
}
MAPPINGS = ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SPEECH_SEQ_2_SEQ", "CAUSAL_LM")
NEED_TIMM = {"gemma3n"}  # whose tower for images is of that package; test_families reads its text part
IDS = torch.randint(3, 256, (2, 40), generator=torch.Generator().manual_seed(3))


def save_whole(model_type, folder):
    """Save a random model with towers of one layer; return it."""
    torch.manual_seed(0)
    kind = CONFIG_MAPPING[model_type]
    usual = kind()
    text = usual.get_text_config().model_type
    parts = {
        name: {"model_type": getattr(usual, name).model_type, **TOWER}
        for name in kind.sub_configs
        if name != "text_config" and getattr(usual, name, None) is not None
    }
    config = kind(text_config={"model_type": text, **SMALL, **CHECKPOINTS[text]}, **parts)
    mappings = [getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES", {}) for name in MAPPINGS]
    model = getattr(transformers, next(found[model_type] for found in mappings if model_type in found))(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(0.15 * noise) if parameter.ndim > 1 else parameter.add_(0.3 * noise)
    model.save_pretrained(folder)
    return model


@torch.no_grad()
@pytest.mark.parametrize("model_type", sorted(set(families.WRAPPERS) - NEED_TIMM))
def test_the_decoder_of_a_multimodal_model_is_that_of_transformers(tmp_path, tiny, model_type):
    whole = save_whole(model_type, tmp_path)
    tiny.tokenizer.save(tmp_path)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)  # its end tokens are of another vocabulary
    model = pippin.load(tmp_path, device="cpu", dtype="float32", pack=False)
    # the whole models of Cohere and Granite leave out the scale of their decoders' logits
    expected = whole(input_ids=IDS).logits * model.config.logit_scale
    torch.testing.assert_close(model.module(IDS), expected, atol=1e-4, rtol=1e-4)
