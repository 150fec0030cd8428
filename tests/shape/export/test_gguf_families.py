"""Oracles: llama.cpp's converter (recorded), llama.cpp itself (where it is installed), the folder of the checkpoint."""

import copy
import json
from dataclasses import replace
from statistics import NormalDist

import gguf
import numpy as np
import pytest
import torch

import pippin
from pippin.core import native
from pippin.core.errors import CorruptedFile, ModelNotFound, UnsupportedModel
from pippin.core.formats import ggml_quants
from pippin.engine.model_runner import ModelInput
from pippin.engine.runners.select import make_runner
from pippin.language import Decoder, DecoderConfig, LanguageModel, LayerSpec, families
from pippin.language.families.gguf_layout import GGUFHeader
from pippin.nn.attention.attention import AttentionSpec
from pippin.nn.attention.rotary import Rotary
from pippin.nn.feedforward import feedforward
from pippin.nn.feedforward.feedforward import FeedForwardSpec
from pippin.nn.feedforward.routing import RouterSpec
from pippin.shape.export import gguf as export
from pippin.shape.export.gguf import export_gguf

from ...language.families.checkpoints import read, save_random
from .gguf_checkpoints import CASES, RECORD, describe, rewritten

IDS = torch.randint(0, 250, (1, 40), generator=torch.Generator().manual_seed(1))
RECORDED = json.loads(RECORD.read_text())
# what llama.cpp's converter leaves to defaults, with the same meaning, or loses
_BESIDE = {"attention.key_length", "attention.value_length", "rope.dimension_count", "vocab_size", "rope.freq_base"}
_BESIDE |= {"attention.sliding_window_pattern", "rope.freq_base_swa", "rope.scaling.attn_factor"}
_BESIDE |= {"expert_gating_func"}
_DEFAULTS = {
    "rope.scaling.type": "none",
    "attention.sliding_window": 0,
    "nextn_predict_layers": 0,
    "rope.scaling.factor": 1.0,
}
_LOST = {
    "glm": {"context_length", "attention.layer_norm_rms_epsilon"},  # it reads fields of an older configuration
    "nemotron": {"attention.layer_norm_rms_epsilon"},  # the epsilon of norms that the family does not have
    "olmo": {"attention.layer_norm_rms_epsilon"},
    "qwen2_moe": {"feed_forward_length"},  # that of dense layers, which the model does not have
    "qwen3_moe": {"feed_forward_length"},
    "gpt2": {"attention.head_count_kv"},
    "kimi_linear": {"attention.value_length"},  # rotated dimensions, which a value does not have
    # nothing rotates: a million tokens, and dimensions that mean nothing
    "granitemoehybrid": {"context_length", "rope.dimension_count", "rope.freq_base"}
    | {"expert_used_count", "expert_count"},
    # it does not know the layers of a feed-forward layer alone by their name in transformers
    "nemotron_h": {"context_length", "rope.dimension_count", "rope.freq_base", "feed_forward_length"}
    | {
        "attention.layer_norm_rms_epsilon",
        "expert_group_used_count",
        "expert_group_count",
        "expert_weights_norm",
        "expert_weights_scale",
        "expert_count",
    },
    "qwen3_next": {"feed_forward_length"},
    "qwen3_5_moe_text": {"feed_forward_length", "rope.dimension_sections"},  # sections of heads of 256 dimensions
    "qwen3_5_text": {"rope.dimension_sections"},
    "gpt_neox": {"attention.head_count_kv"},
}


def test_every_family_with_gguf_has_a_case():
    known = {name for name, family in families.FAMILIES.items() if family.gguf is not None}
    assert known - {"ministral"} == {case.partition(",")[0] for case in CASES}  # the converter lacks Ministral
    lacking = {"helium", "nanochat"}  # llama.cpp has no such models
    unlike = {"phimoe"}  # its experts are chosen otherwise there
    unwritten = {"recurrent_gemma", "olmo_hybrid"}
    assert families.SHARED_FAMILIES.keys() - known <= lacking | unlike | unwritten


