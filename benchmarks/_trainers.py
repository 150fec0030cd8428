"""The training loops that are compared, each in its own process (`_sides.Side`).

Notable here:
- every side starts from the same file of weights, reads the same batches and has the same AdamW, clipping and precision
- the peers are written as their own documentation writes them, with the fused optimizer, which is their fastest
- losses are recorded, to detect a side that does less work than the others
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

CLIP = 1.0
RATE = 1e-3
BETAS = (0.9, 0.95)


@dataclass(frozen=True)
class Shape:
    """A Llama decoder and its training batches; by default 30.3 million weights."""

    vocabulary: int = 32_000
    width: int = 384
    layers: int = 12
    heads: int = 6
    kv_heads: int = 2
    inner: int = 960
    rows: int = 8
    length: int = 512

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.rows * self.length

    def batches(self) -> Iterator[Any]:
        """Token ids (rows, length + 1), with skewed frequencies, so that there is something to learn."""
        import torch

        generator = torch.Generator().manual_seed(0)
        share = 1 / (torch.arange(self.vocabulary) + 10.0)
        while True:
            drawn = torch.multinomial(share, self.rows * (self.length + 1), replacement=True, generator=generator)
            yield drawn.view(self.rows, self.length + 1)


@dataclass(frozen=True)
class Ran:
    """Losses and time of some steps."""

    losses: list[float]
    seconds: float


class Loop:
    """Interface of all sides: threads, steps and peak memory."""

    def threads(self, count: int) -> None:
        """Set the number of threads."""
        import torch

        torch.set_num_threads(count)

    def run(self, steps: int) -> Ran:
        """Run further steps."""
        began = time.perf_counter()
        losses = self._advance(steps)
        return Ran(losses, time.perf_counter() - began)

    def peak(self) -> float:
        """Peak memory in MB."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6

    def _advance(self, steps: int) -> list[float]:
        raise NotImplementedError


def our_decoder(shape: Shape) -> Any:
    """Pippin's decoder with random weights."""
    from pippin.language.decoder import Decoder
    from pippin.language.decoder_config import DecoderConfig, LayerSpec
    from pippin.nn.attention.attention import AttentionSpec
    from pippin.nn.feedforward.feedforward import FeedForwardSpec

    layer = LayerSpec(AttentionSpec(), FeedForwardSpec(shape.inner))
    config = DecoderConfig(
        "llama",
        shape.vocabulary,
        shape.width,
        (layer,) * shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.width // shape.heads,
        max_position_embeddings=shape.length,
    )
    return Decoder(config).initialize(seed=0)


def write_weights(shape: Shape, path: str) -> int:
    """Write the random weights under the names of Hugging Face; returns their number."""
    from safetensors.torch import save_file

    weights = {f"model.{name}": value.data for name, value in our_decoder(shape).named_parameters()}
    save_file(weights, path)
    return sum(weight.numel() for weight in weights.values())


class Ours(Loop):
    """Pippin's decoder, objective and trainer."""

    def __init__(self, shape: Shape, weights: str, precision: str) -> None:
        from safetensors.torch import load_file

        from pippin.data.token_batches import TokenBatch
        from pippin.language.objectives import NextToken
        from pippin.train.optimizers import AdamW
        from pippin.train.schedules import ConstantSchedule
        from pippin.train.trainer import Trainer

        model = our_decoder(shape)
        model.load_state_dict({k.removeprefix("model."): v for k, v in load_file(weights).items()}, strict=False)
        self.trainer = Trainer(
            model,
            NextToken(),
            (TokenBatch(ids[:, :-1], ids[:, 1:]) for ids in shape.batches()),
            steps=1_000_000,
            optimizer=AdamW(lr=RATE, betas=BETAS, weight_decay=0.0),
            schedule=ConstantSchedule(),
            max_grad_norm=CLIP,
            precision=precision,
            device="cpu",
            show_progress=False,
        )

    def _advance(self, steps: int) -> list[float]:
        return list(self.trainer.advance(steps))


class Accelerate(Loop):
    """transformers and accelerate, in the loop of accelerate's own introduction."""

    def __init__(self, shape: Shape, weights: str, precision: str) -> None:
        import torch
        from accelerate import Accelerator
        from safetensors.torch import load_file
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=shape.vocabulary,
            hidden_size=shape.width,
            intermediate_size=shape.inner,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            max_position_embeddings=shape.length,
            rms_norm_eps=1e-6,
            tie_word_embeddings=True,
            use_cache=False,
        )
        model = LlamaForCausalLM(config)
        missing, extra = model.load_state_dict(load_file(weights), strict=False)
        assert {*missing, *extra} <= {"lm_head.weight"}, (missing, extra)
        self.accelerator = Accelerator(mixed_precision="bf16" if precision == "bfloat16" else "no", cpu=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=BETAS, weight_decay=0.0, fused=True)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.model.train()
        self.batches = shape.batches()

    def _advance(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            drawn = next(self.batches)
            # the library moves labels by one itself: the whole rows go in, and the loss is over rows x length tokens
            loss = self.model(input_ids=drawn[:, :-1], shift_labels=drawn[:, 1:].contiguous(), labels=drawn).loss
            self.accelerator.backward(loss)
            self.accelerator.clip_grad_norm_(self.model.parameters(), CLIP)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


class LitGPT(Loop):
    """litgpt, in the loop of its `pretrain.py`."""

    def __init__(self, shape: Shape, weights: str, precision: str) -> None:
        import lightning
        import torch
        from litgpt.config import Config
        from litgpt.model import GPT
        from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama
        from safetensors.torch import load_file

        config = Config(
            name="llama",
            block_size=shape.length,
            padded_vocab_size=shape.vocabulary,
            vocab_size=shape.vocabulary,
            n_layer=shape.layers,
            n_head=shape.heads,
            n_query_groups=shape.kv_heads,
            n_embd=shape.width,
            intermediate_size=shape.inner,
            rotary_percentage=1.0,
            parallel_residual=False,
            bias=False,
            norm_class_name="RMSNorm",
            norm_eps=1e-6,
            mlp_class_name="LLaMAMLP",
        )
        self.fabric = lightning.Fabric(
            accelerator="cpu", devices=1, precision="bf16-mixed" if precision == "bfloat16" else "32-true"
        )
        model = GPT(config)
        model.transformer.wte.weight = model.lm_head.weight  # as pretrain.py ties them
        state: dict[str, torch.Tensor] = {}
        copy_weights_hf_llama(config, {}, state, load_file(weights))
        missing, extra = model.load_state_dict(state, strict=False)
        assert {*missing, *extra} <= {"lm_head.weight"}, (missing, extra)
        model.max_seq_length = shape.length
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=BETAS, weight_decay=0.0, fused=True)
        self.model, self.optimizer = self.fabric.setup(model, optimizer)
        self.batches = shape.batches()

    def _advance(self, steps: int) -> list[float]:
        from litgpt.utils import chunked_cross_entropy

        losses = []
        for _ in range(steps):
            drawn = next(self.batches)
            loss = chunked_cross_entropy(self.model(drawn[:, :-1].contiguous()), drawn[:, 1:].contiguous())
            self.fabric.backward(loss)
            self.fabric.clip_gradients(self.model, self.optimizer, max_norm=CLIP)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses
