"""The compiled C kernels, called with tensors of torch."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from functools import cache

import torch

from ..codegen import c_source as c_source
from ..codegen.kernel_spec import KernelSpec
from ..rules import RULES, Rule
from . import shared_library
from .errors import UnavailableError as UnavailableError
from .structs import Words
from .torch_symbols import REQUIRED, torch_symbols


@dataclass(frozen=True)
class Library:
    """A loaded library of kernels, with the functions of torch that it calls."""

    c: ctypes.CDLL
    torch: Words
    """The addresses of the functions that it calls."""

    @property
    def parallel_for(self) -> int:
        return int(self.torch[0])


def _required() -> Words:
    """The functions of torch that the kernels call; raises UnavailableError if a required one is missing."""
    found = torch_symbols()
    if REQUIRED in found.missing:
        raise UnavailableError(
            f"torch {torch.__version__} lacks the symbol {REQUIRED}, which the C kernels require (torch 2.10 and later "
            "have it)"
        )
    return found.addresses


def _typed(c: ctypes.CDLL) -> Library:
    """A library that was loaded, with the types of its functions."""
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    c.cadam_read_steps.argtypes = [pointer, number, pointer]
    c.cadam_dense_step.argtypes = [pointer, number, pointer, number, number, pointer]
    c.cadam_snapshot_tensors.argtypes = [pointer, pointer, number, number, number, number, pointer, pointer, pointer]
    c.cadam_snapshot_tensors.restype = number
    c.cadam_memory_traffic.argtypes = [pointer, pointer, pointer, pointer, number, pointer]
    c.cadam_check_ids.argtypes = [pointer, number, number, pointer]
    c.cadam_check_ids.restype = number
    for events in (c.cadam_learn_per_event, c.cadam_score_events):
        events.argtypes, events.restype = [pointer, pointer], number
    for texts in (c.cadam_split_lines, c.cadam_read_values):
        texts.argtypes, texts.restype = [pointer], None
    for rows in (c.cadam_sparse_step, c.cadam_sparse_squared_norm):
        rows.argtypes, rows.restype = [pointer, pointer, number, pointer, pointer, number, pointer], number
    here = ctypes.cast(c.cadam_run_inline, ctypes.c_void_p).value
    os.register_at_fork(after_in_child=lambda: _work_alone(here or 0))
    return Library(c, _required())


def _work_alone(here: int) -> None:
    """A forked child has none of its parent's threads, and would wait for them for ever."""
    torch_symbols().addresses[0] = here


@cache
def package_library() -> Library:
    """The library of the package. Raises UnavailableError if it cannot be used."""
    c = shared_library.package()
    if isinstance(c, str):
        raise UnavailableError(c)
    return _typed(c)


@cache
def _own(rule: Rule) -> Library:
    """Kernels for a rule that is not the package's own."""
    return _typed(shared_library.compiled(rule.name, c_source.header([rule])))


@cache
def find(spec: KernelSpec) -> tuple[Library, int] | UnavailableError:
    """Return the library that has a kernel for a rule and the kernel's number, or the error that says why none has."""
    try:
        _required()
        library = package_library() if RULES.get(spec.rule.name) is spec.rule else _own(spec.rule)
    except UnavailableError as reason:
        return reason
    kernel = int(library.c.cadam_kernel_index(spec.without_storages.name.encode()))
    if kernel < 0:
        return UnavailableError(
            f"has no kernel for {spec.name}: options that lead there must be in the rule's variants"
        )
    return library, kernel