@pytest.mark.parametrize("case", CASES)
def test_the_file_is_that_of_llama_cpps_converter(exported, support, case):
    ours, theirs = describe(exported(case)[1]), RECORDED[case]
    assert ours["architecture"] == theirs["architecture"]
    assert ours["shapes"] == theirs["shapes"]
    # it reorders queries and keys that nothing rotates: their scores are the same
    if not case.startswith(("nemotron_h", "granitemoehybrid")):
        assert ours["digest"] == theirs["digest"]
    for name, table in theirs["tables"].items():
        np.testing.assert_allclose(ours["tables"][name], table, rtol=1e-5)
    lost = _LOST.get(case.partition(",")[0], set())
    defaults = _DEFAULTS | {
        "rope.freq_base_swa": ours["metadata"].get("rope.freq_base"),
        "rope.scaling.original_context_length": ours["metadata"]["context_length"],
    }
    for key in theirs["metadata"].keys() - lost:
        assert ours["metadata"].get(key, defaults.get(key)) == pytest.approx(theirs["metadata"][key]), key
    assert ours["metadata"].keys() - theirs["metadata"].keys() - lost <= _BESIDE
    support(case.partition(",")[0], "writes GGUF")


@torch.inference_mode()
@pytest.mark.parametrize("case", CASES)
def test_what_is_read_back_gives_the_same_logits(exported, support, case):
    model, path = exported(case)
    expected = model.module(IDS)
    again = pippin.load(path, device="cpu", dtype="float32", pack=False)
    # a file has rates of forgetting, whose logarithms are rounded
    close = 3e-4 if model.config.recurrent_layers else 1e-6
    torch.testing.assert_close(again.module(IDS), expected, rtol=0, atol=close)
    # random weights amplify what float32 rounds, and every machine sums in another order
    rounded = (copy.deepcopy(model.module).double()(IDS) - expected).abs().max().item()
    close = max(close, 1e-4, 4 * rounded)
    packed = pippin.load(path, device="cpu")
    torch.testing.assert_close(packed.module(IDS), expected, rtol=1e-4, atol=close)
    runner = make_runner(packed, 4, "float32")
    (logits,) = runner.forward([ModelInput(IDS[0].tolist(), 0, range(3), range(IDS.shape[1]))])
    runner.close()
    torch.testing.assert_close(logits, expected[0], rtol=1e-4, atol=close)
    assert rounded < 1e-3
    support(case.partition(",")[0], "reads GGUF")


@torch.inference_mode()
def test_ministral_is_written_as_what_reads_it(merging, support, tmp_path):
    """The converter has no such models; a file of Pippin's is read by Pippin."""
    save_random("ministral", tmp_path, vocab_size=260)
    model = LanguageModel("small", read(tmp_path), merging.tokenizer, None)
    path = export_gguf(model, tmp_path / "model.gguf", "F32", show_progress=False)
    again = pippin.load(path, device="cpu", dtype="float32", pack=False)
    torch.testing.assert_close(again.module(IDS), model.module(IDS), rtol=0, atol=1e-6)
    support("ministral", "writes GGUF")
    support("ministral", "reads GGUF")


@pytest.mark.parametrize(
    "model_type", [name for name, family in families.SHARED_FAMILIES.items() if family.gguf is None]
)
def test_families_without_gguf_are_refused_by_name(merging, support, tmp_path, model_type):
    save_random(model_type, tmp_path / "model", vocab_size=260, vocab_size_per_layer_input=260)
    model = LanguageModel("small", read(tmp_path / "model"), merging.tokenizer, None)
    with pytest.raises(UnsupportedModel, match=model_type):
        export_gguf(model, tmp_path / "model.gguf", "F32", show_progress=False)
    assert not (tmp_path / "model.gguf").exists()
    support(model_type, "writes GGUF", "no")
    support(model_type, "reads GGUF", "no")


