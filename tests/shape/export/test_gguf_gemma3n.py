"""Gemma 3n in GGUF, beyond what all families are tested for; the oracle is the decoder that was written."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import pippin
from pippin.core.errors import CorruptedFile, UnsupportedModel
from pippin.language import Decoder, LanguageModel
from pippin.shape.export.gguf import export_gguf

from .gguf_checkpoints import rewritten

IDS = torch.randint(0, 250, (1, 20), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def made(exported):
    return exported("gemma3n_text")


@torch.inference_mode()
def test_tokens_without_a_row_of_the_layers_inputs_get_one(made, merging, tmp_path):
    """As transformers does, Pippin reads the first row for them; llama.cpp reads the table at every token."""
    model, _ = made
    config = replace(model.config, per_layer_vocab_size=200)
    weights = model.module.state_dict()
    weights["per_layer.embed.weight"] = weights["per_layer.embed.weight"][:200]
    fewer = Decoder(config)
    fewer.load_state_dict(weights)
    path = export_gguf(LanguageModel("fewer", fewer, merging.tokenizer, None), tmp_path / "fewer.gguf", "F32")
    again = pippin.load(path, device="cpu", dtype="float32", pack=False)
    assert again.config.per_layer_vocab_size == 260
    assert (IDS >= 200).any()
    torch.testing.assert_close(again.module(IDS), fewer(IDS), rtol=0, atol=1e-6)


@torch.inference_mode()
@pytest.mark.parametrize(("kind", "close"), [("Q8_0", 0.005), ("Q4_0", 0.13)])
def test_a_quantized_file_keeps_routers_and_the_residual_path(made, tmp_path, kind, close):
    model, _ = made
    path = export_gguf(model, tmp_path / "model.gguf", kind, show_progress=False)
    again = pippin.load(path, device="cpu", dtype="float32", pack=False)
    expected, found = model.module.state_dict(), again.module.state_dict()
    for name, half in (
        ("updates.router.weight", False),
        ("updates.prediction.weight", False),
        ("laurel.left.weight", True),
    ):
        values = expected[f"layers.3.{name}"]
        torch.testing.assert_close(found[f"layers.3.{name}"], values.half().float() if half else values, rtol=0, atol=0)
    weights = expected["layers.3.self_attn.q_proj.weight"]
    error = (found["layers.3.self_attn.q_proj.weight"] - weights).abs().max()
    assert 0 < error < close * weights.abs().max()
    assert again.module(IDS).isfinite().all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_streams": 3}, "num_streams is 3, not 4"),
        ({"laurel_rank": 32}, "laurel_rank is 32, not 64"),
        ({"per_layer_size": 128}, "per_layer_size is 128, not 256"),
        ({"logit_softcap": None}, "logit_softcap is None, not 30.0"),
    ],
)
def test_what_llama_cpp_has_built_in_is_not_written_otherwise(made, merging, tmp_path, changes, message):
    model, _ = made
    with torch.device("meta"):
        module = Decoder(replace(model.config, **changes))
    with pytest.raises(UnsupportedModel, match=message):
        export_gguf(LanguageModel("other", module, merging.tokenizer, None), tmp_path / "model.gguf", "F32")
    assert not (tmp_path / "model.gguf").exists()


def test_other_sparsity_and_sizes_are_refused(made, merging, tmp_path):
    model, _ = made
    first, *others = model.config.layers
    for change, message in (
        ({"activation_sparsity": 0.5}, "not 0.95 in the first 10"),
        ({"intermediate_size": 512}, "of different sizes"),
    ):
        layers = (replace(first, feedforward=replace(first.feedforward, **change)), *others)
        with torch.device("meta"):
            module = Decoder(replace(model.config, layers=layers))
        with pytest.raises(UnsupportedModel, match=message):
            export_gguf(LanguageModel("other", module, merging.tokenizer, None), tmp_path / "model.gguf", "F32")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"metadata": {"gemma3n.activation_sparsity_scale": [1.0]}}, CorruptedFile, "expected 25 numbers"),
        ({"metadata": {"gemma3n.feed_forward_length": [1024] * 3}}, CorruptedFile, "expected 25 numbers"),
        ({"metadata": {"gemma3n.altup.active_idx": 1}}, UnsupportedModel, "altup_active_idx=1"),
        ({"metadata": {"gemma3n.altup.num_inputs": 3}}, CorruptedFile, "does not fit its configuration"),
        ({"metadata": {"gemma3n.attention.shared_kv_layers": 25}}, CorruptedFile, "none has any"),
    ],
)
def test_headers_that_contradict_their_tensors_are_refused(made, tmp_path, change, error, message):
    with pytest.raises(error, match=message):
        pippin.load(rewritten(made[1], tmp_path / "changed.gguf", **change), device="cpu")


@pytest.mark.parametrize("name", ["per_layer_token_embd.weight", "blk.0.laurel_l.weight", "altup_proj.weight"])
def test_missing_tensors_are_named(made, tmp_path, name):
    def without(tensors):
        return {key: np.array(values) for key, values in tensors.items() if key != name}

    with pytest.raises(CorruptedFile):
        pippin.load(rewritten(made[1], tmp_path / "changed.gguf", tensors=without), device="cpu")
