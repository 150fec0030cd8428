"""`pippin laws`: fit scaling laws to training runs, predict losses, and find the optimal size for a budget."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from pippin.cli.common import documents, terminal
from pippin.cli.common.declared_options import with_options
from pippin.cli.common.results import AsJson, finite
from pippin.core.errors import InvalidArgument, PippinWarning
from pippin.recipes import laws as recipe
from pippin.recipes.laws import number

app = typer.Typer(no_args_is_help=True, help="Fit scaling laws and laws of forgetting to training runs.")

File = Annotated[Path, typer.Argument(metavar="LAW", help="Law that `pippin laws fit --out LAW` saved.")]
Size = Annotated[str, typer.Option("--parameters", "-N", metavar="N", help="Model parameters, such as 135M or 2e9.")]
Tokens = Annotated[str, typer.Option("--tokens", "-D", metavar="D", help="Training tokens, such as 300K or 20B.")]


@app.command()
@with_options
def fit(config: recipe.Config, as_json: AsJson = False) -> None:
    """Fit a law to a table of runs.

    pippin laws fit runs.csv --out law.json --plot law.png
    """
    documents.check_plot(None if config.plot is None else Path(config.plot))
    with documents.writing(Path(config.out or config.plot or "the law")):
        found = recipe.run(config, show_progress=not as_json)
    for warning in found.warnings:
        terminal.note(f"warning: {warning}")
    if as_json:
        out = {"out": None if config.out is None else str(config.out)}
        terminal.write(terminal.to_json(finite(found.summary() | out)) + "\n")
        return
    _table(found)
    for path, done in ((config.out, "saved in"), (config.plot, "plotted to")):
        if path is not None:
            terminal.note(f"{done} {path}")


@app.command()
def predict(
    law: File,
    parameters: Size,
    tokens: Tokens,
    share: Annotated[float, typer.Option(help="Share of pretraining data, for laws of fine-tuning.")] = 0.0,
    before: Annotated[
        float | None,
        typer.Option(metavar="LOSS", help="Forgetting: the model's loss on pretraining data before fine-tuning."),
    ] = None,
    sparsity: Annotated[float | None, typer.Option(help="Sparsity of the model, for sparse laws.")] = None,
    as_json: AsJson = False,
) -> None:
    """Predict the loss of a run, or its forgetting.

    pippin laws predict law.json --parameters 1.7B --tokens 40B
    """
    from pippin.train.laws.forgetting import FinetuningLaw, ForgettingLaw
    from pippin.train.laws.io import load_law
    from pippin.train.laws.scaling import ScalingLaw

    found, N, D = load_law(law), number(parameters), number(tokens)
    result: dict[str, Any] = {"form": found.form, "N": N, "D": D}
    if isinstance(found, ForgettingLaw):
        result["forgetting"] = float(found.forgetting(N, D, share))
        result["interval"] = found.band(N, D, share).tolist()
        if before is not None:
            result["loss"] = float(found.predict(N, D, share, before))
    elif isinstance(found, FinetuningLaw):
        result |= {"loss": float(found.predict(N, D, share)), "interval": found.band(N, D, share).tolist()}
    elif isinstance(found, ScalingLaw):
        result["loss"] = float(found.predict(N, D, sparsity=sparsity))
        result["interval"] = found.band(N, D, sparsity=sparsity).tolist()
    _print_result(result, as_json=as_json)


@app.command()
def optimal(
    law: File,
    compute: Annotated[str, typer.Option("--compute", "-C", metavar="FLOPS", help="Compute budget, such as 1e21.")],
    encoder: Annotated[
        str | None,
        typer.Option(metavar="N", help="Parameters of the vision encoder, out of the model parameters."),
    ] = None,
    encoder_share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the tokens that go through the encoder.")
    ] = 0.544,
    as_json: AsJson = False,
) -> None:
    """Compute-optimal model size and training tokens; compute is 6 N D without an encoder.

    pippin laws optimal law.json --compute 1e21
    """
    import numpy as np

    from pippin.train.laws.compute_budget import late_fusion_flops
    from pippin.train.laws.io import load_law
    from pippin.train.laws.scaling import ScalingLaw

    found = load_law(law)
    if not isinstance(found, ScalingLaw):
        raise InvalidArgument(f"{law} is a {found.form} law; only chinchilla laws have an optimal size")
    fixed = None if encoder is None else number(encoder)
    flops = None if fixed is None else late_fusion_flops(lambda N: np.minimum(fixed, 0.9 * N), encoder_share)
    with _collected_warnings() as messages:
        best = found.optimal(number(compute), flops)
    result = {"compute": best.compute, "N": best.N, "D": best.D, "loss": best.loss, "intervals": dict(best.intervals)}
    _print_result(result | {"tokens_per_parameter": best.D / best.N, "warnings": messages}, as_json=as_json)


@app.command("required-share")
def required_share(
    law: File,
    parameters: Size,
    tokens: Tokens,
    max_forgetting: Annotated[
        float, typer.Option(metavar="NATS", help="Largest increase of the loss on pretraining data.")
    ],
    as_json: AsJson = False,
) -> None:
    """Smallest share of pretraining data that limits forgetting; for `pippin train … --inject`.

    pippin laws required-share forgetting.json --parameters 135M --tokens 2M --max-forgetting 0.05
    """
    from pippin.train.laws.forgetting import ForgettingLaw
    from pippin.train.laws.io import load_law

    found = load_law(law)
    if not isinstance(found, ForgettingLaw):
        raise InvalidArgument(f"{law} is a {found.form} law; only forgetting laws have a required share")
    with _collected_warnings() as messages:
        given = found.required_share(number(parameters), number(tokens), max_forgetting)
    result = {"share": given.share, "interval": list(given.interval), "reached": given.reached, "warnings": messages}
    _print_result(result, as_json=as_json)


@contextmanager
def _collected_warnings() -> Iterator[list[str]]:
    """Collect warnings as strings, and print one line for each."""
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PippinWarning)
        yield messages
    for warning in caught:
        messages.append(str(warning.message))
        terminal.note(f"warning: {warning.message}")


def _table(found: recipe.LawFit) -> None:
    from rich.console import Console
    from rich.table import Table

    law = found.law
    table = Table(title=f"{law.form} law, {len(law.runs['N'])} runs", title_justify="left")
    for heading in ("coefficient", "value", "sd", "95 % interval"):
        table.add_column(heading, justify="left" if heading == "coefficient" else "right")
    for name, value in law.coefficients.items():
        low, high = law.intervals[name]
        known = not math.isnan(low)
        table.add_row(
            name, f"{value:.5g}", f"{law.se[name]:.2g}" if known else "", f"{low:.4g} – {high:.4g}" if known else ""
        )
    best = found.exponents
    if best is not None:
        low, high = best["a_interval"]
        spread = "" if math.isnan(low) else f"{low:.4g} – {high:.4g}"
        table.add_row("a: best N ~ C^a", f"{best['a']:.4f}", "", spread)
        table.add_row("b: best D ~ C^b", f"{best['b']:.4f}", "", "")
    Console().print(table)
    lines = [f"R2 of the loss {law.r2:.4f}, mean absolute error {100 * law.mae:.2f} %"]
    forgotten = getattr(law, "r2_forgetting", None)
    if forgotten is not None:
        lines.append(f"R2 of the forgetting {forgotten:.4f}")
    held = found.held_out
    if held is not None:
        error = 100 * held["mean_absolute_error"]
        lines.append(f"held out N = {held['N']:.4g}: predicted within {error:.2f} % ({held['runs']:.0f} runs)")
    terminal.write("\n".join(lines) + "\n")


def _print_result(result: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        terminal.write(terminal.to_json(finite(result)) + "\n")
        return
    for name, value in result.items():
        if name == "intervals":
            for which, (low, high) in value.items():
                terminal.write(f"{which}, 95 %: {low:.5g} – {high:.5g}\n")
        elif name == "interval":
            terminal.write(f"95 %: {value[0]:.5g} – {value[1]:.5g}\n")
        elif name != "warnings":
            terminal.write(f"{name}: {f'{value:.5g}' if isinstance(value, float) else value}\n")
