"""C code under AddressSanitizer: compilation, and scripts that call it with the runtime of the sanitizer preloaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cadam.native import build

FLAGS = ["-O0", "-g", "-fsanitize=address,undefined"]  # at -O1 the compiler takes five times as long


def runtime() -> str:
    """Return the path of the runtime to preload. The test is skipped if the compiler has none."""
    try:
        compiler = build.compiler()
    except build.BuildError as error:
        pytest.skip(f"no compiler for AddressSanitizer: {error}")
    found = subprocess.run([*compiler.split(), "-print-file-name=libasan.so"], capture_output=True, text=True)
    path = found.stdout.strip()
    if not os.path.isabs(path):
        pytest.skip("the compiler has no AddressSanitizer")
    return path


def check(driver: Path, library: Path, mode: str, *arguments: str) -> None:
    """Run a script. The sanitizer must report nothing in the mode ``clean``, and an error in any other mode."""
    environment = {"LD_PRELOAD": runtime(), "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "halt_on_error=1"}
    result = subprocess.run(
        [sys.executable, str(driver), str(library), mode, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if mode != "clean":
        assert "heap-buffer-overflow" in result.stderr
    else:
        assert result.returncode == 0, result.stderr
        assert result.stdout.strip() == "clean"
