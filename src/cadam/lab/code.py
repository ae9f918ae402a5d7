"""A fingerprint of the code that results depend on. Comments, docstrings, type hints and layout do not count."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

OPTIMIZERS = ("cadam.catalog", "cadam.defaults", "cadam.options", "cadam.rules", "cadam.update")
"""What every experiment depends on: what a step computes.

Not how it runs: tests hold every engine to the same numbers, and making one faster must not cost days of GPU time.
"""

COMPILED = (".c", ".h")


@lru_cache
def fingerprint(sources: tuple[str, ...]) -> str:
    """A hash of these modules and packages and of the optimizers."""
    total = hashlib.sha256()
    for name in sorted({*OPTIMIZERS, *sources}):
        for path in files(name):
            total.update(f"{name}/{path.name}\n".encode())
            total.update(meaning(path))
    return total.hexdigest()


def files(module: str) -> Iterator[Path]:
    """The source files of a module, or of all of a package."""
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise ValueError(f"the sources of an experiment must be modules; there is no {module!r}")
    if spec.submodule_search_locations is None:
        yield Path(spec.origin)
        return
    for folder in spec.submodule_search_locations:
        yield from (path for path in sorted(Path(folder).rglob("*")) if path.suffix in (".py", *COMPILED))


def meaning(path: Path) -> bytes:
    """What a source file does: Python without its comments, docstrings, type hints and layout; others as they are."""
    if path.suffix != ".py":
        return path.read_bytes()
    tree = ast.parse(path.read_bytes(), filename=str(path))
    hints = {"TypedDict"}
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            node.returns = None
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = list(_that_does_something(body, hints)) or [ast.Pass()]  # type: ignore[attr-defined]
    return _plain(tree).encode()


def _plain(node: object) -> str:
    """A syntax tree as text, the same from every version of Python: fields that only some of them have are empty."""
    if isinstance(node, ast.AST):
        fields = ((name, value) for name, value in ast.iter_fields(node) if value not in (None, []))
        return f"{type(node).__name__}({', '.join(f'{name}={_plain(value)}' for name, value in fields)})"
    if isinstance(node, list):
        return f"[{', '.join(map(_plain, node))}]"
    return repr(node)


def _that_does_something(body: Iterable[ast.stmt], hints: set[str]) -> Iterator[ast.stmt]:
    """Statements that are neither texts nor for type checkers alone. `hints` are the classes of the latter kind."""
    for statement in body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            if not isinstance(statement.value.value, str):
                yield statement
        elif isinstance(statement, ast.ClassDef) and hints & {_name(base) for base in statement.bases}:
            hints.add(statement.name)
        elif not (isinstance(statement, ast.If) and _name(statement.test) == "TYPE_CHECKING" and not statement.orelse):
            yield statement


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else ""
