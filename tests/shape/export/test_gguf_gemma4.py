"""Oracle: the folder of the checkpoint."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import pippin
from pippin.core.errors import CorruptedFile, UnsupportedModel
from pippin.language import Decoder
from pippin.shape.export import gguf as export

from .gguf_checkpoints import rewritten

IDS = torch.randint(0, 250, (1, 40), generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
def test_keys_that_no_layer_reads_are_left(exported, tmp_path):
    model, path = exported("gemma4_text")

    def more(tensors):
        for part in ("attn_k", "attn_v", "attn_k_norm"):
            tensors[f"blk.3.{part}.weight"] = np.zeros_like(tensors[f"blk.1.{part}.weight"])
        return tensors

    again = pippin.load(rewritten(path, tmp_path / "more.gguf", tensors=more), device="cpu", dtype="float32")
    torch.testing.assert_close(again.module(IDS), model.module(IDS), rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_gates_of_experts_may_lie_apart(exported, tmp_path):
    model, path = exported("gemma4_text, experts")

    def apart(tensors):
        for name in [name for name in tensors if name.endswith("ffn_gate_up_exps.weight")]:
            for part, half in zip(("gate", "up"), np.split(tensors.pop(name), 2, 1), strict=True):
                tensors[name.replace("gate_up", part)] = half
        return tensors

    changed = rewritten(path, tmp_path / "apart.gguf", tensors=apart)
    again = pippin.load(changed, device="cpu", dtype="float32", pack=False)
    torch.testing.assert_close(again.module(IDS), model.module(IDS), rtol=0, atol=1e-6)


def test_what_a_file_says_and_the_decoder_lacks_is_refused(exported, tmp_path):
    path = exported("gemma4_text")[1]

    def turning(tensors):
        return tensors | {"rope_freqs.weight": np.full_like(tensors["rope_freqs.weight"], 2.0)}

    for options, error, message in (
        ({"tensors": turning}, UnsupportedModel, "has ones for what rotates"),
        ({"metadata": {"gemma4.feed_forward_length": [48, 48]}}, CorruptedFile, "expected 6 integers"),
        ({"metadata": {"gemma4.attention.key_length": 32}}, UnsupportedModel, "has ones for what rotates"),
    ):
        with pytest.raises(error, match=message):
            pippin.load(rewritten(path, tmp_path / "changed.gguf", **options), device="cpu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": None}, "both local and global layers"),
        ({"value_norm": False}, "value_norm is False, GGUF would say True"),
        ({"bias": True}, "no biases of its attention output layers"),
        ({"attention_scale": 0.5}, "attention_scale is 0.5, GGUF would say 1.0"),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(exported, changes, message):
    config = exported("gemma4_text, experts")[0].config
    inner = {name: value for name, value in changes.items() if hasattr(config.layers[0].attention, name)}
    layers = tuple(replace(layer, attention=replace(layer.attention, **inner)) for layer in config.layers)
    outer = {"output_bias": True} if "bias" in changes else {k: v for k, v in changes.items() if k not in inner}
    config = replace(config, layers=layers, **outer)
    with torch.device("meta"):
        module = Decoder(config)
    with pytest.raises(UnsupportedModel, match=message):
        export._describe(config, export._entries(module, "F32", {}))
