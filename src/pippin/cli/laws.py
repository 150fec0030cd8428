"""`pippin laws`: fit a scaling law to a table of runs; ask it what a run would come to, or what a budget should buy."""

from __future__ import annotations

import csv
import json
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pippin.cli import documents, inputs, terminal
from pippin.core.errors import InvalidArgument, InvalidInput, PippinWarning

if TYPE_CHECKING:
    from pippin.train.law import Law

app = typer.Typer(no_args_is_help=True, help="Fit scaling laws and laws of forgetting to runs of yours.")

NAMES = {
    "N": ("N", "parameters", "params", "size"),
    "D": ("D", "tokens", "data"),
    "loss": ("loss", "target_loss"),
    "S": ("S", "sparsity"),
    "p": ("p", "share", "inject"),
    "before": ("loss_before", "before", "loss_pt_before"),
    "after": ("loss_after", "after", "loss_pt"),
}
"""What the columns of a table may be called."""


class Form(StrEnum):
    """The laws, as words of the command line."""

    chinchilla = "chinchilla"
    sparse = "sparse"
    forgetting = "forgetting"
    finetuning = "finetuning"


NEEDS = {
    Form.chinchilla: ("N", "D", "loss"),
    Form.sparse: ("N", "D", "loss", "S"),
    Form.forgetting: ("N", "D", "p", "before", "after"),
    Form.finetuning: ("N", "D", "loss"),
}
"""The columns that each takes."""

File = Annotated[Path, typer.Argument(metavar="LAW", help="A law that `pippin laws fit --out LAW` wrote.")]
Size = Annotated[str, typer.Option("--parameters", "-N", metavar="N", help="Of the model: 135M, 1.7B, 2e9.")]
Tokens = Annotated[str, typer.Option("--tokens", "-D", metavar="D", help="It is trained on: 300K, 20B.")]


@app.command()
def fit(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A table of runs: .csv with a heading, or .jsonl; one run a line.")
    ],
    form: Annotated[Form, typer.Option(help="Which law.")] = Form.chinchilla,
    column: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OURS=THEIRS", help="What the table calls N, D, loss, p, before, after, S: loss=val_loss."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="LAW", help="Write the law here, for the other verbs.")] = None,
    offset: Annotated[bool, typer.Option("--offset", help="Forgetting: fit a part E that nothing takes away.")] = False,
    hold_out: Annotated[
        bool, typer.Option("--hold-out", help="Leave the largest size out of a second fit, and foretell it.")
    ] = False,
    delta: Annotated[float, typer.Option(help="Differences of log losses beyond which a run counts less.")] = 1e-3,
    bootstrap: Annotated[int, typer.Option(help="Resamples of the runs, for the intervals; 0 for none.")] = 200,
    seed: Annotated[int, typer.Option(help="Of the resamples.")] = 0,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw runs and law (.png, .svg, .pdf).")] = None,
    as_json: documents.Json = False,
) -> None:
    """Fit a law to a table of runs.

    pippin laws fit runs.csv --out law.json --plot law.png
    """
    documents.check_plot(plot)
    if offset and form is not Form.forgetting:
        raise InvalidArgument(f"--offset belongs to --form forgetting, not to {form.value}")
    runs = _read(file, form, column or ())
    how = {"delta": delta, "seed": seed}
    with _said() as said:
        law = _fitted(form, runs, offset, bootstrap=bootstrap, **how)
        held = _held_out(form, runs, offset, how) if hold_out else None
    if out is not None:
        with documents.writing(out):
            law.save(out)
    if plot is not None:
        with documents.writing(plot):
            law.plot(plot)
    facts = {"held_out": held, "exponents": _exponents(law), "warnings": said, "out": None if out is None else str(out)}
    if as_json:
        made = law.to_json()
        kept = {name: made[name] for name in ("form", "coefficients", "goodness")}
        more = {"se": law.se, "intervals": law.intervals, "runs": len(made["runs"]["N"]), **facts}
        terminal.write(terminal.to_json(_finite(kept | more)) + "\n")
        return
    _table(law, facts)
    for path, done in ((out, "saved in"), (plot, "drawn in")):
        if path is not None:
            terminal.note(f"{done} {path}")


