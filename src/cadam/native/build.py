"""Compile C sources into shared libraries, which need neither torch nor Python.

The package's build uses this module before anything is installed, so it needs only the standard library and receives
the header that the code generator writes. At run time it compiles rules that are new or were edited. Run as a script,
it compiles the package's library in place.
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
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
LIBRARY = Path(__file__).parent / "native.so"

GENERATORS = ("rules/*.py", "codegen/c_source.py", "codegen/kernel_spec.py", "codegen/trace.py")
"""The Python files that the generated header depends on, relative to the package."""

OTHER_SOURCES = (
    "dense_update",
    "sparse_update",
    "per_event_models",
    "batch_inputs",
    "id_index",
    "text_parsing",
    "tensor_snapshot",
    "containers",
    "step_replay",
    "structs",
)
"""The C sources that are compiled once, for every instruction set alike."""

COMPILERS = ("cc", "gcc", "clang")
"""The compilers that are tried where $CC is not set."""

FLAGS = [
    "-std=gnu11",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",  # Fused multiply-add would round differently on processors that have it.
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wall",
    "-Wextra",
    "-Werror=implicit-function-declaration",
]
"""Flags for all sources."""

X86_64_FLAGS = {
    "portable": ["-msse2"],
    "avx2": ["-mavx2", "-mf16c"],
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mf16c", "-mprefer-vector-width=512"],
}
"""Flags by the name of the instruction set. The library chooses among them when it is loaded."""


class BuildError(Exception):
    """A library could not be compiled. The message says why."""


class NoCompilerError(BuildError):
    """No C compiler was found, and $CC does not name one."""


def fingerprint(header: str = "") -> str:
    """Return a hash of everything that a library is compiled from, by which an outdated library is recognized.

    Reading the files of the package's rules takes less time than generating their header from them.

    Args:
        header: The header, if its rules do not belong to the package.
    """
    digest = hashlib.sha256(repr((header, FLAGS, X86_64_FLAGS)).encode())
    package = Path(__file__).parents[1]
    for path in sorted([*SOURCES.glob("*.[ch]"), *(path for name in GENERATORS for path in package.glob(name))]):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def checksum_path(library: Path) -> Path:
    """Return the path of the file that holds the checksum of a library."""
    return library.with_name(f"{library.name}.sha256")


def is_intact(library: Path) -> bool:
    """Whether a library has the checksum it was built with. Loading a truncated library would end the process."""
    try:
        return checksum_path(library).read_text() == hashlib.sha256(library.read_bytes()).hexdigest()
    except (OSError, UnicodeDecodeError):
        return False


def compiler() -> str:
    """Return the C compiler: $CC, which may contain arguments, or the first of COMPILERS that is installed.

    Raises:
        BuildError: $CC names a compiler that does not exist.
        NoCompilerError: No compiler was found.
    """
    command = os.environ.get("CC", "").strip()
    if command:
        if not shutil.which(command.split()[0]):
            raise BuildError(f"$CC is {command!r}, but no such program was found")
        return command
    for name in COMPILERS:
        if shutil.which(name):
            return name
    raise NoCompilerError(f"no C compiler was found; tried $CC, {', '.join(COMPILERS)}")


def build(header: str, library: Path = LIBRARY, extra: Sequence[str] = (), stamp: str | None = None) -> Path:
    """Compile the kernels for the rules of a header.

    Args:
        header: The content of rules.h, which `codegen.c_source.header` returns.
        library: The file to write.
        extra: More compiler flags.
        stamp: The fingerprint that the library reports, by default that of the package's rules.

    Returns:
        The path of the library.

    Raises:
        BuildError: There is no compiler, or it failed.
    """
    instruction_sets = X86_64_FLAGS if platform.machine() in ("x86_64", "AMD64") else {"portable": []}
    with tempfile.TemporaryDirectory() as scratch:
        sources = Path(scratch) / "native"
        shutil.copytree(SOURCES, sources)
        (sources / "rules.h").write_text(header)
        parts = [(sources / "kernels.c", [*flags, f"-DINSTRUCTIONS={n}"]) for n, flags in instruction_sets.items()]
        parts.append((sources / "instruction_sets.c", [f'-DFINGERPRINT="{stamp or fingerprint()}"']))
        parts += [(sources / f"{name}.c", []) for name in OTHER_SOURCES]
        return link(library, parts, extra)


def link(library: Path, parts: Iterable[tuple[Path, Sequence[str]]], extra: Sequence[str] = ()) -> Path:
    """Compile sources in parallel and link them. The library appears complete or not at all.

    Args:
        library: The file to write; its checksum is written beside it.
        parts: The source files, each with its own flags.
        extra: Flags for all of them.

    Returns:
        The path of the library.

    Raises:
        BuildError: There is no compiler, or it failed.
    """
    command = [*compiler().split(), *FLAGS, *extra]
    library.parent.mkdir(parents=True, exist_ok=True)
    unfinished = library.with_name(f"{library.name}.{uuid.uuid4().hex}")
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(os.cpu_count()) as pool:
        objects, commands = [], []
        for number, (source, flags) in enumerate(parts):
            objects.append(f"{scratch}/{number}.o")
            commands.append([*command, *flags, "-c", str(source), "-o", objects[-1]])
        list(pool.map(_run, commands))
        try:
            _run([*command, "-shared", *objects, "-lm", "-o", str(unfinished)])
            # The checksum is written first, so that a library is never without one.
            checksum_path(library).write_text(hashlib.sha256(unfinished.read_bytes()).hexdigest())
            unfinished.replace(library)
        finally:
            unfinished.unlink(missing_ok=True)
    return library


def cache_path(name: str) -> Path:
    """Return the path of a library in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "cadam" / name


def cached(name: str, make: Callable[[Path], object]) -> Path:
    """Return the path of a library in the user's cache, compiling it on first use or if it is damaged.

    Only one process compiles; others wait for it.

    Args:
        name: The file name of the library.
        make: Compiles the library to a path and writes its checksum, as `link` does.
    """
    import filelock  # A dependency of torch. The package's build does not have it and does not use the cache.

    path = cache_path(name)
    if not is_intact(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(path.with_suffix(".lock")):
            if not is_intact(path):
                make(path)
    return path


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise BuildError(f"{' '.join(command)}:\n{result.stderr.strip()}")


if __name__ == "__main__":
    from ..codegen.c_source import header

    print(build(header()))
