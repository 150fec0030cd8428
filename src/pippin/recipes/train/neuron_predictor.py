"""Neurons in storage: train what predicts which of them fire, for a model as it is.

Notable here:
- the model is read once over the text; then only the predictor is trained, on the inputs of its layers
- the file of the neurons is written here, so that loading the model with a budget does not wait for it
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Gt, Lt

from pippin.core import progress
from pippin.core.checks import PositiveFloat, PositiveInt, checked
from pippin.core.errors import InvalidArgument
from pippin.core.options import Option
from pippin.engine.options import DType
from pippin.recipes import options

if TYPE_CHECKING:
    from pippin.core.report import Report

_BATCH = 8
_LEAST = 10


@checked
@dataclass(frozen=True, kw_only=True)
class Config:
    """The settings of a run."""

    model: options.Model
    data: options.Data
    out: Annotated[options.StrPath, Option("Folder of the predictor.", None, "PATH")]
    fields: options.Fields = field(default_factory=dict)
    max_length: options.MaxLength = 512
    tokens: Annotated[PositiveInt, Option("Tokens of the text that the model is read over.", metavar="N")] = 100_000
    rank: Annotated[PositiveInt, Option("Inner size of the predictor of each layer.", metavar="N")] = 128
    recall: Annotated[
        Annotated[float, Gt(0), Lt(1)], Option("Share of the neurons that fire which it has to find.", metavar="SHARE")
    ] = 0.98
    steps: Annotated[PositiveInt, Option("Optimizer steps.", metavar="N")] = 500
    lr: Annotated[PositiveFloat, Option("Highest learning rate.")] = 3e-3
    dtype: DType = "auto"
    seed: options.Seed = 0


@dataclass(frozen=True, kw_only=True)
class NeuronPredictorResult:
    """The result of a run.

    Attributes:
        model: name of the model.
        out: folder of the predictor.
        tokens: of the text.
        least_memory: the least budget with it, in bytes.
        least_memory_without: the same without it.
        recall: of each layer, the share of the firing neurons that it finds on held-out text.
        predicted: of each layer, the share of all neurons that it finds.
        active: of each layer, the share of all neurons that fire.
    """

    model: str
    out: Path
    tokens: int
    least_memory: int
    least_memory_without: int
    recall: tuple[float, ...]
    predicted: tuple[float, ...]
    active: tuple[float, ...]

    def summary(self) -> dict[str, Any]:
        """The result as JSON values."""
        return dataclasses.asdict(self) | {"out": str(self.out)}

    def report(self) -> Report:
        """Report how many neurons fire, how many are found, and the least memory."""
        from pippin.core.report import Report, Row

        def mean(shares: tuple[float, ...]) -> float:
            return 100 * sum(shares) / len(shares)

        rows = [
            Row("neurons that fire for a token", mean(self.active), "%"),
            Row("neurons that are predicted", mean(self.predicted), "%"),
            Row("of those that fire are found", mean(self.recall), "%"),
            Row("in the worst layer", 100 * min(self.recall), "%"),
            Row("least memory", self.least_memory / 1e6, "MB"),
            Row("least memory without it", self.least_memory_without / 1e6, "MB"),
        ]
        return Report(f"{self.model}, predicted neurons", rows)


def run(config: Config, *, show_progress: bool = True) -> NeuronPredictorResult:
    """Train a predictor and save it.

    Args:
        config: the settings.
        show_progress: whether progress is shown on stderr.

    Raises:
        InvalidArgument: a model without neurons that can stay in storage, which the message explains, or too little
            text.
        ModelNotFound, InvalidRecord, InvalidInput: the model or the data cannot be read.
        DiskFull: there is no room for the file of the neurons, or the predictor.
        NonFiniteLoss: the training diverged.
    """
    import torch

    import pippin
    from pippin.core.store import reference
    from pippin.data import packing
    from pippin.language.availability import least_memory
    from pippin.language.checkpoint_headers import read_headers
    from pippin.language.memory_placement import check_neurons, write_neurons
    from pippin.language.methods.neuron_prediction import fit_neuron_predictor
    from pippin.language.weight_packing import choose_packing

    options.refuse_existing(config.out)
    found = reference.resolve(config.model)
    headers, packed_as = read_headers(found), choose_packing(config.dtype, torch.device("cpu"))
    check_neurons(found, headers, packed_as, predicted=True)
    model = pippin.load(config.model, device="cpu", dtype="float32", pack=False)
    if config.max_length > model.context_size:
        raise InvalidArgument(
            f"max_length is {config.max_length}, but the context of {model.name} is {model.context_size} tokens"
        )
    pieces = packing.tokenized(
        options.paths(config.data),
        model.tokenizer,
        template=model.template,
        max_length=config.max_length,
        loss_on="assistant",
        fields=config.fields,
        show_progress=show_progress,
    )
    batches = packing.packed(
        pieces, model.tokenizer, max_length=config.max_length, batch_size=_BATCH, epochs=1, seed=config.seed
    )
    rows = [batch.ids for batch in islice(batches, -(-config.tokens // (config.max_length * _BATCH)))]
    ids = torch.cat(rows) if rows else torch.zeros(0, config.max_length, dtype=torch.long)
    if len(ids) < _LEAST:
        raise InvalidArgument(
            f"the data has {len(ids)} sequences of {config.max_length} tokens, and a predictor needs {_LEAST}; give "
            "more data (--data) or a shorter max_length (--max-length)"
        )
    stored = write_neurons(found, headers, packed_as, predicted=True)
    progress.note(
        f"{model.name}: {len(stored.layers)} layers of {stored.layers[0].neurons} neurons, {ids.numel()} tokens",
        show_progress=show_progress,
    )
    predictor, quality = fit_neuron_predictor(
        model.module,
        stored,
        ids,
        rank=config.rank,
        steps=config.steps,
        lr=config.lr,
        recall=config.recall,
        seed=config.seed,
        show_progress=show_progress,
    )
    predictor.save(config.out)
    return NeuronPredictorResult(
        model=model.name,
        out=Path(config.out),
        tokens=ids.numel(),
        least_memory=least_memory(config.model, config.dtype, device="cpu", neuron_predictor=config.out),
        least_memory_without=least_memory(config.model, config.dtype, device="cpu"),
        **vars(quality),
    )