@torch.inference_mode()
@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES)
def test_llama_cpp_computes_the_same_logits(exported, monkeypatch, case):
    model, path = exported(case)
    scores = _logits_of_llama_cpp(path)
    if case == "gemma3n_text":  # sparse gates carry differences on from layer to layer
        monkeypatch.setattr(feedforward, "_above_quantile", _above_quantile_of_llama_cpp)
        monkeypatch.setattr(feedforward.F, "gelu", _gelu_of_llama_cpp)
    # ggml takes GELU from a table in half precision
    close = 2e-2 if model.config.layers[0].feedforward.activation.startswith("gelu") else 1e-4
    close = 3e-4 if model.config.recurrent_layers else close  # rounding that a state carries on
    torch.testing.assert_close(scores, model.module(IDS)[0], rtol=close, atol=close)


def _above_quantile_of_llama_cpp(x, share):
    """It divides the sum of squares by one less, which does not matter in layers of thousands."""
    deviations = NormalDist().inv_cdf(share)
    return torch.relu(x - x.mean(-1, keepdim=True) - deviations * x.std(-1, keepdim=True, unbiased=True))


def _gelu_of_llama_cpp(x, approximate, *, exact=torch.nn.functional.gelu):
    """From a table in half precision."""
    return exact(x.half().float(), approximate=approximate).half().float()


def _logits_of_llama_cpp(path):
    llama_cpp = pytest.importorskip("llama_cpp")
    exact = {"type_k": 0, "type_v": 0, "flash_attn": False, "logits_all": True, "verbose": False}
    exact |= {"yarn_beta_fast": -1.0, "yarn_beta_slow": -1.0}  # those of the file, not the library's
    theirs = llama_cpp.Llama(str(path), n_ctx=64, n_threads=1, n_threads_batch=1, **exact)
    try:
        theirs.eval(IDS[0].tolist())
        return torch.from_numpy(theirs.scores[: IDS.shape[1]].copy())
    finally:
        theirs.close()


@torch.inference_mode()
@pytest.mark.parametrize(
    "case", [*["llama", "phi3", "gpt_neox", "mixtral", "qwen2_moe", "glm4_moe_lite"], "nemotron_h, experts"]
)
def test_blocks_are_those_of_the_same_rows(exported, case, tmp_path):
    """Rows are put in order, and experts apart, as bytes: the kernels' weights are the dequantized ones."""
    path = export_gguf(exported(case)[0], tmp_path / "model.gguf", "Q8_0", show_progress=False)
    dense = pippin.load(path, device="cpu", dtype="float32", pack=False)
    packed = pippin.load(path, device="cpu")
    found = 0
    for name, part in packed.module.named_modules():
        if getattr(part, "packed", None) is not None and not name.endswith(("qkv_proj", "gate_up_proj")):
            wanted = dense.module.get_submodule(name).weight
            # rows of 48 weights are no whole blocks; they are F16, which is widened to bfloat16
            wanted = wanted if wanted.shape[1] % 32 == 0 else wanted.bfloat16().float()
            torch.testing.assert_close(part.dense_weight().float(), wanted, rtol=0, atol=0)
            found += 1
    assert found
    torch.testing.assert_close(packed.module(IDS), dense.module(IDS), rtol=0.05, atol=0.05)


_RECURRENT = ["mamba2", "lfm2", "falcon_h1", "granitemoehybrid", "nemotron_h, experts", "qwen3_next", "qwen3_5_text"]
_RECURRENT += ["kimi_linear"]


