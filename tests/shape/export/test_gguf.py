"""Oracles: the format's own library reads the file, our reader gives the same logits, and llama.cpp answers from it."""

import dataclasses
import errno
import sys
from pathlib import Path
from typing import get_args

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Backend, decoders, models, normalizers

import pippin
from pippin.core import files
from pippin.core.errors import DiskFull, InvalidArgument, MissingDependency, UnsupportedModel
from pippin.core.formats.gguf import open_gguf
from pippin.data.text import gguf_splits, gguf_tokenizer
from pippin.data.text.tokenizer import Tokenizer
from pippin.language import Decoder, DecoderConfig, LanguageModel, LayerSpec
from pippin.language.quantized_checkpoint import save_quantized
from pippin.nn.attention.attention import AttentionSpec
from pippin.nn.attention.rotary import Rotary
from pippin.nn.feedforward.feedforward import FeedForwardSpec
from pippin.shape.export.gguf import GGUFKind, export_gguf
from pippin.shape.quantize import rtn
from pippin.shape.quantize.config import QuantizationConfig

FEED = FeedForwardSpec(96)
GLOBAL = LayerSpec(AttentionSpec(rotary=Rotary(500.0)), FEED)
GEMMA = FeedForwardSpec(96, "gelu_tanh")
FAMILIES = {
    "llama": {},
    "llama, stretched": {
        "layers": (LayerSpec(AttentionSpec(rotary=Rotary(500.0, "llama3", 8.0, 32, 1.0, 4.0)), FEED),) * 2
    },
    "mistral": {"tie_word_embeddings": False},
    "qwen2": {"qkv_bias": True},
    "qwen3": {
        "qk_norm": "head",
        "head_dim": 24,
        "layers": (LayerSpec(AttentionSpec(rotary=Rotary(500.0, "yarn", 4.0, 16, 1.0, 32.0)), FEED),) * 2,
    },
    "smollm3": {"layers": (GLOBAL,) * 3 + (LayerSpec(AttentionSpec(rotary=None), FEED),)},
    "gemma3_text": {
        "qk_norm": "head",
        "residual": "pre and post",
        "embedding_scale": 8.0,
        "layers": (LayerSpec(AttentionSpec(window=4, rotary=Rotary()), GEMMA),) * 5
        + (LayerSpec(AttentionSpec(rotary=Rotary(1e6)), GEMMA),),
    },
}


@pytest.fixture(scope="module")
def exported(default_model_path, tmp_path_factory):
    """The default model with float weights, and the file that was made of it."""
    model = pippin.load(default_model_path, device="cpu", dtype="float32", pack=False)
    return model, export_gguf(model, tmp_path_factory.mktemp("gguf") / "again.gguf", "Q4_1")


def made(family, tiny, **fields):
    """A random model of a family, its weights as large as trained ones."""
    given = FAMILIES[family] | fields
    layers = given.pop("layers", (GLOBAL, GLOBAL))
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64} | given
    config = DecoderConfig(family.partition(",")[0], 260, 64, layers, **sizes)
    module = Decoder(config).initialize(seed=0).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return LanguageModel(family, module, tiny.tokenizer, tiny.template)


def logits(model):
    ids = torch.tensor([model.tokenizer.encode("What is this? It's 12 apples!")])
    with torch.no_grad():
        return model.module(ids)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_read_back_gives_the_same_logits(family, merging, tmp_path):
    model = made(family, merging)
    path = export_gguf(model, tmp_path / "model.gguf", "F32")
    again = pippin.load(path, device="cpu", dtype="float32", pack=False)
    torch.testing.assert_close(logits(again), logits(model), rtol=1e-4, atol=1e-4)
    assert again.config.family == {"mistral": "llama"}.get(model.config.family, model.config.family)
    assert again.tokenizer.eos_ids == (257,)
    assert again.tokenizer.vocab_size == model.config.vocab_size


@pytest.mark.parametrize("kind", get_args(GGUFKind))
def test_the_formats_own_library_reads_what_it_would_have_written(kind, merging, tmp_path):
    model = made("qwen2", merging)
    reader = gguf.GGUFReader(export_gguf(model, tmp_path / "model.gguf", kind))
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    up = tensors["blk.1.ffn_up.weight"]
    assert up.tensor_type.name == kind
    dense = model.module.layers[1].mlp.up_proj.weight.numpy()
    if kind == "F32":
        assert np.array_equal(up.data, dense)
    else:
        theirs = gguf.quants.quantize(dense, gguf.GGMLQuantizationType[kind])
        wanted = gguf.quants.dequantize(theirs, gguf.GGMLQuantizationType[kind])
        assert np.array_equal(gguf.quants.dequantize(up.data, up.tensor_type), wanted)
    assert tensors["blk.0.attn_norm.weight"].tensor_type.name == "F32"
    assert tensors["token_embd.weight"].tensor_type.name == ("Q8_0" if kind[0] == "Q" else kind)
    assert "output.weight" not in tensors
    assert reader.get_field("qwen2.attention.head_count_kv").contents() == 2
    assert reader.get_field("tokenizer.ggml.model").contents() == "gpt2"
    assert reader.get_field("tokenizer.ggml.pre").contents() == "gpt-2"
    assert reader.get_field("tokenizer.ggml.eos_token_id").contents() == 257
    assert len(reader.get_field("tokenizer.ggml.tokens").contents()) == 260


