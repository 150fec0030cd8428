"""Write what is computed in pages: systems, claims, models, benchmarks, reference, index, extras, counts.

python tools/generate_docs.py           write them
python tools/generate_docs.py --check   write nothing; say which are out of date and fail
"""

from __future__ import annotations

import argparse
import html
import importlib
import json
import math
import re
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import extraction_figures
import guardrail_figures
import json_schema_table
import model_table
import mutation

from pippin.claims import catalog, report
from pippin.core.store import store

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
SYSTEMS = ROOT / "src" / "pippin" / "claims" / "systems.json"
API_FOLDERS = (
    "session", "serve", "recipes", "kits", "evaluate", "shape", "language", "generate", "bayes", "train", "engine",
    "data", "nn", "metrics", "core", "claims",
)  # fmt: skip
NOTICE = "<!-- Written by tools/generate_docs.py; edits are lost. -->"


def systems() -> list[dict[str, Any]]:
    """The rows of `systems.json`: area, name, what, module or None, so_far (empty: all of it), ids of its claims."""
    rows: list[dict[str, Any]] = json.loads(SYSTEMS.read_text(encoding="utf-8"))
    return rows


def resolve(name: str) -> object:
    """The module or attribute with this dotted name.

    Raises:
        ImportError: no leading part of the name is a module.
        AttributeError: the rest of the name is not in it.
    """
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        path = ".".join(parts[:length])
        try:
            found: object = importlib.import_module(path)
        except ModuleNotFoundError as error:
            if error.name is None or not path.startswith(error.name):
                raise  # a library that the module needs, not the module itself
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise ImportError(f"{name!r} is no module")


def count(rows: list[dict[str, Any]], verdicts: dict[str, str]) -> str:
    """The state of the systems in one sentence."""
    built = sum(row["module"] is not None for row in rows)
    partly = sum(row["module"] is not None and row["so_far"] != "" for row in rows)
    found = [verdicts[claim] for row in rows for claim in row["claims"]]
    reproduced = [verdict for verdict in found if verdict.startswith("reproduced")]
    stale = sum(verdict.endswith("stale") for verdict in reproduced)
    return (
        f"**{built} of {len(rows)}** systems have a module ({partly} of them in part); "
        f"**{len(reproduced)} of {len(found)}** claims about them reproduce so far, "
        f"{stale} of these in a run that is stale."
    )


def systems_page() -> str:
    """`docs/systems.md`."""
    rows, verdicts = systems(), _verdicts()
    lines = [
        "# Systems",
        "",
        "The published systems that Pippin aims to implement, the module of each, and whether its claims",
        "reproduce. A system without a module is not implemented yet.",
        "",
        count(rows, verdicts),
    ]
    area = None
    for row in rows:
        if row["area"] != area:
            area = row["area"]
            lines += ["", f"## {area}", "", "| system | what it is | module | claims |", "|---|---|---|---|"]
        module = f"`{row['module']}`" if row["module"] else "not yet"
        if row["so_far"]:
            module += f", in part: {row['so_far']}"
        claims = "; ".join(f"[{claim}](claims.md#{claim}): {verdicts[claim]}" for claim in row["claims"])
        lines.append(f"| {row['name']} | {row['what']} | {module} | {claims} |")
    return "\n".join(lines) + "\n"


def claims_page() -> str:
    """`docs/claims.md`."""
    head = (
        "# Claims\n\nThe published sentence, our setting, and the result of each claim. The rule of a claim\n"
        "is asked of the method and of controls that must fail it; the verdict is computed from what was recorded.\n"
        "*Stale* means that the rule or the code changed since the run. See\n"
        "[how to run a claim](tutorials/claims.md).\n\n"
    )
    return head + report.page(catalog.find().values(), results=ROOT / "results")