@app.command()
def predict(
    law: File,
    parameters: Size,
    tokens: Tokens,
    share: Annotated[float, typer.Option(help="Of old data, for laws of fine-tuning.")] = 0.0,
    before: Annotated[
        float | None, typer.Option(metavar="LOSS", help="Forgetting: the model's loss on old data before fine-tuning.")
    ] = None,
    sparsity: Annotated[float | None, typer.Option(help="For sparse laws.")] = None,
    as_json: documents.Json = False,
) -> None:
    """Foretell the loss of a run, or how much it forgets.

    pippin laws predict law.json --parameters 1.7B --tokens 40B
    """
    from pippin.train.forgetting import FinetuningLaw, ForgettingLaw
    from pippin.train.law import Law
    from pippin.train.laws import ScalingLaw

    found, N, D = Law.load(law), number(parameters), number(tokens)
    made: dict[str, Any] = {"form": found.form, "N": N, "D": D}
    if isinstance(found, ForgettingLaw):
        made["forgetting"] = float(found.forgetting(N, D, share))
        made["interval"] = found.band(N, D, share).tolist()
        if before is not None:
            made["loss"] = float(found.predict(N, D, share, before))
    elif isinstance(found, FinetuningLaw):
        made |= {"loss": float(found.predict(N, D, share)), "interval": found.band(N, D, share).tolist()}
    elif isinstance(found, ScalingLaw):
        made["loss"] = float(found.predict(N, D, sparsity=sparsity))
        made["interval"] = found.band(N, D, sparsity=sparsity).tolist()
    _tell(made, as_json=as_json)


@app.command()
def optimal(
    law: File,
    compute: Annotated[str, typer.Option("--compute", "-C", metavar="FLOPS", help="The budget: 1e21.")],
    encoder: Annotated[
        str | None,
        typer.Option(metavar="N", help="Parameters of a vision encoder beside the decoder, of those that are counted."),
    ] = None,
    pictures: Annotated[float, typer.Option(help="Share of the tokens that go through the encoder.")] = 0.544,
    as_json: documents.Json = False,
) -> None:
    """The size and data that a budget of compute should buy; 6 N D without an encoder.

    pippin laws optimal law.json --compute 1e21
    """
    import numpy as np

    from pippin.train.budgets import late_fusion
    from pippin.train.law import Law
    from pippin.train.laws import ScalingLaw

    found = Law.load(law)
    if not isinstance(found, ScalingLaw):
        raise InvalidArgument(f"{law} is a {found.form} law; the optimum is that of a chinchilla law")
    if not 0 <= pictures <= 1:
        raise InvalidArgument(f"--pictures is {pictures}; give a share from 0 to 1")
    beside = None if encoder is None else number(encoder)
    flops = None if beside is None else late_fusion(lambda N: np.minimum(beside, 0.9 * N), pictures)
    with _said() as said:
        best = found.optimal(number(compute), flops)
    made = {"compute": best.compute, "N": best.N, "D": best.D, "loss": best.loss, "intervals": dict(best.intervals)}
    _tell(made | {"tokens_per_parameter": best.D / best.N, "warnings": said}, as_json=as_json)


@app.command()
def dose(
    law: File,
    parameters: Size,
    tokens: Tokens,
    forget: Annotated[float, typer.Option(metavar="NATS", help="By how much the loss on old data may rise.")],
    as_json: documents.Json = False,
) -> None:
    """The share of old data that keeps forgetting within a tolerance; for `pippin train … --inject`.

    pippin laws dose forgetting.json --parameters 135M --tokens 2M --forget 0.05
    """
    from pippin.train.forgetting import ForgettingLaw
    from pippin.train.law import Law

    found = Law.load(law)
    if not isinstance(found, ForgettingLaw):
        raise InvalidArgument(f"{law} is a {found.form} law; a dose is that of a forgetting law")
    with _said() as said:
        given = found.dose(number(parameters), number(tokens), forget)
    made = {"share": given.share, "interval": list(given.interval), "reached": given.reached, "warnings": said}
    _tell(made, as_json=as_json)


