"""Run Triton kernels on the CPU, in a separate process, because Triton reads TRITON_INTERPRET once, on import.

A module of cases ends with ``run_named(CASES)``; a test runs some of them by `run_cases`. Importing this module in
such a process patches Triton's interpreter:

- Loops may have a bound that is computed by the kernel. NumPy 2.4 does not convert an array of one element to int.
- The language is patched once for a module. The interpreter would do it at every call of every function, which takes
  as long as the kernels.
- The maximum of a number and NaN is the number, as on a GPU, unless a kernel asks for NaN.
- Powers and permutations of bytes are computed by NumPy, because the device's library is not available.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")


ON_CUDA = (pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))


def on_cuda(test: Callable[..., None]) -> Callable[..., None]:
    """A test that needs a CUDA device."""
    for mark in ON_CUDA:
        test = mark(test)
    return test


def run_cases(module: Path, names: Iterable[str]) -> None:
    """Run some cases of a module by their names with Triton's interpreter, and show their errors."""
    done = _run([str(module), *names])
    assert done.returncode == 0, done.stdout + done.stderr


def interpreted(source: str) -> subprocess.CompletedProcess[str]:
    """Run a script whose Triton kernels run on the CPU."""
    return _run(["-c", f"import {__name__}\n{source}"])


def run_named(cases: Mapping[str, Callable[[], None]]) -> None:
    """Run the cases that the command line names."""
    for name in sys.argv[1:]:
        print(name, flush=True)
        cases[name]()


def _run(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    # The process imports cadam and the test modules from the same folders.
    path = os.pathsep.join(part for part in sys.path if part)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)


def _patch() -> None:
    import numpy
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.runtime import interpreter

    lang, lang_tensor = interpreter._patch_lang, interpreter._patch_lang_tensor
    patched: set[str] = set()

    class Once(interpreter._LangPatchScope):  # type: ignore[misc]
        def restore(self) -> None:
            pass

    def patch_lang(fn: Any) -> Once:
        if fn.__module__ not in patched:
            patched.add(fn.__module__)
            lang(fn)
        return Once()

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        lang_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def power(x: Any, y: Any) -> Any:
        x, y = tl.broadcast(x, y)
        return tl.tensor(interpreter.TensorHandle(numpy.power(x.handle.data, y.handle.data), x.handle.dtype), x.type)

    def byte_perm(x: Any, y: int, which: Any) -> Any:
        """Return four bytes, each selected by four bits from the eight bytes of x and zero."""
        x, which = tl.broadcast(x, which)
        whole, chosen = x.handle.data.astype(numpy.uint32), which.handle.data
        made = sum((whole >> 8 * (chosen >> 4 * k & 3) & 0xFF) * (chosen >> 4 * k & 4 == 0) << 8 * k for k in range(4))
        return tl.tensor(interpreter.TensorHandle(numpy.asarray(made).astype(numpy.int32), x.handle.dtype), x.type)

    libdevice.pow, libdevice.byte_perm = power, byte_perm
    interpreter._patch_lang, interpreter._patch_lang_tensor = patch_lang, patch_lang_tensor
    interpreter.InterpreterBuilder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, numpy.fmax)


if os.environ.get("TRITON_INTERPRET") == "1":
    _patch()
