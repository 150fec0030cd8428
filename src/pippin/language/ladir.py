r"""LaDiR: a language model that thinks in blocks of vectors, which a flow refines, and writes only the answer as text.

Notable here:
- one pass teaches everything: question, clean blocks and answer once, and behind them any number of noisy copies of
  each block, which see the question, the clean blocks before theirs, and themselves
- tokens of one block see each other in both directions; a mask over the ids of blocks says so for any number of them
- in a sample, the question and the finished blocks are kept as keys and values, and only the block at work is computed
- samples of one question can push each other apart: the force enters the step of the latents, away from neighbours
- noise is drawn for each question and sample by itself: an answer does not depend on what else is asked with it
- marks (begin, end, answer) are vectors of the model: no tokenizer needs a new token
"""

from __future__ import annotations

import copy
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from pippin.core.errors import (
    ContextOverflow,
    InvalidArgument,
    NotPrepared,
    VocabularyMismatch,
)
from pippin.language.load import LanguageModel
from pippin.language.thought_blocks import (
    MARKS,
    Answer,
    Layout,
    State,
    Thinking,
    ThoughtBatch,
    block_bidirectional_mask,
    check_sampling,
    normal_velocity,
    own_noise,
    repulsion,
)
from pippin.language.thoughts import ThoughtVAE, begin, check_layers, embedding_size, end_of, padded, write
from pippin.nn.cache import Past, Visible
from pippin.nn.linear import Linear
from pippin.nn.time_embedding import TimedHead, TimeEmbedding

BOT, EOT, SOA = range(3)


class Taught(NamedTuple):
    """What one pass over a batch gives."""

    velocity: Float[Tensor, "rows blocks copies tokens width"]
    """Of every noisy copy."""
    more: Float[Tensor, "rows blocks"]
    """Logits: whether a block is followed by another."""
    answer: Float[Tensor, "rows answer inner"]
    """Hidden states, as the output matrix reads them, that the answer's tokens are read from."""


