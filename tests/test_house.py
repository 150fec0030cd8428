"""The rules of the house that a machine can hold: imports, generated pages, dependencies, paths."""

import ast
import inspect
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import generate_docs
import pytest

from pippin.claims import catalog
from pippin.core import errors

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
STANDARD = {name.lower() for name in sys.stdlib_module_names}
SOURCES = sorted((ROOT / "src").rglob("*.py"))


def fresh_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def distribution(requirement: str) -> str:
    return re.match(r"[\w.-]+", requirement)[0].replace("-", "_").lower()


def required(group: str | None = None) -> set[str]:
    project = PROJECT["project"]
    return {
        distribution(line) for line in (project["optional-dependencies"][group] if group else project["dependencies"])
    }


def test_importing_pippin_is_quick_and_loads_no_torch():
    code = (
        "import sys, time; start = time.perf_counter(); import pippin; "
        "print(time.perf_counter() - start, 'torch' in sys.modules)"
    )
    runs = [fresh_python(code).split() for _ in range(3)]
    assert {torch for _, torch in runs} == {"False"}
    assert min(float(seconds) for seconds, _ in runs) < 0.3


def test_importing_pippin_prints_nothing():
    assert fresh_python("import pippin") == ""


def test_imports_only_go_down():
    done = subprocess.run([Path(sys.executable).parent / "lint-imports"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_every_folder_has_its_floor():
    layers = PROJECT["tool"]["importlinter"]["contracts"][0]["layers"]
    floors = set(re.findall(r"pippin\.(\w+)", " ".join(layers)))
    folders = {
        path.name for path in (ROOT / "src" / "pippin").iterdir() if path.is_dir() and path.name != "__pycache__"
    }
    assert folders <= floors


def test_a_page_that_was_edited_is_out_of_date(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    monkeypatch.setitem(generate_docs.PAGES, page, lambda: "text\n")
    assert not generate_docs.is_current(page)
    page.write_text(generate_docs.text_of(page))
    assert generate_docs.is_current(page)
    page.write_text(page.read_text() + "more\n")
    assert not generate_docs.is_current(page)


@pytest.mark.parametrize("row", generate_docs.systems(), ids=lambda row: row["name"])
def test_a_system_names_only_what_exists(row):
    assert set(row) == {"area", "name", "what", "module", "so_far", "claims"}
    if row["module"] is None:
        assert (row["so_far"], row["claims"]) == ("", [])
    else:
        assert row["module"].startswith("pippin.")
        generate_docs.resolve(row["module"])
    assert set(row["claims"]) <= set(catalog.find())


def test_every_claim_is_about_one_system():
    named = [claim for row in generate_docs.systems() for claim in row["claims"]]
    assert sorted(named) == list(catalog.find())


def test_systems_are_the_83_of_the_corpus_each_once():
    names = [row["name"] for row in generate_docs.systems()]
    assert len(names) == len(set(names)) == 83


@pytest.mark.parametrize("name", ["pippin.nowhere", "pippin.claims.nobody", "pippin.claims.ledger.Claim.nothing"])
def test_a_name_that_does_not_exist_is_not_resolved(name):
    with pytest.raises((ImportError, AttributeError)):
        generate_docs.resolve(name)
    assert generate_docs.resolve("pippin.claims.ledger.Claim.__call__") is not None


def test_every_dependency_is_explained_and_nothing_else():
    explained = set(re.findall(r"^\| `([\w-]+)` \|", (ROOT / "docs" / "dependencies.md").read_text(), re.MULTILINE))
    named = required().union(*(required(extra) for extra in PROJECT["project"]["optional-dependencies"]))
    assert {name.replace("-", "_") for name in explained} == named


def imported_libraries() -> dict[str, set[str]]:
    """Top-level names of the libraries that src/ imports, with the files that do."""
    found: dict[str, set[str]] = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names = [node.module]
            for name in names:
                found.setdefault(name.split(".")[0], set()).add(path.name)
    return {name: files for name, files in found.items() if name not in sys.stdlib_module_names and name != "pippin"}


def test_src_imports_what_it_requires_and_requires_what_it_imports():
    imported = {name.lower(): files for name, files in imported_libraries().items()}
    optional = set().union(*(required(extra) for extra in PROJECT["project"]["optional-dependencies"]))
    # The second halves of pydantic, fastapi and mcp, released with them, and other names of Pillow, scikit-learn and
    # text2num.
    known = (
        required() | optional | {"pydantic_core", "starlette", "anyio", "mcp_types", "pil", "sklearn", "text_to_num"}
    )
    assert {name: files for name, files in imported.items() if name not in known} == {}
    assert required() - set(imported) - {"text2num"} == set()


def test_optional_libraries_are_not_imported_at_the_top():
    # the server's own floor is only entered by `pippin serve`, which checks for them first, and what stands on
    # transformers only for a model that opens through it
    rooms = ("serve", "language/transformers_models/cache", "language/transformers_models/probe")
    for path in SOURCES:
        if path.relative_to(ROOT / "src" / "pippin").as_posix().startswith(rooms):
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                named = node.names[0].name if isinstance(node, ast.Import) else node.module or ""
                assert (
                    distribution(named.split(".")[0])
                    in required() | {"pippin", "pydantic_core", "text_to_num"} | STANDARD
                ), path


def tracked_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode != 0:
        pytest.skip("not a git clone")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


# In pieces, so that this file does not find itself.
MACHINE = re.compile(r"(?<![\w.~])/(?:" + "|".join(["work", "farm", "root", "home", "Users"]) + r")/\w+")
REGISTRY = re.compile(
    "|".join([r"py" + r"pi\.org", "python" + "hosted", r"registry\.npm" + "js", r"download\.py" + "torch"])
)


@pytest.mark.parametrize("pattern", [MACHINE, REGISTRY], ids=["machine paths", "registry hosts"])
def test_no_file_names_a_machine(pattern):
    assert MACHINE.search('open("/root' + '/x")')
    hits = []
    for path in tracked_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        hits += [f"{path.relative_to(ROOT)}: {match[0]}" for match in pattern.finditer(text)]
    assert hits == []


FACES = [
    ".".join(path.parent.relative_to(ROOT / "src").parts)
    for path in SOURCES
    if path.name == "__init__.py" and "__all__" in path.read_text()
]


@pytest.mark.parametrize("face", FACES)
def test_what_a_face_exports_exists_and_says_what_it_does(face):
    package = import_module(face)
    silent = []
    for name in package.__all__:
        value = getattr(package, name)
        if (inspect.isclass(value) or inspect.isfunction(value)) and not inspect.getdoc(value):
            silent.append(name)
    assert silent == []


@pytest.mark.parametrize("face", FACES)
def test_no_export_hides_a_module_of_its_own_name(face):
    package = import_module(face)
    modules = {path.stem for folder in package.__path__ for path in Path(folder).iterdir()} - {"__init__"}
    assert {
        name for name in package.__all__ if name in modules and not inspect.ismodule(getattr(package, name))
    } == set()


def test_every_error_is_provoked_by_a_test():
    classes = {kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.PippinError)}
    leaves = {kind.__name__ for kind in classes if not kind.__subclasses__()}
    expected = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        tree = ast.parse(path.read_text())
        # named in a call of pytest.raises, or in the parameters of a test that hands them to it
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("pytest.raises", "pytest.mark.parametrize"):
                expected |= {n.attr if isinstance(n, ast.Attribute) else n.id for n in ast.walk(node) if _is_name(n)}
    assert leaves - expected == set()


def _is_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute | ast.Name)


def test_every_package_of_src_can_be_imported():
    for path in (ROOT / "src" / "pippin").rglob("*.py"):
        name = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
        import_module(name)