def benchmarks_page() -> str:
    """`docs/benchmarks.md`, from what `make bench` recorded."""
    lines = [
        "# Benchmarks",
        "",
        "Speed and quality against named peers, measured on one machine at one time. A ratio above 1 means that",
        "Pippin is better.",
        "`make bench` measures again. [Performance](performance.md) covers the engine on a CPU.",
    ]
    folder = ROOT / "results" / "benchmarks"
    files = sorted(path for path in folder.glob("*.json") if path.stem not in ENGINE_BENCHMARKS)
    if not files:
        lines += ["", "Nothing has been recorded yet."]
    for file in files:
        kept = json.loads(file.read_text(encoding="utf-8"))
        lines += ["", f"## {file.stem.replace('_', ' ').capitalize()}", "", _circumstances(kept), ""]
        lines += [
            "| what | Pippin | peer | peer's value | unit | ratio | goal | met |",
            "|---|--:|---|--:|---|--:|--:|---|",
        ]
        lines += [_benchmark_row(row) for row in kept["rows"]]
    return "\n".join(lines) + "\n"


def _circumstances(kept: dict[str, Any]) -> str:
    machine, versions = kept["machine"], kept["versions"]
    names = ", ".join(f"{name} {version}" for name, version in versions.items())
    commit = (
        "no commit" if kept["commit"] is None else kept["commit"][:10] + (" with changes" if kept["changed"] else "")
    )
    return f"{machine['cpu']}, {machine['threads']} threads; {names}; {commit}; {kept['started'][:10]}"


def _benchmark_row(row: dict[str, Any]) -> str:
    def cell(value: object) -> str:
        if value is None:
            return ""
        if isinstance(value, bool):
            return "yes" if value else "no"
        return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|")

    keys = ("what", "ours", "peer", "peer_value", "unit", "ratio", "goal", "met")
    return f"| {' | '.join(cell(row[key]) for key in keys)} |"


def performance_page() -> str:
    """`docs/performance.md` with the figures between its markers brought up to date."""
    return _between(DOCS / "performance.md", figures=figures())


def _between(path: Path, **blocks: str) -> str:
    """A page with what stands between its markers of these names replaced."""
    text = path.read_text(encoding="utf-8")
    for name, block in blocks.items():
        opening, closing = f"<!-- {name} -->", f"<!-- /{name} -->"
        found = re.findall(f"{opening}.*?{closing}", text, flags=re.DOTALL)
        if len(found) != 1:
            raise SystemExit(f"{path.name} needs one pair of {opening} and {closing}")
        text = text.replace(found[0], f"{opening}\n{block}\n{closing}")
    return text


# Benchmarks of the engine, in the order of the page: file in results/benchmarks/, heading.
ENGINE_BENCHMARKS = {
    "cpu_decode": "Decoding",
    "cpu_prefill": "Prefill",
    "cpu_families": "Families of models",
    "cpu_other_families": "Families that transformers computes",
    "cpu_concurrent": "Sixteen concurrent requests",
    "cpu_cache": "Prefix and prompt caches",
    "bounded_cache": "Long conversations in a bounded cache",
    "cpu_grammar": "Grammars",
    "cpu_memory": "Memory and loading",
    "speculation": "Speculative decoding",
    "soak": "Soak test",
}


def figures() -> str:
    """What the engine's benchmarks recorded: a table for each, its circumstances, and the goals that were missed."""
    kept = {name: _recorded(name) for name in ENGINE_BENCHMARKS}
    rows = [row for found in kept.values() if found for row in found["rows"]]
    judged = [row for row in rows if row["met"] is not None]
    lines = [f"**{sum(row['met'] for row in judged)} of {len(judged)}** goals were met when they were last measured."]
    for name, found in kept.items():
        lines += ["", f"### {ENGINE_BENCHMARKS[name]}", ""]
        if found is None:
            lines += [f"Nothing has been recorded yet: `python tools/run_benchmarks.py {name}`."]
            continue
        lines += [_circumstances(found), ""]
        lines += [
            "| what | Pippin | peer | peer's value | unit | ratio | goal | met |",
            "|---|--:|---|--:|---|--:|--:|---|",
        ]
        lines += [_benchmark_row(row) for row in found["rows"]]
        notes = dict.fromkeys(row["note"] for row in found["rows"] if row["note"])
        lines += ["", *(f"- {note}" for note in notes)] if notes else []
    missed = [row for row in judged if not row["met"]]
    lines += ["", "### Missed", ""]
    lines += [_missed(row) for row in missed] or ["No goal, of those that were measured."]
    return "\n".join(lines)


