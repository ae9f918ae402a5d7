"""The text of the language-model study: manuals and source code from packages of Debian 12.

Each domain is one kind of text: manual pages in one language, or source code in one programming language. This command
downloads the packages with `apt-get` and assembles the corpus in the folder `data/debian-text`::

    python -m cadam_paper.language_models.corpus data
"""

from __future__ import annotations

import gzip
import hashlib
import json
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from cadam.atomic_write import replace_file
from cadam.statistics.intervals import Array

from ..harness.experiment import Data

DEBIAN = Data(
    "debian text", "debian-text", "Debian 12: python -m cadam_paper.language_models.corpus data", "about 110 MB"
)
STANDARD_LIBRARY = Data("standard library", sysconfig.get_paths()["stdlib"], "Python itself", "in its folder")
"""The small corpus, which needs no download: its path is absolute, so it is not looked up below $CADAM_DATA."""
BYTES_PER_DOMAIN = 16_000_000
"""Longest text of one domain."""
LONGEST_FILE = 200_000
"""Longer files are mostly tables and generated code, so they are left out."""
HELD_OUT = 0.01
"""Share of each domain, at its end, that is never trained on."""


class CorpusError(RuntimeError):
    """Raised if the corpus is missing, damaged, or cannot be assembled."""


@dataclass(frozen=True)
class Domain:
    """One kind of text: the packages it comes from, and the files that belong to it.

    Attributes:
        name: The name, which is also the name of the file of the domain.
        packages: The names of Debian packages.
        patterns: The files, as patterns of `Path.glob` below the root of a package.
        without: Files with this word in their path are left out.
    """

    name: str
    packages: Sequence[str]
    patterns: Sequence[str]
    without: str = "\0"


def _manuals(language: str, folder: str, *packages: str) -> Domain:
    return Domain(language, packages, [f"usr/share/man/{folder}man*/*.gz"])


DOMAINS = (
    Domain("english", ("linux-doc-6.1",), ["usr/share/doc/linux-doc-6.1/Documentation/**/*.rst.gz"], "translations"),
    Domain("python", ("python3-django", "python3-sympy", "python3-sklearn"), ["usr/lib/python3/dist-packages/**/*.py"]),
    _manuals("german", "de/", "manpages-de", "manpages-de-dev"),
    Domain("c++", ("libboost1.74-dev",), ["usr/include/**/*.hpp"], "preprocessed"),
    _manuals("french", "fr/", "manpages-fr", "manpages-fr-dev"),
    Domain("perl", ("perl-modules-5.36", "perl-doc"), ["usr/share/perl/**/*.p[mlo]*"], "unicore"),
    _manuals("japanese", "ja/", "manpages-ja", "manpages-ja-dev"),
    _manuals("russian", "ru/", "manpages-ru", "manpages-ru-dev"),
)
"""The domains in the order in which the study shows them under domain shift: languages and code alternate."""


@dataclass(frozen=True)
class Corpus:
    """Texts by domain, as bytes.

    Attributes:
        name: The name of the corpus in run specs.
        train: The training text of each domain.
        held_out: The text of each domain that is never trained on.
    """

    name: str
    train: dict[str, Array]
    held_out: dict[str, Array]

    @classmethod
    def of(cls, name: str, texts: dict[str, bytes]) -> Corpus:
        """Split each text into a training part and a held-out part."""
        train, held_out = {}, {}
        for domain, text in texts.items():
            values = np.frombuffer(text, np.uint8)
            end = len(values) - int(HELD_OUT * len(values))
            train[domain], held_out[domain] = values[:end], values[end:]
        return cls(name, train, held_out)


