"""The compiled C kernels as a shared library: found, checked and loaded. No torch: JAX calls it too."""

from __future__ import annotations

import ctypes
import warnings
from functools import cache
from pathlib import Path

from ..codegen import c_source as c_source
from . import build
from .errors import UnavailableError


class StaleError(UnavailableError):
    """The library was compiled from other sources than are there now, or is damaged."""


def _load(path: Path, fingerprint: str) -> ctypes.CDLL:
    if not build.is_whole(path):
        raise StaleError(f"{path} is not what was built: it is damaged, or its checksum is missing")
    try:
        c = ctypes.CDLL(str(path))
    except OSError as error:
        raise UnavailableError(f"the compiled kernels do not load: {error}") from error
    if not hasattr(c, "cadam_fingerprint"):
        raise StaleError(f"{path} has no fingerprint: it is no library of these kernels")
    c.cadam_fingerprint.restype = ctypes.c_char_p
    if c.cadam_fingerprint().decode() != fingerprint:
        raise StaleError(f"{path} was compiled from other rules, C sources or flags than are there now")
    return c


@cache
def package() -> ctypes.CDLL | str:
    """The library that was built with the package, or after a rule or a source was edited one that is built now; or why
    there is none."""
    if not build.LIBRARY.exists():
        return (
            "the package was installed without its compiled kernels "
            "(no C compiler was there, or CADAM_WITHOUT_KERNELS was set)"
        )
    header = c_source.header()
    try:
        return _load(build.LIBRARY, build.fingerprint(header))
    except StaleError as stale:
        try:
            return compiled("package", header, f"{stale}: compiling the kernels anew, once, which may take a minute")
        except UnavailableError as error:
            return f"{stale}, and {error}. `python -m {build.__name__}` compiles the kernels"
    except UnavailableError as error:
        return str(error)


def compiled(name: str, header: str, announced: str = "") -> ctypes.CDLL:
    """Kernels for the rules of this header, compiled on first use and kept in the user's cache."""
    fingerprint = build.fingerprint(header)

    def make(path: Path) -> None:
        if announced:
            warnings.warn(f"cadam: {announced}", RuntimeWarning, 2)
        build.build(header, path)

    try:
        path = build.cached(f"{name}-{fingerprint}.so", make)
    except (build.BuildError, OSError) as error:
        raise UnavailableError(f"no kernels could be compiled ({name}): {error}") from error
    return _load(path, fingerprint)
