"""Decoders with recurrent layers: packed rows, saving and loading, what may be trained and what is refused."""

import json
from dataclasses import replace

import pytest
import torch

import pippin
from pippin.core.errors import CorruptedFile, InvalidArgument, UnsupportedModel
from pippin.data.token_batches import TokenBatch
from pippin.language import Decoder, DecoderConfig, LanguageModel, LayerSpec, families
from pippin.language.adapter_files import target_modules
from pippin.language.objectives import NextToken
from pippin.language.presets import preset
from pippin.nn.attention.attention import AttentionSpec
from pippin.nn.feedforward.feedforward import NO_FEED_FORWARD
from pippin.nn.kv_cache import PackedDocuments
from pippin.nn.recurrent.layer import RecurrentSpec
from pippin.nn.recurrent.states import RecurrentState
from pippin.train import AdamW, Trainer

from .recurrents import FEED, GRU, LAYERS, PLAIN, recurrent_decoder


@pytest.fixture(params=LAYERS)
def module(request):
    return recurrent_decoder(request.param)


def some_ids(rows, length, seed=0):
    return torch.randint(257, (rows, length), generator=torch.Generator().manual_seed(seed))


def test_cached_decoding_equals_the_whole_pass(module):
    ids, cache = some_ids(2, 30), RecurrentState()
    expected = module(ids)
    parts = [module(part, cache=cache) for part in ids.split([13, 1, 1, 15], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), expected, atol=2e-5, rtol=1e-4)
    ids[:, 0] += torch.where(ids[:, 0] > 100, -1, 1)
    assert float((module(ids) - expected)[:, 6:].abs().max()) > 1e-2  # what came first still matters


def test_packed_documents_equal_each_alone(module):
    counts = [5, 1, 18, 2, 9]
    ids = some_ids(1, sum(counts))
    together = module(ids, cache=PackedDocuments(counts))
    alone = torch.cat([module(part) for part in ids.split(counts, 1)], 1)
    torch.testing.assert_close(together, alone, atol=2e-5, rtol=1e-4)


def test_padded_rows_equal_each_alone():
    module, ids = recurrent_decoder("mixed"), some_ids(3, 20)
    logits = module(ids, padding=torch.tensor([0, 3, 17]))
    for row, pads in enumerate((0, 3, 17)):
        expected = module(ids[row : row + 1, pads:])
        torch.testing.assert_close(logits[row : row + 1, pads:], expected, atol=2e-5, rtol=1e-4)


def test_a_saved_model_is_the_same_when_it_is_opened(module, tiny, tmp_path):
    module.config = replace(module.config, embedding_scale=1.0)  # models of this family have no other
    LanguageModel("small", module, tiny.tokenizer, None).save(tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert (config["model_type"], config["base_model_type"]) == ("pippin_recurrent", "llama")
    plain = pippin.load(tmp_path / "saved", device="cpu", dtype="float32", pack=False)
    assert plain.config == module.config
    ids = some_ids(1, 25)
    expected = Decoder(plain.config).eval()
    expected.load_state_dict(module.state_dict())
    wanted = expected(ids).detach()
    assert torch.equal(plain.module(ids), wanted)
    packed = pippin.load(tmp_path / "saved", device="cpu", dtype="float32")
    torch.testing.assert_close(packed.module(ids), wanted, atol=2e-5, rtol=1e-4)
    half = pippin.load(tmp_path / "saved", device="cpu", dtype="bfloat16", pack=False).module.requires_grad_(False)
    assert half(ids).dtype == torch.bfloat16
    assert float((half(ids).float() - wanted).std()) < 0.1 * float(wanted.std())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"recurrent": [{"cell": "gru"}]}, "contradicts itself"),
        ({"recurrent": [{"heads": 0}, None]}, "heads must be at least 1, got 0"),
        ({"recurrent": [{"gates": 3}, None]}, "gates"),
        ({"recurrent": None}, "contradicts itself"),
    ],
)
def test_a_damaged_description_is_refused(change, message):
    config = families.to_hf(replace(recurrent_decoder("gru").config, embedding_scale=1.0))
    with pytest.raises(CorruptedFile, match=message):
        families.from_hf(config | change)
    del config["recurrent"]
    with pytest.raises(CorruptedFile, match="no 'recurrent', which the model needs"):
        families.from_hf(config)


