"""A synthetic speech codec and language models of its codes, small enough to train within a claim.

Notable here:
- the sounds are sums of gliding sinusoids under two moving resonances; a code is the nearest of a few hundred spectra
- the codebook is finer than what is heard, as in real speech codecs: many codes decode to almost equal spectra
- an answer is scored by the distance of its decoded spectra to the nearest segment of real sound
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from tokenizers import Tokenizer as Backend, decoders, models
from torch import Tensor

from pippin.claims import Scale
from pippin.data.text.tokenizer import Tokenizer
from pippin.engine import Engine, Finished, Request, SamplingOptions
from pippin.engine.speculation import Speculation, TokenGroups
from pippin.language import Decoder, DecoderConfig, LanguageModel, LayerSpec
from pippin.nn.attention.attention import AttentionSpec
from pippin.nn.feedforward.feedforward import FeedForwardSpec

BANDS, HOP, RATE = 24, 256, 16_000
STRETCH = 8
"""Frames that are compared at once, 0.13 s."""
AT_ONCE = 250
"""Sounds synthesized together."""


@dataclass(frozen=True)
class CodecSize:
    """Sizes of the codec, of training and of the evaluation.

    Args:
        codes: codes in the codebook.
        sounds: number of sounds, of which a tenth is held out.
        frames: frames of each sound.
        steps: training steps.
        answers: answers for each arm.
        prompt: codes of a held-out sound that an answer continues.
        length: codes of an answer.
    """

    codes: int
    sounds: int
    frames: int
    steps: int
    answers: int
    prompt: int
    length: int


_FULL = CodecSize(codes=1024, sounds=2500, frames=96, steps=400, answers=64, prompt=16, length=64)
SIZES = Scale.choose(
    smoke=CodecSize(codes=64, sounds=60, frames=24, steps=4, answers=2, prompt=4, length=8),
    laptop=_FULL,
    long=_FULL,
    gpu=_FULL,
)


class CodecSource:
    """Sounds, a codebook fitted to some of them, and the codes of all.

    Attributes:
        book: decoded spectra of the codes, in dB.
        codes: codes of the training sounds.
        held_out: codes of the held-out sounds, for prompts and comparison.
    """

    def __init__(self, seed: int, size: CodecSize) -> None:
        generator = torch.Generator().manual_seed(seed)
        counts = [min(AT_ONCE, size.sounds - at) for at in range(0, size.sounds, AT_ONCE)]
        spectra = torch.cat([_spectra(count, size.frames, generator) for count in counts])
        cut = size.sounds * 9 // 10
        self.book = _k_means(spectra[:cut].flatten(0, 1), size.codes, generator)
        codes = torch.stack([torch.cdist(sound, self.book).argmin(-1) for sound in spectra])
        self.codes, self.held_out = codes[:cut], codes[cut:]
        self._stretches = self._cut(self.codes[: max(50, cut // 4)])

    def distance(self, codes: Int[Tensor, "answers frames"]) -> float:
        """Mean log-spectral distance, in dB, of segments of decoded codes from the nearest segment of real sound."""
        nearest = [torch.cdist(part, self._stretches).amin(-1) for part in self._cut(codes).split(256)]
        return float(torch.cat(nearest).mean()) / math.sqrt(STRETCH * BANDS)

    def exchanged(self, groups: TokenGroups, share: float, generator: torch.Generator) -> Int[Tensor, "sounds frames"]:
        """Held-out codes, a share of them replaced by a random other member of one of their groups."""
        codes = self.held_out.clone().flatten()
        for at in torch.randperm(len(codes), generator=generator)[: round(share * len(codes))].tolist():
            group = groups.group_of(int(codes[at]))
            codes[at] = group[int(torch.randint(len(group), (), generator=generator))]
        return codes.view_as(self.held_out)

    def spread(self, groups: TokenGroups) -> float:
        """Mean log-spectral distance, in dB, between two codes of one group."""
        owner = torch.arange(groups.vocab_size).repeat_interleave(groups.sizes)
        other = groups.neighbors.long()
        pairs = owner != other
        return float((self.book[owner] - self.book[other])[pairs].square().mean(-1).sqrt().mean())

    def _cut(self, codes: Tensor) -> Tensor:
        """Half-overlapping segments of the decoded codes, each as one vector."""
        return self.book[codes].unfold(1, STRETCH, STRETCH // 2).flatten(0, 1).flatten(1)


def _spectra(count: int, frames: int, generator: torch.Generator) -> Float[Tensor, "sounds frames bands"]:
    """Log spectra in dB of synthesized sounds: 12 harmonics of a gliding pitch under two moving resonances.

    Each band of each frame has noise of 1.5 dB, like breath: inaudible, but enough to change the code.
    """
    time = torch.linspace(0, 1, (frames + 1) * HOP)

    def glide(low: float, high: float) -> Tensor:
        """A slow random curve within bounds for each sound: the mean of three cosines of random rate and phase."""
        rate, phase = torch.rand(2, count, 3, 1, generator=generator)
        walk = torch.cos(2 * math.pi * ((0.3 + 2.5 * rate) * time + phase)).mean(1)
        return (low + high) / 2 + (high - low) / 2 * walk

    pitch, resonances, loud = glide(90, 260), (glide(300, 900), glide(1000, 2800)), glide(0.1, 1.0)
    phase = (2 * math.pi / RATE) * pitch.cumsum(-1)
    wave = torch.zeros(count, len(time))
    for harmonic in range(1, 13):
        near = [torch.exp(-((harmonic * pitch - center) / 250).square()) for center in resonances]
        wave += (near[0] + near[1] + 0.02) * torch.sin(harmonic * phase)
    wave = loud * wave + 0.003 * torch.randn(wave.shape, generator=generator)
    spectrum = torch.stft(wave, 512, HOP, window=torch.hann_window(512), center=False, return_complex=True)
    power = spectrum.abs().square()[..., :frames].transpose(1, 2) @ _bands()
    return 10 * torch.log10(power + 1e-2) + 1.5 * torch.randn(power.shape, generator=generator)


def _bands() -> Float[Tensor, "bins bands"]:
    """Triangular bands, evenly spaced on the mel scale up to 4 kHz."""
    edges = 700 * (torch.linspace(0, math.log1p(4000 / 700), BANDS + 2).exp() - 1)
    hertz = torch.linspace(0, RATE / 2, 257)[:, None]
    low, middle, high = edges[:-2], edges[1:-1], edges[2:]
    return torch.minimum((hertz - low) / (middle - low), (high - hertz) / (high - middle)).clamp(min=0) + 1e-4


def _k_means(points: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Cluster centers by Lloyd's algorithm from a random sample; an empty cluster restarts at a random point."""
    points = points[torch.randperm(len(points), generator=generator)[: 60 * count]]
    centers = points[:count].clone()
    for _ in range(12):
        nearest = torch.cdist(points, centers).argmin(-1)
        sums = torch.zeros_like(centers).index_add_(0, nearest, points)
        sizes = torch.bincount(nearest, minlength=count)
        fresh = points[torch.randint(len(points), (count,), generator=generator)]
        centers = torch.where((sizes > 0)[:, None], sums / sizes.clamp(min=1)[:, None], fresh)
    return centers


