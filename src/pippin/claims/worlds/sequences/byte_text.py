"""Real text and small models of its bytes, for claims about language models that are trained within the claim.

Notable here:
- the text is the source of Python's standard library, which every installation has: of ten files in order of name, one
  is held out and one is for validation, by which learning rates are chosen
- a token is a byte, so losses are in nats per byte and comparable between models
- a batch depends on the seed and its index alone: models trained with one seed see the same text in the same order
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from jaxtyping import Int
from tokenizers import Tokenizer as Backend, decoders, models, pre_tokenizers
from torch import Tensor

from pippin.core.errors import InvalidArgument
from pippin.data.text.tokenizer import Tokenizer
from pippin.data.token_batches import TokenBatch
from pippin.language import Decoder, LanguageModel
from pippin.language.methods.afm import AFMConfig

if TYPE_CHECKING:
    from pippin.language.decoder_config import DecoderConfig
    from pippin.train.objective import Objective

T = TypeVar("T")

END = 256
"""The token that ends a file; the others are bytes."""
VOCABULARY = 257
EVERY = 10
"""One file of so many is held out."""
TUNING_SEED = 50
"""Of the runs that only choose a learning rate; no figure comes from them."""


@dataclass(frozen=True)
class ByteText:
    """Concatenated files, each followed by `END`."""

    train: Int[Tensor, train_bytes]
    held_out: Int[Tensor, held_out_bytes]


@cache
def byte_text(*, validation: bool = False) -> ByteText:
    """The top-level modules of the standard library, in order of name.

    Args:
        validation: use the validation files in place of the held-out ones.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    texts = [path.read_bytes() for path in sorted(folder.glob("*.py"), key=lambda path: path.name)]
    files = [torch.tensor(np.array(bytearray(text) + b"\0"), dtype=torch.long) for text in texts]
    for file in files:
        file[-1] = END
    train = [file for index, file in enumerate(files) if index % EVERY not in (0, EVERY // 2)]
    return ByteText(torch.cat(train), torch.cat(files[EVERY // 2 if validation else 0 :: EVERY]))


class ByteBatches:
    """Endless batches of random windows of the training text.

    Args:
        rows: batch size.
        length: predicted bytes of each sequence.
        seed: two streams of one seed yield the same batches.
        text: None for `byte_text`.

    Raises:
        InvalidArgument: the text is too short for the length.
    """

    def __init__(self, rows: int, length: int, seed: int, text: ByteText | None = None) -> None:
        self.rows, self.length, self.seed, self.batches = rows, length, seed, 0
        self.bytes = (byte_text() if text is None else text).train
        if length >= len(self.bytes):
            raise InvalidArgument(f"stretches of {length} bytes do not fit in a text of {len(self.bytes)}")

    def __iter__(self) -> Iterator[TokenBatch]:
        """Yield batches from the current one on."""
        while True:
            generator = torch.Generator().manual_seed((self.seed << 32) + self.batches)
            starts = torch.randint(len(self.bytes) - self.length, (self.rows, 1), generator=generator)
            rows = self.bytes[starts + torch.arange(self.length + 1)]
            self.batches += 1
            yield TokenBatch(rows[:, :-1], rows[:, 1:])

    def state_dict(self) -> dict[str, Any]:
        """The number of batches so far."""
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        self.batches = int(state["batches"])


def byte_config(
    *, layers: int = 8, width: int = 64, shared: int = 0, heads: int = 4, kv_heads: int = 2, qk_norm: bool = True
) -> DecoderConfig:
    """Config of a small byte decoder in the style of AFM; the last ``shared`` layers have no KV cache."""
    return AFMConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        num_hidden_layers=layers,
        num_kv_shared_layers=shared,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=width // heads,
        intermediate_size=3 * width,
        rope_theta=10_000.0,
        max_position_embeddings=4096,
        qk_norm=qk_norm,
    ).decoder()


def byte_decoder(config: DecoderConfig, *, seed: int) -> Decoder:
    """Initialize at four times the scale of `Decoder.initialize`, which is meant for widths near 1,000."""
    module = Decoder(config).initialize(seed=seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4.0)
    return module


def train_bytes(
    module: Decoder,
    *,
    steps: int,
    seed: int,
    rows: int = 8,
    length: int = 128,
    lr: float = 3e-3,
    objective: Objective | None = None,
    text: ByteText | None = None,
) -> Decoder:
    """Train in place on random windows of the text: AdamW, cosine schedule, 10 % warm-up, gradient norm clipped at 1.

    Args:
        module: an initialized model.
        steps: optimizer steps.
        seed: seed of the windows.
        rows: batch size.
        length: bytes of each sequence.
        lr: peak learning rate.
        objective: training objective; None for the likelihood of the next byte.
        text: None for `byte_text`.
    """
    from pippin.claims.worlds.training import fit
    from pippin.language.objectives import NextToken

    batches = ByteBatches(rows, length, seed, text)
    fit(module, objective or NextToken(), batches, steps=steps, seed=seed, lr=lr, warmup=0.1)
    return module


@torch.no_grad()
def held_out_nats(module: Decoder, *, length: int = 256, limit: int = 65_536, text: ByteText | None = None) -> float:
    """Mean loss on the held-out text in nats per byte, over windows spread evenly over it.

    Args:
        module: a byte model.
        length: bytes of a window; the first is given, the others are predicted.
        limit: most bytes to evaluate.
        text: None for `byte_text`.
    """
    held_out = (byte_text() if text is None else text).held_out
    rows = held_out[: len(held_out) // length * length].view(-1, length)
    rows = rows[:: max(1, len(rows) * length // limit)][: max(1, limit // length)]
    total = 0.0
    for part in rows.split(16):
        logits = module(part[:, :-1])
        total += float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum"))
    return total / (rows.shape[0] * (length - 1))


def tuned(
    train: Callable[[int, float], T],
    rates: Sequence[float],
    seeds: Sequence[int],
    *,
    loss: Callable[[T], float] | None = None,
) -> Iterator[tuple[int, T]]:
    """Yield each seed with a model that is trained at the best of several learning rates.

    The best rate has the lowest validation loss on a separate seed; a single rate is used untried.

    Args:
        train: trains a new model with a seed and a rate.
        rates: learning rates to try.
        seeds: seeds to train.
        loss: validation loss of a model; None for that of the next byte.
    """

    def validated(rate: float) -> float:
        model: Any = train(TUNING_SEED, rate)
        return loss(model) if loss else held_out_nats(model, limit=16_384, text=byte_text(validation=True))

    rate = min(rates, key=validated) if len(rates) > 1 else rates[0]
    for seed in seeds:
        yield seed, train(seed, rate)


def byte_model(module: Decoder, name: str = "bytes") -> LanguageModel:
    """The decoder with a byte tokenizer, for the engine."""
    alphabet = _byte_characters()
    backend = Backend(models.BPE({character: byte for byte, character in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>"])
    return LanguageModel(name, module, Tokenizer(backend, eos_ids=[END]), None)


def _byte_characters() -> list[str]:
    """The characters that represent bytes 0 to 255 in byte-level tokenizers.

    Printable bytes are themselves, the others are the characters from 256 on (GPT-2's table).
    """
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in shown else next(others)) for byte in range(256)]
