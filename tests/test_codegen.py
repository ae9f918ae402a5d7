"""Kernels from rules: made without torch, the same everywhere, and shown to whoever wants to read them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import cadam

SOURCE = Path(cadam.__file__).parent.parent
BARE = "import sys; sys.modules.update(dict.fromkeys(('torch', 'numpy', 'triton')))\n"
"""Neither torch nor numpy nor Triton can be imported: what the environment that builds the package is like."""


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=SOURCE, capture_output=True, text=True, timeout=120)


def test_the_c_header_is_generated_without_torch() -> None:
    done = python("-c", BARE + "from cadam.codegen import c; print(c.header())")
    assert done.returncode == 0, done.stderr
    assert "ELEMENT(adam_max_exp_avg_sq)(" in done.stdout


def test_importing_cadam_imports_no_torch() -> None:
    done = python("-c", BARE + "import cadam; print(cadam.__version__, cadam.Rule.__name__, 'CAdam' in dir(cadam))")
    assert done.stdout.split() == [cadam.__version__, "Rule", "True"], done.stderr


def test_every_public_name_is_where_it_says() -> None:
    for name in cadam.__all__:
        assert getattr(cadam, name).__name__.rpartition(".")[2] == name
