"""The claims as their files say them, read without importing one; and what a run of each depends on, as hashes.

Notable here:
- a claim's `@claim(...)` is read from the syntax tree, so listing a hundred claims loads neither torch nor a model
- the hash of a rule covers the text and the predicate of each condition, the functions and constants of the file that
  a predicate names, the method and the controls
- the modules of a run are the claim's file, the worlds, what these import from Pippin and what the claim names as
  `uses`; comments, docstrings and blank lines do not count
"""

from __future__ import annotations

import ast
import copy
import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from pippin.core.errors import ClaimError

FOLDER = Path(__file__).resolve().parent
CLAIMS = FOLDER
"""Where claims are looked for."""
_NOT_CLAIMS = frozenset({"ledger", "catalog", "records", "runner", "report", "worlds"})
_TEXTS = ("source", "headline", "setting", "method", "reported")


@dataclass(frozen=True)
class StatedCondition:
    """A condition as the file states it; `predicate` is its source."""

    name: str
    text: str
    predicate: str
    headline: bool = False
    positive: bool = False


@dataclass(frozen=True)
class StatedRule:
    """The rule of a claim, as hashed: an evidence file keeps it whole, so that old rules stay readable."""

    version: int
    method: str
    negative_controls: tuple[str, ...]
    positive_control: str | None
    conditions: tuple[StatedCondition, ...]
    accept: str = ""

    @property
    def hash(self) -> str:
        """SHA-256 over everything but the version; a rule in prose is its text alone."""
        content = self.accept or json.dumps([asdict(self) | {"version": None, "accept": None}], ensure_ascii=False)
        return hashlib.sha256(content.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Stated:
    """A claim as its file states it.

    Attributes:
        file: the file.
        area: the folder it stands in ("bayes"); empty outside the package.
    """

    id: str
    source: str
    headline: str
    setting: str
    rule: StatedRule
    file: Path
    area: str = ""
    reported: str = ""
    uses: tuple[str, ...] = ()
    superseded: dict[int, str] = field(default_factory=dict)


def find(folder: Path | None = None) -> dict[str, Stated]:
    """Every claim by its id, sorted.

    Args:
        folder: where to look for the files, also in its folders; by default beside this file.

    Raises:
        ClaimError: a file without a claim, a claim in a file of another name, one whose arguments cannot be read, or an
            id used twice.
    """
    top = folder or CLAIMS
    claims: dict[str, Stated] = {}
    for path in _files(top):
        inside = path.parent.relative_to(top)
        for found in read(path, area=inside.as_posix() if inside.parts else ""):
            if not belongs(found.id, path):
                raise ClaimError(f"claim {found.id!r} stands in {path.name}; its file must be named after it")
            if found.id in claims:
                raise ClaimError(f"two claims are called {found.id!r}")
            claims[found.id] = found
    return dict(sorted(claims.items()))


def get(id: str, folder: Path | None = None) -> Stated:
    """One claim by its id, or by the path of a file that holds one claim.

    Raises:
        ClaimError: no claim has this id; the message names similar ones, or all. Or the file holds none, or several.
    """
    if id.endswith(".py"):
        found = read(Path(id))
        if len(found) != 1:
            raise ClaimError(f"{id} holds {len(found)} claims; name one of: {', '.join(c.id for c in found)}")
        return found[0]
    top = folder or CLAIMS
    for path in _files(top):
        if belongs(id, path):
            for stated in read(path, area=path.parent.name if path.parent != top else ""):
                if stated.id == id:
                    return stated
    known = list(find(folder))
    near = get_close_matches(id, known, 3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are: {', '.join(known) or 'none yet'}"
    raise ClaimError(f"no claim is called {id!r}; {hint}")


def belongs(id: str, path: Path) -> bool:
    """Whether a file of that name may hold that claim."""
    stem = path.stem.replace("_", "-")
    return id == stem or id.startswith(f"{stem}-")


def read(path: Path, area: str = "") -> list[Stated]:
    """The claims that a file states.

    Raises:
        ClaimError: the file is missing, is not Python, holds no claim, or an argument of one cannot be read.
    """
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError) as error:
        raise ClaimError(f"{path} cannot be read as a claim: {error}") from error
    names = _assigned(tree)
    claims = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            for call in node.decorator_list:
                if isinstance(call, ast.Call) and getattr(call.func, "id", None) == "claim":
                    claims.append(_stated(call, names, path, area))
    if not claims:
        raise ClaimError(f"{path.name} is among the claims but holds none")
    return claims


def _files(top: Path) -> Iterator[Path]:
    for path in sorted(top.rglob("*.py")):
        parts = path.relative_to(top).with_suffix("").parts
        if parts[0] not in _NOT_CLAIMS and not any(part.startswith("_") for part in parts):
            yield path


def _assigned(tree: ast.Module) -> dict[str, ast.stmt]:
    """Functions and constants of the file by name."""
    names: dict[str, ast.stmt] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            names[node.name] = node
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                for each in ast.walk(target):
                    if isinstance(each, ast.Name):
                        names[each.id] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            names[node.target.id] = node
    return names


def _stated(call: ast.Call, names: dict[str, ast.stmt], path: Path, area: str) -> Stated:
    given = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}

    def literal(name: str, default: Any) -> Any:
        if name not in given:
            return default
        try:
            return _value(given[name], names)
        except ValueError as error:
            raise ClaimError(
                f"{path.name}: the claim's {name!r} is not a literal ({error}); claims are read without importing them"
            ) from error

    texts = {name: str(literal(name, "")) for name in _TEXTS}
    rule = StatedRule(
        version=literal("version", 1),
        method=texts.pop("method"),
        negative_controls=tuple(literal("negative_controls", ())),
        positive_control=literal("positive_control", None),
        conditions=_conditions(given.get("conditions"), names, path),
    )
    return Stated(
        id=literal("id", ""),
        source=texts["source"],
        headline=texts["headline"],
        setting=texts["setting"],
        rule=rule,
        file=path,
        area=area,
        reported=texts["reported"],
        uses=tuple(literal("uses", ())),
        superseded=dict(literal("superseded", {})),
    )


