r"""The latent reasoner: a language model that generates its thought as blocks of latents, and only the answer as text.

Notable here:
- one training pass computes all losses: question, clean blocks and answer once, followed by any number of noisy copies
  of each block, which attend to the question, the clean blocks before theirs, and themselves
- in sampling, the question and the finished blocks are cached, and a step computes only the current block
- the marks around a thought (BOT, EOT, SOA) and the null question are embeddings of this model: no tokenizer needs a
  new token

Source: Kang et al. 2025, "LaDiR", arXiv:2510.04573.
"""

from __future__ import annotations

import copy
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, Final, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from pippin.core.checks import NonNegativeFloat, PositiveFloat, PositiveInt, checked
from pippin.core.errors import ContextOverflow, InvalidArgument, NotPrepared, VocabularyMismatch
from pippin.core.formats import checkpoint
from pippin.data.text.tokenizer import Tokenizer
from pippin.language.decoder import Decoder
from pippin.language.language_model import LanguageModel
from pippin.language.methods.ladir.autoencoder import (
    ThoughtVAE,
    embedding_rms,
    end_id,
    initialize_linear,
    pad,
)
from pippin.language.methods.ladir.config import LatentReasonerConfig
from pippin.language.methods.ladir.sample import (
    DenoisingStep,
    ReasonerAnswer,
    Velocity,
    decode_text,
    denoise,
    repulsion,
    sample_noise,
)
from pippin.language.methods.ladir.sequence import (
    NUM_MARKS,
    SequenceLayout,
    ThoughtBatch,
    block_bidirectional_mask,
)
from pippin.nn.images.time_embedding import TimedHead, TimeEmbedding
from pippin.nn.kv_cache import MaskedCache, PastKeyValues
from pippin.nn.linear import Linear
from pippin.nn.packed_layers import check_not_packed

BOT: Final = 0
"""Begin of thought, before a block."""
EOT: Final = 1
"""End of thought, after a block; its hidden state predicts whether another block follows."""
SOA: Final = 2
"""Start of answer."""


class ReasonerOutput(NamedTuple):
    """The output of a training pass over a batch."""

    velocity: Float[Tensor, "batch blocks copies tokens latent"]
    """Predicted velocity of every noisy copy."""
    continues: Float[Tensor, "batch blocks"]
    """Logits of "another block follows", at the EOT of each clean block."""
    answer: Float[Tensor, "batch answer hidden"]
    """Normalized hidden states that the answer's tokens are predicted from."""


@dataclass
class TrajectoryState:
    """The cache of a batch of trajectories: keys and values, which of them each attends to, and the next positions."""

    past: PastKeyValues
    seen: Bool[Tensor, "batch cached"]
    positions: Int[Tensor, batch]


