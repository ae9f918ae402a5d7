"""Compiles C sources into shared libraries that need neither torch nor Python at build time.

Used by the package's own build, and at run time for a rule that is new or was edited since. Standard library only:
the package's build runs it before anything is installed, and hands it the header that the generator writes.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
LIBRARY = Path(__file__).parent / "native.so"

OTHER_SOURCES = ("tensor_snapshot", "step_replay", "per_event_models", "text_parsing")
"""The C sources that are compiled once, for every instruction set alike."""

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


def fingerprint(header: str) -> str:
    """A hash of the sources, the generated header and the compiler's flags, to tell a library that is stale."""
    digest = hashlib.sha256(header.encode())
    digest.update(repr((FLAGS, X86_64)).encode())
    for path in sorted(SOURCES.glob("*.[ch]")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def checksum_of(library: Path) -> Path:
    """The file beside a library that holds its checksum."""
    return library.with_name(f"{library.name}.sha256")


def is_whole(library: Path) -> bool:
    """Is a library what was built? One that is truncated or damaged would end the process that loads it."""
    try:
        return checksum_of(library).read_text() == hashlib.sha256(library.read_bytes()).hexdigest()
    except (OSError, UnicodeDecodeError):
        return False


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


def build(header: str, library: Path = LIBRARY, extra: Sequence[str] = ()) -> Path:
    """Compile the kernels for the rules of this header, which `codegen.c` writes."""
    kinds = X86_64 if platform.machine() in ("x86_64", "AMD64") else {"portable": []}
    stamp = f'-DFINGERPRINT="{fingerprint(header)}"'
    with tempfile.TemporaryDirectory() as scratch:
        sources = Path(scratch) / "native"
        shutil.copytree(SOURCES, sources)
        (sources / "rules.h").write_text(header)
        parts = [(sources / "kernels.c", [*flags, f"-DINSTRUCTIONS={kind}"]) for kind, flags in kinds.items()]
        parts.append((sources / "dispatch.c", [stamp]))
        parts += [(sources / f"{name}.c", []) for name in OTHER_SOURCES]
        return link(library, parts, extra)


def link(library: Path, parts: Iterable[tuple[Path, Sequence[str]]], extra: Sequence[str] = ()) -> Path:
    """Compile sources, each with flags of its own, into one library. The file appears whole or not at all."""
    command = [*compiler().split(), *FLAGS, *extra]
    library.parent.mkdir(parents=True, exist_ok=True)
    unfinished = library.with_name(f"{library.name}.{uuid.uuid4().hex}")
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled = [[*command, *flags, "-c", str(source)] for source, flags in parts]
        objects = [f"{scratch}/{number}.o" for number in range(len(compiled))]
        list(pool.map(_run, [[*one, "-o", made] for one, made in zip(compiled, objects, strict=True)]))
        try:
            _run([*command, "-shared", *objects, "-lm", "-o", str(unfinished)])
            # First: where there is a library, there is its checksum.
            checksum_of(library).write_text(hashlib.sha256(unfinished.read_bytes()).hexdigest())
            unfinished.replace(library)
        finally:
            unfinished.unlink(missing_ok=True)
    return library


def cache_path(name: str) -> Path:
    """Where a library of this name lies in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "cadam" / name


def cached(name: str, make: Callable[[Path], object]) -> Path:
    """The library of this name in the user's cache, made on first use, or anew if it is damaged.

    One process makes it, with its checksum as `link` does; others wait for it.
    """
    import fcntl

    path = cache_path(name)
    if not is_whole(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            with suppress(OSError):  # a file system without locks: then each makes its own, and the last one stays
                fcntl.flock(lock, fcntl.LOCK_EX)
            if not is_whole(path):
                make(path)
    return path


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise BuildError(f"{' '.join(command)}:\n{result.stderr.strip()}")


if __name__ == "__main__":
    from ..codegen.c_source import header

    print(build(header()))
