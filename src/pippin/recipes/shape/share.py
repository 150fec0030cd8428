"""KV sharing: layers of a language model use the KV cache of an earlier layer, with distillation to recover quality.

Notable here:
- a model that was trained with routed caches needs no distillation: without data, it is converted and saved
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Gt, Le

from pippin.core.checks import NonNegativeInt, PositiveInt, Probability, checked
from pippin.core.errors import InvalidArgument
from pippin.core.options import Option
from pippin.recipes import options
from pippin.recipes.train.text_training import TextTrainingConfig, TrainingOutcome, read_batches, train

if TYPE_CHECKING:
    from pippin.core.report import Report

PROMPT_TOKENS = 512
"""Length of the prompt for which the time to the first token is measured."""
REPETITIONS = 3


def _layers(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and part.isascii() for part in parts):
        raise InvalidArgument(f"--kv-sharing-layers must be numbers of layers with commas between them, got {text!r}")
    return tuple(int(part) for part in parts)


@checked
@dataclass(frozen=True, kw_only=True)
class Config(TextTrainingConfig):
    """Settings of a run: which layers share caches, and the distillation."""

    data: options.Data = ()
    shared_layers: Annotated[
        PositiveInt | None, Option("The last N layers read the cache of the last layer before them.", metavar="N")
    ] = None
    group_size: Annotated[
        PositiveInt | None, Option("Or: of every N neighboring layers, all read the first.", metavar="N")
    ] = None
    kv_sharing_ratio: Annotated[
        Annotated[float, Gt(0), Le(1)] | None,
        Option("Or: the share of the layers that keep a cache, for models with routed caches.", metavar="SHARE"),
    ] = None
    kv_sharing_layers: Annotated[
        tuple[NonNegativeInt, ...] | None,
        Option(
            "Or: which layers keep a cache, from 0; each other layer reads the last before it.",
            metavar="N,N",
            parse=_layers,
        ),
    ] = None
    init: Annotated[
        Literal["mean", "own"],
        Option("Projections of a layer that is read: mean of all layers that read it, or its own."),
    ] = "mean"
    distillation_weight: Annotated[
        Probability, Option("Weight of the original model in the loss; the rest is the data's.")
    ] = 0.9
    top_k: Annotated[PositiveInt | None, Option("Distill only the teacher's K likeliest tokens.", metavar="K")] = None


@dataclass(frozen=True, kw_only=True)
class KVSharingResult:
    """A model with shared caches: savings, and change of the loss.

    Attributes:
        model: name of the original model.
        out: folder of the result.
        cache_bytes: bytes per token in the KV cache, before and after.
        prompt_tokens: length of the timed prompt.
        first_token_seconds: median time to the first token after that prompt, before and after.
        losses: held-out losses "of the original", "untrained" and "trained"; empty if nothing is held out.
        outcome: the distillation run; None without data.
    """

    model: str
    out: Path
    cache_bytes: tuple[float, float]
    prompt_tokens: int
    first_token_seconds: tuple[float, float]
    losses: dict[str, float] = field(default_factory=dict)
    outcome: TrainingOutcome | None = field(default=None, repr=False)

    @property
    def stopped(self) -> str | None:
        """Why training stopped before its last step; None if it did not."""
        return None if self.outcome is None else self.outcome.training.stopped

    def summary(self) -> dict[str, Any]:
        """The result as JSON values; of the steps only the first and the last loss."""
        made: dict[str, Any] = {"out": str(self.out), "model": self.model}
        made |= {row.name: row.value for row in self.report().rows}
        if self.outcome is not None:
            training = self.outcome.training
            made |= {
                "steps": len(training.steps),
                "first_loss": training.losses[0] if training.losses else None,
                "last_loss": training.losses[-1] if training.losses else None,
                "held_out_before": self.outcome.held_out_before,
                "held_out_after": self.outcome.held_out_after,
                "best_step": self.outcome.best_step,
                "seconds": training.seconds,
                "tokens_per_second": training.units_per_second,
                "stopped": training.stopped,
            }
        return made

    def report(self) -> Report:
        """Report cache size and time to the first token before and after, and the held-out losses."""
        from pippin.core.report import Report, Row

        (bytes_before, bytes_after), (seconds_before, seconds_after) = self.cache_bytes, self.first_token_seconds
        return Report(
            "sharing caches",
            [
                Row("cache of a token before", bytes_before, "bytes"),
                Row("cache of a token after", bytes_after, "bytes"),
                Row(f"first token after {self.prompt_tokens} before", seconds_before, "s"),
                Row(f"first token after {self.prompt_tokens} after", seconds_after, "s"),
                Row("time to first token, after / before", seconds_after / seconds_before, "x"),
                *(Row(f"held-out loss {which}", loss, "nats/token") for which, loss in self.losses.items()),
            ],
        )


def run(config: Config, *, show_progress: bool = True) -> KVSharingResult:
    """Let layers share KV caches, train the model by distillation from the original, and save it.

    Args:
        config: the settings.
        show_progress: whether progress is shown on stderr.

    Raises:
        InvalidArgument: settings that are incompatible with each other or with the model.
        ModelNotFound, InvalidRecord, InvalidInput: the model or the data cannot be read.
        TrainingError: the loss is not finite, or the checkpoints in the folder are of another run.
    """
    import pippin
    from pippin.language.methods.distillation import Distillation
    from pippin.language.objectives import held_out
    from pippin.shape import kv_sharing

    routed = config.kv_sharing_ratio is not None or config.kv_sharing_layers is not None
    if routed and (config.shared_layers is not None or config.group_size is not None):
        raise InvalidArgument(
            "kv_sharing_ratio and kv_sharing_layers say which layers share; leave shared_layers and group_size out"
        )
    if not (routed or config.data):
        raise InvalidArgument("a model that was not trained with shared caches needs training: give data (--data FILE)")
    options.refuse_existing_run(config.out, config.resume)
    original = pippin.load(config.model, device=config.device, dtype="float32", pack=False)
    if routed:
        kv_sharing_layers = None if config.kv_sharing_layers is None else list(config.kv_sharing_layers)
        student = kv_sharing.share_kv(original.module, config.kv_sharing_ratio, kv_sharing_layers=kv_sharing_layers)
    else:
        student = kv_sharing.share_last_layers(
            original.module, config.shared_layers, group_size=config.group_size, init=config.init
        )
    student.requires_grad_(True)
    model = dataclasses.replace(
        original, name=f"{original.name} sharing caches", network=student, source=None, adapters={}
    )
    losses: dict[str, float] = {}
    outcome = None
    if config.data:
        teacher = original.module.pack()
        batches = read_batches(config, model, show_progress=show_progress)
        if batches.held_out is not None:
            losses["of the original"] = held_out(batches.held_out)(teacher)["loss"]
        outcome = train(
            config,
            student,
            batches,
            title=model.name,
            objective=Distillation(teacher, config.distillation_weight, top_k=config.top_k),
            show_progress=show_progress,
        )
        if outcome.held_out_before is not None and outcome.held_out_after is not None:
            losses |= {"untrained": outcome.held_out_before["loss"], "trained": outcome.held_out_after["loss"]}
        else:
            losses = {}
    model.save(config.out_path)
    cache_bytes, prompt_tokens, seconds = _measure(config.model, config.out_path, config.device)
    return KVSharingResult(
        model=original.name,
        out=config.out_path,
        cache_bytes=cache_bytes,
        prompt_tokens=prompt_tokens,
        first_token_seconds=seconds,
        losses=losses,
        outcome=outcome,
    )


def _measure(model: str, out: Path, device: str | None) -> tuple[tuple[float, float], int, tuple[float, float]]:
    """Bytes per token in the cache, length of the prompt, seconds to the first token; pairs are original and result."""
    import pippin
    from pippin.engine import Engine
    from pippin.engine.measure.measure_speed import cache_bytes, prompt_ids

    before, after = (pippin.load(ref, device=device) for ref in (model, out))
    count = min(PROMPT_TOKENS, before.context_size - 2)
    with (
        Engine(before, max_num_seqs=1, cache_tokens=count + 32) as one,
        Engine(after, max_num_seqs=1, cache_tokens=count + 32) as other,
    ):
        sizes = tuple(cache_bytes(engine.model.config, engine.kv_cache_dtype, 1) for engine in (one, other))
        seconds = _time_to_first_token([one, other], prompt_ids(before, count))
    return (sizes[0], sizes[1]), count, (seconds[0], seconds[1])


def _time_to_first_token(engines: Sequence[Any], prompt: Sequence[int]) -> list[float]:
    """Median seconds to the first token by engine, without hits in the prefix cache."""
    from pippin.engine.measure.measure_speed import measure_speed

    seconds: list[list[float]] = [[] for _ in engines]
    for repetition in range(REPETITIONS + 1):
        for engine, times in zip(engines, seconds, strict=True):
            stops = engine.model.tokenizer.eos_ids
            duration = measure_speed(engine, prompt, 2, stops=stops, owner=str(repetition)).first_token_seconds
            if repetition:  # the first run is a warm-up
                times.append(duration)
    return [statistics.median(times) for times in seconds]
