"""Tracks beside decoders of their own, run one by one and joined by hand."""

from dataclasses import replace
from itertools import pairwise

import pytest
import tiny_model
import torch
from hypothesis import given, strategies as st
from tests.language.dense import DenseCache
from tests.language.parallel._processes import CONFIG

from pippin.core.errors import CorruptedFile, InvalidArgument, UnsupportedModel
from pippin.language import LanguageModel, PTMoEConfig, presets
from pippin.language.decoder import Decoder
from pippin.language.families.config_json import from_hf, to_hf
from pippin.nn.kv_cache import NoCache
from pippin.nn.parallel import Tracks
from pippin.nn.parallel.tracks import of_first_track, side_by_side
from pippin.shape.export.gguf import export_gguf

JOINS = {
    "mean": lambda x, outputs: torch.stack(outputs).mean(0),
    "sum": lambda x, outputs: torch.stack(outputs).sum(0),
    "delta": lambda x, outputs: x + torch.stack([each - x for each in outputs]).sum(0),
}


def made(join="mean", **sizes):
    return Decoder(replace(CONFIG, join=join, **sizes).decoder()).initialize(seed=0).eval()


def one_by_one(decoder, ids):
    """The logits of a decoder whose tracks are decoders without tracks."""
    config, tracks = decoder.config, decoder.config.tracks
    alone = []
    for track in range(tracks.num_tracks):
        own = [index for index in range(len(config.layers)) if tracks.place(index).track == track]
        one = Decoder(replace(config, layers=tuple(config.layers[index] for index in own), tracks=None))
        for layer, index in zip(one.layers, own, strict=True):
            layer.load_state_dict(decoder.layers[index].state_dict())
        alone.append(one)
    x = decoder.embed(ids)
    ends = range(0, len(alone[0].layers) + 1, tracks.block_depth)
    for layers in (range(*ends) for ends in pairwise(ends)):
        x = JOINS[tracks.join](x, [each.forward_layers(x, NoCache(), layers=layers) for each in alone])
    return decoder.logits(decoder.norm(x))


