"""A random two-layer model over bytes, for tests and fuzzing: no file is read."""

from __future__ import annotations

from tokenizers import Tokenizer as Backend, decoders, models, pre_tokenizers

from pippin.data.text.chat_template import ChatTemplate
from pippin.data.text.tokenizer import Tokenizer
from pippin.language import Decoder, DecoderConfig, LanguageModel, LayerSpec
from pippin.nn.attention import AttentionSpec
from pippin.nn.feedforward import FeedForwardSpec


def build(max_position_embeddings: int = 2048) -> LanguageModel:
    """The model: every token is one byte, id 256 ends an answer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_end|>", "<|im_start|>"])
    tokenizer = Tokenizer(backend, eos_ids=[256])
    layer = LayerSpec(AttentionSpec(), FeedForwardSpec(48))
    config = DecoderConfig(
        "llama",
        260,
        32,
        (layer, layer),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=max_position_embeddings,
    )
    template = ChatTemplate(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        tokenizer,
    )
    return LanguageModel("tiny", Decoder(config).initialize(seed=0).eval(), tokenizer, template)
