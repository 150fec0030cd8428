"""`pippin train lora`: train a small adapter beside a model that stays as it is.

Notable here:
- the model is loaded as it runs, packed: what is learnt fits the weights that will answer, in a third of the memory
- what the adapter was made of (data by hash, steps, losses) is written beside it, and no path of this machine
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pippin.cli import options, terminal, training
from pippin.core.errors import InvalidArgument, VocabularyMismatch

if TYPE_CHECKING:
    from pippin.language.adapters import Pair
    from pippin.language.load import LanguageModel
    from pippin.train.parallel import Parallel

_ADAPTER = "Adapter"


@training.planned(injects=True, lr=1e-3, rows=4)
def lora(
    model: Annotated[
        str,
        typer.Argument(
            help="Catalogue name, hub repository, folder or .gguf file.", autocompletion=options.complete_model
        ),
    ],
    plan: training.Plan,
    rank: Annotated[int, typer.Option(help="Of each pair of matrices.", rich_help_panel=_ADAPTER)] = 16,
    alpha: Annotated[
        float | None,
        typer.Option(help="The change is scaled by alpha / rank; the rank without it.", rich_help_panel=_ADAPTER),
    ] = None,
    targets: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="all, or some of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, with commas between.",
            rich_help_panel=_ADAPTER,
        ),
    ] = "all",
    rslora: Annotated[
        bool, typer.Option("--rslora", help="Scale by alpha / sqrt(rank).", rich_help_panel=_ADAPTER)
    ] = False,
    dropout: Annotated[
        float, typer.Option(help="Share of inputs left out in training.", rich_help_panel=_ADAPTER)
    ] = 0.0,
    ratio: Annotated[
        float, typer.Option(help="How much faster B learns than A (LoRA+: 16).", rich_help_panel=_ADAPTER)
    ] = 1.0,
    begin: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Begin from this adapter of the same model.", rich_help_panel=_ADAPTER),
    ] = None,
    recover: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="The model before quantisation: begin from the singular vectors of what was lost.",
            rich_help_panel=_ADAPTER,
        ),
    ] = None,
    teacher: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="Learn this model's predictions, nine parts to one.", rich_help_panel=_ADAPTER
        ),
    ] = None,
    ray: training.Ray = False,
    workers: training.Workers = None,
    device: options.Device = None,
    bits: options.Bits = None,
    as_json: training.AsJson = False,
) -> None:
    """Train a LoRA adapter on data of yours; PEFT reads it, and so does `pippin ask --adapter`.

    pippin train lora smollm2-135m --data chats.jsonl --out mine --steps 200
    pippin ask --adapter mine "What is new?"
    """
    if begin is not None and recover is not None:
        raise InvalidArgument("--begin and --recover both say where to begin; give one of them")
    settings = {
        "plan": plan.to_json(),
        "model": model,
        "device": device,
        "bits": bits,
        "pairs": {"rank": rank, "alpha": float(rank if alpha is None else alpha), "targets": _names(targets)},
        "how": {"rslora": rslora, "dropout": dropout, "ratio": ratio},
        "begin": None if begin is None else str(begin),
        "recover": recover,
        "teacher": teacher,
        "show": not as_json,
    }
    made = training.launch(train, settings, ray=ray, workers=workers)
    if made is not None:
        training.tell(made, as_json=as_json)


def train(settings: dict[str, Any], parallel: Parallel | None) -> dict[str, Any]:
    """The run that these settings (JSON values) describe, in this process or in one of several; a summary of it."""
    from pippin.shape.lora import LowRankModel
    from pippin.train import AdamW

    plan = training.Plan.from_json(settings["plan"])
    device = settings["device"] if parallel is None else parallel.device
    first = parallel is None or parallel.rank == 0
    show = settings["show"] and first
    base = _base(settings["model"], device, settings["bits"])
    objective = None if settings["teacher"] is None else _distillation(_twin(settings["teacher"], device, base))
    init = _start(base, settings, device, show=show)
    adapted = LowRankModel(base.module, **settings["pairs"], **settings["how"], seed=plan.seed, init=init)
    batches = training.read(plan, base, processes=1 if parallel is None else parallel.size, show=show)
    facts = {"model": base.name, "rank": adapted.rank, "alpha": adapted.alpha}
    facts["parameters"] = sum(p.numel() for p in adapted.parameters())
    if show:
        terminal.note(f"{base.name}: an adapter of {facts['parameters']:,} parameters, {batches.steps} steps")
    outcome = training.run(
        plan,
        adapted,
        batches,
        title=f"{base.name}, adapter of rank {adapted.rank}",
        optimiser=AdamW(lr=plan.lr, weight_decay=0.0),
        objective=objective,
        parallel=parallel,
        show=show,
    )
    if first:
        adapted.save(plan.out, base, note=_note(plan, outcome))
    return training.summary(plan, outcome, facts)


def _base(ref: str, device: str | None, bits: int | None) -> LanguageModel:
    """The model as it will run; on a CPU without the native kernels, dense: oneDNN's layout is slow to be undone."""
    import pippin
    from pippin.core import device as devices, native

    pack = bits is not None or devices.choose(device).type != "cpu" or native.library() is not None
    return pippin.load(ref, device=device, bits=bits, pack=pack, dtype="auto")


def _twin(ref: str, device: str | None, base: LanguageModel) -> LanguageModel:
    """The model before quantisation, or a teacher: only read.

    Raises:
        VocabularyMismatch: it counts with other tokens.
    """
    import pippin

    twin = pippin.load(ref, device=device)
    different = twin.tokenizer.first_difference(base.tokenizer)
    if different is not None or twin.config.vocab_size != base.config.vocab_size:
        where = "rows of their output matrices" if different is None else f"token {different}"
        raise VocabularyMismatch(f"{twin.name} and {base.name} differ in {where}; give a model of the same vocabulary")
    return twin


def _start(base: LanguageModel, settings: dict[str, Any], device: str | None, *, show: bool) -> dict[str, Pair] | None:
    """The pairs to begin from; None for random ones."""
    from pippin.language.adapters import read_pairs
    from pippin.shape.recovery import residual_pairs

    if settings["begin"] is not None:
        return read_pairs(base, settings["begin"])
    if settings["recover"] is None:
        return None
    original, pairs = _twin(settings["recover"], device, base), settings["pairs"]
    return residual_pairs(original.module, base.module, pairs["rank"], pairs["targets"], show=show)


def _distillation(teacher: LanguageModel) -> Any:
    from pippin.language.distillation import Distillation

    return Distillation(teacher, weight=0.9)


def _names(targets: str) -> list[str]:
    return [name.strip() for name in targets.split(",") if name.strip()]


def _note(plan: training.Plan, outcome: training.Outcome) -> dict[str, Any]:
    """How the adapter was made, for whoever receives it."""
    from importlib.metadata import version

    from pippin.core.files import sha256_of

    files = []
    for given in plan.data:
        for path in sorted(p for p in given.rglob("*") if p.is_file()) if given.is_dir() else [given]:
            name = path.name if path == given else str(path.relative_to(given))
            files.append({"name": name, "sha256": sha256_of(path)})
    return {
        "pippin": version("pippin"),
        "data": files,
        "steps": len(outcome.training.steps),
        "rows": plan.rows * plan.accumulate,
        "length": plan.length,
        "learning_rate": plan.lr,
        "seed": plan.seed,
        "held_out_before": outcome.before,
        "held_out_after": outcome.after,
    }