def test_training_on_packed_documents_learns_what_only_a_state_can_hold():
    """The last token of a document repeats its first one: a layer without convolution sees one token and its state."""
    layer = LayerSpec.recurring(RecurrentSpec(conv=1), FEED)
    config = DecoderConfig(
        "llama", 16, 32, (layer,), num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=64
    )
    module = Decoder(config).initialize(seed=0)

    def batches():
        generator = torch.Generator().manual_seed(0)
        while True:
            rows = torch.randint(4, (32, 4), generator=generator)
            rows[:, 1:-1] += 4
            rows[:, -1] = rows[:, 0] + 8
            wanted = rows[:, 1:].clone()
            wanted[:, :-1] = -100
            yield TokenBatch(rows[:, :-1].reshape(1, -1), wanted.reshape(1, -1), (3,) * 32)

    Trainer(module, NextToken(), batches(), steps=60, optimizer=AdamW(lr=2e-2), seed=0, show_progress=False).fit()
    batch = next(batches())
    loss = NextToken()(module.eval(), batch)
    assert float(loss.metrics["accuracy"]) / loss.count > 0.95  # chance is 0.25
    solved = module.layers[0].recurrent.cell.last_solve
    assert solved.iterations > 0
    assert not solved.fell_back


def test_presets_of_the_same_name_but_for_the_cell():
    config = preset("nano-lstm", 300)
    assert config.recurrent_layers == (0, 1, 2, 3)
    assert config.cached_layers == ()
    # three inputs of the convolution and the two halves of the cell's state, four layers of 128, in float32
    assert config.state_bytes == 4 * 4 * 128 * (3 + 2)
    with pytest.raises(InvalidArgument, match="preset must be 'nano', 'small', 'base', 'nano-gru'"):
        preset("nano-rnn", 300)


def test_adapters_reach_the_projections_of_recurrent_layers():
    found = dict(target_modules(recurrent_decoder("mixed")))
    assert (found["layers.0.recurrent.in_proj"].outputs, found["layers.0.recurrent.out_proj"].outputs) == (64, 32)
    assert {"layers.1.self_attn.q_proj", "layers.2.recurrent.in_proj", "layers.2.mlp.down_proj"} <= found.keys()


def test_what_recurrent_layers_cannot_do_is_refused(tiny, tmp_path):
    from pippin.shape.export.decoder import capture_decoder
    from pippin.shape.export.gguf import export_gguf
    from pippin.shape.quantize.calibration import check_calibration

    module = recurrent_decoder("mixed")
    with pytest.raises(InvalidArgument, match=r"a layer that attends to nothing cannot have AttentionSpec\(window=3"):
        LayerSpec(AttentionSpec(window=3), FEED, RecurrentSpec(), attends=False)
    with pytest.raises(InvalidArgument, match="a layer needs attention, a recurrence or a feed-forward layer"):
        LayerSpec(AttentionSpec(rotary=None), NO_FEED_FORWARD, attends=False)
    with pytest.raises(InvalidArgument, match="a layer of one part has its norm before it"):
        Decoder(
            replace(module.config, residual="post", layers=(LayerSpec.recurring(RecurrentSpec(), NO_FEED_FORWARD),))
        )
    with pytest.raises(InvalidArgument, match="layer 1 reads layer 0, which is not an earlier layer with its own keys"):
        replace(module.config, layers=(GRU, replace(PLAIN, attention=AttentionSpec(kv_source=0))))
    with pytest.raises(UnsupportedModel, match=r"GGUF has no place for layers\.0\.recurrent\..* of a llama model"):
        export_gguf(LanguageModel("small", module, tiny.tokenizer, None), tmp_path / "model.gguf")
    with pytest.raises(InvalidArgument, match="layer 0 is recurrent, and exported programs keep"):
        capture_decoder(module, context=64)
    with pytest.raises(InvalidArgument, match="layer 0 is recurrent, and calibration goes through layers that attend"):
        check_calibration(module, some_ids(1, 8))
