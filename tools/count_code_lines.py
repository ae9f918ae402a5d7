"""Count the lines of code in a folder: lines that are neither empty nor comments nor docstrings.

    python tools/count_code_lines.py [FOLDER] [--files]

The counts are printed by the first level of the folder (src/cadam by default), and with --files by file too.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
"""Types of tokens that do not make a line count."""


def count_code_lines(source: str) -> int:
    """Count the lines of Python source code that have code on them."""
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            code.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))  # a docstring
    return len(code)


def print_counts(counts: Counter[str]) -> None:
    """Print counts with their names, the largest first."""
    for name, count in counts.most_common():
        print(f"{count:7,} {name}")


def main() -> None:
    """Print the counts of a folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("src/cadam"), help="default: src/cadam")
    parser.add_argument("--files", action="store_true", help="also print the counts of all files")
    arguments = parser.parse_args()
    files = Counter(
        {
            str(path.relative_to(arguments.folder)): count_code_lines(path.read_text("utf-8"))
            for path in sorted(arguments.folder.rglob("*.py"))
        }
    )
    parts: Counter[str] = Counter()
    for name, count in files.items():
        parts[Path(name).parts[0]] += count
    print_counts(parts)
    print(f"{parts.total():7,} in total")
    if arguments.files:
        print_counts(files)


if __name__ == "__main__":
    main()
