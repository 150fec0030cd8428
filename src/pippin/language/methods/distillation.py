r"""Distillation: a student is trained on a teacher's distribution and on the labels of the text.

Notable here:
- the teacher may be packed for inference, and then uses kernels that are faster than those for training
- both models' logits are computed for a few tokens at a time (`pippin.language.chunked_loss`)
- the target is the teacher's whole distribution, its k likeliest tokens, or (k = 1) one token, as for the published
  model
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from pippin.core.checks import PositiveFloat, PositiveInt, Probability, checked
from pippin.core.errors import VocabularyMismatch
from pippin.data.token_batches import IGNORE, TokenBatch
from pippin.language.chunked_loss import hidden_states, sum_in_chunks
from pippin.language.decoder import logits_of
from pippin.language.language_model import LanguageModel
from pippin.train.objective import Loss


class Distillation:
    r"""The objective $L = (1 - a)\, CE(\text{labels}) + a\, T^2\, CE(\text{teacher at temperature } T)$, in nats.

    Each is a mean over the tokens that have a target. The cross-entropy against the teacher differs from the divergence
    $KL(\text{teacher} \| \text{student})$ by the teacher's entropy, which is constant.

    Args:
        teacher: a decoder or a loaded model, packed or not, on the student's device; it is not trained.
        weight: $a$, from 0 (labels only) to 1 (teacher only).
        temperature: $T$ > 0; above 1, unlikely tokens have a larger weight.
        top_k: number of the teacher's likeliest tokens to use, with probabilities scaled to sum to 1; None for all.
        chunk_size: tokens whose logits are computed at once; None for as many as fit in 64 MiB.

    Metrics: ``labels`` (cross-entropy of the labels), ``divergence`` (KL from the teacher after ``top_k``),
    ``accuracy`` (fraction of labels that are the student's likeliest token).

    Raises:
        VocabularyMismatch: when called with a student of another vocabulary.

    Source: Hinton et al. 2015, arXiv:1503.02531, section 2; a = 0.9 against the teacher's likeliest token:
    Gunter et al. 2024, arXiv:2407.21075.
    """

    unit = "tokens"

    @checked
    def __init__(
        self,
        teacher: nn.Module | LanguageModel,
        weight: Probability = 0.9,
        temperature: PositiveFloat = 1.0,
        top_k: PositiveInt | None = None,
        *,
        chunk_size: int | None = None,
    ) -> None:
        self.teacher: Any = teacher.module if isinstance(teacher, LanguageModel) else teacher
        self.weight, self.temperature, self.top_k, self.chunk_size = weight, temperature, top_k, chunk_size

    def check_vocabulary(self, student: nn.Module) -> None:
        """Compare the vocabularies; also done at every call.

        Raises:
            VocabularyMismatch: they are of different size.
        """
        models: tuple[Any, Any] = (student, self.teacher)
        ours, theirs = (model.config.vocab_size for model in models)
        if ours != theirs:
            raise VocabularyMismatch(
                f"the student has {ours} tokens and the teacher {theirs}; distillation needs one vocabulary"
            )

    def __call__(self, model: nn.Module, batch: TokenBatch, generator: torch.Generator) -> Loss:
        """The loss of one batch, summed over the tokens that have a target; ``generator`` is not used."""
        self.check_vocabulary(model)
        wanted = (batch.targets != IGNORE).flatten()
        labels = batch.targets.flatten()[wanted]
        hidden = hidden_states(model, batch)[wanted]
        with torch.no_grad():
            teacher_hidden = hidden_states(self.teacher, batch)[wanted]

        def score(logits: Tensor, part: slice) -> tuple[Tensor, Mapping[str, Tensor]]:
            with torch.no_grad():
                ids, teacher_probs = self._teacher_distribution(logits_of(self.teacher, teacher_hidden[part]).float())
            return self._score(logits.float(), labels[part], ids, teacher_probs)

        total, sums = sum_in_chunks(model, hidden, score, chunk_size=self.chunk_size)
        return Loss(total, float(len(labels)), sums)

    def _teacher_distribution(
        self, logits: Float[Tensor, "part vocab"]
    ) -> tuple[Int[Tensor, "part top"] | None, Float[Tensor, "part top"]]:
        """The teacher's probabilities, and the ids of their tokens (None for all, in order)."""
        ids = None
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            logits, ids = logits.topk(self.top_k)
        return ids, (logits / self.temperature).softmax(-1)

    def _score(
        self, logits: Tensor, labels: Tensor, ids: Tensor | None, teacher_probs: Tensor
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Loss of some tokens, and their metrics."""
        log_probs = logits.log_softmax(-1)
        label_ce = F.nll_loss(log_probs, labels, reduction="sum")
        tempered = log_probs if self.temperature == 1.0 else (logits / self.temperature).log_softmax(-1)
        teacher_ce = -(teacher_probs * (tempered if ids is None else tempered.gather(-1, ids))).sum()
        total = (1 - self.weight) * label_ce + self.weight * self.temperature**2 * teacher_ce
        with torch.no_grad():
            entropy = torch.special.entr(teacher_probs).sum()
            hits = (logits.argmax(-1) == labels).sum()
        return total, {"labels": label_ce, "divergence": teacher_ce - entropy, "accuracy": hits}