def train(source: CodecSource, *, layers: int, width: int, steps: int, seed: int) -> tuple[LanguageModel, float]:
    """Train a decoder of the codes; also its loss on held-out sounds in nats per code."""
    vocab = len(source.book)
    layer = LayerSpec(AttentionSpec(), FeedForwardSpec(3 * width))
    config = DecoderConfig(
        "llama", vocab, width, (layer,) * layers, width // 32, width // 32, 32, max_position_embeddings=128
    )
    module = Decoder(config).initialize(seed=seed).train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps, pct_start=0.1)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        loss = _loss(module, source.codes[torch.randint(len(source.codes), (32,), generator=generator)])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    module.eval().requires_grad_(False)
    backend = Backend(models.BPE({f"c{code}": code for code in range(vocab)}, []))
    backend.decoder = decoders.ByteLevel()
    loss = _loss(module, source.held_out[:200])
    return LanguageModel(f"codes, {layers} layers", module, Tokenizer(backend), None), float(loss)


def _loss(module: Decoder, rows: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(module(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def groups_of_size(weight: Float[Tensor, "codes width"], size: float) -> tuple[float, TokenGroups]:
    """The threshold at which groups have at most ``size`` tokens on average, by bisection; and its groups."""
    low, high = -1.0, 1.0
    for _ in range(20):
        theta = (low + high) / 2
        large = TokenGroups.from_embeddings(weight, theta).stats()["mean_size"] > size
        low, high = (theta, high) if large else (low, theta)
    return high, TokenGroups.from_embeddings(weight, high)


def write(
    model: LanguageModel, source: CodecSource, speculation: Speculation | None, *, seed: int, size: CodecSize
) -> tuple[Int[Tensor, "answers frames"], Sequence[Finished]]:
    """Continue held-out sounds with the engine: the codes, and the outcome of each request."""
    engine = Engine(model, max_num_seqs=16, max_waiting=size.answers)
    prompts = source.held_out[torch.arange(size.answers) % len(source.held_out), : size.prompt].tolist()
    streams = [
        engine.stream(
            Request(
                prompt,
                SamplingOptions(temperature=1.0, seed=1000 * seed + index, max_tokens=size.length),
                speculation=speculation,
            )
        )
        for index, prompt in enumerate(prompts)
    ]
    rows: list[list[int]] = []
    ends: list[Finished] = []
    for stream in streams:
        rows.append([])
        for event in stream:
            if isinstance(event, Finished):
                ends.append(event)
            else:
                rows[-1].append(event.id)
    engine.close()
    return torch.tensor(rows), ends