def number(text: str) -> float:
    """A number with a letter for thousands, millions, (American) billions or trillions, or without.

    Raises:
        InvalidArgument: it is none, or not above 0.

    >>> number("1.7B"), number("2e9"), number("300k")
    (1700000000.0, 2000000000.0, 300000.0)
    """
    factor = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1:].upper(), 1.0)
    try:
        value = float(text if factor == 1.0 else text[:-1]) * factor
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise InvalidArgument(f"{text!r} is no number above 0; write 135M, 1.7B or 2e9")
    return value


def _read(file: Path, form: Form, renamed: Sequence[str]) -> dict[str, list[float]]:
    """The columns that a law takes, in our names."""
    theirs: dict[str, tuple[str, ...]] = dict(NAMES)
    for pair in renamed:
        ours, _, name = pair.partition("=")
        if ours not in NAMES or not name:
            raise InvalidArgument(f"--column is {pair!r}; write it as loss=val_loss, with one of {', '.join(NAMES)}")
        theirs[ours] = (name,)
    rows = list(_rows(file))
    if not rows:
        raise InvalidInput(f"{file} holds no runs")
    found: dict[str, list[float]] = {}
    optional = ("p",) if form is Form.finetuning else ()
    for ours in (*NEEDS[form], *optional):
        known = [name for name in theirs[ours] if name in rows[0][1]]
        if not known and ours in optional:
            continue
        if not known:
            raise InvalidInput(
                f"{file} has no column for {ours} (one of {', '.join(theirs[ours])}); it has {', '.join(rows[0][1])}; "
                f"name it with --column {ours}=NAME"
            )
        found[ours] = [_cell(file, line, row, known[0]) for line, row in rows]
    return found


