"""The words of the house: what is public, its flags and its docs use the field's terms in American spelling.

`docs/glossary.md` explains the terms; the lists below hold the words that they replaced.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
# Tests, tools and benchmarks may name a local value as they like, but are spelled and worded as the rest.
OTHERS = sorted(path for name in ("tests", "tools", "benchmarks", "examples") for path in (ROOT / name).rglob("*.py"))
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"])

# British spellings, by their stems. Words that are data (lists of spellings in both varieties) are listed below.
STEMS = (
    "quant token normal initial optim summar linear factor regular special standard capital penal palett recogn minim "
    "maxim stabil synthes organ general parametr amort visual serial categor priorit random vector local real"
)
BRITISH = re.compile(
    rf"\w*(?:{'|'.join(STEMS.split())})is(?:e|ed|es|er|ers|ing|ation|ations)|\w*(?:colour|behaviour|favour|neighbour)\w*"
    r"|grey\w*|centre[sd]?|catalogues?|learnt|spelt|(?:un)?labelled|maths|modelling|licences?|programmes?"
    r"|analy(?:se|sed|sing)"
)
SPELLING_IS_DATA = {
    "tests/test_names.py",
    "tests/evaluate/safety/test_evaluation.py",
    "src/pippin/evaluate/safety/judge.py",
    "src/pippin/kits/text/english_words.py",
    "src/pippin/session/guardrails/training_data.py",
}

# What a parameter, a field, a function or a class is not called, and the term instead.
NOT_NAMES = {
    "at_once": "batch_size",
    "together": "batch_size",
    "rounds": "max_iterations",
    "longest": "max_length",
    "how": "method",
    "facts": "metadata",
    "folder": "path",
    "foreign": "out_of_distribution",
    "foretold": "predicted",
    "pictures": "images",
    "show": "show_progress",
    "tutor": "teacher",
    "turned": "rotated",
    "leaders": "kv_sharing_layers",
    "retention": "kv_sharing_ratio",
    "told": "output, given",
    "wary": "conservative",
    "learnt": "trained",
    "lessons": "training examples",
}

# What prose does not say, and the term instead.
NOT_PROSE = {
    r"strange inputs?|foreign (?:inputs?|examples?|classes)": "out-of-distribution inputs",
    r"\bforetold\b": "predicted",
    r"numbers of an? (?:patch|picture|image)": "elements, dimensions",
    r"\bthe (?:plain )?network alone\b": "MAP network",
    r"\bby heart\b": "memorized",
    r"\bto the bit\b": "bit-identical",
    r"\bnoise (?:is )?taken off\b": "denoised",
    r"\bmade (?:data|scenes)\b": "synthetic data, synthetic scenes",
    r"\bback ends?\b": "backend",
    r"\bwhole or not at all\b": "atomically",
    r"\bhas no form of\b": "does not support",
    r"\bnever half there\b": "atomic",
}

FILES = {"rows", "pairs", "recorder", "stored", "readout", "desk", "door", "flight", "regular", "folder"}


@cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def tree_of(path: Path) -> list[ast.stmt]:
    return ast.parse(text_of(path)).body


def names(path: Path) -> list[tuple[str, int]]:
    """Every public name that a file defines, parameters and fields included, with its line."""
    return [each for each in _names(tree_of(path)) if not each[0].startswith("_")]


def _names(body: list[ast.stmt]) -> Iterator[tuple[str, int]]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno
            if node.name[0] != "_" or node.name == "__init__":
                taken = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}  # a folder beside a path
                for each in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]:
                    if NOT_NAMES.get(each.arg) not in taken:
                        yield each.arg, each.lineno
        elif isinstance(node, ast.ClassDef):
            yield node.name, node.lineno
            yield from _names(node.body)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node.lineno


def place(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# What its evidence was recorded under: the labels of a claim change with its next rule.
CLAIMS = ROOT / "src" / "pippin" / "claims"
NOT_CLAIMS = [path for path in SOURCES if CLAIMS not in path.parents]
NOT_FROM_CLAIMS = [page for page in PAGES if page.name not in ("claims.md", "systems.md") or page.parent.name != "docs"]


def test_names_are_the_terms_of_the_field():
    hits = []
    for path in SOURCES:
        hits += [f"{place(path)}:{line}: {n}: say {NOT_NAMES[n]}" for n, line in names(path) if n in NOT_NAMES]
    assert hits == []


def test_spelling_is_american():
    hits = []
    for path in [*SOURCES, *OTHERS, *PAGES]:
        if place(path) not in SPELLING_IS_DATA:
            words = set(re.findall(r"[^\W_]+", text_of(path).lower()))
            hits += [f"{place(path)}: {word}" for word in sorted(words) if BRITISH.fullmatch(word)]
    assert hits == []


@pytest.mark.parametrize("pattern", NOT_PROSE)
def test_prose_uses_the_terms_of_the_field(pattern):
    hits = []
    for path in [*NOT_CLAIMS, *OTHERS, *NOT_FROM_CLAIMS]:
        if path == Path(__file__).resolve():
            continue
        for match in re.finditer(pattern, text_of(path), re.IGNORECASE):
            hits.append(f"{place(path)}: {match[0]!r}: say {NOT_PROSE[pattern]}")
    assert hits == []


def test_files_are_called_what_a_newcomer_looks_for():
    assert [place(path) for path in SOURCES if path.stem in FILES] == []


def test_no_two_public_classes_share_a_name():
    homes: dict[str, list[str]] = {}
    for path in SOURCES:
        for node in tree_of(path):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(place(path))
    del homes["Config"]  # of each recipe, beside its `run`
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}
