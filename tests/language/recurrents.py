"""Small decoders with recurrent layers, alone and among layers that attend."""

from dataclasses import replace

from pippin.language import Decoder, DecoderConfig, LayerSpec
from pippin.nn.attention.attention import AttentionSpec
from pippin.nn.feedforward.feedforward import FeedForwardSpec
from pippin.nn.recurrent.layer import RecurrentSpec

FEED = FeedForwardSpec(48)
GRU, LSTM = (LayerSpec.recurring(RecurrentSpec(cell), FEED) for cell in ("gru", "lstm"))
WINDOW, PLAIN = (LayerSpec(AttentionSpec(window=window), FEED) for window in (9, None))

# all layers recurrent; attention between them; and attention around one, with a layer that reads another's keys
LAYERS = {
    "gru": (GRU, GRU),
    "mixed": (GRU, WINDOW, LSTM),
    "shared": (PLAIN, GRU, replace(PLAIN, attention=AttentionSpec(kv_source=0))),
}


def recurrent_decoder(name, **fields):
    """Random weights, large enough for the layers to matter."""
    sizes = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "embedding_scale": 3.0,
    }
    config = DecoderConfig("llama", 257, layers=LAYERS[name], **(sizes | fields))
    module = Decoder(config).initialize(seed=1).requires_grad_(False).eval()
    for layer, parameter in module.named_parameters():
        if "_proj" in layer:
            parameter *= 8
    return module