def _rows(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each run with the number of its line."""
    text = inputs.read_file(file)
    if file.suffix == ".csv":
        reader = csv.DictReader(text.splitlines(), skipinitialspace=True)
        for row in reader:
            yield reader.line_num, {str(name).strip(): value for name, value in row.items()}
        return
    if file.suffix not in (".jsonl", ".json"):
        raise InvalidArgument(f"{file} is neither .csv nor .jsonl")
    for line, words in enumerate(text.splitlines(), 1):
        if words.strip():
            try:
                row = json.loads(words)
            except ValueError as error:
                raise InvalidInput(f"{file}, line {line}: {error}") from error
            if not isinstance(row, dict):
                raise InvalidInput(f"{file}, line {line}: a run is an object, got {type(row).__name__}")
            yield line, row


def _cell(file: Path, line: int, row: dict[str, Any], name: str) -> float:
    try:
        return float(row[name])
    except (KeyError, TypeError, ValueError):
        raise InvalidInput(f"{file}, line {line}: {name} is {row.get(name)!r}, which is no number") from None


def _fitted(form: Form, runs: dict[str, list[float]], offset: bool, **how: Any) -> Law:
    from pippin.train.forgetting import FinetuningLaw, ForgettingLaw
    from pippin.train.laws import ScalingLaw

    if form is Form.forgetting:
        given = (runs[name] for name in ("N", "D", "p", "before", "after"))
        return ForgettingLaw(with_offset=offset).fit(*given, **how)
    if form is Form.finetuning:
        shares = runs.get("p")
        with_share = shares is not None and len(set(shares)) > 1
        return FinetuningLaw(with_share).fit(runs["N"], runs["D"], runs["loss"], shares, **how)
    return ScalingLaw("sparse" if form is Form.sparse else "chinchilla").fit(
        runs["N"], runs["D"], runs["loss"], sparsity=runs.get("S"), **how
    )


def _held_out(form: Form, runs: dict[str, list[float]], offset: bool, how: dict[str, Any]) -> dict[str, float]:
    """How well the largest size is foretold by a law of the others."""
    import numpy as np

    from pippin.train import fitting
    from pippin.train.forgetting import FinetuningLaw, ForgettingLaw
    from pippin.train.laws import ScalingLaw

    arrays = {name: np.asarray(values) for name, values in runs.items()}
    largest = arrays["N"] == arrays["N"].max()
    rest = {name: values[~largest].tolist() for name, values in arrays.items()}
    law, held = _fitted(form, rest, offset, bootstrap=0, **how), {n: values[largest] for n, values in arrays.items()}
    made = {"N": float(arrays["N"].max()), "runs": int(largest.sum())}
    if isinstance(law, ForgettingLaw):
        truth = held["after"]
        found = law.predict(held["N"], held["D"], held["p"], held["before"])
    elif isinstance(law, FinetuningLaw):
        truth, found = held["loss"], law.predict(held["N"], held["D"], held.get("p", 0.0))
    else:
        assert isinstance(law, ScalingLaw)
        truth, found = held["loss"], law.predict(held["N"], held["D"], sparsity=held.get("S"))
    return made | {"mean_absolute_error": fitting.goodness(found, truth).mae}


def _exponents(law: Law) -> dict[str, Any] | None:
    """How the best size and data grow with compute; None where the law has no such."""
    from pippin.train.laws import ScalingLaw

    if not isinstance(law, ScalingLaw) or law.form != "chinchilla":
        return None
    if law.coefficients["alpha"] <= 0 or law.coefficients["beta"] <= 0:
        return None
    return {"a": law.exponents.a, "b": law.exponents.b, "a_interval": list(law.exponents_interval)}


@contextmanager
def _said() -> Iterator[list[str]]:
    """Collect what is warned about, and say it in a line each."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PippinWarning)
        yield said
    for warning in caught:
        said.append(str(warning.message))
        terminal.note(f"warning: {warning.message}")


def _table(law: Law, facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{law.form} law, {len(law.runs['N'])} runs", title_justify="left")
    for heading in ("coefficient", "value", "sd", "95 % of the resamples"):
        table.add_column(heading, justify="left" if heading == "coefficient" else "right")
    for name, value in law.coefficients.items():
        low, high = law.intervals[name]
        known = not math.isnan(low)
        table.add_row(
            name, f"{value:.5g}", f"{law.se[name]:.2g}" if known else "", f"{low:.4g} – {high:.4g}" if known else ""
        )
    if facts["exponents"] is not None:
        best = facts["exponents"]
        low, high = best["a_interval"]
        spread = "" if math.isnan(low) else f"{low:.4g} – {high:.4g}"
        table.add_row("a: best N ~ C^a", f"{best['a']:.4f}", "", spread)
        table.add_row("b: best D ~ C^b", f"{best['b']:.4f}", "", "")
    Console().print(table)
    lines = [f"R2 of the loss {law.r2:.4f}, mean absolute error {100 * law.mae:.2f} %"]
    forgotten = getattr(law, "r2_forgetting", None)
    if forgotten is not None:
        lines.append(f"R2 of the forgetting alone {forgotten:.4f}")
    if facts["held_out"] is not None:
        held = facts["held_out"]
        error = 100 * held["mean_absolute_error"]
        lines.append(f"fitted without N = {held['N']:.4g}, it is foretold within {error:.2f} % ({held['runs']} runs)")
    terminal.write("\n".join(lines) + "\n")


def _tell(made: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        terminal.write(terminal.to_json(_finite(made)) + "\n")
        return
    for name, value in made.items():
        if name == "intervals":
            for which, (low, high) in value.items():
                terminal.write(f"{which}, 95 %: {low:.5g} – {high:.5g}\n")
        elif name == "interval":
            terminal.write(f"95 %: {value[0]:.5g} – {value[1]:.5g}\n")
        elif name != "warnings":
            terminal.write(f"{name}: {f'{value:.5g}' if isinstance(value, float) else value}\n")


def _finite(value: Any) -> Any:
    """The same with null where a number is not finite."""
    if isinstance(value, dict):
        return {name: _finite(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
