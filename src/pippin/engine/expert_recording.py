"""Traces of real runs: which experts a model needs while it reads and writes.

Notable here:
- predictions are those of the next layers' own routers, from hidden states some layers earlier; they need no training

Source: next-layer gates as predictors: Eliseev and Mazur 2023, arXiv:2312.17238, section 3.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float32, Int64

from pippin.core.checks import NonNegativeInt, PositiveInt, checked
from pippin.core.errors import UnsupportedModel
from pippin.engine.experts.expert_trace import ExpertTrace
from pippin.engine.runners.native_experts import ExpertSource

if TYPE_CHECKING:
    from pippin.engine.generation import Prompt
    from pippin.language.language_model import LanguageModel
    from pippin.nn.feedforward.feedforward import FeedForward


class ExpertRecorder:
    """Looks on and keeps what passes needed; see `pippin.engine.runners.native_experts.ExpertSource`.

    Args:
        model: name of the model, for the trace.
        sizes: bytes of each expert.
        depth: layers ahead for which predictions are kept; 0 for none.
        source: brings the experts; None where all are in memory.
    """

    @checked
    def __init__(
        self,
        model: str,
        sizes: Int64[np.ndarray, "layers experts"],
        depth: NonNegativeInt = 0,
        *,
        source: ExpertSource | None = None,
    ) -> None:
        self.model, self.sizes, self.recorded_depth, self.source = model, sizes, depth, source
        self._tokens: list[int] = []
        self._needed: list[list[list[int]]] = []
        self._predicted: list[np.ndarray] = []

    @property
    def depth(self) -> int:
        """Layers ahead for which predictions are wanted."""
        return max(self.recorded_depth, self.source.depth if self.source is not None else 0)

    def begin_pass(self, tokens: int) -> None:
        """A pass over so many tokens begins."""
        if self.source is not None:
            self.source.begin_pass(tokens)
        layers, experts = self.sizes.shape
        self._tokens.append(tokens)
        self._needed.append([[] for _ in range(layers)])
        self._predicted.append(np.full((self.recorded_depth, layers, experts), np.nan, dtype=np.float16))

    def waves(
        self, layer: int, needed: list[int], predicted: Float32[np.ndarray, "depth experts"] | None
    ) -> Iterator[Sequence[int]]:
        """Keep what is needed and predicted; the source brings the experts, or all are there."""
        self._needed[-1][layer] = needed
        if predicted is not None:
            for ahead in range(min(self.recorded_depth, len(self.sizes) - 1 - layer)):
                self._predicted[-1][ahead, layer + 1 + ahead, : predicted.shape[1]] = predicted[ahead]
        if self.source is None:
            yield needed
            return
        depth = self.source.depth
        yield from self.source.waves(layer, needed, predicted[:depth] if depth and predicted is not None else None)

    def trace(self) -> ExpertTrace:
        """What was recorded so far."""
        predicted = np.stack(self._predicted) if self.recorded_depth and self._predicted else None
        return ExpertTrace.of(self._needed, self.sizes, model=self.model, tokens=self._tokens, predicted=predicted)


def expert_sizes(model: LanguageModel) -> Int64[np.ndarray, "layers experts"]:
    """Bytes of each expert's matrices in memory.

    Raises:
        UnsupportedModel: the model has no experts, or layers with different numbers of them.
    """
    from pippin.engine.runners.native_experts import mixtures
    from pippin.nn.feedforward.feedforward import FeedForward, MixtureOfExperts

    rows = []
    for index in mixtures(model.config):
        mixture = next(part for part in model.module.layers[index].modules() if isinstance(part, MixtureOfExperts))
        rows.append([_bytes(expert) for expert in mixture.experts if isinstance(expert, FeedForward)])
    if not rows or len({len(row) for row in rows}) > 1:
        raise UnsupportedModel(
            f"{model.name} has no experts" if not rows else f"the layers of {model.name} differ in their experts"
        )
    return np.array(rows, dtype=np.int64)


def _bytes(expert: FeedForward) -> int:
    parts = [part for part in (expert.gate_proj, expert.up_proj, expert.down_proj) if part is not None]
    packed = [getattr(part, "packed", None) for part in parts]
    return sum(
        part.weight.nbytes if weight is None else weight.nbytes for part, weight in zip(parts, packed, strict=True)
    )


@checked
def record_expert_trace(
    model: LanguageModel, prompts: Sequence[Prompt], *, max_tokens: PositiveInt = 128, depth: NonNegativeInt = 1
) -> ExpertTrace:
    """Answer prompts one after the other and record which experts each pass needs.

    Args:
        model: a mixture of experts, packed for the native kernels.
        prompts: what to answer: texts, lists of messages, or lists of token ids.
        max_tokens: longest answer.
        depth: layers ahead for which predictions are recorded.

    Raises:
        UnsupportedModel: the model has no experts, or the native kernels do not compute it.
        InvalidArgument, ContextOverflow: as `pippin.engine.generation.generate`.
    """
    from pippin.engine.engine import Engine
    from pippin.engine.generation import prompt_ids
    from pippin.engine.options import SamplingOptions
    from pippin.engine.request import Request
    from pippin.language.adapter_files import base_sha256

    options = SamplingOptions(temperature=0.0, max_tokens=max_tokens)
    with Engine(model, max_num_seqs=1, enable_prefix_caching=False) as engine:
        recorder = ExpertRecorder(base_sha256(model), expert_sizes(model), depth, source=engine.expert_store)
        engine.fetch_experts(recorder)
        for prompt in prompts:
            for _ in engine.stream(Request(prompt_ids(model, prompt), options)):
                pass
        return recorder.trace()