@pytest.mark.parametrize("join", JOINS)
@pytest.mark.parametrize("sizes", [{}, {"num_tracks": 3, "block_depth": 1}, {"block_depth": 4}, {"experts_every": 0}])
@torch.no_grad()
def test_a_decoder_with_tracks_is_decoders_side_by_side(join, sizes):
    decoder, ids = made(join, **sizes), torch.randint(0, 50, (2, 24))
    torch.testing.assert_close(decoder(ids), one_by_one(decoder, ids), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("join", JOINS)
@torch.no_grad()
def test_one_track_is_a_decoder_without_tracks(join):
    decoder, ids = made(join, num_tracks=1), torch.randint(0, 50, (2, 24))
    plain = Decoder(replace(decoder.config, tracks=None))
    plain.load_state_dict(decoder.state_dict())
    torch.testing.assert_close(decoder(ids), plain(ids), rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_joins_differ_and_tracks_too():
    """Or nothing above would see a join that does something else, or a track that is computed twice."""
    ids = torch.randint(0, 50, (1, 24))
    logits = [made(join)(ids) for join in JOINS]
    assert all((a - b).abs().max() > 1e-3 for a, b in pairwise([*logits, logits[0]]))
    decoder = made()
    before = decoder(ids)
    for index in (2, 3):  # the second track of the first block
        for parameter in decoder.layers[index].parameters():
            parameter.zero_()
    assert (decoder(ids) - before).abs().max() > 1e-3


@torch.no_grad()
def test_a_cache_gives_what_one_pass_gives():
    decoder, ids = made(), torch.randint(0, 50, (2, 24))
    cache = DenseCache(decoder.config, 24, batch=2)
    pieces = [decoder(piece, cache=cache) for piece in ids.split(5, 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), decoder(ids), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_layers_without_positions_are_the_global_ones():
    attention = [layer.attention for layer in of_first_track(CONFIG.decoder().layers, CONFIG.decoder().tracks)]
    assert [(spec.window, spec.rotary is None) for spec in attention] == [(6, False), (None, True)] * 2


@torch.no_grad()
def test_a_local_layer_sees_its_window_and_no_more():
    decoder = made(attention_pattern="L", num_hidden_layers=2, window=3)
    ids = torch.randint(0, 50, (1, 24))
    other = ids.clone()
    other[0, 10] = (other[0, 10] + 1) % 50
    changed = ((decoder(ids) - decoder(other)).abs().amax(-1) > 0)[0].nonzero().flatten().tolist()
    assert changed == [10, 11, 12, 13, 14]  # two layers of which each sees two tokens before


def test_no_token_is_dropped_even_where_all_take_one_expert():
    decoder = made()
    mixture = next(part for name, part in decoder.named_modules() if name == "layers.1.mlp")
    with torch.no_grad():
        mixture.gate.weight.zero_()
        mixture.gate.weight[:, 0] = torch.tensor([9.0, 5.0, -5.0, -9.0])
    x = torch.rand(1, 20, 32) + 0.5
    weights = torch.softmax(x @ mixture.gate.weight.T, -1)[..., :2]
    weights = weights / weights.sum(-1, keepdim=True)
    expected = sum(weights[..., i, None] * mixture.experts[i](x) for i in range(2))
    torch.testing.assert_close(mixture(x), expected, rtol=1e-5, atol=1e-6)


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4))
def test_layers_of_a_track_and_of_all(num_tracks, depth, blocks):
    tracks, layers = Tracks(num_tracks, depth), list(range(depth * blocks))
    every = side_by_side(layers, tracks)
    assert list(of_first_track(every, tracks)) == layers
    for index, layer in enumerate(every):
        place = tracks.place(index)
        assert place.block * depth + place.depth == layer
        assert place.track < num_tracks


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes", [{}, {"experts_every": 0}, {"experts_every": 1}, {"num_tracks": 1, "block_depth": 4, "qk_norm": True}]
)
def test_parameters_are_counted_as_they_are(sizes):
    config = replace(CONFIG, **sizes)
    with torch.device("meta"):
        decoder = Decoder(config.decoder())
    assert sum(each.numel() for each in decoder.parameters()) == config.num_parameters
    experts = [name for name, _ in decoder.named_parameters() if ".experts." in name]
    idle = sum(
        each.numel()
        for name, each in decoder.named_parameters()
        if name in experts and int(name.split(".experts.")[1].split(".")[0]) >= config.num_experts_per_tok
    )
    assert config.num_active_parameters == config.num_parameters - idle


def test_the_published_model_has_what_is_counted():
    config = PTMoEConfig.server()
    with torch.device("meta"):
        decoder = Decoder(config.decoder())
    assert sum(each.numel() for each in decoder.parameters()) == config.num_parameters == 147_803_703_296
    collectives = config.collectives()
    assert 1 - collectives.parallel_tracks / collectives.tensor_parallel == 0.875
    assert from_hf(to_hf(config.decoder())) == config.decoder()


def test_as_many_parameters_as_a_wide_decoder():
    """n tracks of width d / sqrt(n) have as many numbers in their matrices as one of width d."""
    sizes = {"vocab_size": 64, "num_hidden_layers": 8, "head_dim": 64, "experts_every": 0, "block_depth": 4}
    wide = PTMoEConfig(
        **sizes, hidden_size=1024, num_attention_heads=16, num_key_value_heads=4, intermediate_size=4096, num_tracks=1
    )
    narrow = PTMoEConfig(
        **sizes, hidden_size=512, num_attention_heads=8, num_key_value_heads=2, intermediate_size=2048, num_tracks=4
    )
    assert narrow.num_parameters == pytest.approx(wide.num_parameters, rel=2e-3)


def test_joins_are_rarer_by_the_depth_of_blocks():
    """Published: 87.5 % fewer with blocks of four layers."""
    found = [replace(CONFIG, num_hidden_layers=16, block_depth=depth).collectives() for depth in (1, 2, 4, 8)]
    saved = [1 - each.parallel_tracks / each.tensor_parallel for each in found]
    assert saved == [0.5, 0.75, 0.875, 0.9375]