class LatentReasoner(nn.Module):
    """A decoder with weights of its own, a frozen autoencoder of thoughts, and what joins them.

    Args:
        model: the language model to begin from; not packed.
        vae: fitted, of the same vocabulary; it is frozen.
        max_blocks: of one thought.
        null_share: of questions that are hidden in training, for guidance.
        max_answer: tokens of an answer.
        seed: of the new weights.

    Raises:
        InvalidArgument: numbers out of range, a packed model, a tokenizer without an end token.
        NotPrepared: the autoencoder was not fitted.
        VocabularyMismatch: the autoencoder counts with other tokens.
        UnsupportedLayer: layers that see a window only, or that are no attention.

    Source: Kang et al. 2025, "LaDiR", arXiv:2510.04573.
    """

    taught: Tensor

    def __init__(
        self,
        model: LanguageModel,
        vae: ThoughtVAE,
        *,
        max_blocks: int = 8,
        null_share: float = 0.1,
        max_answer: int = 64,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if max_blocks < 1 or max_answer < 1 or not 0 <= null_share < 1:
            raise InvalidArgument(
                f"max_blocks ({max_blocks}) and max_answer ({max_answer}) must be at least 1, null_share from 0 to "
                f"below 1 and not {null_share}"
            )
        check_layers(model)
        token = model.tokenizer.first_difference(vae.tokenizer)
        if token is not None or vae.decoder.config.vocab_size != model.config.vocab_size:
            raise VocabularyMismatch(
                f"{model.name} and the autoencoder differ in token {token}; use one model for both"
            )
        if not vae.calibrated:
            raise NotPrepared("the autoencoder was never fitted; see pippin.language.ladir_training.fit_vae")
        self.name, self.tokenizer, self.end = model.name, model.tokenizer, end_of(model)
        self.max_blocks, self.null_share, self.max_answer = max_blocks, null_share, max_answer
        self.decoder = copy.deepcopy(model.module).requires_grad_(True)
        self.vae = vae.requires_grad_(False).eval()
        inner = model.config.width
        self.up = Linear(vae.width, inner, bias=True)
        self.marks = nn.Parameter(torch.empty(3, inner))
        self.null = nn.Parameter(torch.empty(inner))
        self.time = TimeEmbedding(inner)
        self.head = TimedHead(inner, vae.width)
        self.more = Linear(inner, 1, bias=True)
        self.register_buffer("taught", torch.zeros((), dtype=torch.long))
        self._initialise(torch.Generator().manual_seed(seed))
        self.to(model.device)

    @torch.no_grad()
    def _initialise(self, generator: torch.Generator) -> None:
        size = embedding_size(self.decoder)
        for parameter in (self.marks, self.null):
            parameter.copy_(torch.empty(parameter.shape).normal_(0.0, size, generator=generator))
        begin(self.up, size, generator)
        self.time.initialise(generator, size=size)
        self.head.initialise()
        begin(self.more, 0.0, generator)

    def train(self, mode: bool = True) -> LatentReasoner:
        """The mode of all but the autoencoder, which stays in evaluation mode."""
        super().train(mode)
        self.vae.eval()
        return self

    @property
    def block_length(self) -> int:
        """Positions of a block: its latents and their marks."""
        return self.vae.tokens + MARKS

    # --- one pass for training ----------------------------------------------------------------------------------------

    def teach(
        self,
        batch: ThoughtBatch,
        noisy: Float[Tensor, "rows blocks copies tokens width"],
        t: Float[Tensor, "rows blocks copies"],
        hidden: Bool[Tensor, rows],
    ) -> Taught:
        """Velocities of noisy copies of the blocks, and what follows from the clean ones.

        Args:
            batch: the problems.
            noisy: copies of their latents, on the way to noise.
            t: the time of each copy, 0 clean, 1 noise.
            hidden: questions of which the first token is shown only.
        """
        rows, blocks, copies = t.shape
        tokens, inside, size = self.vae.tokens, self.vae.tokens + 2, self.block_length
        time = self.time(t)
        clean = self._block(batch.latents, self.time(t.new_zeros(rows, blocks)))
        end = self.marks[EOT].expand(rows, blocks, 1, -1)
        soa = self.marks[SOA].expand(rows, 1, -1)
        x = torch.cat(
            [
                self.question(batch.questions, batch.padding, hidden),
                torch.cat([clean, end], 2).flatten(1, 2),
                torch.cat([soa, self.decoder.embed(batch.answers[:, :-1])], 1),
                self._block(noisy, time).flatten(1, 3),
            ],
            1,
        )
        question, answer = batch.questions.shape[1], batch.answers.shape[1]
        layout = Layout(question, blocks, answer, copies, tokens, x.device)
        states = self.decoder.norm(self.decoder.through(x, layout.cache(batch.padding, batch.counts)))
        stop = question + blocks * size
        ends = states[:, question:stop].unflatten(1, (blocks, size))[:, :, -1]
        copied = states[:, stop + answer :].unflatten(1, (blocks, copies, inside))[:, :, :, 2:]
        velocity = normal_velocity(noisy, t) + self.head(copied, time)
        return Taught(velocity, self.more(ends)[..., 0].float(), states[:, stop : stop + answer])

    def question(
        self, ids: Int[Tensor, "rows question"], padding: Int[Tensor, rows], hidden: Bool[Tensor, rows]
    ) -> Float[Tensor, "rows question inner"]:
        """What enters the first layer for questions; of a hidden one, its first token and the null vector."""
        x = self.decoder.embed(ids)
        later = torch.arange(ids.shape[1], device=ids.device) > padding[:, None]
        return torch.where((later & hidden[:, None])[..., None], self.null.to(x.dtype), x)

    def _block(
        self, z: Float[Tensor, "*batch tokens width"], time: Float[Tensor, "*batch inner"]
    ) -> Float[Tensor, "*batch inside inner"]:
        """Begin, time and latents of blocks."""
        start = self.marks[BOT].expand_as(time)
        return torch.cat([start[..., None, :], time[..., None, :], self.up(z.to(time.dtype))], -2)

    # --- trajectories -------------------------------------------------------------------------------------------------

    def start(self, ids: Int[Tensor, "rows question"], padding: Int[Tensor, rows], hidden: Bool[Tensor, rows]) -> State:
        """Read questions, padded on the left; arguments as in `question`."""
        past, place = Past(), torch.arange(ids.shape[1], device=ids.device)
        real = place >= padding[:, None]
        mask = block_bidirectional_mask(torch.full_like(ids, -1), real)[:, None]
        cache = Visible(mask, past, positions=(place - padding[:, None]).clamp(min=0), keep=True)
        self.decoder.through(self.question(ids, padding, hidden), cache)
        cache.advance(ids.shape[1])
        return State(past, real, ids.shape[1] - padding)

    def velocity(
        self, state: State, z: Float[Tensor, "rows tokens width"], t: float
    ) -> Float[Tensor, "rows tokens width"]:
        """The flow's velocity of the next block, which leaves no trace in ``state``."""
        times = torch.full((len(z),), t, device=z.device)
        time = self.time(times)
        hidden = self._pass(state, self._block(z, time), keep=False)
        own: Tensor = self.head(hidden[:, 2:], time)
        return normal_velocity(z, times) + own

    def denoise(
        self,
        states: Sequence[State],
        z: Float[Tensor, "rows tokens width"],
        *,
        steps: int,
        guidance: float = 1.0,
        push: Callable[[Tensor, float], Tensor] | None = None,
        on_step: Callable[[int, Tensor], None] | None = None,
    ) -> Float[Tensor, "rows tokens width"]:
        r"""From noise at $t = 1$ to latents at $t = 0$, by Euler's rule in float32: $z \leftarrow z - \Delta t\, u$.

        Args:
            states: the trajectories; a second one, with hidden questions, for guidance.
            z: the noise.
            steps: equal parts of the way.
            guidance: w in $u = u_0 + w (u_1 - u_0)$; read where there is a second state.
            push: added to minus the velocity: a force on latents at a time.
            on_step: called with the number of the step, from 1, and where the latents would end.
        """
        z = z.float()
        for step in range(steps):
            t = 1.0 - step / steps
            u = self.velocity(states[0], z, t)
            if len(states) > 1:
                plain = self.velocity(states[1], z, t)
                u = plain + guidance * (u - plain)
            if on_step is not None:
                on_step(step + 1, z - t * u)
            if push is not None:
                u = u - push(z, t)
            z = z - u / steps
        return z

    def append(
        self, state: State, z: Float[Tensor, "rows tokens width"], alive: Bool[Tensor, rows]
    ) -> Float[Tensor, rows]:
        """Keep a clean block; for trajectories that are not ``alive`` any more, it is never seen.

        Returns:
            Logits: whether another block follows.
        """
        time = self.time(torch.zeros(len(z), device=z.device))
        x = torch.cat([self._block(z, time), self.marks[EOT].expand(len(z), 1, -1)], 1)
        hidden = self._pass(state, x, keep=True)
        state.seen = torch.cat([state.seen, alive[:, None].expand(-1, x.shape[1])], 1)
        state.places = state.places + x.shape[1] * alive
        logits: Tensor = self.more(hidden[:, -1])[:, 0].float()
        return logits

    def follow(self, state: State, answers: Int[Tensor, "rows answer"]) -> Float[Tensor, "rows answer inner"]:
        """Hidden states that the tokens of given answers are read from."""
        soa = self.marks[SOA].expand(len(answers), 1, -1)
        return self._pass(state, torch.cat([soa, self.decoder.embed(answers[:, :-1])], 1), keep=False, causal=True)

    def _pass(self, state: State, x: Tensor, *, keep: bool, causal: bool = False) -> Tensor:
        """New tokens behind what is kept, as a block or as text; normalised hidden states."""
        rows, new = x.shape[:2]
        place = torch.arange(new, device=x.device)
        inside = (place >= 2) & (place < 2 + self.vae.tokens) & (not causal)
        own = block_bidirectional_mask(torch.where(inside, 0, -1)[None]).expand(rows, -1, -1)
        mask = torch.cat([state.seen[:, None].expand(-1, new, -1), own], 2)[:, None]
        cache = Visible(mask, state.past, positions=state.places[:, None] + place, keep=keep)
        hidden: Tensor = self.decoder.norm(self.decoder.through(x.to(self.decoder.embed_tokens.dtype), cache))
        cache.advance(new)
        return hidden

    # --- answers ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def generate(
        self,
        questions: Sequence[str],
        *,
        steps: int = 30,
        samples: int = 1,
        guidance: float = 1.0,
        init_std: float = 1.0,
        diversity: float = 0.0,
        max_blocks: int | None = None,
        return_thoughts: bool = False,
        seed: int | None = None,
        at_once: int = 512,
        on_step: Callable[[Thinking], None] | None = None,
    ) -> list[Answer]:
        r"""Think, and write the answers; the samples of a question follow each other.

        Args:
            questions: not empty each.
            steps: of Euler's rule for each block: more of them think more carefully.
            samples: answers to each question.
            guidance: 1 takes the model's velocity as it is; more moves away from that of a hidden question.
            init_std: of the noise that a thought begins as; about 2 gives more varied thoughts.
            diversity: $\gamma$: samples of one question push each other apart with $\gamma t F$ (see `repulsion`).
                The force is a part of the velocity, so its effect does not grow with the number of steps.
            max_blocks: of a thought; None for the model's own bound.
            return_thoughts: whether the blocks are given, too: as text, and as latents.
            seed: of the noise, which is drawn for each question and sample by itself; None for a new one.
            at_once: trajectories computed together; the samples of one question always are.
            on_step: told of each step, for each group of ``at_once`` trajectories.

        Raises:
            InvalidArgument: a number out of range, fewer than two samples with diversity, no or empty questions.
            ContextOverflow: a question that leaves no room for thought and answer.
        """
        limit = self.max_blocks if max_blocks is None else max_blocks
        check_sampling(steps, samples, guidance, init_std, diversity, limit, at_once)
        ids = [self.encode_question(question, limit) for question in questions]
        if not ids:
            raise InvalidArgument("there is no question to answer")
        seed = secrets.randbelow(1 << 62) if seed is None else seed
        answers: list[Answer] = []
        training = self.training
        self.eval()
        try:
            size = max(1, at_once // samples)
            for first in range(0, len(ids), size):
                part = slice(first, first + size)
                shape = (limit, self.vae.tokens, self.vae.width)
                noise = init_std * own_noise(questions[part], samples, shape, seed).to(self.marks.device)
                answers += self._answer(
                    questions[part], ids[part], noise, steps, guidance, diversity, on_step, read=return_thoughts
                )
        finally:
            self.train(training)
        return answers

    @torch.no_grad()
    def conclude(self, questions: Sequence[str], thoughts: Sequence[Float[Tensor, "_ tokens width"]]) -> list[str]:
        """The answers that follow thoughts of another origin: edited ones (`ThoughtVAE.encode`), or another question's.

        Args:
            questions: not empty each.
            thoughts: for each question the latents of at least one block, in units of the data.

        Raises:
            InvalidArgument: not one thought for each question, latents of another size, an empty question.
            ContextOverflow: a question that leaves no room.
        """
        size = (self.vae.tokens, self.vae.width)
        if len(questions) != len(thoughts) or not questions:
            raise InvalidArgument(f"{len(thoughts)} thoughts for {len(questions)} questions; give one for each")
        for z in thoughts:
            if z.ndim != 3 or len(z) < 1 or tuple(z.shape[1:]) != size:
                raise InvalidArgument(f"a thought of shape {tuple(z.shape)}; blocks of {size} are needed")
        counts = torch.tensor([len(z) for z in thoughts], device=self.marks.device)
        ids = [self.encode_question(question, len(z)) for question, z in zip(questions, thoughts, strict=True)]
        state = self._begin(ids, 1, guided=False)[0]
        for block in range(int(counts.max())):
            z = torch.stack([z[min(block, len(z) - 1)] for z in thoughts]).to(counts.device)
            self.append(state, z, block < counts)
        return [self.tokenizer.decode(answer) for answer in self._write(state)]

    def encode_question(self, question: str, max_blocks: int | None = None) -> list[int]:
        """Tokens of a question.

        Raises:
            InvalidArgument: an empty question.
            ContextOverflow: it leaves no room for ``max_blocks`` (None: the model's own bound) and an answer.
        """
        blocks = self.max_blocks if max_blocks is None else max_blocks
        ids = self.tokenizer.encode(question)
        if not ids:
            raise InvalidArgument("a question is empty")
        if self.tokenizer.add_bos and self.tokenizer.bos_id is not None:
            ids = [self.tokenizer.bos_id, *ids]
        needed, room = len(ids) + blocks * self.block_length + 1 + self.max_answer, self.decoder.config.max_context
        if needed > room:
            raise ContextOverflow(
                f"a question of {len(ids)} tokens, {blocks} blocks and an answer need {needed} tokens, and the model "
                f"was made for {room}; shorten the question or lower max_blocks",
                context_size=room,
                token_count=needed,
            )
        return ids

    def _answer(
        self,
        questions: Sequence[str],
        ids: Sequence[Sequence[int]],
        noise: Float[Tensor, "rows blocks tokens width"],
        steps: int,
        guidance: float,
        diversity: float,
        on_step: Callable[[Thinking], None] | None,
        *,
        read: bool,
    ) -> list[Answer]:
        """The answers to some questions, all of their samples together."""
        samples = len(noise) // len(ids)
        states = self._begin(ids, samples, guided=guidance != 1.0)
        alive = torch.ones(len(noise), dtype=torch.bool, device=noise.device)
        counts, thoughts = torch.zeros_like(alive, dtype=torch.long), list[Tensor]()

        def push(z: Tensor, t: float) -> Tensor:
            groups = z.view(len(ids), samples, -1)
            return diversity * t * repulsion(groups, alive.view(len(ids), samples)).view_as(z)

        for block in range(noise.shape[1]):

            def tell(step: int, estimate: Tensor, block: int = block) -> None:
                if on_step is not None:
                    on_step(Thinking(block, step, steps, estimate))

            z = self.denoise(
                states,
                noise[:, block],
                steps=steps,
                guidance=guidance,
                push=push if diversity > 0 else None,
                on_step=None if on_step is None else tell,
            )
            more, *_ = [self.append(state, z, alive) > 0 for state in states]
            thoughts.append(z)
            counts, alive = counts + alive, alive & more
            if not alive.any():
                break
        written = self._write(states[0])
        texts = [self.vae.decode(z) if read else [] for z in thoughts]
        return [
            Answer(
                questions[row // samples],
                row % samples,
                self.tokenizer.decode(answer),
                count,
                not unfinished,
                tuple(text[row] for text in texts[:count]) if read else (),
                torch.stack([z[row] for z in thoughts[:count]]) if read else None,
            )
            for row, (answer, count, unfinished) in enumerate(
                zip(written, counts.tolist(), alive.tolist(), strict=True)
            )
        ]

    def _begin(self, ids: Sequence[Sequence[int]], samples: int, *, guided: bool) -> list[State]:
        """Questions read once and handed to each of their samples; a second time hidden, where there is guidance."""
        device = self.marks.device
        rows = padded(ids, self.end, left=True).to(device)
        padding = torch.tensor([rows.shape[1] - len(row) for row in ids], device=device)
        states = []
        for hidden in (False, True)[: 1 + guided]:
            state = self.start(rows, padding, torch.full_like(padding, hidden, dtype=torch.bool))
            for layer, (keys, values) in state.past.layers.items():
                both = (keys.repeat_interleave(samples, 0), values.repeat_interleave(samples, 0))
                state.past.layers[layer] = both
            state.seen = state.seen.repeat_interleave(samples, 0)
            state.places = state.places.repeat_interleave(samples, 0)
            states.append(state)
        return states

    def _write(self, state: State) -> list[list[int]]:
        """The answers that follow thoughts, the likeliest token each time."""
        soa = self.marks[SOA].to(self.decoder.embed_tokens.dtype).expand(len(state.places), 1, -1)
        ends = self.tokenizer.eos_ids
        return write(self.decoder, soa, state.past, state.seen, state.places, ends=ends, longest=self.max_answer)

    # --- files ------------------------------------------------------------------------------------------------------

    def save(self, folder: str | Path) -> None:
        """Write a folder that `load` reads; see `pippin.language.ladir_files`.

        Raises:
            UnsupportedModel: rotary frequencies that have no Hugging Face configuration.
            DiskFull: nothing was written.
        """
        from pippin.language.ladir_files import save  # which builds on this module

        save(self, folder)

    @classmethod
    def load(cls, folder: str | Path, *, device: str | None = None) -> LatentReasoner:
        """Read what `save` wrote; errors as in `pippin.language.ladir_files.load`."""
        from pippin.language.ladir_files import load

        return load(folder, device=device)
