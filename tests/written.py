"""What README, docs and notebooks say: sentences, words, links. ``python tests/written.py`` prints long sentences."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

AVOIDED = {
    "poison": "rejected",
    "poisoned": "rejected",
    "set aside": "rejected",
    "put aside": "rejected",
    "unusable": "rejected",
    "strange labels?": "orphan label",
    "seeds alone": "noise floor",
    "left the numbers": "diverged",
    "told right": "classified correctly",
    "rates of hindsight": "best learning rate in hindsight",
    "watched interval": "confidence sequence",
    "first arm": "baseline",
    "other arm": "treatment",
    "results/kept": "archive",
    "cells kept": "cache",
    "lends": "requires",
    "borrows": "requires",
    "let go": "release",
}
"""Words that the glossary has another word for (beside code, where old names may stand)."""
_INLINE = re.compile(r"`[^`]*`")


def _markdown(page: Path) -> str:
    text = page.read_text()
    if page.suffix != ".ipynb":
        return text
    cells = json.loads(text)["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def prose(page: Path) -> list[str]:
    """The paragraphs, list items and headings of a page: no code, no tables, nothing that is generated."""
    text = re.sub(r"^```.*?^```$", "\n", _markdown(page), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!-- table: .*?<!-- end -->", "\n", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->|<[^>]+>", " ", text, flags=re.DOTALL)
    text = re.sub(r"^ *\|.*\|$|^    \S.*$", "", text, flags=re.MULTILINE)
    parts = re.split(r"\n\s*\n|\n(?= *(?:[-*]|\d+\.) )|(?<=\n)(?=#)|(?<=^)(?=#)", text)
    plain = (re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", _INLINE.sub("code", part)) for part in parts)
    return [" ".join(re.sub(r"^\s*(?:[-*]|\d+\.|#+) ", "", part).split()) for part in plain if part.strip()]


def sentences(parts: list[str]) -> Iterator[str]:
    for part in parts:
        yield from re.split(r"(?<=[.!?])[\"')*_]*\s+(?=[A-Z\"'(*_\d]|code)", part)


def words(sentence: str) -> list[str]:
    return re.findall(r"\S*\w\S*", sentence)


def links(page: Path) -> list[str]:
    """Where a page points to within the repository."""
    text = re.sub(r"^```.*?^```$", "", _markdown(page), flags=re.MULTILINE | re.DOTALL)
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]


def anchors(page: Path) -> set[str]:
    """The headings of a page as links name them."""
    found: set[str] = set()
    text = re.sub(r"^```.*?^```$", "", _markdown(page), flags=re.MULTILINE | re.DOTALL)
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.strip().lower().replace("`", "")).replace(" ", "-")
        found.add(slug)
    return found


if __name__ == "__main__":
    from tests.documented import NOTEBOOKS, PAGES

    lengths = [(len(words(s)), page.name, s) for page in (*PAGES, *NOTEBOOKS) for s in sentences(prose(page))]
    for length, name, sentence in sorted(lengths, reverse=True):
        if length > 30:
            print(f"{length} {name}: {sentence}")