@pytest.mark.parametrize("levels", ["balanced", "unbalanced"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_codes_keep_their_places(bits, levels, merging, tmp_path):
    model = made("llama", merging)
    settings = QuantizationConfig(bits=bits, levels=levels, group=32, embedding_bits=bits)
    codes = rtn.quantize(model, settings)
    save_quantized(tmp_path / "folder", model, codes)
    folder = pippin.load(tmp_path / "folder", device="cpu", pack=False)
    reader = gguf.GGUFReader(export_gguf(folder, tmp_path / "model.gguf"))
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    ours = {
        "blk.0.ffn_down": "layers.0.mlp.down_proj",
        "token_embd": "embed_tokens",
        "blk.1.attn_v": "layers.1.self_attn.v_proj",
    }
    for theirs, name in ours.items():
        tensor = tensors[f"{theirs}.weight"]
        wanted, step = codes[name].dense().numpy(), codes[name].scales.float().repeat_interleave(32, 1).numpy()
        wrong = np.abs(gguf.quants.dequantize(tensor.data, tensor.tensor_type) - wanted) / step
        if levels == "unbalanced":
            assert tensor.tensor_type.name == ("Q8_0" if bits == 8 else "Q4_0")
            assert wrong.max() == 0
        elif bits == 8:
            assert wrong.max() <= 0.51
        else:
            assert tensor.tensor_type.name == "Q4_1"
            assert wrong.max() <= 2**-11 * 1.01 * codes[name].zero_point
    again = pippin.load(tmp_path / "model.gguf", device="cpu", dtype="float32", pack=False)
    if levels == "unbalanced":
        torch.testing.assert_close(logits(again), logits(folder), rtol=1e-4, atol=1e-4)


def test_the_default_model_comes_back_block_for_block(default_model_path, exported):
    before, after = open_gguf(default_model_path), open_gguf(exported[1])
    assert {name: form.type for name, form in before.tensors.items()} == {
        name: form.type for name, form in after.tensors.items()
    }
    for name in ("blk.0.attn_q.weight", "blk.29.attn_k.weight", "blk.7.ffn_down.weight", "blk.3.attn_norm.weight"):
        assert torch.equal(after.dequantize(name), before.dequantize(name))
    for key in ("model", "pre", "tokens", "merges", "eos_token_id", "bos_token_id", "add_bos_token"):
        assert after.metadata[f"tokenizer.ggml.{key}"] == before.metadata[f"tokenizer.ggml.{key}"]
    for key, value in before.metadata.items():
        if key.startswith("llama.") or key == "tokenizer.chat_template":
            assert after.metadata[key] == value


def test_llama_cpp_answers_as_our_decoder_does(exported, tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp")
    model = exported[0]
    path = export_gguf(model, tmp_path / "model.gguf", "F16")  # others round activations to eight bits in llama.cpp
    question = [{"role": "user", "content": "What is the capital of France?"}]
    theirs = llama_cpp.Llama(str(path), n_ctx=128, n_threads=1, n_threads_batch=1, logits_all=True, verbose=False)
    try:
        ids = model.template.encode(question)
        text = "What is the capital of France? It's 12345  apples!\n\n\tЖ"
        assert theirs.tokenize(text.encode(), add_bos=False, special=False) == model.tokenizer.encode(text)
        theirs.eval(ids)
        scores = torch.from_numpy(theirs.scores[: len(ids)].copy())
        theirs.reset()
        answer = theirs.create_chat_completion(question, temperature=0, max_tokens=10)["choices"][0]["message"]
    finally:
        theirs.close()
    with torch.no_grad():
        wanted = model.module(torch.tensor([ids]))[0]
    assert "Paris" in answer["content"]
    assert (scores.argmax(-1) == wanted.argmax(-1)).float().mean() > 0.95
    torch.testing.assert_close(scores, wanted, rtol=0.02, atol=0.3)


def test_sentencepiece_vocabularies_go_there_and_back(merging, tmp_path):
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab", "▁ab"]
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b")]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer = Tokenizer(backend, bos_id=1, eos_ids=[2], add_bos=True)
    model = dataclasses.replace(made("llama", merging), tokenizer=tokenizer)
    model.module.embed_tokens.weight = torch.nn.Parameter(torch.randn(270, 64), requires_grad=False)
    config = dataclasses.replace(model.config, vocab_size=270)
    model = dataclasses.replace(model, network=Decoder(config).initialize(seed=0))
    again = pippin.load(export_gguf(model, tmp_path / "m.gguf", "F16"), device="cpu", pack=False).tokenizer
    for text in ("ab a b", "  ab", "aé\n", "</s>"):
        assert again.encode(text) == tokenizer.encode(text)
    assert (again.bos_id, again.eos_ids, again.add_bos) == (1, (2,), True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layers": (GLOBAL, LayerSpec(AttentionSpec(kv_source=0), FEED))}, "layer 1 attention.kv_source is 0"),
        ({"layers": (GLOBAL, LayerSpec(AttentionSpec(rotary=None), FEED))}, "layer 1 has positions None"),
        ({"layers": (GLOBAL, LayerSpec(AttentionSpec(rotary=Rotary(7.0)), FEED))}, "layer 1 has positions Rotary"),
        ({"layers": (LayerSpec(AttentionSpec(), GEMMA),) * 2}, "layer 0 feedforward.activation is gelu_tanh"),
        ({"layers": (LayerSpec(AttentionSpec(), FeedForwardSpec(96, gated=False)),)}, "feedforward.gated is False"),
        ({"attention_scale": 0.5}, "attention_scale is 0.5, GGUF would say None"),
        ({"layers": (LayerSpec(AttentionSpec(rotary=Rotary(7.0, "yarn", 2.0, 64)), FEED),)}, "layer 0 has positions"),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(fields, message, merging, tmp_path):
    with pytest.raises(UnsupportedModel, match=message):
        export_gguf(made("llama", merging, **fields), tmp_path / "model.gguf")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", gguf_splits.SPLITS)
def test_a_splitting_rule_is_named_by_where_it_cuts(name):
    whole = name in gguf_splits.WHOLE_WORDS
    backend = Backend(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")], ignore_merges=whole))
    backend.normalizer = normalizers.NFC() if name in gguf_splits.COMPOSED else None
    backend.pre_tokenizer = gguf_tokenizer._splitter(name)
    found = gguf_tokenizer.describe_backend(backend, 3)["tokenizer.ggml.pre"]
    text = Path(gguf_splits.__file__).read_text() + Path(__file__).read_text() + "".join(map(chr, range(32, 0xD800)))
    cuts = (gguf_tokenizer._splitter(each).pre_tokenize_str(text) for each in (found, name))
    assert next(cuts) == next(cuts)


def test_tokenizers_without_a_form_are_refused(tiny, merging, tmp_path):
    backend = Backend.from_str(merging.tokenizer._backend.to_str())
    backend.normalizer = normalizers.NFC()
    model = made("llama", merging)
    with pytest.raises(UnsupportedModel, match="splitting rule has no name in GGUF"):
        export_gguf(dataclasses.replace(model, tokenizer=Tokenizer(backend)), tmp_path / "model.gguf")
    with pytest.raises(UnsupportedModel, match="without merges"):
        export_gguf(dataclasses.replace(model, tokenizer=tiny.tokenizer), tmp_path / "model.gguf")


def test_other_bad_input_names_the_value(merging, tmp_path, monkeypatch):
    model = made("llama", merging)
    path = tmp_path / "model.gguf"
    with pytest.raises(InvalidArgument, match=r"kind must be .* got 'Q3'"):
        export_gguf(model, path, "Q3")
    codes = rtn.quantize(model, QuantizationConfig(bits=4, group=32))
    with pytest.raises(InvalidArgument, match=r"no matrix 'layers\.9\.mlp\.up_proj'"):
        export_gguf(model, path, codes={"layers.9.mlp.up_proj": codes["layers.0.mlp.up_proj"]})
    with pytest.raises(InvalidArgument, match=r"codes of layers\.0\.mlp\.up_proj have shape \(64, 96\)"):
        export_gguf(model, path, codes={"layers.0.mlp.up_proj": codes["layers.0.mlp.down_proj"]})
    family = dataclasses.replace(model.config, family="helium")
    with pytest.raises(UnsupportedModel, match=r"llama\.cpp has no helium models"):
        export_gguf(dataclasses.replace(model, network=Decoder(family).initialize(seed=0)), path)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingDependency, match=r"pippin\[export\]"):
        export_gguf(model, path)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_the_older_file(merging, tmp_path, monkeypatch):
    model = made("llama", merging)
    path = export_gguf(model, tmp_path / "model.gguf")
    before = path.read_bytes()

    def full(self, *given):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", full)
    with pytest.raises(DiskFull):
        export_gguf(model, path, "F32")
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["model.gguf"]
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10}))
    with pytest.raises(DiskFull, match="10 B free"):
        export_gguf(model, path, "F32")
