"""Kernels generated from rules: without torch, the same in every process, and printed by a command."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import cadam
from cadam.codegen import triton_source
from cadam.codegen.kernel_spec import KernelSpec, kernel_specs
from cadam.rules import RULES
from cadam.rules.defaults import defaults

SOURCE = Path(cadam.__file__).parent.parent
BARE = "import sys; sys.modules.update(dict.fromkeys(('torch', 'numpy', 'triton')))\n"
"""Makes imports of torch, numpy and Triton fail, as in the environment that builds the package."""


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    environment = {**os.environ, **environment}
    return subprocess.run(command, cwd=SOURCE, env=environment, capture_output=True, text=True, timeout=120)


def test_the_c_header_is_generated_without_torch() -> None:
    done = python("-c", BARE + "from cadam.codegen import c_source as c; print(c.header())")
    assert done.returncode == 0, done.stderr
    assert "ELEMENT(adam_max_exp_avg_sq)(" in done.stdout


def test_importing_cadam_imports_no_torch() -> None:
    done = python("-c", BARE + "import cadam; print(cadam.__version__, cadam.Rule.__name__, 'CAdam' in dir(cadam))")
    assert done.stdout.split() == [cadam.__version__, "Rule", "True"], done.stderr


def test_every_public_name_can_be_imported() -> None:
    for name in cadam.__all__:
        assert getattr(cadam, name).__name__.rpartition(".")[2] == name


KEYS = """
import inspect
from cadam import Rule, Step
from cadam.codegen import triton_source as triton
from cadam.codegen.kernel_spec import kernel_specs
from cadam.rules import RULES
own = Rule("own", {"lr": 0.1}, lambda o: {"m": 0.0}, lambda t, o, f: {}, lambda g, s, c, f: Step(g, s.m, {"m": g}))
for spec in kernel_specs([*RULES.values(), own]):
    module = triton.module(spec.name, triton.source(spec))
    for kind in ("dense", "rows", "spanning_rows"):
        kernel = getattr(module, f"{spec.name}_{kind}")
        print(module.__name__, kernel.fn.__code__.co_filename, kernel.cache_key)
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_only_values_that_no_moment_depends_on_are_approximate_in_triton() -> None:
    def update(g: Any, s: Any, c: Any, f: Any) -> cadam.Step:
        root = f.sqrt(f.square(g))
        size = s.size + root / (f.sqrt(root) + c.eps)
        return cadam.Step(g / (f.sqrt(size) + c.eps), g, {"size": size})

    rule = cadam.Rule(
        "rooted", {"lr": 0.1, "eps": 0.1}, lambda o: {"size": 0.0}, _eps, update, moments={"size": "positive"}
    )
    spec = KernelSpec.of(rule, {**defaults(rule), "moments": "int8"})
    op_of = {op.out.name: op for op in spec.program.ops}
    rounded = [op_of[name].kind for name, how in triton_source.fast_expressions(spec).items() if "approximate" in how]
    assert sorted(rounded) == ["div", "sqrt"]
    assert triton_source.fast_expressions(KernelSpec.of(rule, defaults(rule))) == {}


def _eps(t: Any, o: Any, f: Any) -> dict[str, Any]:
    return {"eps": o["eps"]}


def test_triton_finds_in_its_cache_what_another_process_compiled() -> None:
    """The key of a kernel in the cache depends on its source and line; its name is the same in every process too."""
    first, second = (python("-c", KEYS, PYTHONHASHSEED=seed).stdout.splitlines() for seed in "12")
    assert first == second
    assert len(set(first)) == 3 * (len(kernel_specs(RULES.values())) + 1)


def test_the_tool_prints_the_kernels_of_a_rule() -> None:
    tool = str(SOURCE.parent / "tools" / "show_kernels.py")
    both, only_c, only_triton = (python(tool, "sgdm", *more).stdout for more in ((), ("--c",), ("--triton",)))
    assert both == only_c + only_triton
    for name in ("sgdm", "sgdm_ahead", "sgdm_without_momentum_buffer"):
        assert f"ELEMENT({name})(" in only_c
        assert f"def {name}_dense(" in only_triton