def _conditions(node: ast.expr | None, names: dict[str, ast.stmt], path: Path) -> tuple[StatedCondition, ...]:
    if node is None:
        return ()
    if not isinstance(node, ast.List | ast.Tuple):
        raise ClaimError(f"{path.name}: conditions must be written out as a list of Condition(...)")
    stated = []
    for call in node.elts:
        if not (isinstance(call, ast.Call) and getattr(call.func, "id", None) == "Condition"):
            raise ClaimError(f"{path.name}: conditions must be written out as a list of Condition(...)")
        given = dict(zip(("name", "text", "predicate"), call.args, strict=False))
        given |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        try:
            values = {key: _value(value, names) for key, value in given.items() if key != "predicate"}
        except ValueError as error:
            raise ClaimError(f"{path.name}: a condition's text is not a literal ({error})") from error
        stated.append(StatedCondition(**values, predicate=_source(given["predicate"], names)))
    return tuple(stated)


def _value(node: ast.expr, names: dict[str, ast.stmt]) -> Any:
    """The value of a literal, of a constant of the file, of an f-string or of a sum of these.

    Raises:
        ValueError: it is something else.
    """
    if isinstance(node, ast.Name):
        bound = names.get(node.id)
        if isinstance(bound, ast.Assign | ast.AnnAssign) and bound.value is not None:
            targets = bound.targets if isinstance(bound, ast.Assign) else [bound.target]
            if isinstance(targets[0], ast.Tuple):
                values = _value(bound.value, names)
                return values[[getattr(each, "id", None) for each in targets[0].elts].index(node.id)]
            return _value(bound.value, names)
        raise ValueError(f"{node.id} is no constant of the file")
    if isinstance(node, ast.JoinedStr):
        parts = []
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                spec = "" if part.format_spec is None else _value(part.format_spec, names)
                parts.append(format(_value(part.value, names), spec))
            else:
                parts.append(_value(part, names))
        return "".join(parts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _value(node.left, names) + _value(node.right, names)
    if isinstance(node, ast.Tuple | ast.List):
        values = []
        for each in node.elts:
            if isinstance(each, ast.Starred):
                values += list(_value(each.value, names))
            else:
                values.append(_value(each, names))
        return tuple(values) if isinstance(node, ast.Tuple) else values
    return ast.literal_eval(node)


def _source(node: ast.expr, names: dict[str, ast.stmt]) -> str:
    """Source of a predicate, followed by the functions and constants of the file that it uses, directly or not."""
    used: dict[str, str] = {}
    pending: list[ast.AST] = [node]
    while pending:
        for each in ast.walk(pending.pop()):
            if isinstance(each, ast.Name) and each.id in names and each.id not in used:
                used[each.id] = _code(names[each.id])
                pending.append(names[each.id])
    return "\n".join([ast.unparse(node), *(used[name] for name in sorted(used))])


def modules(stated: Stated) -> dict[str, str]:
    """The modules that a run of a claim depends on, by name, with their hashes."""
    names: dict[str, Path] = {}
    waiting = [(_module_name(stated.file), stated.file)]
    while waiting:
        name, path = waiting.pop()
        if name in names:
            continue
        names[name] = path
        if path == stated.file or name.startswith("pippin.claims.worlds."):
            waiting += [(each, file) for each, file in imported(path) if not _is_ledger(each)]
    for name in stated.uses:
        found = _file_of(name)
        if found is None:
            raise ClaimError(f"claim {stated.id!r} uses {name!r}, which is no module")
        names[name] = found
    return {name: content_hash(names[name]) for name in sorted(names)}


def imported(path: Path) -> list[tuple[str, Path]]:
    """The modules of Pippin that a file imports anywhere in it; a name out of a face is followed to its file."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "pippin":
            found += [_definition(node.module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] == "pippin"]
    return [(name, file) for name in dict.fromkeys(found) if (file := _file_of(name)) is not None]


@cache
def content_hash(path: Path) -> str:
    """SHA-256 of a module's code, without comments, docstrings and formatting."""
    return hashlib.sha256(_code(ast.parse(path.read_text(encoding="utf-8"))).encode()).hexdigest()[:16]


def _code(node: ast.AST) -> str:
    """Source of a syntax tree in one formatting, without the docstrings of functions, classes and attributes."""
    return ast.unparse(_WithoutDocstrings().visit(copy.deepcopy(node)))


class _WithoutDocstrings(ast.NodeTransformer):
    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        constant = node.value.value if isinstance(node.value, ast.Constant) else None
        return None if isinstance(constant, str) else node


def _definition(module: str, name: str) -> str:
    """The module that defines a name which another imports it from."""
    if _file_of(f"{module}.{name}") is not None:
        return f"{module}.{name}"
    path = _file_of(module)
    if path is None or path.name != "__init__.py":
        return module
    stub = path.with_suffix(".pyi")
    for node in ast.walk(ast.parse((stub if stub.is_file() else path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            source = f"{module}.{node.module}" if node.level == 1 else node.module
            if source.startswith(f"{module}.") and any(name == (alias.asname or alias.name) for alias in node.names):
                return _definition(source, name)
        elif isinstance(
            node, ast.Dict
        ):  # a table of what is loaded on first use: {"TarFlow": "pippin.generate.tarflow"}
            for key, value in zip(node.keys, node.values, strict=True):
                if getattr(key, "value", None) == name and isinstance(value, ast.Constant):
                    target = str(value.value)
                    if _file_of(target) is not None:
                        return _definition(target, name)
    return module


def _file_of(module: str) -> Path | None:
    parts = module.split(".")
    if parts[0] != "pippin":
        return None
    path = FOLDER.parent.joinpath(*parts[1:])
    if path.with_suffix(".py").is_file() and parts[1:]:
        return path.with_suffix(".py")
    return path / "__init__.py" if (path / "__init__.py").is_file() else None


def _module_name(path: Path) -> str:
    try:
        inside = path.resolve().relative_to(FOLDER.parent.parent)
    except ValueError:
        return path.stem
    return ".".join(inside.with_suffix("").parts)


def _is_ledger(module: str) -> bool:
    return module == "pippin.claims" or module in {f"pippin.claims.{name}" for name in _NOT_CLAIMS}
