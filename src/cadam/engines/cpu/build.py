"""Compiles the C kernels into one shared library that needs neither torch nor Python at build time.

Used by the package's own build, and at run time for a rule that is not in the catalogue. Standard library only:
the package's build runs it before anything is installed.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

SOURCES = Path(__file__).parent / "native"
LIBRARY = Path(__file__).parent / "native.so"

USUAL = ("cc", "gcc", "clang")

FLAGS = [
    "-std=gnu11",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",  # the same bits with and without fused multiply-add
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wall",
    "-Wextra",
]

X86_64 = {
    "portable": ["-msse2"],
    "avx2": ["-mavx2", "-mf16c"],
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mf16c", "-mprefer-vector-width=512"],
}


class BuildError(Exception):
    """No library was made; the message says why."""


class NoCompilerError(BuildError):
    """There is no C compiler, and none was asked for."""


def fingerprint(rules_header: str | None = None) -> str:
    """A hash of the sources, to tell a library that is out of date."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.glob("*.[ch]")):
        text = rules_header if rules_header is not None and path.name == "rules.h" else path.read_text()
        digest.update(path.name.encode() + text.encode())
    return digest.hexdigest()[:16]


def compiler() -> str:
    """The C compiler: $CC, which may hold arguments too, or else the first of the usual names that is there."""
    asked = os.environ.get("CC", "").strip()
    if asked:
        if not shutil.which(asked.split()[0]):
            raise BuildError(f"$CC is {asked!r}, which is not there")
        return asked
    for name in USUAL:
        if shutil.which(name):
            return name
    raise NoCompilerError(f"no C compiler found (looked for $CC, {', '.join(USUAL)})")


def build(library: Path = LIBRARY, rules_header: str | None = None, extra: Sequence[str] = ()) -> Path:
    """Compile the library, with another rules.h if one is given. The file appears whole or not at all."""
    command = [*compiler().split(), *FLAGS, *extra]
    kinds = X86_64 if platform.machine() in ("x86_64", "AMD64") else {"portable": []}
    with tempfile.TemporaryDirectory() as scratch:
        sources = Path(scratch) / "native"
        shutil.copytree(SOURCES, sources)
        if rules_header is not None:
            (sources / "rules.h").write_text(rules_header)
        objects = []
        for kind, flags in kinds.items():
            objects.append(f"{scratch}/{kind}.o")
            _run([*command, *flags, f"-DINSTRUCTIONS={kind}", "-c", f"{sources}/kernels.c", "-o", objects[-1]])
        stamp = f'-DFINGERPRINT="{fingerprint(rules_header)}"'
        for part in ("dispatch", "tensors", "prepared", "criteo"):
            objects.append(f"{scratch}/{part}.o")
            _run([*command, stamp, "-c", f"{sources}/{part}.c", "-o", objects[-1]])
        library.parent.mkdir(parents=True, exist_ok=True)
        unfinished = library.with_name(f"{library.name}.{os.getpid()}")
        _run([*command, "-shared", *objects, "-o", str(unfinished)])
        unfinished.replace(library)
    return library


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise BuildError(f"{' '.join(command)}:\n{result.stderr.strip()}")


if __name__ == "__main__":
    print(build())
