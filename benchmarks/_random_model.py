"""A model of about a billion random weights as a GGUF file: the shape of TinyLlama, for figures of speed only.

Notable here:
- every engine reads the same file; the tokenizer is copied from a real one, so that all of them can open it
- the weights are random Q4_1 blocks of about the size that trained ones have, so that no number overflows
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

WIDTH, LAYERS, HEADS, KV_HEADS, INNER = 2048, 22, 32, 4, 5632
BLOCK = 32
STEP = 0.004  # between two of the sixteen values of a weight, which makes their standard deviation 0.02


def write(target: Path, tokenizer_from: Path, *, layers: int = LAYERS) -> Path:
    """Write the file; ``tokenizer_from`` is a GGUF file whose tokenizer is copied."""
    source = gguf.GGUFReader(tokenizer_from)
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(2048)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_1)
    vocabulary = _copy_tokenizer(source, writer)
    writer.add_vocab_size(vocabulary)
    rng = np.random.default_rng(0)
    _add(writer, rng, "token_embd", vocabulary, WIDTH)
    for layer in range(layers):
        for name, outputs, inputs in (
            ("attn_q", WIDTH, WIDTH),
            ("attn_k", WIDTH * KV_HEADS // HEADS, WIDTH),
            ("attn_v", WIDTH * KV_HEADS // HEADS, WIDTH),
            ("attn_output", WIDTH, WIDTH),
            ("ffn_gate", INNER, WIDTH),
            ("ffn_up", INNER, WIDTH),
            ("ffn_down", WIDTH, INNER),
        ):
            _add(writer, rng, f"blk.{layer}.{name}", outputs, inputs)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(WIDTH, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _add(writer: gguf.GGUFWriter, rng: np.random.Generator, name: str, outputs: int, inputs: int) -> None:
    """A matrix of random blocks: scale, minimum and 16 bytes of codes for each 32 weights."""
    blocks = np.empty((outputs, inputs // BLOCK, 20), np.uint8)
    numbers = np.array([STEP, -7.5 * STEP], np.float16).view(np.uint8)
    blocks[..., :4] = numbers
    blocks[..., 4:] = rng.integers(0, 256, (outputs, inputs // BLOCK, 16), np.uint8)
    kind = gguf.GGMLQuantizationType.Q4_1
    writer.add_tensor(f"{name}.weight", blocks.reshape(outputs, -1), raw_dtype=kind)


def _copy_tokenizer(source: gguf.GGUFReader, writer: gguf.GGUFWriter) -> int:
    """Copy all fields of the tokenizer; returns their number."""
    count = 0
    for name, field in source.fields.items():
        if not name.startswith("tokenizer."):
            continue
        kind, *inner = field.types
        value = field.contents()
        writer.add_key_value(name, value, kind, inner[0] if inner else None)
        if name == "tokenizer.ggml.tokens":
            count = len(value)
    return count
