"""Run Triton kernels on the CPU, in a separate process, because Triton reads TRITON_INTERPRET once, on import.

A module of cases ends with ``run_named(CASES)``; a test runs some of them by `run_cases`. All tests of a pytest process
share one server, which imports torch and Triton once and runs each script in a fork of itself. Importing this module in
such a process patches Triton's interpreter:

- Loops may have a bound that is computed by the kernel. NumPy 2.4 does not convert an array of one element to int.
- The language is patched once for a module. The interpreter would do it at every call of every function, which takes
  as long as the kernels.
- The maximum of a number and NaN is the number, as on a GPU, unless a kernel asks for NaN.
- Powers and permutations of bytes are computed by NumPy, because the device's library is not available.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NoReturn

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
    server = _server()
    assert server.stdin
    assert server.stdout
    print(json.dumps(arguments), file=server.stdin, flush=True)
    answer = server.stdout.readline()
    assert answer, "the server of Triton's interpreter has ended"
    return subprocess.CompletedProcess(arguments, *json.loads(answer))


@cache
def _server() -> subprocess.Popen[str]:
    """Start a server, which ends when its standard input is closed: with this process or before."""
    # The server imports cadam and the test modules from the same folders.
    path = os.pathsep.join(part for part in sys.path if part)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    command = [sys.executable, "-c", f"import {__name__} as interpreter; interpreter.serve()"]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def serve() -> None:
    """Read the arguments of scripts, one JSON list per line, and print the exit code and both outputs of each."""
    import torch._dynamo  # optimizers import it, which takes seconds

    torch.set_num_threads(1)
    for line in sys.stdin:
        with TemporaryFile("w+") as output, TemporaryFile("w+") as errors:
            child = os.fork()
            if not child:
                os.dup2(output.fileno(), 1)
                os.dup2(errors.fileno(), 2)
                _exit_with(json.loads(line))
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            texts = []
            for file in (output, errors):
                file.seek(0)
                texts.append(file.read())
        print(json.dumps([code, *texts]), flush=True)


def _exit_with(arguments: list[str]) -> NoReturn:
    """Run a script as Python would do with these arguments, and end this process."""
    code = 1
    try:
        if arguments[0] == "-c":
            exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = arguments
            runpy.run_path(arguments[0], run_name="__main__")
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


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
