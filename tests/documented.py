"""Run the code blocks of README, docs and notebooks, in the order of their page and in one folder.

A comment before a block changes how it is run:

    <!-- skip: needs a CUDA device -->            the block is not run; a skipped test shows the reason
    <!-- tested in: tests/keras/test_keras.py --> another test runs the block
    <!-- slow: a minute of computing -->          the block is run only with -m slow
    <!-- needs: clicks.csv -->                    the file of docs/your_data.md is written before the block is run
    <!-- file: model.py -->                       the block is saved under this name, and run unless it is skipped
    <!-- folder: repository -->                   the block is run in the clone

As a program it runs the blocks of one page: ``python tests/documented.py PAGE [slow]``.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
LANGUAGES = ("python", "sh")
MARKS = ("skip", "tested in", "slow", "needs", "file", "folder")
_BLOCK = re.compile(r"((?:^<!-- [^\n]* -->\n)*)^```([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"<!-- ([a-z ]+?)(?:: (.*?))? -->")
_INLINE = re.compile(r"`[^`]*`")


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    code: str
    marks: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def skip_reason(self) -> str | None:
        """The reason why this block is not run with its page, or None."""
        if "tested in" in self.marks:
            return f"tested in {self.marks['tested in']}"
        return self.marks.get("skip")


def blocks(page: Path) -> list[Block]:
    """Return the code blocks of a page."""
    if page.suffix == ".ipynb":
        cells = json.loads(page.read_text())["cells"]
        sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        return [Block(page, number, "python", source) for number, source in enumerate(sources, 1)]
    text = re.sub(r"^<!-- (?:table: .*|end) -->$", "", page.read_text(), flags=re.MULTILINE)
    return [
        Block(page, text[: found.start(2)].count("\n") + 1, found[2], found[3], dict(_MARK.findall(found[1])))
        for found in _BLOCK.finditer(text)
        if found[2] in LANGUAGES
    ]


def _markdown(page: Path) -> str:
    text = page.read_text()
    if page.suffix != ".ipynb":
        return text
    cells = json.loads(text)["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def prose(page: Path) -> list[str]:
    """Return the paragraphs, list items and headings of a page, also generated ones, without code and tables."""
    text = _without_code(page)
    text = re.sub(r"^ *\|.*\|$|^    \S.*$", "", text, flags=re.MULTILINE)
    parts = re.split(r"\n\s*\n|\n(?= *(?:[-*]|\d+\.) )|(?<=\n)(?=#)|(?<=^)(?=#)", text)
    return [_plain(re.sub(r"^\s*(?:[-*]|\d+\.|#+) ", "", part)) for part in parts if part.strip()]


def cells(page: Path) -> list[str]:
    """Return the cells of the tables of a page, also of generated ones, that have words."""
    rows = re.findall(r"^ *\|(.*)\|$", _without_code(page), re.MULTILINE)
    plain = [_plain(cell) for row in rows for cell in re.split(r"(?<!\\)\|", row)]
    return [cell for cell in plain if re.search(r"[A-Za-z]{2}", cell)]


def _without_code(page: Path) -> str:
    """Return the Markdown of a page without blocks of code, comments and HTML tags."""
    text = re.sub(r"^```.*?^```$", "\n", _markdown(page), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"<!--.*?-->|<[^>]+>", " ", text, flags=re.DOTALL)


def _plain(markdown: str) -> str:
    """Return a text in one line, with the words of its links, and `code` for each piece of code."""
    return " ".join(re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", _INLINE.sub("code", markdown)).split())


def links(page: Path) -> list[str]:
    """Return the links of a page to files of the repository."""
    text = re.sub(r"^```.*?^```$", "", _markdown(page), flags=re.MULTILINE | re.DOTALL)
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page, and of pages that it includes."""
    found: set[str] = set()
    for included in re.findall(r"^```{include} (\S+)$", _markdown(page), re.MULTILINE):
        found |= anchors(page.parent / included)
    text = re.sub(r"^```.*?^```$", "", _markdown(page), flags=re.MULTILINE | re.DOTALL)
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.strip().lower().replace("`", "")).replace(" ", "-")
        found.add(slug)
    return found


def run(page: Path, folder: Path, slow: bool) -> subprocess.CompletedProcess[str]:
    """Run the blocks of a page in a folder. The last lines of stderr name a block that failed, and its error."""
    command = [sys.executable, "-P", __file__, str(page), *(["slow"] if slow else [])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg", "CADAM_ARCHIVE": str(ROOT / "results")}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1800)


def has_work(page: Path, slow: bool) -> bool:
    found = [block for block in blocks(page) if block.skip_reason is None]
    return any("slow" in block.marks for block in found) if slow else any("slow" not in b.marks for b in found)


def main(page: Path, slow: bool) -> int:
    """Run each block in a child process after importing torch once. Cells of a notebook share a process."""
    import torch
    import torch._dynamo  # noqa: F401 (optimizers import it, which takes seconds)

    _shims(Path("bin"))
    chosen = [
        block
        for block in blocks(page)
        if (block.skip_reason is None or "file" in block.marks) and (slow or "slow" not in block.marks)
    ]
    if page.suffix == ".ipynb":
        chosen = [Block(page, 1, "python", "\n\n".join(block.code for block in chosen))]
    for block in chosen:
        if block.marks.get("needs") == "clicks.csv" and not Path("clicks.csv").exists():
            _fork(next(b.code for b in blocks(ROOT / "docs" / "your_data.md") if b.language == "python"))
        if "file" in block.marks:
            Path(block.marks["file"]).write_text(block.code)
        if block.skip_reason is not None:
            continue
        folder = ROOT if block.marks.get("folder") == "repository" else Path.cwd()
        if block.language == "python":
            code = _fork(block.code)
        else:
            code = subprocess.run(["bash", "-ec", block.code], cwd=folder, stdin=subprocess.DEVNULL).returncode
        if code:
            print(f"{block.name} ended with {code}:\n{block.code}", file=sys.stderr)
            return 1
    return 0


def _shims(folder: Path) -> None:
    """Write commands `cadam` and `python` that use this environment."""
    folder.mkdir(exist_ok=True)
    for name, module in (("cadam", " -m cadam"), ("python", "")):
        shim = folder / name
        shim.write_text(f'#!/bin/sh\nexec "{sys.executable}"{module} "$@"\n')
        shim.chmod(0o755)
    os.environ["PATH"] = f"{folder.resolve()}{os.pathsep}{os.environ['PATH']}"


def _fork(code: str) -> int:
    """Run Python code in a child process, and return its exit code."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        names = {"__name__": "__main__"}
        exec(compile(code, "block", "exec"), names)
        sys.stdout.flush()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), "slow" in sys.argv[2:]))