@lru_cache(maxsize=1)
def load(name: str) -> Corpus:
    """Load a corpus by its name: `DEBIAN.name` or `STANDARD_LIBRARY.name`.

    Raises:
        CorpusError: If a file is missing or differs from the manifest of the corpus.
    """
    if name == STANDARD_LIBRARY.name:
        return standard_library()
    folder = DEBIAN.location()
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        texts = {domain.name: (folder / f"{domain.name}.txt").read_bytes() for domain in DOMAINS}
    except OSError as error:
        raise CorpusError(DEBIAN.missing() or f"{folder} is incomplete: {error}") from error
    for domain, text in texts.items():
        if hashlib.sha256(text).hexdigest() != manifest["domains"][domain]["sha256"]:
            raise CorpusError(f"{folder / domain}.txt differs from manifest.json; assemble the corpus again")
    return Corpus.of(name, texts)


def standard_library(length: int = 400_000) -> Corpus:
    """Return a small corpus of two domains: Python's standard library, and the same text with other letters.

    The second domain rotates the lower-case letters by 13 places, so that the words of the first one do not help.

    Args:
        length: Length of each domain in bytes.
    """
    folder = STANDARD_LIBRARY.location()
    text = _concatenate(folder, folder.glob("*.py"), 2 * length)
    letters = b"abcdefghijklmnopqrstuvwxyz"
    rotated = text[length:].translate(bytes.maketrans(letters, letters[13:] + letters[:13]))
    return Corpus.of(STANDARD_LIBRARY.name, {"python": text[:length], "rotated letters": rotated})


def _concatenate(root: Path, files: Iterable[Path], length: int) -> bytes:
    """Join distinct files below `root`, in the order of a hash of their paths, until the text is long enough."""
    order = sorted(files, key=lambda path: hashlib.sha256(str(path.relative_to(root)).encode()).digest())
    parts: list[bytes] = []
    seen: set[bytes] = set()
    total = 0
    for path in order:
        if not path.is_file() or total >= length:
            continue
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
        digest = hashlib.sha256(content).digest()
        if digest not in seen and len(content) <= LONGEST_FILE:
            seen.add(digest)
            parts.append(content + b"\n")
            total += len(parts[-1])
    return b"".join(parts)[:length]


def assemble(data: Path) -> Path:
    """Download the packages of all domains and write the corpus.

    Args:
        data: The folder that gets the subfolder `debian-text`.

    Returns:
        The folder of the corpus: one text per domain, and `manifest.json` with the versions of all packages.

    Raises:
        CorpusError: If a package cannot be downloaded.
    """
    folder = data / DEBIAN.path
    folder.mkdir(parents=True, exist_ok=True)
    domains, packages = {}, {}
    for number, domain in enumerate(DOMAINS, 1):
        print(f"[{number}/{len(DOMAINS)}] {domain.name}: {', '.join(domain.packages)}", flush=True)
        with tempfile.TemporaryDirectory() as scratch:
            root = Path(scratch, "root")
            for package in domain.packages:
                packages[package] = _unpack(package, Path(scratch), root)
            files = [path for pattern in domain.patterns for path in root.glob(pattern)]
            used = [path for path in files if domain.without not in str(path)]
            text = _concatenate(root, used, BYTES_PER_DOMAIN)
        replace_file(folder / f"{domain.name}.txt", text)
        domains[domain.name] = {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}
    manifest = {"domains": domains, "packages": packages}
    replace_file(folder / "manifest.json", json.dumps(manifest, indent=1).encode())
    return folder


def _unpack(package: str, scratch: Path, root: Path) -> str:
    """Download a package, unpack it below `root`, and return its version."""
    command = ["apt-get", "--quiet", "download", package]
    try:
        subprocess.run(command, cwd=scratch, check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise CorpusError("the corpus comes from Debian packages, and there is no apt-get here") from error
    except subprocess.CalledProcessError as error:
        raise CorpusError(
            f"{' '.join(command)} failed; it needs Debian 12 and apt-get update: {error.stderr}"
        ) from error
    (archive,) = scratch.glob(f"{package}_*.deb")
    subprocess.run(["dpkg-deb", "--extract", archive, root], check=True)
    return archive.name.split("_")[1]


if __name__ == "__main__":
    print(assemble(Path(sys.argv[1] if len(sys.argv) > 1 else "data")))