@pytest.mark.parametrize("case", _RECURRENT)
@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_what_is_no_matrix_of_a_recurrent_layer_is_never_rounded(exported, case, kind, tmp_path):
    """ggml convolves in float32 alone; matrices have the weights of the unrounded file, within a rounding."""
    model, exact = exported(case)
    path = export_gguf(model, tmp_path / "model.gguf", kind, show_progress=False)
    expected = {tensor.name: tensor.data for tensor in gguf.GGUFReader(exact).tensors}
    for tensor in gguf.GGUFReader(path).tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if tensor.name.endswith(("_norm.weight", "conv1d.weight", "shortconv.conv.weight")) or values.ndim == 1:
            assert tensor.tensor_type == gguf.GGMLQuantizationType.F32, tensor.name
        step = abs(expected[tensor.name]).max() / 127
        np.testing.assert_allclose(values, expected[tensor.name], rtol=0, atol=0.6 * step, err_msg=tensor.name)
    again = pippin.load(path, device="cpu")
    assert bool(again.module(IDS).isfinite().all())


@torch.inference_mode()
def test_convolutions_in_half_precision_are_read(exported, tmp_path):
    def halved(tensors):
        return {name: values.astype(np.float16) if "conv" in name else values for name, values in tensors.items()}

    model, path = exported("mamba2")
    path = rewritten(path, tmp_path / "half.gguf", tensors=halved)
    again = pippin.load(path, device="cpu", dtype="float32", pack=False)
    taps = "layers.0.recurrent.conv.weight"
    expected = model.module.state_dict()[taps].half().float()
    torch.testing.assert_close(again.module.state_dict()[taps], expected, rtol=0, atol=0)


@torch.inference_mode()
@pytest.mark.nightly
@pytest.mark.parametrize("case", _RECURRENT)
def test_llama_cpp_computes_recurrent_models_of_half_precision(exported, case, tmp_path):
    path = export_gguf(exported(case)[0], tmp_path / "model.gguf", "F16", show_progress=False)
    expected = pippin.load(path, device="cpu", dtype="float32", pack=False).module(IDS)[0]
    close = 0.02 * float(expected.abs().max())  # it rounds what is multiplied, too
    torch.testing.assert_close(_logits_of_llama_cpp(path), expected, rtol=0, atol=close)


@torch.inference_mode()
@pytest.mark.parametrize("case", ["llama", "mixtral"])
def test_kinds_may_differ_within_a_layer(exported, case, tmp_path):
    kinds = {"attn_q": "Q4_0", "attn_k": "Q4_1", "attn_v": "Q8_0", "attn_output": "F16", "ffn_up": "BF16"}
    kinds |= {"ffn_gate_exps": "Q5_0", "ffn_up_exps": "Q8_0", "token_embd": "Q5_1"}
    rounded = {}

    def mixed(tensors):
        found = {}
        for name, values in tensors.items():
            stem, kind = name.removesuffix(".weight"), kinds.get(name.removesuffix(".weight").rpartition(".")[2])
            found[name] = values
            if kind is not None:
                form = gguf.GGMLQuantizationType[kind]
                found[name] = gguf.quants.quantize(values, form), form
                rounded[stem] = torch.from_numpy(gguf.quants.dequantize(found[name][0], form))
        return found

    path = rewritten(exported(case)[1], tmp_path / "mixed.gguf", tensors=mixed)
    dense = pippin.load(path, device="cpu", dtype="float32", pack=False)
    inner = dense.module.layers[2]
    assert torch.equal(inner.self_attn.v_proj.weight, rounded["blk.2.attn_v"])
    assert torch.equal(inner.self_attn.o_proj.weight, rounded["blk.2.attn_output"])
    if case == "mixtral":
        assert torch.equal(inner.mlp.experts[1].gate_proj.weight, rounded["blk.2.ffn_gate_exps"][1])
    packed = pippin.load(path, device="cpu")
    torch.testing.assert_close(packed.module(IDS), dense.module(IDS), rtol=0.05, atol=0.05)


