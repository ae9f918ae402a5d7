"""Print a random sample of comments and docstrings with the code around them, for readers who rate how plain they are.

Readers rate each text as plain (understood on first reading), compressed (understood with the code next to it) or a
riddle (not understood without further files).

    python benchmarks/sample_comments.py --seed 1 --files 30 --texts 250
"""

from __future__ import annotations

import argparse
import ast
import io
import random
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("src/cadam", "paper/cadam_paper")


def texts_of(path: Path) -> list[tuple[int, int]]:
    """Return the first and last line of each docstring, attribute docstring and block of comments in a file."""
    source = path.read_text()
    spans = [
        (node.lineno, node.end_lineno or node.lineno)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    lines = source.splitlines()
    previous = (0, 0)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or token.string.startswith(("# type:", "# noqa")):
            continue
        line = token.start[0]
        stands_alone = lines[line - 1].lstrip().startswith("#")
        if stands_alone and spans and spans[-1] == previous and previous[1] == line - 1:
            previous = spans[-1] = (previous[0], line)
        else:
            previous = (line, line)
            spans.append(previous)
    return sorted(set(spans))


def main() -> None:
    """Print the sample, each text numbered and with three lines of context."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--files", type=int, default=30)
    parser.add_argument("--texts", type=int, default=250)
    arguments = parser.parse_args()
    generator = random.Random(arguments.seed)
    paths = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if texts_of(path))
    chosen = generator.sample(paths, arguments.files)
    candidates = [(path, span) for path in sorted(chosen) for span in texts_of(path)]
    sample = sorted(generator.sample(candidates, min(arguments.texts, len(candidates))))
    for number, (path, (first, last)) in enumerate(sample, 1):
        lines = path.read_text().splitlines()
        print(f"--- {number}. {path.relative_to(ROOT)}:{first}-{last}")
        print("\n".join(lines[max(0, first - 4) : last + 3]))


if __name__ == "__main__":
    main()
