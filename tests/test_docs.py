"""What the README and the tutorials show is tried: Python runs in order, on the default model; commands are parsed."""

import re
import shlex
import sys
from pathlib import Path
from types import ModuleType

import pytest
import typer

from pippin.cli.app import app

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "docs" / "install.md", *sorted((ROOT / "docs" / "tutorials").glob("*.md"))]


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """Code blocks of that language, each with the line it begins at."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, match.start(1)), match[1]) for match in found]


def commands() -> list[str]:
    lines = [line for page in PAGES for _, block in blocks(page, "sh") for line in block.splitlines()]
    return sorted(
        {match[1] for line in lines if (match := re.search(r"(?:^|/| )pippin (.*)$", line)) and "pip " not in line}
    )


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.stem)
def test_python_blocks_run(page, default_model_path, monkeypatch):
    module = ModuleType(f"page_{page.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for line, block in blocks(page, "python"):
        # Empty lines in front, so that an error names the line of the page.
        exec(compile("\n" * line + block, str(page), "exec"), vars(module))


@pytest.mark.parametrize("line", commands())
def test_commands_parse(line):
    words = shlex.split(re.split("  #| [|] ", line)[0])
    group = typer.main.get_command(app)
    while words and words[0] in getattr(group, "commands", {}):
        group = group.commands[words.pop(0)]
    assert not hasattr(group, "commands"), f"{line!r} names no verb"
    group.make_context("pippin", words)


def test_there_are_commands_and_pages_to_check():
    assert len(commands()) > 15
    assert sum(len(blocks(page, "python")) for page in PAGES) > 12


@pytest.mark.parametrize(
    "page", [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"], ids=lambda page: page.stem
)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
    missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert missing == []