def _typed(kind):
    """Blocks of a type for a matrix, whose values are small: quantized, or random where there is no quantizer."""
    form, generator = gguf.GGMLQuantizationType[kind], np.random.default_rng(0)

    def blocks(values):
        size, nbytes = gguf.GGML_QUANT_SIZES[form]
        rows, columns = values.shape
        try:
            return gguf.quants.quantize(values, form)
        except NotImplementedError:
            found = generator.integers(0, 256, (64 * values.size // size, nbytes), np.uint8)
            with np.errstate(all="ignore"):
                small = np.abs(gguf.quants.dequantize(found, form)).reshape(len(found), -1).max(1) < 100
            return found[small][: values.size // size].reshape(rows, columns // size * nbytes)

    return blocks, form


@pytest.fixture(scope="module")
def wide(merging):
    """A model whose rows are whole blocks of every type."""
    layers = (LayerSpec(AttentionSpec(rotary=Rotary()), FeedForwardSpec(256)),)
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 64}
    module = Decoder(DecoderConfig("qwen2", 260, 256, layers, qkv_bias=True, **sizes)).initialize(seed=0)
    return LanguageModel("wide", module.eval().requires_grad_(False), merging.tokenizer, None)


@torch.inference_mode()
@pytest.mark.parametrize("kind", sorted(ggml_quants._READERS.keys() - {"F32", "F16", "BF16"}))
def test_every_type_opens_with_the_values_of_the_reference(kind, wide, tmp_path):
    found = {}

    def typed(tensors):
        blocks, form = _typed(kind)
        for name, values in tensors.items():
            found[name] = (blocks(values), form) if values.ndim == 2 and "embd" not in name else values
        return found

    path = rewritten(export_gguf(wide, tmp_path / "plain.gguf", "F32"), tmp_path / "typed.gguf", tensors=typed)
    expected = torch.from_numpy(np.array(gguf.quants.dequantize(*found["blk.0.ffn_down.weight"])))
    dense = pippin.load(path, device="cpu", dtype="float32", pack=False).module
    assert torch.equal(dense.layers[0].mlp.down_proj.weight, expected)
    if native.library() is None:
        pytest.skip("the native kernels are not built")
    opened = pippin.load(path, device="cpu")
    kept = opened.module.layers[0].mlp.down_proj
    if ggml_quants.kernel_kind(kind) in native.GGML_FORMATS or kind.startswith("TQ"):
        assert opened.notes == ()
        assert torch.equal(kept.dense_weight().float(), expected)
        assert kept.packed.nbytes < expected.numel() * 1.1
    else:
        (note,) = opened.notes
        assert note.startswith("GGUF: 7 matrices are widened to BF16 and take ")
        assert note.endswith(f": there are no kernels for {kind}")
        assert torch.equal(kept.dense_weight().float(), expected.bfloat16().float())


@torch.inference_mode()
def test_a_model_in_parts_is_opened_by_its_first_or_its_folder(exported, tmp_path):
    model, path = exported("mixtral")
    folder = tmp_path / "parts"
    folder.mkdir()
    rewritten(path, folder / "m.gguf", parts=10)
    first = sorted(folder.iterdir())[0]
    for reference in (first, folder):
        again = pippin.load(reference, device="cpu", dtype="float32", pack=False)
        torch.testing.assert_close(again.module(IDS), model.module(IDS), rtol=0, atol=1e-6)
    sorted(folder.iterdir())[2].unlink()
    with pytest.raises(ModelNotFound, match=r"of 5 parts of the model are missing: m-00003-of-00005\.gguf"):
        pippin.load(folder)


@torch.inference_mode()
def test_fused_tensors_are_read_in_any_family(exported, tmp_path):
    def fused(tensors):
        tensors = dict(tensors)
        for layer in range(4):
            parts = [tensors.pop(f"blk.{layer}.attn_{part}.weight") for part in "qkv"]
            tensors[f"blk.{layer}.attn_qkv.weight"] = np.concatenate(parts)
            gates = [tensors.pop(f"blk.{layer}.ffn_{part}_exps.weight") for part in ("gate", "up")]
            tensors[f"blk.{layer}.ffn_gate_up_exps.weight"] = np.concatenate(gates, axis=1)
        return tensors

    model, path = exported("mixtral")
    again = pippin.load(
        rewritten(path, tmp_path / "fused.gguf", tensors=fused), device="cpu", dtype="float32", pack=False
    )
    torch.testing.assert_close(again.module(IDS), model.module(IDS), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("case", "metadata", "error", "message"),
    [
        ("llama", {"general.architecture": "lama4"}, UnsupportedModel, "nearest that are: llama"),
        ("llama", {"llama.embedding_length": 33}, CorruptedFile, r"embedding_length is 33, token_embd.weight has 32"),
        ("llama", {"llama.block_count": 1_000_000_000}, CorruptedFile, "block_count must be .* got 1000000000"),
        ("llama", {"llama.block_count": 1000}, CorruptedFile, "1000 layers cannot lie in"),
        ("llama", {"llama.block_count": 3}, CorruptedFile, "does not fit its configuration"),
        ("llama", {"llama.attention.head_count": 0}, CorruptedFile, "contradicts itself"),
        ("llama", {"llama.attention.head_count": [4, 4, 2, 4]}, UnsupportedModel, "layers with different attention"),
        ("mixtral", {"llama.expert_count": 4_000_000_000}, CorruptedFile, "expert_count is 4000000000, but .* of 3"),
        (
            "mixtral",
            {"llama.expert_used_count": 4},
            CorruptedFile,
            "num_experts_per_tok must be an integer from 1 to 3",
        ),
        ("llama", {"llama.expert_count": 8}, CorruptedFile, "expert_count is 8, but there is no tensor ffn_down_exps"),
        ("llama", {"llama.rope.scaling.type": "spiral"}, UnsupportedModel, "rope scaling 'spiral' is not supported"),
        ("llama", {"llama.rope.dimension_count": 10}, CorruptedFile, "10 of 8 dimensions"),
        ("llama, stretched", {"llama.rope.dimension_count": 4}, CorruptedFile, "4 divisors of frequencies for 4 dim"),
        ("qwen2", {"qwen2.attention.sliding_window": 0.5}, CorruptedFile, "sliding_window' is 0.5, expected int"),
        ("olmo", {"olmo.attention.clamp_kqv": 8.0}, UnsupportedModel, "clip_qkv=8.0"),
        ("gemma2", {"gemma2.attention.sliding_window_pattern": [True]}, CorruptedFile, "1 windows are given for 4"),
        ("apertus", {"xielu.alpha_p": None}, CorruptedFile, "'xielu.alpha_p' is None, expected 4 numbers"),
        ("apertus", {"xielu.beta": [0.5, 0.5]}, CorruptedFile, r"'xielu.beta' is \[0.5, 0.5\], expected 4 numbers"),
        (
            "nemotron_h, experts",
            {"nemotron_h_moe.moe_latent_size": 16},
            UnsupportedModel,
            "moe_latent_size=16 is not supported for the nemotron_h family",
        ),
        (
            "nemotron_h, experts",
            {"nemotron_h_moe.feed_forward_length": [0, 20]},
            CorruptedFile,
            "2 entries for 4 layers",
        ),
        (
            "kimi_linear",
            {"kimi-linear.expert_gating_func": 1},
            UnsupportedModel,
            "expert_gating_func 1 is not supported",
        ),
        ("kimi_linear", {"kimi-linear.kda.head_dim": 8}, CorruptedFile, "does not fit its configuration"),
        ("kimi_linear", {"kimi-linear.attention.head_count_kv": [0] * 4}, UnsupportedModel, "not recurrent alone"),
        ("kimi_linear", {"kimi-linear.attention.head_count_kv": [1] * 4}, UnsupportedModel, "not attention alone"),
        ("kimi_linear", {"kimi-linear.kda.head_dim": None}, CorruptedFile, "kimi-linear.kda.head_dim"),
        (
            "qwen3",
            {"qwen3.attention.causal": None, "qwen3.context_length": None},
            CorruptedFile,
            "qwen3.context_length",
        ),
    ],
)
def test_headers_that_contradict_themselves_are_refused(exported, case, metadata, error, message, tmp_path):
    path = rewritten(exported(case)[1], tmp_path / "changed.gguf", metadata=metadata)
    with pytest.raises(error, match=message):
        pippin.load(path, device="cpu")


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("qwen2", {"head_dim": 16}, "4 heads of 16 are not 32 wide"),
        ("qwen3", {"output_bias": True}, "llama.cpp has no biases of its attention output layers"),
        ("gemma2", {"attention_scale": 0.7}, "attention_scale is 0.7, GGUF would say None"),
        ("exaone4", {"window": 6}, "windows of exaone4 models in that of 64 layers only"),
        ("olmoe", {"num_key_value_heads": 2}, "as many key and value heads as query heads"),
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob is False, GGUF would say True"),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(exported, case, changes, message, tmp_path):
    config = exported(case)[0].config
    first = config.layers[0]
    if "window" in changes:
        changes = {"layers": (replace(first, attention=AttentionSpec(window=6)), *config.layers[1:])}
    if "norm_topk_prob" in changes:
        inner = replace(first.feedforward, norm_topk_prob=False)
        changes = {"layers": tuple(replace(layer, feedforward=inner) for layer in config.layers)}
    config = replace(config, **changes)
    with pytest.raises(UnsupportedModel, match=message):
        _plan(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 0, "router": RouterSpec()}, "no nemotron_h models with both experts and dense"),
        ({"shared_intermediate_size": 0}, "no nemotron_h models with experts of which none is shared"),
        ({"activation": "silu"}, "activation is silu, GGUF would say relu2"),
        ({"gated": True}, "gated is True, GGUF would say False"),
        ({"router": RouterSpec()}, "scores is softmax, GGUF would say sigmoid"),
    ],
)
def test_experts_of_nemotron_that_llama_cpp_lacks_are_refused(exported, changes, message):
    config = exported("nemotron_h, experts")[0].config
    last = config.layers[-1]
    layers = (*config.layers[:-1], replace(last, feedforward=replace(last.feedforward, **changes)))
    with pytest.raises(UnsupportedModel, match=message):
        _plan(replace(config, layers=layers))


