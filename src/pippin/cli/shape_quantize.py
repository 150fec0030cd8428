"""`pippin shape quantize`: a model in fewer bits, by rounding, by calibration on text, or by training."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from pippin.cli import options, terminal, training
from pippin.core.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pippin.core.progress import Bar
    from pippin.language.load import LanguageModel
    from pippin.nn.codes import Codes
    from pippin.shape.quantise.config import QuantisationSettings

METHODS = ("rtn", "gptq", "awq", "qat")
MEASURED = 8192
"""Held-out tokens that are measured, at most."""
SENSITIVE_BITS = 8
"""Width of the embedding where the layers have four bits or more: at four it alone costs as much as all of them."""


@training.planned(data=None, lr=2e-4, rows=4)
def quantize(
    model: Annotated[
        str,
        typer.Argument(
            help="Catalogue name, hub repository, folder or .gguf file.", autocompletion=options.complete_model
        ),
    ],
    plan: training.Plan,
    bits: Annotated[int | None, typer.Option(help="2, 3, 4 or 8.")] = None,
    average_bits: Annotated[
        float | None,
        typer.Option(metavar="BITS", help="In place of --bits: an average, more for the matrices that need it."),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(help="rtn, gptq, awq or qat; without it rtn, with --data gptq, with --data and 2 bits qat."),
    ] = None,
    group: Annotated[int, typer.Option(help="Neighbouring weights that share a scale: 32, 64 or 128.")] = 64,
    levels: Annotated[str, typer.Option(help="balanced (no level is 0) or unbalanced (one is).")] = "balanced",
    embedding_bits: Annotated[
        int | None,
        typer.Option(help="2, 3, 4, 8, or 16 for exact; without it 4, or 8 where the layers have 4 bits or more."),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Of calibration.", rich_help_panel="Data")] = 16_384,
    device: options.Device = None,
    as_json: training.AsJson = False,
) -> None:
    """Quantise a model and save a folder that opens like any other; say what it cost.

    pippin shape quantize smollm2-135m --bits 4 --data notes.txt --out small
    """
    chosen = _method(method, bits, average_bits, plan.data)
    if chosen != "qat" and (plan.steps is not None or plan.resume):
        raise InvalidArgument(f"--steps and --resume are for --method qat, not for {chosen}")
    if tokens < 2:
        raise InvalidArgument(f"--tokens must be at least 2, got {tokens}")
    settings = _settings(bits, average_bits, group, levels, embedding_bits)
    _check_out(plan.out, model)
    _tell(_run(model, chosen, settings, average_bits, plan, tokens, device, show=not as_json), as_json=as_json)


def _method(method: str | None, bits: int | None, average: float | None, data: Sequence[Path]) -> str:
    """The method, once the options are known to go together."""
    if (bits is None) == (average is None):
        raise InvalidArgument("give either --bits or --average-bits")
    if method is None:
        method = "rtn" if not data else "qat" if bits == 2 else "gptq"
    if method not in METHODS:
        raise InvalidArgument(f"--method is {method!r}; choose one of {', '.join(METHODS)}")
    if not data and (method != "rtn" or average is not None):
        what = f"--method {method}" if average is None else "--average-bits"
        raise InvalidArgument(f"{what} looks at text; give some with --data FILE")
    if method == "qat" and average is not None:
        raise InvalidArgument("--average-bits is for rtn, gptq and awq; give --bits to train")
    return method


def _settings(
    bits: int | None, average: float | None, group: int, levels: str, embedding_bits: int | None
) -> QuantisationSettings:
    from pippin.nn.packed import GROUPS
    from pippin.shape.quantise.config import QuantisationSettings

    if group not in GROUPS:
        raise InvalidArgument(f"--group is {group}; choose one of {', '.join(map(str, GROUPS))}")
    if embedding_bits is None:
        embedding_bits = SENSITIVE_BITS if (bits or average or 0) >= 4 else 4
    outer = None if embedding_bits == 16 else embedding_bits
    return QuantisationSettings(bits=bits or 4, levels=cast(Any, levels), group=group, embedding_bits=outer)


def _check_out(out: Path, model: str) -> None:
    if out.exists() and not out.is_dir():
        raise InvalidArgument(f"--out is {out}, which is a file; give a folder")
    if out.exists() and Path(model).exists() and out.samefile(model):
        raise InvalidArgument(f"--out is {out}, the model itself; give another folder")


def _run(
    ref: str,
    method: str,
    settings: QuantisationSettings,
    average: float | None,
    plan: training.Plan,
    tokens: int,
    device: str | None,
    *,
    show: bool,
) -> dict[str, Any]:
    """Quantise, save, measure; what was found, as JSON values."""
    import pippin
    from pippin.core import progress
    from pippin.language.objectives import held_out
    from pippin.language.quantised import save_quantised
    from pippin.shape.quantise.mixed import choose_bits
    from pippin.shape.quantise.rtn import clipped_share

    model = pippin.load(ref, device=device, dtype="float32", pack=False)
    batches = training.read(plan, model, show=show) if plan.data else None
    if batches is not None and batches.measured:
        most = max(1, MEASURED // (plan.length * plan.rows))
        batches = dataclasses.replace(batches, measured=batches.measured[:most])
    measure = held_out(batches.measured) if batches is not None and batches.measured else None
    facts: dict[str, Any] = {"model": model.name, "method": method, "out": str(plan.out)}
    clipped: dict[str, float] = {}
    if method == "qat":
        assert batches is not None
        teacher = pippin.load(ref, device=device)  # as it would answer, which is quicker than the one to be trained
        codes, note, trained = _train(model, teacher, settings, plan, batches, tokens, show=show)
        facts |= trained
        before = trained["held_out_before"]
    else:
        before = None if measure is None else dict(measure(model.module))
        calibration: Any = None if batches is None else _calibration(batches, tokens)
        names = _matrices(model)
        with progress.bar(len(names) * (1 if average is None else 2), method, unit="matrices", show=show) as bar:
            widths = None
            if average is not None:
                widths = choose_bits(model, settings, calibration, average, on_matrix=_counter(bar))
            codes = _quantise(method, model, settings, calibration, widths, _counter(bar))
        clipped = {
            name: clipped_share(part.dense_weight(), codes[name]) for name, part in names.items() if name in codes
        }
        note = {"method": method, "settings": dataclasses.asdict(settings), "average_bits": average}
    save_quantised(plan.out, model, codes, note=note)
    facts |= _sizes(model, codes, plan.out)
    if clipped:
        worst = max(clipped, key=lambda name: clipped[name])
        facts |= {"clipped": sum(clipped.values()) / len(clipped), "most_clipped": [worst, clipped[worst]]}
    after = None
    if measure is not None:
        del model
        after = dict(measure(pippin.load(plan.out, device=device).module))
    return facts | {"held_out_before": before, "held_out_after": after}


def _quantise(
    method: str,
    model: LanguageModel,
    settings: QuantisationSettings,
    calibration: Any,
    bits: dict[str, int] | None,
    on_matrix: Callable[[str], None],
) -> dict[str, Codes]:
    from pippin.shape.quantise import awq, gptq, rtn

    if method == "rtn":
        return rtn.quantise(model, settings, bits=bits, on_matrix=on_matrix)
    function = gptq.quantise if method == "gptq" else awq.quantise
    return function(model, settings, calibration, bits=bits, on_matrix=on_matrix)


def _train(
    model: LanguageModel,
    teacher: LanguageModel,
    settings: QuantisationSettings,
    plan: training.Plan,
    batches: training.Batches,
    tokens: int,
    *,
    show: bool,
) -> tuple[dict[str, Codes], dict[str, Any], dict[str, Any]]:
    """Codes after quantisation-aware training, what to note of it, and a summary of the run.

    It begins where GPTQ ends, and learns from the model before it was quantised as well as from the text.
    """
    from pippin.core import progress
    from pippin.language.distillation import Distillation
    from pippin.language.objectives import held_out
    from pippin.shape.quantise import gptq, qat

    exact = None if not batches.measured else dict(held_out(batches.measured)(model.module))
    start = None
    if not plan.resume:  # a resumed run has its weights in the checkpoint
        with progress.bar(len(_matrices(model)), "gptq", unit="matrices", show=show) as bar:
            solved = gptq.quantise(model, settings, _calibration(batches, tokens), on_matrix=_counter(bar))
        start = {name: codes for name, codes in solved.items() if name.startswith("layers.")}
    model.module.requires_grad_(True)
    qat.prepare(model.module, settings, start=start)
    title = f"{model.name}, {settings.bits} bits"
    outcome = training.run(plan, model.module, batches, title=title, objective=Distillation(teacher), show=show)
    codes, note = qat.convert(model.module), qat.note(model.module)
    summary = training.summary(plan, outcome, {})
    return codes, note, summary | {"held_out_before": exact, "held_out_rounded": summary["held_out_before"]}


def _calibration(batches: training.Batches, tokens: int) -> Any:
    """Rows of token ids from the data that is not held out."""
    import torch

    found, count = [], 0
    for batch in batches.learnt:
        found.append(batch.ids)
        count += batch.ids.numel()
        if count >= tokens:
            break
    rows = torch.cat(found)
    return rows[: max(1, tokens // rows.shape[1])]


def _matrices(model: LanguageModel) -> dict[str, Any]:
    from pippin.shape.quantise.calibration import matrices

    return dict(matrices(model.module))


def _counter(bar: Bar) -> Callable[[str], None]:
    return lambda name: bar.advance(1)


def _sizes(model: LanguageModel, codes: dict[str, Codes], out: Path) -> dict[str, Any]:
    """Bytes on disk before and after, and bits for each weight of the quantised matrices."""
    source = model.source
    files = [] if source is None else [source] if source.is_file() else list(source.glob("*.safetensors"))
    weights = sum(matrix.codes.numel() for matrix in codes.values())
    return {
        "bytes_before": sum(path.stat().st_size for path in files),
        "bytes_after": sum(path.stat().st_size for path in out.glob("*.safetensors")),
        "bits_per_weight": 8 * sum(matrix.nbytes for matrix in codes.values()) / weights,
        "widths": {bits: sum(matrix.bits == bits for matrix in codes.values()) for bits in (2, 3, 4, 8)},
    }


def _tell(made: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        terminal.write(terminal.to_json(made) + "\n")
        return
    from pippin.core.report import Report, Row

    rows = [Row(f"weights {when}", made[f"bytes_{when}"] / 1e6, "MB") for when in ("before", "after")]
    rows.append(Row("bits per weight, with scales", made["bits_per_weight"]))
    rows += [Row(f"matrices of {bits} bits", count) for bits, count in made["widths"].items() if count]
    for when in ("before", "rounded", "after"):
        loss = (made.get(f"held_out_{when}") or {}).get("loss")
        rows += [] if loss is None else [Row(f"held-out loss {when}", loss, "nats/token")]
    if "clipped" in made:
        name, share = made["most_clipped"]
        rows += [Row("clipped weights", 100 * made["clipped"], "%"), Row(f"most, in {name}", 100 * share, "%")]
    Report(f"{made['model']} by {made['method']}", rows).print()
    if made.get("stopped") == "interrupted":
        terminal.note("interrupted; the same command with --resume goes on")
    terminal.note(f"saved in {made['out']}")
