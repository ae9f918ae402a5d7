"""Files of the project, such as pyproject.toml and CONTRIBUTING.md, agree with the code."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import cadam

ROOT = Path(__file__).parent.parent


def test_every_file_names_the_version_of_the_package() -> None:
    paper = tomllib.loads((ROOT / "paper" / "pyproject.toml").read_text())["project"]["version"]
    citation = re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    newest = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    assert {paper, *citation, newest} == {cadam.__version__}


def test_every_command_that_a_workflow_or_guide_makes_is_a_target() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    texts = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob(".github/workflows/*.yml")]
    used = {
        name for path in texts for name in re.findall(r"(?:`|run: |^)make ([a-z-]+)", path.read_text(), re.MULTILINE)
    }
    assert used
    assert used <= targets
    matrix = re.search(r"target: \[(.+)\]", (ROOT / ".github" / "workflows" / "tests.yml").read_text())
    assert matrix
    assert set(matrix[1].split(", ")) <= targets


def test_every_path_of_the_guide_for_contributors_exists() -> None:
    """Paths start at the root of the repository or, for the packages, at src/cadam."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    names = re.findall(r"`((?:[a-z_{},]+/)+(?:[a-z_]+\.[a-z]+)?)`", text)
    assert len(names) > 50
    missing = []
    for name in names:
        start, _, rest = name.partition("{")
        choices, _, end = rest.partition("}")
        for path in [f"{start}{choice}{end}" for choice in choices.split(",")]:
            if not (ROOT / path).exists() and not (ROOT / "src" / "cadam" / path).exists():
                missing.append(path)
    assert missing == []


def test_modules_that_the_documentation_uses_as_attributes_need_no_import() -> None:
    code = "import cadam; cadam.optim.ddp.gather_rows; cadam.optim.sparse_update.update_; cadam.sparse_update.new_state"
    subprocess.run([sys.executable, "-c", code], check=True)