@torch.inference_mode()
def test_a_layer_of_nemotron_that_only_drafts_is_not_read(exported, tmp_path):
    """llama.cpp's converter appends it: attention and experts in one layer, which the lists by layer describe, too."""
    model, path = exported("nemotron_h, experts")
    more = {"block_count": 5, "nextn_predict_layers": 1, "feed_forward_length": [0, 20, 0, 20, 20]}
    more["attention.head_count_kv"] = [0, 0, 2, 0, 2]

    def appended(tensors):
        found = {name: tensors[name] for name in tensors if name.startswith(("blk.2.", "blk.3."))}
        return tensors | {f"blk.4.{name[6:]}": values for name, values in found.items()}

    metadata = {f"nemotron_h_moe.{key}": value for key, value in more.items()}
    again = pippin.load(
        rewritten(path, tmp_path / "drafts.gguf", metadata=metadata, tensors=appended),
        device="cpu",
        dtype="float32",
        pack=False,
    )
    assert len(again.module.layers) == 4
    torch.testing.assert_close(again.module(IDS), model.module(IDS), rtol=0, atol=3e-4)


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("last", {"num_experts": 0, "router": RouterSpec()}, "dense layers before those with experts only"),
        ("feedforward", {"norm_topk_prob": False}, "norm_topk_prob is False, GGUF would say True"),
        ("feedforward", {"shared_intermediate_size": 0}, "models with shared experts only"),
        ("latent", {"q_rank": 8}, "models without latent vectors of queries only"),
        ("recurrent", {"key_heads": 2, "value_heads": 2}, "recurrent.value_heads is 2, GGUF would say 4"),
        ("recurrent", {"channel_rank": 8}, "recurrent.channel_rank is 8, GGUF would say 16"),
    ],
)
def test_what_llama_cpp_lacks_of_kimi_linear_is_refused(exported, part, changes, message):
    config = exported("kimi_linear")[0].config
    layers = list(config.layers)
    for index, layer in enumerate(layers):
        attention, inner = layer.attention, layer.feedforward
        if part == "recurrent" and layer.recurrent is not None:
            layers[index] = replace(layer, recurrent=replace(layer.recurrent, **changes))
        elif part == "latent" and attention.latent is not None:
            layers[index] = replace(layer, attention=replace(attention, latent=replace(attention.latent, **changes)))
        elif inner.num_experts and (part == "feedforward" or (part == "last" and index == 3)):
            layers[index] = replace(layer, feedforward=replace(inner, **changes))
    with pytest.raises(UnsupportedModel, match=message):
        _plan(replace(config, layers=tuple(layers)))