@pytest.mark.parametrize("name", ["nano-pt-moe", "small-pt-moe", "base-pt-moe"])
def test_presets_have_the_parameters_for_a_token_of_the_dense_ones(name):
    from pippin.language.presets import preset

    tracks, dense = preset(name, 300), preset(name.partition("-")[0], 300)
    assert tracks.tracks is not None
    with torch.device("meta"):
        counts = [
            sum(
                p.numel()
                for n, p in Decoder(config).named_parameters()
                if ".experts." not in n or int(n.split(".experts.")[1].split(".")[0]) < presets.ACTIVE
            )
            for config in (tracks, dense)
        ]
    assert 0.6 < counts[0] / counts[1] < 1.4


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"join": "delta", "attention_pattern": "LLLG"},
        {"experts_every": 0},
        {"qk_norm": True, "router_softcap": 50.0},
    ],
)
def test_config_json_has_everything(sizes):
    config = replace(CONFIG, **sizes).decoder()
    assert from_hf(to_hf(config)) == config


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("track_join", "median", "join must be"),
        ("num_tracks", 0, "num_tracks must be at least 1"),
        ("track_block_depth", 3, "block_depth must divide the 4 layers"),
        ("num_tracks", 10**6, "num_hidden_layers of all tracks must be an integer from 1 to"),
        ("layer_types", ["full_attention"], "contradicts itself"),
        ("num_experts_per_tok", 5, "num_experts_per_tok must be an integer from 1 to 4"),
    ],
)
def test_a_file_that_contradicts_itself(field, value, message):
    with pytest.raises(CorruptedFile, match=message):
        from_hf(to_hf(CONFIG.decoder()) | {field: value})


def test_a_file_without_its_join_is_refused():
    fields = to_hf(CONFIG.decoder())
    del fields["track_join"]
    with pytest.raises(CorruptedFile, match="has no 'track_join', which the model needs"):
        from_hf(fields)


def test_there_is_no_gguf_of_tracks(tmp_path):
    model = LanguageModel("tracks", made(), tiny_model.build().tokenizer, None)
    with pytest.raises(UnsupportedModel, match="pt_moe"):
        export_gguf(model, tmp_path / "tracks.gguf", "F32", show_progress=False)
    assert not (tmp_path / "tracks.gguf").exists()


def test_other_families_have_no_tracks():
    config = replace(CONFIG.decoder(), family="mixtral")
    with pytest.raises(UnsupportedModel, match="no Hugging Face configuration"):
        to_hf(config)


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"block_depth": 3}, "block_depth must divide the 4 layers of a track, got 3"),
        ({"num_key_value_heads": 3}, r"num_attention_heads \(2\) must be a multiple of num_key_value_heads \(3\)"),
        ({"num_experts_per_tok": 5}, r"num_experts_per_tok \(5\) must be at most num_experts \(4\)"),
        ({"join": "max"}, "join must be 'mean', 'delta' or 'sum', got 'max'"),
        ({"attention_pattern": "LX"}, "attention_pattern must be letters L and G, got 'LX'"),
        ({"attention_pattern": ""}, "attention_pattern must be letters L and G, got ''"),
        ({"router_softcap": 0.0}, "router_softcap must be"),
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"num_tracks": 0}, "num_tracks must be at least 1, got 0"),
    ],
)
def test_impossible_sizes(sizes, message):
    with pytest.raises(InvalidArgument, match=message):
        replace(CONFIG, **sizes)


def test_a_part_of_a_block_cannot_be_computed():
    decoder = made()
    with pytest.raises(InvalidArgument, match="layers 0 to 3 cannot be computed alone: this decoder has 4 tracks"):
        decoder.forward_layers(decoder.embed(torch.tensor([[1]])), NoCache(), layers=range(3))


def test_layers_of_tracks_share_no_keys():
    config = CONFIG.decoder()
    with pytest.raises(InvalidArgument, match="nor layers that share keys"):
        config.with_kv_sources([None, 0, *[None] * 14])
