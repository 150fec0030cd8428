r"""Distillation: a student learns what a teacher would have said, beside what the text says.

Notable here:
- the teacher may be packed for inference: it is only read, by kernels that are quicker than those for training
- neither model's logits are ever in memory for more than a few tokens (`pippin.language.readout`)
- the teacher speaks as its whole distribution, as its k likeliest tokens, or (k = 1) as one token, which is how the
  published model was taught
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from pippin.core.errors import InvalidArgument, VocabularyMismatch
from pippin.data.batches import IGNORE, TokenBatch
from pippin.language.load import LanguageModel
from pippin.language.readout import hidden_states, read_out
from pippin.train.objective import Loss


class Distillation:
    r"""The objective $L = (1 - a)\, CE(\text{labels}) + a\, T^2\, CE(\text{teacher at temperature } T)$, in nats.

    Each is a mean over the tokens that have a target. The cross-entropy against the teacher differs from the divergence
    $KL(\text{teacher} \| \text{student})$ by the teacher's entropy, which no step can change.

    Args:
        teacher: a decoder or a loaded model, packed or not, on the student's device; it is not trained.
        weight: $a$, from 0 (labels only) to 1 (teacher only).
        temperature: $T$ > 0; above 1, unlikely tokens count for more.
        top: keep only so many of the teacher's likeliest tokens, their probabilities scaled to sum to 1; None for all.
        piece: tokens whose logits are computed at once; None for as many as fit 64 MiB.

    Logged beside the loss: ``labels`` (cross-entropy of the labels), ``divergence`` (KL from the teacher as it was cut
    to ``top``), ``accuracy`` (share of labels that are the student's likeliest token).

    Raises:
        InvalidArgument: a weight outside 0 to 1, a temperature that is not above 0, a ``top`` below 1.
        VocabularyMismatch: when called with a student of another vocabulary.

    Source: Hinton et al. 2015, arXiv:1503.02531, section 2; a = 0.9 against the teacher's likeliest token:
    Gunter et al. 2024, arXiv:2407.21075.
    """

    unit = "tokens"

    def __init__(
        self,
        teacher: nn.Module | LanguageModel,
        weight: float = 0.9,
        temperature: float = 1.0,
        top: int | None = None,
        *,
        piece: int | None = None,
    ) -> None:
        if not 0.0 <= weight <= 1.0:
            raise InvalidArgument(f"the weight of the teacher must be from 0 to 1, got {weight}")
        if not (temperature > 0.0 and math.isfinite(temperature)):
            raise InvalidArgument(f"temperature must be above 0 and finite, got {temperature}")
        if top is not None and top < 1:
            raise InvalidArgument(f"top must be at least 1 or None for the whole distribution, got {top}")
        self.teacher: Any = teacher.module if isinstance(teacher, LanguageModel) else teacher
        self.weight, self.temperature, self.top, self.piece = weight, temperature, top, piece

    def check(self, student: nn.Module) -> None:
        """Compare the vocabularies; done at every call too.

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
        """The loss of one batch, summed over the tokens that have a target; nothing is drawn from ``generator``."""
        self.check(model)
        wanted = (batch.targets != IGNORE).flatten()
        labels = batch.targets.flatten()[wanted]
        hidden = hidden_states(model, batch)[wanted]
        with torch.no_grad():
            taught = hidden_states(self.teacher, batch)[wanted]

        def score(logits: Tensor, part: slice) -> tuple[Tensor, Mapping[str, Tensor]]:
            with torch.no_grad():
                ids, law = self._law(self.teacher.lm_head(taught[part]).float())
            return self._score(logits.float(), labels[part], ids, law)

        total, sums = read_out(model, hidden, score, piece=self.piece)
        return Loss(total, float(len(labels)), sums)

    def _law(
        self, logits: Float[Tensor, "part vocab"]
    ) -> tuple[Int[Tensor, "part top"] | None, Float[Tensor, "part top"]]:
        """The teacher's probabilities, and of which tokens; None: of all."""
        ids = None
        if self.top is not None and self.top < logits.shape[-1]:
            logits, ids = logits.topk(self.top)
        return ids, (logits / self.temperature).softmax(-1)

    def _score(
        self, logits: Tensor, labels: Tensor, ids: Tensor | None, law: Tensor
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Loss of some tokens, and what is logged of them."""
        said = logits.log_softmax(-1)
        plain = F.nll_loss(said, labels, reduction="sum")
        warm = said if self.temperature == 1.0 else (logits / self.temperature).log_softmax(-1)
        crossed = -(law * (warm if ids is None else warm.gather(-1, ids))).sum()
        total = (1 - self.weight) * plain + self.weight * self.temperature**2 * crossed
        with torch.no_grad():
            entropy = torch.special.entr(law).sum()
            hits = (logits.argmax(-1) == labels).sum()
        return total, {"labels": plain, "divergence": crossed - entropy, "accuracy": hits}