class LatentReasoner(nn.Module):
    """A decoder with its own weights, a frozen `ThoughtVAE`, and the projections between them.

    Parameters are uninitialized until a checkpoint is loaded; `from_language_model` creates one for training.

    Args:
        config: sizes.
        tokenizer: tokenizer of the language model; its first end token ends an answer.

    Attributes:
        trained_steps: optimizer steps of teacher forcing so far.

    Raises:
        InvalidArgument: a tokenizer without an end token.

    Source: Kang et al. 2025, "LaDiR", arXiv:2510.04573, section 3.
    """

    model_type: ClassVar = "pippin_ladir"

    trained_steps: Tensor

    def __init__(self, config: LatentReasonerConfig, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.config, self.tokenizer, self.end_id = config, tokenizer, end_id(tokenizer)
        hidden, latent = config.decoder.hidden_size, config.vae.latent_size
        self.decoder = Decoder(config.decoder)
        self.vae = ThoughtVAE(config.vae, tokenizer)
        self.up_proj = Linear(latent, hidden, bias=True)
        self.marks = nn.Parameter(torch.empty(NUM_MARKS, hidden))
        self.null_embedding = nn.Parameter(torch.empty(hidden))
        self.time_embedding = TimeEmbedding(hidden)
        self.velocity_head = TimedHead(hidden, latent)
        self.continue_head = Linear(hidden, 1, bias=True)
        self.register_buffer("trained_steps", torch.zeros((), dtype=torch.long))
        self._freeze()

    @classmethod
    def from_language_model(
        cls,
        model: LanguageModel,
        vae: ThoughtVAE,
        *,
        max_blocks: int = 8,
        max_answer_length: int = 64,
        null_prob: float = 0.1,
        seed: int = 0,
    ) -> LatentReasoner:
        """A reasoner that begins from a language model.

        Args:
            model: a language model that is not packed.
            vae: a fitted autoencoder with the same vocabulary; it becomes a part of the reasoner and is frozen.
            max_blocks: blocks of a thought.
            max_answer_length: tokens of an answer, its end token included.
            null_prob: probability with which training hides a question, for classifier-free guidance.
            seed: seed of the new weights.

        Raises:
            InvalidArgument: a number out of range, a packed model, a tokenizer without an end token.
            NotPrepared: the autoencoder was not fitted.
            VocabularyMismatch: the autoencoder has another vocabulary.
            UnsupportedLayer: sliding windows or recurrent layers.
        """
        check_not_packed(model.module, model.name)
        config = LatentReasonerConfig(model.config, vae.config, max_blocks, max_answer_length, null_prob)
        token = model.tokenizer.first_difference(vae.tokenizer)
        if token is not None or vae.config.decoder.vocab_size != model.config.vocab_size:
            raise VocabularyMismatch(
                f"{model.name} and the autoencoder differ in token {token}; use one model for both"
            )
        if not vae.is_fitted:
            raise NotPrepared("the autoencoder was never fitted; see pippin.language.methods.ladir.fit_vae")
        reasoner = cls(config, model.tokenizer)
        reasoner.decoder = copy.deepcopy(model.module).requires_grad_(True)
        reasoner.vae = vae
        reasoner._freeze()
        reasoner._initialize(torch.Generator().manual_seed(seed))
        return reasoner.to(model.device)

    def _freeze(self) -> None:
        self.vae.requires_grad_(False).eval()

    @torch.no_grad()
    def _initialize(self, generator: torch.Generator) -> None:
        size = embedding_rms(self.decoder)
        for parameter in (self.marks, self.null_embedding):
            parameter.copy_(torch.empty(parameter.shape).normal_(0.0, size, generator=generator))
        initialize_linear(self.up_proj, size, generator)
        self.time_embedding.initialize(generator, size=size)
        self.velocity_head.initialize()
        initialize_linear(self.continue_head, 0.0, generator)

    def train(self, mode: bool = True) -> LatentReasoner:
        """Set the mode of all but the autoencoder, which stays in evaluation mode."""
        super().train(mode)
        self.vae.eval()
        return self

    def save(self, path: str | Path) -> None:
        """Write the reasoner, its autoencoder and its tokenizer to a folder that `load` reads.

        Raises:
            DiskFull: nothing was written.
        """
        checkpoint.save(self, path, model_type=self.model_type, config=self.config, tokenizer=self.tokenizer)

    @classmethod
    def load(cls, path: str | Path, *, device: str | None = None) -> LatentReasoner:
        """Read what `save` wrote.

        Args:
            path: the folder.
            device: as `pippin.load` takes it.

        Raises:
            ModelNotFound: there is no such folder.
            UnsupportedModel: it holds another kind of model.
            CorruptedFile: a file is damaged, or tensors do not fit the config.
        """

        def build(saved: checkpoint.SavedModel[LatentReasonerConfig]) -> LatentReasoner:
            with torch.device("meta"):
                return cls(saved.config, Tokenizer.from_folder(saved.path))

        return checkpoint.load(path, build, model_type=cls.model_type, config_type=LatentReasonerConfig, device=device)

    # --- a training pass ----------------------------------------------------------------------------------------------

    def forward(
        self,
        batch: ThoughtBatch,
        noisy: Float[Tensor, "batch blocks copies tokens latent"],
        t: Float[Tensor, "batch blocks copies"],
        hide_question: Bool[Tensor, batch],
    ) -> ReasonerOutput:
        """Velocities of noisy copies of the blocks, and the predictions that follow the clean ones.

        Args:
            batch: the problems.
            noisy: noisy copies of their latents.
            t: the time of each copy, 0 clean, 1 noise.
            hide_question: whether a question is replaced by the null embedding.
        """
        batch_size, blocks, copies = t.shape
        time = self.time_embedding(t)
        clean = self._embed_block(batch.latents, self.time_embedding(t.new_zeros(batch_size, blocks)))
        eot = self.marks[EOT].expand(batch_size, blocks, 1, -1)
        soa = self.marks[SOA].expand(batch_size, 1, -1)
        x = torch.cat(
            [
                self._embed_question(batch.questions, batch.padding, hide_question),
                torch.cat([clean, eot], 2).flatten(1, 2),
                torch.cat([soa, self.decoder.embed(batch.answers[:, :-1])], 1),
                self._embed_block(noisy, time).flatten(1, 3),
            ],
            1,
        )
        question, answer, block_size = batch.questions.shape[1], batch.answers.shape[1], self.config.vae.block_size
        layout = SequenceLayout(question, blocks, answer, copies, block_size, x.device)
        hidden = self.decoder.norm(self.decoder.forward_layers(x, layout.cache(batch.padding, batch.num_blocks)))
        # split in the order of the concatenation; a noisy copy has no EOT
        stop = question + blocks * self.block_length
        at_eot = hidden[:, question:stop].unflatten(1, (blocks, self.block_length))[:, :, -1]
        in_copies = hidden[:, stop + answer :].unflatten(1, (blocks, copies, block_size + 2))[:, :, :, 2:]
        velocity = normal_velocity(noisy, t) + self.velocity_head(in_copies, time)
        return ReasonerOutput(velocity, self.continue_head(at_eot)[..., 0].float(), hidden[:, stop : stop + answer])

    @property
    def block_length(self) -> int:
        """Positions of a block: its thought tokens, BOT, time and EOT."""
        return self.config.vae.block_size + NUM_MARKS

    def _embed_question(
        self, ids: Int[Tensor, "batch question"], padding: Int[Tensor, batch], hide: Bool[Tensor, batch]
    ) -> Float[Tensor, "batch question hidden"]:
        """Embeddings of questions; of a hidden one, its first token and then the null embedding."""
        x = self.decoder.embed(ids)
        after_first = torch.arange(ids.shape[1], device=ids.device) > padding[:, None]
        return torch.where((after_first & hide[:, None])[..., None], self.null_embedding.to(x.dtype), x)

    def _embed_block(
        self, z: Float[Tensor, "*batch tokens latent"], time: Float[Tensor, "*batch hidden"]
    ) -> Float[Tensor, "*batch block hidden"]:
        """Embeddings of blocks without their EOT: BOT, time, thought tokens."""
        bot = self.marks[BOT].expand_as(time)
        return torch.cat([bot[..., None, :], time[..., None, :], self.up_proj(z.to(time.dtype))], -2)

    # --- trajectories, one block after another ------------------------------------------------------------------------

    def start(
        self, ids: Int[Tensor, "batch question"], padding: Int[Tensor, batch], hide_question: Bool[Tensor, batch]
    ) -> TrajectoryState:
        """Prefill a cache with questions, padded on the left."""
        past, index = PastKeyValues(), torch.arange(ids.shape[1], device=ids.device)
        real = index >= padding[:, None]
        mask = block_bidirectional_mask(torch.full_like(ids, -1), real)[:, None]
        cache = MaskedCache(mask, past, positions=(index - padding[:, None]).clamp(min=0), keep=True)
        self.decoder.forward_layers(self._embed_question(ids, padding, hide_question), cache)
        cache.advance(ids.shape[1])
        return TrajectoryState(past, real, ids.shape[1] - padding)

    def velocity(
        self, state: TrajectoryState, z: Float[Tensor, "batch tokens latent"], t: float
    ) -> Float[Tensor, "batch tokens latent"]:
        """The flow's velocity of the next block; ``state`` does not change."""
        times = torch.full((len(z),), t, device=z.device)
        time = self.time_embedding(times)
        hidden = self._after(state, self._embed_block(z, time), keep=False)
        learned: Tensor = self.velocity_head(hidden[:, 2:], time)
        return normal_velocity(z, times) + learned

    def append(
        self, state: TrajectoryState, z: Float[Tensor, "batch tokens latent"], alive: Bool[Tensor, batch]
    ) -> Float[Tensor, batch]:
        """Add a clean block to the cache; trajectories that are not ``alive`` any more never attend to it.

        Returns:
            Logits of "another block follows".
        """
        time = self.time_embedding(torch.zeros(len(z), device=z.device))
        x = torch.cat([self._embed_block(z, time), self.marks[EOT].expand(len(z), 1, -1)], 1)
        hidden = self._after(state, x, keep=True)
        state.seen = torch.cat([state.seen, alive[:, None].expand(-1, x.shape[1])], 1)
        state.positions = state.positions + x.shape[1] * alive
        logits: Tensor = self.continue_head(hidden[:, -1])[:, 0].float()
        return logits

    def answer_states(
        self, state: TrajectoryState, answers: Int[Tensor, "batch answer"]
    ) -> Float[Tensor, "batch answer hidden"]:
        """Hidden states that the tokens of given answers are predicted from, after the thoughts in the cache."""
        soa = self.marks[SOA].expand(len(answers), 1, -1)
        return self._after(state, torch.cat([soa, self.decoder.embed(answers[:, :-1])], 1), keep=False, causal=True)

    def _after(self, state: TrajectoryState, x: Tensor, *, keep: bool, causal: bool = False) -> Tensor:
        """Normalized hidden states of new embeddings after the cached ones, as a block or (``causal``) as text."""
        batch_size, new = x.shape[:2]
        index = torch.arange(new, device=x.device)
        is_thought = (index >= 2) & (index < 2 + self.config.vae.block_size) & (not causal)
        within = block_bidirectional_mask(torch.where(is_thought, 0, -1)[None]).expand(batch_size, -1, -1)
        mask = torch.cat([state.seen[:, None].expand(-1, new, -1), within], 2)[:, None]  # (batch, 1, new, cached + new)
        cache = MaskedCache(mask, state.past, positions=state.positions[:, None] + index, keep=keep)
        hidden: Tensor = self.decoder.norm(self.decoder.forward_layers(x.to(self.decoder.embed_tokens.dtype), cache))
        cache.advance(new)
        return hidden

    # --- answers ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    @checked
    def generate(
        self,
        questions: Sequence[str],
        *,
        steps: PositiveInt = 30,
        samples: PositiveInt = 1,
        guidance: NonNegativeFloat = 1.0,
        init_std: PositiveFloat = 1.0,
        diversity: NonNegativeFloat = 0.0,
        max_blocks: PositiveInt | None = None,
        return_thoughts: bool = False,
        seed: int | None = None,
        batch_size: PositiveInt = 512,
        on_step: Callable[[DenoisingStep], None] | None = None,
    ) -> list[ReasonerAnswer]:
        r"""Generate thoughts and answers; the samples of a question are consecutive.

        Args:
            questions: questions that are not empty.
            steps: steps of Euler's method for each block.
            samples: number of answers to each question.
            guidance: scale of classifier-free guidance; 1 is the model's own velocity, 0 that of a hidden question.
            init_std: standard deviation of the initial noise; about 2 gives more varied thoughts.
            diversity: $\gamma$: samples of one question repel each other with the force $\gamma t F$ (see
                `pippin.language.methods.ladir.sample.repulsion`); it takes at least two.
            max_blocks: blocks of a thought; None for the config's.
            return_thoughts: whether answers include their thoughts, as text and as latents.
            seed: seed of the noise, which is sampled independently for each question and sample; None for a new one.
            batch_size: trajectories in a batch, which always includes all samples of a question.
            on_step: called after each step, for each batch of trajectories.

        Raises:
            InvalidArgument: a number out of range, fewer than two samples with diversity, no or empty questions.
            ContextOverflow: a question that leaves no room for thought and answer.
        """
        if diversity > 0 and samples < 2:
            raise InvalidArgument(
                f"diversity repels samples from each other, and samples is {samples}; ask for 2 or more"
            )
        limit = self.config.max_blocks if max_blocks is None else max_blocks
        ids = [self.encode_question(question, limit) for question in questions]
        if not ids:
            raise InvalidArgument("there is no question to answer")
        seed = secrets.randbelow(1 << 62) if seed is None else seed
        shape = (limit, self.config.vae.block_size, self.config.vae.latent_size)
        answers: list[ReasonerAnswer] = []
        training = self.training
        self.eval()
        try:
            size = max(1, batch_size // samples)
            for first in range(0, len(ids), size):
                part = slice(first, first + size)
                noise = init_std * sample_noise(questions[part], samples, shape, seed).to(self.marks.device)
                states = self._start_questions(ids[part], samples, guided=guidance != 1.0)
                latents, counts, complete = self._think(states, noise, samples, steps, guidance, diversity, on_step)
                texts = [self.vae.decode(z) if return_thoughts else [] for z in latents]
                for row, written in enumerate(self._decode_answers(states[0])):
                    count = counts[row]
                    answers.append(
                        ReasonerAnswer(
                            questions[first + row // samples],
                            row % samples,
                            self.tokenizer.decode(written),
                            count,
                            complete[row],
                            tuple(text[row] for text in texts[:count]) if return_thoughts else (),
                            torch.stack([z[row] for z in latents[:count]]) if return_thoughts else None,
                        )
                    )
        finally:
            self.train(training)
        return answers

    @torch.no_grad()
    def answer_from_thoughts(
        self, questions: Sequence[str], thoughts: Sequence[Float[Tensor, "_ tokens latent"]]
    ) -> list[str]:
        """The answers that follow given thoughts: edited ones (`ThoughtVAE.encode`), or those of another question.

        Args:
            questions: questions that are not empty.
            thoughts: for each question the latents of at least one block, in units of the data.

        Raises:
            InvalidArgument: not one thought for each question, latents of another shape, an empty question.
            ContextOverflow: a question that leaves no room.
        """
        shape = (self.config.vae.block_size, self.config.vae.latent_size)
        if len(questions) != len(thoughts) or not questions:
            raise InvalidArgument(f"{len(thoughts)} thoughts for {len(questions)} questions; give one for each")
        for z in thoughts:
            if z.ndim != 3 or len(z) < 1 or tuple(z.shape[1:]) != shape:
                raise InvalidArgument(f"a thought of shape {tuple(z.shape)}; blocks of {shape} are needed")
        num_blocks = torch.tensor([len(z) for z in thoughts], device=self.marks.device)
        ids = [self.encode_question(question, len(z)) for question, z in zip(questions, thoughts, strict=True)]
        state = self._start_questions(ids, 1, guided=False)[0]
        for block in range(int(num_blocks.max())):
            z = torch.stack([z[min(block, len(z) - 1)] for z in thoughts]).to(num_blocks.device)
            self.append(state, z, block < num_blocks)
        return [self.tokenizer.decode(answer) for answer in self._decode_answers(state)]

    def encode_question(self, question: str, max_blocks: int | None = None) -> list[int]:
        """Token ids of a question.

        Raises:
            InvalidArgument: an empty question.
            ContextOverflow: it leaves no room for ``max_blocks`` (None: the config's) and an answer.
        """
        blocks = self.config.max_blocks if max_blocks is None else max_blocks
        ids = self.tokenizer.encode(question)
        if not ids:
            raise InvalidArgument("a question is empty")
        if self.tokenizer.add_bos and self.tokenizer.bos_id is not None:
            ids = [self.tokenizer.bos_id, *ids]
        needed = len(ids) + blocks * self.block_length + 1 + self.config.max_answer_length
        room = self.config.decoder.max_position_embeddings
        if needed > room:
            raise ContextOverflow(
                f"a question of {len(ids)} tokens, {blocks} blocks and an answer need {needed} tokens, and the model "
                f"was made for {room}; shorten the question or lower max_blocks",
                context_size=room,
                token_count=needed,
            )
        return ids

    def _start_questions(self, ids: Sequence[Sequence[int]], samples: int, *, guided: bool) -> list[TrajectoryState]:
        """Prefill each question once for all of its samples; with guidance, a second time with the question hidden."""
        device = self.marks.device
        padded = pad(ids, self.end_id, left=True).to(device)
        padding = torch.tensor([padded.shape[1] - len(row) for row in ids], device=device)
        states = []
        for hidden in (False, True)[: 1 + guided]:
            state = self.start(padded, padding, torch.full_like(padding, hidden, dtype=torch.bool))
            for layer, (keys, values) in state.past.layers.items():
                state.past.layers[layer] = (keys.repeat_interleave(samples, 0), values.repeat_interleave(samples, 0))
            state.seen = state.seen.repeat_interleave(samples, 0)
            state.positions = state.positions.repeat_interleave(samples, 0)
            states.append(state)
        return states

    def _think(
        self,
        states: list[TrajectoryState],
        noise: Float[Tensor, "trajectories blocks tokens latent"],
        samples: int,
        steps: int,
        guidance: float,
        diversity: float,
        on_step: Callable[[DenoisingStep], None] | None,
    ) -> tuple[list[Float[Tensor, "trajectories tokens latent"]], list[int], list[bool]]:
        """Denoise block by block: latents of each block, blocks of each trajectory, and whether it is complete."""
        alive = torch.ones(len(noise), dtype=torch.bool, device=noise.device)
        counts, latents = torch.zeros_like(alive, dtype=torch.long), list[Tensor]()
        velocities: list[Velocity] = [partial(self.velocity, state) for state in states]

        def force(z: Tensor, t: float) -> Tensor:
            groups = z.view(len(z) // samples, samples, -1)
            return diversity * t * repulsion(groups, alive.view(-1, samples)).view_as(z)

        for block in range(noise.shape[1]):

            def report(step: int, estimate: Tensor, block: int = block) -> None:
                assert on_step is not None
                on_step(DenoisingStep(block, step, steps, estimate))

            z = denoise(
                velocities[0],
                noise[:, block],
                steps=steps,
                null_velocity=velocities[1] if len(states) > 1 else None,
                guidance=guidance,
                force=force if diversity > 0 else None,
                on_step=None if on_step is None else report,
            )
            continues, *_ = [self.append(state, z, alive) > 0 for state in states]
            latents.append(z)
            counts, alive = counts + alive, alive & continues
            if not alive.any():
                break
        return latents, counts.tolist(), (~alive).tolist()

    def _decode_answers(self, state: TrajectoryState) -> list[list[int]]:
        """The answers that follow the thoughts in the cache, by greedy decoding."""
        soa = self.marks[SOA].to(self.decoder.embed_tokens.dtype).expand(len(state.positions), 1, -1)
        return decode_text(
            self.decoder,
            soa,
            state.past,
            state.seen,
            state.positions,
            end_ids=self.tokenizer.eos_ids,
            max_new_tokens=self.config.max_answer_length,
        )


def normal_velocity(z: Float[Tensor, "*batch tokens latent"], t: Float[Tensor, "*batch"]) -> Tensor:
    r"""The velocity of straight paths to noise if clean latents were standard normal.

    It is $\frac{2t - 1}{(1 - t)^2 + t^2} z$; the velocity head learns the difference from it.

    >>> normal_velocity(torch.ones(2, 1, 1), torch.tensor([0.0, 1.0])).flatten().tolist()
    [-1.0, 1.0]
    """
    t = t.float()[..., None, None]
    return (2 * t - 1) / ((1 - t).square() + t.square()) * z.float()
