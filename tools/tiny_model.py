"""A random two-layer model over bytes, for tests and fuzzing: no file is read."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer as Backend, decoders, models, pre_tokenizers

from pippin.data.text.chat_template import ChatTemplate
from pippin.data.text.tokenizer import Tokenizer
from pippin.language import Decoder, DecoderConfig, LanguageModel, LayerSpec
from pippin.nn.attention.attention import AttentionSpec
from pippin.nn.feedforward.feedforward import FeedForwardSpec

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build(
    max_position_embeddings: int = 2048,
    *,
    control: Sequence[str] = ("<|im_end|>", "<|im_start|>"),
    template: str = CHATML,
) -> LanguageModel:
    """The model: every token is one byte, or one of the control tokens, of which the first (id 256) ends an answer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(control))
    tokenizer = Tokenizer(backend, eos_ids=[256])
    layer = LayerSpec(AttentionSpec(), FeedForwardSpec(48))
    config = DecoderConfig(
        "llama",
        max(260, 256 + len(control)),
        32,
        (layer, layer),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=max_position_embeddings,
    )
    decoder = Decoder(config).initialize(seed=0).eval()
    return LanguageModel("tiny", decoder, tokenizer, ChatTemplate(template, tokenizer))