@torch.inference_mode()
def test_older_files_of_kimi_linear_have_fewer_dimensions_and_one_matrix(exported, tmp_path):
    model, path = exported("kimi_linear")
    spec = model.config.layers[2].attention.latent

    def older(tensors):
        for name in list(tensors):
            if "conv1d" in name:
                tensors[name] = tensors[name][0]
            elif name.endswith("ssm_a"):
                tensors[name] = tensors[name].reshape(-1, 1)
        keys = tensors.pop("blk.2.attn_k_b.weight").transpose(0, 2, 1)
        both = np.concatenate([keys, tensors.pop("blk.2.attn_v_b.weight")], 1)
        return tensors | {"blk.2.attn_kv_b.weight": both.reshape(-1, spec.kv_rank)}

    again = pippin.load(
        rewritten(path, tmp_path / "older.gguf", tensors=older), device="cpu", dtype="float32", pack=False
    )
    torch.testing.assert_close(again.module(IDS), model.module(IDS), rtol=0, atol=3e-4)


def _plan(config):
    """The check of an export, with the shapes of a decoder on no device."""
    with torch.device("meta"):
        module = Decoder(config)
    return export._describe(config, export._entries(module, "F32", {}))


@torch.inference_mode()
def test_windows_that_llama_cpp_lacks_are_kept_and_said(exported, merging, tmp_path, capfd):
    model, _ = exported("mistral")
    layers = tuple(replace(layer, attention=replace(layer.attention, window=6)) for layer in model.config.layers)
    local = Decoder(replace(model.config, layers=layers))
    local.load_state_dict(model.module.state_dict())
    path = export_gguf(LanguageModel("local", local, merging.tokenizer, None), tmp_path / "model.gguf", "F32")
    assert "llama.cpp has no windows for llama models" in capfd.readouterr().err
    again = pippin.load(path, device="cpu", dtype="float32", pack=False)
    torch.testing.assert_close(again.module(IDS), local(IDS), rtol=0, atol=1e-6)
    assert again.config.layers[0].attention.window == 6