def _recorded(name: str) -> dict[str, Any] | None:
    """The rows of a benchmark with their circumstances; None where it has not been run."""
    file = ROOT / "results" / "benchmarks" / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def _missed(row: dict[str, Any]) -> str:
    """By how much a goal was missed."""
    short = 100 * (1 - row["ratio"] / row["goal"])
    return f"- {row['what']}, beside {row['peer']}: {row['ratio']:.3g} of {row['goal']:.3g}, {short:.0f} % short"


def two_bits_page() -> str:
    """`docs/two_bits.md` with the figures and answers between its markers brought up to date."""
    page, file = DOCS / "two_bits.md", ROOT / "results" / "two_bits.json"
    if not file.is_file():
        return _between(page, figures="Nothing has been recorded yet.")
    kept = json.loads(file.read_text(encoding="utf-8"))
    return _between(page, figures=_two_bits_figures(kept), answers=_two_bits_answers(kept))


def _two_bits_figures(kept: dict[str, Any]) -> str:
    """What training took, and a row for each model."""
    machine, stages = kept["machine"], kept["stages"]
    commit = "no commit" if kept["commit"] is None else kept["commit"][:10]
    lines = [f"{machine['cpu']}, {machine['threads']} threads; {commit}.", ""]
    for name, title in (("lora", "LoRA"), ("qat", "2-bit training")):
        stage = stages[name]
        seconds, learned = sum(stage["seconds"]), sum(stage["tokens"])
        lines.append(
            f"- {title}: {len(stage['loss'])} steps, {learned:,.0f} learned tokens, {seconds / 60:.0f} minutes; "
            f"loss on new problems from {stage['held_out'][0][1]:.2f} (step {stage['held_out'][0][0]}) "
            f"to {stage['held_out'][-1][1]:.2f} nats a token"
        )
    lines += [
        "",
        "| model | weights, MB | answer, tokens/s | perplexity, new problems | perplexity, encyclopedia | solved |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, one in kept["models"].items():
        new, old = (math.exp(one[key]) for key in ("problems_nats", "encyclopedia_nats"))
        lines.append(
            f"| {name} | {one['megabytes']:.1f} | {one['tokens_per_second']:.0f} | {new:.3g} | {old:.3g} "
            f"| {one['solved']:.1%} |"
        )
    return "\n".join(lines)


def _two_bits_answers(kept: dict[str, Any]) -> str:
    """Every question with what the file's model and the trained one said."""
    lines = []
    shown = ("original, 4 bits", "teacher, 8 bits", "teacher, 2 bits, GPTQ", "teacher, 2 bits, trained")
    for index, question in enumerate(kept["questions"]):
        lines += [f"**{question}**", ""]
        for name in shown:
            said = " ".join(kept["models"][name]["answers"][index].split())
            lines += [f"- *{name}*: {html.escape(said[:400])}{' …' if len(said) > 400 else ''}"]
        lines.append("")
    return "\n".join(lines).rstrip()


# What each extra of pyproject.toml is for.
EXTRAS = {
    "plot": "`Report.plot`, the loss plot of a run",
    "image": "image and video files",
    "train": "training data in Parquet files and `datasets` folders; TensorBoard logs",
    "serve": "the [server](tutorials/server.md), sealed requests",
    "mcp": "[MCP](tutorials/mcp.md): tools from outside, our tasks as tools",
    "transformers": "[other families](tutorials/models.md#other-families-through-transformers) of language models",
    "export": "[export](tutorials/export.md) to ONNX and GGUF",
    "export-apple": "export to Core AI and Core ML",
    "export-extra": "export to OpenVINO and ExecuTorch",
    "bayes": "posteriors by neural simulation, transport plans, acquisition",
    "claims": "claims whose controls or data come from scikit-learn",
    "ray": "replicas of the server and training on several machines",
    "test": "for developers: running the tests",
    "bench": "for developers: the peers of the benchmarks",
    "docs": "for developers: building this site",
    "nightly": "for developers: mutation tests and fuzzing",
    "dev": "for developers: linters and type checker",
}


def install_page() -> str:
    """`docs/install.md` with the table of extras between its markers brought up to date."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    if wrong := set(EXTRAS) ^ set(extras):
        raise SystemExit(f"EXTRAS and pyproject.toml do not have the same extras: {', '.join(sorted(wrong))}")
    lines = ["| extra | for | brings |", "|---|---|---|"]
    for extra, requirements in extras.items():
        names = ", ".join(re.split(r"[<>=~!; ]", requirement)[0] for requirement in requirements)
        lines.append(f"| `{extra}` | {EXTRAS[extra]} | {names} |")
    return _between(DOCS / "install.md", extras="\n".join(lines))


def guardrails_page() -> str:
    """`docs/tutorials/guardrails.md` with what was measured between its markers."""
    figures = guardrail_figures
    blocks = {"example": figures.example(), "profiles": figures.profiles(), "streaming": figures.streaming()}
    return _between(DOCS / "tutorials" / "guardrails.md", **blocks)


def safety_page() -> str:
    """`docs/tutorials/safety.md` with what was measured between its markers."""
    blocks = {"report": guardrail_figures.report(), "locales": guardrail_figures.locales()}
    return _between(DOCS / "tutorials" / "safety.md", **blocks)


# Arms of the claim `epicache`, in the order of the page.
CACHE_POLICIES = {
    "full cache": "whole cache",
    "epicache": "`EpiCache`",
    "keydiff": "`KeyDiff`",
    "snapkv": "`SnapKV`",
    "streaming-llm": "`StreamingLLM`",
    "h2o": "`H2O`",
}


def extraction_page() -> str:
    """`docs/tutorials/extraction.md` with what the two benchmarks of extraction measured."""
    blocks = {"default": extraction_figures.default_model(), "larger": extraction_figures.larger_models()}
    return _between(DOCS / "tutorials" / "extraction.md", **{name: f"\n{text}\n" for name, text in blocks.items()})


def long_conversations_page() -> str:
    """`docs/tutorials/long_conversations.md` with what the newest run of the claim `epicache` measured, and speeds."""
    kept = json.loads((ROOT / "results" / "claims" / "epicache.json").read_text(encoding="utf-8"))
    newest = max((run for run in kept["runs"] if run["scale"] == "long"), key=lambda run: run["started"])
    right = [figure for figure in newest["figures"] if figure["name"] == "right"]
    means = [statistics.mean(figure["value"] for figure in right if figure["arm"] == arm) for arm in CACHE_POLICIES]
    rows = [CACHE_POLICIES.values(), ["---"] * len(means), [f"{mean:.0%}".replace("%", " %") for mean in means]]
    accuracy = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    page = DOCS / "tutorials" / "long_conversations.md"
    return _between(page, accuracy=f"\n{accuracy}\n", speed=f"\n{_bounded_cache_speed()}\n")


def _bounded_cache_speed() -> str:
    """How long a token of an answer takes with KeyDiff, as shares of the time of two peers."""
    rows = json.loads((ROOT / "results" / "benchmarks" / "bounded_cache.json").read_text(encoding="utf-8"))["rows"]
    shares = {
        peer: f"{100 * row['ours'] / row['peer_value']:.0f} %"
        for peer in ("llama.cpp", "kvpress")
        for row in rows
        if row["what"] == "keydiff: a token of an answer" and row["peer"].startswith(peer) and row["peer_value"]
    }
    if len(shares) != 2:
        raise SystemExit("long_conversations.md needs bounded_cache.json beside llama.cpp and kvpress")
    return (
        f"With KeyDiff a token of the answer takes {shares['llama.cpp']} of llama.cpp's time with its whole cache, and "
        f"{shares['kvpress']} of\nkvpress's with the same policy ([the benchmark](../performance.md))."
    )


def cli_page() -> str:
    """`docs/cli.md`, by typer's own generator."""
    words = [sys.executable, "-m", "typer", "pippin.cli.app", "utils", "docs", "--name", "pippin"]
    text = subprocess.run(
        [*words, "--title", "Command line"], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def readme() -> str:
    """README.md with the count of systems between its markers brought up to date."""
    return _between(ROOT / "README.md", systems=count(systems(), _verdicts()))


def index_page() -> str:
    """`docs/index.md`: the README, its links as seen from the site."""
    return readme().replace("](docs/", "](").replace('src="docs/', 'src="')


def json_schema_page() -> str:
    """`docs/json-schema.md`, measured on the official test suite."""
    return json_schema_table.page(store.pull("json-schema-test-suite"))


def api_page(folder: str) -> str:
    """`docs/api/FOLDER.md`: every module of that folder that is not private, for mkdocstrings to fill."""
    top = ROOT / "src" / "pippin" / folder
    inner = sorted(path.parent for path in top.rglob("*/__init__.py"))
    modules = sorted(path for part in (top, *inner) for path in part.glob("*.py") if path.stem[0] != "_")
    names = (".".join(path.relative_to(top.parents[1]).with_suffix("").parts) for path in modules)
    return "\n\n".join([f"# pippin.{folder}", *(f"::: {name}" for name in names)]) + "\n"


def _verdicts() -> dict[str, str]:
    rows = report.summaries(catalog.find().values(), results=ROOT / "results")
    return {row["id"]: report.label(row) for row in rows}


PAGES: dict[Path, Callable[[], str]] = {
    DOCS / "systems.md": systems_page,
    DOCS / "claims.md": claims_page,
    DOCS / "benchmarks.md": benchmarks_page,
    DOCS / "performance.md": performance_page,
    DOCS / "two_bits.md": two_bits_page,
    DOCS / "cli.md": cli_page,
    DOCS / "install.md": install_page,
    DOCS / "tutorials" / "guardrails.md": guardrails_page,
    DOCS / "tutorials" / "safety.md": safety_page,
    DOCS / "tutorials" / "long_conversations.md": long_conversations_page,
    DOCS / "tutorials" / "extraction.md": extraction_page,
    DOCS / "index.md": index_page,
    DOCS / "json-schema.md": json_schema_page,
    DOCS / "models.md": model_table.page,
    DOCS / "mutation.md": mutation.page,
    ROOT / "README.md": readme,
} | {DOCS / "api" / f"{folder}.md": partial(api_page, folder) for folder in API_FOLDERS}


# These say in their own words that they are generated.
SAY_SO_THEMSELVES = {
    DOCS / "install.md",
    DOCS / "json-schema.md",
    DOCS / "performance.md",
    DOCS / "two_bits.md",
    DOCS / "tutorials" / "guardrails.md",
    DOCS / "tutorials" / "safety.md",
    DOCS / "tutorials" / "long_conversations.md",
    DOCS / "tutorials" / "extraction.md",
    ROOT / "README.md",
}


def text_of(page: Path) -> str:
    """What stands in that page if it is up to date.

    Raises:
        AssetError: the page is measured on data that cannot be fetched.
    """
    text = PAGES[page]()
    return text if page in SAY_SO_THEMSELVES else f"{NOTICE}\n\n{text}"


def is_current(page: Path) -> bool:
    """Whether the file is what would be written now."""
    return page.is_file() and page.read_text(encoding="utf-8") == text_of(page)


def main() -> int:
    """Write the pages, or check them; 1 if a page is out of date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, fail if a page is out of date")
    if parser.parse_args().check:
        outdated = [page for page in PAGES if not is_current(page)]
        for page in outdated:
            print(f"{page.relative_to(ROOT)} is out of date; run: python tools/generate_docs.py", file=sys.stderr)
        return int(bool(outdated))
    for page, text in {page: text_of(page) for page in PAGES}.items():
        page.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
