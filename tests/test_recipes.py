"""The programs of docs/recipes.md and docs/migrate.md run where their packages are installed."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.documented import ROOT, Block, blocks

RECIPES = [
    block
    for page in ("recipes", "migrate")
    for block in blocks(ROOT / "docs" / f"{page}.md")
    if block.marks.get("tested in") == "tests/test_recipes.py"
]


FURTHER_PACKAGES = {"timm": {"torchvision"}}
"""Packages that another package imports without saying what is missing."""


def packages(code: str) -> set[str]:
    """Return the top-level packages that a program imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            found.add(node.module.partition(".")[0])
    return found


@pytest.mark.parametrize("block", RECIPES, ids=lambda block: block.name)
def test_the_recipe_runs(block: Block, tmp_path: Path) -> None:
    needed = packages(block.code)
    needed |= {name for package in needed for name in FURTHER_PACKAGES.get(package, ())}
    missing = sorted(name for name in needed if find_spec(name) is None)
    if missing:
        pytest.skip(f"{block.name}: {', '.join(missing)} is not installed")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", block.code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def test_packages_of_a_program_are_found() -> None:
    assert packages("import a.b\nfrom c.d import e\nfrom . import f\n") == {"a", "c"}