def test_a_family_that_llama_cpp_lacks_is_refused(tmp_path):
    config = families.from_hf({"model_type": "llama", **_MINIMAL})
    with pytest.raises(UnsupportedModel, match=r"llama\.cpp has no helium models, so GGUF has none; it has apertus"):
        families.to_gguf(replace(config, family="helium"))


_MINIMAL = {
    "vocab_size": 8,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 8,
}


def test_sizes_of_experts_come_from_older_keys_too():
    header = GGUFHeader(
        "file",
        {
            "general.architecture": "qwen2moe",
            **{
                f"qwen2moe.{key}": value
                for key, value in {
                    "block_count": 1,
                    "context_length": 8,
                    "embedding_length": 8,
                    "feed_forward_length": 32,
                    "attention.head_count": 2,
                    "attention.layer_norm_rms_epsilon": 1e-6,
                    "expert_count": 4,
                    "expert_used_count": 2,
                }.items()
            },
        },
        {"token_embd.weight": (8, 8), "blk.0.ffn_down_exps.weight": (4, 8, 16)},
        lambda name: torch.ones(0),
    )
    inner = families.from_gguf(header).layers[0].feedforward
    assert (inner.intermediate_size, inner.shared_intermediate_size, inner.norm_topk_prob) == (16, 32, False)
